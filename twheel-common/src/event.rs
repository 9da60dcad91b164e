//! What the data plane tells userspace about flows that begin, live and end, and about
//! retransmission timers that expired.

use crate::{
    flow::{Account, Word},
    key::FlowKey,
    numbers::Positions,
    point::Point,
    seen::Seen,
};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// A flow has begun or ended, or is reported while it lives. A record of the ring buffer `EVENTS`
/// holds one to [`BATCH`] of these.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Event {
    /// The flow.
    pub key: FlowKey,
    /// Its number among the instance's events, from 1 on. Each number is given once, also to events
    /// that find no room in the ring.
    pub number: u64,
    /// Clock at the event, units.
    pub at: u64,
    /// Units from the flow's first packet to the event, at most [`MAX_AGE`](crate::flow::MAX_AGE)
    /// or little more.
    pub age: u32,
    /// Units from its latest packet to the event.
    pub idle: u32,
    /// [`Seen`] at the event.
    pub seen: u32,
    /// [`Reason`] of the flow's end; or [`BEGUN`], or [`UPDATED`].
    pub reason: u32,
    /// The CPU that reports it.
    pub cpu: u16,
    /// The rule that the flow has met; 0 for none.
    pub rule: u16,
    /// The initiator's observation point; [`Point::NONE`] with only one interface.
    pub point: Point,
    /// The flow's beginning.
    pub birth: Birth,
    /// Packets and bytes of each side, if they are counted.
    pub account: Account,
    /// The retransmission timer of each side, if there are such timers; that of the key's low
    /// endpoint first.
    pub pace: [Pace; 2],
    /// The next sequence number of each side, that of the key's low endpoint first: the number
    /// after the last byte that was seen or that the other side acknowledged; 0 if there was none.
    pub positions: Positions,
    /// What had been counted by the [interval](crate::update::Interval)'s beginning.
    pub before: Account,
    /// The length of that interval, units.
    pub since: u32,
    /// 1: live flows are reported, so `before` and `since` are meaningful. Else they are 0.
    pub updates: u32,
}

/// An [`Event`]'s reason: the flow has begun.
pub const BEGUN: u32 = 0x100;
/// An [`Event`]'s reason: the flow lives on.
pub const UPDATED: u32 = 0x101;

/// The direction of a flow's first packet, and which of its record's flows it is: bit 0 (outgoing),
/// and from bit 4 on the generation, 12 bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Birth(u16);

impl Birth {
    /// Of a flow with this last word.
    #[inline(always)]
    pub fn new(is_outgoing: bool, word: Word) -> Self {
        Self(word.generation() << 4 | is_outgoing as u16)
    }

    /// Whether the flow's first packet was outgoing.
    #[inline(always)]
    pub fn is_outgoing(self) -> bool {
        self.0 & 1 != 0
    }

    /// The flow's [generation](Word::generation).
    #[inline(always)]
    pub fn generation(self) -> u16 {
        self.0 >> 4
    }
}

/// Most events in a record of the ring.
pub const BATCH: usize = 16;

/// The events of a stepper that are not yet in the ring: several events make one record there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Staged {
    /// Number of events.
    pub count: u64,
    /// How many of them are the ends of flows, which take capacity until then.
    pub ends: u64,
    /// The events, in order.
    pub events: [Event; BATCH],
}

/// What the retransmission timer of one side knows.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Pace {
    /// Smoothed round-trip time, microseconds; 0 if there was no sample.
    pub srtt: u32,
    /// The retransmission timeout, microseconds, backoff included.
    pub rto: u32,
    /// Retransmissions that were seen.
    pub retransmissions: u32,
}

/// Record of the ring buffer `EVENTS`: the retransmission timer of one side has expired. The flow
/// does not end.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct RtoExpired {
    /// The flow.
    pub key: FlowKey,
    /// As in [`Event`].
    pub number: u64,
    /// Clock when this was found, units.
    pub at: u64,
    /// Units from the flow's first packet, as in [`Event`].
    pub age: u32,
    /// 0.
    pub reserved: u32,
    /// [`Direction`](crate::key::Direction) in which that side sends.
    pub direction: u16,
    /// As in [`Event`].
    pub birth: Birth,
    /// [`Seen`] of the flow.
    pub seen: u32,
    /// The rule that the flow has met; 0 for none.
    pub rule: u16,
    /// As in [`Event`].
    pub point: Point,
    /// Bytes sent and not acknowledged.
    pub outstanding: u32,
    /// How often the timer has expired since there was progress, including this time.
    pub expiries: u32,
    /// The timer as it was when it expired.
    pub pace: Pace,
}

impl RtoExpired {
    /// What was seen of the flow.
    pub fn seen(&self) -> Seen {
        Seen(self.seen)
    }
}

/// A record of the ring.
#[derive(Clone, Copy, Debug)]
pub enum Record {
    /// A flow has begun.
    Begun(Event),
    /// A flow lives on.
    Updated(Event),
    /// A flow has ended.
    Ended(Event),
    /// The retransmission timer of one side has expired.
    Rto(RtoExpired),
}

impl From<Event> for Record {
    fn from(event: Event) -> Self {
        match event.reason {
            BEGUN => Self::Begun(event),
            UPDATED => Self::Updated(event),
            _ => Self::Ended(event),
        }
    }
}

impl Event {
    /// What was seen of the flow.
    pub fn seen(&self) -> Seen {
        Seen(self.seen)
    }
}

/// Why a flow ended.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Reason {
    /// No packet for the whole timeout.
    Idle = 1,
    /// FIN from both sides, then the short timeout.
    Closed = 2,
    /// RST, then the short timeout.
    Reset = 3,
    /// A SYN began another connection with the same key.
    Superseded = 4,
    /// Evicted to make room for a new flow.
    Evicted = 5,
    /// Deleted by a user who chose it.
    Deleted = 6,
    /// Deleted by a user together with all others.
    Flushed = 7,
}

impl Reason {
    /// All reasons.
    pub const ALL: [Self; 7] = [
        Self::Idle,
        Self::Closed,
        Self::Reset,
        Self::Superseded,
        Self::Evicted,
        Self::Deleted,
        Self::Flushed,
    ];

    /// The reason in an [`Event`]; `None` for a number that no data plane writes.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| *reason as u32 == raw)
    }

    /// The reason of a flow that expired with these state bits.
    #[inline(always)]
    pub fn of_expiry(seen: Seen) -> Self {
        if !seen.is_closed() {
            Self::Idle
        } else if seen.is_reset() {
            Self::Reset
        } else {
            Self::Closed
        }
    }

    /// Stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Idle => "idle",
            Self::Closed => "closed",
            Self::Reset => "reset",
            Self::Superseded => "superseded",
            Self::Evicted => "evicted",
            Self::Deleted => "deleted",
            Self::Flushed => "flushed",
        }
    }
}
