//! Wakes a CPU's stepper, for packets of that CPU and of others: `twheel_common::inbox` on the
//! maps.

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
    record,
    wheel::own::Own,
};

/// The stepper of a CPU: the inbox of its wheel, and when it will come back.
pub struct Driver {
    cpu: u32,
    inbox: *mut maps::Inbox,
    wheel: *mut Wheel,
}

impl Driver {
    /// The stepper of another CPU.
    #[inline(always)]
    pub fn other(cpu: u32) -> Option<Self> {
        let zero = 0u32;
        // SAFETY: the map is per CPU, the key is its only one, and the helper returns null for a
        // CPU that does not exist.
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

    /// This CPU's stepper; `wheel` is this CPU's wheel.
    #[inline(always)]
    pub fn own(wheel: Own) -> Option<Self> {
        let cpu = clock::cpu();
        let inbox = INBOXES.get_ptr_mut(cpu)?;
        Some(Self {
            cpu,
            inbox,
            wheel: wheel.as_ptr(),
        })
    }
}

impl Inbox for Driver {
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
        // SAFETY: a place in a map, aligned to 8. Its owner stores there too, so the value read may
        // be a moment old.
        unsafe { (&raw const (*self.wheel).wake).read_volatile() }
    }

    #[inline(always)]
    fn set_wake(&self, tick: u64) {
        // SAFETY: as above; only that CPU stores here.
        unsafe { (&raw mut (*self.wheel).wake).write_volatile(tick) };
    }

    #[inline(always)]
    fn set_link(&self, flow: u32, link: Link) {
        if let Some(flow) = record::with_details(flow) {
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

/// Wakes this CPU's stepper. Returns whether it will come.
#[inline(always)]
pub fn call(wheel: Own) -> bool {
    Driver::own(wheel).is_some_and(|inbox| inbox::call(&inbox))
}
