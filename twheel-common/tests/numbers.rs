//! Sequence numbers at the limits: those just inside are accepted, those just outside are not.
#![allow(missing_docs)]

mod segments;

use twheel_common::{
    flow::{Direction, Direction::*},
    numbers::{
        Apart, END_WINDOW, Positions, accepts_end, advance, apart, first, is_apart, is_next,
        may_skip,
    },
    packet::{
        Segment,
        tcp::{ACK, FIN, RST, SYN},
    },
    state::{Change, Known, Seen, State, View},
};

use segments::{BOTH, ONE_WAY, segment};

/// The window, which is also the most that may have been lost of it (docs/states.md).
const FORWARD: u32 = 1 << 24;
/// The most data in flight.
const IN_FLIGHT: u32 = 1 << 26;
/// The most data that may have passed unseen.
const UNSEEN: u32 = 1 << 20;

/// Two positions: one wraps around within any window, the other does not.
const HERE: u32 = u32::MAX - 10;
const THERE: u32 = 1 << 30;

/// Both directions of a flow, each with the positions of a flow in which its sender is at `here`
/// and the other side at `there`.
fn ends(here: u32, there: u32) -> [(Direction, Positions); 2] {
    [(FromLow, [here, there]), (FromHigh, [there, here])]
}

fn add(seen: Seen, segment: &Segment, positions: Positions, view: View) -> Seen {
    let known = Known {
        positions,
        doubt: 0,
        is_own_way: true,
        is_local: false,
    };
    match seen.next(segment, &known, view) {
        Change::Add(seen) => seen,
        other => panic!("{other:?}"),
    }
}

/// A picked-up conversation; the next sequence numbers of both sides are known.
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
    // Without the ACK flag, the acknowledgment means nothing (RFC 9293, section 3.1).
    assert_eq!(first(&segment(FromLow, SYN, 100, 7, 0)), [101, 0]);
    assert_eq!(first(&segment(FromHigh, SYN, 100, 7, 0)), [0, 101]);
}

#[test]
fn data_that_comes_next_advances_its_sender_and_is_not_apart() {
    const STEPS: [u32; 3] = [u32::MAX, 0, 1];
    let mut found = 0;
    for (direction, positions) in ends(HERE, THERE) {
        let seen = conversation(direction, positions);
        for flags in [0, ACK, ACK | FIN, ACK | RST, ACK | SYN] {
            for (seq, ack) in STEPS.iter().flat_map(|seq| STEPS.map(|ack| (*seq, ack))) {
                for data in [0, 1, 100] {
                    let (seq, ack) = (HERE.wrapping_add(seq), THERE.wrapping_add(ack));
                    let segment = segment(direction, flags, seq, ack, data);
                    if is_next(positions, &segment) {
                        found += 1;
                        assert_eq!(advance(positions, seen, &segment), Some(segment.end));
                        assert!(!is_apart(positions, &segment));
                    }
                }
            }
        }
    }
    assert_eq!(found, 4, "two sizes of data, from either side");
}

/// The data plane asks twice whether a segment advances its sender: of registered flows, before it
/// notes what the segment tells apart.
#[test]
fn what_advances_its_sender_does_so_after_what_is_told_apart() {
    const STEPS: [u32; 7] = [0, 1, 100, UNSEEN, FORWARD, u32::MAX, 0u32.wrapping_sub(100)];
    let (mut found, mut moved) = (0, 0);
    for (direction, positions) in ends(HERE, THERE) {
        let alone = Seen::first(direction, ACK, ONE_WAY).unwrap();
        for seen in [conversation(direction, positions), alone] {
            for (seq, ack) in STEPS.iter().flat_map(|seq| STEPS.map(|ack| (*seq, ack))) {
                for data in [0, 1, 100, 200] {
                    let (seq, ack) = (HERE.wrapping_add(seq), THERE.wrapping_add(ack));
                    let segment = segment(direction, ACK, seq, ack, data);
                    let Some(next) = advance(positions, seen, &segment) else {
                        continue;
                    };
                    found += 1;
                    // What had been noted for the other side: nothing, or the number acknowledged here.
                    for noted in [0, ack] {
                        let mut after = positions;
                        if let Some(other) = told(positions, noted, seen, &segment, true).other {
                            after[direction.reverse() as usize] = other;
                            moved += 1;
                        }
                        assert_eq!(advance(after, seen, &segment), Some(next));
                    }
                }
            }
        }
    }
    assert!(found > 100 && moved > 50, "{found}, {moved}");
}

#[test]
fn where_one_side_is_all_that_is_seen_its_numbers_decide() {
    for (direction, positions) in ends(HERE, 0) {
        for flags in [SYN, ACK] {
            let seen = Seen::first(direction, flags, ONE_WAY).unwrap();
            // Its acknowledgment does not matter: it is not known what the other side has sent.
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

/// What a segment at a distance tells, if `noted` was seen behind a gap.
fn told(positions: Positions, noted: u32, seen: Seen, segment: &Segment, way: bool) -> Apart {
    match is_apart(positions, segment) {
        true => apart(positions, noted, seen, segment, way),
        false => Apart::default(),
    }
}

#[test]
fn an_acknowledgment_with_its_exact_number_tells_where_the_other_side_is() {
    for (direction, positions) in ends(HERE, THERE) {
        let seen = conversation(direction, positions);
        let of = |flags, seq, missed| {
            let ack = segment(direction, flags, seq, THERE.wrapping_add(missed), 0);
            let told = told(positions, 0, seen, &ack, false);
            assert!(told.other.is_none_or(|found| found == ack.ack));
            assert_eq!(told.own, None);
            told.other.is_some()
        };
        for (missed, expected) in [
            (0, false),
            (1, true),
            (FORWARD, true),
            (FORWARD + 1, false),
            (u32::MAX, false),
        ] {
            assert_eq!(of(ACK, HERE, missed), expected, "{missed}");
            assert!(!of(SYN, HERE, missed), "{missed}");
            assert!(!of(RST | ACK, HERE, missed), "{missed}");
            assert_eq!(of(FIN | ACK, HERE, missed), expected, "{missed}");
        }
        for off in [1, u32::MAX, END_WINDOW] {
            assert!(!of(ACK, HERE.wrapping_add(off), 1), "{off}");
        }
        // A side that was not seen is where the other side's acknowledgments say; there is no
        // number to compare with.
        let alone = Seen::first(direction, ACK, BOTH).unwrap();
        let ack = segment(direction, ACK, HERE, THERE + 1, 0);
        assert_eq!(told(positions, 0, alone, &ack, true), Apart::default());
        let answer = segment(direction.reverse(), ACK, THERE, HERE.wrapping_add(1), 0);
        assert_eq!(told(positions, 0, alone, &answer, true), Apart::default());
    }
}

#[test]
fn what_was_seen_behind_a_gap_counts_once_it_is_acknowledged_by_the_other_way() {
    for (direction, positions) in ends(HERE, THERE) {
        let seen = conversation(direction, positions);
        // Segments of both sides were lost, so no number is exact.
        let data = |ahead: u32, ack: u32| segment(direction, ACK, HERE.wrapping_add(ahead), ack, 9);
        let beyond = data(5_000, THERE + 70);
        let noted = HERE.wrapping_add(5_009);
        let noting = Apart {
            own: Some(noted),
            other: None,
        };
        assert_eq!(told(positions, 0, seen, &beyond, true), noting);
        assert_eq!(told(positions, 0, seen, &beyond, false), Apart::default());
        let own = |segment| told(positions, 0, seen, &segment, true).own.is_some();
        assert!(own(data(FORWARD, THERE)) && !own(data(FORWARD + 1, THERE)));
        assert!(own(data(1, THERE + FORWARD)) && !own(data(1, THERE + FORWARD + 1)));
        assert!(own(data(1, THERE - IN_FLIGHT)) && !own(data(1, THERE - IN_FLIGHT - 1)));
        // Too far ahead, although its acknowledgment is at a distance, too.
        let far = told(positions, 0, seen, &data(FORWARD + 1, THERE + 1), true);
        assert_eq!(far, Apart::default());
        assert!(is_apart(positions, &data(FORWARD, THERE)));
        assert!(!is_apart(positions, &data(FORWARD + 1, THERE)));
        assert!(is_apart(positions, &data(0, THERE + FORWARD)));
        assert!(!is_apart(positions, &data(0, THERE + FORWARD + 1)));
        // The first continues the data without a gap; the second has no data.
        assert!(!own(data(0, THERE)) && !own(segment(direction, ACK, HERE + 5, THERE, 0)));
        let other = |ahead: u32, ack: u32, way| {
            let seq = THERE.wrapping_add(ahead);
            let answer = segment(direction.reverse(), ACK, seq, ack, 0);
            told(positions, noted, seen, &answer, way).other
        };
        for ahead in [FORWARD, 1, END_WINDOW.wrapping_neg()] {
            assert_eq!(other(ahead, noted, true), Some(noted), "{ahead}");
            assert_eq!(other(ahead, noted, false), None, "{ahead}");
            assert_eq!(other(ahead, noted.wrapping_add(1), true), None, "{ahead}");
            assert_eq!(other(ahead, noted.wrapping_sub(1), true), None, "{ahead}");
        }
        for ahead in [FORWARD + 1, (END_WINDOW + 1).wrapping_neg()] {
            assert_eq!(other(ahead, noted, true), None, "{ahead}");
        }
        // While a FIN waits for its acknowledgment, the number in doubt is the FIN's.
        let noting = |state| {
            let ending = Seen(seen.0 & !15 | state as u32);
            told(positions, 0, ending, &beyond, true).own.is_some()
        };
        assert!(noting(State::CloseWait));
        for state in [
            State::FinWait,
            State::LastAck,
            State::TimeWait,
            State::Close,
        ] {
            assert!(!noting(state), "{state:?}");
        }
        // The noted number is too far from the side's position.
        let distant = HERE.wrapping_add(FORWARD + 1);
        let answer = segment(direction.reverse(), ACK, THERE.wrapping_add(1), distant, 9);
        assert_eq!(told(positions, distant, seen, &answer, true).other, None);
    }
}

#[test]
fn behind_a_gap_a_segment_is_within_a_window_and_acknowledges_what_was_sent() {
    for (direction, positions) in ends(HERE, THERE) {
        let may = |ahead: u32, ack| {
            let data = segment(direction, ACK, HERE.wrapping_add(ahead - 1), ack, 1);
            may_skip(positions, &data)
        };
        assert!(may(FORWARD, THERE));
        assert!(!may(FORWARD + 1, THERE));
        assert!(may(2, THERE - IN_FLIGHT));
        assert!(!may(2, THERE - IN_FLIGHT - 1));
        assert!(may(2, THERE + FORWARD));
        assert!(!may(2, THERE + FORWARD + 1));
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
        assert!(!moves(HERE, THERE));
        assert!(!moves(HERE.wrapping_sub(1), THERE));
        // A segment behind a gap does not move the position.
        assert!(!moves(HERE.wrapping_add(2), THERE));
        // A segment that begins before the end of the earlier data is not behind a gap.
        let long = segment(direction, ACK, HERE - 3, THERE - IN_FLIGHT, 8);
        assert_eq!(advance(positions, seen, &long), Some(HERE.wrapping_add(5)));
        let next = HERE.wrapping_add(1);
        assert!(moves(next, THERE - IN_FLIGHT));
        assert!(!moves(next, THERE - IN_FLIGHT - 1));
        assert!(moves(next, THERE + UNSEEN));
        assert!(!moves(next, THERE + UNSEEN + 1));
        // A FIN or RST moves its sender's position only once it is confirmed.
        for flags in [FIN | ACK, RST, RST | ACK] {
            let end = segment(direction, flags, HERE, THERE, 5);
            assert_eq!(advance(positions, seen, &end), None);
        }
        // Nor does a SYN move the position of a side that has one.
        for flags in [SYN, SYN | ACK] {
            let syn = segment(direction, flags, 1 << 29, THERE, 0);
            assert_eq!(advance(positions, seen, &syn), None);
        }
        // A side's first segment sets its position anywhere; but an answer must acknowledge what it
        // answers.
        let asked = Seen::first(direction.reverse(), SYN, BOTH).unwrap();
        let syn = segment(direction, SYN, 1 << 29, 0, 0);
        assert_eq!(advance(positions, asked, &syn), Some((1 << 29) + 1));
        let answer = |ack| segment(direction, SYN | ACK, 1 << 29, ack, 0);
        assert_eq!(advance(positions, asked, &answer(THERE)), syn.end.into());
        let lost = answer(THERE + UNSEEN + 1);
        assert_eq!(advance(positions, asked, &lost), None);
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
        // For a side that was seen, and for one that was not.
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
fn a_first_fin_may_stand_anywhere_behind_a_syn_alone() {
    for (direction, positions) in ends(HERE, THERE) {
        let accepts = |flags, seq| {
            let seen = Seen::first(direction.reverse(), flags, BOTH).unwrap();
            let fin = segment(direction, FIN | ACK, seq, THERE, 0);
            accepts_end(positions, seen, &fin)
        };
        for far in [END_WINDOW + 1, 1 << 30] {
            // If the flow was picked up, the other side's acknowledgment has told this side's
            // position.
            assert!(!accepts(ACK, HERE.wrapping_add(far)), "{far}");
            assert!(accepts(SYN, HERE.wrapping_add(far)), "{far}");
        }
    }
}

#[test]
fn the_end_of_who_has_sent_a_syn_alone_has_its_number() {
    for (direction, positions) in ends(HERE, THERE) {
        let opening = Seen::first(direction, SYN, BOTH).unwrap();
        let end = |flags, seq, ack| {
            accepts_end(positions, opening, &segment(direction, flags, seq, ack, 0))
        };
        for flags in [RST, FIN, RST | ACK, FIN | ACK] {
            // Its acknowledgment does not matter, since anybody can know that nothing was sent.
            for ack in [0, THERE] {
                assert!(end(flags, HERE, ack), "{flags}");
                assert!(!end(flags, HERE.wrapping_add(1 << 28), ack), "{flags}");
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
            // A number that was acknowledged; or an acknowledgment of what the other side has sent.
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
        // A SYN acknowledges nothing.
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
            is_own_way: true,
            is_local: false,
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
        assert!(!fits(0, HERE, THERE), "without an acknowledgment");
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
            is_own_way: true,
            is_local: false,
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
        assert!(!goes_on(0, HERE, THERE), "without an acknowledgment");
    }
}

/// How often a segment with random numbers is taken for its sender's, compared with
/// docs/threats.md.
#[test]
fn a_random_segment_moves_a_position_as_often_as_the_page_says() {
    const DRAWS: u32 = 1 << 22;
    let mut seed = 0x9e37_79b9_7f4a_7c15_u64;
    let mut random = || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        (seed >> 16) as u32
    };
    for (direction, positions) in ends(HERE, THERE) {
        let both = conversation(direction, positions);
        let alone = Seen::first(direction, ACK, ONE_WAY).unwrap();
        // The chances of RSTs, RSTs with an ACK, FINs and data.
        let circle = 2f64.powi(32);
        let window = (2.0 * f64::from(END_WINDOW) + 1.0) / circle;
        let ahead = (f64::from(END_WINDOW) + 1.0) / circle;
        let acknowledged = f64::from(IN_FLIGHT + UNSEEN + 1) / circle;
        let forward = f64::from(FORWARD) / circle;
        for (seen, chances) in [
            (
                both,
                [
                    window,
                    ahead,
                    window * acknowledged,
                    1_460.0 / circle * acknowledged,
                ],
            ),
            (alone, [window, ahead, window, forward]),
        ] {
            let mut taken = [0u32; 4];
            for _ in 0..DRAWS {
                let [seq, ack] = [random(), random()];
                for (number, flags) in [RST, RST | ACK, FIN | ACK].into_iter().enumerate() {
                    let end = segment(direction, flags, seq, ack, 0);
                    taken[number] += u32::from(accepts_end(positions, seen, &end));
                }
                let data = segment(direction, ACK, seq, ack, 1_460);
                taken[3] += u32::from(advance(positions, seen, &data).is_some());
                let told = told(positions, 0, seen, &data, true);
                assert_eq!(told.other, None);
            }
            for (taken, chance) in taken.into_iter().zip(chances) {
                let expected = chance * f64::from(DRAWS);
                let off = (f64::from(taken) - expected).abs();
                assert!(
                    off <= 5.0 * expected.sqrt().max(1.0),
                    "{taken}, not {expected}"
                );
            }
        }
    }
}
