//! Touch: what every packet does to its flow.
//!
//! A store of the time, if it has changed, and nothing else: no lock, no list, no timer moved. What
//! the packet changed of the flow's deadline is found out when the wheel next visits the flow.

use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::{Word, age},
    numbers::{self, Positions, advance, is_apart},
    packet::{Segment, datagram, tcp},
    policy::Hook,
    state::{Change, Known, Seen, SideWay, View, Way},
    table::OUTGOING,
};

use crate::{
    clock, config,
    count::{count, count_at},
    emit::{self, Ended, Reader},
    enforce, inbox, point,
    policy::{self, Place},
    rto, share,
    table::{self, At, Hot},
    verifier::{bit, given, given_mut},
    wheel,
};

/// What was done with a segment. A number, because a global function can return nothing else.
#[repr(u64)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Touched {
    /// Of a flow in the table.
    Known = 0,
    /// It began a flow.
    Created = 1,
    /// Of no flow, and no reason to begin one.
    NoFlow = 2,
    /// It would have begun a flow, but the table is full.
    TableFull = 3,
    /// The same, but all records near the flow's place are taken.
    WindowFull = 6,
    /// Of a flow that has expired, and is to be dropped.
    Refused = 4,
    /// The same, and is to be answered.
    Answered = 5,
}

impl Touched {
    /// From its number.
    #[inline(always)]
    pub fn from_raw(raw: u64) -> Self {
        match raw {
            0 => Self::Known,
            1 => Self::Created,
            3 => Self::TableFull,
            6 => Self::WindowFull,
            4 => Self::Refused,
            5 => Self::Answered,
            _ => Self::NoFlow,
        }
    }
}

/// Flows looked at, at most, to make room for a new one.
const TRIES: u32 = 8;

/// Touches the flow of a segment, or begins one. What a packet of a known flow needs is inlined; all else is in
/// functions that the verifier goes through once.
#[inline(always)]
pub fn touch(segment: &Segment, now: u64, place: Place) -> Touched {
    let at = table::place(&segment.key);
    table::expect_account(at);
    rto::expect(at.home);
    if segment.flags & tcp::SYN != 0 {
        table::expect_details();
    }
    if let Some(flow) = table::find(at, &segment.key) {
        let before = flow.positions();
        let word = flow.word();
        if config!(watched) != 0 && is_seen_again(flow, word, segment, now, place) {
            count(Counter::SeenAgain);
            return Touched::Known;
        }
        if update(flow, word, segment, now, place) {
            note(flow, segment, before, now);
            let counter = match place.is_forwarded {
                false => Counter::Touched,
                true => Counter::SeenAgain,
            };
            match config!(watched) {
                0 => count(counter),
                _ => count_at(place.point.place(), counter),
            }
            return Touched::Known;
        }
    }
    begin(segment, at, now, place)
}

/// Whether the packet was counted elsewhere on its way: then it does no more than to keep the flow alive. Asked where it makes
/// a difference: of packets that may change a state, and where packets are counted.
#[inline(always)]
fn is_seen_again(flow: Hot, word: Word, segment: &Segment, now: u64, place: Place) -> bool {
    let is_kept = word.seen().is_kept_by(segment.direction, segment.flags);
    let is_counted = config!(accounting) != 0 || rto::is_on();
    if is_kept && !is_counted {
        return false;
    }
    let mut flags = 0;
    if is_kept {
        flags |= point::NOTES;
    }
    if place.may_be_known {
        flags |= point::MAY_BE_KNOWN;
    }
    if point::point_see(flow.index(), segment, now, place.point.0.into(), flags) == 0 {
        return false;
    }
    if word.is_older_than(now) {
        flow.touch(now);
        clock::see(now);
    }
    true
}

/// For a segment of no known flow: enters one, and makes room for it if the table is full.
///
/// The steps are taken one after the other here, and none within another: the verifier adds up what callers and callees
/// have on the stack.
#[inline(always)]
fn begin(segment: &Segment, at: table::Place, now: u64, place: Place) -> Touched {
    if config!(enforce) == 0 && !Seen::is_first(segment.flags, view()) {
        count(Counter::NoFlow);
        return Touched::NoFlow;
    }
    let hook = place.hook as u32;
    let interface = u64::from(place.way.0) << 32 | u64::from(place.interface);
    let mut begun = 0;
    for _ in 0..3 {
        begun = touch_unknown(segment, now, interface, hook);
        if Touched::from_raw(begun >> 32) == Touched::Created {
            let (seen, mut rule) = admitted(begun);
            if let Hook::Egress = place.hook {
                rule |= table::OUTGOING_RULE as u32;
            }
            let way = SideWay::of(place.way, segment.direction);
            begun = start(segment, at, now, seen, rule, way, 0);
        }
        let room = match Touched::from_raw(begun >> 32) {
            Touched::TableFull => touch_make_room(segment, now),
            Touched::WindowFull => wheel::wheel_make_room_at(at.home, now),
            _ => 0,
        };
        if room == 0 {
            break;
        }
    }
    let touched = Touched::from_raw(begun >> 32);
    match touched {
        Touched::TableFull => count(Counter::TableFull),
        Touched::WindowFull => count(Counter::WindowFull),
        Touched::Created => {
            if let Some(flow) = table::hot(begun as u32) {
                note_point(flow, segment, now, place, TAKEN);
                let before = flow.positions();
                note(flow, segment, before, now);
            }
        }
        // Another CPU has entered it meanwhile.
        Touched::Known => {
            if let Some(flow) = table::hot(begun as u32) {
                let before = flow.positions();
                // Another CPU has just entered it.
                let changed = touch_change(flow.index(), segment, now, place.way.0);
                note_point(flow, segment, now, place, changed);
                note(flow, segment, before, now);
            }
            count(Counter::Touched);
        }
        _ => {}
    }
    touched
}

/// A segment of no flow in the table, that was seen on this interface, and by which way it came in the high half.
/// [`Touched`] in the high half. If that is [`Touched::Created`], the flow is counted in, and what it begins with is in the low
/// half: [`admitted`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_unknown(
    segment: *const Segment,
    now: u64,
    interface_way: u64,
    hook: u32,
) -> u64 {
    let Some(segment) = given(segment) else {
        return (Touched::NoFlow as u64) << 32;
    };
    if config!(enforce) != 0 {
        match enforce::enforce_of_none(segment, now, hook) {
            enforce::PASS => {}
            enforce::ANSWER => return (Touched::Answered as u64) << 32,
            _ => return (Touched::Refused as u64) << 32,
        }
    }
    let Some(seen) = Seen::first(segment.direction, segment.flags, view()) else {
        count(Counter::NoFlow);
        return (Touched::NoFlow as u64) << 32;
    };
    if !table::has_room() {
        return (Touched::TableFull as u64) << 32;
    }
    let rule = policy::policy_rule(segment, seen.0, interface_way as u32, hook);
    (Touched::Created as u64) << 32 | u64::from(rule & 0x1ff) << 20 | u64::from(seen.0 & 0xfffff)
}

/// What the flow begins with that [`touch_unknown`] has counted in: what was seen, and the rule.
#[inline(always)]
fn admitted(unknown: u64) -> (Seen, u32) {
    let low = unknown as u32;
    (Seen(low & 0xfffff), low >> 20 & 0x1ff)
}

/// Enters a flow that was counted in, and starts its timer. As [`touch_unknown`] says.
#[inline(always)]
fn start(
    segment: &Segment,
    place: table::Place,
    now: u64,
    seen: Seen,
    rule: u32,
    way: SideWay,
    idle: u32,
) -> u64 {
    let since = now - u64::from(idle);
    let rule_way = u64::from(way.0) << 32 | u64::from(rule);
    clock::see(now);
    let entered = table::enter(segment, place, since, seen, rule_way);
    touch_started(entered, now, since)
}

/// Starts the timer of a flow that [`table::enter`] has entered, or counts it out if it has not. As [`touch_unknown`] says,
/// with the index of the flow in the low half.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_started(entered: u64, now: u64, since: u64) -> u64 {
    let Some(flow) = table::entered(entered) else {
        table::uncount(1);
        return (Touched::WindowFull as u64) << 32;
    };
    if !table::is_new(entered) {
        table::uncount(1);
        return (Touched::Known as u64) << 32 | u64::from(flow.index());
    }
    let timeout = flow.timeout(flow.word().seen());
    wheel::wheel_start(flow.index(), now, since + u64::from(timeout));
    count(Counter::Created);
    (Touched::Created as u64) << 32 | u64::from(flow.index())
}

/// Enters a flow that no packet has begun, of which this is known, and which has been idle for so long (units). The
/// segment has its key alone. [`Touched`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_enter(
    segment: *const Segment,
    now: u64,
    seen: u32,
    rule: u32,
    idle: u32,
) -> u64 {
    let Some(segment) = given(segment) else {
        return Touched::NoFlow as u64;
    };
    if !table::has_room() {
        return Touched::TableFull as u64;
    }
    let place = table::place(&segment.key);
    let (seen, rule) = (Seen(seen), rule & 0x1ff);
    start(segment, place, now, seen, rule, SideWay::ANY, idle) >> 32
}

/// Counts a packet of a flow, and looks at the flow's retransmission timers, of which `before` is how far its sides had
/// come.
#[inline(always)]
fn note(flow: Hot, segment: &Segment, before: Positions, now: u64) {
    time(flow, segment, before, now);
    flow.count(segment.direction, segment.packets, segment.bytes);
}

/// The packet's part in the flow's retransmission timers.
#[inline(always)]
fn time(flow: Hot, segment: &Segment, [low, high]: Positions, now: u64) {
    if rto::is_on() && segment.flags & datagram::ANY == 0 {
        let before = u64::from(low) | u64::from(high) << 32;
        let due = rto::rto_see(flow.index(), segment, before, now);
        if due & rto::GOES_ON != 0 {
            rto::rto_go_on(flow.index(), segment);
        }
        let due = due & !rto::GOES_ON;
        if due != 0 {
            count(Counter::RtoStarted);
        }
        if due > rto::STARTED {
            rto::rto_hasten(flow.index(), segment, due);
        }
    }
}

#[inline(always)]
pub(crate) fn view() -> View {
    View {
        one_way: config!(one_way) != 0,
        strict: config!(strict) != 0,
    }
}

/// Notes what a packet says of a flow that is there. Says whether it is the packet's.
#[inline(always)]
fn update(flow: Hot, word: Word, segment: &Segment, now: u64, place: Place) -> bool {
    if !word.seen().is_kept_by(segment.direction, segment.flags) {
        let changed = touch_change(flow.index(), segment, now, place.way.0);
        note_point(flow, segment, now, place, changed);
        let (hook, interface) = (place.hook as u64, place.interface.into());
        return bit(touch_rule(flow.index(), segment, changed, interface, hook)) == 0;
    }
    keep(flow, word, segment, now, place.way);
    true
}

/// Notes where a packet was seen, if its flow has [`TAKEN`] it. (Not within [`touch_change`]: the verifier adds up what callers
/// and callees have on the stack.)
#[inline(always)]
fn note_point(flow: Hot, segment: &Segment, now: u64, place: Place, changed: u64) {
    if config!(watched) != 0 {
        let taken = (changed & TAKEN) as u32;
        point::point_note(flow.index(), segment, now, place.point.0.into(), taken);
    }
}

/// A packet that says nothing new, and keeps the flow alive.
#[inline(always)]
fn keep(flow: Hot, word: Word, segment: &Segment, now: u64, way: Way) {
    if word.is_older_than(now) {
        // So a flow that has a packet in every unit of the clock is written once a unit.
        flow.touch(now);
        clock::see(now);
    }
    let (seen, told) = (word.seen(), numbers::first(segment));
    if flow.positions() == told {
        return;
    }
    if seen.is_told_by(segment.direction, view()) {
        touch_told(flow.index(), segment, way.0);
    } else {
        follow(flow, seen, segment, way);
    }
}

/// Notes what a side says that alone says where both sides are.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_told(index: u32, segment: *const Segment, way: u32) -> u64 {
    if let (Some(flow), Some(segment)) = (table::at(index), given(segment))
        && flow.has_key(&segment.key)
    {
        flow.set_positions(numbers::first(segment));
        learn(flow, segment, Way(way));
    }
    0
}

/// Notes by which way the sender's packets come, if that is not known, or if the segment says what is true of the flow. (Else
/// both a SYN and its answer came by the ways of their sides.) As [`touch_change`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_learn(index: u32, segment: *const Segment, attempt: *const Attempt) -> u64 {
    let (Some(flow), Some(segment)) = (table::at(index), given(segment)) else {
        return 0;
    };
    let Some(attempt) = given(attempt) else {
        return 0;
    };
    let (before, after) = (Word(attempt.before), Word(attempt.after));
    let begins = attempt.ways & DISPROVED != 0
        && after.0 != 0
        && after.generation() == before.generation().wrapping_add(1);
    if begins || attempt.is_answer == 2 || flow.way() == SideWay::ANY {
        learn(flow, segment, Way(attempt.way));
    }
    match begins {
        true => NEW_RULE,
        false => 0,
    }
}

/// Notes by which way a side's packets come.
#[inline(always)]
fn learn(flow: At, segment: &Segment, way: Way) {
    let way = SideWay::of(way, segment.direction);
    if flow.way() != way {
        flow.set_way(way);
    }
}

/// Notes how far the sender has come, and the other side by what the sender has of it.
#[inline(always)]
fn follow(flow: Hot, seen: Seen, segment: &Segment, way: Way) {
    let positions = flow.positions();
    if is_apart(positions, segment) {
        touch_apart(flow.index(), segment, way.0);
    }
    if let Some(position) = advance(positions, seen, segment) {
        flow.set_position(segment.direction, position);
    }
}

/// A segment behind a gap, or one that acknowledges what has not come by here. Rare, but where packets are lost.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_apart(index: u32, segment: *const Segment, way: u32) -> u64 {
    let (Some(flow), Some(segment)) = (table::at(index), given(segment)) else {
        return 0;
    };
    if !flow.has_key(&segment.key) {
        return 0;
    }
    let (seen, direction) = (flow.word().seen(), segment.direction);
    let is_own_way = config!(one_armed) != 0 || flow.way().allows(Way(way), direction, false);
    let positions = flow.positions();
    let apart = numbers::apart(positions, flow.doubt(), seen, segment, is_own_way);
    if let Some(position) = apart.other {
        flow.set_position(direction.reverse(), position);
    }
    if let Some(position) = apart.own {
        flow.set_doubt(position);
    }
    0
}

/// A segment that may change the flow's state. Rare: a handful in a connection's life.
/// [`STRANGER`], [`NEW_RULE`] or 0, and [`TAKEN`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_change(index: u32, segment: *const Segment, now: u64, way: u32) -> u64 {
    let (Some(flow), Some(segment)) = (table::at(index), given(segment)) else {
        return 0;
    };
    if !flow.has_key(&segment.key) {
        return STRANGER;
    }
    // Another CPU may change the flow at the same time, but states lead forward, and the
    // stamp changes once a unit of the clock.
    let mut attempt = Attempt {
        life: flow.word().generation(),
        ways: touch_ways(index, segment, way) as u8,
        way,
        ..Attempt::default()
    };
    let mut outcome = AGAIN;
    for _ in 0..ATTEMPTS {
        outcome = match attempt.ways & DISPROVED {
            0 => touch_attempt(index, segment, now, &raw mut attempt),
            _ => touch_anew(index, segment, now, &raw mut attempt),
        };
        if outcome != AGAIN {
            break;
        }
    }
    match table::at(index) {
        Some(flow) => attempted(flow, segment, outcome, &attempt, now),
        None => 0,
    }
}

/// Chooses the rule of a flow if [`touch_change`] has said that it has a [`NEW_RULE`], by its first segment, as that was
/// seen on this interface. If it gives less time than the one before, that tells when the wheel next visits the flow. 1 if
/// the flow is another's. (So the caller has one path, which the verifier goes through once.)
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_rule(
    index: u32,
    segment: *const Segment,
    changed: u64,
    interface: u64,
    hook: u64,
) -> u64 {
    let changed = changed & !TAKEN;
    if changed != NEW_RULE {
        return changed;
    }
    if let (Some(flow), Some(segment)) = (table::at(index), given(segment)) {
        let seen = flow.word().seen().0;
        let rule = policy::policy_rule(segment, seen, interface as u32, hook as u32) as u16;
        if flow.has_key(&segment.key) {
            flow.begin_anew(rule, if hook == 0 { 0 } else { OUTGOING });
        }
    }
    0
}

/// What follows from an attempt.
#[inline(always)]
fn attempted(flow: At, segment: &Segment, outcome: u64, attempt: &Attempt, now: u64) -> u64 {
    let (before, after) = (Word(attempt.before), Word(attempt.after));
    let way = Way(attempt.way);
    match outcome {
        IGNORED => {
            count(Counter::Ignored);
            return 0;
        }
        SAME_WAY => {
            count(Counter::SameWay);
            return 0;
        }
        NOTHING => keep(flow.hot(), before, segment, now, way),
        CHANGED => {
            clock::see(now);
            count(Counter::Changed);
            if after.generation() != before.generation() {
                touch_supersede(flow.index(), segment, before.0, now);
            } else {
                if attempt.is_answer == 2 {
                    flow.set_positions(numbers::first(segment));
                } else if attempt.is_answer != 0 {
                    flow.set_position(segment.direction.reverse(), segment.ack);
                }
                if attempt.is_doubt != 0 {
                    flow.set_doubt(attempt.number);
                } else if segment.flags & tcp::RST == 0 {
                    follow(flow.hot(), before.seen(), segment, way);
                }
            }
            let due = touch_due(flow.index(), before.0, after.0, now);
            touch_hasten(flow.index(), before.seen().0, after.seen().0, due);
        }
        _ => {
            count(Counter::Raced);
            return 0;
        }
    }
    TAKEN | touch_learn(flow.index(), segment, attempt)
}

/// When a flow is to be looked at whose timeout has become shorter; 0: its timeout has not.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_due(index: u32, before: u64, after: u64, now: u64) -> u64 {
    let Some(flow) = table::at(index) else {
        return 0;
    };
    let (before, after) = (Word(before), Word(after));
    if !comes_forward(flow, before, after) {
        return 0;
    }
    now + u64::from(flow.timeout(after.seen()))
}

/// Sees to it that a flow is looked at when it is [due](touch_due).
///
/// (Not one function with that: the verifier adds up what callers and callees have on the stack.)
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_hasten(index: u32, before: u32, after: u32, due: u64) -> u64 {
    let Some(flow) = table::at(index) else {
        return 0;
    };
    if due == 0 {
        return 0;
    }
    if flow.is_ours() {
        wheel::wheel_hasten(index, due)
    } else {
        touch_post(index, before, after, due)
    }
}

/// The same by way of the inbox of the CPU on whose wheel the flow stands.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_post(index: u32, before: u32, after: u32, due: u64) -> u64 {
    let Some(flow) = table::at(index) else {
        return 0;
    };
    if Seen(before).is_posted() {
        // It was posted already, perhaps for a later time.
        inbox::hurry(flow, due);
    } else if Seen(after).is_posted() {
        inbox::post(flow, due);
    }
    0
}

/// Of [`touch_change`]: the flow is another's;
const STRANGER: u64 = 1;
/// a flow of this host begins, and what seemed to be it was somebody else's: it has not met its rule;
const NEW_RULE: u64 = 2;
/// beside these: the flow has taken the segment for its own.
const TAKEN: u64 = 4;

/// Attempts to change a flow, at most.
const ATTEMPTS: u32 = 12;

/// Result of an attempt to change a flow: another CPU has changed it meanwhile;
const AGAIN: u64 = 0;
/// the record holds another life or another flow by now, and the segment is of the old one;
const RACED: u64 = 1;
/// the segment changes nothing;
const NOTHING: u64 = 2;
/// the segment does not fit the flow, and is ignored;
const IGNORED: u64 = 3;
/// the segment claims to be an answer, and came by the way of what it answers;
const SAME_WAY: u64 = 5;
/// the flow is changed.
const CHANGED: u64 = 4;

/// An attempt, and what came of it.
#[repr(C)]
#[derive(Default)]
pub struct Attempt {
    /// The word that the flow had,
    before: u64,
    /// and the one that it has.
    after: u64,
    /// The generation of the life that the segment is of.
    life: u16,
    /// What the way of the segment says: [`OWN`], [`LOCAL`], [`DISPROVED`].
    ways: u8,
    /// 1: `number` is in doubt now.
    is_doubt: u8,
    /// 1: the other side has come as far as the segment acknowledges; 2: and its sender as far as the segment says.
    is_answer: u8,
    reserved: [u8; 3],
    number: u32,
    /// By which [`Way`] the segment came.
    way: u32,
}

/// By this way the segment's sender may send;
const OWN: u8 = 1;
/// this host made it;
const LOCAL: u8 = 2;
/// and what was seen of its sender before was somebody else's.
const DISPROVED: u8 = 4;

/// What the way by which a segment came says of it.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_ways(index: u32, segment: *const Segment, way: u32) -> u64 {
    let (Some(flow), Some(segment)) = (table::at(index), given(segment)) else {
        return 0;
    };
    let (side, way, direction) = (flow.way(), Way(way), segment.direction);
    let is_lenient = config!(one_way) != 0 || flow.word().seen().is_replied();
    let is_own = config!(one_armed) != 0 || side.allows(way, direction, is_lenient);
    let is_disproved = side.is_disproved_by(way, direction);
    u64::from(is_own) | u64::from(way.is_local()) << 1 | u64::from(is_disproved) << 2
}

/// Changes a flow as a segment says, if it is still in this life and nobody else changes it at the same time.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_attempt(
    index: u32,
    segment: *const Segment,
    now: u64,
    attempt: *mut Attempt,
) -> u64 {
    let (Some(flow), Some(segment)) = (table::at(index), given(segment)) else {
        return RACED;
    };
    let Some(attempt) = given_mut(attempt) else {
        return RACED;
    };
    let word = flow.word();
    attempt.before = word.0;
    if word.generation() != attempt.life {
        return RACED;
    }
    let known = Known {
        positions: flow.positions(),
        doubt: flow.doubt(),
        is_own_way: attempt.ways & OWN != 0,
        is_local: attempt.ways & LOCAL != 0,
    };
    (attempt.is_doubt, attempt.is_answer) = (0, 0);
    let changed = match word.seen().next(segment, &known, view()) {
        Change::Nothing => return NOTHING,
        Change::Ignored => return IGNORED,
        Change::SameWay => return SAME_WAY,
        Change::Ended => return RACED,
        // The CPU that began the last life has not stored its beginning yet.
        Change::NewGeneration(_) if word.seen().is_starting() => return RACED,
        Change::AddIfItLasts(_) if !lasts(flow, now) => return NOTHING,
        Change::Add(seen) | Change::AddIfItLasts(seen) => word.with(now, seen),
        Change::Answers(seen) => {
            attempt.is_answer = 1;
            word.with(now, seen)
        }
        Change::Places(seen) => {
            attempt.is_answer = 2;
            word.with(now, seen)
        }
        Change::Doubt(seen, number, answers) => {
            (attempt.is_doubt, attempt.number) = (1, number);
            attempt.is_answer = answers.into();
            // A SYN that nobody has answered keeps nothing alive.
            match segment.flags & tcp::SYN {
                0 => word.with(now, seen),
                _ => word.with_seen(seen),
            }
        }
        Change::NewGeneration(seen) => {
            Word::new(now, word.generation().wrapping_add(1), seen.starting())
        }
    };
    exchange(flow, segment, word, changed, now, attempt)
}

/// Begins the flow anew if what was seen of it so far is [`DISPROVED`], as [`touch_attempt`]; else takes that back.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_anew(
    index: u32,
    segment: *const Segment,
    now: u64,
    attempt: *mut Attempt,
) -> u64 {
    let (Some(flow), Some(segment)) = (table::at(index), given(segment)) else {
        return RACED;
    };
    let Some(attempt) = given_mut(attempt) else {
        return RACED;
    };
    let word = flow.word();
    attempt.before = word.0;
    if word.generation() != attempt.life {
        return RACED;
    }
    let Some(seen) = word.seen().anew(segment) else {
        attempt.ways &= !DISPROVED;
        return AGAIN;
    };
    // The CPU that began the last life has not stored its beginning yet.
    if word.seen().is_starting() {
        return RACED;
    }
    let changed = Word::new(now, word.generation().wrapping_add(1), seen.starting());
    exchange(flow, segment, word, changed, now, attempt)
}

/// Changes a flow's word, if it is still as it was.
#[inline(always)]
fn exchange(
    flow: At,
    segment: &Segment,
    word: Word,
    changed: Word,
    now: u64,
    attempt: &mut Attempt,
) -> u64 {
    // A deadline that moves to a later time is found out at the next visit. One that comes forward is
    // not to wait for that.
    let changed = if flow.is_ours() || !comes_forward(flow, word, changed) {
        changed
    } else {
        changed.with(now, changed.seen().posted())
    };
    match flow.change(&segment.key, word, changed) {
        Some(Ok(changed)) => {
            attempt.after = changed.0;
            CHANGED
        }
        Some(Err(_)) => AGAIN,
        None => RACED,
    }
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

/// Ends the old life of a key; `word` was its last. Only the CPU whose exchange has begun the new one
/// comes here.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_supersede(index: u32, segment: *const Segment, word: u64, now: u64) -> u64 {
    let (Some(flow), Some(segment)) = (table::at(index), given(segment)) else {
        return 0;
    };
    let ended = Ended {
        created: flow.created(),
        word: Word(word),
        rule: flow.rule(),
        reason: Reason::Superseded as u32,
    };
    match emit::reserve() {
        Some(entry) => emit::submit(entry, Some(flow), &segment.key, &ended, now, Reader::Asleep),
        None => count(Counter::EventsLost),
    }
    flow.forget_account();
    count(Counter::Superseded);
    flow.set_created(now as u32);
    flow.set_positions(numbers::first(segment));
    rto::forget(flow.hot());
    flow.started();
    0
}

/// Removes one flow of this CPU that can go, if one of the first [`TRIES`] can; else one of a source that holds more
/// than its share, if that of the segment does not. 1 if there is room now.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_make_room(segment: *const Segment, now: u64) -> u64 {
    let (Some(segment), Some(wheel)) = (given(segment), wheel::this_cpu()) else {
        return 0;
    };
    let is_shared = config!(share) != 0;
    let hog = is_shared && share::share_is_hog(segment, now) != 0;
    for number in 0..TRIES {
        let last = number + 1 == TRIES;
        // Each looks at another list, first that of the latest flow.
        let list = wheel.latest.wrapping_add(number);
        match wheel::wheel_make_room(list, last.into(), hog.into(), now) {
            wheel::KEPT => {}
            wheel::REMOVED => return 1,
            _ => break,
        }
    }
    if !is_shared || hog {
        return 0;
    }
    share::tell(now);
    wheel::wheel_take_from_hogs(now)
}
