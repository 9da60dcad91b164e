//! The inbox of a CPU: flows of its wheel that packets on other CPUs want looked at, because their deadline
//! has come forward.
//!
//! A list without a lock. Whoever posts a flow owns its link, by the bit that it has set in the flow's word
//! ([`Seen::is_posted`](twheel_common::state::Seen::is_posted)); so a flow is in one inbox at most once, and as long as it is there its CPU
//! does not end it. To post is to swap the head and then to write the link to what was the head; until then
//! the link says [`Link::PENDING`], and the CPU that takes the list comes back later.

use core::ffi::c_void;

use aya_ebpf::{bindings::BPF_RB_FORCE_WAKEUP, helpers::generated::bpf_map_lookup_percpu_elem};
use twheel_common::{
    counter::Counter,
    wheel::{Link, Wheel},
};

use crate::{
    atomic, clock,
    count::count,
    maps::{INBOXES, WAKES, WHEEL},
    table::{self, At},
    wheel,
};

/// Posts a flow to the CPU of its wheel, which is to look at it before `due` (units).
#[inline(always)]
pub fn post(flow: At, due: u64) {
    let cpu = flow.cpu();
    let Some(inbox) = INBOXES.get_ptr_mut(cpu) else {
        return;
    };
    flow.set_inbox(Link::PENDING);
    let me = Link::flow(flow.index());
    // SAFETY: a place in a map, aligned to 8; all access is atomic.
    let before = unsafe { atomic::swap(&raw mut (*inbox).head, me.raw().into()) };
    flow.set_inbox(Link::from_raw(before as u32));
    count(Counter::Posted);
    wake(cpu, clock::tick().from(due));
}

/// Has a flow that is posted looked at before `due` (units).
#[inline(always)]
pub fn hurry(flow: At, due: u64) {
    wake(flow.cpu(), clock::tick().from(due));
}

/// Calls a stepper of another CPU that means to sleep past a tick. The swap has come before: either it sees the
/// flow in the inbox after it has said how long it will sleep, or that is seen here.
#[inline(always)]
fn wake(cpu: u32, tick: u64) {
    let zero = 0u32;
    // SAFETY: the map is per CPU, the key is its only one, and the helper gives null for a CPU that is not.
    let other = unsafe {
        bpf_map_lookup_percpu_elem(
            (&raw const WHEEL).cast_mut().cast::<c_void>(),
            (&raw const zero).cast(),
            cpu,
        )
    }
    .cast::<Wheel>();
    if other.is_null() {
        return;
    }
    // SAFETY: a place in a map, aligned to 8. Its owner stores there too: what is read may be a moment old.
    let asleep = unsafe { (&raw const (*other).wake).read_volatile() } > tick;
    if !asleep {
        return;
    }
    if call(cpu) {
        // SAFETY: as above. It only says that the stepper is called; whoever comes next need not.
        unsafe { (&raw mut (*other).wake).write_volatile(tick) };
    }
}

/// Calls the stepper of a CPU; whether there was room for that.
///
/// The ring has room for several calls of every CPU, and a stepper is called again only for a tick that is earlier
/// still.
#[inline(always)]
pub fn call(cpu: u32) -> bool {
    let called = WAKES
        .output::<u64>(u64::from(cpu), u64::from(BPF_RB_FORCE_WAKEUP))
        .is_ok();
    if called {
        count(Counter::Wakes);
    }
    called
}

/// Takes what is in this CPU's inbox, if what was taken before has been looked at. Says whether there is
/// something to look at. Ordered behind whatever was written before.
#[inline(always)]
pub fn take(wheel: &mut Wheel) -> bool {
    if wheel.inbox != Link::NONE {
        return true;
    }
    let Some(inbox) = INBOXES.get_ptr_mut(clock::cpu()) else {
        return false;
    };
    // SAFETY: as in `post`.
    let head = unsafe { atomic::swap(&raw mut (*inbox).head, 0) };
    wheel.inbox = Link::from_raw(head as u32);
    head != 0
}

/// Looks at one flow that was taken. Says whether it could.
#[inline(always)]
pub fn deliver(wheel: &mut Wheel, now: u64) -> bool {
    let Some(flow) = wheel.inbox.as_flow().and_then(table::at) else {
        wheel.inbox = Link::NONE;
        return false;
    };
    let next = flow.inbox();
    if next == Link::PENDING {
        return false;
    }
    wheel.inbox = next;
    wheel::deliver(flow, now);
    true
}
