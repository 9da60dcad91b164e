//! Updates of live flows: `twheel_common::update` on a map.

use core::ptr;

use twheel_common::{
    event::UPDATED,
    flow::idle,
    update::{Interval, Reported},
};

use crate::{
    config,
    emit::Ended,
    maps::UPDATES,
    record::{self, At},
    wheel::end,
};

/// The last update in the place of this flow's details, if there are updates.
#[inline(always)]
fn place(flow: At) -> Option<*mut Reported> {
    if config!(active_timeout) == 0 {
        return None;
    }
    UPDATES.get_ptr_mut(flow.number())
}

/// The part of a flow's life that has not been reported.
#[inline(always)]
fn interval(place: *const Reported, created: u32, now: u64) -> Interval {
    // SAFETY: a value of the map. Volatile, because the flow's own CPU may store there meanwhile.
    Interval::new(now, created, unsafe {
        (&raw const (*place).at).read_volatile()
    })
}

/// The part of a flow's life that an event reports. (All of it is set in any case: the compiler may
/// copy what an `Option` leaves open, and the verifier refuses that.)
#[derive(Clone, Copy)]
pub struct Unreported {
    /// Null without an active timeout.
    place: *mut Reported,
    interval: Interval,
}

/// What was not reported of a flow that was `created` then.
#[inline(always)]
pub fn unreported(flow: At, created: u32, now: u64) -> Unreported {
    let (mut place_of, mut since) = (ptr::null_mut(), NOTHING);
    if let Some(place) = place(flow) {
        (place_of, since) = (place, interval(place, created, now));
    }
    Unreported {
        place: place_of,
        interval: since,
    }
}

const NOTHING: Interval = Interval {
    length: 0,
    follows: false,
};

/// Loads what an update or an end will wait for.
#[inline(always)]
pub fn fetch(flow: At) {
    if let Some(place) = place(flow) {
        // SAFETY: as in `interval`.
        unsafe { (&raw const (*place).at).read_volatile() };
        if let Some(account) = record::account_place(flow.index()) {
            // SAFETY: a value of the map.
            unsafe { account.read_volatile() };
        }
    }
}

/// Writes what had been counted when the interval began. Returns its length, in units; 0 without an
/// active timeout.
///
/// # Safety
///
/// `before` is valid for four writes, and no other code accesses it.
#[inline(always)]
pub unsafe fn report(unreported: Unreported, before: *mut u64) -> u32 {
    for number in 0..4 {
        // SAFETY: a value of the map, as in `interval`, and the caller's promise.
        unsafe {
            let place = unreported.place;
            let mut counted = 0;
            if !place.is_null() && unreported.interval.follows {
                let account = (&raw const (*place).account).cast::<u64>();
                counted = account.add(number).read_volatile();
            }
            before.add(number).write_volatile(counted);
        }
    }
    unreported.interval.length
}

/// `due`, or when the flow's next update is due if that comes first (units).
#[inline(always)]
pub fn no_later(flow: At, now: u64, due: u64) -> u64 {
    match place(flow) {
        Some(place) => {
            let interval = interval(place, flow.created(), now);
            due.min(interval.due(now, config!(active_timeout)))
        }
        None => due,
    }
}

/// As [`no_later`], for a deadline that a packet has brought forward; 0: it has not. (A function of
/// its own: the verifier adds up the stacks of callers and callees.)
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn update_due(index: u32, due: u64, now: u64) -> u64 {
    match record::at(index) {
        Some(flow) if due != 0 => no_later(flow, now, due),
        _ => due,
    }
}

/// `due`, or when the first update of a flow that begins now is due if that comes first (units).
#[inline(always)]
pub fn first(now: u64, due: u64) -> u64 {
    match u64::from(config!(active_timeout)) {
        0 => due,
        timeout => due.min(now + timeout),
    }
}

/// Flag beside the time of the next update: one was reported.
pub const REPORTED: u64 = 1 << 63;
/// Result of [`update_visit`]: the ring has no room.
pub const RING_FULL: u64 = u64::MAX;

/// Reports a flow of this CPU's wheel if an update is due at `decided` and there were packets.
/// Returns when the next one is due (units), perhaps with [`REPORTED`]; or [`RING_FULL`]. Only for
/// the stepper.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn update_visit(index: u32, now: u64, decided: u64) -> u64 {
    let timeout = config!(active_timeout);
    let next = now + u64::from(timeout);
    let Some(flow) = record::at(index) else {
        return next;
    };
    let Some(place) = place(flow) else {
        return next;
    };
    let interval = interval(place, flow.created(), now);
    if !interval.is_over(now, decided, timeout) {
        return interval.due(now, timeout).max(now + 1);
    }
    if !interval.has_packets(idle(now, flow.word().stamp())) {
        return next;
    }
    match submit(flow, Unreported { place, interval }, now) {
        true => next | REPORTED,
        false => RING_FULL,
    }
}

/// Reports a flow of this CPU's wheel. Returns 0 or [`RING_FULL`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn update_report(index: u32, now: u64) -> u64 {
    match record::at(index) {
        Some(flow) if !submit(flow, unreported(flow, flow.created(), now), now) => RING_FULL,
        _ => 0,
    }
}

/// Reports a flow, and notes that. Returns whether the ring had room.
#[inline(always)]
fn submit(flow: At, unreported: Unreported, now: u64) -> bool {
    let Some(stage) = end::stage() else {
        return false;
    };
    let updated = Ended {
        created: flow.created(),
        word: flow.word(),
        rule: flow.rule(),
        reason: UPDATED,
    };
    let account = stage.submit_update(flow, &updated, unreported, now);
    let place = unreported.place;
    if !place.is_null() {
        // SAFETY: a value of the map, which no other CPU writes.
        unsafe {
            (&raw mut (*place).account).write_volatile(account);
            (&raw mut (*place).at).write_volatile(now);
        }
    }
    true
}
