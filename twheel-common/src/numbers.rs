//! Sequence numbers: how far the sides of a flow have come, and whether a segment fits that (RFC 9293, RFC 5961).

use crate::{
    key::Direction,
    seen::Seen,
    segment::{Segment, tcp},
};

/// The highest sequence number that each side has sent, and the one behind it: what the other expects next. The key's
/// low endpoint first.
pub type Positions = [u32; 2];

/// How far from what its sender has sent a FIN or RST may lie: ahead, if segments were lost before they came by here;
/// behind, for a FIN that is sent again, and for a RST that answers a segment (it has no ACK): that has the number which
/// the other side waits for, and what it has missed may have come by here. A forger who does not know has to try 2^13
/// times.
pub const END_WINDOW: u32 = 1 << 18;
/// How far a segment may be ahead of the last: a window and what was lost of it.
const FORWARD: u32 = 1 << 24;
/// How far its acknowledgment may be behind what the other side has sent: what is in flight.
const IN_FLIGHT: u32 = 1 << 26;
/// And how far ahead of it: what did not come by here.
const UNSEEN: u32 = 1 << 20;

/// What a responder may have sent before its SYN/ACK is acknowledged (RFC 7413).
pub(crate) const EARLY_DATA: u32 = 1 << 14;

/// How far the sides have come, as a flow's first segment has it.
#[inline(always)]
pub fn first(segment: &Segment) -> Positions {
    let ack = if segment.flags & tcp::ACK != 0 {
        segment.ack
    } else {
        0
    };
    match segment.direction {
        Direction::FromLow => [segment.end, ack],
        Direction::FromHigh => [ack, segment.end],
    }
}

/// One side's. (Not by an index: the compiler would make that an OR to a pointer, which the verifier refuses.)
#[inline(always)]
pub(crate) fn of([low, high]: Positions, direction: Direction) -> u32 {
    let both = u64::from(low) | u64::from(high) << 32;
    (both >> (32 * direction as u32)) as u32
}

/// Whether a is within a distance of b, on the circle of sequence numbers.
#[inline(always)]
pub(crate) fn near(a: u32, b: u32, distance: u32) -> bool {
    a.wrapping_sub(b).wrapping_add(distance) <= 2 * distance
}

/// Where a segment brings its sender to, if it does: forward, and acknowledging what the other side has
/// sent. (One that is forged would have to guess both.)
#[inline(always)]
pub fn advance(positions: Positions, seen: Seen, segment: &Segment) -> Option<u32> {
    let ahead = segment.end.wrapping_sub(of(positions, segment.direction));
    // Nearly every packet that brings no data. And an end says where its sender is once it is borne out.
    if ahead == 0 || segment.flags & (tcp::RST | tcp::FIN) != 0 {
        return None;
    }
    let other = segment.direction.reverse();
    let first = !seen.is_placed(segment.direction);
    let is_alone = !seen.is_placed(other);
    let answers = segment.flags & tcp::ACK == 0
        || is_alone
        || acknowledges(segment.ack, of(positions, other));
    // It begins no later than what was there before ends. What lies behind a gap waits until the other side has
    // acknowledged it, where that can be seen: who forges it would have to know a number.
    let continues = ahead <= segment.end.wrapping_sub(segment.seq);
    let follows = first || continues || is_alone && ahead <= FORWARD;
    (answers && follows).then_some(segment.end)
}

/// Whether a segment behind a gap may be its sender's: at most a window ahead, and it acknowledges what the other side has
/// sent.
#[inline(always)]
pub fn may_skip(positions: Positions, segment: &Segment) -> bool {
    let ahead = segment.end.wrapping_sub(of(positions, segment.direction));
    ahead <= FORWARD && is_plausible(segment.ack, of(positions, segment.direction.reverse()))
}

/// Whether an acknowledgment may be one of what the other side has sent, though its position waits before a gap.
#[inline(always)]
fn is_plausible(ack: u32, sent: u32) -> bool {
    sent.wrapping_sub(ack).wrapping_add(FORWARD) <= IN_FLIGHT + FORWARD
}

/// Whether a segment lies behind a gap, or acknowledges what has not come by here: [`apart`] tells what that says.
#[inline(always)]
pub fn is_apart(positions: Positions, segment: &Segment) -> bool {
    let ahead = segment.seq.wrapping_sub(of(positions, segment.direction));
    let missed = segment
        .ack
        .wrapping_sub(of(positions, segment.direction.reverse()));
    segment.flags & (tcp::ACK | tcp::SYN | tcp::RST) == tcp::ACK
        && (ahead.wrapping_sub(1) < FORWARD || missed.wrapping_sub(1) < FORWARD)
}

/// What is told by a segment that [is apart](is_apart).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Apart {
    /// The other side is here.
    pub other: Option<u32>,
    /// Its sender may be here, if the other side says so.
    pub own: Option<u32>,
}

/// Where the sides are, as a segment says that [is apart](is_apart). What it acknowledges moves the other side if its own
/// number is exact, or if that side was seen to have sent up to exactly there (`noted`); both must have come by the ways
/// of their sides.
#[inline(always)]
pub fn apart(
    positions: Positions,
    noted: u32,
    seen: Seen,
    segment: &Segment,
    is_own_way: bool,
) -> Apart {
    let (direction, other) = (segment.direction, segment.direction.reverse());
    if !seen.is_placed(direction) || !seen.is_placed(other) {
        return Apart::default();
    }
    let ahead = segment.seq.wrapping_sub(of(positions, direction));
    let missed = segment.ack.wrapping_sub(of(positions, other));
    // In the other states that number is of a FIN or SYN.
    let is_open = is_own_way && seen.is_open();
    let is_noted =
        is_open && segment.ack == noted && ahead.wrapping_add(END_WINDOW) <= FORWARD + END_WINDOW;
    let overtakes = missed.wrapping_sub(1) < FORWARD && (ahead == 0 || is_noted);
    let skips = is_open
        && segment.end != segment.seq
        && ahead.wrapping_sub(1) < FORWARD
        && is_plausible(segment.ack, of(positions, other));
    Apart {
        other: overtakes.then_some(segment.ack),
        own: skips.then_some(segment.end),
    }
}

/// Whether an acknowledgment is one of what the other side has sent up to here.
#[inline(always)]
fn acknowledges(ack: u32, sent: u32) -> bool {
    sent.wrapping_sub(ack).wrapping_add(UNSEEN) <= IN_FLIGHT + UNSEEN
}

/// Whether a FIN or RST lies inside the window known from the flow (RFC 9293 section 3.5.3; RFC 5961 section 3). One
/// whose sender was not seen must acknowledge what the other has sent, or have the number that this has acknowledged.
#[inline(always)]
pub fn accepts_end(positions: Positions, seen: Seen, segment: &Segment) -> bool {
    let other = segment.direction.reverse();
    let is_reset = segment.flags & tcp::RST != 0;
    let has_ack = segment.flags & tcp::ACK != 0;
    let is_known = seen.is_placed(segment.direction);
    if !is_known && !seen.is_placed(other) {
        return false;
    }
    if is_known {
        let ahead = segment.seq.wrapping_sub(of(positions, segment.direction));
        if is_reset && has_ack {
            // Of whoever gives up: behind lies an old duplicate.
            return ahead <= END_WINDOW;
        }
        let answers =
            is_reset || !seen.is_placed(other) || acknowledges(segment.ack, of(positions, other));
        return ahead.wrapping_add(END_WINDOW) <= 2 * END_WINDOW && answers;
    }
    if is_reset && !has_ack {
        // Somebody who knows nothing of the connection answers with what was acknowledged.
        return seen.0 & Seen::PICKUP != 0
            && near(segment.seq, of(positions, segment.direction), END_WINDOW);
    }
    let sent = of(positions, other);
    if is_reset {
        return near(segment.ack, sent, END_WINDOW);
    }
    let is_near = near(segment.seq, of(positions, segment.direction), END_WINDOW);
    acknowledges(segment.ack, sent) && (is_near || seen.0 & Seen::PICKUP == 0)
}

/// Whether a segment that ends nothing lies where its sender is, and acknowledges what the other side has sent, if that
/// is known.
#[inline(always)]
pub(crate) fn fits(positions: Positions, seen: Seen, segment: &Segment) -> bool {
    let other = segment.direction.reverse();
    near(segment.seq, of(positions, segment.direction), END_WINDOW)
        && segment.flags & tcp::ACK != 0
        && (!seen.is_placed(other) || acknowledges(segment.ack, of(positions, other)))
}

/// Whether the first segment of a side fits the flow, which was picked up from the other: that has told what it has
/// acknowledged.
#[inline(always)]
pub(crate) fn fits_first(positions: Positions, segment: &Segment) -> bool {
    let ahead = segment.seq.wrapping_sub(of(positions, segment.direction));
    ahead.wrapping_add(END_WINDOW) <= FORWARD + END_WINDOW
        && segment.flags & tcp::ACK != 0
        && acknowledges(segment.ack, of(positions, segment.direction.reverse()))
}
