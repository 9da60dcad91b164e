//! Which flow is evicted when the table or a window is full.

use twheel_common::{
    config::Meta, counter::Counter, event::Reason, flow::Direction, packet::parse, state::State,
    wheel::WheelScheme,
};
use twheel_tests::plane::{ACK, SYN, Setup, frame};

use crate::{all_ended, ended, establish, port};

#[test]
fn a_hashed_wheel_gives_up_the_half_open_flow_nearest_its_deadline() {
    let setup = Setup {
        scheme: WheelScheme::Hashed,
        slots: Some(8),
        close: 60_000,
        max_flows: 5,
        ..Setup::default()
    };
    let mut plane = setup.load();
    plane.receive(&frame(0, false, SYN));
    // Its deadline is near. The slots of the other flows come first, but these flows have dozens of
    // rounds left.
    for _ in 0..590 {
        plane.pass(100);
        assert!(plane.step().is_empty());
    }
    for client in 1..5 {
        plane.receive(&frame(client, false, SYN));
        plane.pass(100);
        assert!(plane.step().is_empty());
    }
    plane.receive(&frame(9, false, SYN));
    let events = plane.drain();
    assert_eq!(all_ended(&events), [(Reason::Evicted, State::SynSent)]);
    assert_eq!(events[0].key.sender(Direction::FromLow).port(), port(0));
    // If all have rounds left, one of them is evicted.
    plane.receive(&frame(10, false, SYN));
    assert_eq!(plane.drain().len(), 1);
    assert_eq!(plane.count(Counter::TableFull), 0);
}

#[test]
fn a_full_table_gives_up_half_open_flows_and_keeps_established_ones() {
    let setup = Setup {
        max_flows: 64,
        ..Setup::default()
    };
    let mut plane = setup.load();
    for client in 0..32 {
        establish(&mut plane, client);
    }
    for client in 100..5_000 {
        plane.receive(&frame(client, false, SYN));
    }
    assert_eq!(plane.counters().live(), 64);
    let evicted = plane.count(Counter::Evicted);
    assert_eq!(evicted + plane.count(Counter::TableFull), 4_900 - 32);
    assert!(
        evicted > 4_000,
        "{evicted} evicted: the newcomers were refused instead"
    );
    let events = plane.drain();
    assert_eq!(events.len() as u64, evicted);
    for event in &events {
        assert_eq!(ended(event), (Reason::Evicted, State::SynSent));
    }
    // All established flows are still there: their packets touch them and create none.
    let created = plane.count(Counter::Created);
    for client in 0..32 {
        plane.receive(&frame(client, false, ACK));
    }
    assert_eq!(plane.count(Counter::Created), created);
}

#[test]
fn a_table_full_of_established_flows_refuses_and_counts() {
    let setup = Setup {
        max_flows: 16,
        ..Setup::default()
    };
    let mut plane = setup.load();
    for client in 0..16 {
        establish(&mut plane, client);
    }
    for client in 100..110 {
        plane.receive(&frame(client, false, SYN));
    }
    assert_eq!(plane.count(Counter::TableFull), 10);
    assert_eq!(plane.count(Counter::Evicted), 0);
    assert_eq!(plane.counters().live(), 16);
    plane.pass(60_100);
    assert_eq!(plane.step().len(), 16, "an eviction has broken a list");
}

/// A hash that gives all keys one home, so that the table is one window.
const ONE_WINDOW: Setup = Setup {
    secret: Some([0; 11]),
    ..Setup::DEFAULT
};

#[test]
fn a_full_window_gives_up_the_half_open_flow_nearest_its_deadline() {
    let mut plane = ONE_WINDOW.load();
    for client in 0..62 {
        establish(&mut plane, client);
        plane.pass(10);
    }
    plane.receive(&frame(62, false, SYN));
    plane.pass(10);
    plane.receive(&frame(63, false, SYN));
    plane.pass(10);
    plane.receive(&frame(62, true, SYN | ACK));
    assert_eq!(plane.plane().tracked().unwrap(), 64);
    assert!(plane.drain().is_empty());
    plane.pass(10);
    // Flow 63 is nearer its deadline than 62, which was answered; all others are established.
    plane.receive(&frame(64, false, SYN));
    let events = plane.drain();
    assert_eq!(all_ended(&events), [(Reason::Evicted, State::SynSent)]);
    let wanted = parse(frame(63, false, SYN).as_slice()).unwrap().key;
    assert_eq!(events[0].key, wanted);
    assert_eq!(plane.count(Counter::Evicted), 1);
    assert_eq!(plane.count(Counter::WindowFull), 0);
    // A flow that is due is the first to go, and it ends as idle, not as evicted.
    plane.pass(60_000 - 670);
    for client in 1..62 {
        plane.receive(&frame(client, false, ACK));
    }
    plane.receive(&frame(62, false, SYN));
    plane.receive(&frame(64, false, SYN));
    plane.pass(50);
    plane.receive(&frame(65, false, SYN));
    assert_eq!(
        all_ended(&plane.drain()),
        [(Reason::Idle, State::Established)]
    );
    assert_eq!(plane.plane().tracked().unwrap(), 64);
    assert_eq!(plane.counters().live(), 64);
    plane.pass(70_000);
    assert_eq!(plane.step().len(), 64, "an eviction has broken a list");
    assert_eq!(plane.plane().tracked().unwrap(), 0);
}

#[test]
fn a_window_full_of_established_flows_refuses_and_counts() {
    let mut plane = ONE_WINDOW.load();
    for client in 0..64 {
        establish(&mut plane, client);
    }
    for client in 100..110 {
        plane.receive(&frame(client, false, SYN));
    }
    assert_eq!(plane.count(Counter::WindowFull), 10);
    assert_eq!(plane.count(Counter::TableFull), 0);
    assert_eq!(plane.count(Counter::Evicted), 0);
    assert_eq!(plane.plane().tracked().unwrap(), 64, "capacity has leaked");
    plane.pass(60_100);
    assert_eq!(plane.step().len(), 64);
    assert_eq!(plane.plane().tracked().unwrap(), 0);
}

#[test]
fn the_secret_of_the_hash_is_another_each_time() {
    let secret = || {
        let mut plane = Setup::default().load();
        let meta = plane.plane().map("META").unwrap();
        let meta = aya::maps::Array::<_, Meta>::try_from(meta).unwrap();
        meta.get(&0, 0).unwrap().hash.keys
    };
    let (first, second) = (secret(), secret());
    for (first, second) in first.iter().zip(second) {
        assert!(*first != 0 && *first != second, "the secret is not random");
    }
}

#[test]
fn memory_a_flow() {
    const FLOWS: u32 = 1 << 20;
    let setup = Setup {
        max_flows: FLOWS,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let memory: u64 = plane.plane().memory().unwrap().values().sum();
    let each = memory / u64::from(FLOWS);
    assert!(
        each >= 144,
        "{each} bytes: less than two records, the details and the extras of a flow"
    );
    assert!(each <= 160, "{each} bytes per flow");
}
