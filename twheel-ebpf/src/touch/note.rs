//! What a packet leaves beside its flow's state: it is counted, its observation point is noted, and
//! the retransmission timers learn of it.

use twheel_common::{
    counter::Counter,
    numbers::Positions,
    segment::{Segment, datagram},
};

use crate::{config, count::count, forward, point, policy::Arrival, record::Hot, rto};

use super::apply::TAKEN;

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

/// Notes where a packet was seen, if its flow has [`TAKEN`] it. (Not called within
/// [`touch_change`]: the verifier adds up the stacks of callers and callees.)
#[inline(always)]
pub fn note_point(flow: Hot, segment: &Segment, now: u64, arrival: Arrival, changed: u64) {
    if config!(watched) != 0 {
        let taken = (changed & TAKEN) as u32;
        point::point_note(
            flow.index(),
            segment,
            now,
            arrival.sight.point().0.into(),
            taken,
        );
    }
}
