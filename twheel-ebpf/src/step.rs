//! One call of the stepper: a batch of timer visits to the flows of this CPU's wheel that are due.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{BPF_ANY, xdp_action, xdp_md},
    helpers::generated::bpf_loop,
    programs::XdpContext,
};
use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::Word,
    key::FlowKey,
    segment::Segment,
    step::{Argument, Call, Delete, Enter, MAX_DELETES, Outcome, Step},
    wheel::{Link, NEVER, Slot},
};

use crate::{
    clock, config,
    count::{add, count},
    emit, inbox,
    maps::CALLS,
    touch::begin,
    verifier::{Given, bit, given_mut, in_memory},
    wheel::{
        end,
        own::{Own, this_cpu},
        visit::{self, Handled},
    },
};

/// The argument of a program that userspace runs as a test: its "packet".
#[inline(always)]
pub fn argument<T: Argument>(ctx: &mut XdpContext) -> Option<&mut T> {
    let call = ctx.data();
    if call + size_of::<T>() > ctx.data_end() {
        return None;
    }
    // SAFETY: the bounds were just checked, any bytes are a valid `T`, and the kernel aligns the
    // test run's buffer (a page plus XDP_PACKET_HEADROOM of 256). No other code accesses the
    // buffer, and the context is borrowed for as long as this reference is used.
    Some(unsafe { &mut *(call as *mut T) })
}

/// Returns the answer of a program that userspace runs: its "packet", as it is now. The result is
/// the program's verdict.
#[inline(always)]
pub fn answer(ctx: &XdpContext) -> u32 {
    if config!(live) == 0 {
        // The kernel copies the packet back to the caller.
        return xdp_action::XDP_PASS;
    }
    let call = ctx.data() as *const Call;
    if ctx.data() + size_of::<Call>() <= ctx.data_end() {
        // SAFETY: the bounds were just checked, and no other code accesses the frame.
        unsafe {
            let number = (&raw const (*call).number).read();
            // If the map is full, the caller finds no answer and reports that.
            let argument = &(*call).argument;
            let _ = CALLS.insert(number, argument, BPF_ANY.into());
        }
    }
    // A live frame that passed would be received by the stack.
    xdp_action::XDP_DROP
}

/// Visits at most `call.budget` flows and fills in the rest of the call.
#[inline(always)]
pub fn step(call: &mut Step) {
    let now = clock::now();
    let mut state = State {
        now,
        tick: clock::tick().number(now),
        next: NEVER,
        outcome: Outcome::Budget as u32,
        visits: 0,
        rearmed: 0,
        expired: emit::staged(),
        micros: if config::rto_is_on() {
            clock::micros()
        } else {
            0
        },
        round: 0,
    };
    clock::see(now);
    step_come();
    // SAFETY: the callback has the signature that the helper calls, and `state` outlives the loop.
    unsafe {
        bpf_loop(
            call.budget,
            visit_one as *mut c_void,
            (&raw mut state).cast(),
            0,
        );
    }
    add(Counter::Visits, state.visits);
    add(Counter::Rearmed, state.rearmed);
    add(Counter::Expired, state.visits - state.rearmed);
    end::flush();
    let left = emit::staged();
    if left != 0 && state.outcome != Outcome::RingFull as u32 {
        count(Counter::RingFull);
        state.outcome = Outcome::RingFull as u32;
    }
    *call = Step {
        budget: call.budget,
        outcome: state.outcome,
        now,
        next: state.next,
        visits: state.visits,
        expired: state.expired - left,
    };
}

#[repr(C)]
struct State {
    now: u64,
    tick: u64,
    next: u64,
    outcome: u32,
    visits: u32,
    rearmed: u32,
    expired: u32,
    /// On the retransmission timers' clock, when the call began.
    micros: u32,
    /// As in [`visit::step`].
    round: u32,
}

// SAFETY: `bpf_loop` hands the reference of `step` to the callbacks below, and they to the global
// functions; nothing else has a pointer to it.
unsafe impl Given for State {}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn visit_one(_number: u64, state: *mut c_void) -> i64 {
    bit(step_visit(state.cast())) as i64
}

/// One timer visit, verified once: otherwise some kernels (6.19) verify each turn of a loop anew,
/// because its state differs. Returns 0 to go on.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn step_visit(state: *mut State) -> u64 {
    let (Some(state), Some(wheel)) = (given_mut(state), this_cpu()) else {
        return 1;
    };
    if wheel.inbox() != Link::NONE && bit(step_deliver(state.now)) != 0 {
        state.visits += 1;
        state.rearmed += 1;
        // The flow may be one of those that were gathered for the next visits.
        state.round = 0;
        return 0;
    }
    match visit::step(wheel, state.now, state.tick, state.micros, &mut state.round) {
        handled @ (Handled::Rearmed | Handled::Reported) => {
            state.visits += 1;
            state.rearmed += 1;
            state.expired += u32::from(matches!(handled, Handled::Reported));
            0
        }
        Handled::Removed => {
            state.visits += 1;
            state.expired += 1;
            0
        }
        Handled::RingFull => {
            count(Counter::RingFull);
            state.outcome = Outcome::RingFull as u32;
            1
        }
        Handled::Nothing(next) => {
            state.next = match next {
                Some(Slot { starts, .. }) => starts,
                None => NEVER,
            };
            bit(step_sleep(state))
        }
    }
}

/// Calls [`inbox::come`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn step_come() -> u64 {
    this_cpu().is_some_and(inbox::come).into()
}

/// Calls [`deliver`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn step_deliver(now: u64) -> u64 {
    this_cpu().is_some_and(|wheel| deliver(wheel, now)).into()
}

/// Looks at one flow that was taken out of the inbox. Returns whether there was one.
#[inline(always)]
fn deliver(wheel: Own, now: u64) -> bool {
    match inbox::next(wheel) {
        Some(flow) => {
            visit::deliver(flow, now);
            true
        }
        None => false,
    }
}

/// No more flows are due: the stepper sleeps until the next slot that holds flows. 0 if there is a
/// flow to look at after all.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn step_sleep(state: *mut State) -> u64 {
    let (Some(state), Some(wheel)) = (given_mut(state), this_cpu()) else {
        return 1;
    };
    if wheel.inbox() != Link::NONE {
        // A posting CPU has not stored the next pointer yet.
        state.next = state.tick + 1;
    }
    // From here on, a CPU that posts a flow that is due earlier wakes the stepper.
    if inbox::sleep(wheel, state.next) {
        // A flow was posted before `wake` was visible.
        return 0;
    }
    state.outcome = Outcome::Done as u32;
    1
}

/// Most flows taken out of the inbox in a call that deletes.
const MAX_DELIVERIES: u32 = 1024;

/// Deletes the flows that are listed in the packet, as [`Delete`]s.
#[inline(always)]
pub fn delete(ctx: &XdpContext) {
    let mut state = Deletes {
        ctx: ctx.ctx,
        now: clock::now(),
    };
    // SAFETY: the callbacks have the signature that the helper calls, and `state` outlives the loops.
    unsafe {
        // A flow that is in the inbox cannot end, so the inbox is emptied first.
        bpf_loop(
            MAX_DELIVERIES,
            deliver_one as *mut c_void,
            (&raw mut state).cast(),
            0,
        );
        bpf_loop(
            MAX_DELETES as u32,
            delete_one as *mut c_void,
            (&raw mut state).cast(),
            0,
        );
    }
}

#[repr(C)]
struct Deletes {
    ctx: *mut xdp_md,
    now: u64,
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn deliver_one(_number: u64, state: *mut c_void) -> i64 {
    // SAFETY: `delete` passes a `Deletes` to which there is no other reference meanwhile.
    let state = unsafe { &mut *state.cast::<Deletes>() };
    let Some(wheel) = this_cpu() else {
        return 1;
    };
    let delivered = inbox::take(wheel) && deliver(wheel, state.now);
    (!delivered).into()
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn delete_one(number: u64, state: *mut c_void) -> i64 {
    // SAFETY: `delete` passes a `Deletes` to which there is no other reference meanwhile.
    let state = unsafe { &mut *state.cast::<Deletes>() };
    let ctx = XdpContext::new(state.ctx);
    let place = ctx.data() + (number as usize & (MAX_DELETES - 1)) * size_of::<Delete>();
    if place + size_of::<Delete>() > ctx.data_end() {
        return 1;
    }
    // SAFETY: the bounds were just checked, the kernel aligns the buffer of a test run, and no
    // other code accesses it.
    let entry = unsafe { &mut *(place as *mut Delete) };
    let reason = if entry.outcome == Reason::Flushed as u32 {
        Reason::Flushed
    } else {
        Reason::Deleted
    };
    entry.outcome = end::delete(entry.index, Word(entry.word), reason, state.now) as u32;
    0
}

/// Enters a flow, on this CPU's wheel.
#[inline(always)]
pub fn enter(call: &Enter) {
    let now = clock::now();
    let segment = Segment {
        key: FlowKey::from_parts(call.addresses, call.ports),
        ..Segment::NONE
    };
    let segment = in_memory(&segment);
    let rule_origin = u64::from(call.rule) | u64::from(call.origin) << 32;
    begin::touch_enter(segment, now, call.seen, rule_origin, call.idle);
}
