//! Touch: what every packet does to its flow.
//!
//! A store of the time, if it has changed, and nothing else: no lock, no list, no timer moved. What
//! the packet changed of the flow's deadline is found out when the wheel next visits the flow.

use core::ffi::c_void;

use aya_ebpf::helpers::{bpf_get_smp_processor_id, generated::bpf_loop};
use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::{Change, Flow, Seen, Visit, visit},
    packet::Segment,
    wheel::Wheel,
};

use crate::{
    atomic::compare_exchange,
    count::count,
    emit::{self, Ended, Reader},
    maps::{CONFIG, NEW_FLOW},
    table::{self, Refused},
    wheel::{self, Handled},
};

/// What became of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touched {
    /// Of a flow in the table.
    Known,
    /// It began a flow.
    Created,
    /// Of no flow, and no reason to begin one.
    NoFlow,
    /// It would have begun a flow, but there is no room.
    TableFull,
}

/// Flows looked at, at most, to make room for a new one.
const TRIES: u32 = 8;

/// Touches the flow of a segment, or begins one.
#[inline(always)]
pub fn touch(segment: &Segment, now: u64) -> Touched {
    match table::lookup(&segment.key) {
        Some(flow) => {
            update(flow, segment, now);
            count(Counter::Touched);
            Touched::Known
        }
        None => match begin(segment, now) {
            Touched::Known => {
                // Another CPU was faster. (Here, and not in `begin`, for the stack's sake.)
                if let Some(flow) = table::lookup(&segment.key) {
                    update(flow, segment, now);
                }
                count(Counter::Touched);
                Touched::Known
            }
            touched => touched,
        },
    }
}

/// The packet's part in a flow that is there.
#[inline(always)]
fn update(flow: *mut Flow, segment: &Segment, now: u64) {
    // SAFETY: a pointer that the table gave is valid memory while the program runs; see `table` for
    // what it means if the flow is removed meanwhile. Other CPUs store to the field, hence volatile.
    // A store happens only where it makes the flow younger, and a flow that has a packet in every
    // unit of the clock is written once a unit.
    let (last_seen, word) = unsafe {
        let stamp = &raw mut (*flow).last_seen;
        let last_seen = stamp.read_volatile();
        if (now as u32).wrapping_sub(last_seen) as i32 > 0 {
            stamp.write_volatile(now as u32);
        }
        (last_seen, (&raw const (*flow).word).read_volatile())
    };
    if Flow::seen(word).next(segment.direction, segment.flags) != Change::Nothing {
        change(flow, segment, word, last_seen, now);
    }
}

/// A segment that changes the flow's state. Rare: a handful in a connection's life.
#[inline(never)]
fn change(flow: *mut Flow, segment: &Segment, mut word: u64, last_seen: u32, now: u64) {
    let generation = Flow::generation(word);
    // Another CPU may change the flow at the same time, but each change adds one of eight bits.
    for _ in 0..9 {
        let change = Flow::seen(word).next(segment.direction, segment.flags);
        let changed = match change {
            Change::Nothing => return,
            Change::Add(seen) => Flow::word(generation, seen),
            Change::NewGeneration(seen) => match wheel::this_cpu() {
                Some(wheel) => Flow::word(new_generation(wheel), seen),
                None => return,
            },
        };
        // SAFETY: as in `update`; nothing else changes `word`.
        let current = unsafe { compare_exchange(&raw mut (*flow).word, word, changed) };
        if current == word {
            if let Change::NewGeneration(_) = change {
                supersede(flow, segment, word, last_seen, now);
            }
            return;
        }
        if Flow::generation(current) != generation {
            // The place has another flow by now, or the same key a new life. What the segment says
            // is of the old one.
            return;
        }
        word = current;
    }
}

/// Ends the old life of a key; `word` is its last, and `last_seen` that of its last packet. Only the
/// CPU whose exchange has begun the new one comes here.
#[inline(always)]
fn supersede(flow: *mut Flow, segment: &Segment, word: u64, last_seen: u32, now: u64) {
    // SAFETY: as in `update`.
    let created = unsafe { (&raw const (*flow).created).read_volatile() };
    let ended = Ended {
        created,
        last_seen,
        seen: Flow::seen(word),
        reason: Reason::Superseded,
    };
    match emit::reserve() {
        Some(entry) => emit::submit(entry, &segment.key, &ended, now, Reader::Asleep),
        None => count(Counter::EventsLost),
    }
    count(Counter::Superseded);
    // SAFETY: as in `update`.
    unsafe { (&raw mut (*flow).created).write_volatile(now) }
}

/// A generation that no other life has in whose time a stale pointer can be around: a million flows
/// of this CPU further on the number comes again, and a stale pointer lives for one packet.
#[inline(always)]
fn new_generation(wheel: &mut Wheel) -> u32 {
    wheel.generation = wheel.generation.wrapping_add(1);
    // SAFETY: the helper takes no argument.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    wheel.generation << 12 | cpu & 0xfff
}

/// A segment of no flow in the table.
#[inline(never)]
fn begin(segment: &Segment, now: u64) -> Touched {
    let Some(seen) = Seen::first(segment.direction, segment.flags) else {
        count(Counter::NoFlow);
        return Touched::NoFlow;
    };
    let config = CONFIG.load();
    let Some(wheel) = wheel::this_cpu() else {
        return Touched::NoFlow;
    };
    let due = match visit(now, now as u32, seen, &config.timeouts) {
        Visit::Rearm(due) => due,
        Visit::Expire => now,
    };
    // SAFETY: the helper takes no argument.
    let cpu = unsafe { bpf_get_smp_processor_id() };
    let word = Flow::word(new_generation(wheel), seen);
    let Some(flow) = NEW_FLOW.get_ptr_mut(0) else {
        return Touched::NoFlow;
    };
    // SAFETY: a place of this CPU's own, like the wheel; the rest of it stays zero.
    unsafe {
        (&raw mut (*flow).word).write(word);
        (&raw mut (*flow).created).write(now);
        (&raw mut (*flow).last_seen).write(now as u32);
        (&raw mut (*flow).cpu).write(cpu);
    }
    for attempt in 0..2 {
        // Anew each time: making room may have changed the slot.
        let slot = wheel::slot(wheel, due);
        match wheel::first_of(slot) {
            // SAFETY: as above.
            Some(first) => unsafe { first.store(&raw mut (*flow).next) },
            None => return Touched::NoFlow,
        }
        // SAFETY: as above.
        match table::insert(&segment.key, unsafe { &*flow }) {
            Ok(()) => {
                wheel::push(wheel, slot, &segment.key);
                wheel::wake_for(wheel, slot);
                count(Counter::Created);
                return Touched::Created;
            }
            Err(Refused::Exists) => return Touched::Known,
            Err(Refused::Full) if attempt == 0 && make_room(now) => {}
            Err(Refused::Full) => break,
        }
    }
    count(Counter::TableFull);
    Touched::TableFull
}

/// Removes one flow of this CPU that can go, if one of the first [`TRIES`] can.
#[inline(always)]
fn make_room(now: u64) -> bool {
    let mut state = Room { now, removed: 0 };
    // SAFETY: the callback has the signature that the helper calls, and `state` outlives the loop.
    // (`bpf_loop`, so that the verifier goes through a try once.)
    unsafe {
        bpf_loop(
            TRIES,
            try_to_remove as *mut c_void,
            (&raw mut state).cast(),
            0,
        );
    }
    state.removed == 1
}

#[repr(C)]
struct Room {
    now: u64,
    removed: u64,
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn try_to_remove(_index: u64, state: *mut c_void) -> i64 {
    // SAFETY: `make_room` passes a `Room` that nobody else refers to meanwhile.
    let state = unsafe { &mut *state.cast::<Room>() };
    let Some(wheel) = wheel::this_cpu() else {
        return 1;
    };
    match wheel::make_room(wheel, state.now) {
        Handled::Rearmed => 0,
        Handled::Removed => {
            state.removed = 1;
            1
        }
        Handled::RingFull | Handled::Nothing(_) => 1,
    }
}
