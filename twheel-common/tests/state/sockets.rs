//! Flows that were entered for a socket.

use twheel_common::{
    flow::Direction::{self, *},
    packet::tcp::{ACK, FIN, RST},
    state::{
        Change, Known, Seen,
        State::{self, *},
    },
    tracked::Tracked,
};

use crate::{BOTH, segment};

/// A flow that was entered for a socket in this state; nothing else is known of it.
fn entered(state: State, initiator: Direction, finished: &[Direction]) -> Tracked {
    Tracked {
        seen: Seen::of_socket(state, initiator, finished),
        known: Known {
            is_own_way: true,
            is_local: false,
            ..Known::default()
        },
        lasts: false,
    }
}

#[test]
fn a_flow_entered_for_a_socket_learns_where_its_sides_stand() {
    let mut flow = entered(Established, FromHigh, &[]);
    assert_eq!(flow.seen.state(), Established);
    assert_eq!(flow.seen.initiator(), FromHigh);
    let seen = flow.seen;
    assert!(seen.is_replied() && seen.is_pickup() && !seen.is_conversation());
    // There is no number to compare a FIN or RST with.
    for flags in [RST, FIN | ACK] {
        let end = segment(FromLow, flags, 5_000_000, 7_000_000, 0);
        assert_eq!(flow.see(&end, BOTH), Change::Ignored);
    }
    // The latest segment of the first side gives the positions of both, until the other side
    // confirms them.
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
    // A FIN from a side of unknown position is not believed, but an ACK gives its position.
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
