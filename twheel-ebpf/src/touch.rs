//! Touch: what every packet does to its flow.
//!
//! A store of the time, if it has changed, and nothing else: no lock, no list, no timer moved. What
//! the packet changed of the flow's deadline is found out when the wheel next visits the flow.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_loop;
use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::{Change, Seen, Visit, Word, visit},
    packet::Segment,
};

use crate::{
    count::count,
    emit::{self, Ended, Reader},
    maps::CONFIG,
    table::{self, At, Inserted},
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
    let home = table::home(&segment.key);
    match table::find(home, &segment.key) {
        Some(flow) => {
            update(flow, segment, now);
            count(Counter::Touched);
            Touched::Known
        }
        None => begin(segment, home, now),
    }
}

/// The packet's part in a flow that is there.
#[inline(always)]
fn update(flow: At, segment: &Segment, now: u64) {
    let word = flow.word();
    if word.seen().next(segment.direction, segment.flags) != Change::Nothing {
        change(flow, segment, now);
    } else if word.is_older_than(now) {
        // So a flow that has a packet in every unit of the clock is written once a unit.
        flow.touch(now);
    }
}

/// A segment that changes the flow's state. Rare: a handful in a connection's life.
#[inline(never)]
fn change(flow: At, segment: &Segment, now: u64) {
    let mut word = flow.word();
    let generation = word.generation();
    // Another CPU may change the flow at the same time, but each change adds one of eight bits, and the
    // stamp changes once a unit of the clock.
    for _ in 0..12 {
        let change = word.seen().next(segment.direction, segment.flags);
        let changed = match change {
            Change::Nothing => {
                if word.is_older_than(now) {
                    flow.touch(now);
                }
                return;
            }
            // Whoever begins the last life still has to note when.
            Change::NewGeneration(_) if word.seen().is_starting() => break,
            Change::Ended => break,
            Change::Add(seen) => word.with(now, seen),
            Change::NewGeneration(seen) => {
                Word::new(now, generation.wrapping_add(1), seen.starting())
            }
        };
        match flow.change(&segment.key, word, changed) {
            Some(Ok(())) => {
                if let Change::NewGeneration(_) = change {
                    supersede(flow, segment, word, now);
                }
                return;
            }
            Some(Err(held)) if held.generation() == generation => word = held,
            // The place has another flow by now, or the same key a new life. What the segment says
            // is of the old one.
            _ => break,
        }
    }
    count(Counter::Raced);
}

/// Ends the old life of a key; `word` was its last. Only the CPU whose exchange has begun the new one
/// comes here.
#[inline(always)]
fn supersede(flow: At, segment: &Segment, word: Word, now: u64) {
    let ended = Ended {
        created: flow.created(),
        word,
        reason: Reason::Superseded,
    };
    match emit::reserve() {
        Some(entry) => emit::submit(entry, &segment.key, &ended, now, Reader::Asleep),
        None => count(Counter::EventsLost),
    }
    count(Counter::Superseded);
    flow.set_created(now as u32);
    flow.started();
}

/// A segment of no flow in the table.
#[inline(never)]
fn begin(segment: &Segment, home: u32, now: u64) -> Touched {
    let Some(seen) = Seen::first(segment.direction, segment.flags) else {
        count(Counter::NoFlow);
        return Touched::NoFlow;
    };
    let room = table::has_room() || make_room(now) && table::has_room();
    if !room {
        count(Counter::TableFull);
        return Touched::TableFull;
    }
    let mut inserted = table::insert(home, &segment.key, seen, now);
    if let Inserted::Full = inserted
        && wheel::make_room_at(home, now)
    {
        inserted = table::insert(home, &segment.key, seen, now);
    }
    match inserted {
        Inserted::New(flow, index) => {
            let due = match visit(now, Word::new(now, 0, seen), &CONFIG.load().timeouts) {
                Visit::Rearm(due) => due,
                Visit::Expire => now,
            };
            wheel::start(flow, index, now, due);
            count(Counter::Created);
            Touched::Created
        }
        Inserted::Exists(flow) => {
            table::uncount();
            update(flow, segment, now);
            count(Counter::Touched);
            Touched::Known
        }
        Inserted::Full => {
            table::uncount();
            count(Counter::WindowFull);
            Touched::TableFull
        }
    }
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
unsafe extern "C" fn try_to_remove(index: u64, state: *mut c_void) -> i64 {
    // SAFETY: `make_room` passes a `Room` that nobody else refers to meanwhile.
    let state = unsafe { &mut *state.cast::<Room>() };
    let Some(wheel) = wheel::this_cpu() else {
        return 1;
    };
    match wheel::make_room(wheel, state.now, index + 1 == u64::from(TRIES)) {
        Handled::Rearmed => 0,
        Handled::Removed => {
            state.removed = 1;
            1
        }
        Handled::RingFull | Handled::Nothing(_) => 1,
    }
}
