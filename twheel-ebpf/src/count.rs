//! Counting.

use twheel_common::{counter::Counter, packet::Skip};

use crate::maps::COUNTERS;

/// Adds one to a counter of this CPU.
#[inline(always)]
pub fn count(counter: Counter) {
    if let Some(counters) = COUNTERS.get_ptr_mut(0) {
        // SAFETY: the value is this CPU's own and no other program of this CPU can run in between
        // (bottom halves are off), so this is the only reference to it.
        unsafe { (*counters).0[counter as usize] += 1 }
    }
}

/// Counts a packet that is not a segment of a TCP flow.
#[inline(always)]
pub fn count_skip(skip: Skip) {
    count(match skip {
        Skip::NotIp => Counter::NotIp,
        Skip::NotTracked => Counter::NotTracked,
        Skip::Fragment => Counter::Fragment,
        Skip::Truncated => Counter::Truncated,
        Skip::Malformed => Counter::Malformed,
        Skip::BadFlags => Counter::BadFlags,
    });
}
