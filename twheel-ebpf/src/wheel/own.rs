//! This CPU's wheel: where its hand is, which of its slots hold flows, and when its stepper comes
//! back.

use twheel_common::wheel::{Geometry, Link, Slot, Wheel};

use crate::{config, maps::WHEEL};

/// A pointer to this CPU's wheel.
#[derive(Clone, Copy)]
pub struct Own(*mut Wheel);

/// This CPU's wheel.
#[inline(always)]
pub fn this_cpu() -> Option<Own> {
    WHEEL.get_ptr_mut(0).map(Own)
}

impl Own {
    /// Calls a function with the wheel.
    #[inline(always)]
    fn with<R>(self, what: impl FnOnce(&mut Wheel) -> R) -> R {
        // SAFETY: the value is this CPU's own, and nothing else runs on this CPU meanwhile (bottom
        // halves are off). The reference ends with `what`, which is arithmetic and makes no other
        // reference. Other CPUs load `wake`, and nothing else.
        what(unsafe { &mut *self.0 })
    }

    /// The wheel's address.
    #[inline(always)]
    pub fn as_ptr(self) -> *mut Wheel {
        self.0
    }

    /// The slot of a flow that is due at a tick.
    #[inline(always)]
    pub fn slot(self, tick: u64) -> Slot {
        self.with(|wheel| wheel.slot(config::geometry(), tick))
    }

    /// The slot of a flow that is due at a tick, if the flow has just been handed out.
    #[inline(always)]
    pub fn again(self, tick: u64) -> Slot {
        self.with(|wheel| wheel.again(config::geometry(), tick))
    }

    /// Whether a flow that is due at a tick has a slot of its own ahead.
    #[inline(always)]
    pub fn reaches(self, tick: u64) -> bool {
        self.with(|wheel| wheel.reaches(config::geometry(), tick))
    }

    /// The slot whose turn comes first.
    #[inline(always)]
    pub fn first(self, geometry: Geometry) -> Option<Slot> {
        self.with(|wheel| wheel.first(geometry))
    }

    /// Notes that a slot holds flows.
    #[inline(always)]
    pub fn occupy(self, slot: u32) {
        self.with(|wheel| wheel.occupy(config::geometry(), slot));
    }

    /// Notes that a slot is empty.
    #[inline(always)]
    pub fn vacate(self, slot: u32) {
        self.with(|wheel| wheel.vacate(config::geometry(), slot));
    }

    /// Empties the slot that has come round. The caller takes its flows.
    #[inline(always)]
    pub fn take(self, geometry: Geometry, slot: Slot) {
        self.with(|wheel| wheel.take(geometry, slot));
    }

    /// Moves the hand to a tick, over empty slots.
    #[inline(always)]
    pub fn advance(self, tick: u64) {
        self.with(|wheel| wheel.advance(tick));
    }

    /// Moves the hand of an empty wheel whose stepper sleeps to a tick.
    #[inline(always)]
    pub fn catch_up(self, tick: u64) {
        self.with(|wheel| wheel.catch_up(tick));
    }

    /// The list, in any slot, that a flow was put into last.
    #[inline(always)]
    pub fn latest(self) -> u32 {
        self.with(|wheel| wheel.latest)
    }

    /// Sets [`latest`](Self::latest).
    #[inline(always)]
    pub fn set_latest(self, list: u32) {
        self.with(|wheel| wheel.latest = list);
    }

    /// The tick at which the stepper will come back.
    #[inline(always)]
    pub fn wake(self) -> u64 {
        self.with(|wheel| wheel.wake)
    }

    /// Sets [`wake`](Self::wake).
    #[inline(always)]
    pub fn set_wake(self, tick: u64) {
        self.with(|wheel| wheel.wake = tick);
    }

    /// The flows that were taken out of the inbox and not yet looked at.
    #[inline(always)]
    pub fn inbox(self) -> Link {
        self.with(|wheel| wheel.inbox)
    }

    /// Sets [`inbox`](Self::inbox).
    #[inline(always)]
    pub fn set_inbox(self, first: Link) {
        self.with(|wheel| wheel.inbox = first);
    }
}
