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

/// Handles a segment that may change the flow's state. Rare: a handful in a connection's life.
/// Returns [`STRANGER`], [`NEW_RULE`] or 0, and [`TAKEN`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_change(index: u32, segment: *const Segment, now: u64, way: u32) -> u64 {
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
        return 0;
    };
    if !flow.has_key(&segment.key) {
        return STRANGER;
    }
    // Another CPU may change the flow at the same time; but states only lead forward, and the stamp
    // changes once a unit of the clock. So few attempts are needed.
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

/// If [`touch_change`] has returned [`NEW_RULE`], chooses the flow's rule by its first segment and
/// the interface that saw it. If the new rule's timeout is shorter than the old one's, that takes
/// effect at the flow's next timer visit. Returns 1 if the record holds another flow. (It takes the
/// result of [`touch_change`] so that the caller has one path, which the verifier goes through
/// once.)
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

/// Does what follows from the outcome of the attempts.
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

/// Notes the way by which the sender's packets come, if it is not known, or if the segment
/// determines what is true of the flow. (Otherwise both a SYN and its answer came by the ways of
/// their sides.) Returns [`NEW_RULE`] or 0, as [`touch_change`] does.
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

/// When the wheel must visit a flow whose timeout has become shorter; 0 if its timeout has not.
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

/// Result of [`touch_change`]: the record holds another flow.
const STRANGER: u64 = 1;
/// Result of [`touch_change`]: a flow of this host begins, and what seemed to be it was another
/// host's. Its rule is yet to be chosen.
const NEW_RULE: u64 = 2;

/// Most attempts to change a flow.
const ATTEMPTS: u32 = 12;

/// Result of an attempt to change a flow: another CPU has changed it meanwhile.
const AGAIN: u64 = 0;
/// Result of an attempt: the record now holds another generation or another flow, and the segment
/// belongs to the old one.
const RACED: u64 = 1;
/// Result of an attempt: the segment changes nothing.
const NOTHING: u64 = 2;
/// Result of an attempt: the segment does not fit the flow, and is ignored.
const IGNORED: u64 = 3;
/// Result of an attempt: the segment claims to be an answer, but came by the way of what it
/// answers.
const SAME_WAY: u64 = 5;
/// Result of an attempt: the flow is changed.
const CHANGED: u64 = 4;

/// An attempt to change a flow, and its result.
#[repr(C)]
#[derive(Default)]
pub struct Attempt {
    /// The flow's word before.
    before: u64,
    /// The flow's word after.
    after: u64,
    /// The generation that the segment belongs to.
    life: u16,
    /// What the way of the segment implies: [`OWN`], [`LOCAL`], [`DISPROVED`].
    ways: u8,
    /// 1: `number` is in doubt now.
    is_doubt: u8,
    /// 1: the segment's acknowledgment is the other side's next sequence number. 2: both sides'
    /// next sequence numbers are as the segment says.
    is_answer: u8,
    reserved: [u8; 3],
    number: u32,
    /// The [`Way`] by which the segment came.
    way: u32,
}

/// The segment's sender may send by this way.
const OWN: u8 = 1;
/// This host made the segment.
const LOCAL: u8 = 2;
/// What was seen of the sender before came from another host.
const DISPROVED: u8 = 4;

/// What the way by which a segment came implies.
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

/// Changes a flow as a segment demands, if the flow is still in this generation and no other CPU
/// changes it at the same time.
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
        // The CPU that began the last generation has not stored its beginning yet.
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
            // A SYN without an answer does not keep a flow alive.
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

/// Begins the flow anew if what was seen of it so far is [`DISPROVED`], with the results of
/// [`touch_attempt`]; otherwise clears that flag.
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
    // The CPU that began the last generation has not stored its beginning yet.
    if word.seen().is_starting() {
        return RACED;
    }
    let changed = Word::new(now, word.generation().wrapping_add(1), seen.starting());
    exchange(flow, segment, changed, now, attempt)
}

/// Changes a flow's word, if it is still what it was before the attempt.
#[inline(always)]
fn exchange(flow: At, segment: &Segment, changed: Word, now: u64, attempt: &mut Attempt) -> u64 {
    let word = Word(attempt.before);
    // A deadline that moves to a later time is found out at the next timer visit. An earlier one
    // must not wait for that.
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

/// Ends the old generation of a key; `word` was its last. Only the CPU whose exchange began the new
/// generation gets here.
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
