//! A segment that may change the state of its flow. Rare: a handful in a connection's life.

use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::{Word, age},
    numbers,
    segment::{Segment, tcp},
    state::{Change, Known},
    table::OUTGOING,
    way::{SideWay, Way},
};

use crate::{
    clock, config,
    count::count,
    emit::{self, Ended},
    forward, policy,
    record::{self, At},
    table, timers,
    verifier::{given, given_mut},
};

use super::keep::{TAKEN, follow, keep, learn};

/// A segment that may change the flow's state. Rare: a handful in a connection's life.
/// [`STRANGER`], [`NEW_RULE`] or 0, and [`TAKEN`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_change(index: u32, segment: *const Segment, now: u64, way: u32) -> u64 {
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
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
    match record::at(index) {
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
    if let (Some(flow), Some(segment)) = (record::at(index), given(segment)) {
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
            forward::forward_deadline(flow.index(), before.seen().0, after.seen().0, due);
        }
        _ => {
            count(Counter::Raced);
            return 0;
        }
    }
    TAKEN | touch_learn(flow.index(), segment, attempt)
}

/// Notes by which way the sender's packets come, if that is not known, or if the segment says what is true of the flow. (Else
/// both a SYN and its answer came by the ways of their sides.) As [`touch_change`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_learn(index: u32, segment: *const Segment, attempt: *const Attempt) -> u64 {
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
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

/// When a flow is to be looked at whose timeout has become shorter; 0: its timeout has not.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_due(index: u32, before: u64, after: u64, now: u64) -> u64 {
    let Some(flow) = record::at(index) else {
        return 0;
    };
    let (before, after) = (Word(before), Word(after));
    if !comes_forward(flow, before, after) {
        return 0;
    }
    now + u64::from(flow.timeout(after.seen()))
}

/// Of [`touch_change`]: the flow is another's;
const STRANGER: u64 = 1;
/// a flow of this host begins, and what seemed to be it was somebody else's: it has not met its rule;
const NEW_RULE: u64 = 2;

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
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
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
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
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
    let changed = match word.seen().next(segment, &known, config::view()) {
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
    exchange(flow, segment, changed, now, attempt)
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
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
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
    exchange(flow, segment, changed, now, attempt)
}

/// Changes a flow's word, if it is still as it was before the attempt.
#[inline(always)]
fn exchange(flow: At, segment: &Segment, changed: Word, now: u64, attempt: &mut Attempt) -> u64 {
    let word = Word(attempt.before);
    // A deadline that moves to a later time is found out at the next visit. One that comes forward is
    // not to wait for that.
    let changed = if flow.is_ours() || !comes_forward(flow, word, changed) {
        changed
    } else {
        changed.with(now, changed.seen().posted())
    };
    match table::change(flow.hot(), &segment.key, word, changed) {
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
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
        return 0;
    };
    let ended = Ended {
        created: flow.created(),
        word: Word(word),
        rule: flow.rule(),
        reason: Reason::Superseded as u32,
    };
    match emit::reserve() {
        Some(entry) => emit::submit(entry, flow, &segment.key, &ended, now),
        None => count(Counter::EventsLost),
    }
    flow.clear_account();
    count(Counter::Superseded);
    flow.set_created(now as u32);
    flow.set_positions(numbers::first(segment));
    timers::reset(flow.hot());
    flow.started();
    0
}
