//! States, beside conntrack's table; and what a RST must be like.
#![allow(missing_docs)]

use std::collections::BTreeSet;

use twheel_common::{
    flow::{Direction, Direction::*, FlowKey},
    numbers::{END_WINDOW, accepts_end, advance},
    packet::{
        Segment,
        datagram::{ANSWER, QUERY, UDP},
        tcp::{ACK, FIN, RST, SYN},
    },
    rule::{Rule, RuleFlags, Timeouts},
    state::{
        Change, Known, MAX_NAMESPACES, Seen, SideWay, State, State::*, View, Way, elsewhere,
        is_elsewhere,
    },
    tracked::Tracked,
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

/// Two ends that number their segments as TCP does, and what is seen of them.
#[derive(Clone, Copy)]
struct Wire {
    /// The next number of each.
    next: [u32; 2],
    view: View,
    flow: Option<Tracked>,
}

impl Wire {
    fn new(view: View) -> Self {
        Self {
            // One wraps.
            next: [u32::MAX - 1, 9_000_000],
            view,
            flow: None,
        }
    }

    /// What the next segment of this end would be.
    fn segment(&self, direction: Direction, flags: u8, length: u32) -> Segment {
        let other = self.next[direction.reverse() as usize];
        let ack = if flags & ACK != 0 { other } else { 0 };
        segment(direction, flags, self.next[direction as usize], ack, length)
    }

    fn send(&mut self, direction: Direction, flags: u8, length: u32) -> Change {
        let segment = self.segment(direction, flags, length);
        self.next[direction as usize] = segment.end;
        self.see(&segment)
    }

    /// Somebody sends this, not the end that it claims to be of.
    fn see(&mut self, segment: &Segment) -> Change {
        match &mut self.flow {
            Some(flow) => flow.see(segment, self.view),
            None => {
                let flow = Tracked::first(segment, self.view).expect("a first segment");
                self.flow = Some(flow);
                Change::Add(flow.seen)
            }
        }
    }

    fn seen(&self) -> Seen {
        self.flow.expect("a flow").seen
    }

    fn state(&self) -> State {
        self.seen().state()
    }
}

/// After these segments.
fn wire(segments: &[(Direction, u8)], view: View) -> Wire {
    let mut wire = Wire::new(view);
    for (direction, flags) in segments {
        wire.send(*direction, *flags, 0);
    }
    wire
}

/// What is seen of a flow after these segments.
fn after(segments: &[(Direction, u8)]) -> Seen {
    seen(segments, BOTH)
}

fn seen(segments: &[(Direction, u8)], view: View) -> Seen {
    wire(segments, view).seen()
}

const HANDSHAKE: [(Direction, u8); 3] = [(FromLow, SYN), (FromHigh, SYN | ACK), (FromLow, ACK)];

fn established() -> Wire {
    wire(&HANDSHAKE, BOTH)
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
    let opens = [(FromLow, SYN), (FromHigh, SYN)];
    let mut open = wire(&opens, BOTH);
    assert_eq!(open.state(), SynSent2);
    // The SYN is sent again, with an ACK.
    open.next = open.next.map(|next| next.wrapping_sub(1));
    let acks = [0, 1].map(|end| open.next[1 - end].wrapping_add(1));
    for (end, ack, state) in [(FromLow, acks[0], SynRecv), (FromHigh, acks[1], SynRecv)] {
        let again = segment(end, SYN | ACK, open.next[end as usize], ack, 0);
        open.see(&again);
        assert_eq!(open.state(), state);
    }
    open.next = open.next.map(|next| next.wrapping_add(1));
    open.send(FromLow, ACK, 0);
    assert_eq!(open.state(), Established);
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

/// How a connection that the low end begins comes into each state.
const WAYS: [(State, &[(Direction, u8)]); 9] = [
    (SynSent, &[(FromLow, SYN)]),
    (SynRecv, &[(FromLow, SYN), (FromHigh, SYN | ACK)]),
    (Established, &HANDSHAKE),
    (
        FinWait,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, FIN | ACK),
        ],
    ),
    (
        CloseWait,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, FIN | ACK),
            (FromHigh, ACK),
        ],
    ),
    (
        LastAck,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, FIN | ACK),
            (FromHigh, FIN | ACK),
        ],
    ),
    (
        TimeWait,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, FIN | ACK),
            (FromHigh, FIN | ACK),
            (FromLow, ACK),
        ],
    ),
    (
        Close,
        &[
            (FromLow, SYN),
            (FromHigh, SYN | ACK),
            (FromLow, ACK),
            (FromLow, RST),
        ],
    ),
    (SynSent2, &[(FromLow, SYN), (FromHigh, SYN)]),
];

#[test]
fn every_transition_is_conntracks() {
    for (column, (state, way)) in WAYS.into_iter().enumerate() {
        // Begun by either end.
        for turned in [false, true] {
            let turn = |it: Direction| if turned { it.reverse() } else { it };
            let way: Vec<_> = way
                .iter()
                .map(|(end, flags)| (turn(*end), *flags))
                .collect();
            let wire = wire(&way, BOTH);
            assert_eq!(wire.state(), state);
            for (reply, end) in [FromLow, FromHigh].map(turn).into_iter().enumerate() {
                for (row, flags) in [SYN, SYN | ACK, FIN | ACK, ACK].into_iter().enumerate() {
                    let expected = CONNTRACK[reply][row].split(' ').nth(column).unwrap();
                    let mut wire = wire;
                    let change = wire.send(end, flags, 0);
                    let what = format!("{state:?}, row {row}, reply {reply}: {change:?}");
                    if flags == SYN && [TimeWait, Close].contains(&state) {
                        // A new life waits for its answer, in either direction.
                        assert!(matches!(change, Change::Doubt(..)), "{what}");
                        assert_eq!(wire.state(), state);
                        let change = wire.send(end.reverse(), SYN | ACK, 0);
                        assert!(matches!(change, Change::NewGeneration(_)), "{what}");
                        assert_eq!((wire.state(), wire.seen().initiator()), (SynRecv, end));
                        continue;
                    }
                    let names = ["SS", "SR", "ES", "FW", "CW", "LA", "TW", "CL", "S2"];
                    let found = match change {
                        Change::Ignored => "IG",
                        _ => names[wire.state() as usize],
                    };
                    let expected = match expected {
                        "IV" => "IG",
                        other => other,
                    };
                    // A FIN of the end that has sent one is no end of the other.
                    let again =
                        flags == FIN | ACK && reply == 0 && [FinWait, CloseWait].contains(&state);
                    if again {
                        assert_eq!(change, Change::Nothing, "{what}");
                        continue;
                    }
                    // Whoever has sent the last FIN does not acknowledge it.
                    let own =
                        flags == ACK && [(FinWait, 0), (LastAck, 1)].contains(&(state, reply));
                    if own {
                        assert_eq!(change, Change::Nothing, "{what}");
                        continue;
                    }
                    // A second SYN of another number.
                    let second = flags == SYN && [SynSent, SynSent2].contains(&state);
                    if second && found == "IG" {
                        continue;
                    }
                    assert_eq!(found, expected, "{what}");
                }
                let mut wire = wire;
                // Who has heard nothing yet acknowledges nothing.
                let flags = if state == SynSent && reply == 0 {
                    RST
                } else {
                    RST | ACK
                };
                let change = wire.send(end, flags, 0);
                assert_eq!(wire.state(), Close, "{state:?} {change:?}");
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
fn a_syn_on_a_closed_flow_is_another_flow_once_it_is_answered() {
    let mut wire = wire(&[(FromLow, SYN), (FromHigh, RST | ACK)], BOTH);
    assert_eq!(wire.state(), Close);
    wire.flow.as_mut().unwrap().seen = wire.seen().posted();
    let syn = wire.segment(FromHigh, SYN, 0);
    assert!(matches!(wire.send(FromHigh, SYN, 0), Change::Doubt(..)));
    assert_eq!(wire.state(), Close);
    // Sent again it keeps nothing alive.
    assert_eq!(wire.see(&syn), Change::Ignored);
    let wrong = segment(FromLow, SYN | ACK, 77, syn.end.wrapping_add(1), 0);
    assert_eq!(wire.see(&wrong), Change::Ignored);
    let change = wire.send(FromLow, SYN | ACK, 0);
    assert!(matches!(change, Change::NewGeneration(_)), "{change:?}");
    assert_eq!((wire.state(), wire.seen().initiator()), (SynRecv, FromHigh));
    assert!(wire.seen().is_posted(), "its link is still in use");
    wire.send(FromHigh, ACK, 0);
    assert_eq!(wire.state(), Established);
    // But not on a live one.
    assert_eq!(established().send(FromLow, SYN, 0), Change::Ignored);
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
        packets: 1,
    }
}

#[test]
fn who_answers_a_syn_as_if_it_were_none_had_a_connection_before() {
    for from in [FromLow, FromHigh] {
        let syn = segment(from, SYN, 500, 0, 0);
        let mut flow = Tracked::first(&syn, BOTH).unwrap();
        // The answer to the SYN, but for its flag: the SYN/ACK may still come.
        let early = segment(from.reverse(), ACK, 7, 501, 0);
        assert_eq!(flow.see(&early, BOTH), Change::Ignored);
        // Its sender says nothing of what it sent before.
        let own = segment(from, ACK, 90_000, 7, 0);
        assert_eq!(flow.see(&own, BOTH), Change::Ignored);
        // Nor does one side alone: where it says the initiator is, that one must go on.
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
        // Who is here is believed at once.
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
        // Both have their numbers.
        assert_eq!(flow.see(&own, BOTH), Change::Nothing);
        let reset = flow.see(&segment(from, RST, 90_000, 0, 0), BOTH);
        assert!(matches!(reset, Change::Add(_)), "{reset:?}");
        assert_eq!(flow.seen.state(), Close);
        // By the way of the SYN nobody answers it.
        let mut flow = Tracked::first(&syn, BOTH).unwrap();
        flow.known.is_own_way = false;
        assert_eq!(flow.see(&challenge, BOTH), Change::SameWay);
        let mut flow = asked;
        flow.see(&challenge, BOTH);
        flow.known.is_own_way = false;
        assert_eq!(flow.see(&own, BOTH), Change::SameWay);
    }
}

/// Who answers for a source that is none has to guess the number.
#[test]
fn a_handshake_ends_with_the_number_of_its_answer() {
    for (data, window) in [(0, 0), (100, 16_384)] {
        for missing in [0, 1, 100, 16_384, 16_385, u32::MAX] {
            let mut flow = Tracked::first(&segment(FromLow, SYN, 99, 0, 0), BOTH).unwrap();
            flow.see(&segment(FromHigh, SYN | ACK, 70_000, 100, 0), BOTH);
            // It may send before its answer is acknowledged.
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
    // The first megabyte of each was overtaken by the next, and comes late.
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
    // The rest of it is there; each acknowledges the other.
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
        assert!(Timeouts::number(Seen(state as u32)) < Timeouts::COUNT);
    }
}

#[test]
fn what_is_not_answered_is_waited_for_no_longer_than_that() {
    let mut timeouts = Timeouts([50; Timeouts::COUNT]);
    let seen = Seen::first(FromLow, ACK, BOTH).unwrap();
    for (retrans, stalled) in [(49, 49), (50, 50), (51, 50)] {
        timeouts.0[Timeouts::RETRANS] = retrans;
        assert_eq!(timeouts.of(seen), 50);
        assert_eq!(timeouts.of(seen.stalled(true)), stalled);
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
        panic!("an answer");
    };
    assert_eq!(answered.state(), Udp);
    let Change::AddIfItLasts(stream) = next(answered, FromHigh, UDP) else {
        panic!("a stream");
    };
    assert_eq!(stream.state(), UdpStream);
    for direction in [FromLow, FromHigh] {
        assert_eq!(next(stream, direction, UDP), Change::Nothing);
        assert_eq!(next(Seen::DEAD, direction, UDP), Change::Ended);
    }
    assert!(stream.is_established(false) && !answered.is_established(false));
    assert!(!stream.is_closed());
    assert_eq!(Seen::first(FromLow, ANSWER, BOTH), None, "to nothing");
    let ping = Seen::first(FromLow, QUERY, BOTH).unwrap();
    assert_eq!(ping.state(), Icmp);
    let Change::Add(answered) = next(ping, FromHigh, ANSWER) else {
        panic!("an answer");
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

/// A flow that was entered for a socket in this state, and nothing else is known of it.
fn entered(state: State, initiator: Direction, finished: &[Direction]) -> Tracked {
    Tracked {
        seen: Seen::of_socket(state, initiator, finished),
        known: Known {
            is_own_way: true,
            is_local: false,
            ..Known::default()
        },
    }
}

#[test]
fn a_flow_entered_for_a_socket_learns_where_its_sides_stand() {
    let mut flow = entered(Established, FromHigh, &[]);
    assert_eq!(flow.seen.state(), Established);
    assert_eq!(flow.seen.initiator(), FromHigh);
    let seen = flow.seen;
    assert!(seen.is_replied() && seen.is_pickup() && !seen.is_conversation());
    // A FIN or RST has no number to be compared with.
    for flags in [RST, FIN | ACK] {
        let end = segment(FromLow, flags, 5_000_000, 7_000_000, 0);
        assert_eq!(flow.see(&end, BOTH), Change::Ignored);
    }
    // What the first side says last tells where both stand, until the other one says so, too.
    let from_low = segment(FromLow, ACK, 5_000_000, 7_000_000, 100);
    let from_high = segment(FromHigh, ACK, 7_000_000, 5_000_100, 0);
    let forged = segment(FromLow, ACK, 4_000_000_000, 3_000_000_000, 100);
    assert!(matches!(flow.see(&from_low, BOTH), Change::Places(_)));
    assert_eq!(flow.known.positions, [5_000_100, 7_000_000]);
    assert!(!flow.seen.is_conversation());
    assert_eq!(flow.see(&forged, BOTH), Change::Nothing);
    assert_eq!(flow.known.positions, [4_000_000_100, 3_000_000_000]);
    assert_eq!(flow.see(&from_high, BOTH), Change::Ignored);
    assert_eq!(flow.see(&from_low, BOTH), Change::Nothing);
    assert_eq!(flow.known.positions, [5_000_100, 7_000_000]);
    assert!(matches!(flow.see(&from_high, BOTH), Change::Add(_)));
    assert_eq!(flow.see(&forged, BOTH), Change::Nothing);
    assert_eq!(flow.known.positions, [5_000_100, 7_000_000]);
    assert!(flow.seen.is_conversation());
    assert_eq!(flow.seen.state(), Established);
    let reset = segment(FromLow, RST, 5_000_100, 0, 0);
    assert!(matches!(flow.see(&reset, BOTH), Change::Add(_)));
    assert_eq!(flow.seen.state(), Close);
}

#[test]
fn a_flow_entered_for_a_socket_knows_who_has_sent_a_fin() {
    let mut flow = entered(FinWait, FromLow, &[FromLow]);
    // Of a side whose place is not known a FIN says nothing, but an ACK says where it stands.
    let from_low = segment(FromLow, ACK, 5_000_000, 7_000_000, 0);
    flow.see(&from_low, BOTH);
    assert_eq!(flow.seen.state(), FinWait);
    let from_high = segment(FromHigh, ACK, 7_000_000, 5_000_000, 0);
    flow.see(&from_high, BOTH);
    let fin = segment(FromHigh, FIN | ACK, 7_000_000, 5_000_000, 0);
    flow.see(&fin, BOTH);
    assert_eq!(flow.seen.state(), LastAck);
    // A datagram has no number.
    assert!(Seen::of_socket(UdpStream, FromLow, &[]).is_conversation());
}

/// Both ends go on: a request and its answer.
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
    assert_eq!(real.state(), Close, "nobody goes on after that");

    for flags in [RST, RST | ACK] {
        for distance in [1, END_WINDOW] {
            let mut forged = established();
            talk(&mut forged);
            let mut reset = forged.segment(FromHigh, flags, 0);
            reset.seq = reset.seq.wrapping_add(distance);
            assert!(matches!(forged.see(&reset), Change::Add(_)));
            assert_eq!(forged.state(), Close);
            // One end alone proves nothing: it may not have heard.
            for _ in 0..3 {
                forged.send(FromLow, ACK, 100);
                assert_eq!(forged.state(), Close);
            }
            forged.send(FromHigh, ACK, 50);
            assert_eq!(forged.state(), Established);
            assert!(forged.seen().is_conversation());
            // Nor do many, or a SYN, lead it away.
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
            // And so again.
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
        // The real ends count.
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
    let (inside, outside) = (Way::of(2, 2), Way::of(3, 3));
    // What comes in and goes out came by where it came in; this host's own by none.
    assert_eq!(Way::of(3, 2), inside);
    assert_eq!(Way::of(3, 0), Way::LOCAL);
    for side in [FromLow, FromHigh] {
        let other = side.reverse();
        let allows = |known: Way, way: Way, direction, is_lenient| {
            SideWay::of(known, side).allows(way, direction, is_lenient)
        };
        for is_lenient in [false, true] {
            // The side that was seen, by where it was seen; or by another if it may have several.
            assert!(allows(inside, inside, side, is_lenient));
            assert_eq!(allows(inside, outside, side, is_lenient), is_lenient);
            // This host's own packets are nobody else's, and it sends none that come from outside.
            assert!(allows(inside, Way::LOCAL, side, is_lenient));
            assert!(!allows(Way::LOCAL, outside, side, is_lenient));
            assert!(allows(Way::LOCAL, Way::LOCAL, side, is_lenient));
            // The other one by all others.
            assert!(allows(inside, outside, other, is_lenient));
            assert!(allows(inside, Way::LOCAL, other, is_lenient));
            assert!(!allows(inside, inside, other, is_lenient));
            assert!(!allows(Way::LOCAL, Way::LOCAL, other, is_lenient));
            assert!(allows(Way::LOCAL, outside, other, is_lenient));
            for direction in [side, other] {
                assert!(SideWay::ANY.allows(inside, direction, is_lenient));
                // By the loopback interface both sides send, and nobody outside.
                let loopback = SideWay::of(Way::LOOPBACK, side);
                assert!(!loopback.allows(inside, direction, is_lenient));
                assert!(loopback.allows(Way::LOCAL, direction, is_lenient));
                for known in [SideWay::of(inside, side), loopback] {
                    assert!(known.allows(Way::LOOPBACK, direction, is_lenient));
                }
            }
        }
        assert!(!SideWay::ANY.is_of(side));
        assert!(SideWay::of(inside, side).is_of(side) && !SideWay::of(inside, side).is_of(other));
    }
    assert_eq!([0, 7].map(|origin| Way::of(1, origin)), [Way::LOOPBACK; 2]);
    // What is made in another network namespace: nobody in a third has made it, and it is none of this one's.
    let [there, third] = [0, MAX_NAMESPACES - 1].map(elsewhere);
    let made = Way::of(there | 2, there);
    for side in [Direction::FromLow, Direction::FromHigh] {
        let known = SideWay::of(made, side);
        assert!(known.allows(made, side, false));
        assert!(!known.allows(Way::of(third | 2, third), side, false));
        assert!(known.allows(Way::of(third | 2, third), side.reverse(), false));
        assert!(known.is_of(side) && !made.is_local());
    }
    let numbers = [there, there | 2, third, third | 2];
    assert!(numbers.into_iter().all(is_elsewhere) && !is_elsewhere(2));
    assert_eq!(BTreeSet::from(numbers).len(), 4);
}

/// What this host sends does not come in: what seemed to be of it was forged.
#[test]
fn this_host_disproves_what_came_in_by_its_name() {
    let outside = Way::of(3, 3);
    for side in [FromLow, FromHigh] {
        let disproved =
            |known, way, direction| SideWay::of(known, side).is_disproved_by(way, direction);
        assert!(disproved(outside, Way::LOCAL, side));
        assert!(!disproved(outside, Way::LOCAL, side.reverse()));
        for direction in [side, side.reverse()] {
            assert!(disproved(outside, Way::LOOPBACK, direction));
            for known in [Way::LOCAL, Way::LOOPBACK] {
                assert!(!disproved(known, Way::LOCAL, direction));
            }
            assert!(!disproved(outside, Way::of(2, 2), direction));
            assert!(!SideWay::ANY.is_disproved_by(Way::LOCAL, direction));
        }
        // A SYN or an ACK that seemed to be of this host; its own says what begins.
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
        // A conversation stands.
        let mut flow = established().flow.unwrap();
        let change = flow.see_disproved(&segment(FromLow, SYN, 5_000, 0, 0), BOTH);
        assert_eq!(change, Change::Ignored);
    }
}

#[test]
fn random_numbers_hardly_do_anything() {
    // What remains for whoever guesses: a window of 2^19 of 2^32, for a FIN or RST; and that is revoked.
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
    // 2 of 6 kinds are RSTs, one of 2^13 and one of 2^14; FINs must acknowledge, too.
    let expected = TRIES / 6 / 8192 + TRIES / 6 / 16384;
    assert!((expected / 2..=expected * 2).contains(&ends), "{ends}");
    // Of 2^8 the number, of 2^6 the acknowledgment.
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

/// Who is outside forges both ends of what is over; a packet of this host's does not come from there.
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
                panic!("it is a candidate");
            };
            let answer = segment(from.reverse(), SYN | ACK, 70_000, 9_001, 0);
            let next = |is_own_way| candidate.next(&answer, &known(is_own_way, number), BOTH);
            assert_eq!(next(false), Change::SameWay);
            assert!(matches!(next(true), Change::NewGeneration(_)));
        }
    }
}

/// One acknowledgment may be forged, and says where both sides are.
#[test]
fn an_exact_reset_ends_only_what_both_sides_have_told_of() {
    let mut flow = Tracked::first(&segment(FromLow, ACK, 100, 200, 0), BOTH).unwrap();
    let reset = segment(FromLow, RST, 100, 0, 0);
    flow.see(&reset, BOTH);
    assert_eq!(flow.seen.state(), Close);
    // It does not go at once, as one does that was refused.
    assert_eq!(Timeouts::number(flow.seen), Close as usize);
    assert_ne!(
        flow.see(&segment(FromLow, SYN, 9_000, 0, 0), BOTH),
        Change::Ended
    );
    // Who has said nothing has it from the other side.
    let mut flow = Tracked::first(&segment(FromLow, ACK, 100, 200, 0), BOTH).unwrap();
    flow.see(&segment(FromHigh, RST, 200, 0, 0), BOTH);
    assert_eq!(Timeouts::number(flow.seen), Timeouts::REFUSED);
    // Both are known, and one has the number that the other waits for: nobody doubts it.
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
