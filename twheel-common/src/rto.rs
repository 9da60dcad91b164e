//! Retransmission timers of the two sides of a connection, seen from outside: RFC 6298.
//!
//! Each side has a timer as its own stack has one: it starts when data goes out with nothing outstanding, starts anew
//! when an acknowledgment advances, and is stopped, lazily, when all is acknowledged. Times are microseconds of 32
//! bits, compared by their distance.
//!
//! What is seen decides, and not what is known: where this stands in the middle of a path, a round trip is the part
//! of it between here and whoever acknowledges. CPUs that see the two directions of a connection at once write here
//! without a lock; what is torn by that is a sample, or a start that is a moment late.

use crate::{
    event::Pace,
    segment::{Segment, tcp},
};

/// What is known of one side's sending. All zeros is "nothing yet".
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Side {
    /// The highest acknowledgment of what it has sent.
    pub una: u32,
    /// [`Side::TIMING`] and such; from bit 8 on how often the timer has expired since there was progress; from bit 16
    /// on retransmissions seen, at most 65,535.
    state: u32,
    /// When the timer was started; means something while anything is outstanding.
    start: u32,
    /// Smoothed round-trip time; 0 until there was a sample.
    pub srtt: u32,
    /// Its variation.
    pub rttvar: u32,
    /// The sequence number behind the segment that is being timed.
    timed: u32,
    /// When that was sent.
    timed_at: u32,
}

/// The rest of it, which few packets need.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rare {
    /// Timestamp value (RFC 7323) of the segment that is being timed, if it has one.
    timed_value: u32,
    /// When what is oldest was last sent again.
    again_at: u32,
    /// Where a segment is missing before what was sent last: from here,
    gap: u32,
    /// up to here,
    gap_end: u32,
    /// since then.
    gap_at: u32,
    /// And up to here its side has sent: a flow's position waits before a gap.
    top: u32,
}

/// A value of the map `RTOS`: a flow's timers, the key's low endpoint's first. What nearly every packet and visit
/// needs is in one cache line.
#[repr(C, align(128))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Timers {
    /// Of its sides.
    pub sides: [Side; 2],
    /// When the wheel next visits the flow, low 32 bits of the clock, units.
    pub visit: u32,
    /// Room.
    pub reserved: u32,
    /// The rest of what is known of its sides.
    pub rare: [Rare; 2],
    /// Room.
    pub more: [u32; 4],
}

/// Bounds of the timer, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// `--rto-min`: what is added to the round trip at least, as in Linux (`tcp_rto_min`).
    pub min: u32,
    /// `--rto-max`.
    pub max: u32,
}

/// Those bounds, and the time, microseconds, or what tells it.
#[derive(Clone, Copy, Debug)]
pub struct Timing<N> {
    /// The bounds.
    pub limits: Limits,
    /// The time.
    pub now: N,
}

/// How much may be acknowledged that did not come by here.
const UNSEEN: u32 = 1 << 24;
/// Before there was a sample (RFC 6298, 2.1).
const INITIAL: u32 = 1_000_000;

/// What a side's timer says when it is looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// Nothing is outstanding.
    Stopped,
    /// It expires in so many microseconds.
    Runs(u32),
    /// It has expired.
    Expired,
}

impl Side {
    /// A segment is being timed.
    const TIMING: u32 = 1 << 0;
    /// And has a timestamp.
    const STAMPED: u32 = 1 << 1;
    /// What is oldest was sent again when the timer was due.
    const AGAIN: u32 = 1 << 2;
    /// The other side takes nothing: its window is closed.
    const CLOSED: u32 = 1 << 3;
    /// There is a gap.
    const GAP: u32 = 1 << 4;
    /// Something was seen of it.
    const SEEN: u32 = 1 << 5;
    /// All that is outstanding was sent again, once: its timer has expired, or a probe for the loss of the tail was due
    /// at the same time. What comes next tells.
    const PROBED: u32 = 1 << 6;
    const EXPIRIES: u32 = 8;
    const RETRANSMISSIONS: u32 = 16;

    /// A side of which this is the first segment that was seen.
    #[inline(always)]
    fn first(rare: &mut Rare, segment: &Segment, now: u32) -> Self {
        let mut side = Self {
            una: segment.seq,
            start: now,
            state: Self::SEEN,
            ..Self::default()
        };
        side.time(rare, segment, now);
        side
    }

    /// What there is to report.
    #[inline(always)]
    pub fn pace(&self, limits: Limits) -> Pace {
        Pace {
            srtt: self.srtt,
            rto: self.rto(limits),
            retransmissions: self.retransmissions(),
        }
    }

    /// How often the timer has expired since there was progress: the exponent of its backoff, too.
    #[inline(always)]
    pub fn expiries(&self) -> u32 {
        self.state >> Self::EXPIRIES & 0xff
    }

    /// Segments that were sent again, as far as that was seen.
    #[inline(always)]
    pub fn retransmissions(&self) -> u32 {
        self.state >> Self::RETRANSMISSIONS
    }

    #[inline(always)]
    fn has(&self, flag: u32) -> bool {
        self.state & flag != 0
    }

    /// The sequence number behind what was sent: the side's position, or behind the gap at which that waits.
    #[inline(always)]
    pub fn highest(&self, rare: &Rare, position: u32) -> u32 {
        match self.has(Self::GAP) && rare.top.wrapping_sub(position) as i32 > 0 {
            true => rare.top,
            false => position,
        }
    }

    /// Bytes sent and not acknowledged, where `highest` is the sequence number behind what was sent.
    #[inline(always)]
    pub fn outstanding(&self, highest: u32) -> u32 {
        let outstanding = highest.wrapping_sub(self.una);
        if outstanding as i32 > 0 {
            outstanding
        } else {
            0
        }
    }

    /// The retransmission timeout without backoff (RFC 6298, 2.3; with the variation's part bounded from below, as
    /// `tcp_set_rto` in `net/ipv4/tcp_input.c` has it).
    #[inline(always)]
    pub fn base(&self, limits: Limits) -> u32 {
        if self.srtt == 0 {
            return at_most(INITIAL, limits.max);
        }
        let margin = at_least(self.rttvar.saturating_mul(4), limits.min);
        at_most(self.srtt.saturating_add(margin), limits.max)
    }

    /// And with it.
    #[inline(always)]
    pub fn rto(&self, limits: Limits) -> u32 {
        let backed_off = u64::from(self.base(limits)) << (self.expiries() & 31);
        if backed_off < u64::from(limits.max) {
            backed_off as u32
        } else {
            limits.max
        }
    }

    /// The side has sent a segment; `highest` is as before that. Whether the timer has started, or expires by that:
    /// [`timer`](Self::timer) says something that it did not say before.
    #[inline(always)]
    pub fn sent(
        &mut self,
        rare: &mut Rare,
        highest: u32,
        segment: &Segment,
        timing: Timing<impl Fn() -> u32>,
    ) -> bool {
        let now = timing.now;
        if segment.end == segment.seq {
            return false;
        }
        if !self.has(Self::SEEN) {
            *self = Self::first(rare, segment, now());
            return true;
        }
        if segment.seq.wrapping_sub(highest) as i32 >= 0 {
            return self.sent_new(rare, highest, segment, now);
        }
        let timing = Timing {
            limits: timing.limits,
            now: now(),
        };
        self.sent_again(rare, highest, segment, timing)
    }

    #[inline(always)]
    fn sent_new(
        &mut self,
        rare: &mut Rare,
        highest: u32,
        segment: &Segment,
        now: impl Fn() -> u32,
    ) -> bool {
        let starts = self.outstanding(highest) == 0;
        if segment.seq != highest || self.has(Self::GAP) {
            rare.top = segment.end;
        }
        if !starts && segment.seq == highest && self.has(Self::TIMING) {
            // Nearly every one.
            return false;
        }
        let now = now();
        if segment.seq != highest {
            // What lies between may come late, or was lost before it came by here.
            rare.gap = highest;
            rare.gap_end = segment.seq;
            rare.gap_at = now;
            self.state |= Self::GAP;
        }
        if starts {
            self.start = now;
            self.progress();
        }
        if !self.has(Self::TIMING) {
            self.time(rare, segment, now);
        }
        starts
    }

    /// Below what was sent already: a retransmission, unless it is a keep-alive or fills a gap so soon that it was
    /// overtaken.
    #[inline(always)]
    fn sent_again(
        &mut self,
        rare: &mut Rare,
        highest: u32,
        segment: &Segment,
        Timing { limits, now }: Timing<u32>,
    ) -> bool {
        if segment.end.wrapping_sub(self.una) as i32 <= 0 || self.has(Self::CLOSED) {
            // Acknowledged: a keep-alive, or a probe of a closed window.
            return false;
        }
        let fills = segment.seq.wrapping_sub(rare.gap) as i32 >= 0
            && rare.gap_end.wrapping_sub(segment.end) as i32 >= 0;
        if self.has(Self::GAP) && fills && now.wrapping_sub(rare.gap_at) < self.srtt / 4 {
            return false;
        }
        if self.retransmissions() < 0xffff {
            self.state += 1 << Self::RETRANSMISSIONS;
        }
        if !self.has(Self::STAMPED) {
            // Karn: whose acknowledgment it will be, nobody can tell.
            self.state &= !Self::TIMING;
        }
        let oldest = segment.seq.wrapping_sub(self.una) as i32 <= 0;
        if !oldest {
            // A probe for the loss of the tail, or one of several.
            return false;
        }
        let rto = self.rto(limits);
        if now.wrapping_sub(self.start) >= rto - rto / 8 {
            rare.again_at = now;
            if segment.end == highest && self.state & (Self::PROBED | 0xff << Self::EXPIRIES) == 0 {
                self.state |= Self::PROBED;
                self.start = now;
                return false;
            }
            // Its sender's timer has expired.
            self.state |= Self::AGAIN;
            true
        } else {
            self.start = now;
            false
        }
    }

    #[inline(always)]
    fn time(&mut self, rare: &mut Rare, segment: &Segment, now: u32) {
        self.timed = segment.end;
        self.timed_at = now;
        rare.timed_value = segment.stamp[0];
        self.state = self.state & !Self::STAMPED | Self::TIMING;
        if segment.stamp[0] != 0 {
            self.state |= Self::STAMPED;
        }
    }

    /// The other side has sent this; `highest` is what this side has sent. Returns whether anything more is
    /// acknowledged.
    #[inline(always)]
    pub fn acknowledged(
        &mut self,
        rare: &Rare,
        highest: u32,
        segment: &Segment,
        now: impl Fn() -> u32,
    ) -> bool {
        if segment.flags & tcp::ACK == 0 || !self.has(Self::SEEN) {
            return false;
        }
        let ahead = segment.ack.wrapping_sub(self.una);
        if (ahead as i32) < 0 {
            // Overtaken by a later one.
            return false;
        }
        if segment.window == 0 {
            self.state |= Self::CLOSED;
        } else if self.has(Self::CLOSED) {
            self.state &= !Self::CLOSED;
            self.progress();
            self.start = now();
        }
        // Beyond what was sent lies what did not come by here.
        if ahead == 0 || ahead > self.outstanding(highest) + UNSEEN {
            return false;
        }
        let now = now();
        self.una = segment.ack;
        self.start = now;
        self.progress();
        if self.has(Self::TIMING) && segment.ack.wrapping_sub(self.timed) as i32 >= 0 {
            self.state &= !Self::TIMING;
            // With timestamps an answer says to which sending it is one (RFC 7323, 4.1).
            if !self.has(Self::STAMPED) || segment.stamp[1] == rare.timed_value {
                self.sample(now.wrapping_sub(self.timed_at));
            }
        }
        true
    }

    /// The timer is as good as new.
    #[inline(always)]
    fn progress(&mut self) {
        self.state &= !(Self::AGAIN | Self::PROBED | 0xff << Self::EXPIRIES);
    }

    /// RFC 6298, 2.2 and 2.3.
    #[inline(always)]
    fn sample(&mut self, rtt: u32) {
        let rtt = at_least(rtt, 1);
        if self.srtt == 0 {
            self.srtt = rtt;
            self.rttvar = rtt / 2;
            return;
        }
        let off = rtt.abs_diff(self.srtt);
        self.rttvar = self.rttvar - self.rttvar / 4 + off / 4;
        self.srtt = at_least(self.srtt - self.srtt / 8 + rtt / 8, 1);
    }

    /// What the timer says. It has expired when the oldest segment is sent again at its time, or an eighth of the
    /// timeout after that: Linux's own timers are late by as much (`LVL_CLK_SHIFT` in `kernel/time/timer.c`).
    #[inline(always)]
    pub fn timer(&self, highest: u32, limits: Limits, now: u32) -> Timer {
        let is_open = self.state & (Self::SEEN | Self::CLOSED) == Self::SEEN;
        if self.outstanding(highest) == 0 || !is_open {
            return Timer::Stopped;
        }
        if self.has(Self::AGAIN) {
            return Timer::Expired;
        }
        let since = now.wrapping_sub(self.start);
        let rto = self.rto(limits);
        let rto = rto + rto / 8;
        // One that started after `now` was read is new.
        if since as i32 <= 0 {
            Timer::Runs(rto)
        } else if since < rto {
            Timer::Runs(rto - since)
        } else {
            Timer::Expired
        }
    }

    /// Starts the timer anew after it has expired, backed off (RFC 6298, 5.5 and 5.6): from when the oldest segment
    /// was sent again, where that was seen.
    #[inline(always)]
    pub fn back_off(&mut self, rare: &Rare, now: u32) {
        // After a probe that nothing has followed: that was the expiry.
        self.start = if self.has(Self::AGAIN | Self::PROBED) {
            rare.again_at
        } else {
            now
        };
        self.state &= !(Self::AGAIN | Self::PROBED);
        if self.expiries() < 0xff {
            self.state += 1 << Self::EXPIRIES;
        }
    }
}

// `core::cmp::min` and `max` are calls where this is not optimised, and the verifier likes branches less.
#[inline(always)]
fn at_most(value: u32, most: u32) -> u32 {
    if value < most { value } else { most }
}

#[inline(always)]
fn at_least(value: u32, least: u32) -> u32 {
    if value > least { value } else { least }
}
