//! The call that steps a wheel.
//!
//! The stepper is an XDP program that is attached to nothing. Its "packet" is a [`Step`]: userspace
//! fills in the budget and runs it with `BPF_PROG_TEST_RUN` on the CPU of the wheel; the program
//! writes the rest.

/// What a program that userspace runs is given as its "packet".
///
/// # Safety
///
/// Made of integers alone, so that any bytes are one, and aligned to 8 bytes at most.
pub unsafe trait Argument {}

// SAFETY: `repr(C)`, of `u32` and `u64`.
unsafe impl Argument for Step {}
// SAFETY: as above, and arrays of them.
unsafe impl Argument for Enter {}
// SAFETY: as above.
unsafe impl Argument for Sweep {}

/// Argument and result of one call, in machine byte order.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    /// Visits at most in this call.
    pub budget: u32,
    /// [`Outcome`].
    pub outcome: u32,
    /// Clock during the call, units.
    pub now: u64,
    /// The tick at which the next slot has its turn, [`NEVER`](crate::wheel::NEVER) if all are
    /// empty. Meaningful after [`Outcome::Done`].
    pub next: u64,
    /// Flows looked at.
    pub visits: u32,
    /// Events in the ring: of flows evicted, and of flows of which a retransmission timer has expired.
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
    /// The ring is full: drain it and call again. Nothing was evicted without its event.
    RingFull = 3,
}

impl Outcome {
    /// From a [`Step`]'s field; `None` for what no stepper writes.
    pub fn from_raw(raw: u32) -> Option<Self> {
        [Self::Done, Self::Budget, Self::RingFull]
            .into_iter()
            .find(|outcome| *outcome as u32 == raw)
    }
}

/// An entry of the "packet" that deletes flows: a program like the stepper, run on the CPU on whose
/// wheel the flows stand, over as many of these as the packet holds, at most [`MAX_DELETES`].
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Delete {
    /// Index of the flow's record.
    pub index: u32,
    /// [`Reason`](crate::event::Reason) for the event; [`Deleted`] in its place, written by the program, once that
    /// has come to this entry.
    pub outcome: u32,
    /// [`Word`](crate::flow::Word) of the flow when it was chosen.
    pub word: u64,
}

/// Entries of a packet at most.
pub const MAX_DELETES: usize = 128;

/// What became of a flow that was to be deleted. No number is also one of a [`Reason`](crate::event::Reason).
#[repr(u32)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Deleted {
    /// Deleted, with its event in the ring.
    Done = 101,
    /// It had a packet since it was chosen, or is gone: left as it is.
    Changed = 102,
    /// The ring is full: drain it and ask again.
    RingFull = 103,
    /// Not on this CPU's wheel: on that of another, or on none, where the record is free or its flow just
    /// entering.
    Elsewhere = 104,
    /// Still in the inbox of this CPU, which one call did not empty: ask again.
    Posted = 105,
}

impl Deleted {
    /// From a [`Delete`]'s field; `None` for what no program writes.
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

/// The "packet" of the program that sweeps: run on every CPU, it looks at the flows of that CPU's wheel in a range of
/// the table and arms them as timeouts and rules are now.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sweep {
    /// Index of the first record.
    pub from: u32,
    /// How many; at most [`MAX_SWEEP`].
    pub count: u32,
    /// Flows armed again; written by the program.
    pub armed: u32,
    /// Low 32 bits of the clock during the call, units; written by the program. A call that looks at nothing tells
    /// the time.
    pub now: u32,
}

/// Records of a call that sweeps, at most.
pub const MAX_SWEEP: u32 = 4096;

/// The "packet" of the program that enters a flow of which userspace knows from a socket or from conntrack.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Enter {
    /// The key's [`addresses`](crate::key::FlowKey::addresses).
    pub addresses: [u64; 4],
    /// Its [`ports`](crate::key::FlowKey::ports).
    pub ports: u64,
    /// What is known of it, [`Seen`](crate::state::Seen).
    pub seen: u32,
    /// The rule that it has met.
    pub rule: u32,
    /// For how long it has been idle, units.
    pub idle: u32,
    /// Padding.
    pub zero: u32,
}

/// What a program that userspace runs is given where its test run is one of *live frames*
/// (`BPF_F_TEST_XDP_LIVE_FRAMES`): the kernel then gives nothing back, so the program leaves its answer in the map `CALLS`, under
/// the caller's number.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Call {
    /// A [`Step`], a [`Sweep`], or [`Delete`]s; and zeros.
    pub argument: Answer,
    /// The caller's own, of which no other caller has the same at the same time.
    pub number: u64,
}

/// What such a program answers: its argument, as it is then.
pub type Answer = [u64; MAX_DELETES * size_of::<Delete>() / 8];
