//! Counting.

use twheel_common::{
    config::{Watched, seat},
    counter::{Counter, NO_INTERFACE},
    packet::Skip,
};

use crate::{
    config,
    maps::{COUNTERS, PLACE, SEATED, WATCHED},
};

/// What is known of the interface that has this index in its network namespace, and what is added to the indexes of that. What is
/// counted on this CPU from here on is the interface's own. `None`: nothing is known of the interface, which is just being let go of.
/// Its packet is counted, and passes: nobody knows its zone.
#[inline(always)]
pub fn count_for(index: u32) -> Option<(Watched, u32)> {
    if config!(watched) == 0 {
        return Some((Watched::default(), 0));
    }
    let packed = count_watched(index);
    if packed & NOT_WATCHED != 0 {
        count(Counter::NotWatched);
        return None;
    }
    Some((Watched::from_packed(packed as u32), (packed >> 32) as u32))
}

/// See [`count_watched`]. No namespace has this bit.
const NOT_WATCHED: u64 = 1 << 63;

/// What is counted on this CPU from here on is of no interface.
#[inline(always)]
pub fn count_for_none() {
    if config!(watched) != 0 {
        set_place(NO_INTERFACE);
    }
}

/// Whether packets are seen that come in by an interface.
#[inline(always)]
pub fn is_watched(interface: u32) -> bool {
    config!(watched) != 0 && interface != 0 && count_is_watched(interface) != 0
}

/// [`count_for`]: [`Watched::packed`], and above it what is added; or [`NOT_WATCHED`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn count_watched(index: u32) -> u64 {
    let Some(current) = PLACE.get_ptr_mut(0) else {
        return NOT_WATCHED;
    };
    // SAFETY: as in `set_place`.
    let [place, added] = unsafe { &mut *current };
    let namespace = *added;
    *added = 0;
    let Some(watched) = of(namespace | index) else {
        *place = NO_INTERFACE;
        return NOT_WATCHED;
    };
    *place = watched.place.into();
    u64::from(watched.packed()) | u64::from(namespace) << 32
}

/// [`is_watched`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn count_is_watched(interface: u32) -> u32 {
    of(interface).is_some().into()
}

#[inline(always)]
fn of(interface: u32) -> Option<Watched> {
    if let Some(seated) = SEATED.get_ptr(seat(interface)) {
        // SAFETY: the loader writes an entry, of eight bytes and as aligned, by one store.
        let seated = unsafe { seated.read_volatile() };
        if seated as u32 == interface {
            return Some(Watched::from_packed((seated >> 32) as u32));
        }
    }
    // SAFETY: the loader writes an entry as a whole; one that is replaced meanwhile is read as one or the other, or as a mix
    // of two descriptions of the same interface.
    unsafe { WATCHED.get(interface) }.copied()
}

#[inline(always)]
fn set_place(place: u32) {
    if let Some(current) = PLACE.get_ptr_mut(0) {
        // SAFETY: the value is this CPU's own, and no other program of this CPU can run in between (bottom halves are
        // off): this is the only reference to it, and it stays until this program ends.
        unsafe { (*current)[0] = place }
    }
}

/// Adds one to a counter of this CPU.
#[inline(always)]
pub fn count(counter: Counter) {
    add(counter, 1);
}

/// Adds to a counter of this CPU.
#[inline(always)]
pub fn add(counter: Counter, number: u32) {
    if config!(watched) != 0 {
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
    if let Some(counters) = COUNTERS.get_ptr_mut(unsafe { (*place)[0] }) {
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
