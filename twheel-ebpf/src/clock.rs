//! When and where this runs: `now`, read once for each packet and each step, and the CPU.

use aya_ebpf::helpers::{bpf_get_smp_processor_id, bpf_ktime_get_ns, generated::bpf_jiffies64};
use twheel_common::{
    config::{CLOCK_VIRTUAL, Tick},
    jiffies,
};

use crate::{
    config,
    maps::{CLOCK, JIFFIES},
};

/// The clock that the configuration names, in its units. The verifier drops the other one.
#[inline(always)]
pub fn now() -> u64 {
    if config!(clock) == CLOCK_VIRTUAL {
        return CLOCK.get(0).copied().unwrap_or(0);
    }
    // SAFETY: the helper takes no argument and is there since 5.5; the loader asks for more.
    unsafe { bpf_jiffies64() }
}

/// Notes that the clock had this value. CPUs may undo each other's bits: then there is a doubt more.
#[inline(always)]
pub fn see(now: u64) {
    if config!(max_stall) == 0 {
        return;
    }
    let Some(word) = JIFFIES.get_ptr_mut(jiffies::place(now as u32)) else {
        return;
    };
    // SAFETY: an array's value is valid memory while the program runs; volatile, because other CPUs store there too.
    unsafe {
        if let Some(seen) = jiffies::see(word.read_volatile(), now as u32) {
            word.write_volatile(seen);
        }
    }
}

/// By how many units a packet may have come later than this stamp says.
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

/// Microseconds, of which 32 bits count: finer than [`now`], and dearer.
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

/// What a tick is.
#[inline(always)]
pub fn tick() -> Tick {
    Tick(config!(tick))
}
