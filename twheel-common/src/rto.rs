//! Retransmission timers of the two sides of a connection, as an observer can run them: RFC 6298.
//!
//! Each side has a timer like the one in its own stack. The timer starts when data is sent while
//! nothing is outstanding, restarts when an acknowledgment advances, and is stopped, lazily, when
//! everything is acknowledged. Times are 32 bits of microseconds, compared by their distance.
//!
//! The timers know only what was seen here. In the middle of a path, a round trip is the part
//! between this host and the side that acknowledges. CPUs that see the two directions of a
//! connection at the same time write here without a lock; a race can only spoil a sample, or delay
//! the start of a timer by a moment.

use core::cell::UnsafeCell;
#[cfg(not(target_arch = "bpf"))]
use core::sync::atomic::{AtomicU32, Ordering::Relaxed};

use crate::{
    event::Pace,
    segment::{Segment, tcp},
};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, IntoBytes};

/// A number that CPUs read and write without a lock, each time as a whole.
#[repr(transparent)]
#[derive(Default)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes))]
pub struct Shared(UnsafeCell<u32>);

// SAFETY: CPUs share the number, and each access is of the whole.
unsafe impl Sync for Shared {}

/// The kernel's target has no `AtomicU32`. There a volatile access, which is one instruction,
/// takes the place of an atomic one.
impl Shared {
    /// Loads it.
    #[inline(always)]
    pub fn get(&self) -> u32 {
        let place = self.0.get();
        #[cfg(target_arch = "bpf")]
        // SAFETY: valid and aligned, as it is inside `self`.
        unsafe {
            place.read_volatile()
        }
        #[cfg(not(target_arch = "bpf"))]
        // SAFETY: as above, and each access is atomic.
        unsafe {
            AtomicU32::from_ptr(place).load(Relaxed)
        }
    }

    /// Stores it.
    #[inline(always)]
    pub fn set(&self, value: u32) {
        let place = self.0.get();
        #[cfg(target_arch = "bpf")]
        // SAFETY: as in `get`.
        unsafe {
            place.write_volatile(value);
        }
        #[cfg(not(target_arch = "bpf"))]
        // SAFETY: as in `get`.
        unsafe {
            AtomicU32::from_ptr(place).store(value, Relaxed);
        }
    }
}

/// What is known of one side's sending. All zeros means nothing yet.
#[repr(C)]
#[derive(Default)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes))]
pub struct Side {
    /// The highest acknowledgment of its data.
    pub una: Shared,
    /// Flags such as [`Side::TIMING`]; from bit 8 on how often the timer has expired since there
    /// was progress; from bit 16 on the retransmissions seen, at most 65,535.
    state: Shared,
    /// When the timer was started. Meaningful while data is outstanding.
    start: Shared,
    /// Smoothed round-trip time; 0 until there was a sample.
    pub srtt: Shared,
    /// Variation of the round-trip time.
    pub rttvar: Shared,
    /// The sequence number after the segment that is being timed.
    timed: Shared,
    /// When that segment was sent.
    timed_at: Shared,
}

/// What else is known of it, which few packets need.
#[repr(C)]
#[derive(Default)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes))]
pub struct Rare {
    /// Timestamp value (RFC 7323) of the segment that is being timed, if it has one.
    timed_value: Shared,
    /// When the oldest outstanding segment was last retransmitted.
    again_at: Shared,
    /// Start of a gap: data that is missing before the latest.
    gap: Shared,
    /// End of the gap.
    gap_end: Shared,
    /// When the gap was found.
    gap_at: Shared,
    /// The sequence number after the last byte that the side has sent: the flow's next sequence
    /// number waits before the gap.
    top: Shared,
}

/// A value of the map `RTOS`: a flow's timers, that of the key's low endpoint first. What nearly
/// every packet and timer visit needs is in one cache line.
#[repr(C, align(128))]
#[derive(Default)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes))]
pub struct Timers {
    /// The timers of the two sides.
    pub sides: [Side; 2],
    /// When the wheel next visits the flow: low 32 bits of the clock, units.
    pub visit: u32,
    /// Reserved.
    pub reserved: u32,
    /// What else is known of the two sides.
    pub rare: [Rare; 2],
    /// Reserved.
    pub more: [u32; 4],
}

/// Bounds of the timer, microseconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// `--rto-min`: minimum added to the round-trip time to form the RTO, as in Linux
    /// (`tcp_rto_min`).
    pub min: u32,
    /// `--rto-max`: upper bound of the RTO.
    pub max: u32,
}

/// The bounds, and the time in microseconds or a function that tells it.
#[derive(Clone, Copy, Debug)]
pub struct Timing<N> {
    /// The bounds.
    pub limits: Limits,
    /// The time.
    pub now: N,
}

/// How much data may be acknowledged that was not seen here.
const UNSEEN: u32 = 1 << 24;
/// The RTO before there is a sample (RFC 6298, 2.1), microseconds.
const INITIAL: u32 = 1_000_000;

/// State of a side's timer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Timer {
    /// Nothing is outstanding.
    Stopped,
    /// It expires in this many microseconds.
    Runs(u32),
    /// It has expired.
    Expired,
}

impl Side {
    /// A segment is being timed.
    const TIMING: u32 = 1 << 0;
    /// That segment has a timestamp.
    const STAMPED: u32 = 1 << 1;
    /// The oldest segment was retransmitted when the timer was due.
    const AGAIN: u32 = 1 << 2;
    /// The other side's window is closed.
    const CLOSED: u32 = 1 << 3;
    /// There is a gap.
    const GAP: u32 = 1 << 4;
    /// Something was seen of this side.
    const SEEN: u32 = 1 << 5;
    /// All outstanding data was retransmitted once: either the timer has expired, or a tail loss
    /// probe was due at the same time. The next segments tell which.
    const PROBED: u32 = 1 << 6;
    const EXPIRIES: u32 = 8;
    const RETRANSMISSIONS: u32 = 16;

    /// Begins with the first segment seen of the side.
    #[inline(always)]
    fn begin(&self, rare: &Rare, segment: &Segment, now: u32) {
        self.una.set(segment.seq);
        self.start.set(now);
        self.srtt.set(0);
        self.rttvar.set(0);
        self.state.set(Self::SEEN);
        self.time(rare, segment, now);
    }

    /// The part that events report.
    #[inline(always)]
    pub fn pace(&self, limits: Limits) -> Pace {
        Pace {
            srtt: self.srtt.get(),
            rto: self.rto(limits),
            retransmissions: self.retransmissions(),
        }
    }

    /// How often the timer has expired since there was progress; also the exponent of its backoff.
    #[inline(always)]
    pub fn expiries(&self) -> u32 {
        self.state.get() >> Self::EXPIRIES & 0xff
    }

    /// Retransmissions that were seen.
    #[inline(always)]
    pub fn retransmissions(&self) -> u32 {
        self.state.get() >> Self::RETRANSMISSIONS
    }

    #[inline(always)]
    fn has(&self, flag: u32) -> bool {
        self.state.get() & flag != 0
    }

    #[inline(always)]
    fn mark(&self, flags: u32) {
        self.state.set(self.state.get() | flags);
    }

    #[inline(always)]
    fn unmark(&self, flags: u32) {
        self.state.set(self.state.get() & !flags);
    }

    /// The sequence number after the last byte sent: the side's next sequence number, or the number
    /// after the data beyond the gap before which that one waits.
    #[inline(always)]
    pub fn highest(&self, rare: &Rare, position: u32) -> u32 {
        match self.has(Self::GAP) && rare.top.get().wrapping_sub(position) as i32 > 0 {
            true => rare.top.get(),
            false => position,
        }
    }

    /// Bytes sent and not acknowledged; `highest` is the sequence number after the last byte sent.
    #[inline(always)]
    pub fn outstanding(&self, highest: u32) -> u32 {
        let outstanding = highest.wrapping_sub(self.una.get());
        if outstanding as i32 > 0 {
            outstanding
        } else {
            0
        }
    }

    /// The RTO without backoff (RFC 6298, 2.3; the part of the variation has a lower bound, as in
    /// `tcp_set_rto` in `net/ipv4/tcp_input.c`).
    #[inline(always)]
    pub fn base(&self, limits: Limits) -> u32 {
        if self.srtt.get() == 0 {
            return at_most(INITIAL, limits.max);
        }
        let margin = at_least(self.rttvar.get().saturating_mul(4), limits.min);
        at_most(self.srtt.get().saturating_add(margin), limits.max)
    }

    /// The RTO with backoff.
    #[inline(always)]
    pub fn rto(&self, limits: Limits) -> u32 {
        let backed_off = u64::from(self.base(limits)) << (self.expiries() & 31);
        if backed_off < u64::from(limits.max) {
            backed_off as u32
        } else {
            limits.max
        }
    }

    /// Notes that the side has sent a segment; `highest` is the value before it. Returns whether
    /// the timer has started or has expired by this, so that [`timer`](Self::timer) now says
    /// something else.
    #[inline(always)]
    pub fn sent(
        &self,
        rare: &Rare,
        highest: u32,
        segment: &Segment,
        timing: Timing<impl Fn() -> u32>,
    ) -> bool {
        let now = timing.now;
        if segment.end == segment.seq {
            return false;
        }
        if !self.has(Self::SEEN) {
            self.begin(rare, segment, now());
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
        &self,
        rare: &Rare,
        highest: u32,
        segment: &Segment,
        now: impl Fn() -> u32,
    ) -> bool {
        let starts = self.outstanding(highest) == 0;
        if segment.seq != highest || self.has(Self::GAP) {
            rare.top.set(segment.end);
        }
        if !starts && segment.seq == highest && self.has(Self::TIMING) {
            // Nearly every segment.
            return false;
        }
        let now = now();
        if segment.seq != highest {
            // The data between may arrive late, or was lost before it reached this host.
            rare.gap.set(highest);
            rare.gap_end.set(segment.seq);
            rare.gap_at.set(now);
            self.mark(Self::GAP);
        }
        if starts {
            self.start.set(now);
            self.progress();
        }
        if !self.has(Self::TIMING) {
            self.time(rare, segment, now);
        }
        starts
    }

    /// The segment begins before the last byte sent. It is a retransmission, unless it is a
    /// keep-alive, or fills a gap so soon that it was merely reordered.
    #[inline(always)]
    fn sent_again(
        &self,
        rare: &Rare,
        highest: u32,
        segment: &Segment,
        Timing { limits, now }: Timing<u32>,
    ) -> bool {
        if segment.end.wrapping_sub(self.una.get()) as i32 <= 0 || self.has(Self::CLOSED) {
            // Acknowledged already: a keep-alive or a window probe.
            return false;
        }
        let fills = segment.seq.wrapping_sub(rare.gap.get()) as i32 >= 0
            && rare.gap_end.get().wrapping_sub(segment.end) as i32 >= 0;
        if self.has(Self::GAP) && fills && now.wrapping_sub(rare.gap_at.get()) < self.srtt.get() / 4
        {
            return false;
        }
        if self.retransmissions() < 0xffff {
            self.state
                .set(self.state.get() + (1 << Self::RETRANSMISSIONS));
        }
        if !self.has(Self::STAMPED) {
            // Karn's algorithm: it cannot be known which of the two transmissions will be
            // acknowledged.
            self.unmark(Self::TIMING);
        }
        let oldest = segment.seq.wrapping_sub(self.una.get()) as i32 <= 0;
        if !oldest {
            // A tail loss probe, or one of several retransmissions.
            return false;
        }
        let rto = self.rto(limits);
        if now.wrapping_sub(self.start.get()) >= rto - rto / 8 {
            rare.again_at.set(now);
            if segment.end == highest
                && self.state.get() & (Self::PROBED | 0xff << Self::EXPIRIES) == 0
            {
                self.mark(Self::PROBED);
                self.start.set(now);
                return false;
            }
            // Its sender's timer has expired.
            self.mark(Self::AGAIN);
            true
        } else {
            self.start.set(now);
            false
        }
    }

    #[inline(always)]
    fn time(&self, rare: &Rare, segment: &Segment, now: u32) {
        self.timed.set(segment.end);
        self.timed_at.set(now);
        rare.timed_value.set(segment.stamp[0]);
        self.unmark(Self::STAMPED);
        self.mark(Self::TIMING);
        if segment.stamp[0] != 0 {
            self.mark(Self::STAMPED);
        }
    }

    /// Notes that the other side has sent this segment; `highest` is the sequence number after the
    /// last byte that this side has sent. Returns whether more data is acknowledged.
    #[inline(always)]
    pub fn acknowledged(
        &self,
        rare: &Rare,
        highest: u32,
        segment: &Segment,
        now: impl Fn() -> u32,
    ) -> bool {
        if segment.flags & tcp::ACK == 0 || !self.has(Self::SEEN) {
            return false;
        }
        let ahead = segment.ack.wrapping_sub(self.una.get());
        if (ahead as i32) < 0 {
            // An old acknowledgment that a later one has overtaken.
            return false;
        }
        if segment.window == 0 {
            self.mark(Self::CLOSED);
        } else if self.has(Self::CLOSED) {
            self.unmark(Self::CLOSED);
            self.progress();
            self.start.set(now());
        }
        // The data beyond what was sent was not seen here.
        if ahead == 0 || ahead > self.outstanding(highest) + UNSEEN {
            return false;
        }
        let now = now();
        self.una.set(segment.ack);
        self.start.set(now);
        self.progress();
        if self.has(Self::TIMING) && segment.ack.wrapping_sub(self.timed.get()) as i32 >= 0 {
            self.unmark(Self::TIMING);
            // With timestamps, an acknowledgment tells which transmission it answers (RFC 7323,
            // 4.1).
            if !self.has(Self::STAMPED) || segment.stamp[1] == rare.timed_value.get() {
                self.sample(now.wrapping_sub(self.timed_at.get()));
            }
        }
        true
    }

    /// Clears the backoff and the signs of an expiry.
    #[inline(always)]
    fn progress(&self) {
        self.unmark(Self::AGAIN | Self::PROBED | 0xff << Self::EXPIRIES);
    }

    /// Adds a sample (RFC 6298, 2.2 and 2.3).
    #[inline(always)]
    fn sample(&self, rtt: u32) {
        let rtt = at_least(rtt, 1);
        if self.srtt.get() == 0 {
            self.srtt.set(rtt);
            self.rttvar.set(rtt / 2);
            return;
        }
        let off = rtt.abs_diff(self.srtt.get());
        self.rttvar
            .set(self.rttvar.get() - self.rttvar.get() / 4 + off / 4);
        self.srtt
            .set(at_least(self.srtt.get() - self.srtt.get() / 8 + rtt / 8, 1));
    }

    /// State of the timer. It has expired if the oldest segment is retransmitted when the timer is
    /// due, or an eighth of the timeout after it was due: Linux's own timers may be late by as much
    /// (`LVL_CLK_SHIFT` in `kernel/time/timer.c`).
    #[inline(always)]
    pub fn timer(&self, highest: u32, limits: Limits, now: u32) -> Timer {
        let is_open = self.state.get() & (Self::SEEN | Self::CLOSED) == Self::SEEN;
        if self.outstanding(highest) == 0 || !is_open {
            return Timer::Stopped;
        }
        if self.has(Self::AGAIN) {
            return Timer::Expired;
        }
        let since = now.wrapping_sub(self.start.get());
        let rto = self.rto(limits);
        let rto = rto + rto / 8;
        // A timer that was started after `now` was read has just begun.
        if since as i32 <= 0 {
            Timer::Runs(rto)
        } else if since < rto {
            Timer::Runs(rto - since)
        } else {
            Timer::Expired
        }
    }

    /// Restarts the timer with backoff after it has expired (RFC 6298, 5.5 and 5.6): from the time
    /// when the oldest segment was retransmitted, if that was seen.
    #[inline(always)]
    pub fn back_off(&self, rare: &Rare, now: u32) {
        // If nothing followed a supposed probe, it was the retransmission of an expired timer.
        self.start.set(if self.has(Self::AGAIN | Self::PROBED) {
            rare.again_at.get()
        } else {
            now
        });
        self.unmark(Self::AGAIN | Self::PROBED);
        if self.expiries() < 0xff {
            self.state.set(self.state.get() + (1 << Self::EXPIRIES));
        }
    }
}

// Not `core::cmp::min` and `max`: without optimization they are calls, and the verifier handles
// their branches less well.
#[inline(always)]
fn at_most(value: u32, most: u32) -> u32 {
    if value < most { value } else { most }
}

#[inline(always)]
fn at_least(value: u32, least: u32) -> u32 {
    if value > least { value } else { least }
}
