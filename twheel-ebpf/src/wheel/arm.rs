//! Puts a flow into the slot of its deadline, on this CPU's wheel, and wakes the stepper if it
//! would sleep past that.

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
        wheel.catch_up(clock::tick().number(now));
        place(wheel, flow, due);
    }
    0
}

/// Moves a flow of this CPU's wheel to the slot in which it is now due, which may be an earlier
/// one.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_hasten(index: u32, due: u64) -> u64 {
    if let (Some(wheel), Some(flow)) = (this_cpu(), record::at(index)) {
        unlink(wheel, flow);
        place(wheel, flow, due);
    }
    0
}

/// Puts a flow into the slot of its deadline, and wakes the stepper if it would sleep past that.
#[inline(always)]
fn place(wheel: Own, flow: At, due: u64) {
    let slot = wheel.slot(clock::tick().from(due));
    push(wheel, flow, slot);
    timers::set_visit(flow.hot(), due);
    wake_for(wheel, slot);
}

/// Wakes this CPU's stepper if it would sleep past the slot's time.
#[inline(always)]
pub fn wake_for(wheel: Own, slot: Slot) {
    if slot.starts >= wheel.wake() {
        return;
    }
    // If the ring is full, `wake` stays as it was, and the next new flow calls again.
    if wakes::call(wheel) {
        wheel.set_wake(slot.starts);
    }
}
