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

/// The description of the interface that has this index in its network namespace, and the number
/// that is added to that namespace's indexes. From here on, this CPU counts for that interface.
/// `None`: the interface is unknown, because it is just being detached. Its packet is counted, and
/// passes, since its zone is unknown.
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
    let Some(watched) = watched(namespace | index).filter(|it| it.is_watched()) else {
        *place = NO_INTERFACE;
        count(Counter::NotWatched);
        return None;
    };
    *place = watched.place.into();
    Some((watched, namespace))
}

/// From here on, this CPU counts for no interface.
#[inline(always)]
pub fn count_for_none() {
    if config!(watched) != 0 {
        set_place(NO_INTERFACE);
    }
}

/// Whether packets that come in by an interface are seen, there or at an interface that it lies on.
#[inline(always)]
pub fn is_watched(interface: u32) -> bool {
    config!(watched) != 0 && interface != 0 && count_is_watched(interface) != 0
}

/// Calls [`is_watched`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn count_is_watched(interface: u32) -> u32 {
    watched(interface).is_some().into()
}

#[inline(always)]
fn watched(interface: u32) -> Option<Watched> {
    if let Some(seated) = SEATED.get_ptr(seat(interface)) {
        // SAFETY: the running twheel writes an entry, eight aligned bytes, with one store.
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

/// [`Watched::packed`] of an interface whose seat another interface has, or [`NOT_WATCHED`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn count_unseated(interface: u32) -> u64 {
    // SAFETY: the running twheel writes an entry as a whole. A reader of one that is just being
    // replaced gets the old, the new, or a mix of two descriptions of the same interface.
    match unsafe { WATCHED.get(interface) } {
        Some(watched) => watched.packed().into(),
        None => NOT_WATCHED,
    }
}

/// More than the bits of [`Watched::packed`].
const NOT_WATCHED: u64 = 1 << 32;

#[inline(always)]
fn set_place(place: u32) {
    if let Some(current) = PLACE.get_ptr_mut(0) {
        // SAFETY: the value is this CPU's own, and no other program of this CPU can run meanwhile
        // (bottom halves are off): this is the only reference to it, and the value stays until this
        // program ends.
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
        // SAFETY: the value is this CPU's own and no other program of this CPU can run meanwhile
        // (bottom halves are off), so this is the only reference to it.
        unsafe { (*counters).0[counter as usize] += u64::from(number) }
    }
}

/// Adds one to a counter of the interface at this place. Inlined, for packets of known flows.
#[inline(always)]
pub fn count_at(place: u32, counter: Counter) {
    if let Some(counters) = COUNTERS.get_ptr_mut(place) {
        // SAFETY: as in `add`.
        unsafe { (*counters).0[counter as usize] += 1 }
    }
}

/// As [`add`], if there are several interfaces.
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

/// Counts a packet that is not a segment of any flow.
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
