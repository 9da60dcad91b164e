//! One call of the stepper: a batch of visits to the flows of this CPU's wheel that are due.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_loop;
use twheel_common::{
    counter::Counter,
    step::{Outcome, Step},
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
