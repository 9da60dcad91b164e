//! The inbox of a CPU: flows of its wheel that packets on other CPUs want looked at, because their deadline has come
//! forward. The protocol, and why nobody is missed, is in `twheel_common::inbox`.

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

/// Posts a flow to the CPU of its wheel, which is to look at it before `due` (units).
#[inline(always)]
pub fn post(flow: At, due: u64) {
    if let Some(inbox) = Driver::other(flow.cpu()) {
        count(Counter::Posted);
        inbox::post(&inbox, flow.number(), clock::tick().from(due));
    }
}

/// Has a flow that is posted looked at before `due` (units).
#[inline(always)]
pub fn hurry(flow: At, due: u64) {
    if let Some(inbox) = Driver::other(flow.cpu()) {
        inbox::hurry(&inbox, clock::tick().from(due));
    }
}

/// The stepper has come: takes what is in this CPU's inbox, unless what was taken before has not been looked at. Says
/// whether there is something to look at.
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

/// The same, for others than the stepper.
#[inline(always)]
pub fn take(wheel: Own) -> bool {
    if wheel.inbox() == Link::NONE
        && let Some(inbox) = Driver::own(wheel)
    {
        wheel.set_inbox(inbox::take(&inbox));
    }
    wheel.inbox() != Link::NONE
}

/// The stepper means to come back at `tick`, unless there is something in the inbox to look at.
#[inline(always)]
pub fn sleep(wheel: Own, tick: u64) -> bool {
    if wheel.inbox() != Link::NONE {
        // The poster has not stored the link yet. That takes it nanoseconds, unless a hypervisor stops its CPU.
        wheel.set_wake(tick);
        return false;
    }
    if let Some(inbox) = Driver::own(wheel) {
        wheel.set_inbox(inbox::sleep(&inbox, tick));
    }
    wheel.inbox() != Link::NONE
}

/// The next of the flows that were taken. `None`: there is none, or whoever has posted it has not stored yet what follows.
#[inline(always)]
pub fn next(wheel: Own) -> Option<At> {
    let Some(flow) = wheel.inbox().as_flow().and_then(record::of) else {
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
