//! What a packet that changes no state does to its flow: it stores the time and next sequence
//! numbers, counts, and feeds the retransmission timers.

use twheel_common::{
    counter::Counter,
    flow::Word,
    numbers::{self, Positions, advance, is_apart},
    seen::Seen,
    segment::{Segment, datagram},
    way::{SideWay, Way},
};

use crate::{
    clock, config,
    count::count,
    forward, point,
    policy::Place,
    record::{self, At, Hot},
    rto,
    verifier::given,
};

/// Counts a packet of a flow, and updates the flow's retransmission timers. `before`: the next
/// sequence numbers before this packet.
#[inline(always)]
pub fn note(flow: Hot, segment: &Segment, before: Positions, now: u64) {
    time(flow, segment, before, now);
    flow.count(segment.direction, segment.packets, segment.bytes);
}

/// Updates the flow's retransmission timers.
#[inline(always)]
fn time(flow: Hot, segment: &Segment, [low, high]: Positions, now: u64) {
    if config::rto_is_on() && segment.flags & datagram::ANY == 0 {
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
            forward::forward_timer(flow.index(), segment, due);
        }
    }
}

/// Beside the results of a change: the packet belongs to the flow, which has accepted it.
pub const TAKEN: u64 = 4;

/// Notes where a packet was seen, if its flow has [`TAKEN`] it. (Not called within
/// [`touch_change`]: the verifier adds up the stacks of callers and callees.)
#[inline(always)]
pub fn note_point(flow: Hot, segment: &Segment, now: u64, place: Place, changed: u64) {
    if config!(watched) != 0 {
        let taken = (changed & TAKEN) as u32;
        point::point_note(
            flow.index(),
            segment,
            now,
            place.sight.point().0.into(),
            taken,
        );
    }
}

/// A packet that changes no state, and keeps the flow alive.
#[inline(always)]
pub fn keep(flow: Hot, word: Word, segment: &Segment, now: u64, way: Way) {
    if word.is_older_than(now) {
        // So a flow with a packet in every unit of the clock is written once a unit.
        flow.touch(now);
        clock::see(now);
    }
    let (seen, told) = (word.seen(), numbers::first(segment));
    if flow.positions() == told {
        return;
    }
    if seen.is_told_by(segment.direction, config::view()) {
        touch_told(flow.index(), segment, way.0);
    } else {
        follow(flow, seen, segment, way);
    }
}

/// Takes the next sequence numbers of both sides from a packet of a side that alone determines
/// both.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_told(index: u32, segment: *const Segment, way: u32) -> u64 {
    if let (Some(flow), Some(segment)) = (record::at(index), given(segment))
        && flow.has_key(&segment.key)
    {
        flow.set_positions(numbers::first(segment));
        learn(flow, segment, Way(way));
    }
    0
}

/// Notes the way by which a side's packets come.
#[inline(always)]
pub fn learn(flow: At, segment: &Segment, way: Way) {
    let way = SideWay::of(way, segment.direction);
    if flow.way() != way {
        flow.set_way(way);
    }
}

/// Notes the sender's next sequence number, and the other side's as the sender acknowledges it.
#[inline(always)]
pub fn follow(flow: Hot, seen: Seen, segment: &Segment, way: Way) {
    let positions = flow.positions();
    if is_apart(positions, segment) {
        touch_apart(flow.index(), segment, way.0);
    }
    if let Some(position) = advance(positions, seen, segment) {
        flow.set_position(segment.direction, position);
    }
}

/// A segment behind a gap, or one that acknowledges data that was not seen here. Rare, except where
/// packets are lost.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_apart(index: u32, segment: *const Segment, way: u32) -> u64 {
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
    }
    if let Some(position) = apart.own {
        flow.set_doubt(position);
    }
    0
}
