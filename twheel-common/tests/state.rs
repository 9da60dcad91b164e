//! States, beside conntrack's table; and what a RST must be like.
#![allow(missing_docs)]

use twheel_common::{
    flow::{Direction, Direction::*, FlowKey},
    packet::{
        Segment,
        datagram::{ANSWER, QUERY, UDP},
        tcp::{ACK, FIN, RST, SYN},
    },
    state::{Change, END_WINDOW, Seen, State, State::*, Timeouts, View, accepts_end, advance},
};

/// Both directions are seen.
const BOTH: View = View {
    one_way: false,
    strict: false,
};
const ONE_WAY: View = View {
    one_way: true,
    strict: false,
};
const STRICT: View = View {
    one_way: true,
    strict: true,
};

/// What is seen of a flow after these segments.
fn after(segments: &[(Direction, u8)]) -> Seen {
    seen(segments, BOTH)
}

fn seen(segments: &[(Direction, u8)], view: View) -> Seen {
    let ((direction, flags), rest) = segments.split_first().unwrap();
    let mut seen = Seen::first(*direction, *flags, view).expect("a first segment");
    for (direction, flags) in rest {
        match seen.next(*direction, *flags, view) {
            Change::Nothing | Change::Ignored => {}
            Change::Add(more) => seen = more,
            change => panic!("{change:?}"),
        }
    }
    seen
}

#[test]
fn a_connection_goes_through_conntracks_states() {
    let life = [
        (FromLow, SYN, SynSent),
        (FromHigh, SYN | ACK, SynRecv),
        (FromLow, ACK, Established),
        (FromHigh, ACK, Established),
        (FromLow, FIN | ACK, FinWait),
        (FromHigh, ACK, CloseWait),
        (FromHigh, FIN | ACK, LastAck),
        (FromLow, ACK, TimeWait),
        (FromLow, ACK, TimeWait),
    ];
    for length in 1..=life.len() {
        let segments: Vec<_> = life[..length].iter().map(|(d, f, _)| (*d, *f)).collect();
        assert_eq!(after(&segments).state(), life[length - 1].2, "{length}");
    }
}

#[test]
fn both_at_once() {
    let closes = [
        (FromLow, SYN),
        (FromHigh, SYN | ACK),
        (FromLow, ACK),
        (FromHigh, FIN | ACK),
        (FromLow, FIN | ACK),
        (FromHigh, ACK),
    ];
    assert_eq!(after(&closes[..5]).state(), LastAck);
    assert_eq!(after(&closes).state(), TimeWait);
    let opens = [
        (FromLow, SYN),
        (FromHigh, SYN),
        (FromLow, SYN | ACK),
        (FromHigh, SYN | ACK),
        (FromLow, ACK),
    ];
    assert_eq!(after(&opens[..2]).state(), SynSent2);
    assert_eq!(after(&opens[..3]).state(), SynRecv);
    assert_eq!(after(&opens).state(), Established);
}

/// `tcp_conntracks` of `net/netfilter/nf_conntrack_proto_tcp.c`, without its first column (no flow): original and
/// reply; syn, syn/ack, fin, ack. 2 letters a state.
const CONNTRACK: [[&str; 4]; 2] = [
    [
        "SS IG IG IG IG IG SS SS S2",
        "IV SR IV IV IV IV IV IV SR",
        "IV FW FW LA LA LA TW CL IV",
        "IV ES ES CW CW TW TW CL IV",
    ],
    [
        "S2 IV IV IV IV IV SS IV S2",
        "SR IG IG IG IG IG IG IG SR",
        "IV FW FW LA LA LA TW CL IV",
        "IG SR ES CW CW TW TW CL IG",
    ],
];

#[test]
fn every_transition_is_conntracks() {
    // A flow that both sides were seen of, in each of the states, begun by either.
    for (initiator, other) in [(FromLow, FromHigh), (FromHigh, FromLow)] {
        let base = after(&[(initiator, SYN), (other, SYN | ACK)]);
        let states = [
            SynSent,
            SynRecv,
            Established,
            FinWait,
            CloseWait,
            LastAck,
            TimeWait,
            Close,
            SynSent2,
        ];
        for (column, state) in states.into_iter().enumerate() {
            let seen = Seen(base.0 & !15 | state as u16);
            assert_eq!(seen.state(), state);
            for (reply, direction) in [initiator, other].into_iter().enumerate() {
                for (row, flags) in [SYN, SYN | ACK, FIN | ACK, ACK].into_iter().enumerate() {
                    let expected = CONNTRACK[reply][row].split(' ').nth(column).unwrap();
                    let next = match seen.next(direction, flags, BOTH) {
                        Change::Nothing => state,
                        Change::Add(next) => next.state(),
                        Change::Ignored => {
                            // Or a SYN sent again, which does not keep the flow alive.
                            let again = flags == SYN
                                && state == if reply == 0 { SynSent } else { SynSent2 };
                            let again = again || flags == SYN && state == SynSent2;
                            assert!(
                                again || ["IG", "IV"].contains(&expected),
                                "{state:?} {row} {reply}"
                            );
                            continue;
                        }
                        Change::NewGeneration(next) => {
                            // Where conntrack reopens; and where the responder begins anew.
                            assert!(matches!(state, TimeWait | Close) && flags == SYN);
                            assert_eq!(next.state(), SynSent);
                            assert_eq!(next.initiator(), direction);
                            continue;
                        }
                        Change::Ended | Change::AddIfItLasts(_) => panic!("neither dead nor UDP"),
                    };
                    let names = ["SS", "SR", "ES", "FW", "CW", "LA", "TW", "CL", "S2"];
                    assert_eq!(names[next as usize], expected, "{state:?} {row} {reply}");
                }
                let Change::Add(reset) = Seen(seen.0 & !15 | 2).next(direction, RST, BOTH) else {
                    panic!("a RST");
                };
                assert_eq!(reset.state(), Close);
            }
        }
    }
}

#[test]
fn one_direction_is_enough_to_be_established() {
    let handshake = [(FromLow, SYN), (FromLow, ACK)];
    // Where the other would be seen, it has not answered.
    assert_eq!(after(&handshake).state(), SynSent);
    assert_eq!(Seen::first(FromHigh, SYN | ACK, BOTH), None);
    let client = seen(&handshake, ONE_WAY);
    assert_eq!(client.state(), Established);
    let responder = seen(&[(FromHigh, SYN | ACK), (FromHigh, ACK)], ONE_WAY);
    assert_eq!(responder.state(), Established);
    assert_eq!(responder.initiator(), FromLow, "a SYN/ACK is an answer");
    for seen in [client, responder] {
        assert!(!seen.is_replied());
        assert!(seen.is_established(true) && !seen.is_established(false));
    }
    let both = after(&[(FromLow, SYN), (FromHigh, SYN | ACK), (FromLow, ACK)]);
    assert!(both.is_established(false));
}

#[test]
fn a_challenge_ack_of_the_responder_establishes_nothing() {
    assert_eq!(after(&[(FromLow, SYN), (FromHigh, ACK)]).state(), SynSent);
    let answered = [(FromLow, SYN), (FromHigh, SYN | ACK), (FromHigh, ACK)];
    assert_eq!(after(&answered).state(), SynRecv);
}

#[test]
fn two_fins_of_one_side_close_nothing() {
    let seen = after(&[(FromLow, ACK), (FromHigh, FIN | ACK), (FromHigh, FIN | ACK)]);
    assert_eq!(seen.state(), FinWait);
    assert!(!seen.is_closed());
}

#[test]
fn what_begins_a_flow() {
    for flags in [RST, RST | ACK, FIN | ACK] {
        assert_eq!(Seen::first(FromLow, flags, ONE_WAY), None);
    }
    for flags in [ACK, SYN | ACK, RST, FIN | ACK] {
        assert_eq!(Seen::first(FromLow, flags, STRICT), None);
    }
    assert_eq!(Seen::first(FromHigh, SYN, STRICT).unwrap().state(), SynSent);
    assert!(after(&[(FromHigh, ACK)]).is_pickup());
    assert_eq!(after(&[(FromHigh, ACK)]).initiator(), FromHigh);
    assert!(!after(&[(FromHigh, SYN), (FromHigh, ACK)]).is_pickup());
}

#[test]
fn a_syn_on_a_closed_flow_is_another_flow() {
    let reset = after(&[(FromLow, SYN), (FromHigh, RST | ACK)]).posted();
    let Change::NewGeneration(seen) = reset.next(FromHigh, SYN, BOTH) else {
        panic!("no new generation");
    };
    assert_eq!((seen.state(), seen.initiator()), (SynSent, FromHigh));
    assert!(seen.is_posted(), "its link is still in use");
    // But not on a live one.
    let live = after(&[(FromLow, SYN), (FromHigh, SYN | ACK), (FromLow, ACK)]);
    assert_eq!(live.next(FromLow, SYN, BOTH), Change::Ignored);
}

fn segment(direction: Direction, flags: u8, seq: u32, ack: u32, length: u32) -> Segment {
    let counted = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
    Segment {
        key: FlowKey::default(),
        direction,
        flags,
        seq,
        ack,
        end: seq.wrapping_add(length).wrapping_add(counted),
        bytes: 40 + length,
        stamp: [0; 2],
        window: 1,
        reserved: 0,
    }
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
            // Much may be in flight. What was never sent is not acknowledged.
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
    let Change::Add(closed) = seen.next(FromHigh, RST | ACK, BOTH) else {
        panic!("a RST");
    };
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
    assert_eq!(moved(here, 70_000, 1_000), Some(989), "it wraps");
    assert_eq!(moved(here.wrapping_sub(500), 70_000, 500), None, "again");
    assert_eq!(moved(here.wrapping_sub(500), 70_000, 100), None, "older");
    assert_eq!(moved(here.wrapping_add(1 << 30), 70_000, 1), None, "far");
    assert_eq!(moved(here, 70_000 + (1 << 24), 1_000), None, "whose?");
    // A first segment of a side says where that is.
    let half = after(&[(FromLow, SYN)]);
    let answer = segment(FromHigh, SYN | ACK, 1 << 31, here, 0);
    assert_eq!(advance([here, 0], half, &answer), Some((1 << 31) + 1));
}

#[test]
fn each_state_has_its_timeout() {
    let timeouts = Timeouts(std::array::from_fn(|number| number as u32));
    let of = |segments: &[(Direction, u8)]| timeouts.of(after(segments));
    assert_eq!(of(&[(FromLow, SYN)]), SynSent as u32);
    assert_eq!(of(&[(FromLow, SYN), (FromHigh, SYN)]), SynSent as u32);
    assert_eq!(of(&[(FromLow, SYN), (FromHigh, SYN | ACK)]), SynRecv as u32);
    assert_eq!(of(&[(FromLow, ACK)]), Timeouts::UNREPLIED as u32);
    assert_eq!(of(&[(FromLow, ACK), (FromHigh, ACK)]), Established as u32);
    let reset = [(FromLow, ACK), (FromHigh, ACK), (FromHigh, RST)];
    assert_eq!(of(&reset), Close as u32);
    for state in State::ALL {
        assert!(Timeouts::number(Seen(state as u16)) < 16);
    }
}

#[test]
fn datagrams_of_both_sides_are_a_stream_after_a_while() {
    let view = BOTH;
    let first = Seen::first(FromHigh, UDP, view).unwrap();
    assert_eq!((first.state(), first.initiator()), (Udp, FromHigh));
    assert_eq!(first.next(FromHigh, UDP, view), Change::Nothing);
    let Change::Add(answered) = first.next(FromLow, UDP, view) else {
        panic!("an answer");
    };
    assert_eq!(answered.state(), Udp);
    let Change::AddIfItLasts(stream) = answered.next(FromHigh, UDP, view) else {
        panic!("a stream");
    };
    assert_eq!(stream.state(), UdpStream);
    for direction in [FromLow, FromHigh] {
        assert_eq!(stream.next(direction, UDP, view), Change::Nothing);
        assert_eq!(Seen::DEAD.next(direction, UDP, view), Change::Ended);
    }
    assert!(stream.is_established(false) && !answered.is_established(false));
    assert!(!stream.is_closed());
    assert_eq!(Seen::first(FromLow, ANSWER, view), None, "to nothing");
    let ping = Seen::first(FromLow, QUERY, view).unwrap();
    assert_eq!(ping.state(), Icmp);
    let Change::Add(answered) = ping.next(FromHigh, ANSWER, view) else {
        panic!("an answer");
    };
    assert_eq!(answered.next(FromLow, QUERY, view), Change::Nothing);
    for (seen, number) in [
        (ping, Timeouts::ICMP),
        (answered, Timeouts::ICMP),
        (first, Timeouts::UDP),
        (stream, Timeouts::UDP_STREAM),
    ] {
        assert_eq!(Timeouts::number(seen), number);
    }
}

#[test]
fn a_flow_entered_for_a_socket_learns_where_its_sides_stand() {
    let entered = Seen::of_socket(Established, FromHigh, &[]);
    assert_eq!(entered.state(), Established);
    assert_eq!(entered.initiator(), FromHigh);
    assert!(entered.is_replied() && entered.is_pickup() && !entered.is_conversation());
    let unknown = [0; 2];
    // A FIN or RST has no number to be compared with.
    for flags in [RST, FIN | ACK] {
        let end = segment(FromLow, flags, 5_000_000, 7_000_000, 0);
        assert!(!accepts_end(unknown, entered, &end));
    }
    // The first segment of each side says where it stands, and the next one no longer.
    let from_low = segment(FromLow, ACK, 5_000_000, 7_000_000, 100);
    let position = advance(unknown, entered, &from_low);
    assert_eq!(position, Some(5_000_100));
    let Change::Add(one) = entered.next(FromLow, ACK, BOTH) else {
        panic!("nothing is learned");
    };
    assert_eq!(one.next(FromLow, ACK, BOTH), Change::Nothing);
    assert!(!one.is_conversation());
    let far = segment(FromLow, ACK, 4_000_000_000, 7_000_000, 100);
    assert_eq!(advance([5_000_100, 0], one, &far), None);
    let Change::Add(both) = one.next(FromHigh, ACK, BOTH) else {
        panic!("nothing is learned");
    };
    assert!(both.is_conversation());
    assert_eq!(both.state(), Established);
    assert!(accepts_end(
        [5_000_100, 7_000_000],
        both,
        &segment(FromLow, RST, 5_000_100, 0, 0)
    ));
}

#[test]
fn a_flow_entered_for_a_socket_knows_who_has_sent_a_fin() {
    let entered = Seen::of_socket(FinWait, FromLow, &[FromLow]);
    // Sent again: nothing but where it stands is learned.
    let Change::Add(again) = entered.next(FromLow, FIN | ACK, BOTH) else {
        panic!("nothing is learned");
    };
    assert_eq!(again.state(), FinWait);
    let Change::Add(other) = entered.next(FromHigh, FIN | ACK, BOTH) else {
        panic!("nothing is learned");
    };
    assert_eq!(other.state(), LastAck);
    // A datagram has no number.
    assert!(Seen::of_socket(UdpStream, FromLow, &[]).is_conversation());
}
