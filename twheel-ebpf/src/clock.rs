//! The time and the CPU: `now`, read once for each packet and each step, and the CPU's number.

use aya_ebpf::helpers::{bpf_get_smp_processor_id, bpf_ktime_get_ns, generated::bpf_jiffies64};
use twheel_common::{
    config::{CLOCK_VIRTUAL, Tick},
    jiffies,
};

use crate::{
    config,
    maps::{CLOCK, JIFFIES},
};

/// The time of the configured clock, in its units. The verifier drops the other clock.
#[inline(always)]
pub fn now() -> u64 {
    if config!(clock) == CLOCK_VIRTUAL {
        return CLOCK.get(0).copied().unwrap_or(0);
    }
    // SAFETY: the helper takes no argument and exists since 5.5; the running twheel requires a
    // later kernel.
    unsafe { bpf_jiffies64() }
}

/// Notes that the clock had this value. CPUs may undo each other's bits: then one more stamp is in
/// doubt.
#[inline(always)]
pub fn see(now: u64) {
    if config!(max_stall) == 0 {
        return;
    }
    let Some(word) = JIFFIES.get_ptr_mut(jiffies::place(now as u32)) else {
        return;
    };
    // SAFETY: an array's value is valid memory while the program runs; volatile, because other CPUs
    // store there too.
    unsafe {
        if let Some(seen) = jiffies::see(word.read_volatile(), now as u32) {
            word.write_volatile(seen);
        }
    }
}

/// By how many units the packet of this stamp may have been later than the stamp says.
#[inline(always)]
pub fn doubt(stamp: u32) -> u32 {
    let next = stamp.wrapping_add(1);
    if config!(max_stall) == 0 {
        return 0;
    }
    match JIFFIES.get_ptr(jiffies::place(next)) {
        // SAFETY: as in `see`.
        Some(word) if jiffies::is_seen(unsafe { word.read_volatile() }, next) => 0,
        _ => config!(max_stall),
    }
}

/// The time in microseconds, its low 32 bits: finer than [`now`], and more expensive.
#[inline(always)]
pub fn micros() -> u32 {
    if config!(clock) == CLOCK_VIRTUAL {
        // Its units are milliseconds.
        return (now() as u32).wrapping_mul(1000);
    }
    // SAFETY: the helper takes no argument.
    (unsafe { bpf_ktime_get_ns() } / 1000) as u32
}

/// The number of this CPU.
#[inline(always)]
pub fn cpu() -> u32 {
    // SAFETY: the helper takes no argument.
    unsafe { bpf_get_smp_processor_id() }
}

/// The configured tick.
#[inline(always)]
pub fn tick() -> Tick {
    Tick(config!(tick))
}
