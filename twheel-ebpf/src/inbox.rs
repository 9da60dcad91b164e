//! The inbox of a CPU: flows of its wheel that packets on other CPUs want looked at, because their deadline has come
//! forward. The protocol, and why nobody is missed, is in `twheel_common::inbox`.

use core::ffi::c_void;

use aya_ebpf::{bindings::BPF_RB_FORCE_WAKEUP, helpers::generated::bpf_map_lookup_percpu_elem};
use twheel_common::{
    counter::Counter,
    inbox::{self, Inbox},
    wheel::{Link, Wheel},
};

use crate::{
    atomic, clock,
    count::count,
    maps::{self, INBOXES, WAKES, WHEEL},
    table::{self, At},
    wheel,
};

/// The inbox of a CPU's wheel.
struct Of {
    cpu: u32,
    inbox: *mut maps::Inbox,
    wheel: *mut Wheel,
}

impl Of {
    /// Of another CPU.
    #[inline(always)]
    fn other(cpu: u32) -> Option<Self> {
        let zero = 0u32;
        // SAFETY: the map is per CPU, the key is its only one, and the helper gives null for a CPU that is not.
        let wheel = unsafe {
            bpf_map_lookup_percpu_elem(
                (&raw const WHEEL).cast_mut().cast::<c_void>(),
                (&raw const zero).cast(),
                cpu,
            )
        }
        .cast::<Wheel>();
        if wheel.is_null() {
            return None;
        }
        let inbox = INBOXES.get_ptr_mut(cpu)?;
        Some(Self { cpu, inbox, wheel })
    }

    /// Of this CPU, whose wheel this is.
    #[inline(always)]
    fn own(wheel: &mut Wheel) -> Option<Self> {
        let cpu = clock::cpu();
        let inbox = INBOXES.get_ptr_mut(cpu)?;
        Some(Self { cpu, inbox, wheel })
    }
}

impl Inbox for Of {
    #[inline(always)]
    fn swap_head(&self, head: Link) -> Link {
        // SAFETY: a place in a map, aligned to 8; all access is atomic.
        let before = unsafe { atomic::swap(&raw mut (*self.inbox).head, head.raw().into()) };
        Link::from_raw(before as u32)
    }

    #[inline(always)]
    fn swap_called(&self, called: bool) -> bool {
        // SAFETY: as above.
        unsafe { atomic::swap(&raw mut (*self.inbox).called, called.into()) != 0 }
    }

    #[inline(always)]
    fn wake(&self) -> u64 {
        // SAFETY: a place in a map, aligned to 8. Its owner stores there too: what is read may be a moment old.
        unsafe { (&raw const (*self.wheel).wake).read_volatile() }
    }

    #[inline(always)]
    fn set_wake(&self, tick: u64) {
        // SAFETY: as above; only that CPU comes here.
        unsafe { (&raw mut (*self.wheel).wake).write_volatile(tick) };
    }

    #[inline(always)]
    fn set_link(&self, flow: u32, link: Link) {
        if let Some(flow) = table::of(flow) {
            flow.set_inbox(link);
        }
    }

    #[inline(always)]
    fn call(&self) -> bool {
        let called = WAKES
            .output::<u64>(u64::from(self.cpu), u64::from(BPF_RB_FORCE_WAKEUP))
            .is_ok();
        if called {
            count(Counter::Wakes);
        }
        called
    }
}

/// Posts a flow to the CPU of its wheel, which is to look at it before `due` (units).
#[inline(always)]
pub fn post(flow: At, due: u64) {
    if let Some(inbox) = Of::other(flow.cpu()) {
        count(Counter::Posted);
        inbox::post(&inbox, flow.number(), clock::tick().from(due));
    }
}

/// Has a flow that is posted looked at before `due` (units).
#[inline(always)]
pub fn hurry(flow: At, due: u64) {
    if let Some(inbox) = Of::other(flow.cpu()) {
        inbox::hurry(&inbox, clock::tick().from(due));
    }
}

/// Calls this CPU's stepper. Whether it will come.
#[inline(always)]
pub fn call(wheel: &mut Wheel) -> bool {
    Of::own(wheel).is_some_and(|inbox| inbox::call(&inbox))
}

/// The stepper has come: takes what is in this CPU's inbox, unless what was taken before has not been looked at. Says
/// whether there is something to look at.
#[inline(always)]
pub fn come(wheel: &mut Wheel) -> bool {
    let left = wheel.inbox;
    if let Some(inbox) = Of::own(wheel) {
        if left == Link::NONE {
            wheel.inbox = inbox::come(&inbox);
        } else {
            inbox.swap_called(false);
        }
    }
    wheel.inbox != Link::NONE
}

/// The same, for others than the stepper.
#[inline(always)]
pub fn take(wheel: &mut Wheel) -> bool {
    if wheel.inbox == Link::NONE
        && let Some(inbox) = Of::own(wheel)
    {
        wheel.inbox = inbox::take(&inbox);
    }
    wheel.inbox != Link::NONE
}

/// The stepper means to come back at `tick`, unless there is something in the inbox to look at.
#[inline(always)]
pub fn sleep(wheel: &mut Wheel, tick: u64) -> bool {
    if wheel.inbox != Link::NONE {
        // The poster has not stored the link yet. That takes it nanoseconds, unless a hypervisor stops its CPU.
        wheel.wake = tick;
        return false;
    }
    if let Some(inbox) = Of::own(wheel) {
        wheel.inbox = inbox::sleep(&inbox, tick);
    }
    wheel.inbox != Link::NONE
}

/// Looks at one flow that was taken. Says whether it could.
#[inline(always)]
pub fn deliver(wheel: &mut Wheel, now: u64) -> bool {
    let Some(flow) = wheel.inbox.as_flow().and_then(table::of) else {
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
