//! Sequence numbers: the position of each side, and what it proves.

use twheel_common::{
    flow::Direction::*,
    numbers::{END_WINDOW, accepts_end, advance},
    packet::tcp::{ACK, FIN, RST, SYN},
    rule::Timeouts,
    state::{Change, Seen, State::*},
    tracked::Tracked,
};

use crate::{BOTH, after, segment};

#[test]
fn who_answers_a_syn_as_if_it_were_none_had_a_connection_before() {
    for from in [FromLow, FromHigh] {
        let syn = segment(from, SYN, 500, 0, 0);
        let mut flow = Tracked::first(&syn, BOTH).unwrap();
        // It answers the SYN, but lacks the SYN flag: the SYN/ACK may still come.
        let early = segment(from.reverse(), ACK, 7, 501, 0);
        assert_eq!(flow.see(&early, BOTH), Change::Ignored);
        // The initiator's own segment does not tell what it sent before.
        let own = segment(from, ACK, 90_000, 7, 0);
        assert_eq!(flow.see(&own, BOTH), Change::Ignored);
        // Nor does the other side alone: the initiator must continue where the other side says it
        // is.
        let challenge = segment(from.reverse(), ACK, 7, 90_000, 0);
        let asked = flow;
        assert!(matches!(flow.see(&challenge, BOTH), Change::Doubt(..)));
        assert_eq!(flow.seen.state(), SynSent);
        for far in [
            90_000_u32.wrapping_sub(END_WINDOW + 1),
            90_000 + END_WINDOW + 1,
        ] {
            let far = segment(from, ACK, far, 7, 0);
            assert_eq!(flow.see(&far, BOTH), Change::Ignored);
        }
        for near in [90_000_u32.wrapping_sub(END_WINDOW), 90_000 + END_WINDOW] {
            let near = segment(from, ACK, near, 7, 0);
            let placed = flow.clone().see(&near, BOTH);
            assert!(matches!(placed, Change::Places(_)), "{placed:?}");
        }
        // A host that sees its own SYN is believed at once.
        let mut here = Tracked::first(&syn, BOTH).unwrap();
        here.known.is_local = true;
        assert!(matches!(here.see(&challenge, BOTH), Change::Places(_)));
        // A SYN or its answer takes that back.
        let answer = segment(from.reverse(), SYN | ACK, 70_000, 501, 0);
        for next in [answer, segment(from, SYN, 89_999, 0, 0)] {
            let mut flow = flow;
            flow.see(&next, BOTH);
            let change = flow.see(&segment(from, ACK, 90_000, 7, 0), BOTH);
            assert_eq!(change, Change::Ignored, "after {next:?}");
        }
        assert!(matches!(flow.see(&own, BOTH), Change::Places(_)));
        assert_eq!(
            (flow.seen.state(), flow.seen.initiator()),
            (Established, from)
        );
        assert!(flow.seen.is_conversation() && flow.seen.is_pickup());
        // Both sides have their numbers.
        assert_eq!(flow.see(&own, BOTH), Change::Nothing);
        let reset = flow.see(&segment(from, RST, 90_000, 0, 0), BOTH);
        assert!(matches!(reset, Change::Add(_)), "{reset:?}");
        assert_eq!(flow.seen.state(), Close);
        // An answer cannot come by the way of the SYN.
        let mut flow = Tracked::first(&syn, BOTH).unwrap();
        flow.known.is_own_way = false;
        assert_eq!(flow.see(&challenge, BOTH), Change::SameWay);
        let mut flow = asked;
        flow.see(&challenge, BOTH);
        flow.known.is_own_way = false;
        assert_eq!(flow.see(&own, BOTH), Change::SameWay);
    }
}

/// An attacker who answers for a source that does not exist has to guess the number.
#[test]
fn a_handshake_ends_with_the_number_of_its_answer() {
    for (data, window) in [(0, 0), (100, 16_384)] {
        for missing in [0, 1, 100, 16_384, 16_385, u32::MAX] {
            let mut flow = Tracked::first(&segment(FromLow, SYN, 99, 0, 0), BOTH).unwrap();
            flow.see(&segment(FromHigh, SYN | ACK, 70_000, 100, 0), BOTH);
            // The responder may send data before its SYN/ACK is acknowledged.
            flow.see(&segment(FromHigh, ACK, 70_001, 100, data), BOTH);
            assert_eq!(flow.seen.state(), SynRecv);
            let ack = (70_001 + data).wrapping_sub(missing);
            flow.see(&segment(FromLow, ACK, 100, ack, 0), BOTH);
            let expected = match missing <= window {
                true => Established,
                false => SynRecv,
            };
            assert_eq!(flow.seen.state(), expected, "{data} {missing}");
        }
    }
}

#[test]
fn who_has_sent_a_syn_has_a_number() {
    let mut flow = Tracked::first(&segment(FromLow, SYN, 99, 0, 0), BOTH).unwrap();
    flow.see(&segment(FromHigh, SYN | ACK, 70_000, 100, 0), BOTH);
    flow.see(&segment(FromLow, SYN | ACK, 5_000_000, 70_001, 0), BOTH);
    assert_eq!(flow.known.positions, [100, 70_001]);
}

#[test]
fn sides_that_have_both_lost_something_are_found_again() {
    let mut flow = Tracked::first(&segment(FromLow, SYN, 99, 0, 0), BOTH).unwrap();
    flow.see(&segment(FromHigh, SYN | ACK, 199, 100, 0), BOTH);
    flow.see(&segment(FromLow, ACK, 100, 200, 0), BOTH);
    // The first half megabyte of each side was overtaken by the next, and comes late.
    let (low, high) = (1_000_100, 1_000_200);
    for (direction, begin) in [(FromLow, 100), (FromHigh, 200)] {
        flow.see(
            &segment(direction, ACK, begin + 500_000, 300 - begin, 500_000),
            BOTH,
        );
    }
    flow.see(&segment(FromLow, ACK, 100, 200, 500_000), BOTH);
    flow.see(&segment(FromHigh, ACK, 200, 100, 500_000), BOTH);
    assert_eq!(flow.known.positions, [500_100, 500_200]);
    // The rest was already seen, and each side acknowledges the other's.
    flow.see(&segment(FromLow, ACK, low, 500_200, 10), BOTH);
    flow.see(&segment(FromHigh, ACK, high, low + 10, 0), BOTH);
    assert_eq!(flow.known.positions, [low + 10, 500_200]);
    flow.see(&segment(FromLow, ACK, low + 10, high, 0), BOTH);
    assert_eq!(flow.known.positions, [low + 10, high]);
    let fin = flow.see(&segment(FromLow, FIN | ACK, low + 10, high, 0), BOTH);
    assert!(matches!(fin, Change::Doubt(..)), "{fin:?}");
}

#[test]
fn an_end_must_lie_where_its_sender_is() {
    let seen = after(&[(FromLow, SYN), (FromHigh, SYN | ACK), (FromLow, ACK)]);
    for base in [10, u32::MAX - 5, 1 << 31] {
        let positions = [base, base.wrapping_add(1 << 30)];
        for (direction, here, other) in [
            (FromLow, positions[0], positions[1]),
            (FromHigh, positions[1], positions[0]),
        ] {
            let end = |flags, seq: u32, ack: u32| {
                accepts_end(positions, seen, &segment(direction, flags, seq, ack, 0))
            };
            for flags in [RST, RST | ACK, FIN | ACK] {
                for distance in [0, 1, END_WINDOW] {
                    assert!(end(flags, here.wrapping_add(distance), other));
                    let is_old = flags == RST | ACK && distance > 0;
                    assert_eq!(end(flags, here.wrapping_sub(distance), other), !is_old);
                }
                for distance in [END_WINDOW + 1, 1 << 29, 1 << 31] {
                    assert!(!end(flags, here.wrapping_add(distance), other));
                    assert!(!end(flags, here.wrapping_sub(distance), other));
                }
            }
            // Much data may be in flight, but what was never sent cannot be acknowledged.
            assert!(end(FIN | ACK, here, other.wrapping_sub(1 << 26)));
            assert!(!end(FIN | ACK, here, other.wrapping_sub((1 << 26) + 1)));
            assert!(!end(FIN | ACK, here, other.wrapping_add((1 << 20) + 1)));
        }
    }
}

#[test]
fn positions_move_while_much_is_in_flight() {
    let seen = after(&[(FromLow, SYN), (FromHigh, SYN | ACK), (FromLow, ACK)]);
    let positions = [60_000_000, 1_000];
    let answer = segment(FromHigh, ACK, 1_000, 2_000_000, 500);
    assert_eq!(advance(positions, seen, &answer), Some(1_500));
}

#[test]
fn who_knows_nothing_of_a_connection_resets_it_with_what_was_acknowledged() {
    // Picked up by a segment of one side, which acknowledges 7,000.
    let seen = Seen::first(FromLow, ACK, BOTH).unwrap();
    let positions = [500, 7_000];
    let answer = |seq| accepts_end(positions, seen, &segment(FromHigh, RST, seq, 0, 0));
    assert!(answer(7_000));
    assert!(!answer(7_000 + END_WINDOW + 1));
}

#[test]
fn a_refusal_acknowledges_the_syn() {
    let seen = after(&[(FromLow, SYN)]);
    let positions = [5_001, 0];
    let refused = |ack| accepts_end(positions, seen, &segment(FromHigh, RST | ACK, 0, ack, 0));
    assert!(refused(5_001));
    assert!(!refused(5_001 + END_WINDOW + 1));
    let silent = segment(FromHigh, RST, 0, 0, 0);
    assert!(!accepts_end(positions, seen, &silent));
    let closed = after(&[(FromLow, SYN), (FromHigh, RST | ACK)]);
    assert_eq!(Timeouts::number(closed), Timeouts::REFUSED);
}

#[test]
fn positions_move_forward_and_not_by_forgery() {
    let seen = after(&[(FromLow, SYN), (FromHigh, SYN | ACK), (FromLow, ACK)]);
    let positions = [u32::MAX - 10, 70_000];
    let moved =
        |seq: u32, ack, length| advance(positions, seen, &segment(FromLow, ACK, seq, ack, length));
    let here = positions[0];
    assert_eq!(moved(here, 70_000, 0), None);
    assert_eq!(
        moved(here, 70_000, 1_000),
        Some(989),
        "the number wraps around"
    );
    assert_eq!(moved(here.wrapping_sub(500), 70_000, 500), None, "again");
    assert_eq!(moved(here.wrapping_sub(500), 70_000, 100), None, "older");
    assert_eq!(moved(here.wrapping_add(1 << 30), 70_000, 1), None, "far");
    assert_eq!(moved(here, 70_000 + (1 << 24), 1_000), None, "whose?");
    // The first segment of a side gives its position.
    let half = after(&[(FromLow, SYN)]);
    let answer = segment(FromHigh, SYN | ACK, 1 << 31, here, 0);
    assert_eq!(advance([here, 0], half, &answer), Some((1 << 31) + 1));
}
