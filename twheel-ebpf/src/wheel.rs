//! The lists under the wheel's arithmetic: singly linked through the flows themselves, so that a
//! flow needs no node of its own and stands in exactly one slot.
//!
//! Everything here belongs to one CPU and runs with bottom halves off: in the packet path, or in the
//! stepper, which is a test run on that CPU. So no two of these functions ever interleave, and no
//! lock is needed.

use aya_ebpf::{bindings::BPF_RB_FORCE_WAKEUP, helpers::bpf_get_smp_processor_id};
use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::{Flow, FlowKey, Seen, Visit, visit},
    wheel::{Slot, Wheel},
};

use crate::{
    atomic::compare_exchange,
    count::count,
    emit::{self, Ended, Reader},
    maps::{CONFIG, SLOTS, WAKES, WHEEL},
    table,
};

/// What this CPU's wheel did with the flow at the head of the earliest slot.
pub enum Handled {
    /// Armed again.
    Rearmed,
    /// Removed, with its event.
    Removed,
    /// Left in place: the ring is full.
    RingFull,
    /// No flow is due by the tick asked for; the next slot's turn, if there is one.
    Nothing(Option<Slot>),
}

/// This CPU's wheel.
#[inline(always)]
pub fn this_cpu() -> Option<&'static mut Wheel> {
    let wheel = WHEEL.get_ptr_mut(0)?;
    // SAFETY: the value is this CPU's own, and see the module's comment: whoever calls this runs
    // with bottom halves off, and uses no earlier reference of its own again before its callee is done.
    Some(unsafe { &mut *wheel })
}

/// The head of a list. Belongs to this CPU, as `this_cpu` does.
#[derive(Clone, Copy)]
struct Head(*mut FlowKey);

impl Head {
    #[inline(always)]
    fn of(index: u32) -> Option<Self> {
        SLOTS.get_ptr_mut(index).map(Self)
    }

    #[inline(always)]
    fn get(self) -> FlowKey {
        // SAFETY: a place in a map, aligned to 8, that only this CPU reads and writes.
        unsafe { FlowKey::load(self.0) }
    }

    #[inline(always)]
    fn set(self, key: &FlowKey) {
        // SAFETY: as above; no references are made of it.
        unsafe { key.store(self.0) }
    }
}

/// The list of flows that were handed out and await their visit.
#[inline(always)]
fn pending() -> u32 {
    CONFIG.load().geometry.slots()
}

/// The slot of a flow that is due at `due` (units).
#[inline(always)]
pub fn slot(wheel: &Wheel, due: u64) -> Slot {
    let config = CONFIG.load();
    wheel.slot(config.geometry, config.tick_from(due))
}

/// What a flow that is about to enter a slot must have as its `next`.
#[inline(always)]
pub fn first_of(slot: Slot) -> Option<FlowKey> {
    Some(Head::of(slot.index)?.get())
}

/// Puts a flow, whose `next` is the slot's head, at the front of the slot.
#[inline(always)]
pub fn push(wheel: &mut Wheel, slot: Slot, key: &FlowKey) {
    if let Some(head) = Head::of(slot.index) {
        head.set(key);
        wheel.occupy(CONFIG.load().geometry, slot.index);
    }
}

/// Calls this CPU's stepper if it means to sleep past the slot's turn.
#[inline(always)]
pub fn wake_for(wheel: &mut Wheel, slot: Slot) {
    if slot.starts >= wheel.wake {
        return;
    }
    // SAFETY: the helper takes no argument.
    let cpu = u64::from(unsafe { bpf_get_smp_processor_id() });
    // The ring has room for several calls of every CPU, and this CPU calls again only for a slot that
    // is earlier still. Were it full all the same, `wake` stays as it was: the next new flow calls.
    if WAKES
        .output::<u64>(cpu, u64::from(BPF_RB_FORCE_WAKEUP))
        .is_ok()
    {
        wheel.wake = slot.starts;
        count(Counter::Wakes);
    }
}

/// Visits one flow on behalf of the stepper: the first that has been handed out, or else the first
/// of the next slot whose turn is not after `tick`.
#[inline(always)]
pub fn step(wheel: &mut Wheel, now: u64, tick: u64) -> Handled {
    let geometry = CONFIG.load().geometry;
    let Some(waiting) = Head::of(pending()) else {
        return Handled::Nothing(None);
    };
    if waiting.get().is_none() {
        match wheel.first(geometry) {
            Some(slot) if slot.starts <= tick => {
                // The whole list at once: flows armed again may come back to the same slot.
                if let Some(list) = Head::of(slot.index) {
                    waiting.set(&list.get());
                    list.set(&FlowKey::NONE);
                }
                wheel.take(geometry, slot);
            }
            next => {
                wheel.advance(tick);
                return Handled::Nothing(next);
            }
        }
    }
    handle(wheel, pending(), now, false)
}

/// Visits one flow to make room for another: the one nearest its deadline, so the head of those
/// that have been handed out or of the next slot. A flow that is not established goes.
#[inline(always)]
pub fn make_room(wheel: &mut Wheel, now: u64) -> Handled {
    let handed_out = Head::of(pending()).is_some_and(|waiting| !waiting.get().is_none());
    let index = if handed_out {
        pending()
    } else {
        match wheel.first(CONFIG.load().geometry) {
            Some(slot) => slot.index,
            None => return Handled::Nothing(None),
        }
    };
    handle(wheel, index, now, true)
}

/// Visits the flow at the head of a list that is not empty.
#[inline(always)]
fn handle(wheel: &mut Wheel, index: u32, now: u64, for_room: bool) -> Handled {
    let config = CONFIG.load();
    let Some(list) = Head::of(index) else {
        return Handled::Nothing(None);
    };
    let key = list.get();
    let Some(flow) = table::lookup(&key) else {
        // Only `remove` below takes flows out of the table, and it unlinks them first.
        if !key.is_none() {
            count(Counter::Orphans);
        }
        unlink(wheel, index, list, &FlowKey::NONE);
        return Handled::Rearmed;
    };
    // SAFETY: the flow stands on this wheel, so no other CPU removes it: the place is its own, and
    // `next` is this CPU's. Volatile, because other CPUs store to `last_seen` and swap `word`.
    let (word, last_seen, next) = unsafe {
        (
            (&raw const (*flow).word).read_volatile(),
            (&raw const (*flow).last_seen).read_volatile(),
            FlowKey::load(&raw const (*flow).next),
        )
    };
    let seen = Flow::seen(word);
    let reason = match visit(now, last_seen, seen, &config.timeouts) {
        Visit::Rearm(_) if for_room && !seen.is_established() => Some(Reason::Evicted),
        Visit::Rearm(due) => {
            rearm(wheel, index, list, flow, &key, &next, due);
            if for_room {
                // The stepper may sleep past the new slot: timeouts may have become shorter.
                wake_for(wheel, slot(wheel, due));
            }
            return Handled::Rearmed;
        }
        Visit::Expire => None,
    };
    match end(flow, &key, word, reason, now, for_room) {
        End::Done => {
            unlink(wheel, index, list, &next);
            count(match reason {
                Some(_) => Counter::Evicted,
                None => Counter::Expired,
            });
            Handled::Removed
        }
        End::Alive => {
            // Decided anew at the next tick.
            rearm(wheel, index, list, flow, &key, &next, now);
            Handled::Rearmed
        }
        End::RingFull => Handled::RingFull,
    }
}

/// How an attempt to end a flow went.
enum End {
    Done,
    /// A packet has changed it meanwhile.
    Alive,
    RingFull,
}

/// Ends a flow whose `word` was seen: evicts it for a reason, or expires it if it is still due.
///
/// The swap of `word` decides against all other CPUs: whoever has changed the state since it was
/// read wins, and whoever comes later finds a flow that takes no change. It also orders what
/// follows: a stamp stored before a change of state that was seen is seen too, on every
/// architecture, so a deadline that moved earlier is never computed from a stamp before it.
#[inline(always)]
fn end(
    flow: *mut Flow,
    key: &FlowKey,
    word: u64,
    evicted: Option<Reason>,
    now: u64,
    for_room: bool,
) -> End {
    let entry = emit::reserve();
    if entry.is_none() && !for_room {
        return End::RingFull;
    }
    let dead = Flow::word(Flow::generation(word), Seen::DEAD);
    // SAFETY: as in `handle`; nothing but compare-and-swap changes `word`.
    if unsafe { compare_exchange(&raw mut (*flow).word, word, dead) } == word {
        // SAFETY: as in `handle`.
        let (created, last_seen) = unsafe {
            (
                (&raw const (*flow).created).read_volatile(),
                (&raw const (*flow).last_seen).read_volatile(),
            )
        };
        let seen = Flow::seen(word);
        let due = visit(now, last_seen, seen, &CONFIG.load().timeouts) == Visit::Expire;
        if (due || evicted.is_some()) && table::remove(key) {
            let reason = match evicted {
                Some(reason) => reason,
                None => Reason::of_expiry(seen),
            };
            let ended = Ended {
                created,
                last_seen,
                seen,
                reason,
            };
            let reader = if for_room {
                Reader::Asleep
            } else {
                Reader::Stepping
            };
            match entry {
                Some(entry) => emit::submit(entry, key, &ended, now, reader),
                // The packet path cannot wait.
                None => count(Counter::EventsLost),
            }
            return End::Done;
        }
        // SAFETY: as above. Nobody changes a dead word: this restores it.
        unsafe { compare_exchange(&raw mut (*flow).word, dead, word) };
    }
    if let Some(entry) = entry {
        entry.discard(0);
    }
    End::Alive
}

/// Moves the first flow of a list to the slot of the time at which it is due.
#[inline(always)]
fn rearm(
    wheel: &mut Wheel,
    index: u32,
    list: Head,
    flow: *mut Flow,
    key: &FlowKey,
    next: &FlowKey,
    due: u64,
) {
    unlink(wheel, index, list, next);
    let slot = slot(wheel, due);
    if let Some(head) = Head::of(slot.index) {
        // SAFETY: as in `handle`.
        unsafe { head.get().store(&raw mut (*flow).next) }
        push(wheel, slot, key);
    }
}

/// Takes the first flow off a list, before whose `next` it stood.
#[inline(always)]
fn unlink(wheel: &mut Wheel, index: u32, list: Head, next: &FlowKey) {
    list.set(next);
    if next.is_none() && index != pending() {
        wheel.vacate(CONFIG.load().geometry, index);
    }
}
