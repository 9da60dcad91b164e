//! What a full ring delays, and which events userspace gets.

use std::collections::HashSet;

use twheel_common::{
    counter::Counter,
    event::{BATCH, Event},
    packet::parse,
    state::State,
    step::Outcome,
};
use twheel_tests::plane::{ACK, RST, SYN, Setup, frame};

#[test]
fn a_full_ring_delays_evictions_and_loses_none() {
    let setup = Setup {
        ring_bytes: 4096,
        ..Setup::default()
    };
    let mut plane = setup.load();
    for client in 0..1_000 {
        plane.receive(&frame(client, false, SYN));
    }
    plane.pass(60_100);
    let (outcome, step) = plane.call(1_000);
    assert_eq!(outcome, Outcome::RingFull);
    // As many events as fit into the ring, in records with the ring's headers.
    let batch = BATCH as u64;
    let room = 4096 / (size_of::<Event>() as u64 * batch + 8) * batch;
    assert_eq!(u64::from(step.expired), room, "{step:?}");
    // The next flows have ended, too, and wait: they still take capacity of the table.
    let before = plane.counters().live();
    assert_eq!(before, 1_000 - room - batch);
    assert_eq!(plane.plane().tracked().unwrap(), 1_000 - room);
    let (outcome, step) = plane.call(1_000);
    assert_eq!(
        (outcome, step.expired),
        (Outcome::RingFull, 0),
        "a flow was evicted without an event"
    );
    assert_eq!(plane.counters().live(), before);
    let mut keys: Vec<_> = plane.drain().iter().map(|event| event.key).collect();
    keys.extend(plane.step().iter().map(|event| event.key));
    assert_eq!(keys.len(), 1_000);
    assert_eq!(keys.iter().collect::<HashSet<_>>().len(), 1_000, "twice");
    assert_eq!(plane.counters().live(), 0);
    assert!(plane.count(Counter::RingFull) >= 2);
}

#[test]
fn a_million_flows_due_at_once_are_all_reported() {
    const FLOWS: u32 = 1_000_000;
    let setup = Setup {
        max_flows: FLOWS,
        ring_bytes: 64 << 10,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let mut bytes = frame(0, false, SYN);
    for client in 0..FLOWS {
        bytes[26..30].copy_from_slice(&(0x0a00_0000 + client).to_be_bytes());
        plane.receive(&bytes);
    }
    // Even so, a window may be full: docs/design.md, "Load". Then a half-open flow of the window is
    // evicted and reported.
    let refused = plane.count(Counter::WindowFull);
    let evicted = plane.count(Counter::Evicted);
    assert!(
        refused + evicted < 10,
        "{refused} refused, {evicted} evicted"
    );
    let live = u64::from(FLOWS) - refused - evicted;
    assert_eq!(plane.counters().live(), live);
    plane.pass(60_100);
    let mut seen = vec![false; FLOWS as usize];
    for event in plane.step() {
        let source = event.key.sender(event.seen().initiator()).ip();
        let std::net::IpAddr::V4(source) = source else {
            panic!("not IPv4")
        };
        let client = (source.to_bits() - 0x0a00_0000) as usize;
        assert!(
            !std::mem::replace(&mut seen[client], true),
            "{client} reported twice"
        );
    }
    let lost = seen.iter().filter(|seen| !**seen).count() as u64;
    assert_eq!(lost, refused, "some events were lost");
    assert_eq!(plane.counters().live(), 0);
    assert_eq!(plane.count(Counter::EventsLost), 0);
}

#[test]
fn userspace_reads_the_table() {
    let mut plane = Setup::default().load();
    let flows = plane.plane().flows().unwrap();
    assert_eq!(flows.iter().count(), 0);
    for client in 0..1_000 {
        plane.at(1_000_000 + u64::from(client));
        plane.receive(&frame(client, false, SYN));
    }
    plane.at(1_002_000);
    for client in 0..500 {
        plane.receive(&frame(client, false, RST));
    }
    let mut seen: Vec<_> = flows.iter().collect();
    seen.sort_by_key(|flow| flow.created);
    assert_eq!(seen.len(), 1_000);
    for (client, flow) in seen.iter().enumerate() {
        let wanted = parse(frame(client as u32, false, SYN).as_slice()).unwrap();
        assert_eq!(flow.key, wanted.key);
        assert_eq!(flow.created, 1_000_000 + client as u32);
        let (stamp, state) = match client {
            0..500 => (1_002_000, State::Close),
            _ => (flow.created, State::SynSent),
        };
        assert_eq!(
            (flow.word.stamp(), flow.word.seen().state()),
            (stamp, state)
        );
        assert_eq!(flows.get(flow.index), Some(*flow));
    }
    plane.pass(60_100);
    plane.step();
    assert_eq!(flows.iter().count(), 0);
    assert_eq!(plane.plane().tracked().unwrap(), 0);
}

#[test]
fn diagnostics_come_by_level() {
    let mut before = 0;
    for log_level in 0..=5 {
        let setup = Setup {
            log_level,
            ..Setup::default()
        };
        let mut plane = setup.load();
        let map = plane.plane().bpf_mut().take_map("AYA_LOGS").unwrap();
        let mut ring = aya::maps::RingBuf::try_from(map).unwrap();
        plane.receive(&frame(1, false, SYN));
        plane.receive(&frame(1, false, ACK));
        plane.step();
        let mut records = 0;
        while ring.next().is_some() {
            records += 1;
        }
        assert!(records >= before, "fewer records at level {log_level}");
        assert_eq!(
            records > 0,
            log_level >= 4,
            "{records} records at level {log_level}"
        );
        before = records;
    }
}
