//! A flow whose deadline has come forward is looked at earlier than the wheel means to.

use twheel_common::{counter::Counter, seen::Seen, segment::Segment};

use crate::{
    count::count,
    inbox,
    record::{self, At},
    table, timers,
    verifier::given,
    wheel::arm::wheel_hasten,
};

/// Has a flow looked at when it is `due` (units): a flow of this CPU's wheel is moved there, and one of another CPU's is
/// posted to that CPU. `queue` makes it one that is to be posted, and gives its state bits before and after that. Says
/// whether the flow will be looked at.
#[inline(always)]
fn bring_forward(flow: At, due: u64, queue: impl FnOnce() -> Option<(Seen, Seen)>) -> bool {
    if flow.is_ours() {
        wheel_hasten(flow.index(), due);
        return true;
    }
    match queue() {
        Some((before, after)) => forward_post(flow.index(), before.0, after.0, due) != 0,
        None => false,
    }
}

/// Has a flow looked at when its deadline is `due`, which a change of its state has brought forward; 0: it has not.
/// `before` and `after` are the state bits around that change, which has made it one to be posted if it is another CPU's.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn forward_deadline(index: u32, before: u32, after: u32, due: u64) -> u64 {
    let Some(flow) = record::at(index) else {
        return 0;
    };
    if due != 0 {
        bring_forward(flow, due, || Some((Seen(before), Seen(after))));
    }
    0
}

/// Has a flow looked at when a retransmission timer of its expires, which a packet has started.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn forward_timer(index: u32, segment: *const Segment, due: u64) -> u64 {
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
        return 0;
    };
    if bring_forward(flow, due, || {
        table::mark(flow.hot(), &segment.key, Seen::posted)
    }) {
        // So that the next packet does not do it again.
        timers::set_visit(flow.hot(), due);
    } else {
        // A flow that is just being entered is not posted: the next timer that starts tries again.
        count(Counter::Raced);
    }
    0
}

/// Posts a flow to the CPU on whose wheel it stands. 1 if it is.
///
/// (A function of its own: the verifier adds up what callers and callees have on the stack.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn forward_post(index: u32, before: u32, after: u32, due: u64) -> u64 {
    let Some(flow) = record::at(index) else {
        return 0;
    };
    if Seen(before).is_posted() {
        // It was posted already, perhaps for a later time.
        inbox::hurry(flow, due);
    } else if Seen(after).is_posted() {
        inbox::post(flow, due);
    } else {
        return 0;
    }
    1
}
