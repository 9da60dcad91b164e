//! States and deadlines.
#![allow(missing_docs)]

use twheel_common::{
    flow::{Change, Direction, Direction::*, Seen, State, Timeouts, Visit, Word, idle, visit},
    packet::tcp::{ACK, FIN, RST, SYN},
};

/// What is seen of a flow after these segments.
fn after(segments: &[(Direction, u8)]) -> Seen {
    let ((direction, flags), rest) = segments.split_first().unwrap();
    let mut seen = Seen::first(*direction, *flags).expect("a first segment that begins a flow");
    for (direction, flags) in rest {
        match seen.next(*direction, *flags) {
            Change::Nothing => {}
            Change::Add(more) => seen = more,
            change => panic!("{change:?}"),
        }
    }
    seen
}

#[test]
fn a_connection_goes_through_conntracks_states() {
    let life = [
        (FromLow, SYN, State::SynSent),
        (FromHigh, SYN | ACK, State::SynRecv),
        (FromLow, ACK, State::Established),
        (FromHigh, ACK, State::Established),
        (FromLow, FIN | ACK, State::FinWait),
        (FromHigh, ACK, State::FinWait),
        (FromHigh, FIN | ACK, State::TimeWait),
        (FromLow, ACK, State::TimeWait),
    ];
    for length in 1..=life.len() {
        let segments: Vec<_> = life[..length].iter().map(|(d, f, _)| (*d, *f)).collect();
        assert_eq!(
            after(&segments).state(),
            life[length - 1].2,
            "after {length} segments"
        );
    }
}

#[test]
fn one_direction_is_enough_to_be_established() {
    assert_eq!(
        after(&[(FromLow, SYN), (FromLow, ACK)]).state(),
        State::Established
    );
    let responder = after(&[(FromHigh, SYN | ACK), (FromHigh, ACK)]);
    assert_eq!(responder.state(), State::Established);
    assert_eq!(
        responder.initiator(),
        FromLow,
        "a SYN/ACK comes from the responder"
    );
}

#[test]
fn a_challenge_ack_of_the_responder_establishes_nothing() {
    assert_eq!(
        after(&[(FromLow, SYN), (FromHigh, ACK)]).state(),
        State::SynSent
    );
}

#[test]
fn two_fins_of_one_side_close_nothing() {
    let seen = after(&[(FromLow, ACK), (FromHigh, FIN | ACK), (FromHigh, FIN | ACK)]);
    assert_eq!(seen.state(), State::FinWait);
    assert!(!seen.is_closed());
}

#[test]
fn ends_begin_nothing() {
    for flags in [RST, RST | ACK, FIN | ACK] {
        assert_eq!(Seen::first(FromLow, flags), None);
    }
}

#[test]
fn a_syn_on_a_closed_flow_is_another_flow() {
    let reset = after(&[(FromLow, SYN), (FromHigh, RST | ACK)]);
    assert_eq!(reset.state(), State::Close);
    let Change::NewGeneration(seen) = reset.next(FromHigh, SYN) else {
        panic!("no new generation");
    };
    assert_eq!((seen.state(), seen.initiator()), (State::SynSent, FromHigh));
    // But not on a live one.
    let live = after(&[(FromLow, SYN), (FromHigh, SYN | ACK), (FromLow, ACK)]);
    assert_eq!(live.next(FromLow, SYN), Change::Nothing);
}

#[test]
fn a_flow_found_in_mid_stream_is_marked() {
    assert!(after(&[(FromHigh, ACK)]).is_pickup());
    assert_eq!(after(&[(FromHigh, ACK)]).initiator(), FromHigh);
    assert!(!after(&[(FromHigh, SYN), (FromHigh, ACK)]).is_pickup());
}

const TIMEOUTS: Timeouts = Timeouts {
    idle: 1000,
    close: 100,
};

#[test]
fn a_visit_is_never_early_and_never_waits_longer_than_the_shortest_timeout() {
    let live = after(&[(FromLow, ACK)]);
    let closed = after(&[(FromLow, ACK), (FromLow, RST)]);
    for now in [5_000, u64::from(u32::MAX), u64::from(u32::MAX) + 3, 1 << 40] {
        for (seen, timeout) in [(live, 1000u32), (closed, 100)] {
            for idle in 0..timeout {
                let last_seen = (now as u32).wrapping_sub(idle);
                let Visit::Rearm(due) = visit(now, Word::new(last_seen.into(), 7, seen), &TIMEOUTS)
                else {
                    panic!("expired {} early", timeout - idle);
                };
                let deadline = now + u64::from(timeout - idle);
                assert!(due <= deadline && due > now && due <= now + 100);
                assert!(due == deadline || due == now + 100);
            }
            let last_seen = (now as u32).wrapping_sub(timeout);
            assert_eq!(
                visit(now, Word::new(last_seen.into(), 7, seen), &TIMEOUTS),
                Visit::Expire
            );
        }
    }
}

#[test]
fn a_stamp_from_the_future_is_young() {
    assert_eq!(idle(1000, 1001), 0);
    assert_eq!(
        idle(u64::from(u32::MAX), 5),
        0,
        "written after the stamp has wrapped"
    );
    assert_eq!(idle(1 << 32, u32::MAX), 1);
    let live = after(&[(FromLow, ACK)]);
    assert!(matches!(
        visit(1000, Word::new(1500, 7, live), &TIMEOUTS),
        Visit::Rearm(_)
    ));
}
