//! The calls of userspace into the programs that step a wheel, and delete, sweep and enter flows.
//!
//! The stepper's program is an XDP program that is attached nowhere. Its "packet" is a [`Step`]:
//! userspace fills in the budget and runs it with `BPF_PROG_TEST_RUN` on the CPU of the wheel; the
//! program writes the other fields.

use crate::point::Point;
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The "packet" of a program that userspace runs.
///
/// # Safety
///
/// Consists only of integers, so that any bytes are valid, and is aligned to at most 8 bytes.
pub unsafe trait Argument {}

// SAFETY: `repr(C)`, and only `u32` and `u64` fields; for userspace `pod.rs` checks that any bytes
// are valid.
unsafe impl Argument for Step {}
// SAFETY: as above, and arrays of these.
unsafe impl Argument for Enter {}
// SAFETY: as above.
unsafe impl Argument for Sweep {}

/// Argument and result of one call, in machine byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Step {
    /// Most timer visits in this call.
    pub budget: u32,
    /// [`Outcome`].
    pub outcome: u32,
    /// Clock during the call, units.
    pub now: u64,
    /// The tick at which the next slot has its turn; [`NEVER`](crate::wheel::NEVER) if all are
    /// empty. Meaningful after [`Outcome::Done`].
    pub next: u64,
    /// Timer visits.
    pub visits: u32,
    /// Events that this call has put into the ring: of flows that ended, and of expired
    /// retransmission timers.
    pub expired: u32,
}

/// Why a call returned.
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// Nothing more is due now.
    Done = 1,
    /// The budget is used up: call again.
    Budget = 2,
    /// The ring is full: drain it and call again. No flow ended without its event.
    RingFull = 3,
}

impl Outcome {
    /// The outcome in a [`Step`]; `None` for a number that the program does not write.
    pub fn from_raw(raw: u32) -> Option<Self> {
        [Self::Done, Self::Budget, Self::RingFull]
            .into_iter()
            .find(|outcome| *outcome as u32 == raw)
    }
}

/// An entry of the "packet" that deletes flows. The program is like the stepper's, and runs on the
/// CPU on whose wheel the flows are. It handles all entries that the packet holds, at most
/// [`MAX_DELETES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Delete {
    /// Index of the flow's record.
    pub index: u32,
    /// [`Reason`](crate::event::Reason) for the event. The program replaces it with [`Deleted`]
    /// when it has handled this entry.
    pub outcome: u32,
    /// [`Word`](crate::flow::Word) of the flow when it was chosen.
    pub word: u64,
}

/// Most entries of a packet.
pub const MAX_DELETES: usize = 128;

/// What became of a flow that was to be deleted. The numbers differ from those of
/// [`Reason`](crate::event::Reason).
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// Deleted, with its event in the ring.
    Done = 101,
    /// A packet came since the flow was chosen, or the flow has ended: left as it is.
    Changed = 102,
    /// The ring is full: drain it and call again.
    RingFull = 103,
    /// Not on this CPU's wheel. It is on another CPU's wheel; or on none, because the record is
    /// free or its flow is still being entered.
    Elsewhere = 104,
    /// Still in the inbox of this CPU, which one call did not empty: call again.
    Posted = 105,
}

impl Deleted {
    /// The outcome in a [`Delete`]; `None` for a number that the program does not write.
    pub fn from_raw(raw: u32) -> Option<Self> {
        [
            Self::Done,
            Self::Changed,
            Self::RingFull,
            Self::Elsewhere,
            Self::Posted,
        ]
        .into_iter()
        .find(|outcome| *outcome as u32 == raw)
    }
}

/// The "packet" of the program that sweeps. Run on every CPU, it looks at the flows of that CPU's
/// wheel in a range of the table: gives each the rule that it meets now, and arms it by the present
/// timeouts; or reports an [update](crate::update) of each.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Sweep {
    /// Index of the first record.
    pub from: u32,
    /// Number of records, at most [`MAX_SWEEP`].
    pub count: u32,
    /// Flows re-armed or reported; written by the program.
    pub flows: u32,
    /// Low 32 bits of the clock during the call, units; written by the program. A call with a
    /// `count` of 0 just tells the time.
    pub now: u32,
    /// 1: flows are reported, not re-armed.
    pub reports: u32,
    /// Number of records looked at, fewer than `count` if the ring has no room; written by the
    /// program.
    pub swept: u32,
    /// Events that wait for room in the ring; written by the program.
    pub staged: u32,
    /// Index of the only interface; 0 if it does not exist now. Without meaning if there are
    /// several.
    pub interface: u32,
    /// What became of the flows; written by the program.
    pub followed: Followed,
}

/// How many flows of a sweep follow the policy to another rule, and how many are due.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Followed {
    /// Had a rule and have another one.
    pub changed: u32,
    /// Had a rule and have none.
    pub lost: u32,
    /// Had no rule and have one.
    pub gained: u32,
    /// Were not to be reaped and may be now.
    pub exposed: u32,
    /// Are due now: their timeout has passed.
    pub due: u32,
    /// 0.
    pub reserved: u32,
}

/// Most records of one sweep.
pub const MAX_SWEEP: u32 = 4096;

/// The "packet" of the program that enters a flow that userspace knows from a socket or from
/// conntrack.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Enter {
    /// The key's [`addresses`](crate::key::FlowKey::addresses).
    pub addresses: [u64; 4],
    /// The key's [`ports`](crate::key::FlowKey::ports).
    pub ports: u64,
    /// What is known of the flow, as [`Seen`](crate::state::Seen).
    pub seen: u32,
    /// The rule that the flow has met.
    pub rule: u32,
    /// For how long the flow has been idle, units.
    pub idle: u32,
    /// From the lowest bit: the initiator's observation point (16), and whether the flow's first
    /// packet was outgoing.
    pub origin: u32,
}

impl Enter {
    /// The value of [`origin`](Self::origin).
    pub fn packed_origin(point: Point, is_outgoing: bool) -> u32 {
        u32::from(point.0) | u32::from(is_outgoing) << 16
    }
}

/// The "packet" of a program that userspace runs with *live frames* (`BPF_F_TEST_XDP_LIVE_FRAMES`).
/// The kernel returns no data from such a run, so the program writes its answer to the map `CALLS`,
/// under the caller's number.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Call {
    /// A [`Step`], a [`Sweep`], or [`Delete`]s, followed by zeros.
    pub argument: Answer,
    /// The caller's number, which no other caller uses at the same time.
    pub number: u64,
}

/// The answer of such a program: its argument, as the program left it.
pub type Answer = [u64; MAX_DELETES * size_of::<Delete>() / 8];
