//! UDP and ICMP, and the counts of packets and bytes.

use twheel_common::{
    counter::Counter,
    event::{Event, Reason},
    flow::{Account, Direction},
    packet::Protocols,
    rule::Timeouts,
    state::State,
};
use twheel_tests::plane::{ACK, FIN, SYN, Setup, frame};

use crate::{datagram, ended};

#[test]
fn udp_and_icmp_have_conntracks_timeouts() {
    let setup = Setup {
        protocols: Protocols::TCP.with(Protocols::UDP).with(Protocols::ICMP),
        one_way: false,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let mut timeouts = plane.plane().timeouts(0).unwrap();
    for (number, ms) in [
        (Timeouts::UDP, 30_000),
        (Timeouts::UDP_STREAM, 120_000),
        (Timeouts::ICMP, 20_000),
    ] {
        timeouts.0[number] = ms;
    }
    plane.plane().set_timeouts(0, &timeouts).unwrap();
    for v6 in [false, true] {
        let (echo, reply) = if v6 { (128, 129) } else { (8, 0) };
        // An answer without a question begins no flow.
        plane.receive(&datagram(9, true, Some(reply), v6));
        assert_eq!(plane.counters().live(), 0);
        // A question without an answer; a question with one; a conversation; a ping; and a TCP
        // connection beside them.
        plane.receive(&datagram(1, false, None, v6));
        plane.receive(&datagram(2, false, None, v6));
        plane.send(&datagram(2, true, None, v6));
        plane.receive(&datagram(3, false, None, v6));
        plane.receive(&datagram(4, false, Some(echo), v6));
        plane.pass(1_900);
        plane.send(&datagram(3, true, None, v6));
        plane.pass(200);
        plane.receive(&datagram(3, false, None, v6));
        plane.send(&datagram(4, true, Some(reply), v6));
        plane.receive(&frame(1, false, SYN));
        assert_eq!(plane.counters().live(), 5);
        let mut ends = Vec::new();
        for tenth in 1..=1_300 {
            plane.pass(100);
            for event in plane.step() {
                assert_eq!(ended(&event).0, Reason::Idle);
                ends.push((tenth, event.key.proto(), event.seen().state()));
            }
        }
        let icmp = if v6 { 58 } else { 1 };
        assert_eq!(
            ends,
            [
                (200, icmp, State::Icmp),
                (279, 17, State::Udp),
                (279, 17, State::Udp),
                (600, 6, State::SynSent),
                (1_200, 17, State::UdpStream),
            ]
        );
    }
    assert_eq!(plane.count(Counter::NoFlow), 2);
}

#[test]
fn packets_and_bytes_are_counted_each_way() {
    let setup = Setup {
        accounting: true,
        one_way: false,
        protocols: Protocols::TCP.with(Protocols::UDP),
        ..Setup::default()
    };
    let mut plane = setup.load();
    // The accounts are in the key's order of endpoints; this puts the initiator's first.
    let sent = |event: &Event| {
        let [low, high] = event.account.map(|side| (side.packets, side.bytes));
        match event.seen().initiator() {
            Direction::FromLow => [low, high],
            Direction::FromHigh => [high, low],
        }
    };
    let bytes = (frame(1, false, ACK).len() - 14) as u64;
    for (back, flags) in [
        (false, SYN),
        (true, SYN | ACK),
        (false, ACK),
        (false, ACK),
        (true, ACK),
        (false, ACK | FIN),
        (true, ACK | FIN),
        (false, ACK),
    ] {
        let frame = frame(1, back, flags);
        if back {
            plane.send(&frame);
        } else {
            plane.receive(&frame);
        }
    }
    plane.receive(&frame(2, false, SYN));
    // A packet that is ignored is counted all the same.
    plane.receive(&frame(2, false, SYN));
    // The next flow of the same key counts anew, from the answer on.
    plane.receive(&frame(1, false, SYN));
    plane.send(&frame(1, true, SYN | ACK));
    plane.receive(&datagram(7, false, None, false));
    plane.send(&datagram(7, true, None, false));
    plane.send(&datagram(7, true, None, false));
    let superseded = plane.drain();
    assert_eq!(superseded.len(), 1);
    assert_eq!(ended(&superseded[0]).0, Reason::Superseded);
    assert_eq!(sent(&superseded[0]), [(6, 6 * bytes), (3, 3 * bytes)]);
    plane.pass(600_000);
    let mut ends: Vec<_> = plane.step().iter().map(sent).collect();
    ends.sort();
    let datagrams = (28 + 20, 2 * (28 + 20));
    assert_eq!(
        ends,
        [
            // The SYN of this flow was counted for the previous one.
            [(0, 0), (1, bytes)],
            [(1, datagrams.0), (2, datagrams.1)],
            [(2, 2 * bytes), (0, 0)],
        ]
    );
    // A record that is given to another flow begins with empty accounts.
    for client in 100..1_000 {
        plane.receive(&frame(client, false, ACK));
    }
    plane.pass(600_000);
    let mut rest = plane.step();
    while rest.len() < 900 {
        rest.extend(plane.step());
    }
    assert!(rest.iter().all(|it| sent(it) == [(1, bytes), (0, 0)]));
    assert_eq!(rest.len(), 900);
}

#[test]
fn nothing_is_counted_unasked() {
    let mut plane = Setup::default().load();
    plane.receive(&frame(1, false, ACK));
    plane.pass(600_000);
    let events = plane.step();
    assert_eq!(events.len(), 1);
    assert_eq!(events[0].account, Account::default());
}
