//! Changes the time, the sequence numbers and the ways of a known flow, whose record CPUs share.
//! [`apply`] does what was decided of a packet that may change the state, [`keep`] what any other
//! packet does. What a packet's sequence numbers say is decided by `twheel_common::numbers`.
//!
//! The word of a changing state is stored before, by `touch_store`: if its compare-and-swap fails,
//! nothing is applied, and all is decided anew.

use twheel_common::{
    counter::Counter,
    decision::{Decision, Effects},
    event::Reason,
    flow::Word,
    key::Direction,
    numbers::{self, advance, is_apart},
    seen::Seen,
    segment::Segment,
    way::{SideWay, Way},
};

use crate::{
    clock, config,
    count::count,
    emit::{self, Ended},
    forward, offload,
    record::{self, At, Hot},
    timers, updates,
    verifier::given,
};

/// Result of [`apply`]: the packet belongs to the flow, which has accepted it.
pub const TAKEN: u64 = 4;
/// Result of [`apply`]: a flow of this host begins, and what seemed to be it was another host's.
/// Its rule is yet to be chosen.
pub const NEW_RULE: u64 = 2;

/// Does what was decided. `before`: the flow's word on which that was decided. Returns [`TAKEN`],
/// perhaps with [`NEW_RULE`], or 0.
#[inline(always)]
pub fn apply(flow: At, before: Word, decision: &Decision, packet: Packet<'_>) -> u64 {
    let Packet { segment, now, way } = packet;
    let effects = decision.effects;
    if !effects.has(Effects::TAKEN) {
        count(if effects.has(Effects::IGNORED) {
            Counter::Ignored
        } else if effects.has(Effects::SAME_WAY) {
            Counter::SameWay
        } else {
            Counter::Raced
        });
        return 0;
    }
    if !effects.has(Effects::WORD) {
        touch_again(flow.index(), now);
        if before.seen().is_told_by(segment.direction, config::view()) {
            touch_told(flow.index(), segment, way.0, now);
        } else {
            cross(flow.hot(), packet);
            touch_follow(flow.index(), segment, now, before.seen().0);
        }
    } else {
        clock::see(now);
        count(Counter::Changed);
        if effects.has(Effects::BEGINS) {
            touch_supersede(flow.index(), segment, before.0, now);
            if config!(begins) != 0 {
                emit::begun(flow.index(), now);
            }
        } else {
            if effects.has(Effects::BOTH) {
                flow.set_positions(numbers::first(segment));
                if segment.seq != segment.end {
                    offload::hear(flow.hot(), segment.direction, now);
                }
            }
            if effects.has(Effects::OTHER) {
                flow.set_position(segment.direction.reverse(), segment.ack);
            }
            if effects.has(Effects::BOTH) || effects.has(Effects::OTHER) {
                // What it had sent before is not known, so this may be news.
                offload::hear(flow.hot(), segment.direction.reverse(), now);
            }
            if effects.has(Effects::DOUBT) {
                flow.set_doubt(decision.doubt);
            }
            if effects.has(Effects::FOLLOWS) {
                cross(flow.hot(), packet);
                touch_follow(flow.index(), segment, now, before.seen().0);
            }
        }
        let (before, after) = (before.seen().0, decision.word.seen().0);
        let due = match config!(active_timeout) {
            0 => decision.due,
            _ => updates::update_due(flow.index(), decision.due, now),
        };
        forward::forward_deadline(flow.index(), before, after, due);
    }
    if effects.has(Effects::WAY) {
        learn(flow, segment, way);
    }
    match effects.has(Effects::RULE) {
        true => TAKEN | NEW_RULE,
        false => TAKEN,
    }
}

/// A packet of a flow.
#[derive(Clone, Copy)]
pub struct Packet<'a> {
    /// What it says.
    pub segment: &'a Segment,
    /// When it came, in units.
    pub now: u64,
    /// By which way it came.
    pub way: Way,
}

/// A packet that changes no state, and keeps the flow alive.
#[inline(always)]
pub fn keep(flow: Hot, word: Word, packet: Packet<'_>) {
    let Packet { segment, now, way } = packet;
    if word.is_older_than(now) {
        // So a flow with a packet in every unit of the clock is written once a unit; one of which data
        // counts, a few times.
        offload::touch(flow, word, segment, now);
        clock::see(now);
    }
    let (seen, told) = (word.seen(), numbers::first(segment));
    if flow.positions() == told {
        return;
    }
    if seen.is_told_by(segment.direction, config::view()) {
        touch_told(flow.index(), segment, way.0, now);
    } else {
        cross(flow, packet);
        follow(flow, seen, packet);
    }
}

/// Notes a packet at `now` that could have changed the state, or that was seen before. If it has data
/// that counts, that is [heard](offload::hear) later.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_again(index: u32, now: u64) -> u64 {
    let Some(flow) = record::hot(index) else {
        return 0;
    };
    let word = flow.word();
    if word.is_older_than(now) {
        offload::touch_again(flow, word, now);
        clock::see(now);
    }
    0
}

/// Calls [`follow`], for a packet that has, or could have, changed the state from `seen` on.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_follow(index: u32, segment: *const Segment, now: u64, seen: u32) -> u64 {
    if let (Some(flow), Some(segment)) = (record::hot(index), given(segment)) {
        let way = Way(0);
        follow(flow, Seen(seen), Packet { segment, now, way });
    }
    0
}

/// Takes the next sequence numbers of both sides from a packet of a side that alone determines
/// both.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_told(index: u32, segment: *const Segment, way: u32, now: u64) -> u64 {
    if let (Some(flow), Some(segment)) = (record::at(index), given(segment))
        && flow.has_key(&segment.key)
    {
        let (before, after) = (flow.positions(), numbers::first(segment));
        flow.set_positions(after);
        for direction in [Direction::FromLow, Direction::FromHigh] {
            if numbers::next_of(before, direction) != numbers::next_of(after, direction) {
                offload::hear(flow.hot(), direction, now);
            }
        }
        learn(flow, segment, Way(way));
    }
    0
}

/// Notes the way by which a side's packets come.
#[inline(always)]
fn learn(flow: At, segment: &Segment, way: Way) {
    let way = SideWay::new(way, segment.direction);
    if flow.way() != way {
        flow.set_way(way);
    }
}

/// Notes what follows from a segment that is apart from those that were seen.
#[inline(always)]
fn cross(flow: Hot, packet: Packet<'_>) {
    let Packet { segment, now, way } = packet;
    if is_apart(flow.positions(), segment) {
        touch_apart(flow.index(), segment, way.0, now);
    }
}

/// Notes the sender's next sequence number.
#[inline(always)]
fn follow(flow: Hot, seen: Seen, packet: Packet<'_>) {
    let Packet { segment, now, .. } = packet;
    let positions = flow.positions();
    if let Some(position) = advance(positions, seen, segment) {
        flow.set_position(segment.direction, position);
        offload::hear(flow, segment.direction, now);
    }
}

/// A segment behind a gap, or one that acknowledges data that was not seen here. Rare, except where
/// packets are lost.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_apart(index: u32, segment: *const Segment, way: u32, now: u64) -> u64 {
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
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
        offload::hear(flow.hot(), direction.reverse(), now);
    }
    if let Some(position) = apart.own {
        flow.set_doubt(position);
    }
    0
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
        None => emit::lose(),
    }
    flow.clear_account();
    count(Counter::Superseded);
    flow.set_created(now as u32);
    flow.set_positions(numbers::first(segment));
    timers::reset(flow.hot());
    flow.started();
    0
}
