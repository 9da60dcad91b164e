//! Updates of live flows: `twheel_common::update` on a map.

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

/// Writes what had been counted when the interval began. Returns its length, in units; 0 without an
/// active timeout.
///
/// # Safety
///
/// `before` is valid for four writes, and no other code accesses it.
#[inline(always)]
pub unsafe fn report(flow: At, created: u32, now: u64, before: *mut u64) -> u32 {
    let place = place(flow);
    let interval = place.map(|place| interval(place, created, now));
    for number in 0..4 {
        // SAFETY: a value of the map, as in `interval`, and the caller's promise.
        unsafe {
            let counted = match (place, interval) {
                (Some(place), Some(interval)) if interval.follows => (&raw const (*place).account)
                    .cast::<u64>()
                    .add(number)
                    .read_volatile(),
                _ => 0,
            };
            before.add(number).write_volatile(counted);
        }
    }
    interval.map_or(0, |interval| interval.length)
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
    match submit(flow, now) {
        true => next | REPORTED,
        false => RING_FULL,
    }
}

/// Reports a flow of this CPU's wheel. Returns 0 or [`RING_FULL`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn update_report(index: u32, now: u64) -> u64 {
    match record::at(index) {
        Some(flow) if !submit(flow, now) => RING_FULL,
        _ => 0,
    }
}

/// Reports a flow, and notes that. Returns whether the ring had room.
#[inline(always)]
fn submit(flow: At, now: u64) -> bool {
    let Some(stage) = end::stage() else {
        return false;
    };
    let updated = Ended {
        created: flow.created(),
        word: flow.word(),
        rule: flow.rule(),
        reason: UPDATED,
    };
    let account = stage.submit_update(flow, &updated, now);
    if let Some(place) = place(flow) {
        // SAFETY: a value of the map, which no other CPU writes.
        unsafe {
            (&raw mut (*place).account).write_volatile(account);
            (&raw mut (*place).at).write_volatile(now);
        }
    }
    true
}
