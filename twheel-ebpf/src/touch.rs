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
    state::{Change, Known, Seen, SideWay, View, Way},
};

use crate::{
    clock, config,
    count::count,
    emit::{self, Ended, Reader},
    enforce, inbox,
    policy::{self, Place},
    rto, share,
    table::{self, At},
    verifier::{given, given_mut},
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
    let home = table::home(&segment.key);
    match table::find(home, &segment.key) {
        Some(flow) => {
            let before = flow.positions();
            update(flow, segment, now, place);
            note(flow, segment, before, now);
            count(Counter::Touched);
            Touched::Known
        }
        None => begin(segment, home, now, place),
    }
}

/// For a segment of no known flow: enters one, and makes room for it if the table is full.
///
/// The steps are taken one after the other here, and none within another: the verifier adds up what callers and callees
/// have on the stack.
#[inline(always)]
fn begin(segment: &Segment, home: u32, now: u64, place: Place) -> Touched {
    let hook = place.hook as u32;
    let interface = u64::from(place.way.0) << 32 | u64::from(place.interface);
    let mut begun = touch_unknown(segment, home, now, interface, hook);
    for _ in 0..2 {
        let room = match Touched::from_raw(begun >> 32) {
            Touched::TableFull => touch_make_room(segment, now),
            Touched::WindowFull => wheel::wheel_make_room_at(home, now),
            _ => 0,
        };
        if room == 0 {
            break;
        }
        begun = touch_unknown(segment, home, now, interface, hook);
    }
    let touched = Touched::from_raw(begun >> 32);
    match touched {
        Touched::TableFull => count(Counter::TableFull),
        Touched::WindowFull => count(Counter::WindowFull),
        Touched::Created => {
            if let Some(flow) = table::at(begun as u32) {
                let before = flow.positions();
                note(flow, segment, before, now);
            }
        }
        // Another CPU has entered it meanwhile.
        Touched::Known => {
            if let Some(flow) = table::at(begun as u32) {
                let before = flow.positions();
                // Another CPU has just entered it.
                update(flow, segment, now, place);
                note(flow, segment, before, now);
            }
            count(Counter::Touched);
        }
        _ => {}
    }
    touched
}

/// A segment of no flow in the table, that was seen on this interface, and by which way it came in the high half. [`Touched`] in the high half; in the low one the index of the flow that it is of,
/// where there is one by now.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_unknown(
    segment: *const Segment,
    home: u32,
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
    let raw = seen.0;
    let rule = policy::policy_rule(segment, raw, interface_way as u32, hook);
    let way = SideWay::of(Way((interface_way >> 32) as u32), segment.direction);
    start(segment, home, now, seen, rule, way, 0)
}

/// Enters a flow that was counted in, and starts its timer. As [`touch_unknown`] says.
#[inline(always)]
fn start(
    segment: &Segment,
    home: u32,
    now: u64,
    seen: Seen,
    rule: u32,
    way: SideWay,
    idle: u32,
) -> u64 {
    let since = now - u64::from(idle);
    let rule_way = u64::from(way.0) << 32 | u64::from(rule);
    clock::see(now);
    let entered = table::table_enter(segment, home, since, seen.0, rule_way);
    let Some(flow) = table::entered(entered) else {
        table::uncount(1);
        return (Touched::WindowFull as u64) << 32;
    };
    if !table::is_new(entered) {
        table::uncount(1);
        return (Touched::Known as u64) << 32 | u64::from(flow.index());
    }
    let timeout = table::timeout(rule as u16, seen);
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
    let home = table::home(&segment.key);
    let (seen, rule) = (Seen(seen), rule & 0x1ff);
    start(segment, home, now, seen, rule, SideWay::ANY, idle) >> 32
}

/// Counts a packet of a flow, and looks at the flow's retransmission timers, of which `before` is how far its sides had
/// come.
#[inline(always)]
fn note(flow: At, segment: &Segment, before: Positions, now: u64) {
    time(flow, segment, before, now);
    flow.count(segment.direction, segment.bytes);
}

/// The packet's part in the flow's retransmission timers.
#[inline(always)]
fn time(flow: At, segment: &Segment, [low, high]: Positions, now: u64) {
    if rto::is_on() && segment.flags & datagram::ANY == 0 {
        let before = u64::from(low) | u64::from(high) << 32;
        let due = rto::rto_see(flow.index(), segment, before, now);
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

/// Notes what a packet says of a flow that is there.
#[inline(always)]
fn update(flow: At, segment: &Segment, now: u64, place: Place) {
    let word = flow.word();
    if !word.seen().is_kept_by(segment.direction, segment.flags) {
        if touch_change(flow.index(), segment, now, place.way.0) == NEW_RULE {
            touch_rule(flow.index(), segment, place.interface, place.hook as u32);
        }
        return;
    }
    keep(flow, word, segment, now, place.way);
}

/// A packet that says nothing new, and keeps the flow alive.
#[inline(always)]
fn keep(flow: At, word: Word, segment: &Segment, now: u64, way: Way) {
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
        flow.set_positions(told);
        learn(flow, segment, way);
    } else {
        follow(flow, seen, segment, way);
    }
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
    let begins = attempt.is_disproved != 0
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
fn follow(flow: At, seen: Seen, segment: &Segment, way: Way) {
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

/// A flow of this host begins, and what seemed to be it was somebody else's: it has not met its rule.
const NEW_RULE: u64 = 1;

/// A segment that may change the flow's state. Rare: a handful in a connection's life. [`NEW_RULE`], or 0.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_change(index: u32, segment: *const Segment, now: u64, way: u32) -> u64 {
    match (table::at(index), given(segment)) {
        (Some(flow), Some(segment)) => change(flow, segment, now, Way(way)),
        _ => 0,
    }
}

/// The rule of a flow whose first segment this is, as it was seen on this interface. If it gives less time than the one
/// before, that tells when the wheel next visits the flow.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_rule(
    index: u32,
    segment: *const Segment,
    interface: u32,
    hook: u32,
) -> u64 {
    if let (Some(flow), Some(segment)) = (table::at(index), given(segment)) {
        let seen = flow.word().seen().0;
        flow.set_rule(policy::policy_rule(segment, seen, interface, hook) as u16);
    }
    0
}

#[inline(always)]
fn change(flow: At, segment: &Segment, now: u64, way: Way) -> u64 {
    // Another CPU may change the flow at the same time, but states lead forward, and the
    // stamp changes once a unit of the clock.
    let mut attempt = Attempt {
        life: flow.word().generation(),
        way: way.0,
        ..Attempt::default()
    };
    let mut outcome = AGAIN;
    for _ in 0..ATTEMPTS {
        outcome = touch_attempt(flow.index(), segment, now, &raw mut attempt);
        if outcome != AGAIN {
            break;
        }
    }
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
        NOTHING => keep(flow, before, segment, now, way),
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
                    follow(flow, before.seen(), segment, way);
                }
            }
            bring_forward(flow, before, after, now);
        }
        _ => {
            count(Counter::Raced);
            return 0;
        }
    }
    touch_learn(flow.index(), segment, &raw const attempt)
}

/// Sees to it that a flow whose timeout has become shorter is looked at in time.
#[inline(always)]
fn bring_forward(flow: At, before: Word, after: Word, now: u64) {
    if !comes_forward(flow, before, after) {
        return;
    }
    let due = now + u64::from(flow.timeout(after.seen()));
    if flow.is_ours() {
        wheel::wheel_hasten(flow.index(), due);
    } else if before.seen().is_posted() {
        // It was posted already, perhaps for a later time.
        inbox::hurry(flow, due);
    } else if after.seen().is_posted() {
        inbox::post(flow, due);
    }
}

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
    /// 1: this host made the packet, and what was seen of its sender before was somebody else's.
    is_disproved: u8,
    /// 1: `number` is in doubt now.
    is_doubt: u8,
    /// 1: the other side has come as far as the segment acknowledges; 2: and its sender as far as the segment says.
    is_answer: u8,
    reserved: [u8; 3],
    number: u32,
    /// By which [`Way`] the segment came.
    way: u32,
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
    let (side, way) = (flow.way(), Way(attempt.way));
    let is_lenient = config!(one_way) != 0 || word.seen().is_replied();
    let known = Known {
        positions: flow.positions(),
        doubt: flow.doubt(),
        is_own_way: config!(one_armed) != 0 || side.allows(way, segment.direction, is_lenient),
        is_local: way.is_local(),
        is_disproved: side.is_disproved_by(way, segment.direction),
    };
    attempt.is_disproved = known.is_disproved.into();
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
    rto::forget(flow);
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
