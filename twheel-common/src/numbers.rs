//! Sequence numbers: how far each side of a flow has sent, and whether a segment fits that (RFC
//! 9293, RFC 5961).

use crate::{
    key::Direction,
    seen::Seen,
    segment::{Segment, tcp},
};

/// The next sequence number of each side: the number after the last byte that it has sent, which
/// the other side expects next. That of the key's low endpoint comes first.
pub type Positions = [u32; 2];

/// How far a FIN or RST may lie from its sender's next sequence number. It may lie ahead if
/// segments were lost before they reached this host. It may lie behind if a FIN is retransmitted,
/// and for a RST that answers a segment (it has no ACK): such a RST has the number that the other
/// side expects, and segments that the other side missed may have been seen here. A forger who does
/// not know the number has to try 2^13 times.
pub const END_WINDOW: u32 = 1 << 18;
/// How far a segment may lie ahead of the last: a window, and what was lost of it.
const FORWARD: u32 = 1 << 24;
/// How far an acknowledgment may lie behind what the other side has sent: the data in flight.
const IN_FLIGHT: u32 = 1 << 26;
/// How far an acknowledgment may lie ahead of it: the data that was not seen here.
const UNSEEN: u32 = 1 << 20;

/// How much a responder may have sent before its SYN/ACK is acknowledged (RFC 7413).
pub(crate) const EARLY_DATA: u32 = 1 << 14;

/// The next sequence numbers as a flow's first segment tells them.
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

/// The next sequence number of one side. (Without an index: the compiler would turn one into an OR
/// on a pointer, which the verifier rejects.)
#[inline(always)]
pub fn next_of([low, high]: Positions, direction: Direction) -> u32 {
    let both = u64::from(low) | u64::from(high) << 32;
    (both >> (32 * direction as u32)) as u32
}

/// Whether `a` is within a distance of `b`, on the circle of sequence numbers.
#[inline(always)]
pub(crate) fn near(a: u32, b: u32, distance: u32) -> bool {
    a.wrapping_sub(b).wrapping_add(distance) <= 2 * distance
}

/// The next sequence number that a segment gives its sender, if it does: it must lie forward, and
/// the segment must acknowledge what the other side has sent. (A forger would have to guess both.)
#[inline(always)]
pub fn advance(positions: Positions, seen: Seen, segment: &Segment) -> Option<u32> {
    let ahead = segment
        .end
        .wrapping_sub(next_of(positions, segment.direction));
    // This is nearly every packet without data. A FIN or RST does not move its sender: it counts
    // once it is confirmed.
    if ahead == 0 || segment.flags & (tcp::RST | tcp::FIN) != 0 {
        return None;
    }
    let other = segment.direction.reverse();
    let first = !seen.is_placed(segment.direction);
    let is_alone = !seen.is_placed(other);
    let answers = segment.flags & tcp::ACK == 0
        || is_alone
        || acknowledges(segment.ack, next_of(positions, other));
    // The segment must begin no later than where the earlier data ends. Data beyond a gap waits
    // until the other side has acknowledged it, if that can be seen: a forger would have to know a
    // number.
    let continues = ahead <= segment.end.wrapping_sub(segment.seq);
    let follows = first || continues || is_alone && ahead <= FORWARD;
    (answers && follows).then_some(segment.end)
}

/// Whether a segment has the data that its sender is to send next, and acknowledges all that the
/// other side has sent. If the numbers of both sides are known, it [advances](advance) its sender,
/// and is not [apart](is_apart).
#[inline(always)]
pub fn is_next(positions: Positions, segment: &Segment) -> bool {
    let flags = tcp::ACK | tcp::SYN | tcp::RST | tcp::FIN;
    segment.flags & flags == tcp::ACK
        && segment.end != segment.seq
        && segment.seq == next_of(positions, segment.direction)
        && segment.ack == next_of(positions, segment.direction.reverse())
}

/// Whether a segment beyond a gap may be genuine: it lies at most a window ahead, and acknowledges
/// what the other side has sent.
#[inline(always)]
pub fn may_skip(positions: Positions, segment: &Segment) -> bool {
    let ahead = segment
        .end
        .wrapping_sub(next_of(positions, segment.direction));
    ahead <= FORWARD && is_plausible(segment.ack, next_of(positions, segment.direction.reverse()))
}

/// Whether an acknowledgment may be one of what the other side has sent, even if that side's next
/// sequence number waits before a gap.
#[inline(always)]
fn is_plausible(ack: u32, sent: u32) -> bool {
    sent.wrapping_sub(ack).wrapping_add(FORWARD) <= IN_FLIGHT + FORWARD
}

/// Whether a segment lies beyond a gap, or acknowledges data that was not seen here: [`apart`] says
/// what follows.
#[inline(always)]
pub fn is_apart(positions: Positions, segment: &Segment) -> bool {
    let ahead = segment
        .seq
        .wrapping_sub(next_of(positions, segment.direction));
    let missed = segment
        .ack
        .wrapping_sub(next_of(positions, segment.direction.reverse()));
    segment.flags & (tcp::ACK | tcp::SYN | tcp::RST) == tcp::ACK
        && (ahead.wrapping_sub(1) < FORWARD || missed.wrapping_sub(1) < FORWARD)
}

/// What follows from a segment that [is apart](is_apart).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Apart {
    /// The other side's next sequence number is this.
    pub other: Option<u32>,
    /// The sender's next sequence number may be this, if the other side confirms it.
    pub own: Option<u32>,
}

/// What a segment that [is apart](is_apart) says of the next sequence numbers. Its acknowledgment
/// moves the other side if its own number is exact, or if the other side was seen to have sent up
/// to exactly there (`noted`). In the latter case both segments must have come by their sides' own
/// ways.
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
    let ahead = segment.seq.wrapping_sub(next_of(positions, direction));
    let missed = segment.ack.wrapping_sub(next_of(positions, other));
    // In the other states `noted` is the number of a FIN or SYN.
    let is_open = is_own_way && seen.is_open();
    let is_noted =
        is_open && segment.ack == noted && ahead.wrapping_add(END_WINDOW) <= FORWARD + END_WINDOW;
    let overtakes = missed.wrapping_sub(1) < FORWARD && (ahead == 0 || is_noted);
    let skips = is_open
        && segment.end != segment.seq
        && ahead.wrapping_sub(1) < FORWARD
        && is_plausible(segment.ack, next_of(positions, other));
    Apart {
        other: overtakes.then_some(segment.ack),
        own: skips.then_some(segment.end),
    }
}

/// Whether an acknowledgment is one of what the other side has sent so far.
#[inline(always)]
fn acknowledges(ack: u32, sent: u32) -> bool {
    sent.wrapping_sub(ack).wrapping_add(UNSEEN) <= IN_FLIGHT + UNSEEN
}

/// Whether a FIN or RST lies inside the window known from the flow (RFC 9293 section 3.5.3; RFC
/// 5961 section 3). If its sender was not seen yet, it must acknowledge what the other side has
/// sent, or have the number that the other side has acknowledged.
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
        let ahead = segment
            .seq
            .wrapping_sub(next_of(positions, segment.direction));
        if is_reset && has_ack {
            // From a side that gives up. What lies behind is an old duplicate.
            return ahead <= END_WINDOW;
        }
        let answers = is_reset
            || !seen.is_placed(other)
            || acknowledges(segment.ack, next_of(positions, other));
        return ahead.wrapping_add(END_WINDOW) <= 2 * END_WINDOW && answers;
    }
    if is_reset && !has_ack {
        // A host that does not know the connection answers with the number that was acknowledged.
        return seen.0 & Seen::PICKUP != 0
            && near(
                segment.seq,
                next_of(positions, segment.direction),
                END_WINDOW,
            );
    }
    let sent = next_of(positions, other);
    if is_reset {
        return near(segment.ack, sent, END_WINDOW);
    }
    let is_near = near(
        segment.seq,
        next_of(positions, segment.direction),
        END_WINDOW,
    );
    acknowledges(segment.ack, sent) && (is_near || seen.0 & Seen::PICKUP == 0)
}

/// Whether a segment that is neither FIN nor RST lies at its sender's next sequence number, and
/// acknowledges what the other side has sent, if that is known.
#[inline(always)]
pub(crate) fn fits(positions: Positions, seen: Seen, segment: &Segment) -> bool {
    let other = segment.direction.reverse();
    near(
        segment.seq,
        next_of(positions, segment.direction),
        END_WINDOW,
    ) && segment.flags & tcp::ACK != 0
        && (!seen.is_placed(other) || acknowledges(segment.ack, next_of(positions, other)))
}

/// Whether the first segment of a side fits the flow, which was picked up from the other side: that
/// side has told what it has acknowledged.
#[inline(always)]
pub(crate) fn fits_first(positions: Positions, segment: &Segment) -> bool {
    let ahead = segment
        .seq
        .wrapping_sub(next_of(positions, segment.direction));
    ahead.wrapping_add(END_WINDOW) <= FORWARD + END_WINDOW
        && segment.flags & tcp::ACK != 0
        && acknowledges(segment.ack, next_of(positions, segment.direction.reverse()))
}
