//! Touch: what every packet does to its flow.
//!
//! A store of the time, if it has changed, and nothing else: no lock, no list, no timer moved. What
//! the packet changed of the flow's deadline is found out when the wheel next visits the flow.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_loop;
use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::{Direction, FlowKey, Word, age},
    packet::{Segment, datagram, tcp},
    state::{Change, Positions, Seen, View, accepts_end, advance},
};

use crate::{
    clock, config,
    count::count,
    emit::{self, Ended, Reader},
    enforce,
    forget::{forget, forget_segment},
    inbox,
    policy::{self, Place},
    rto, share,
    table::{self, At, Begins, Inserted},
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
    /// Of a flow that has expired, and is to be dropped.
    Refused,
    /// The same, and is to be answered.
    Answered,
}

/// What became of a flow that was to be entered, as one number, since the programs' functions return no more:
/// there is no room;
const FULL: u64 = 0;
/// or this and the flow's index, where it was entered;
const NEW: u64 = 1 << 32;
/// or this and the flow's index, where another CPU was faster.
const EXISTS: u64 = 2 << 32;

/// Flows looked at, at most, to make room for a new one.
const TRIES: u32 = 8;

/// Touches the flow of a segment, or begins one.
#[inline(always)]
pub fn touch(segment: &mut Segment, now: u64, place: Place) -> Touched {
    let home = table::home(&segment.key);
    match table::find(home, &segment.key) {
        Some(flow) => {
            let before = flow.positions();
            update(flow, segment, now);
            time(flow, segment, before, now);
            flow.count(segment.direction, segment.bytes);
            count(Counter::Touched);
            Touched::Known
        }
        None => {
            if config!(enforce) != 0 {
                match enforce::of_none(segment, now, place.hook) {
                    enforce::PASS => {}
                    enforce::ANSWER => return Touched::Answered,
                    _ => return Touched::Refused,
                }
            }
            let Some(seen) = Seen::first(segment.direction, segment.flags, view()) else {
                count(Counter::NoFlow);
                return Touched::NoFlow;
            };
            forget_segment(segment, now);
            let seen = Seen(forget(seen.0.into()) as u16);
            let begun = begin(segment, seen, forget(home), now, &place);
            if begun == FULL {
                return Touched::TableFull;
            }
            let begun_here = begun < EXISTS;
            // Here and not in `begin`: the verifier adds up what callers and callees have on the stack.
            if let Some(flow) = table::at(begun as u32) {
                let before = flow.positions();
                if !begun_here {
                    update(flow, segment, now);
                }
                time(flow, segment, before, now);
                flow.count(segment.direction, segment.bytes);
            }
            if begun_here {
                return Touched::Created;
            }
            count(Counter::Touched);
            Touched::Known
        }
    }
}

/// The packet's part in the flow's retransmission timers.
#[inline(always)]
fn time(flow: At, segment: &Segment, [low, high]: Positions, now: u64) {
    if rto::is_on() && segment.flags & datagram::ANY == 0 {
        let before = u64::from(low) | u64::from(high) << 32;
        if rto::see(flow, segment, before, now) != 0 {
            count(Counter::RtoStarted);
        }
    }
}

#[inline(always)]
fn view() -> View {
    View {
        one_way: config!(one_way) != 0,
        strict: config!(strict) != 0,
    }
}

/// The packet's part in a flow that is there.
#[inline(always)]
fn update(flow: At, segment: &mut Segment, now: u64) {
    let word = flow.word();
    if word.seen().next(segment.direction, segment.flags, view()) != Change::Nothing {
        forget_segment(segment, now);
        return change(flow, segment, now);
    }
    keep(flow, word, segment, now);
}

/// A packet that says nothing new, and keeps the flow alive.
#[inline(always)]
fn keep(flow: At, word: Word, segment: &Segment, now: u64) {
    if word.is_older_than(now) {
        // So a flow that has a packet in every unit of the clock is written once a unit.
        flow.touch(now);
    }
    follow(flow, word.seen(), segment);
}

/// Notes how far the sender has come.
#[inline(always)]
fn follow(flow: At, seen: Seen, segment: &Segment) {
    if let Some(position) = advance(flow.positions(), seen, segment) {
        flow.set_position(segment.direction, position);
    }
}

/// A segment that changes the flow's state. Rare: a handful in a connection's life.
#[inline(never)]
fn change(flow: At, segment: &Segment, now: u64) {
    let mut word = flow.word();
    let generation = word.generation();
    if segment.flags & (tcp::FIN | tcp::RST) != 0
        && !accepts_end(flow.positions(), word.seen(), segment)
    {
        return count(Counter::Ignored);
    }
    // Another CPU may change the flow at the same time, but states lead forward, and the
    // stamp changes once a unit of the clock.
    let mut outcome = Outcome::Raced;
    table::repeat(12, |_| {
        let change = word.seen().next(segment.direction, segment.flags, view());
        let changed = match change {
            Change::Nothing => {
                outcome = Outcome::Nothing;
                return true;
            }
            Change::Ignored => {
                outcome = Outcome::Ignored;
                return true;
            }
            // Whoever begins the last life still has to note when.
            Change::NewGeneration(_) if word.seen().is_starting() => return true,
            Change::Ended => return true,
            Change::AddIfItLasts(_) if !lasts(flow, now) => {
                outcome = Outcome::Nothing;
                return true;
            }
            Change::Add(seen) | Change::AddIfItLasts(seen) => {
                word.with(now, Seen(forget(seen.0.into()) as u16))
            }
            Change::NewGeneration(seen) => {
                let seen = Seen(forget(seen.starting().0.into()) as u16);
                Word::new(now, generation.wrapping_add(1), seen)
            }
        };
        // A deadline that moves to a later time is found out at the next visit. One that comes forward is
        // not to wait for that.
        let posted = if flow.is_ours() || !comes_forward(flow, word, changed) {
            changed
        } else {
            changed.with(now, changed.seen().posted())
        };
        match flow.change(&segment.key, word, posted) {
            Some(Ok(changed)) => {
                outcome = Outcome::Changed(changed);
                true
            }
            Some(Err(held)) if held.generation() == generation => {
                word = held;
                false
            }
            // The place has another flow by now, or the same key a new life. What the segment says
            // is of the old one.
            _ => true,
        }
    });
    match outcome {
        Outcome::Raced => count(Counter::Raced),
        Outcome::Ignored => {
            count(Counter::Ignored);
            if word.seen().is_opening() {
                // A SYN with another sequence number: the answer will be to that.
                follow(flow, word.seen(), segment);
            }
        }
        Outcome::Nothing => keep(flow, word, segment, now),
        Outcome::Changed(changed) => {
            count(Counter::Changed);
            if changed.generation() == generation {
                follow(flow, word.seen(), segment);
            } else {
                supersede(flow, segment, word, now);
            }
            if !comes_forward(flow, word, changed) {
                return;
            }
            let due = now + u64::from(flow.timeout(changed.seen()));
            if flow.is_ours() {
                wheel::hasten(flow, due);
            } else if word.seen().is_posted() {
                // It is there already, but for a time that may be later.
                inbox::hurry(flow, due);
            } else if changed.seen().is_posted() {
                inbox::post(flow, due);
            }
        }
    }
}

/// What became of a segment that changes a flow.
#[derive(Clone, Copy)]
enum Outcome {
    /// It says nothing new after all.
    Nothing,
    Ignored,
    Raced,
    /// To this.
    Changed(Word),
}

/// Whether the flow is older than two seconds.
#[inline(always)]
fn lasts(flow: At, now: u64) -> bool {
    age(now, flow.created()) > config!(two_seconds)
}

/// Whether the flow's timeout has become shorter.
#[inline(always)]
fn comes_forward(flow: At, old: Word, new: Word) -> bool {
    flow.timeout(new.seen()) < flow.timeout(old.seen())
}

/// How far the sides have come, as a first segment has it.
#[inline(always)]
fn positions(segment: &Segment) -> Positions {
    let ack = if segment.flags & tcp::ACK != 0 {
        segment.ack
    } else {
        0
    };
    match segment.direction {
        Direction::FromLow => [segment.end, ack],
        Direction::FromHigh => [ack, segment.end],
    }
}

/// Ends the old life of a key; `word` was its last. Only the CPU whose exchange has begun the new one
/// comes here. Its locals are not on the stack while [`change`] calls what it loops over.
#[inline(never)]
fn supersede(flow: At, segment: &Segment, word: Word, now: u64) -> u64 {
    let ended = Ended {
        created: flow.created(),
        word,
        rule: flow.rule(),
        reason: Reason::Superseded,
    };
    match emit::reserve() {
        Some(entry) => emit::submit(entry, Some(flow), &segment.key, &ended, now, Reader::Asleep),
        None => count(Counter::EventsLost),
    }
    flow.forget_account();
    count(Counter::Superseded);
    flow.set_created(now as u32);
    flow.set_positions(positions(segment));
    rto::forget(flow);
    flow.started();
    0
}

/// A segment that begins a flow: [`NEW`], [`FULL`] or [`EXISTS`].
#[inline(never)]
fn begin(segment: &Segment, seen: Seen, home: u32, now: u64, place: &Place) -> u64 {
    let room = table::has_room() || make_room(segment, seen, now) && table::has_room();
    if !room {
        count(Counter::TableFull);
        return FULL;
    }
    let begins = Begins {
        seen,
        now,
        cpu: clock::cpu(),
        rule: policy::rule(&segment.key, seen, place) as u16,
        positions: positions(segment),
    };
    let mut entered = enter(&segment.key, home, &begins);
    if entered == FULL && wheel::make_room_at(home, now) {
        entered = enter(&segment.key, home, &begins);
    }
    if entered != FULL && entered < EXISTS {
        // Here and not in `enter`, for the stack.
        if let Some(flow) = table::at(entered as u32) {
            let timeout = table::timeout(begins.rule, seen);
            wheel::start(flow, now, now + u64::from(timeout));
        }
        count(Counter::Created);
        return entered;
    }
    table::uncount(1);
    if entered == FULL {
        count(Counter::WindowFull);
    }
    entered
}

/// Enters a flow, which is then to be put on the wheel: [`NEW`], [`FULL`] or [`EXISTS`].
#[inline(never)]
fn enter(key: &FlowKey, home: u32, begins: &Begins) -> u64 {
    match table::insert(home, key, begins) {
        Inserted::New(flow, _) => NEW | u64::from(flow.index()),
        Inserted::Exists(flow) => EXISTS | u64::from(flow.index()),
        Inserted::Full => FULL,
    }
}

/// Removes one flow of this CPU that can go, if one of the first [`TRIES`] can; else one of a source that holds more
/// than its share, if that of the segment does not.
#[inline(always)]
fn make_room(segment: &Segment, seen: Seen, now: u64) -> bool {
    let Some(wheel) = wheel::this_cpu() else {
        return false;
    };
    let is_shared = config!(share) != 0;
    let hog = is_shared && share::is_hog(&segment.key, seen, now) != 0;
    let mut state = Room {
        now,
        list: wheel.latest,
        hog: hog.into(),
        removed: 0,
        reserved: 0,
    };
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
    if state.removed == 1 {
        return true;
    }
    if !is_shared || hog {
        return false;
    }
    share::tell(now);
    wheel::take_from_hogs(now)
}

#[repr(C)]
struct Room {
    now: u64,
    /// Where the latest flow is, which is the first that could go; each try looks at another list.
    list: u32,
    hog: u32,
    removed: u32,
    reserved: u32,
}

/// Returns 0 to be called again, 1 to end the loop.
unsafe extern "C" fn try_to_remove(index: u64, state: *mut c_void) -> i64 {
    // SAFETY: `make_room` passes a `Room` that nobody else refers to meanwhile.
    let state = unsafe { &mut *state.cast::<Room>() };
    let Some(wheel) = wheel::this_cpu() else {
        return 1;
    };
    let (list, last) = (state.list + index as u32, index + 1 == u64::from(TRIES));
    match wheel::make_room(wheel, state.now, list, last, state.hog != 0) {
        Handled::Rearmed | Handled::Reported => 0,
        Handled::Removed => {
            state.removed = 1;
            1
        }
        Handled::RingFull | Handled::Nothing(_) => 1,
    }
}
