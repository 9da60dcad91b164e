//! Puts a flow into the slot of its deadline, on this CPU's wheel, and calls the stepper if it means to sleep past that.

use twheel_common::wheel::Slot;

use crate::{
    clock,
    record::{self, At},
    timers, wakes,
};

use super::{
    lists::{push, unlink},
    own::{Own, this_cpu},
};

/// Puts a flow that has just entered the table on this CPU's wheel.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_start(index: u32, now: u64, due: u64) -> u64 {
    if let (Some(wheel), Some(flow)) = (this_cpu(), record::at(index)) {
        wheel.catch_up(clock::tick().of(now));
        place(wheel, flow, due);
    }
    0
}

/// Moves a flow of this CPU's wheel to an earlier slot, or wherever its deadline has got to.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_hasten(index: u32, due: u64) -> u64 {
    if let (Some(wheel), Some(flow)) = (this_cpu(), record::at(index)) {
        unlink(wheel, flow);
        place(wheel, flow, due);
    }
    0
}

/// Puts a flow into the slot of its deadline, and calls the stepper if it means to sleep past that.
#[inline(always)]
fn place(wheel: Own, flow: At, due: u64) {
    let slot = wheel.slot(clock::tick().from(due));
    push(wheel, flow, slot);
    timers::set_visit(flow.hot(), due);
    wake_for(wheel, slot);
}

/// Calls this CPU's stepper if it means to sleep past the slot's turn.
#[inline(always)]
pub fn wake_for(wheel: Own, slot: Slot) {
    if slot.starts >= wheel.wake() {
        return;
    }
    // Were the ring full, `wake` would stay as it was: the next new flow calls.
    if wakes::call(wheel) {
        wheel.set_wake(slot.starts);
    }
}
