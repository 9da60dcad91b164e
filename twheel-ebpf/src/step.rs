//! One call of the stepper: a batch of visits to the flows of this CPU's wheel that are due.

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
    step::{Argument, Call, Delete, Enter, MAX_DELETES, MAX_SWEEP, Outcome, Step, Sweep},
    wheel::{Link, NEVER, Slot},
};

use crate::{
    clock, config,
    count::{add, count},
    emit, inbox,
    maps::CALLS,
    record,
    touch::begin,
    verifier::{bit, given_mut, in_memory},
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
    // SAFETY: the bounds were just checked, any bytes are a `T`, and the kernel aligns the test run's buffer (a page plus
    // XDP_PACKET_HEADROOM of 256). Nobody else has that, and the context is borrowed for as long as this is used.
    Some(unsafe { &mut *(call as *mut T) })
}

/// Gives the answer of a program that userspace runs back: its "packet", as it is now. The program's verdict.
#[inline(always)]
pub fn answer(ctx: &XdpContext) -> u32 {
    if config!(live) == 0 {
        // The kernel copies it back.
        return xdp_action::XDP_PASS;
    }
    let call = ctx.data() as *const Call;
    if ctx.data() + size_of::<Call>() <= ctx.data_end() {
        // SAFETY: the bounds were just checked, and nobody else has the frame.
        unsafe {
            let number = (&raw const (*call).number).read();
            // If the map is full, the caller finds no answer and reports that.
            let argument = &(*call).argument;
            let _ = CALLS.insert(number, argument, BPF_ANY.into());
        }
    }
    // A live frame that passes would be received.
    xdp_action::XDP_DROP
}

/// Visits at most `call.budget` flows and fills in the rest of the call.
#[inline(always)]
pub fn step(call: &mut Step) {
    let now = clock::now();
    let mut state = State {
        now,
        tick: clock::tick().of(now),
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
    /// Of the timers, at the beginning of the call.
    micros: u32,
    /// See [`visit::step`].
    round: u32,
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn visit_one(_number: u64, state: *mut c_void) -> i64 {
    bit(step_visit(state.cast())) as i64
}

/// One visit, verified once: some kernels (6.19) tell the turns of a loop apart by what its state has got to. 0 to go on.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn step_visit(state: *mut State) -> u64 {
    let (Some(state), Some(wheel)) = (given_mut(state), this_cpu()) else {
        return 1;
    };
    if wheel.inbox() != Link::NONE && bit(step_deliver(state.now)) != 0 {
        state.visits += 1;
        state.rearmed += 1;
        // It may have been one of those that are about to be visited.
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

/// [`inbox::come`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn step_come() -> u64 {
    this_cpu().is_some_and(inbox::come).into()
}

/// [`deliver`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn step_deliver(now: u64) -> u64 {
    this_cpu().is_some_and(|wheel| deliver(wheel, now)).into()
}

/// Looks at one flow that was taken out of the inbox. Says whether it could.
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

/// Nothing more is due: the stepper sleeps until the next slot has its turn. 0 if there is something to look at after all.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn step_sleep(state: *mut State) -> u64 {
    let (Some(state), Some(wheel)) = (given_mut(state), this_cpu()) else {
        return 1;
    };
    if wheel.inbox() != Link::NONE {
        // A poster has not stored the link yet.
        state.next = state.tick + 1;
    }
    // From here on whoever posts a flow that is due earlier calls.
    if inbox::sleep(wheel, state.next) {
        // Posted before `wake` was visible.
        return 0;
    }
    state.outcome = Outcome::Done as u32;
    1
}

/// Flows taken out of the inbox, at most, in a call that deletes.
const MAX_DELIVERIES: u32 = 1024;

/// Deletes the flows of a packet of [`Delete`]s.
#[inline(always)]
pub fn delete(ctx: &XdpContext) {
    let mut state = Deletes {
        ctx: ctx.ctx,
        now: clock::now(),
    };
    // SAFETY: the callbacks have the signature that the helper calls, and `state` outlives the loops.
    unsafe {
        // A flow that stands in the inbox does not end.
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
    // SAFETY: `delete` passes a `Deletes` that nobody else refers to meanwhile.
    let state = unsafe { &mut *state.cast::<Deletes>() };
    let Some(wheel) = this_cpu() else {
        return 1;
    };
    let delivered = inbox::take(wheel) && deliver(wheel, state.now);
    (!delivered).into()
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn delete_one(number: u64, state: *mut c_void) -> i64 {
    // SAFETY: `delete` passes a `Deletes` that nobody else refers to meanwhile.
    let state = unsafe { &mut *state.cast::<Deletes>() };
    let ctx = XdpContext::new(state.ctx);
    let place = ctx.data() + (number as usize & (MAX_DELETES - 1)) * size_of::<Delete>();
    if place + size_of::<Delete>() > ctx.data_end() {
        return 1;
    }
    // SAFETY: the bounds were just checked, the kernel aligns the buffer of a test run, and nobody else
    // has it.
    let entry = unsafe { &mut *(place as *mut Delete) };
    let reason = if entry.outcome == Reason::Flushed as u32 {
        Reason::Flushed
    } else {
        Reason::Deleted
    };
    entry.outcome = end::delete(entry.index, Word(entry.word), reason, state.now) as u32;
    0
}

/// Enters a flow, which then stands on this CPU's wheel.
#[inline(always)]
pub fn enter(call: &Enter) {
    let now = clock::now();
    let segment = Segment {
        key: FlowKey::from_parts(call.addresses, call.ports),
        ..Segment::NONE
    };
    let segment = in_memory(&segment);
    begin::touch_enter(segment, now, call.seen, call.rule, call.idle);
}

/// Arms the flows of this CPU's wheel in a range of the table as timeouts and rules are now.
#[inline(always)]
pub fn sweep(call: &mut Sweep) {
    let mut state = Sweeps {
        now: clock::now(),
        from: call.from,
        armed: 0,
    };
    let count = if call.count < MAX_SWEEP {
        call.count
    } else {
        MAX_SWEEP
    };
    // SAFETY: the callback has the signature that the helper calls, and `state` outlives the loop.
    unsafe {
        bpf_loop(count, sweep_one as *mut c_void, (&raw mut state).cast(), 0);
    }
    call.armed = state.armed;
    call.now = state.now as u32;
}

#[repr(C)]
struct Sweeps {
    now: u64,
    from: u32,
    armed: u32,
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn sweep_one(number: u64, state: *mut c_void) -> i64 {
    // SAFETY: `sweep` passes a `Sweeps` that nobody else refers to meanwhile.
    let state = unsafe { &mut *state.cast::<Sweeps>() };
    let Some(flow) = record::at(state.from + number as u32) else {
        return 1;
    };
    if flow.is_ours() && !flow.word().is_dead() {
        if flow.has_lost_its_rule() {
            flow.clear_rule();
        }
        visit::look(flow, state.now);
        state.armed += 1;
    }
    0
}
