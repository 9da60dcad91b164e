//! Sequence numbers at the bounds: what lies just inside is accepted, and what lies just outside is not.
#![allow(missing_docs)]

use twheel_common::{
    flow::{Direction, Direction::*, FlowKey},
    numbers::{END_WINDOW, Positions, accepts_end, advance, first},
    packet::{
        Segment,
        tcp::{ACK, FIN, RST, SYN},
    },
    state::{Change, Known, Seen, State, View},
};

const BOTH: View = View {
    one_way: false,
    strict: false,
};
const ONE_WAY: View = View {
    one_way: true,
    strict: false,
};

/// A window, and what was lost of it (docs/states.md).
const FORWARD: u32 = 1 << 24;
/// What may be in flight.
const IN_FLIGHT: u32 = 1 << 26;
/// What may not have come by.
const UNSEEN: u32 = 1 << 20;

/// One wraps within any window, the other not.
const HERE: u32 = u32::MAX - 10;
const THERE: u32 = 1 << 30;

fn segment(direction: Direction, flags: u8, seq: u32, ack: u32, length: u32) -> Segment {
    let counted = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
    Segment {
        key: FlowKey::default(),
        direction,
        flags,
        seq,
        ack,
        end: seq.wrapping_add(length).wrapping_add(counted),
        ..Segment::NONE
    }
}

/// Both ends of a flow, and how it looks where one of them has come as far as `here`, the other `there`.
fn ends(here: u32, there: u32) -> [(Direction, Positions); 2] {
    [(FromLow, [here, there]), (FromHigh, [there, here])]
}

fn add(seen: Seen, segment: &Segment, positions: Positions, view: View) -> Seen {
    let known = Known {
        positions,
        doubt: 0,
        is_other_way: true,
    };
    match seen.next(segment, &known, view) {
        Change::Add(seen) => seen,
        other => panic!("{other:?}"),
    }
}

/// A conversation that was picked up, of both sides of which the place is known.
fn conversation(direction: Direction, positions: Positions) -> Seen {
    let seen = Seen::first(direction, ACK, BOTH).unwrap();
    let answer = segment(direction.reverse(), ACK, THERE, HERE, 0);
    let seen = add(seen, &answer, positions, BOTH);
    assert!(seen.is_conversation());
    seen
}

#[test]
fn a_first_segment_tells_where_its_sender_is_and_what_it_acknowledges() {
    for (direction, expected) in [(FromLow, [101, 7]), (FromHigh, [7, 101])] {
        assert_eq!(first(&segment(direction, ACK, 100, 7, 1)), expected);
        assert_eq!(first(&segment(direction, SYN | ACK, 100, 7, 0)), expected);
    }
    // Without the flag the number means nothing (RFC 9293, section 3.1).
    assert_eq!(first(&segment(FromLow, SYN, 100, 7, 0)), [101, 0]);
    assert_eq!(first(&segment(FromHigh, SYN, 100, 7, 0)), [0, 101]);
}

#[test]
fn where_one_side_is_all_that_is_seen_its_numbers_decide() {
    for (direction, positions) in ends(HERE, 0) {
        for flags in [SYN, ACK] {
            let seen = Seen::first(direction, flags, ONE_WAY).unwrap();
            // Whatever it acknowledges: nobody knows what the other side has sent.
            for ack in [0, 1, 1 << 24, 1 << 31, u32::MAX] {
                let data = segment(direction, ACK, HERE, ack, 100);
                assert_eq!(advance(positions, seen, &data), Some(89));
                let far = segment(direction, ACK, HERE.wrapping_add(FORWARD), ack, 1);
                assert_eq!(advance(positions, seen, &far), None);
                let old = segment(direction, ACK, HERE.wrapping_sub(100), ack, 50);
                assert_eq!(advance(positions, seen, &old), None);
            }
        }
        let seen = Seen::first(direction, ACK, ONE_WAY).unwrap();
        for ack in [0, 1, 1 << 24, 1 << 31, u32::MAX] {
            let end =
                |flags, seq| accepts_end(positions, seen, &segment(direction, flags, seq, ack, 0));
            for flags in [FIN | ACK, RST, RST | ACK] {
                assert!(end(flags, HERE));
                assert!(end(flags, HERE.wrapping_add(END_WINDOW)));
                assert!(!end(flags, HERE.wrapping_add(END_WINDOW + 1)));
                assert!(!end(flags, HERE.wrapping_sub(END_WINDOW + 1)));
            }
            assert!(end(FIN | ACK, HERE.wrapping_sub(END_WINDOW)));
        }
    }
}

#[test]
fn positions_move_up_to_the_bounds_and_no_further() {
    for (direction, positions) in ends(HERE, THERE) {
        let seen = conversation(direction, positions);
        let moves = |end: u32, ack| {
            let data = segment(direction, ACK, end.wrapping_sub(1), ack, 1);
            let moved = advance(positions, seen, &data);
            assert!(moved.is_none_or(|moved| moved == end));
            moved.is_some()
        };
        assert!(moves(HERE.wrapping_add(1), THERE));
        assert!(moves(HERE.wrapping_add(FORWARD), THERE));
        assert!(!moves(HERE.wrapping_add(FORWARD + 1), THERE));
        assert!(!moves(HERE, THERE));
        assert!(!moves(HERE.wrapping_sub(1), THERE));
        let next = HERE.wrapping_add(1);
        assert!(moves(next, THERE - IN_FLIGHT));
        assert!(!moves(next, THERE - IN_FLIGHT - 1));
        assert!(moves(next, THERE + UNSEEN));
        assert!(!moves(next, THERE + UNSEEN + 1));
        // An end says where its sender is once it is borne out.
        for flags in [FIN | ACK, RST, RST | ACK] {
            let end = segment(direction, flags, HERE, THERE, 5);
            assert_eq!(advance(positions, seen, &end), None);
        }
        // A SYN begins anew, wherever that is, and acknowledges nothing.
        let syn = segment(direction, SYN, 1 << 29, 0, 0);
        assert_eq!(advance(positions, seen, &syn), Some((1 << 29) + 1));
        let lost = segment(direction, SYN | ACK, 1 << 29, THERE + UNSEEN + 1, 0);
        assert_eq!(advance(positions, seen, &lost), None);
        assert_eq!(
            advance(
                positions,
                seen,
                &segment(direction, SYN | ACK, 1 << 29, THERE, 0)
            ),
            Some((1 << 29) + 1)
        );
    }
}

#[test]
fn the_first_segment_of_a_side_is_placed_by_what_it_acknowledges() {
    for (direction, positions) in ends(HERE, THERE) {
        let seen = Seen::first(direction.reverse(), ACK, BOTH).unwrap();
        let moved = |ack| advance(positions, seen, &segment(direction, ACK, 1 << 29, ack, 1));
        for ack in [THERE - IN_FLIGHT, THERE, THERE + UNSEEN] {
            assert_eq!(moved(ack), Some((1 << 29) + 1));
        }
        for ack in [THERE - IN_FLIGHT - 1, THERE + UNSEEN + 1] {
            assert_eq!(moved(ack), None);
        }
    }
}

#[test]
fn a_fin_acknowledges_what_the_other_side_has_sent() {
    for (direction, positions) in ends(HERE, THERE) {
        // Of a side that was seen, and of one that was not.
        let placed = conversation(direction, positions);
        let unseen = Seen::first(direction.reverse(), ACK, BOTH).unwrap();
        for seen in [placed, unseen] {
            let accepts = |ack| {
                accepts_end(
                    positions,
                    seen,
                    &segment(direction, FIN | ACK, HERE, ack, 0),
                )
            };
            for ack in [THERE - IN_FLIGHT, THERE, THERE + UNSEEN] {
                assert!(accepts(ack));
            }
            for ack in [THERE - IN_FLIGHT - 1, THERE + UNSEEN + 1] {
                assert!(!accepts(ack));
            }
        }
    }
}

#[test]
fn a_reset_of_a_side_that_was_not_seen_names_a_number_of_the_flow() {
    for (direction, positions) in ends(HERE, THERE) {
        let seen = Seen::first(direction.reverse(), ACK, BOTH).unwrap();
        let end =
            |flags, seq, ack| accepts_end(positions, seen, &segment(direction, flags, seq, ack, 0));
        for distance in [0, 1, END_WINDOW] {
            // What was acknowledged; and what the other side has sent.
            assert!(end(RST, HERE.wrapping_add(distance), 0));
            assert!(end(RST, HERE.wrapping_sub(distance), 0));
            assert!(end(RST | ACK, 0, THERE + distance));
            assert!(end(RST | ACK, 0, THERE - distance));
        }
        for distance in [END_WINDOW + 1, 1 << 28] {
            assert!(!end(RST, HERE.wrapping_add(distance), 0));
            assert!(!end(RST, HERE.wrapping_sub(distance), 0));
            assert!(!end(RST | ACK, 0, THERE + distance));
            assert!(!end(RST | ACK, 0, THERE - distance));
        }
        // A SYN has acknowledged nothing.
        let opening = Seen::first(direction.reverse(), SYN, BOTH).unwrap();
        assert!(!accepts_end(
            positions,
            opening,
            &segment(direction, RST, HERE, 0, 0)
        ));
        assert!(accepts_end(
            positions,
            opening,
            &segment(direction, RST | ACK, 0, THERE, 0)
        ));
    }
}

#[test]
fn an_answer_to_a_flow_that_was_picked_up_lies_where_it_was_acknowledged() {
    for (direction, positions) in ends(HERE, THERE) {
        let seen = Seen::first(direction.reverse(), ACK, BOTH).unwrap();
        let known = Known {
            positions,
            doubt: 0,
            is_other_way: true,
        };
        let fits = |flags, seq, ack| {
            let answer = segment(direction, flags, seq, ack, 0);
            seen.next(&answer, &known, BOTH) != Change::Ignored
        };
        assert!(fits(ACK, HERE, THERE));
        assert!(fits(ACK, HERE.wrapping_add(FORWARD), THERE));
        assert!(!fits(ACK, HERE.wrapping_add(FORWARD + 1), THERE));
        assert!(fits(ACK, HERE.wrapping_sub(END_WINDOW), THERE));
        assert!(!fits(ACK, HERE.wrapping_sub(END_WINDOW + 1), THERE));
        assert!(fits(ACK, HERE, THERE - IN_FLIGHT));
        assert!(!fits(ACK, HERE, THERE - IN_FLIGHT - 1));
        assert!(fits(ACK, HERE, THERE + UNSEEN));
        assert!(!fits(ACK, HERE, THERE + UNSEEN + 1));
        assert!(!fits(0, HERE, THERE), "nothing is acknowledged");
    }
}

#[test]
fn who_goes_on_after_a_doubtful_reset_does_so_within_the_window() {
    for (direction, positions) in ends(HERE, THERE) {
        let other = direction.reverse();
        let near = segment(other, RST, THERE + 1, 0, 0);
        let seen = add(conversation(direction, positions), &near, positions, BOTH);
        assert_eq!(seen.state(), State::Close);
        let known = Known {
            positions,
            doubt: 0,
            is_other_way: true,
        };
        let goes_on = |flags, seq, ack| {
            let segment = segment(direction, flags, seq, ack, 0);
            seen.next(&segment, &known, BOTH) != Change::Nothing
        };
        assert!(goes_on(ACK, HERE, THERE));
        assert!(goes_on(ACK, HERE.wrapping_add(END_WINDOW), THERE));
        assert!(goes_on(ACK, HERE.wrapping_sub(END_WINDOW), THERE));
        assert!(!goes_on(ACK, HERE.wrapping_add(END_WINDOW + 1), THERE));
        assert!(!goes_on(ACK, HERE.wrapping_sub(END_WINDOW + 1), THERE));
        assert!(goes_on(ACK, HERE, THERE - IN_FLIGHT));
        assert!(!goes_on(ACK, HERE, THERE - IN_FLIGHT - 1));
        assert!(goes_on(ACK, HERE, THERE + UNSEEN));
        assert!(!goes_on(ACK, HERE, THERE + UNSEEN + 1));
        assert!(!goes_on(0, HERE, THERE), "nothing is acknowledged");
    }
}
