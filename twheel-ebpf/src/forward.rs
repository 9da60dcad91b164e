//! A flow whose timeout has become shorter is visited earlier than the wheel would.

use twheel_common::{counter::Counter, seen::Seen, segment::Segment};

use crate::{
    count::count,
    inbox,
    record::{self, At},
    table, timers,
    verifier::given,
    wheel::arm::wheel_hasten,
};

/// Makes the wheel visit a flow when it is `due` (units): a flow of this CPU's wheel is moved
/// there, and a flow of another CPU's wheel is posted to that CPU. `queue` marks the flow as
/// posted, and returns its state bits before and after. Returns whether the flow will be visited.
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

/// Makes the wheel visit a flow when its deadline is `due`, which a change of its state has brought
/// forward; 0: it has not. `before` and `after` are the state bits around that change, which has
/// marked the flow as posted if it is on another CPU's wheel.
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

/// Makes the wheel visit a flow when a retransmission timer expires that a packet has started.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn forward_timer(index: u32, segment: *const Segment, due: u64) -> u64 {
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
        return 0;
    };
    if bring_forward(flow, due, || {
        table::mark(flow.hot(), &segment.key, Seen::posted)
    }) {
        // So that the next packet does not move it again.
        timers::set_visit(flow.hot(), due);
    } else {
        // A flow that is just being entered cannot be posted: the next timer that starts tries
        // again.
        count(Counter::Raced);
    }
    0
}

/// Posts a flow to the CPU on whose wheel it stands. 1 if the flow is posted now.
///
/// (A function of its own: the verifier adds up the stacks of callers and callees.)
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
