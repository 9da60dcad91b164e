//! Flows that are reported when they begin and while they live.

use std::collections::HashMap;

use twheel_common::{
    counter::Counter,
    event::{Event, Reason, Record},
    flow::Account,
    packet::parse,
    step::Sweep,
};
use twheel_tests::plane::{ACK, RST, SYN, Setup, frame};

use crate::{Random, ended, establish};

const TICK: u64 = 100;

fn added(sum: &mut Account, event: &Event) {
    for (side, sum) in sum.iter_mut().enumerate() {
        sum.packets += event.account[side].packets - event.before[side].packets;
        sum.bytes += event.account[side].bytes - event.before[side].bytes;
    }
}

fn packets(account: &Account) -> u64 {
    account.iter().map(|side| side.packets).sum()
}

/// What a plain model knows of a live flow.
struct Known {
    begun: u64,
    /// The flow's beginning, or its last update.
    since: u64,
    /// The first packet that no event has reported.
    unreported: Option<u64>,
    packets: u64,
    reported: u64,
    sum: Account,
}

/// Ten thousand packets at random times: a flow is reported in the tick in which its interval is
/// over if it had packets, and else later; what the updates and the end report adds up to what was
/// sent.
#[test]
fn updates_come_when_they_are_due_and_add_up() {
    const ACTIVE: u64 = 3_000;
    const TIMEOUT: u64 = 7_000;
    let setup = Setup {
        tick: TICK,
        timeout: TIMEOUT,
        accounting: true,
        begins: true,
        active_timeout: Some(ACTIVE),
        one_way: false,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let mut random = Random(24);
    let mut known: HashMap<u32, Known> = HashMap::new();
    let (mut updates, mut silent, mut ends, mut numbers) = (0, 0, 0, 0);
    let client = |event: &Event| {
        // `frame` numbers clients by their addresses; the server has port 80.
        (0..200).find(|&it| {
            let key = parse(&frame(it, false, ACK)[..]).unwrap().key;
            key == event.key
        })
    };
    for _ in 0..10_000 {
        plane.pass(1 + random.below(59));
        let now = plane.now();
        for record in plane.step_all() {
            let (Record::Updated(event) | Record::Ended(event)) = &record else {
                panic!("{record:?}");
            };
            numbers += 1;
            assert_eq!(event.number, numbers);
            let client = client(event).unwrap();
            let flow = known.get_mut(&client).unwrap();
            assert_eq!(u64::from(event.since), now - flow.since);
            assert_eq!(u64::from(event.age), now - flow.begun);
            assert_eq!(packets(&event.account), flow.packets);
            assert_eq!(packets(&event.before), flow.reported);
            added(&mut flow.sum, event);
            assert_eq!(flow.sum, event.account);
            if let Record::Ended(_) = record {
                assert_eq!(ended(event).0, Reason::Idle);
                known.remove(&client);
                ends += 1;
                continue;
            }
            // Never early.
            assert!(now - flow.since >= ACTIVE, "{}", now - flow.since);
            assert!(flow.unreported.take().is_some(), "nothing to report");
            (flow.since, flow.reported) = (now, flow.packets);
            updates += 1;
        }
        // A packet is reported within an active timeout, and a tick for each visit.
        for flow in known.values() {
            let unreported = flow.unreported.unwrap_or(now);
            assert!(now - unreported <= ACTIVE + 2 * TICK);
            silent += u32::from(now - flow.since > ACTIVE + TICK);
        }
        // Some flows have packets all the time, and some hardly ever.
        let client = if random.below(2) == 0 {
            random.below(4)
        } else {
            random.below(200)
        } as u32;
        let packet = frame(client, false, ACK);
        plane.receive(&packet);
        let flow = known.entry(client).or_insert_with(|| {
            numbers += 1;
            Known {
                begun: now,
                since: now,
                unreported: None,
                packets: 0,
                reported: 0,
                sum: Account::default(),
            }
        });
        flow.packets += 1;
        flow.unreported.get_or_insert(now);
        let begun = plane.drain_all();
        let begins = usize::from(flow.packets == 1);
        assert_eq!(begun.len(), begins, "{begun:?}");
        if let Some(Record::Begun(event)) = begun.first() {
            assert_eq!((event.number, event.age, event.idle), (numbers, 0, 0));
        }
    }
    assert!(
        updates > 300 && silent > 100 && ends > 30,
        "{updates} {silent} {ends}"
    );
    assert_eq!(plane.count(Counter::EventsLost), 0);
}

/// A connection that takes over the key of another begins anew.
#[test]
fn a_flow_that_takes_over_a_key_is_reported_from_its_own_beginning() {
    let setup = Setup {
        accounting: true,
        begins: true,
        active_timeout: Some(1_000),
        ..Setup::default()
    };
    let mut plane = setup.load();
    establish(&mut plane, 1);
    let begun = plane.drain_all();
    assert!(matches!(begun[..], [Record::Begun(_)]), "{begun:?}");
    plane.pass(1_200);
    let [Record::Updated(first)] = plane.step_all()[..] else {
        panic!();
    };
    assert_eq!((first.since, packets(&first.account)), (1_200, 3));
    plane.receive(&frame(1, false, RST));
    plane.pass(500);
    plane.receive(&frame(1, false, SYN));
    assert!(plane.drain_all().is_empty());
    plane.send(&frame(1, true, SYN | ACK));
    let all = plane.drain_all();
    let [Record::Ended(old), Record::Begun(new)] = all[..] else {
        panic!("{all:?}");
    };
    assert_eq!(ended(&old).0, Reason::Superseded);
    assert_eq!((old.since, packets(&old.before)), (500, 3));
    assert_eq!((new.age, new.since, packets(&new.before)), (0, 0, 0));
    assert_ne!(old.birth.generation(), new.birth.generation());
    plane.pass(1_200);
    let [Record::Updated(next)] = plane.step_all()[..] else {
        panic!();
    };
    assert_eq!((next.since, packets(&next.before)), (1_200, 0));
}

/// Updates wait for room in the ring, as ends do.
#[test]
fn no_update_is_lost_in_a_full_ring() {
    let setup = Setup {
        accounting: true,
        active_timeout: Some(1_000),
        ring_bytes: 1 << 12,
        ..Setup::default()
    };
    let mut plane = setup.load();
    const FLOWS: u32 = 500;
    for client in 0..FLOWS {
        plane.receive(&frame(client, false, SYN));
    }
    plane.pass(1_200);
    let mut updated = Vec::new();
    let mut full = 0;
    while updated.len() < FLOWS as usize {
        let (outcome, _) = plane.call(100_000);
        full += u32::from(outcome == twheel_common::step::Outcome::RingFull);
        updated.extend(plane.drain_all());
        assert!(full < 1_000);
    }
    assert!(full > 10);
    assert!(updated.iter().all(|it| matches!(it, Record::Updated(_))));
    assert_eq!(updated.len(), FLOWS as usize);
    assert!(plane.step_all().is_empty());
    assert_eq!(plane.counters().live(), u64::from(FLOWS));

    // The same for the reports at the end of a run, which nothing but the ring holds up.
    let (mut from, mut reported, mut calls) = (0, Vec::new(), 0);
    let records = plane.plane().flows().unwrap().records();
    loop {
        let answer = plane
            .plane()
            .sweep(Sweep {
                from,
                count: (records - from).min(4096),
                reports: 1,
                ..Sweep::default()
            })
            .unwrap();
        from += answer.swept;
        reported.extend(plane.drain_all());
        calls += 1;
        if from == records && answer.staged == 0 {
            break;
        }
        assert!(calls < 1_000);
    }
    assert!(calls > 10);
    let keys: std::collections::HashSet<_> = reported
        .iter()
        .map(|it| match it {
            Record::Updated(event) => (event.key.addresses(), event.key.ports()),
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(
        (reported.len(), keys.len()),
        (FLOWS as usize, FLOWS as usize)
    );
    plane.pass(3_000_000);
    let ends = plane.step();
    assert_eq!(ends.len(), FLOWS as usize);
    assert_eq!(plane.counters().live(), 0);
}
