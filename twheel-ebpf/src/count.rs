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
    let current = PLACE.get_ptr_mut(0)?;
    // SAFETY: as in `set_place`.
    let [place, added] = unsafe { &mut *current };
    let namespace = *added;
    *added = 0;
    let Some(watched) = of(namespace | index).filter(|it| it.is_watched()) else {
        *place = NO_INTERFACE;
        count(Counter::NotWatched);
        return None;
    };
    *place = watched.place.into();
    Some((watched, namespace))
}

/// What is counted on this CPU from here on is of no interface.
#[inline(always)]
pub fn count_for_none() {
    if config!(watched) != 0 {
        set_place(NO_INTERFACE);
    }
}

/// Whether packets are seen that come in by an interface, there or by one that it lies on.
#[inline(always)]
pub fn is_watched(interface: u32) -> bool {
    config!(watched) != 0 && interface != 0 && count_is_watched(interface) != 0
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
    match count_unseated(interface) {
        NOT_WATCHED => None,
        packed => Some(Watched::from_packed(packed as u32)),
    }
}

/// [`Watched::packed`] of an interface whose seat is another's, or [`NOT_WATCHED`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn count_unseated(interface: u32) -> u64 {
    // SAFETY: the loader writes an entry as a whole; one that is replaced meanwhile is read as one or the other, or as a mix
    // of two descriptions of the same interface.
    match unsafe { WATCHED.get(interface) } {
        Some(watched) => watched.packed().into(),
        None => NOT_WATCHED,
    }
}

/// More than [`Watched::packed`] has bits.
const NOT_WATCHED: u64 = 1 << 32;

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

/// The same of the interface that has this place, and inlined: for packets of known flows.
#[inline(always)]
pub fn count_at(place: u32, counter: Counter) {
    if let Some(counters) = COUNTERS.get_ptr_mut(place) {
        // SAFETY: as in `add`.
        unsafe { (*counters).0[counter as usize] += 1 }
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
