//! A sweep: goes over the flows of this CPU's wheel. Each gets the rule of the policy in force that
//! it meets, and is armed by the present timeouts; or each is reported.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_loop;
use twheel_common::{
    point::Point,
    policy::Hook,
    seen::Seen,
    segment::Segment,
    step::{Followed, MAX_SWEEP, Sweep},
};

use crate::{
    clock, config, emit,
    maps::COUNTED,
    policy::{names_interfaces, policy_rule},
    record::{self, At},
    rule, updates,
    verifier::{bit, in_memory},
    wheel::{end, visit},
};

/// Sweeps a range of the table.
#[inline(always)]
pub fn sweep(call: &mut Sweep) {
    let mut state = Sweeps {
        now: clock::now(),
        from: call.from,
        interface: call.interface,
        reports: call.reports,
        swept: 0,
        flows: 0,
        followed: Followed::default(),
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
    if call.reports != 0 {
        end::flush();
        call.staged = emit::staged();
    }
    call.flows = state.flows;
    call.now = state.now as u32;
    call.swept = state.swept;
    call.followed = state.followed;
}

#[repr(C)]
struct Sweeps {
    now: u64,
    from: u32,
    interface: u32,
    reports: u32,
    swept: u32,
    flows: u32,
    followed: Followed,
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn sweep_one(number: u64, state: *mut c_void) -> i64 {
    // SAFETY: `sweep` passes a `Sweeps` to which there is no other reference meanwhile.
    let state = unsafe { &mut *state.cast::<Sweeps>() };
    let Some(flow) = record::at(state.from + number as u32) else {
        return 1;
    };
    if flow.is_ours() && !flow.word().is_dead() {
        if state.reports != 0 {
            if updates::update_report(flow.index(), state.now) == updates::RING_FULL {
                return 1;
            }
        } else {
            let followed = sweep_follow(flow.index(), state.interface);
            let count = |what: u64| bit(followed / what) as u32;
            state.followed.changed += count(CHANGED);
            state.followed.lost += count(LOST);
            state.followed.gained += count(GAINED);
            state.followed.exposed += count(EXPOSED);
            state.followed.due += bit(visit::wheel_look(flow.index(), state.now)) as u32;
        }
        state.flows += 1;
    }
    state.swept += 1;
    0
}

/// Results of [`sweep_follow`], as bits: the flow had a rule and has another one.
const CHANGED: u64 = 1;
/// It had a rule and has none.
const LOST: u64 = 2;
/// It had no rule and has one.
const GAINED: u64 = 4;
/// It was not to be reaped and may be now.
const EXPOSED: u64 = 8;

/// Gives a flow of this CPU's wheel the rule that it meets. `only`: [`Sweep::interface`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sweep_follow(index: u32, only: u32) -> u64 {
    let Some(flow) = record::at(index) else {
        return 0;
    };
    let before = flow.rule();
    let met = sweep_rule(index, only) as u16;
    let mut followed = 0;
    if met != before {
        flow.set_rule(met);
        followed = if met == 0 {
            LOST
        } else if before == 0 {
            GAINED
        } else {
            CHANGED
        };
    }
    if rule::was_spared(before) && rule::reaps(met) {
        followed |= EXPOSED;
    }
    followed
}

/// The rule that a live flow meets. (A function of its own: the verifier adds up the stacks of
/// callers and callees.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn sweep_rule(index: u32, only: u32) -> u32 {
    let Some(flow) = record::at(index) else {
        return 0;
    };
    let before = flow.rule();
    let seen = flow.word().seen();
    let (interface, hook) = place(flow, seen, only);
    if interface == 0 && before != 0 && names_interfaces() && !rule::is_gone(before) {
        // It cannot be known whether the flow meets a rule that names interfaces. So it keeps the
        // rule that it met.
        return before.into();
    }
    let segment = Segment {
        key: flow.key(),
        ..Segment::NONE
    };
    policy_rule(in_memory(&segment), seen.0, interface, hook as u32)
}

/// The interface on which a flow is seen, and the hook there. The interface is 0 if it is not
/// known.
#[inline(always)]
fn place(flow: At, seen: Seen, only: u32) -> (u32, Hook) {
    let hook = match flow.is_outgoing() {
        false => Hook::Ingress,
        true => Hook::Egress,
    };
    if config!(watched) == 0 {
        return (only, hook);
    }
    match flow.seen_at(seen) {
        Point::NONE => (0, hook),
        point => {
            let interface = COUNTED.get(point.interface()).copied().unwrap_or(0);
            (interface, point.hook())
        }
    }
}
