//! Where a flow's packets are counted: `twheel_common::point` on the maps. Used only if there are
//! several interfaces.

use twheel_common::{
    counter::Counter,
    point::{PATIENCE, Passage, Point, Sighting, continues, sighting},
    segment::Segment,
};

use crate::{
    config,
    count::count,
    record::{self, At},
    verifier::given,
};

/// Flag: the packet is to be noted at once, if it was not counted elsewhere.
pub const NOTES: u32 = 1;
/// Flag: the packet may have been counted elsewhere.
pub const MAY_BE_KNOWN: u32 = 2;

/// 1 if the packet was counted elsewhere on its way. If it was not, and is to be noted at once, its
/// sender's packets are counted at this point from now on. `flags`: [`NOTES`], [`MAY_BE_KNOWN`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn point_see(
    index: u32,
    segment: *const Segment,
    now: u64,
    point: u32,
    flags: u32,
) -> u64 {
    let (Some(flow), Some(segment)) = (record::at(index), given(segment)) else {
        return 0;
    };
    if !flow.has_key(&segment.key) {
        return 0;
    }
    let here = Point(point as u16);
    let (direction, seen) = (segment.direction, flow.word().seen());
    let (counted_at, counted) = flow.point(direction);
    let passage = Passage {
        here,
        now,
        may_be_known: flags & MAY_BE_KNOWN != 0,
        continues: continues(seen, flow.positions(), segment),
    };
    let patience = config!(two_seconds) / PATIENCE;
    if sighting(counted_at, counted, patience, passage) == Sighting::Again {
        return 1;
    }
    // If the sender's packets are counted here already, a packet that may change the flow is noted
    // at once too, so that the next point that sees it knows. That moves no point.
    let may_note = flags & NOTES != 0 || counted_at == here;
    if may_note && (counted_at != here || counted != now as u16) {
        note(flow, segment, here, now);
    }
    0
}

/// Notes that the sender's packets are counted at this point, if the flow has accepted one.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn point_note(
    index: u32,
    segment: *const Segment,
    now: u64,
    point: u32,
    taken: u32,
) -> u64 {
    if taken == 0 {
        return 0;
    }
    if let (Some(flow), Some(segment)) = (record::at(index), given(segment)) {
        note(flow, segment, Point(point as u16), now);
    }
    0
}

#[inline(always)]
fn note(flow: At, segment: &Segment, here: Point, now: u64) {
    let direction = segment.direction;
    let (before, _) = flow.point(direction);
    if before != here && before != Point::NONE {
        count(Counter::Moved);
    }
    flow.set_point(direction, here, now);
}
