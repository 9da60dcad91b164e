//! One call of the stepper: a batch of visits to the flows of this CPU's wheel that are due.

use core::ffi::c_void;

use aya_ebpf::{bindings::xdp_md, helpers::generated::bpf_loop, programs::XdpContext};
use twheel_common::{
    counter::Counter,
    flow::Word,
    step::{Delete, MAX_DELETES, Outcome, Step},
    wheel::{NEVER, Slot},
};

use crate::{
    clock,
    count::count,
    maps::CONFIG,
    wheel::{self, Handled},
};

/// Visits at most `call.budget` flows and fills in the rest of the call.
#[inline(always)]
pub fn step(call: &mut Step) {
    let now = clock::now();
    let mut state = State {
        now,
        tick: CONFIG.load().tick_of(now),
        next: NEVER,
        outcome: Outcome::Budget as u32,
        visits: 0,
        expired: 0,
    };
    // SAFETY: the callback has the signature that the helper calls, and `state` outlives the loop.
    unsafe {
        bpf_loop(
            call.budget,
            visit_one as *mut c_void,
            (&raw mut state).cast(),
            0,
        );
    }
    *call = Step {
        budget: call.budget,
        outcome: state.outcome,
        now,
        next: state.next,
        visits: state.visits,
        expired: state.expired,
    };
}

#[repr(C)]
struct State {
    now: u64,
    tick: u64,
    next: u64,
    outcome: u32,
    visits: u32,
    expired: u32,
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn visit_one(_index: u64, state: *mut c_void) -> i64 {
    // SAFETY: `step` passes a `State` that nobody else refers to meanwhile.
    let state = unsafe { &mut *state.cast::<State>() };
    let Some(wheel) = wheel::this_cpu() else {
        return 1;
    };
    match wheel::step(wheel, state.now, state.tick) {
        Handled::Rearmed => {
            count(Counter::Visits);
            count(Counter::Rearmed);
            state.visits += 1;
            0
        }
        Handled::Removed => {
            count(Counter::Visits);
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
            // From here on a flow due before this must call.
            wheel.wake = state.next;
            state.outcome = Outcome::Done as u32;
            1
        }
    }
}

/// Deletes the flows of a packet of [`Delete`]s.
#[inline(always)]
pub fn delete(ctx: &XdpContext) {
    let mut state = Deletes {
        ctx: ctx.ctx,
        now: clock::now(),
    };
    // SAFETY: the callback has the signature that the helper calls, and `state` outlives the loop.
    unsafe {
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
    entry.outcome = wheel::delete(entry.index, Word(entry.word), state.now) as u32;
    0
}
