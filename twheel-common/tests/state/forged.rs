//! What forged segments do, and the ways of the sides.

use std::collections::BTreeSet;

use twheel_common::{
    flow::Direction::{self, *},
    numbers::END_WINDOW,
    packet::{
        datagram::{ANSWER, QUERY, UDP},
        tcp::{ACK, FIN, RST, SYN},
    },
    rule::Timeouts,
    state::{
        Change, Known, MAX_NAMESPACES, Seen, SideWay, State::*, View, Way, elsewhere, is_elsewhere,
    },
    tracked::Tracked,
};

use crate::{BOTH, WAYS, Wire, established, segment, wire};

/// Both ends continue: a request and its answer.
fn talk(wire: &mut Wire) {
    wire.send(FromLow, ACK, 100);
    wire.send(FromHigh, ACK, 0);
    wire.send(FromHigh, ACK, 50);
    wire.send(FromLow, ACK, 0);
}

#[test]
fn a_reset_at_the_next_number_counts_and_one_near_it_until_both_go_on() {
    let mut real = established();
    real.send(FromHigh, RST | ACK, 0);
    assert_eq!(real.state(), Close);
    talk(&mut real);
    assert_eq!(real.state(), Close, "an exact RST must not be taken back");

    for flags in [RST, RST | ACK] {
        for distance in [1, END_WINDOW] {
            let mut forged = established();
            talk(&mut forged);
            let mut reset = forged.segment(FromHigh, flags, 0);
            reset.seq = reset.seq.wrapping_add(distance);
            assert!(matches!(forged.see(&reset), Change::Add(_)));
            assert_eq!(forged.state(), Close);
            // One end alone proves nothing: it may not have received the RST.
            for _ in 0..3 {
                forged.send(FromLow, ACK, 100);
                assert_eq!(forged.state(), Close);
            }
            forged.send(FromHigh, ACK, 50);
            assert_eq!(forged.state(), Established);
            assert!(forged.seen().is_conversation());
            // Nor do many RSTs, or a SYN, move the doubtful number away.
            for step in 1..40 {
                reset.seq = forged.next[1].wrapping_add(step << 18);
                reset.end = reset.seq;
                forged.see(&reset);
            }
            let mut syn = forged.segment(FromHigh, SYN, 0);
            syn.seq = syn.seq.wrapping_add(1 << 30);
            forged.see(&syn);
            assert_eq!(forged.state(), Close);
            talk(&mut forged);
            assert_eq!(forged.state(), Established);
            // The same once more.
            reset.seq = forged.next[1].wrapping_add(distance);
            forged.see(&reset);
            assert_eq!(forged.state(), Close);
            talk(&mut forged);
            assert_eq!(forged.state(), Established);
        }
    }
}

#[test]
fn a_forged_fin_ends_nothing_that_goes_on() {
    for ends in [&[FromLow][..], &[FromHigh], &[FromLow, FromHigh]] {
        let mut forged = established();
        talk(&mut forged);
        for end in ends {
            let mut fin = forged.segment(*end, FIN | ACK, 0);
            fin.seq = fin.seq.wrapping_add(1000);
            fin.end = fin.seq.wrapping_add(1);
            assert!(matches!(forged.see(&fin), Change::Doubt(..)));
        }
        for _ in 0..ends.len() {
            talk(&mut forged);
        }
        assert_eq!(forged.state(), Established, "{ends:?}");
        // The FINs of the real ends count.
        forged.send(FromLow, FIN | ACK, 0);
        forged.send(FromHigh, FIN | ACK, 0);
        forged.send(FromLow, ACK, 0);
        assert_eq!(forged.state(), TimeWait);
    }
}

#[test]
fn a_real_fin_counts_after_a_guessed_one() {
    let mut forged = established();
    talk(&mut forged);
    let mut fin = forged.segment(FromHigh, FIN | ACK, 0);
    fin.seq = fin.seq.wrapping_add(1000);
    fin.end = fin.seq.wrapping_add(1);
    forged.see(&fin);
    assert_eq!(forged.state(), FinWait);
    forged.send(FromHigh, FIN | ACK, 0);
    forged.send(FromLow, ACK, 0);
    assert_eq!(forged.state(), CloseWait);
    forged.send(FromLow, FIN | ACK, 0);
    forged.send(FromHigh, ACK, 0);
    assert_eq!(forged.state(), TimeWait);
}

#[test]
fn an_ack_of_something_else_moves_no_state() {
    for (state, way) in WAYS {
        let last = match state {
            SynRecv | LastAck => FromLow,
            FinWait => FromHigh,
            _ => continue,
        };
        for distance in [1, 1000, 1 << 19] {
            for sign in [1, -1_i32] {
                let mut wire = wire(way, BOTH);
                let mut ack = wire.segment(last, ACK, 0);
                ack.ack = ack.ack.wrapping_add_signed(sign * distance);
                wire.see(&ack);
                let early = state == SynRecv && sign < 0 && distance <= 1000;
                // What a responder sends early is acknowledged later.
                assert!(
                    early || wire.state() == state,
                    "{state:?} {distance} {sign}"
                );
            }
        }
    }
}

#[test]
fn an_answer_comes_by_another_way() {
    let known = |is_own_way, positions| Known {
        positions,
        doubt: 0,
        is_own_way,
        is_local: false,
    };
    for (first, answer) in [(SYN, SYN | ACK), (ACK, ACK), (UDP, UDP), (QUERY, ANSWER)] {
        let seen = Seen::first(FromLow, first, BOTH).unwrap();
        let answer = segment(FromHigh, answer, 500, 300, 0);
        let positions = [300, 500];
        assert_eq!(
            seen.next(&answer, &known(false, positions), BOTH),
            Change::SameWay
        );
        let change = seen.next(&answer, &known(true, positions), BOTH);
        assert!(matches!(change, Change::Add(_)), "{first:#x} {change:?}");
    }
}

#[test]
fn a_side_sends_by_its_own_way() {
    let (inside, outside) = (Way::new(2, 2), Way::new(3, 3));
    // The way of a forwarded packet is the interface where it came in; this host's own packets came
    // in nowhere.
    assert_eq!(Way::new(3, 2), inside);
    assert_eq!(Way::new(3, 0), Way::LOCAL);
    for side in [FromLow, FromHigh] {
        let other = side.reverse();
        let allows = |known: Way, way: Way, direction, is_lenient| {
            SideWay::new(known, side).allows(way, direction, is_lenient)
        };
        for is_lenient in [false, true] {
            // The side that was seen sends through the same interface, or through another one if it
            // may have several.
            assert!(allows(inside, inside, side, is_lenient));
            assert_eq!(allows(inside, outside, side, is_lenient), is_lenient);
            // Packets of this host come from this host only, and none of its packets comes in from
            // outside.
            assert!(allows(inside, Way::LOCAL, side, is_lenient));
            assert!(!allows(Way::LOCAL, outside, side, is_lenient));
            assert!(allows(Way::LOCAL, Way::LOCAL, side, is_lenient));
            // The other side sends by any other way.
            assert!(allows(inside, outside, other, is_lenient));
            assert!(allows(inside, Way::LOCAL, other, is_lenient));
            assert!(!allows(inside, inside, other, is_lenient));
            assert!(!allows(Way::LOCAL, Way::LOCAL, other, is_lenient));
            assert!(allows(Way::LOCAL, outside, other, is_lenient));
            for direction in [side, other] {
                assert!(SideWay::ANY.allows(inside, direction, is_lenient));
                // Over the loopback interface both sides send, and nobody outside.
                let loopback = SideWay::new(Way::LOOPBACK, side);
                assert!(!loopback.allows(inside, direction, is_lenient));
                assert!(loopback.allows(Way::LOCAL, direction, is_lenient));
                for known in [SideWay::new(inside, side), loopback] {
                    assert!(known.allows(Way::LOOPBACK, direction, is_lenient));
                }
            }
        }
        assert!(!SideWay::ANY.is_of(side));
        assert!(SideWay::new(inside, side).is_of(side) && !SideWay::new(inside, side).is_of(other));
    }
    assert_eq!([0, 7].map(|origin| Way::new(1, origin)), [Way::LOOPBACK; 2]);
    // A packet from another network namespace was made neither in a third one nor in this one.
    let [there, third] = [0, MAX_NAMESPACES - 1].map(elsewhere);
    let made = Way::new(there | 2, there);
    for side in [Direction::FromLow, Direction::FromHigh] {
        let known = SideWay::new(made, side);
        assert!(known.allows(made, side, false));
        assert!(!known.allows(Way::new(third | 2, third), side, false));
        assert!(known.allows(Way::new(third | 2, third), side.reverse(), false));
        assert!(known.is_of(side) && !made.is_local());
    }
    let numbers = [there, there | 2, third, third | 2];
    assert!(numbers.into_iter().all(is_elsewhere) && !is_elsewhere(2));
    assert_eq!(BTreeSet::from(numbers).len(), 4);
}

/// This host's packets do not come in: incoming packets in its name were forged.
#[test]
fn this_host_disproves_what_came_in_by_its_name() {
    let outside = Way::new(3, 3);
    for side in [FromLow, FromHigh] {
        let disproved =
            |known, way, direction| SideWay::new(known, side).is_disproved_by(way, direction);
        assert!(disproved(outside, Way::LOCAL, side));
        assert!(!disproved(outside, Way::LOCAL, side.reverse()));
        for direction in [side, side.reverse()] {
            assert!(disproved(outside, Way::LOOPBACK, direction));
            for known in [Way::LOCAL, Way::LOOPBACK] {
                assert!(!disproved(known, Way::LOCAL, direction));
            }
            assert!(!disproved(outside, Way::new(2, 2), direction));
            assert!(!SideWay::ANY.is_disproved_by(Way::LOCAL, direction));
        }
        // A forged SYN or ACK in the name of this host; the host's own segment decides what begins.
        for planted in [SYN, ACK] {
            let planted = segment(side, planted, 5, 6, 0);
            let see = |from: Direction, flags| {
                let mut flow = Tracked::first(&planted, BOTH).unwrap();
                flow.known.is_local = true;
                let change = flow.see_disproved(&segment(from, flags, 100, 200, 0), BOTH);
                (change, flow)
            };
            let (change, flow) = see(side, SYN);
            assert!(matches!(change, Change::NewGeneration(_)), "{change:?}");
            assert_eq!(
                flow.seen,
                Tracked::first(&segment(side, SYN, 100, 200, 0), BOTH)
                    .unwrap()
                    .seen
            );
            let (change, flow) = see(side, SYN | ACK);
            assert!(matches!(change, Change::NewGeneration(_)), "{change:?}");
            assert_eq!(
                (flow.seen.state(), flow.seen.initiator()),
                (SynRecv, side.reverse())
            );
            assert!(flow.seen.is_conversation() && !flow.seen.is_pickup());
            let positions = flow.known.positions;
            assert_eq!(positions[side as usize], 101);
            assert_eq!(positions[side.reverse() as usize], 200);
            for flags in [FIN | ACK, RST] {
                let (change, _) = see(side, flags);
                assert!(!matches!(change, Change::NewGeneration(_)), "{change:?}");
            }
        }
        let planted = segment(side, SYN, 5, 6, 0);
        let mut flow = Tracked::first(&planted, BOTH).unwrap();
        flow.known.is_local = true;
        flow.see_disproved(&segment(side, ACK, 100, 200, 0), BOTH);
        assert_eq!(
            (flow.seen.state(), flow.seen.initiator()),
            (Established, side)
        );
        assert!(flow.seen.is_pickup() && !flow.seen.is_replied());
        // A conversation is not disproved.
        let mut flow = established().flow.unwrap();
        let change = flow.see_disproved(&segment(FromLow, SYN, 5_000, 0, 0), BOTH);
        assert_eq!(change, Change::Ignored);
    }
}

#[test]
fn random_numbers_hardly_do_anything() {
    // What a guess can still achieve: a FIN or RST must hit a window of 2^19 numbers of 2^32, and
    // is then taken back.
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    let mut number = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random >> 16) as u32
    };
    let mut wire = established();
    talk(&mut wire);
    let (mut ends, mut moves) = (0, 0);
    const TRIES: u32 = 1_000_000;
    for turn in 0..TRIES {
        let flags = [RST, RST | ACK, FIN | ACK, ACK, SYN, SYN | ACK][turn as usize % 6];
        let end = [FromLow, FromHigh][(number() & 1) as usize];
        let forged = segment(end, flags, number(), number(), number() % 1400);
        let before = wire.flow.unwrap().known.positions;
        let mut trial = wire;
        trial.see(&forged);
        ends += u32::from(trial.state() != Established);
        moves += u32::from(trial.flow.unwrap().known.positions != before);
        if trial.state() != Established {
            talk(&mut trial);
            talk(&mut trial);
            assert_eq!(trial.state(), Established, "{forged:?}");
        }
    }
    // Two of the six kinds are RSTs, which hit once in 2^13 and once in 2^14 tries; a FIN's
    // acknowledgment must fit, too.
    let expected = TRIES / 6 / 8192 + TRIES / 6 / 16384;
    assert!((expected / 2..=expected * 2).contains(&ends), "{ends}");
    // Once in 2^8 tries for the sequence number, and once in 2^6 for the acknowledgment.
    let expected = TRIES / 6 / (1 << 14);
    assert!(moves <= 4 * expected, "{moves}");
}

#[test]
fn what_can_be_first_is_what_begins_a_flow() {
    for bits in 0..8 {
        let view = View {
            one_way: bits & 1 != 0,
            strict: bits & 2 != 0,
        };
        let direction = [FromLow, FromHigh][bits >> 2];
        for flags in 0..=u8::MAX {
            let begins = Seen::first(direction, flags, view).is_some();
            assert_eq!(Seen::is_first(flags, view), begins, "{flags:#x} {view:?}");
        }
    }
}

/// An attacker outside forges both ends of a connection that is over; but packets of this host do
/// not come in from there.
#[test]
fn a_life_begins_and_is_answered_by_the_ways_of_its_sides() {
    for (state, initiator) in [
        (TimeWait, FromLow),
        (TimeWait, FromHigh),
        (Close, FromLow),
        (Close, FromHigh),
    ] {
        let seen = Seen::of_socket(state, initiator, &[]);
        let known = |is_own_way, doubt| Known {
            positions: [300, 500],
            doubt,
            is_own_way,
            is_local: false,
        };
        for from in [FromLow, FromHigh] {
            let syn = segment(from, SYN, 9_000, 0, 0);
            assert_eq!(seen.next(&syn, &known(false, 0), BOTH), Change::SameWay);
            let Change::Doubt(candidate, number, _) = seen.next(&syn, &known(true, 0), BOTH) else {
                panic!("the SYN must be in doubt");
            };
            let answer = segment(from.reverse(), SYN | ACK, 70_000, 9_001, 0);
            let next = |is_own_way| candidate.next(&answer, &known(is_own_way, number), BOTH);
            assert_eq!(next(false), Change::SameWay);
            assert!(matches!(next(true), Change::NewGeneration(_)));
        }
    }
}

/// A single acknowledgment, which gives both sides' numbers, may be forged.
#[test]
fn an_exact_reset_ends_only_what_both_sides_have_told_of() {
    let mut flow = Tracked::first(&segment(FromLow, ACK, 100, 200, 0), BOTH).unwrap();
    let reset = segment(FromLow, RST, 100, 0, 0);
    flow.see(&reset, BOTH);
    assert_eq!(flow.seen.state(), Close);
    // It does not end at once, as a refused flow does.
    assert_eq!(Timeouts::number(flow.seen), Close as usize);
    assert_ne!(
        flow.see(&segment(FromLow, SYN, 9_000, 0, 0), BOTH),
        Change::Ended
    );
    // A side that has sent nothing has its number from the other side.
    let mut flow = Tracked::first(&segment(FromLow, ACK, 100, 200, 0), BOTH).unwrap();
    flow.see(&segment(FromHigh, RST, 200, 0, 0), BOTH);
    assert_eq!(Timeouts::number(flow.seen), Timeouts::REFUSED);
    // Both numbers are known, and the RST has exactly the number that the other side waits for: it
    // is not in doubt.
    let mut flow = Tracked::first(&segment(FromLow, ACK, 100, 200, 0), BOTH).unwrap();
    flow.see(&segment(FromHigh, ACK, 200, 100, 0), BOTH);
    flow.see(&reset, BOTH);
    for direction in [FromLow, FromHigh] {
        let [seq, ack] = [[100, 200], [200, 100]][direction as usize];
        flow.see(&segment(direction, ACK, seq, ack, 0), BOTH);
    }
    assert_eq!(flow.seen.state(), Close);
}

#[test]
fn who_has_sent_a_syn_is_not_refused_by_its_own_reset() {
    for from in [FromLow, FromHigh] {
        let mut flow = Tracked::first(&segment(from, SYN, 99, 0, 0), BOTH).unwrap();
        for (flags, seq) in [(RST | ACK, 7), (RST | ACK, 100), (RST, 7), (RST, 101)] {
            let reset = segment(from, flags, seq, 0, 0);
            assert_eq!(flow.see(&reset, BOTH), Change::Ignored, "{reset:?}");
        }
        assert_eq!(flow.seen.state(), SynSent);
        flow.see(&segment(from, RST, 100, 0, 0), BOTH);
        assert_eq!(flow.seen.state(), Close);
    }
}
