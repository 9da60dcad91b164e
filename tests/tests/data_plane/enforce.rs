//! Packets of expired flows are refused.

use etherparse::{PacketBuilder, TcpHeader};
use twheel_common::{
    counter::Counter,
    enforce::Tombstone,
    packet::{Protocols, parse},
};
use twheel_tests::plane::{ACK, DROP, FIN, PASS, Plane, RST, SYN, Setup, TX, frame};

use crate::{Random, establish};

/// A data plane that refuses packets of expired flows.
fn enforcing() -> Plane {
    Setup {
        enforce: true,
        ..Setup::default()
    }
    .load()
}

/// Lets a flow expire and gives it this verdict.
fn expire(plane: &mut Plane, client: u32, verdict: u32) {
    establish(plane, client);
    plane.pass(60_100);
    assert_eq!(plane.step().len(), 1);
    plane.bury(&frame(client, false, ACK), verdict);
}

/// A TCP frame over IPv4 or IPv6, with data.
fn tcp_frame(v6: bool, header: TcpHeader, data: &[u8]) -> Vec<u8> {
    let mut frame = Vec::new();
    let ethernet = PacketBuilder::ethernet2([4; 6], [2; 6]);
    let ip = if v6 {
        ethernet.ipv6([1; 16], [2; 16], 9)
    } else {
        ethernet.ipv4([10, 0, 0, 1], [192, 0, 2, 1], 9)
    };
    ip.tcp_header(header).write(&mut frame, data).unwrap();
    frame
}

/// The answer to a segment: in the other direction, with this sequence number, and with this
/// acknowledgment if there is one.
fn reset_frame(v6: bool, to: &TcpHeader, seq: u32, ack: Option<u32>) -> Vec<u8> {
    let mut header = TcpHeader::new(to.destination_port, to.source_port, seq, 0);
    header.rst = true;
    header.ack = ack.is_some();
    header.acknowledgment_number = ack.unwrap_or(0);
    let mut frame = Vec::new();
    let ethernet = PacketBuilder::ethernet2([2; 6], [4; 6]);
    let ip = if v6 {
        ethernet.ipv6([2; 16], [1; 16], 64)
    } else {
        ethernet.ipv4([192, 0, 2, 1], [10, 0, 0, 1], 64)
    }
    .tcp_header(header);
    ip.write(&mut frame, &[]).unwrap();
    frame
}

#[test]
fn packets_of_a_flow_that_has_expired_are_dropped() {
    let mut plane = enforcing();
    expire(&mut plane, 1, Tombstone::DROP);
    let before = plane.counters();
    for flags in [ACK, FIN | ACK, RST, RST | ACK] {
        for back in [false, true] {
            assert_eq!(plane.verdict(&frame(1, back, flags)).0, DROP);
        }
    }
    assert_eq!(plane.count(Counter::EnforcedDropped), 8);
    assert_eq!(plane.counters().live(), 0);
    for counter in [Counter::Created, Counter::Touched, Counter::NoFlow] {
        assert_eq!(plane.count(counter), before.get(counter));
    }
    // Outgoing packets pass and begin flows as usual. No packet of a flow in the table is dropped.
    plane.send(&frame(1, true, ACK));
    plane.receive(&frame(1, false, ACK));
    assert_eq!(plane.counters().live(), 1);
    // Nor is any packet dropped of a flow that was not reported as expired.
    establish(&mut plane, 2);
}

#[test]
fn packets_of_a_flow_that_has_expired_are_answered_with_a_reset() {
    let mut plane = enforcing();
    for v6 in [false, true] {
        let mut header = TcpHeader::new(4000, 80, 1_000_000, 512);
        let segment = |header: &TcpHeader, data: &[u8]| tcp_frame(v6, header.clone(), data);
        plane.bury(
            &{
                let mut header = header.clone();
                header.ack = true;
                segment(&header, &[])
            },
            Tombstone::RESET,
        );
        (header.ack, header.acknowledgment_number) = (true, 77_000);
        // Segments with options and with more data than the answer is long, with none, and with
        // more than a page.
        for (length, fin) in [(1_400, false), (0, false), (9_000, true), (0, true)] {
            header.fin = fin;
            let packet = segment(&header, &vec![9; length]);
            let expected = reset_frame(v6, &header, 77_000, None);
            assert_eq!(plane.verdict(&packet), (TX, expected));
            header.set_options_raw(&[1; 12]).unwrap();
        }
        // Padded to the minimum length of an Ethernet frame.
        let mut padded = segment(&header, &[]);
        padded.resize(padded.len() + 6, 0);
        let expected = reset_frame(v6, &header, 77_000, None);
        assert_eq!(plane.verdict(&padded), (TX, expected));
        // The only segments without an ACK that stacks send are SYNs and RSTs.
        (header.fin, header.rst) = (false, true);
        assert_eq!(plane.verdict(&segment(&header, &[])).0, DROP);
        header.ack = false;
        assert_eq!(plane.verdict(&segment(&header, &[])).0, DROP);
    }
    assert_eq!(plane.count(Counter::EnforcedReset), 10);
    assert_eq!(plane.count(Counter::EnforcedDropped), 4);
    assert_eq!(plane.counters().live(), 0);
}

#[test]
fn what_cannot_be_answered_in_place_is_dropped() {
    let mut plane = enforcing();
    let bytes = frame(1, false, ACK);
    plane.bury(&bytes, Tombstone::RESET);
    let mut tagged = bytes.clone();
    tagged.splice(12..12, [0x81, 0, 0, 7]);
    plane.bury(&tagged, Tombstone::RESET);
    let mut options = bytes.clone();
    options[14] = 0x46;
    options[17] += 4;
    options.splice(34..34, [1; 4]);
    let mut fragment = bytes.clone();
    fragment[20] = 0x20;
    for odd in [&tagged, &options, &fragment] {
        assert_eq!(plane.verdict(odd), (DROP, odd.clone()));
    }
    assert_eq!(plane.count(Counter::EnforcedDropped), 3);
    assert_eq!(plane.verdict(&bytes).0, TX);
}

#[test]
fn a_datagram_of_a_flow_that_has_expired_is_dropped_whatever_the_verdict() {
    let mut plane = Setup {
        enforce: true,
        protocols: Protocols::TCP.with(Protocols::UDP),
        ..Setup::default()
    }
    .load();
    for (port, verdict) in [(1, Tombstone::DROP), (2, Tombstone::RESET)] {
        let mut datagram = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .udp(port, 53)
            .write(&mut datagram, b"?")
            .unwrap();
        // The tests' parser reads only TCP, so the key is taken from the table.
        plane.receive(&datagram);
        plane.pass(200_000);
        let key = plane.step()[0].key;
        plane.bury_key(key, verdict);
        // More datagrams than a source gets answers.
        for _ in 0..20 {
            assert_eq!(plane.verdict(&datagram), (DROP, datagram.clone()));
        }
    }
    assert_eq!(plane.count(Counter::EnforcedDropped), 40);
}

#[test]
fn a_syn_passes_and_ends_that_packets_are_refused() {
    let mut plane = enforcing();
    for (client, verdict) in [(1, Tombstone::DROP), (2, Tombstone::RESET)] {
        expire(&mut plane, client, verdict);
        assert_ne!(plane.verdict(&frame(client, false, ACK)).0, PASS);
        let live = plane.counters().live();
        plane.receive(&frame(client, false, SYN));
        assert_eq!(plane.counters().live(), live + 1);
        assert!(!plane.is_buried(&frame(client, false, SYN)));
        plane.pass(200_000);
        assert_eq!(plane.step().len(), 1);
        plane.receive(&frame(client, false, ACK));
        plane.pass(200_000);
        plane.step();
    }
    // An outgoing SYN begins a connection, too.
    expire(&mut plane, 3, Tombstone::RESET);
    plane.send(&frame(3, true, SYN));
    assert!(!plane.is_buried(&frame(3, false, SYN)));
    plane.receive(&frame(3, false, SYN | ACK));
    plane.pass(200_000);
    plane.step();
    // The answer to a SYN that was not seen passes.
    expire(&mut plane, 4, Tombstone::RESET);
    plane.receive(&frame(4, false, SYN | ACK));
    assert!(plane.is_buried(&frame(4, false, SYN)));
}

#[test]
fn a_source_has_so_many_answers_a_second() {
    let mut plane = enforcing();
    // Two clients of one source, and one of another.
    let clients = [1, 2, 50_001];
    for client in clients {
        plane.bury(&frame(client, false, ACK), Tombstone::RESET);
    }
    let answers = |plane: &mut Plane, client, tries| {
        let verdicts: Vec<_> = (0..tries)
            .map(|_| plane.verdict(&frame(client, false, ACK)).0)
            .collect();
        assert!(verdicts.iter().all(|it| [DROP, TX].contains(it)));
        verdicts.iter().filter(|it| **it == TX).count()
    };
    assert_eq!(answers(&mut plane, 1, 7), 7);
    assert_eq!(answers(&mut plane, 2, 20), 3);
    assert_eq!(answers(&mut plane, 50_001, 20), 10);
    // The other end of the connection is a source of its own.
    assert_eq!(plane.verdict(&frame(1, true, ACK)).0, TX);
    assert_eq!(plane.count(Counter::EnforcedLimited), 17 + 10);
    assert_eq!(plane.count(Counter::EnforcedReset), 21);
    plane.pass(100);
    assert_eq!(answers(&mut plane, 1, 20), 1);
    plane.pass(99);
    assert_eq!(answers(&mut plane, 1, 20), 0);
    plane.pass(1);
    assert_eq!(answers(&mut plane, 1, 20), 1);
    plane.pass(3_600_000);
    assert_eq!(answers(&mut plane, 1, 20), 10);
    assert_eq!(plane.count(Counter::EnforcedDropped), 0);
}

#[test]
fn whatever_comes_for_a_flow_that_has_expired_is_refused_or_passes() {
    let mut plane = Setup {
        enforce: true,
        max_flows: 32_768,
        ..Setup::default()
    }
    .load();
    let mut random = Random(77);
    let mut header = TcpHeader::new(4000, 80, 1, 512);
    header.ack = true;
    let bytes = [false, true].map(|v6| tcp_frame(v6, header.clone(), &[7; 30]));
    let mut verdicts = [0; 5];
    for round in 0..10_000 {
        let mut bytes = bytes[round % 2].clone();
        if round % 3 == 0 {
            bytes.splice(12..12, [0x81, 0, 0, 1]);
        }
        // An earlier SYN may have removed the tombstone.
        plane.bury(&bytes, Tombstone::RESET);
        // Time passes, so that each packet may be answered, and no flow is left in the table.
        plane.pass(60_100);
        plane.step();
        for _ in 0..random.below(3) {
            let at = 12 + random.below(bytes.len() as u64 - 12) as usize;
            bytes[at] = random.below(256) as u8;
        }
        if random.below(10) == 0 {
            bytes.truncate(14 + random.below(bytes.len() as u64 - 14) as usize);
        }
        let (verdict, out) = plane.verdict(&bytes);
        verdicts[verdict as usize] += 1;
        match verdict {
            TX => {
                let (to, from) = (parse(&bytes[..]).unwrap(), parse(&out[..]).unwrap());
                assert_eq!((to.key, from.flags & RST), (from.key, RST));
                assert_ne!(to.direction, from.direction);
                assert!([54, 74].contains(&out.len()));
            }
            _ => assert_eq!(out, bytes),
        }
    }
    assert_eq!(verdicts[0] + verdicts[4], 0);
    assert!(verdicts[1..4].iter().all(|it| *it > 1_000), "{verdicts:?}");
}

#[test]
fn nothing_is_refused_unless_that_is_asked_for() {
    let mut plane = Setup::default().load();
    expire(&mut plane, 1, Tombstone::DROP);
    let bytes = frame(1, false, ACK);
    assert_eq!(plane.verdict(&bytes), (PASS, bytes));
    assert_eq!(plane.counters().live(), 1);
    for counter in [
        Counter::EnforcedDropped,
        Counter::EnforcedReset,
        Counter::EnforcedLimited,
    ] {
        assert_eq!(plane.count(counter), 0);
    }
}

#[test]
fn a_verdict_that_nobody_knows_lets_packets_pass() {
    let mut plane = enforcing();
    for verdict in [0, 3, u32::MAX] {
        plane.bury(&frame(1, false, ACK), verdict);
        plane.receive(&frame(1, false, ACK));
        plane.pass(60_100);
        plane.step();
    }
}
