//! A segment that may change the state of its flow: it is decided what it changes, and the flow's
//! word is stored.

use twheel_common::{
    decision::{Decision, Effects, Record, decide},
    flow::{Word, age},
    segment::Segment,
    state::Known,
    table::OUTGOING,
    way::{SideWay, Way},
};

use crate::{
    config, offload, policy, record, table,
    verifier::{Given, bit, given, given_mut},
};

use super::apply::{NEW_RULE, Packet, TAKEN, apply};

/// Handles a segment that may change the flow's state. Rare: a handful in a connection's life.
/// Returns [`STRANGER`], or what [`apply`] returns.
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
    // changes a few times in a unit of the clock. So few attempts are needed.
    let mut attempt = Attempt {
        before: Word::default(),
        decision: Decision::RACED,
        life: flow.word().generation(),
        facts: touch_facts(index, segment, now, way) as u16,
        stay: offload::stay(index),
    };
    for _ in 0..ATTEMPTS {
        touch_decide(index, segment, now, &raw mut attempt);
        offload::keep(flow.hot(), attempt.before);
        if touch_store(index, segment, &raw mut attempt) != AGAIN {
            break;
        }
    }
    let way = Way(way);
    match record::at(index) {
        Some(flow) => apply(
            flow,
            attempt.before,
            &attempt.decision,
            Packet { segment, now, way },
        ),
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

/// Result of [`touch_change`]: the record holds another flow.
const STRANGER: u64 = 1;

/// Most attempts to change a flow.
const ATTEMPTS: u32 = 12;

/// Result of [`touch_store`]: another CPU has changed the flow meanwhile.
const AGAIN: u64 = 0;
/// Result of [`touch_store`]: the word is stored, or there is none to store.
const DONE: u64 = 1;

/// An attempt to change a flow, and its result.
#[repr(C)]
pub struct Attempt {
    /// The flow's word before.
    before: Word,
    /// What follows from the segment.
    decision: Decision,
    /// The generation that the segment belongs to.
    life: u16,
    /// What is true of the segment and the flow: [`OWN_WAY`] and so on.
    facts: u16,
    /// The timeout that was handed over, which the flow has while it is established; else 0.
    stay: u32,
}

// SAFETY: only arguments have pointers to attempts.
unsafe impl Given for Attempt {}

/// [`Known::is_own_way`].
const OWN_WAY: u16 = 1;
/// [`Known::is_local`].
const LOCAL: u16 = 2;
/// [`Record::is_disproved`].
const DISPROVED: u16 = 4;
/// [`Record::lasts`].
const LASTS: u16 = 8;
/// [`Record::is_ours`].
const OURS: u16 = 16;
/// [`Record::has_way`].
const HAS_WAY: u16 = 32;

/// What is true of a segment that came by this way, and of its flow.
///
/// (A function of its own: the verifier adds up the stacks of callers and callees.)
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_facts(index: u32, segment: *const Segment, now: u64, way: u32) -> u64 {
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
        return 0;
    };
    let (side, way, direction) = (flow.way(), Way(way), segment.direction);
    let is_lenient = config!(one_way) != 0 || flow.word().seen().is_replied();
    let facts = [
        (
            OWN_WAY,
            config!(one_armed) != 0 || side.allows(way, direction, is_lenient),
        ),
        (LOCAL, way.is_local()),
        (DISPROVED, side.is_disproved_by(way, direction)),
        (LASTS, age(now, flow.created()) > config!(two_seconds)),
        (OURS, flow.is_ours()),
        (HAS_WAY, side != SideWay::ANY),
    ];
    let mut all = 0;
    for (fact, holds) in facts {
        all |= u64::from(fact) * bit(holds.into());
    }
    all
}

/// Decides what follows from a segment, if the flow is still in this generation.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_decide(
    index: u32,
    segment: *const Segment,
    now: u64,
    attempt: *mut Attempt,
) -> u64 {
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
        return 0;
    };
    let Some(attempt) = given_mut(attempt) else {
        return 0;
    };
    attempt.decision = Decision::RACED;
    let is_fact = |fact| attempt.facts & fact != 0;
    let record = Record {
        word: flow.word(),
        known: Known {
            positions: flow.positions(),
            doubt: flow.doubt(),
            is_own_way: is_fact(OWN_WAY),
            is_local: is_fact(LOCAL),
        },
        is_disproved: is_fact(DISPROVED),
        lasts: is_fact(LASTS),
        is_ours: is_fact(OURS),
        has_way: is_fact(HAS_WAY),
    };
    attempt.before = record.word;
    if record.word.generation() != attempt.life {
        return 0;
    }
    // The stay is an argument, because a call from here takes too much stack.
    let timeout = |seen| offload::longer(flow.rule(), seen, attempt.stay);
    attempt.decision = decide(&record, segment, now, config::view(), timeout);
    0
}

/// Stores the word that was decided, if the flow still has the one on which that was decided.
/// Returns [`AGAIN`] or [`DONE`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_store(index: u32, segment: *const Segment, attempt: *mut Attempt) -> u64 {
    let (Some(flow), Some(segment)) = (record::hot(index), given(segment)) else {
        return DONE;
    };
    let Some(attempt) = given_mut(attempt) else {
        return DONE;
    };
    if !attempt.decision.effects.has(Effects::WORD) {
        return DONE;
    }
    let word = offload::replaced(flow, attempt.before, attempt.decision.word);
    match table::change(flow, &segment.key, attempt.before, word) {
        Some(Ok(changed)) => attempt.decision.word = changed,
        Some(Err(_)) => {
            attempt.decision = Decision::RACED;
            return AGAIN;
        }
        None => attempt.decision = Decision::RACED,
    }
    DONE
}
