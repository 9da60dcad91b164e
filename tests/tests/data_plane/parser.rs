//! How packets are parsed, and which are tracked: the kernel parses as the host does.

use std::collections::{HashMap, HashSet};

use twheel_common::{
    counter::Counter,
    packet::{Skip, parse},
    state::Seen,
};
use twheel_tests::plane::{ACK, Setup, frame};

use crate::{ONE_WAY, Random, datagram};

#[test]
fn what_is_not_asked_for_is_not_tracked() {
    let mut plane = Setup::default().load();
    plane.receive(&datagram(1, false, None, false));
    plane.receive(&datagram(1, false, Some(128), true));
    assert_eq!(plane.count(Counter::NotTracked), 2);
    assert_eq!(plane.counters().live(), 0);
}

#[test]
fn every_skip_is_counted_by_its_reason() {
    let mut plane = Setup::default().load();
    let good = frame(1, false, ACK);
    let with = |at: usize, value: u8| {
        let mut frame = good.clone();
        frame[at] = value;
        frame
    };
    for (frame, counter) in [
        (with(13, 6), Counter::NotIp),
        (with(23, 17), Counter::NotTracked),
        (with(21, 1), Counter::Fragment),
        (good[..53].to_vec(), Counter::Truncated),
        (with(46, 0x40), Counter::Malformed),
        (with(47, 0), Counter::BadFlags),
    ] {
        let before = plane.count(counter);
        plane.receive(&frame);
        plane.send(&frame);
        assert_eq!(plane.count(counter), before + 2, "{}", counter.name());
    }
    assert_eq!(plane.count(Counter::Created), 0);
}

#[test]
fn the_kernel_parses_as_the_host_does() {
    let setup = Setup {
        max_flows: 1 << 17,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let mut random = Random(42);
    let mut expected: HashMap<u32, u64> = HashMap::new();
    let mut keys = HashSet::new();
    for round in 0..20_000u32 {
        let mut bytes = frame(round, round % 2 == 0, ACK);
        if round % 3 == 0 {
            bytes.splice(12..12, [0x81, 0, 0, 1]);
        }
        if round % 5 == 0 {
            bytes = ipv6(round);
        }
        for _ in 0..random.below(3) {
            let at = 12 + random.below(bytes.len() as u64 - 12) as usize;
            bytes[at] = random.below(256) as u8;
        }
        if random.below(10) == 0 {
            bytes.truncate(14 + random.below(bytes.len() as u64 - 14) as usize);
        }
        let counter = match parse(bytes.as_slice()) {
            Ok(segment) if keys.contains(&segment.key) => Counter::Touched,
            Ok(segment) if Seen::first(segment.direction, segment.flags, ONE_WAY).is_some() => {
                keys.insert(segment.key);
                Counter::Created
            }
            Ok(_) => Counter::NoFlow,
            Err(Skip::NotIp) => Counter::NotIp,
            Err(Skip::NotTracked) => Counter::NotTracked,
            Err(Skip::Fragment) => Counter::Fragment,
            Err(Skip::Truncated) => Counter::Truncated,
            Err(Skip::Malformed) => Counter::Malformed,
            Err(Skip::BadFlags) => Counter::BadFlags,
        };
        *expected.entry(counter as u32).or_default() += 1;
        plane.receive(&bytes);
        assert_eq!(
            plane.count(counter),
            expected[&(counter as u32)],
            "{} expected for {bytes:02x?}",
            counter.name()
        );
    }
    plane.pass(60_100);
    let found: HashSet<_> = plane.step().iter().map(|event| event.key).collect();
    assert_eq!(found, keys, "the keys differ in some byte");
}

fn ipv6(client: u32) -> Vec<u8> {
    let mut source = [0xfd; 16];
    source[12..].copy_from_slice(&client.to_be_bytes());
    let mut frame = Vec::new();
    etherparse::PacketBuilder::ethernet2([2; 6], [4; 6])
        .ipv6(source, [0xfe; 16], 64)
        .tcp(1024, 80, 1, 1024)
        .ack(1)
        .write(&mut frame, b"payload")
        .unwrap();
    frame
}
