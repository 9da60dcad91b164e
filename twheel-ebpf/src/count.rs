//! Counting.

use twheel_common::{
    counter::{self, Counter},
    packet::Skip,
};

use crate::maps::{APART, COUNTERS, PLACE};

/// What is counted on this CPU from here on is of an interface; of none: 0.
#[inline(always)]
pub fn count_for(interface: u32) {
    if apart(0) != 0 {
        set_place(interface);
    }
}

/// A function of its own, like [`count_apart`]: so the programs are nearly what they are without it.
#[inline(never)]
fn set_place(interface: u32) {
    let mut place = 0;
    for index in 0..counter::APART {
        if interface != 0 && apart(index) == interface {
            place = index as u32 + 1;
        }
    }
    if let Some(current) = PLACE.get_ptr_mut(0) {
        // SAFETY: the value is this CPU's own, and no other program of this CPU can run in between (bottom halves are
        // off): this is the only reference to it, and it stays until this program ends.
        unsafe { *current = place }
    }
}

/// An interface that is counted apart, or 0; the verifier knows which.
#[inline(always)]
fn apart(index: usize) -> u32 {
    // SAFETY: the global's own memory, which nobody writes after it was loaded, and callers stay within.
    unsafe { (&raw const APART).cast::<u32>().add(index).read_volatile() }
}

/// Adds one to a counter of this CPU.
#[inline(always)]
pub fn count(counter: Counter) {
    add(counter, 1);
}

/// Adds to a counter of this CPU.
#[inline(always)]
pub fn add(counter: Counter, number: u32) {
    if apart(0) != 0 {
        return add_apart(counter, number);
    }
    if let Some(counters) = COUNTERS.get_ptr_mut(0) {
        // SAFETY: the value is this CPU's own and no other program of this CPU can run in between
        // (bottom halves are off), so this is the only reference to it.
        unsafe { (*counters).0[counter as usize] += u64::from(number) }
    }
}

/// Where there are several interfaces.
#[inline(never)]
fn add_apart(counter: Counter, number: u32) {
    let Some(place) = PLACE.get_ptr(0) else {
        return;
    };
    // SAFETY: the value is this CPU's own, as in `set_place`.
    if let Some(counters) = COUNTERS.get_ptr_mut(unsafe { *place }) {
        // SAFETY: as in `add`.
        unsafe { (*counters).0[counter as usize] += u64::from(number) }
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
