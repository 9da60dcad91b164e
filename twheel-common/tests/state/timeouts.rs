//! The timeout of each state, and datagrams.

use twheel_common::{
    flow::Direction::{self, *},
    packet::{
        Segment,
        datagram::{ANSWER, QUERY, UDP},
        tcp::{ACK, RST, SYN},
    },
    rule::{Rule, RuleFlags, Timeouts},
    state::{
        Change, Known, Seen,
        State::{self, *},
    },
};

use crate::{BOTH, after, segment};

#[test]
fn each_state_has_its_timeout() {
    let timeouts = Timeouts(std::array::from_fn(|number| number as u32));
    let of = |segments: &[(Direction, u8)]| timeouts.timeout(after(segments));
    assert_eq!(of(&[(FromLow, SYN)]), SynSent as u32);
    assert_eq!(of(&[(FromLow, SYN), (FromHigh, SYN)]), SynSent as u32);
    assert_eq!(of(&[(FromLow, SYN), (FromHigh, SYN | ACK)]), SynRecv as u32);
    assert_eq!(of(&[(FromLow, ACK)]), Timeouts::UNREPLIED as u32);
    assert_eq!(of(&[(FromLow, ACK), (FromHigh, ACK)]), Established as u32);
    let reset = [(FromLow, ACK), (FromHigh, ACK), (FromHigh, RST)];
    assert_eq!(of(&reset), Close as u32);
    for state in State::ALL {
        assert!(Timeouts::number(Seen(state as u32)) < Timeouts::COUNT);
    }
}

#[test]
fn what_is_not_answered_is_waited_for_no_longer_than_that() {
    let mut timeouts = Timeouts([50; Timeouts::COUNT]);
    let seen = Seen::first(FromLow, ACK, BOTH).unwrap();
    for (retrans, stalled) in [(49, 49), (50, 50), (51, 50)] {
        timeouts.0[Timeouts::RETRANS] = retrans;
        assert_eq!(timeouts.timeout(seen), 50);
        assert_eq!(timeouts.timeout(seen.stalled(true)), stalled);
    }
}

#[test]
fn where_one_direction_is_seen_nobody_can_be_called_unreplied() {
    let timeouts = Timeouts(std::array::from_fn(|number| number as u32));
    let expected = |unreplied| {
        let mut expected = timeouts;
        expected.0[Timeouts::UNREPLIED] = unreplied;
        expected.0[Timeouts::REFUSED] = Close as u32;
        expected
    };
    assert_eq!(timeouts.one_way(false), expected(Established as u32));
    assert_eq!(timeouts.one_way(true), expected(Timeouts::UNREPLIED as u32));
    let both = Rule::default();
    assert!(!both.is_one_way() && both.one_way(true).is_one_way());
    assert!(!both.is_gone() && !both.flags.has(RuleFlags::GONE));
}

/// A datagram.
fn datagram(direction: Direction, flags: u8) -> Segment {
    segment(direction, flags, 0, 0, 0)
}

#[test]
fn datagrams_of_both_sides_are_a_stream_after_a_while() {
    let known = Known {
        is_own_way: true,
        is_local: false,
        ..Known::default()
    };
    let next = |seen: Seen, end, flags| seen.next(&datagram(end, flags), &known, BOTH);
    let first = Seen::first(FromHigh, UDP, BOTH).unwrap();
    assert_eq!((first.state(), first.initiator()), (Udp, FromHigh));
    assert_eq!(next(first, FromHigh, UDP), Change::Nothing);
    let Change::Add(answered) = next(first, FromLow, UDP) else {
        panic!("the answer was not taken");
    };
    assert_eq!(answered.state(), Udp);
    let Change::AddIfItLasts(stream) = next(answered, FromHigh, UDP) else {
        panic!("the flow is not a stream");
    };
    assert_eq!(stream.state(), UdpStream);
    for direction in [FromLow, FromHigh] {
        assert_eq!(next(stream, direction, UDP), Change::Nothing);
        assert_eq!(next(Seen::DEAD, direction, UDP), Change::Ended);
    }
    assert!(stream.is_established(false) && !answered.is_established(false));
    assert!(!stream.is_closed());
    assert_eq!(
        Seen::first(FromLow, ANSWER, BOTH),
        None,
        "an answer without a question begins a flow"
    );
    let ping = Seen::first(FromLow, QUERY, BOTH).unwrap();
    assert_eq!(ping.state(), Icmp);
    let Change::Add(answered) = next(ping, FromHigh, ANSWER) else {
        panic!("the answer was not taken");
    };
    assert_eq!(next(answered, FromLow, QUERY), Change::Nothing);
    for (seen, number) in [
        (ping, Timeouts::ICMP),
        (answered, Timeouts::ICMP),
        (first, Timeouts::UDP),
        (stream, Timeouts::UDP_STREAM),
    ] {
        assert_eq!(Timeouts::number(seen), number);
    }
}
