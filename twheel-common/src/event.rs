//! What the data plane tells userspace about a flow that ended.

use crate::{flow::Account, key::FlowKey, numbers::Positions, point::Point, seen::Seen};

/// A flow has ended. One to [`BATCH`] of these are a record of the ring buffer `EVENTS`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Event {
    /// The flow.
    pub key: FlowKey,
    /// Clock when it ended, units.
    pub at: u64,
    /// From its first packet to its end, units, at most [`MAX_AGE`](crate::flow::MAX_AGE) or little more.
    pub age: u32,
    /// From its latest packet to its end, units.
    pub idle: u32,
    /// [`Seen`] at its end.
    pub seen: u32,
    /// [`Reason`].
    pub reason: u32,
    /// The CPU that ended it.
    pub cpu: u16,
    /// The rule that the flow has met; 0 for none.
    pub rule: u16,
    /// Where packets of the initiator were counted; [`Point::NONE`] where there is one interface.
    pub point: Point,
    /// 1: the first packet of the flow went out.
    pub is_outgoing: u16,
    /// What was sent, if that is counted.
    pub account: Account,
    /// How it was sent, if there are retransmission timers: the key's low endpoint first.
    pub pace: [Pace; 2],
    /// How far each side has sent, the key's low endpoint first: the sequence number behind the last byte that was
    /// seen, or acknowledged by the other side; 0 where nothing was.
    pub positions: Positions,
}

/// Events of a record of the ring, at most.
pub const BATCH: usize = 16;

/// What a stepper has to say and has not put into the ring: several events make one record there.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Staged {
    /// How many there are.
    pub count: u64,
    /// They, in order.
    pub events: [Event; BATCH],
}

/// What a retransmission timer knows of one side's sending.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pace {
    /// Smoothed round-trip time, microseconds; 0 if there was no sample.
    pub srtt: u32,
    /// The retransmission timeout, microseconds, backoff included.
    pub rto: u32,
    /// Segments that were seen to be sent again.
    pub retransmissions: u32,
}

/// Record of the ring buffer `EVENTS`: the retransmission timer of one side has expired. The flow goes on.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct RtoExpired {
    /// The flow.
    pub key: FlowKey,
    /// Clock when that was found, units.
    pub at: u64,
    /// [`Direction`](crate::key::Direction) in which that side sends.
    pub direction: u16,
    /// As in [`Event`].
    pub is_outgoing: u16,
    /// [`Seen`] of the flow.
    pub seen: u32,
    /// The rule that the flow has met; 0 for none.
    pub rule: u16,
    /// As in [`Event`].
    pub point: Point,
    /// Bytes sent and not acknowledged.
    pub outstanding: u32,
    /// Expiries since there was progress, this one included.
    pub expiries: u32,
    /// As it was when it expired.
    pub pace: Pace,
}

impl RtoExpired {
    /// What was seen of the flow.
    pub fn seen(&self) -> Seen {
        Seen(self.seen)
    }
}

/// What there is to say.
#[derive(Clone, Copy, Debug)]
pub enum Record {
    /// A flow has ended.
    Ended(Event),
    /// One side waits in vain.
    Rto(RtoExpired),
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
    /// A SYN began another flow with the same key.
    Superseded = 4,
    /// Evicted for lack of room.
    Evicted = 5,
    /// Deleted by a user, who chose it.
    Deleted = 6,
    /// Deleted by a user with all others.
    Flushed = 7,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::Idle,
        Self::Closed,
        Self::Reset,
        Self::Superseded,
        Self::Evicted,
        Self::Deleted,
        Self::Flushed,
    ];

    /// From an [`Event`]'s field; `None` for what no data plane writes.
    pub fn from_raw(raw: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|reason| *reason as u32 == raw)
    }

    /// Why a flow of which this was seen has expired.
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
