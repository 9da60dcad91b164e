//! Programs that find out how the kernel runs programs: whether code that packets trigger can run
//! on a CPU during a test run there. `twheel::stepping` runs them.
#![allow(missing_docs)]
#![cfg_attr(target_arch = "bpf", no_std, no_main)]

use core::ffi::c_void;

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, bpf_timer, xdp_action},
    btf_maps,
    helpers::{
        bpf_ktime_get_ns,
        generated::{bpf_loop, bpf_timer_init, bpf_timer_set_callback, bpf_timer_start},
    },
    macros::{btf_map, map, xdp},
    maps::Array,
    programs::XdpContext,
};
use twheel_common::probe::Probe;

#[map]
static PROBE: Array<Probe> = Array::with_max_entries(1, BPF_F_MMAPABLE);

/// The kernel finds the timer in a value by its BTF.
#[repr(C)]
pub struct Timed {
    timer: bpf_timer,
}

#[btf_map]
static TIMED: btf_maps::Array<Timed, 1> = btf_maps::Array::new();

const CLOCK_MONOTONIC: u64 = 1;
/// Nanoseconds until the timer expires.
const SOON: u64 = 50_000;

/// Holds this CPU, as a step does, until [`Probe::leave`] is set, at most for [`Probe::hold`].
#[xdp]
pub fn probe_hold(_ctx: XdpContext) -> u32 {
    hold();
    xdp_action::XDP_DROP
}

/// Runs on the same CPU meanwhile, and records whether it could.
#[xdp]
pub fn probe_enter(_ctx: XdpContext) -> u32 {
    if let Some(probe) = PROBE.get_ptr_mut(0) {
        // SAFETY: a place in a map, aligned to 8; other programs write there, too.
        unsafe {
            let inside = (&raw const (*probe).inside).read_volatile();
            (&raw mut (*probe).met).write_volatile(inside);
            (&raw mut (*probe).entered).write_volatile(1);
        }
    }
    xdp_action::XDP_DROP
}

/// Holds this CPU while a timer expires there, whose callback runs as a bottom half.
#[xdp]
pub fn probe_timer(_ctx: XdpContext) -> u32 {
    if let Some(timed) = TIMED.get_ptr_mut(0) {
        // SAFETY: a place in a map; the function has the signature that a timer calls.
        let started = unsafe {
            let timer = &raw mut (*timed).timer;
            let map = (&raw const TIMED).cast_mut().cast();
            bpf_timer_init(timer, map, CLOCK_MONOTONIC);
            bpf_timer_set_callback(timer, expired as *mut c_void);
            bpf_timer_start(timer, SOON, 0)
        };
        if let Some(probe) = PROBE.get_ptr_mut(0) {
            // SAFETY: as above.
            unsafe { (&raw mut (*probe).started).write_volatile((started == 0).into()) };
        }
        hold();
    }
    xdp_action::XDP_DROP
}

unsafe extern "C" fn expired(_map: *mut c_void, _key: *const u32, _timed: *mut Timed) -> i64 {
    if let Some(probe) = PROBE.get_ptr_mut(0) {
        // SAFETY: as above.
        unsafe {
            let inside = (&raw const (*probe).inside).read_volatile();
            (&raw mut (*probe).met).write_volatile(inside);
            (&raw mut (*probe).entered).write_volatile(1);
        }
    }
    0
}

#[inline(always)]
fn hold() {
    let Some(probe) = PROBE.get_ptr_mut(0) else {
        return;
    };
    // SAFETY: as above; the callback has the signature that the helper calls.
    unsafe {
        let mut until = bpf_ktime_get_ns() + (&raw const (*probe).hold).read_volatile();
        (&raw mut (*probe).inside).write_volatile(1);
        bpf_loop(1 << 23, turn as *mut c_void, (&raw mut until).cast(), 0);
        (&raw mut (*probe).inside).write_volatile(0);
    }
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn turn(_number: u64, until: *mut c_void) -> i64 {
    let Some(probe) = PROBE.get_ptr(0) else {
        return 1;
    };
    // SAFETY: as above, and `hold` passes a `u64` to which there is no other reference meanwhile.
    unsafe {
        let leave = (&raw const (*probe).leave).read_volatile() != 0;
        (leave || bpf_ktime_get_ns() >= *until.cast::<u64>()).into()
    }
}

#[cfg(not(target_arch = "bpf"))]
fn main() {}

/// As in `main.rs`.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";

/// As in `lib.rs`.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
