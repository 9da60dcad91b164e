//! States, compared with conntrack's table.

use twheel_common::{
    flow::Direction::{self, *},
    packet::tcp::{ACK, FIN, RST, SYN},
    state::{Change, Seen, State::*},
};

use crate::{BOTH, ONE_WAY, STRICT, WAYS, after, established, seen, segment, wire};

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

/// `tcp_conntracks` of `net/netfilter/nf_conntrack_proto_tcp.c`, without its first column (no
/// flow): original and reply; syn, syn/ack, fin, ack. Two letters for each state.
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
                        // A new flow waits for its answer, in either direction.
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
                    // A second FIN of the same end is not the other end's.
                    let again =
                        flags == FIN | ACK && reply == 0 && [FinWait, CloseWait].contains(&state);
                    if again {
                        assert_eq!(change, Change::Nothing, "{what}");
                        continue;
                    }
                    // The sender of the last FIN does not acknowledge it.
                    let own =
                        flags == ACK && [(FinWait, 0), (LastAck, 1)].contains(&(state, reply));
                    if own {
                        assert_eq!(change, Change::Nothing, "{what}");
                        continue;
                    }
                    // A second SYN with another number.
                    let second = flags == SYN && [SynSent, SynSent2].contains(&state);
                    if second && found == "IG" {
                        continue;
                    }
                    assert_eq!(found, expected, "{what}");
                }
                let mut wire = wire;
                // An end that has received nothing acknowledges nothing.
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
    // Since the other direction would be seen, the responder has not answered.
    assert_eq!(after(&handshake).state(), SynSent);
    assert_eq!(Seen::first(FromHigh, SYN | ACK, BOTH), None);
    let client = seen(&handshake, ONE_WAY);
    assert_eq!(client.state(), Established);
    let responder = seen(&[(FromHigh, SYN | ACK), (FromHigh, ACK)], ONE_WAY);
    assert_eq!(responder.state(), Established);
    assert_eq!(
        responder.initiator(),
        FromLow,
        "the sender of a SYN/ACK is the responder"
    );
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
    // When it is sent again, it does not keep the flow alive.
    assert_eq!(wire.see(&syn), Change::Ignored);
    let wrong = segment(FromLow, SYN | ACK, 77, syn.end.wrapping_add(1), 0);
    assert_eq!(wire.see(&wrong), Change::Ignored);
    let change = wire.send(FromLow, SYN | ACK, 0);
    assert!(matches!(change, Change::NewGeneration(_)), "{change:?}");
    assert_eq!((wire.state(), wire.seen().initiator()), (SynRecv, FromHigh));
    assert!(wire.seen().is_posted(), "the flow is still in the inbox");
    wire.send(FromHigh, ACK, 0);
    assert_eq!(wire.state(), Established);
    // But not on a live flow.
    assert_eq!(established().send(FromLow, SYN, 0), Change::Ignored);
}
