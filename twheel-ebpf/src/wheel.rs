//! The lists under the wheel's arithmetic: doubly linked through the flows themselves, by the index of their
//! details, so that a flow needs no node of its own, stands in exactly one slot, and can be taken
//! out of it wherever it stands.
//!
//! Everything here belongs to one CPU and runs with bottom halves off: in the packet path, or in the
//! stepper, which is a test run on that CPU. So no two of these functions ever interleave, and no
//! lock is needed.

use twheel_common::{
    bits::lowest,
    counter::Counter,
    event::Reason,
    flow::{MAX_AGE, Visit, Word, age, idle, visit},
    step::Deleted,
    table::WINDOW,
    wheel::{Geometry, Heads, LISTS, Link, Slot, Wheel},
};

use crate::{
    clock, config,
    count::count,
    emit::{self, Ended, Reader},
    inbox,
    maps::{SLOTS, WHEEL},
    rto, share,
    table::{self, At},
};

/// What this CPU's wheel did with the flow at the head of the earliest slot.
pub enum Handled {
    /// Armed again.
    Rearmed,
    /// The same, with an event of a retransmission timer's.
    Reported,
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

/// The heads of a slot's lists. Belong to this CPU, as `this_cpu` does.
#[derive(Clone, Copy)]
struct Lists(*mut Heads);

impl Lists {
    #[inline(always)]
    fn of(slot: u32) -> Option<Self> {
        SLOTS.get_ptr_mut(slot).map(Self)
    }

    #[inline(always)]
    fn place(self, list: u32) -> *mut Link {
        // SAFETY: within the value.
        unsafe { self.0.cast::<Link>().add(list as usize & (LISTS - 1)) }
    }

    #[inline(always)]
    fn get(self, list: u32) -> Link {
        // SAFETY: a place in a map, aligned to 4, that only this CPU reads and writes.
        unsafe { self.place(list).read_volatile() }
    }

    #[inline(always)]
    fn set(self, list: u32, link: Link) {
        // SAFETY: as above; no references are made of it.
        unsafe { self.place(list).write_volatile(link) }
    }

    /// The first flow of the first list from this one on that is not empty.
    #[inline(always)]
    fn first(self, from: u32) -> Link {
        let mut first = Link::NONE;
        for list in (0..LISTS as u32).rev() {
            let link = self.get(from + list);
            first = if link == Link::NONE { first } else { link };
        }
        first
    }

    #[inline(always)]
    fn are_empty(self) -> bool {
        (0..LISTS as u32).fold(0, |any, list| any | self.get(list).raw()) == 0
    }
}

/// The list of a flow in whichever slot it stands.
#[inline(always)]
fn list_of(flow: At) -> u32 {
    flow.number() & (LISTS as u32 - 1)
}

/// The shape of the wheel.
#[inline(always)]
fn geometry() -> Geometry {
    Geometry {
        levels: config!(geometry.levels),
        bits: config!(geometry.bits),
        scheme: config!(geometry.scheme),
    }
}

/// The slot of flows that were handed out and await their visit.
#[inline(always)]
fn pending() -> u32 {
    geometry().slots()
}

/// Puts a flow that has just entered the table on this CPU's wheel.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_start(index: u32, now: u64, due: u64) -> u64 {
    if let (Some(wheel), Some(flow)) = (this_cpu(), table::at(index)) {
        wheel.catch_up(clock::tick().of(now));
        place(wheel, flow, due);
    }
    0
}

/// Moves a flow of this CPU's wheel to an earlier slot, or wherever its deadline has got to.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_hasten(index: u32, due: u64) -> u64 {
    if let (Some(wheel), Some(flow)) = (this_cpu(), table::at(index)) {
        unlink(wheel, flow);
        place(wheel, flow, due);
    }
    0
}

/// Puts a flow into the slot of its deadline, and calls the stepper if it means to sleep past that.
#[inline(always)]
fn place(wheel: &mut Wheel, flow: At, due: u64) {
    let slot = wheel.slot(geometry(), clock::tick().from(due));
    push(wheel, flow, slot);
    rto::set_visit(flow.hot(), due);
    wake_for(wheel, slot);
}

/// Looks at a flow that was taken out of this CPU's inbox.
#[inline(always)]
pub fn deliver(flow: At, now: u64) {
    flow.delivered();
    // After that: whoever changes the flow from here on posts it again.
    look(flow, now);
}

/// Moves a flow of this CPU's wheel to the slot of the deadline that it has by now.
#[inline(always)]
pub fn look(flow: At, now: u64) {
    wheel_look(flow.index(), now);
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_look(index: u32, now: u64) -> u64 {
    let Some(flow) = table::at(index) else {
        return 0;
    };
    let word = flow.word();
    match visit(now, word, flow.timeout(word.seen()), clock::doubt) {
        Visit::Rearm(due) => {
            let due = first_of(flow, now, due);
            wheel_hasten(index, due);
            if rto::is_on() {
                settle(flow, now, due);
            }
        }
        Visit::Expire => {
            wheel_hasten(index, now);
        }
    }
    0
}

/// The flow's deadline, or that of a retransmission timer of its that expires before.
#[inline(always)]
fn first_of(flow: At, now: u64, due: u64) -> u64 {
    if rto::is_on() {
        let expires = rto::rto_next(flow.index(), now);
        if expires < due {
            return expires;
        }
    }
    due
}

/// Makes good a timer that another CPU has started while the flow was armed for `due`.
#[inline(always)]
fn settle(flow: At, now: u64, due: u64) {
    let expires = rto::started_meanwhile(flow.hot(), now);
    // Rounding alone is no reason.
    if expires < due.saturating_sub(2) {
        wheel_hasten(flow.index(), expires);
    }
}

/// Puts a flow at the front of a slot.
#[inline(always)]
fn push(wheel: &mut Wheel, flow: At, slot: Slot) {
    let (number, list) = (flow.number(), list_of(flow));
    let Some(lists) = Lists::of(slot.index) else {
        return;
    };
    let first = lists.get(list);
    lists.set(list, Link::flow(number));
    wheel.latest = list;
    flow.set_next(first);
    flow.set_prev(Link::list(slot.index, list));
    match first.as_flow().and_then(table::of) {
        Some(first) => first.set_prev(Link::flow(number)),
        None => wheel.occupy(geometry(), slot.index),
    }
}

/// Takes a flow out of the list in which it stands.
#[inline(always)]
fn unlink(wheel: &mut Wheel, flow: At) {
    let (next, prev) = (flow.next(), flow.prev());
    if let Some(next) = next.as_flow().and_then(table::of) {
        next.set_prev(prev);
    }
    let Some((slot, list)) = prev.as_list() else {
        if let Some(prev) = prev.as_flow().and_then(table::of) {
            prev.set_next(next);
        }
        return;
    };
    let Some(lists) = Lists::of(slot) else {
        return;
    };
    lists.set(list, next);
    if next == Link::NONE && slot != pending() && lists.are_empty() {
        wheel.vacate(geometry(), slot);
    }
}

/// Calls this CPU's stepper if it means to sleep past the slot's turn.
#[inline(always)]
fn wake_for(wheel: &mut Wheel, slot: Slot) {
    if slot.starts >= wheel.wake {
        return;
    }
    // Were the ring full, `wake` would stay as it was: the next new flow calls.
    if inbox::call(wheel) {
        wheel.wake = slot.starts;
    }
}

/// Visits one flow on behalf of the stepper: one that has been handed out, or else one of the next slot whose turn is
/// not after `tick`. `round` says in which lists there are flows that this call has gathered and not yet visited.
#[inline(always)]
pub fn step(wheel: &mut Wheel, now: u64, tick: u64, micros: u32, round: &mut u32) -> Handled {
    let geometry = geometry();
    let Some(waiting) = Lists::of(pending()) else {
        return Handled::Nothing(None);
    };
    if *round == 0 {
        if waiting.are_empty() {
            match wheel.first(geometry) {
                Some(slot) if slot.starts <= tick => {
                    wheel_hand_out(slot.index);
                    wheel.take(geometry, slot);
                }
                next => {
                    wheel.advance(tick);
                    return Handled::Nothing(next);
                }
            }
        }
        *round = wheel_gather();
    }
    let list = lowest(u64::from(*round));
    *round &= round.wrapping_sub(1);
    // A flow is due at the first tick that does not lie before its deadline, whatever brings the visit: so all
    // schemes report it at the same tick.
    let due = tick.wrapping_mul(u64::from(config!(tick)));
    handle(
        wheel,
        waiting.get(list),
        now,
        due,
        micros,
        For::Stepper,
        false,
    )
}

/// Hands out whole lists at once: flows armed again may come back to the same slot.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_hand_out(slot: u32) -> u32 {
    let (Some(from), Some(to)) = (Lists::of(slot), Lists::of(pending())) else {
        return 0;
    };
    for list in 0..LISTS as u32 {
        let first = from.get(list);
        from.set(list, Link::NONE);
        to.set(list, first);
        if let Some(flow) = first.as_flow().and_then(table::of) {
            flow.set_prev(Link::list(pending(), list));
        }
    }
    0
}

/// Loads what the visits of the first flow of each list read, and what they change of the flow behind it, so that the
/// processor waits for all of it at once. Says in which lists there are flows.
///
/// In a loop that does nothing else: before each atomic operation of a visit it would wait for what was asked for. The
/// flow at the front was behind another one the last time.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_gather() -> u32 {
    let Some(waiting) = Lists::of(pending()) else {
        return 0;
    };
    let mut round = 0;
    for list in 0..LISTS as u32 {
        if let Some(flow) = waiting.get(list).as_flow().and_then(table::of) {
            round |= 1 << list;
            flow.fetch();
        }
    }
    round
}

/// Visits one flow to make room for another: the one nearest its deadline, as far as slots tell, so one of those
/// that have been handed out or of the next slot, the first of a list. A flow that is not established goes, unless it has
/// whole rounds left and this is not the `last` try. For a source that holds more than its share (`hog`) only one
/// of such a source goes.
///
/// [`KEPT`], [`REMOVED`] or [`NOTHING`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_make_room(list: u32, last: u32, hog: u32, now: u64) -> u64 {
    let Some(wheel) = this_cpu() else {
        return NOTHING;
    };
    let mut first = match Lists::of(pending()) {
        Some(waiting) => waiting.first(list),
        None => Link::NONE,
    };
    if first == Link::NONE {
        let Some(slot) = wheel.first(geometry()) else {
            return NOTHING;
        };
        if let Some(lists) = Lists::of(slot.index) {
            first = lists.first(list);
        }
    }
    let purpose = if last != 0 { For::RoomAtAll } else { For::Room };
    match handle(wheel, first, now, now, 0, purpose, hog != 0) {
        Handled::Rearmed | Handled::Reported => KEPT,
        Handled::Removed => REMOVED,
        Handled::RingFull | Handled::Nothing(_) => NOTHING,
    }
}

/// What became of a flow that was looked at for its room: it stays, and another may go;
pub const KEPT: u64 = 0;
/// it is gone;
pub const REMOVED: u64 = 1;
/// there was none.
pub const NOTHING: u64 = 2;

/// Makes room for a flow of a home whose window is full: of the flows there that stand on this CPU's wheel
/// and are due or not established, the one nearest its deadline goes. 1 if one went.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_make_room_at(home: u32, now: u64) -> u64 {
    let nearest = nearest_at(home, now);
    (nearest < NONE && end_at(nearest as u32, now)).into()
}

/// No record.
const NONE: u64 = u64::MAX;

/// The record of that flow, or [`NONE`]. (Two functions, for the stack.)
#[inline(always)]
fn nearest_at(home: u32, now: u64) -> u64 {
    let (mut nearest, mut left) = (NONE, NONE);
    table::repeat(WINDOW, |distance| {
        let index = home + distance;
        let wait = wheel_wait_of(index, now);
        if wait < left {
            left = wait;
            nearest = u64::from(index);
        }
        false
    });
    nearest
}

/// Units until a flow of this CPU's wheel is due, if it can go: it is due or not established. Else [`NONE`].
///
/// A function that the verifier goes through by itself: some kernels (6.19, 7.0) fail on it within a loop.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_wait_of(index: u32, now: u64) -> u64 {
    let Some(flow) = table::at(index) else {
        return NONE;
    };
    let word = flow.word();
    if word.is_dead() || !flow.is_ours() {
        return NONE;
    }
    let idle = idle(now, word.stamp());
    let timeout = flow.timeout(word.seen());
    if idle >= timeout {
        0
    } else if word.seen().is_established(config!(one_way) != 0) {
        NONE
    } else {
        (timeout - idle).into()
    }
}

/// Ends a flow of this CPU's wheel that can go. Says whether it went.
#[inline(always)]
fn end_at(index: u32, now: u64) -> bool {
    let Some(flow) = table::at(index) else {
        return false;
    };
    let word = flow.word();
    let (reason, counter) = match visit(now, word, flow.timeout(word.seen()), clock::doubt) {
        Visit::Expire => (Reason::of_expiry(word.seen()), Counter::Expired),
        Visit::Rearm(_) => (Reason::Evicted, Counter::Evicted),
    };
    let gone = matches!(end(flow, word, reason, now), End::Done);
    if gone {
        count(counter);
    }
    gone
}

/// Makes room for a flow of a source that holds no more than its share: of those that userspace has named, the first
/// goes that is still of a source that holds more. 1 if one went.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_take_from_hogs(now: u64) -> u64 {
    let mut victim = None;
    table::repeat(TRIES, |_| {
        let Some(index) = share::next_victim() else {
            return true;
        };
        let Some(flow) = table::at(index) else {
            return true;
        };
        let word = flow.word();
        // One that is on its way to this CPU does not end before it is there, which may take a while.
        let can_end = !word.is_dead() && !word.seen().is_posted();
        if can_end && flow.is_ours() && share::share_may_take(index, now) != 0 {
            victim = Some(index);
        }
        victim.is_some()
    });
    let Some(flow) = victim.and_then(table::at) else {
        return 0;
    };
    let gone = matches!(end(flow, flow.word(), Reason::Evicted, now), End::Done);
    if gone {
        count(Counter::Evicted);
        count(Counter::OverShare);
    }
    gone.into()
}

/// Flows looked at, at most, of those that userspace has named: others may stand in their places by now.
const TRIES: u32 = 32;

/// What a visit is for.
#[derive(Clone, Copy, PartialEq, Eq)]
enum For {
    Stepper,
    /// A packet wants room, and can go on to another flow.
    Room,
    /// It cannot.
    RoomAtAll,
}

/// Visits the flow at the head of a list. What is due is what was `decided` on, units.
#[inline(always)]
fn handle(
    wheel: &mut Wheel,
    first: Link,
    now: u64,
    decided: u64,
    micros: u32,
    purpose: For,
    hog: bool,
) -> Handled {
    let for_room = purpose != For::Stepper;
    let Some(flow) = first.as_flow().and_then(table::of) else {
        return Handled::Nothing(None);
    };
    let index = flow.index();
    let word = flow.word();
    if word.is_dead() || !flow.is_ours() {
        // Only this CPU ends the flows of its wheel, and it unlinks them.
        count(Counter::Orphans);
        unlink(wheel, flow);
        return Handled::Rearmed;
    }
    let (mut reported, mut expires) = (false, rto::IDLE);
    if rto::is_on() && !for_room {
        let said = rto::rto_visit(index, now, micros);
        if said == rto::RING_FULL {
            return Handled::RingFull;
        }
        if said & rto::STALLS != 0 {
            rto::rto_stall(index);
        }
        reported = said & rto::REPORTED != 0;
        expires = said & rto::IDLE;
    }
    // Stalled by now, it may be.
    let word = flow.word();
    let (reason, counter) = match visit(decided, word, flow.timeout(word.seen()), clock::doubt) {
        Visit::Rearm(due)
            if for_room
                && !word.seen().is_established(config!(one_way) != 0)
                && (purpose == For::RoomAtAll
                    || wheel.reaches(geometry(), clock::tick().from(due)))
                && (!hog || share::share_is_of_hog(index, now) != 0) =>
        {
            (Reason::Evicted, Counter::Evicted)
        }
        Visit::Rearm(due) => {
            let due = if expires < due { expires } else { due };
            rearm(wheel, flow, now, due, for_room);
            if rto::is_on() && !for_room && due > now + rto::soon() {
                settle(flow, now, due);
            }
            return if reported {
                Handled::Reported
            } else {
                Handled::Rearmed
            };
        }
        Visit::Expire => (Reason::of_expiry(word.seen()), Counter::Expired),
    };
    let end = if for_room {
        end(flow, word, reason, now)
    } else {
        End::from_raw(wheel_expire(index, word.0, reason as u32, now))
    };
    match end {
        End::Done => {
            // The stepper counts when it is through.
            if for_room {
                count(counter);
            }
            Handled::Removed
        }
        End::Alive => {
            // Decided anew at the next tick, and not in this step: it may be late, and what keeps the flow
            // alive may last.
            rearm(wheel, flow, now, now + 1, for_room);
            Handled::Rearmed
        }
        End::RingFull => Handled::RingFull,
    }
}

/// Deletes a flow of this CPU's wheel, if it is as it was when it was chosen.
#[inline(always)]
pub fn delete(index: u32, word: Word, reason: Reason, now: u64) -> Deleted {
    let Some(flow) = table::at(index) else {
        return Deleted::Changed;
    };
    let held = flow.word();
    if !held.is_same(word) || word.is_dead() {
        return Deleted::Changed;
    }
    if !flow.is_ours() {
        return Deleted::Elsewhere;
    }
    if held.seen().is_posted() {
        return Deleted::Posted;
    }
    let word = held;
    match given_back(wheel_end(index, word.0, reason as u32, now)) {
        End::Done => {
            count(Counter::Deleted);
            Deleted::Done
        }
        End::Alive => Deleted::Changed,
        End::RingFull => Deleted::RingFull,
    }
}

/// How an attempt to end a flow went.
#[repr(u64)]
enum End {
    Done = 0,
    /// A packet came meanwhile.
    Alive = 1,
    RingFull = 2,
}

impl End {
    #[inline(always)]
    fn from_raw(raw: u64) -> Self {
        match raw {
            0 => Self::Done,
            1 => Self::Alive,
            _ => Self::RingFull,
        }
    }
}

/// Ends a flow for the stepper, whose events are [staged](emit::stage), if it is as it was when that was decided on: `word`.
///
/// The swap decides against all other CPUs: a packet that came before it has changed the word, and the
/// flow lives; one that comes after finds a flow that has ended. [`End`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_expire(index: u32, word: u64, reason: u32, now: u64) -> u64 {
    let (Some(wheel), Some(flow), word) = (this_cpu(), table::at(index), Word(word)) else {
        return End::Alive as u64;
    };
    let Some(stage) = emit::stage() else {
        return End::RingFull as u64;
    };
    if !flow.kill(word) {
        return End::Alive as u64;
    }
    stage.submit(Some(flow), &flow.key(), &ended(flow, word, reason), now);
    unlink(wheel, flow);
    flow.remove();
    End::Done as u64
}

/// The same for all others. With [`End::Done`] comes the index of the details in the high half, which the caller gives back:
/// the verifier adds up what callers and callees have on the stack.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_end(index: u32, word: u64, reason: u32, now: u64) -> u64 {
    let (Some(wheel), Some(flow), word) = (this_cpu(), table::at(index), Word(word)) else {
        return End::Alive as u64;
    };
    let Some(entry) = emit::reserve() else {
        return End::RingFull as u64;
    };
    if !flow.kill(word) {
        entry.discard(0);
        return End::Alive as u64;
    }
    let ended = ended(flow, word, reason);
    emit::submit(entry, Some(flow), &flow.key(), &ended, now, Reader::Asleep);
    taken_out(wheel, flow)
}

/// The same without an event, which is lost, and counted.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_end_untold(index: u32, word: u64) -> u64 {
    let (Some(wheel), Some(flow)) = (this_cpu(), table::at(index)) else {
        return End::Alive as u64;
    };
    if !flow.kill(Word(word)) {
        return End::Alive as u64;
    }
    count(Counter::EventsLost);
    taken_out(wheel, flow)
}

/// Takes a flow that was killed out of its slot and out of the table.
#[inline(always)]
fn taken_out(wheel: &mut Wheel, flow: At) -> u64 {
    unlink(wheel, flow);
    let details = flow.free();
    table::uncount(1);
    u64::from(details) << 32 | End::Done as u64
}

#[inline(always)]
fn ended(flow: At, word: Word, reason: u32) -> Ended {
    Ended {
        created: flow.created(),
        word,
        rule: flow.rule(),
        reason,
    }
}

/// Ends a flow for a packet, which cannot wait for room in the ring.
#[inline(always)]
fn end(flow: At, word: Word, reason: Reason, now: u64) -> End {
    let mut ended = wheel_end(flow.index(), word.0, reason as u32, now);
    if let End::RingFull = End::from_raw(ended & LOW) {
        ended = wheel_end_untold(flow.index(), word.0);
    }
    given_back(ended)
}

/// What a flow's end came to, once its details are given back.
#[inline(always)]
fn given_back(ended: u64) -> End {
    let end = End::from_raw(ended & LOW);
    if let End::Done = end {
        table::give((ended >> 32) as u32);
    }
    end
}

/// The low half.
const LOW: u64 = u32::MAX as u64;

/// Moves a flow to the slot of the time at which it is due.
#[inline(always)]
fn rearm(wheel: &mut Wheel, flow: At, now: u64, due: u64, for_room: bool) {
    if age(now, flow.created()) > MAX_AGE {
        flow.set_created((now as u32).wrapping_sub(MAX_AGE));
    }
    unlink(wheel, flow);
    let due = if for_room {
        rto::no_later(flow.hot(), now, due)
    } else {
        due
    };
    let slot = wheel.again(geometry(), clock::tick().from(due));
    push(wheel, flow, slot);
    rto::set_visit(flow.hot(), due);
    if for_room {
        // The stepper may sleep past the new slot: timeouts may have become shorter.
        wake_for(wheel, slot);
    }
}
