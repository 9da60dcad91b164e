//! The inbox of a CPU: flows of its wheel that it must look at soon, because packets on other CPUs
//! have shortened their timeouts. The protocol, and why no flow is missed, is in
//! `twheel_common::inbox`.

use twheel_common::{
    counter::Counter,
    inbox::{self, Inbox},
    wheel::Link,
};

use crate::{
    clock,
    count::count,
    record::{self, At},
    wakes::Driver,
    wheel::own::Own,
};

/// Posts a flow to the CPU of its wheel, which must look at it before `due` (units).
#[inline(always)]
pub fn post(flow: At, due: u64) {
    if let Some(inbox) = Driver::other(flow.cpu()) {
        count(Counter::Posted);
        inbox::post(&inbox, flow.number(), clock::tick().from(due));
    }
}

/// Makes the CPU of a posted flow look at it before `due` (units).
#[inline(always)]
pub fn hurry(flow: At, due: u64) {
    if let Some(inbox) = Driver::other(flow.cpu()) {
        inbox::hurry(&inbox, clock::tick().from(due));
    }
}

/// The stepper begins a call: takes the flows out of this CPU's inbox, unless flows taken before
/// are still to be looked at. Returns whether there is a flow to look at.
#[inline(always)]
pub fn come(wheel: Own) -> bool {
    let left = wheel.inbox();
    if let Some(inbox) = Driver::own(wheel) {
        if left == Link::NONE {
            wheel.set_inbox(inbox::come(&inbox));
        } else {
            inbox.swap_called(false);
        }
    }
    wheel.inbox() != Link::NONE
}

/// As [`come`], for callers other than the stepper.
#[inline(always)]
pub fn take(wheel: Own) -> bool {
    if wheel.inbox() == Link::NONE
        && let Some(inbox) = Driver::own(wheel)
    {
        wheel.set_inbox(inbox::take(&inbox));
    }
    wheel.inbox() != Link::NONE
}

/// The stepper will sleep until `tick`, unless there is a flow in the inbox. Returns whether there
/// is.
#[inline(always)]
pub fn sleep(wheel: Own, tick: u64) -> bool {
    if wheel.inbox() != Link::NONE {
        // The posting CPU has not stored the next pointer yet. That takes it nanoseconds, unless a
        // hypervisor stops its CPU.
        wheel.set_wake(tick);
        return false;
    }
    if let Some(inbox) = Driver::own(wheel) {
        wheel.set_inbox(inbox::sleep(&inbox, tick));
    }
    wheel.inbox() != Link::NONE
}

/// The next of the flows that were taken. `None` if there is none, or if the CPU that posted it has
/// not stored its next pointer yet.
#[inline(always)]
pub fn next(wheel: Own) -> Option<At> {
    let Some(flow) = wheel.inbox().as_flow().and_then(record::with_details) else {
        wheel.set_inbox(Link::NONE);
        return None;
    };
    let next = flow.inbox();
    if next == Link::PENDING {
        return None;
    }
    wheel.set_inbox(next);
    Some(flow)
}
