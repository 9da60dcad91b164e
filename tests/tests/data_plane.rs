//! The loaded programs on crafted packets, under virtual time: hours pass in milliseconds, and
//! nothing here reads a clock.
#![allow(missing_docs)]

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    net::SocketAddr,
};

use etherparse::{PacketBuilder, TcpHeader};
use twheel::names::Names;
use twheel::{clock::Clock, output::Expired, stepper::pin_to, watched::Watch};
use twheel_common::{
    config::Meta,
    counter::Counter,
    enforce::Tomb,
    event::{BATCH, Event, Reason, Record as Told},
    flow::{Account, Direction, MAX_AGE, Word},
    packet::{Protocols, Skip, parse},
    rule::Timeouts,
    state::{Change, Seen, State, View},
    step::{Delete, Deleted, Outcome},
    table::{Details, LINE, Line},
    tracked::Tracked,
    wheel::Scheme,
};
use twheel_tests::plane::{
    ACK, DROP, FIN, INTERFACE, PASS, Plane, RST, SYN, Setup, TX, frame, twins,
};

/// What these planes see, unless a test says otherwise.
const ONE_WAY: View = View {
    one_way: true,
    strict: false,
};

fn ended(event: &Event) -> (Reason, State) {
    (
        Reason::from_raw(event.reason).unwrap(),
        event.seen().state(),
    )
}

fn all_ended(events: &[Event]) -> Vec<(Reason, State)> {
    events.iter().map(ended).collect()
}

/// A connection that is established, seen from both sides.
fn establish(plane: &mut Plane, client: u32) {
    plane.receive(&frame(client, false, SYN));
    plane.send(&frame(client, true, SYN | ACK));
    plane.receive(&frame(client, false, ACK));
}

#[test]
fn an_idle_flow_expires_at_the_first_tick_after_its_timeout() {
    let mut plane = Setup::default().load();
    plane.at(1_000_030);
    establish(&mut plane, 7);
    plane.at(1_060_029);
    assert!(plane.step().is_empty(), "early");
    plane.at(1_060_099);
    assert!(plane.step().is_empty(), "before the tick");
    plane.at(1_060_100);
    let events = plane.step();
    assert_eq!(events.len(), 1);
    let ended = Expired::new(&events[0], Clock::virtual_ms(), true).unwrap();
    assert_eq!(
        ended.flow.src,
        "10.0.0.0:1031".parse::<SocketAddr>().unwrap()
    );
    assert_eq!(
        ended.flow.dst,
        "192.0.2.1:80".parse::<SocketAddr>().unwrap()
    );
    assert_eq!(
        (ended.reason, ended.flow.state),
        (Reason::Idle, "established")
    );
    assert_eq!(
        (ended.age.as_millis(), ended.idle.as_millis()),
        (60_070, 60_070)
    );
    assert_eq!(plane.counters().live(), 0);
    plane.pass(1_000_000);
    assert!(plane.step().is_empty(), "twice");
}

#[test]
fn packets_of_either_direction_keep_a_flow() {
    let mut plane = Setup::default().load();
    establish(&mut plane, 1);
    for round in 0..50 {
        plane.pass(59_999);
        match round % 2 {
            0 => plane.receive(&frame(1, true, ACK)),
            _ => plane.send(&frame(1, false, ACK)),
        }
        assert!(plane.step().is_empty());
    }
    assert_eq!(plane.counters().live(), 1);
    assert_eq!(plane.count(Counter::Created), 1);
    plane.pass(60_100);
    assert_eq!(plane.step().len(), 1);
}

#[test]
fn a_reset_flow_leaves_after_the_short_timeout() {
    let mut plane = Setup::default().load();
    establish(&mut plane, 1);
    plane.receive(&frame(1, false, RST));
    plane.pass(9_999);
    assert!(plane.step().is_empty());
    plane.pass(101);
    assert_eq!(all_ended(&plane.step()), [(Reason::Reset, State::Close)]);
}

#[test]
fn a_reset_in_the_middle_of_a_hop_is_honoured_within_a_tick() {
    let mut plane = Setup::default().load();
    establish(&mut plane, 1);
    for reset_after in [1u64, 5_000, 9_999, 10_000, 10_001, 35_123, 49_000] {
        establish(&mut plane, 2);
        let start = plane.now();
        let mut next = start;
        while next < start + reset_after {
            plane.at(next);
            assert!(plane.step().is_empty());
            plane.receive(&frame(1, false, ACK));
            next += 1_000;
        }
        plane.at(start + reset_after);
        plane.receive(&frame(2, false, RST));
        let deadline = plane.now() + 10_000;
        plane.at(deadline - 1);
        assert!(plane.step().is_empty());
        plane.at(deadline.next_multiple_of(100));
        assert_eq!(plane.step().len(), 1, "reset after {reset_after}");
        plane.receive(&frame(1, false, ACK));
    }
}

#[test]
fn fin_from_both_sides_closes_and_the_last_ack_begins_nothing() {
    let mut plane = Setup::default().load();
    establish(&mut plane, 1);
    plane.receive(&frame(1, false, FIN | ACK));
    plane.pass(20_000);
    assert!(plane.step().is_empty(), "one FIN is half a close");
    plane.send(&frame(1, true, FIN | ACK));
    plane.receive(&frame(1, false, ACK));
    assert_eq!(plane.count(Counter::Created), 1);
    plane.pass(10_100);
    assert_eq!(
        all_ended(&plane.step()),
        [(Reason::Closed, State::TimeWait)]
    );
    // A FIN or RST sent again, after all is over.
    plane.receive(&frame(1, false, FIN | ACK));
    plane.receive(&frame(1, false, RST));
    assert_eq!(plane.count(Counter::NoFlow), 2);
    assert_eq!(plane.counters().live(), 0);
}

#[test]
fn a_syn_on_a_closed_flow_begins_a_new_one_and_reports_the_old() {
    let mut plane = Setup::default().load();
    establish(&mut plane, 1);
    plane.receive(&frame(1, false, RST));
    plane.pass(1_000);
    assert!(!plane.ring_is_readable());
    plane.receive(&frame(1, false, SYN));
    assert!(!plane.ring_is_readable(), "nobody has answered");
    plane.send(&frame(1, true, SYN | ACK));
    assert!(plane.ring_is_readable(), "nobody is told");
    let events = plane.drain();
    assert_eq!(all_ended(&events), [(Reason::Superseded, State::Close)]);
    assert_eq!((events[0].age, events[0].idle), (1_000, 1_000));
    plane.receive(&frame(1, false, ACK));
    plane.pass(59_999);
    assert!(plane.step().is_empty(), "the new one has its own life");
    plane.pass(101);
    let events = plane.step();
    assert_eq!(all_ended(&events), [(Reason::Idle, State::Established)]);
    assert_eq!(events[0].age, 60_100);
    assert_eq!(plane.counters().live(), 0);
}

#[test]
fn a_stray_syn_does_not_end_a_live_flow() {
    let mut plane = Setup::default().load();
    establish(&mut plane, 1);
    plane.receive(&frame(1, false, SYN));
    assert_eq!(plane.count(Counter::Superseded), 0);
    plane.pass(30_000);
    assert!(plane.step().is_empty());
    assert_eq!(plane.counters().live(), 1);
}

/// Packets are noted by a clock that may stand still for six units and then jump.
#[test]
fn nothing_ends_early_where_the_clock_has_jumped() {
    let setup = Setup {
        tick: 1,
        timeout: 1_000,
        max_stall: 6,
        ..Setup::DEFAULT
    };
    for (jump, later) in [(1, 0), (2, 6), (6, 6)] {
        for by_packet in [false, true] {
            let mut plane = setup.load();
            establish(&mut plane, 1);
            plane.pass(3);
            plane.receive(&frame(1, false, ACK));
            let due = plane.now() + 1_000 + later;
            plane.pass(jump);
            // Who sees what the clock says now.
            match by_packet {
                true => establish(&mut plane, 2),
                false => assert!(plane.step().is_empty()),
            }
            plane.at(due - 1);
            assert!(plane.step().is_empty(), "early, after {jump} units");
            plane.at(due);
            assert_eq!(plane.step().len(), 1, "late, after {jump} units");
        }
    }
}

#[test]
fn the_wheel_agrees_with_a_map_of_deadlines_over_days() {
    use Scheme::*;
    const TWINS: u64 = 2_000_000;
    // Packets, passages of time and steps, of each scheme.
    let operations = match std::env::var_os("TWHEEL_EXHAUSTIVE") {
        Some(_) => 1_000_000,
        None => 100_000,
    };
    for (scheme, slots, tick, timeout, close, start) in [
        (Hierarchical, None, 100, 60_000, 10_000, 1_000_000),
        // Flows have twins in this one.
        (Hierarchical, None, 100, 60_000, 10_000, TWINS),
        // Stamps wrap in here, and ticks too.
        (Hierarchical, None, 1, 700, 50, (1 << 32) - 200_000),
        (Hierarchical, None, 1_000, 86_400_000, 10_000, 0),
        (Hierarchical, Some(4), 1, 700, 700, (1 << 32) - 200_000),
        (Hashed, None, 100, 60_000, 10_000, 1_000_000),
        // Dozens of rounds.
        (Hashed, Some(8), 1, 700, 500, (1 << 32) - 200_000),
        (Hashed, Some(256), 1_000, 86_400_000, 600_000, 0),
        (Simple, None, 100, 60_000, 10_000, 1_000_000),
        (Simple, None, 1, 700, 700, (1 << 32) - 200_000),
    ] {
        let setup = Setup {
            scheme,
            slots,
            tick,
            timeout,
            close,
            start,
            secret: (start == TWINS).then(|| twins(5)),
            ..Setup::default()
        };
        let mut plane = setup.load();
        let mut random = Random(tick);
        let timeouts = plane.plane().timeouts(0).unwrap();
        // Client → (deadline, what is known).
        let mut oracle: BTreeMap<u32, (u64, Tracked)> = BTreeMap::new();
        let mut ends = 0;
        let configurations = match scheme {
            Hierarchical => 4,
            Hashed => 3,
            Simple => 2,
        };
        let mut done = 0;
        while done < operations / configurations {
            done += 3;
            let client = random.below(60) as u32;
            let flags = match random.below(20) {
                0 => RST | ACK,
                1 => SYN,
                2 => FIN | ACK,
                3 => SYN | ACK,
                _ => ACK,
            };
            if setup.secret.is_some() && flags & SYN == 0 && !oracle.contains_key(&client) {
                // It would make a twin younger.
                continue;
            }
            let frame = frame(client, random.below(2) == 0, flags);
            plane.receive(&frame);
            let now = plane.now();
            let segment = parse(frame.as_slice()).unwrap();
            match oracle.get_mut(&client) {
                None => {
                    if let Some(flow) = Tracked::first(&segment, ONE_WAY) {
                        let due = now + u64::from(timeouts.of(flow.seen));
                        oracle.insert(client, (due, flow));
                    }
                }
                Some((due, flow)) => match flow.see(&segment, ONE_WAY) {
                    Change::Ignored | Change::Ended | Change::AddIfItLasts(_) => {}
                    // It keeps nothing alive.
                    Change::Doubt(..) if flags & SYN != 0 => {}
                    _ => *due = now + u64::from(timeouts.of(flow.seen)),
                },
            }
            plane.pass(match random.below(30) {
                0 => random.below(timeout * 2),
                1 => random.below(timeout / 4),
                _ => random.below(close / 4),
            });
            // What must have ended: all that was due at the last tick. What may have: all that is
            // due now, where a visit came by for another reason.
            let due = |by: u64| -> HashSet<u16> {
                let due = oracle.iter().filter(|(_, (deadline, _))| *deadline <= by);
                due.map(|(client, _)| port(*client)).collect()
            };
            let must = due(plane.now() / tick * tick);
            let may = due(plane.now());
            let fired: HashSet<u16> = plane
                .step()
                .iter()
                .filter(|event| ended(event).0 != Reason::Superseded)
                .map(|event| {
                    let low = event.key.sender(Direction::FromLow);
                    let high = event.key.sender(Direction::FromHigh);
                    if low.port() == 80 {
                        high.port()
                    } else {
                        low.port()
                    }
                })
                .collect();
            let now = plane.now();
            assert!(
                fired.is_superset(&must),
                "{scheme:?} {tick} {now}: {must:?} {fired:?}"
            );
            assert!(
                fired.is_subset(&may),
                "{scheme:?} {tick} {now}: {may:?} {fired:?}"
            );
            oracle.retain(|client, _| !fired.contains(&port(*client)));
            ends += fired.len();
            assert_eq!(plane.counters().live(), oracle.len() as u64);
        }
        assert!(ends > 300, "only {ends} flows ended: this compares nothing");
    }
}

#[test]
fn three_schemes_report_the_same_flows_at_the_same_steps() {
    let mut planes = [
        (Scheme::Simple, None),
        (Scheme::Hashed, Some(8)),
        (Scheme::Hierarchical, Some(4)),
    ]
    .map(|(scheme, slots)| {
        Setup {
            scheme,
            slots,
            tick: 1_000,
            timeout: 17_300,
            close: 5_100,
            ..Setup::default()
        }
        .load()
    });
    let mut random = Random(3);
    let mut ends = 0;
    for _ in 0..10_000 {
        let client = random.below(40) as u32;
        let back = random.below(2) == 0;
        let flags = [SYN, ACK, ACK, ACK, FIN | ACK, RST][random.below(6) as usize];
        // Steps come whenever they come, not where ticks begin.
        let pass = match random.below(30) {
            0 => random.below(30_000),
            _ => random.below(700),
        };
        let reports = planes.each_mut().map(|plane| {
            plane.receive(&frame(client, back, flags));
            plane.pass(pass);
            let mut report: Vec<_> = plane
                .step()
                .iter()
                .map(|event| (event.key, ended(event).0, ended(event).1, event.age))
                .collect();
            report.sort();
            report
        });
        assert_eq!(reports[0], reports[1], "at {}", planes[0].now());
        assert_eq!(reports[0], reports[2], "at {}", planes[0].now());
        ends += reports[0].len();
    }
    assert!(ends > 1_000, "only {ends} flows ended");
}

#[test]
fn a_flow_after_hours_without_any_is_visited_no_more_often() {
    for (scheme, slots) in [
        (Scheme::Hierarchical, None),
        (Scheme::Hashed, None),
        (Scheme::Simple, None),
    ] {
        let setup = Setup {
            scheme,
            slots,
            ..Setup::default()
        };
        let mut plane = setup.load();
        for hour in 1..=2 {
            plane.pass(3_600_000);
            let visits = plane.count(Counter::Visits);
            plane.receive(&frame(1, false, SYN));
            // The new flow has called the stepper.
            assert!(plane.step().is_empty());
            plane.pass(60_100);
            assert_eq!(all_ended(&plane.step()), [(Reason::Idle, State::SynSent)]);
            let visits = plane.count(Counter::Visits) - visits;
            // A cascade is a visit too, and hops are no longer than the shortest timeout.
            assert!(visits <= 8, "{scheme:?}, hour {hour}: {visits} visits");
        }
    }
}

#[test]
fn a_hashed_wheel_gives_up_the_half_open_flow_nearest_its_deadline() {
    let setup = Setup {
        scheme: Scheme::Hashed,
        slots: Some(8),
        close: 60_000,
        max_flows: 5,
        ..Setup::default()
    };
    let mut plane = setup.load();
    plane.receive(&frame(0, false, SYN));
    // Its deadline is near, and the others, whose slots come first, have dozens of rounds left.
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
    // And where all have rounds left, one of them.
    plane.receive(&frame(10, false, SYN));
    assert_eq!(plane.drain().len(), 1);
    assert_eq!(plane.count(Counter::TableFull), 0);
}

#[test]
fn a_stall_of_hours_evicts_nobody_for_the_stalls_sake() {
    let mut plane = Setup::default().load();
    for client in 0..500 {
        establish(&mut plane, client);
    }
    // Nobody steps for three hours; half of the flows are touched at the end of it.
    plane.pass(3 * 3_600_000);
    for client in 0..250 {
        plane.receive(&frame(client, false, ACK));
    }
    let mut calls = 0;
    let mut events = Vec::new();
    loop {
        let (outcome, _) = plane.call(256);
        events.extend(plane.drain());
        calls += 1;
        if outcome == Outcome::Done {
            break;
        }
    }
    assert!(calls <= 4, "{calls} calls to catch up");
    assert_eq!(events.len(), 250);
    assert_eq!(plane.counters().live(), 250);
    plane.pass(60_100);
    assert_eq!(plane.step().len(), 250);
}

#[test]
fn a_budget_makes_progress() {
    let mut plane = Setup::default().load();
    for client in 0..100 {
        plane.receive(&frame(client, false, SYN));
    }
    plane.pass(60_100);
    let mut seen = HashSet::new();
    loop {
        let (outcome, step) = plane.call(7);
        assert!(step.visits <= 7);
        seen.extend(plane.drain().iter().map(|event| event.key));
        if outcome == Outcome::Done {
            break;
        }
    }
    assert_eq!(seen.len(), 100);
}

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
    // As many as a record takes, with its header of the ring's.
    let batch = BATCH as u64;
    let room = 4096 / (size_of::<Event>() as u64 * batch + 8) * batch;
    assert_eq!(u64::from(step.expired), room, "{step:?}");
    // The next ones have ended, too, and wait: they keep their room in the table.
    let before = plane.counters().live();
    assert_eq!(before, 1_000 - room - batch);
    assert_eq!(plane.plane().tracked().unwrap(), 1_000 - room);
    let (outcome, step) = plane.call(1_000);
    assert_eq!(
        (outcome, step.expired),
        (Outcome::RingFull, 0),
        "evicted without an event"
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
    // At this load a window may be full: docs/design.md, 3 in 10^7. Then a half-open flow of it goes, and is reported.
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
            "{client} twice"
        );
    }
    let lost = seen.iter().filter(|seen| !**seen).count() as u64;
    assert_eq!(lost, refused, "some were lost");
    assert_eq!(plane.counters().live(), 0);
    assert_eq!(plane.count(Counter::EventsLost), 0);
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
    // All established ones are there: touched, not created.
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
    assert_eq!(plane.step().len(), 16, "making room has broken a list");
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
fn a_flow_that_stands_in_an_inbox_is_deleted() {
    // More than one call takes out of the inbox.
    const FLOWS: u32 = 1_500;
    let mut plane = Setup::default().load();
    for client in 0..FLOWS {
        establish(&mut plane, client);
    }
    // Those of even clients are closed on the CPU of their wheel, the others on another, which posts them.
    for client in 0..FLOWS {
        pin_to(client % 2).expect("this test needs two CPUs");
        plane.receive(&frame(client, false, RST));
    }
    pin_to(0).unwrap();
    assert_eq!(plane.count(Counter::Posted), u64::from(FLOWS / 2));
    plane.pass(1);
    let flows = plane.plane().flows().unwrap();
    let mut deletes: Vec<_> = flows
        .iter()
        .map(|flow| flow.delete(Reason::Deleted))
        .collect();
    assert_eq!(deletes.len(), FLOWS as usize);
    let outcome = |delete: &Delete| Deleted::from_raw(delete.outcome).expect("an outcome");
    let mut done = 0;
    // Each call that leaves some has taken others out of the inbox.
    for _ in 0..FLOWS.div_ceil(1024) {
        let mut asked = deletes.clone();
        plane.plane().delete(&mut asked).unwrap();
        let (posted, others): (Vec<_>, Vec<_>) = asked
            .iter()
            .zip(&deletes)
            .partition(|(answer, _)| outcome(answer) == Deleted::Posted);
        for (answer, _) in others {
            assert_eq!(outcome(answer), Deleted::Done);
            done += 1;
        }
        deletes = posted.into_iter().map(|(_, entry)| *entry).collect();
    }
    assert_eq!(done, FLOWS);
    let events = plane.drain();
    assert_eq!(events.len(), FLOWS as usize);
    assert!(
        events
            .iter()
            .all(|event| ended(event) == (Reason::Deleted, State::Close))
    );
    // Nothing is left of them.
    plane.pass(60_100);
    assert_eq!(plane.step().len(), 0);
    assert_eq!(plane.counters().live(), 0);
}

#[test]
fn a_flow_that_had_a_packet_since_it_was_chosen_is_not_deleted() {
    let mut plane = Setup::default().load();
    for client in 0..1_000 {
        establish(&mut plane, client);
    }
    plane.pass(1);
    let flows = plane.plane().flows().unwrap();
    let chosen: Vec<_> = flows.iter().collect();
    let mut deletes: Vec<_> = chosen
        .iter()
        .map(|flow| flow.delete(Reason::Deleted))
        .collect();
    let busy: HashSet<_> = (0..1_000).filter(|client| client % 3 == 0).collect();
    for client in &busy {
        plane.receive(&frame(*client, true, ACK));
    }
    // From another CPU than theirs: nothing happens.
    pin_to(1).expect("this test needs two CPUs");
    plane.plane().delete(&mut deletes).unwrap();
    assert!(deletes.iter().all(|delete| matches!(
        Deleted::from_raw(delete.outcome),
        Some(Deleted::Elsewhere | Deleted::Changed)
    )),);
    assert_eq!(plane.counters().live(), 1_000);
    pin_to(0).unwrap();
    plane.plane().delete(&mut deletes).unwrap();
    for (delete, flow) in deletes.iter().zip(&chosen) {
        let low = flow.key.sender(Direction::FromLow).port();
        let high = flow.key.sender(Direction::FromHigh).port();
        let client = u32::from(if low == 80 { high } else { low } - 1024);
        let wanted = if busy.contains(&client) {
            Deleted::Changed
        } else {
            Deleted::Done
        };
        assert_eq!(Deleted::from_raw(delete.outcome), Some(wanted), "{client}");
    }
    let events = plane.drain();
    assert_eq!(events.len(), 1_000 - busy.len());
    assert!(
        events
            .iter()
            .all(|event| ended(event) == (Reason::Deleted, State::Established))
    );
    // Twice is once.
    plane.plane().delete(&mut deletes).unwrap();
    assert!(plane.drain().is_empty());
    assert_eq!(plane.plane().tracked().unwrap(), busy.len() as u64);
    assert_eq!(plane.counters().live(), busy.len() as u64);
    // The lists are whole: the others end in their time, and a deleted key can begin again.
    establish(&mut plane, 1);
    plane.pass(60_100);
    assert_eq!(plane.step().len(), busy.len() + 1);
    assert_eq!(plane.count(Counter::Orphans), 0);
}

#[test]
fn a_full_ring_delays_deletions() {
    let setup = Setup {
        ring_bytes: 4096,
        ..Setup::default()
    };
    let mut plane = setup.load();
    for client in 0..200 {
        plane.receive(&frame(client, false, SYN));
    }
    let flows = plane.plane().flows().unwrap();
    let mut deletes: Vec<_> = flows
        .iter()
        .map(|flow| flow.delete(Reason::Deleted))
        .collect();
    let mut deleted = 0;
    while !deletes.is_empty() {
        plane.plane().delete(&mut deletes).unwrap();
        deletes.retain(|delete| {
            assert!(matches!(
                Deleted::from_raw(delete.outcome),
                Some(Deleted::Done | Deleted::RingFull)
            ));
            delete.outcome == Deleted::RingFull as u32
        });
        let events = plane.drain().len();
        assert!(events > 0 && events < 100, "{events}");
        deleted += events;
    }
    assert_eq!(deleted, 200);
    assert_eq!(plane.count(Counter::EventsLost), 0);
}

/// A hash that has one home for all keys: the table is one window.
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
    // 63 is nearer its deadline than 62, which was answered; all others are established.
    plane.receive(&frame(64, false, SYN));
    let events = plane.drain();
    assert_eq!(all_ended(&events), [(Reason::Evicted, State::SynSent)]);
    let wanted = parse(frame(63, false, SYN).as_slice()).unwrap().key;
    assert_eq!(events[0].key, wanted);
    assert_eq!(plane.count(Counter::Evicted), 1);
    assert_eq!(plane.count(Counter::WindowFull), 0);
    // A flow that is due goes first, and as what it is.
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
    assert_eq!(plane.step().len(), 64, "making room has broken a list");
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
    assert_eq!(plane.plane().tracked().unwrap(), 64, "room has leaked");
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
        assert!(*first != 0 && *first != second, "not random");
    }
}

/// Where a client's flow stands in the table.
fn index(plane: &mut Plane, client: u32) -> u32 {
    let key = parse(frame(client, false, SYN).as_slice()).unwrap().key;
    let flows = plane.plane().flows().unwrap();
    flows.iter().find(|flow| flow.key == key).unwrap().index
}

/// Changes a record's line behind the data plane's back; which of the line's records it is, is given, too.
fn edit_line<T>(plane: &mut Plane, index: u32, edit: impl FnOnce(&mut Line, usize) -> T) -> T {
    let map = plane.plane().bpf_mut().map_mut("FLOWS").unwrap();
    let mut map = aya::maps::Array::<_, Line>::try_from(map).unwrap();
    let mut line = map.get(&(index / LINE), 0).unwrap();
    let result = edit(&mut line, (index % LINE) as usize);
    map.set(index / LINE, line, 0).unwrap();
    result
}

/// And what no packet needs of its flow.
fn edit_details(plane: &mut Plane, index: u32, edit: impl FnOnce(&mut Details)) {
    let number = edit_line(plane, index, |line, record| line.details[record]);
    let map = plane.plane().bpf_mut().map_mut("DETAILS").unwrap();
    let mut map = aya::maps::Array::<_, Details>::try_from(map).unwrap();
    let mut details = map.get(&number, 0).unwrap();
    edit(&mut details);
    map.set(number, details, 0).unwrap();
}

#[test]
fn an_age_grows_to_its_limit_and_stays_there() {
    let setup = Setup {
        start: 1 << 40,
        ..Setup::default()
    };
    let mut plane = setup.load();
    establish(&mut plane, 1);
    let now = plane.now() as u32;
    let flow = index(&mut plane, 1);
    edit_details(&mut plane, flow, |details| {
        details.created = now.wrapping_sub(MAX_AGE - 20_000);
    });
    let age = |plane: &mut Plane| {
        let flow = plane.plane().flows().unwrap().iter().next().unwrap();
        (plane.now() as u32).wrapping_sub(flow.created)
    };
    // A visit a minute.
    for second in 0..600 {
        plane.pass(1_000);
        plane.receive(&frame(1, false, ACK));
        plane.step();
        let age = age(&mut plane);
        assert!(age <= MAX_AGE + 61_000, "{age} after {second} s");
        assert!(age >= MAX_AGE - 20_000, "{age}: an age has wrapped");
    }
    plane.pass(60_100);
    let events = plane.step();
    assert!(events[0].age >= MAX_AGE, "{}", events[0].age);
}

#[test]
fn a_life_that_is_still_beginning_is_neither_ended_nor_begun_again() {
    let mut plane = Setup::default().load();
    plane.receive(&frame(1, false, SYN));
    plane.receive(&frame(1, true, RST | ACK));
    let flow = index(&mut plane, 1);
    edit_line(&mut plane, flow, |line, record| {
        let word = line.words[record];
        line.words[record] = Word::new(word.0, word.generation(), word.seen().starting());
    });
    // As if another CPU had been held up within a supersede.
    plane.pass(1);
    plane.receive(&frame(1, false, SYN));
    plane.receive(&frame(1, true, SYN | ACK));
    assert_eq!(plane.count(Counter::Superseded), 0);
    assert_eq!(plane.count(Counter::Raced), 1);
    plane.pass(10_100);
    assert!(plane.step().is_empty());
    assert_eq!(plane.counters().live(), 1);
    let flows = plane.plane().flows().unwrap();
    assert_eq!(flows.get(flow), None, "whose beginning nobody knows");
    // It goes on, and the flow ends at the next tick.
    edit_line(&mut plane, flow, |line, record| {
        line.words[record].0 &= u64::from(Word::STARTED) << 32 | 0xffff_ffff;
    });
    plane.pass(100);
    assert_eq!(all_ended(&plane.step()), [(Reason::Reset, State::Close)]);
}

#[test]
fn each_flow_has_the_timeouts_of_the_first_rule_it_meets() {
    let mut plane = Setup::default().load();
    plane.policy(
        r#"
        [timeouts]
        established = "50s"
        unreplied = "50s"
        [[rule]]
        name = "late"
        src = "10.0.0.1"
        timeouts = { established = "90s", unreplied = "90s" }
        [[rule]]
        name = "out"
        direction = "out"
        timeouts = { unreplied = "20s" }
        [[rule]]
        name = "web"
        dport = [443, "80-81"]
        iface = "any"
        timeouts = { unreplied = "30s" }
        "#,
    );
    // To port 80 of 192.0.2.1, from 10.0.0.0; from 10.0.0.1; seen where it goes out; and to the other side.
    plane.receive(&frame(1, false, ACK));
    plane.receive(&frame(50_004, false, ACK));
    plane.send(&frame(2, false, ACK));
    plane.receive(&frame(3, true, ACK));
    let rules = [1, 50_004, 2, 3].map(|client| flows_rule(&mut plane, client));
    let [web, late, out, none] = rules;
    let data_plane = plane.plane();
    let names = Names::open(&|name: &str| data_plane.open(name)).unwrap();
    let name = |number| names.of(number).unwrap();
    assert_eq!(
        [late, out, web].map(name),
        ["late", "out", "web"].map(|name| Some(name.to_owned()))
    );
    assert_eq!(none, 0);
    let mut ends = Vec::new();
    for second in 1..=100 {
        plane.pass(1_000);
        ends.extend(plane.step().iter().map(|event| (second, event.rule)));
    }
    let expected = [(20, out), (30, web), (50, 0), (90, late)];
    assert_eq!(ends, expected);
}

/// The frame, in these VLANs, the outer one first.
fn tagged(frame: &[u8], vlans: &[u16]) -> Vec<u8> {
    let tags = vlans.iter().flat_map(|vlan| {
        let [high, low] = vlan.to_be_bytes();
        [0x81, 0, high, low]
    });
    let (addresses, rest) = frame.split_at(12);
    [addresses, &tags.collect::<Vec<_>>(), rest].concat()
}

#[test]
fn flows_of_the_same_addresses_have_the_timeouts_of_their_vlans() {
    let mut plane = Setup::default().load();
    plane.policy(
        r#"
        [timeouts]
        unreplied = "50s"
        [[rule]]
        name = "ten"
        vlan = 10
        timeouts = { unreplied = "20s" }
        [[rule]]
        name = "twenty"
        vlan = [20, 21]
        timeouts = { unreplied = "30s" }
        [[rule]]
        name = "untagged"
        vlan = 0
        timeouts = { unreplied = "40s" }
        "#,
    );
    let data_plane = plane.plane();
    let names = Names::open(&|name: &str| data_plane.open(name)).unwrap();
    let cases: [(&[u16], Option<&str>, u64); 7] = [
        (&[10], Some("ten"), 20),
        (&[20], Some("twenty"), 30),
        // By the inner one; the first rule of either; neither.
        (&[5, 20], Some("twenty"), 30),
        (&[20, 10], Some("ten"), 20),
        (&[5, 6], None, 50),
        (&[30], None, 50),
        (&[], Some("untagged"), 40),
    ];
    for (vlans, ..) in cases {
        plane.receive(&tagged(&frame(1, false, ACK), vlans));
    }
    let flows: BTreeMap<_, _> = plane
        .plane()
        .flows()
        .unwrap()
        .iter()
        .map(|flow| (flow.key.vlans(), names.of(flow.rule).unwrap()))
        .collect();
    assert_eq!(flows.len(), cases.len());
    for (vlans, rule, _) in cases {
        let mut both = vlans.to_vec();
        both.resize(2, 0);
        assert_eq!(flows[&[both[0], both[1]]].as_deref(), rule, "{vlans:?}");
    }
    let mut ends = Vec::new();
    for second in 1..=60 {
        plane.pass(1_000);
        ends.extend(plane.step().iter().map(|_| second));
    }
    let mut expected = cases.map(|(.., second)| second);
    expected.sort_unstable();
    assert_eq!(ends, expected);
}

#[test]
fn vlans_of_an_old_policy_count_no_more() {
    let mut plane = Setup::default().load();
    let rule = |name: &str, vlan| format!("[[rule]]\nname = '{name}'\nvlan = {vlan}\n");
    // The third is written where the first was.
    for (name, vlan) in [("first", 10), ("second", 20), ("third", 30)] {
        plane.policy(&rule(name, vlan));
    }
    for vlan in [10, 20, 30] {
        plane.receive(&tagged(&frame(1, false, ACK), &[vlan]));
    }
    let flows = plane.plane().flows().unwrap();
    let mut met: Vec<_> = flows
        .iter()
        .map(|flow| (flow.key.vlans()[0], flow.rule != 0))
        .collect();
    met.sort_unstable();
    assert_eq!(met, [(10, false), (20, false), (30, true)]);
}

/// By the numbers that `--zone` gives, whatever their places in keys.
#[test]
fn flows_have_the_rules_of_their_zones() {
    let setup = Setup {
        room: 1,
        ..Setup::default()
    };
    let mut plane = setup.load();
    let mut watch = Watch::open(plane.plane()).unwrap();
    let policy = "rule = [ { name = 'seven', zone = 7 }, { name = 'none', zone = 0 },
        { name = 'others', zone = [9, 65535] } ]";
    // The first two places are taken when the policy comes.
    for zone in [500, 9] {
        watch.enter(INTERFACE, "any", zone, 0).unwrap();
    }
    plane.policy(policy);
    let wanted = [
        (7, Some("seven")),
        (0, Some("none")),
        (9, Some("others")),
        (65_535, Some("others")),
        (500, None),
    ];
    for (client, (zone, rule)) in (1..).zip(wanted) {
        watch.enter(INTERFACE, "any", zone, 0).unwrap();
        plane.receive(&frame(client, false, ACK));
        let names = {
            let data_plane = plane.plane();
            Names::open(&|name: &str| data_plane.open(name)).unwrap()
        };
        let port = frame(client, false, ACK)[34..36].to_vec();
        let flows = plane.plane().flows().unwrap();
        let flow = flows
            .iter()
            .find(|flow| {
                flow.key.ports().to_le_bytes()[..4]
                    .windows(2)
                    .any(|it| it == port)
            })
            .unwrap();
        assert_eq!(names.zone(flow.key.zone()).unwrap(), zone);
        assert_eq!(names.of(flow.rule).unwrap().as_deref(), rule, "{zone}");
    }
    // A policy may take all places that are left, and no more. What is refused changes nothing.
    let zones = |from: u16, count: u16| {
        let all: Vec<u16> = (from..from + count).collect();
        format!("[[rule]]\nname = 'many'\nzone = {all:?}\n")
    };
    let refused = plane.try_policy(&zones(1000, 60)).unwrap_err();
    assert!(
        refused
            .to_string()
            .contains(": zone 1059 is one zone too many"),
        "{refused}"
    );
    assert!(refused.to_string().starts_with("test:3:"), "{refused}");
    plane.try_policy(&zones(2000, 59)).unwrap();
    assert!(plane.try_policy(&zones(3000, 1)).is_err());
    plane.try_policy(&zones(2010, 3)).unwrap();
}

/// The rule of the flow of a client.
fn flows_rule(plane: &mut Plane, client: u32) -> u16 {
    let index = index(plane, client);
    plane.plane().flows().unwrap().get(index).unwrap().rule
}

#[test]
fn live_flows_follow_a_new_policy_within_a_tick() {
    let mut plane = Setup::default().load();
    let rule = |name: &str, timeout: &str| {
        format!("[[rule]]\nname = '{name}'\ndport = 80\ntimeouts = {{ unreplied = '{timeout}' }}\n")
    };
    plane.policy(&rule("web", "600s"));
    plane.receive(&frame(1, false, ACK));
    let number = flows_rule(&mut plane, 1);
    // Others come before it in the file; it keeps its number by its name.
    let other = "[[rule]]\nname = 'ssh'\ndport = 22\ntimeouts = { close = '1s' }\n";
    plane.policy(&format!("{other}{}", rule("web", "20s")));
    assert_eq!(plane.sweep(), 1);
    assert_eq!(flows_rule(&mut plane, 1), number);
    plane.pass(20_100);
    assert_eq!(plane.step().len(), 1);
    // A rule that is gone leaves its flows to none.
    plane.receive(&frame(2, false, ACK));
    assert_eq!(flows_rule(&mut plane, 2), number);
    plane.policy(other);
    assert_eq!(plane.sweep(), 1);
    assert_eq!(flows_rule(&mut plane, 2), 0);
    plane.pass(59_900);
    assert!(plane.step().is_empty());
    plane.pass(200);
    assert_eq!(plane.step().len(), 1);
    // Its number is another's by and by, and no flow is mistaken for that one's.
    plane.policy(&rule("new", "20s"));
    plane.receive(&frame(3, false, ACK));
    assert_ne!(flows_rule(&mut plane, 3), 0);
}

/// A UDP datagram or an ICMP message, from 10.0.0.`client` to 192.0.2.1, or back; over IPv6 likewise.
fn datagram(client: u8, back: bool, icmp: Option<u8>, v6: bool) -> Vec<u8> {
    let (low, high) = (client, 200);
    let (source, destination) = if back { (high, low) } else { (low, high) };
    let link = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6]);
    let ip = if v6 {
        let address = |last| [0x20, 1, 0xd, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last];
        link.ipv6(address(source), address(destination), 64)
    } else {
        link.ipv4([10, 0, 0, source], [10, 0, 0, destination], 64)
    };
    let mut frame = Vec::new();
    match icmp {
        None => {
            let (sport, dport) = if back { (53, 5_000) } else { (5_000, 53) };
            ip.udp(sport, dport).write(&mut frame, &[0; 20]).unwrap();
        }
        Some(kind) => {
            let header = [kind, 0, 0, 0, 0x12, 0x34, 0, 1];
            let proto = if v6 { 58 } else { 1 };
            ip.write(&mut frame, proto.into(), &header).unwrap();
        }
    }
    frame
}

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
        // An answer to nothing begins nothing.
        plane.receive(&datagram(9, true, Some(reply), v6));
        assert_eq!(plane.counters().live(), 0);
        // One question; one with an answer; a conversation; a ping; and TCP beside them.
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
    // Whose account it is, the initiator's or the responder's, is as the key has them in order.
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
    // One that is ignored is counted all the same.
    plane.receive(&frame(2, false, SYN));
    // Another life of the same key counts anew, from the answer.
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
            // The SYN of that life was the old one's to count.
            [(0, 0), (1, bytes)],
            [(1, datagrams.0), (2, datagrams.1)],
            [(2, 2 * bytes), (0, 0)],
        ]
    );
    // A place that is given to another flow begins with nothing.
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

#[test]
fn what_is_not_asked_for_is_not_tracked() {
    let mut plane = Setup::default().load();
    plane.receive(&datagram(1, false, None, false));
    plane.receive(&datagram(1, false, Some(128), true));
    assert_eq!(plane.count(Counter::NotTracked), 2);
    assert_eq!(plane.counters().live(), 0);
}

#[test]
fn a_policy_of_no_rules_is_none() {
    let mut plane = Setup::default().load();
    plane.policy("[timeouts]\nunreplied = '5s'\n");
    plane.receive(&frame(1, false, ACK));
    plane.pass(5_100);
    assert_eq!(plane.step().len(), 1);
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
    assert_eq!(found, keys, "byte for byte");
}

#[test]
fn a_flow_stands_on_the_wheel_of_the_cpu_that_saw_it_first() {
    let mut plane = Setup::default().load();
    establish(&mut plane, 1);
    plane.pass(50_000);
    pin_to(1).expect("this test needs two CPUs");
    plane.step();
    plane.receive(&frame(1, false, ACK));
    establish(&mut plane, 2);
    plane.receive(&frame(1, true, FIN | ACK));
    plane.pass(59_000);
    assert!(plane.step().is_empty());
    plane.pass(1_100);
    let on_one = plane.step();
    pin_to(0).unwrap();
    let on_zero = plane.step();
    assert_eq!((on_zero.len(), on_one.len()), (1, 1));
    assert_eq!((on_zero[0].cpu, on_one[0].cpu), (0, 1));
    assert_eq!(ended(&on_zero[0]).1, State::FinWait, "what CPU 1 saw");
    assert_eq!(plane.counters().live(), 0);
}

#[test]
fn a_sleeping_stepper_is_called_for_a_flow_that_is_due_earlier() {
    let mut plane = Setup::default().load();
    let mut wakes = plane.plane().take_wakes().unwrap();
    assert_eq!(plane.next_turn(), None, "an empty wheel is waited for");
    plane.receive(&frame(1, false, SYN));
    let cpu = wakes
        .next()
        .map(|record| u64::from_ne_bytes((*record).try_into().unwrap()));
    assert_eq!(cpu, Some(0));
    plane.receive(&frame(2, false, SYN));
    assert!(wakes.next().is_none(), "called twice for the same time");
    let next = plane.next_turn().unwrap();
    assert!(next > plane.now() && next <= plane.now() + 60_000);
    plane.receive(&frame(3, false, SYN));
    assert!(wakes.next().is_none(), "the stepper comes in time anyway");
    // Stepped at the times it asks for, and at no other, it finds every end.
    let mut ends = 0;
    let mut steps = 0;
    while let Some(next) = plane.next_turn() {
        plane.at(next);
        ends += plane.step().len();
        steps += 1;
    }
    assert_eq!(ends, 3);
    assert!(steps < 20, "{steps} steps");
}

#[test]
fn a_deadline_that_comes_forward_twice_on_another_cpu_is_kept_both_times() {
    let mut plane = Setup {
        one_way: false,
        ..Setup::default()
    }
    .load();
    let mut timeouts = plane.plane().timeouts(0).unwrap();
    timeouts.0[State::FinWait as usize] = 30_000;
    timeouts.0[State::Close as usize] = 1_000;
    plane.plane().set_timeouts(0, &timeouts).unwrap();
    let mut wakes = plane.plane().take_wakes().unwrap();
    for (back, flags) in [(false, SYN), (true, SYN | ACK), (false, ACK)] {
        plane.receive(&frame(1, back, flags));
    }
    assert!(wakes.next().is_some());
    let turn = plane.next_turn().unwrap();
    plane.pass(20_000);
    pin_to(1).unwrap();
    plane.receive(&frame(1, false, ACK | FIN));
    assert!(wakes.next().is_none(), "the stepper comes in time anyway");
    // It is in the inbox already. Now it is due before the stepper comes.
    assert!(plane.now() + 1_000 < turn);
    plane.receive(&frame(1, false, ACK | RST));
    let called = wakes
        .next()
        .map(|record| u64::from_ne_bytes((*record).try_into().unwrap()));
    assert_eq!(called, Some(0));
    pin_to(0).unwrap();
    assert!(plane.step().is_empty());
    let turn = plane.next_turn().unwrap();
    assert!((1_000..=1_200).contains(&(turn - plane.now())));
    plane.at(turn);
    let ends: Vec<_> = plane.step().iter().map(ended).collect();
    assert_eq!(ends, [(Reason::Reset, State::Close)]);
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
        assert!(records >= before, "less at level {log_level}");
        assert_eq!(records > 0, log_level >= 4, "{records} at {log_level}");
        before = records;
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
    assert!(each <= 160, "{each} bytes a flow");
}

/// As in [`frame`].
fn port(client: u32) -> u16 {
    1024 + client as u16
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

/// xorshift64*: the tests are the same each time.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }
}

/// A segment with data, or without, from the client or back, over IPv4.
fn segment(back: bool, flags: u8, seq: u32, ack: u32, length: usize) -> Vec<u8> {
    let (client, server) = (([10, 0, 0, 1], 1025), ([192, 0, 2, 1], 80));
    let (from, to) = if back {
        (server, client)
    } else {
        (client, server)
    };
    let mut tcp = etherparse::PacketBuilder::ethernet2([2; 6], [4; 6])
        .ipv4(from.0, to.0, 64)
        .tcp(from.1, to.1, seq, 1_000);
    if flags & SYN != 0 {
        tcp = tcp.syn();
    }
    if flags & ACK != 0 {
        tcp = tcp.ack(ack);
    }
    let mut frame = Vec::new();
    tcp.write(&mut frame, &vec![0; length]).unwrap();
    frame
}

/// A data plane with retransmission timers, and a flow in it with a round trip of 20 ms.
fn timed() -> Plane {
    let setup = Setup {
        tick: 10,
        rto: true,
        one_way: false,
        ..Setup::default()
    };
    let mut plane = setup.load();
    plane.receive(&segment(false, SYN, 999, 0, 0));
    plane.send(&segment(true, SYN | ACK, 4_999, 1_000, 0));
    plane.receive(&segment(false, ACK, 1_000, 5_000, 0));
    for number in 0..20 {
        plane.send(&segment(true, ACK, 5_000 + 10 * number, 1_000, 10));
        plane.pass(20);
        plane.receive(&segment(false, ACK, 1_000, 5_010 + 10 * number, 0));
    }
    plane
}

/// Steps through so many milliseconds. When timers have expired, since now, and how often before; and how many flows
/// have ended.
fn expiries(plane: &mut Plane, milliseconds: u64) -> (Vec<(u64, u32)>, usize) {
    let (mut found, mut ended) = (Vec::new(), 0);
    for elapsed in (10..=milliseconds).step_by(10) {
        plane.pass(10);
        for record in plane.step_all() {
            match record {
                Told::Rto(event) => {
                    assert_eq!(
                        event.key.sender(Direction::FromLow).port() == 80,
                        event.direction == 0
                    );
                    found.push((elapsed, event.expiries));
                }
                Told::Ended(_) => ended += 1,
            }
        }
    }
    (found, ended)
}

#[test]
fn a_retransmission_timer_expires_backs_off_and_gives_the_flow_up() {
    let mut plane = timed();
    let mut timeouts = plane.plane().timeouts(0).unwrap();
    timeouts.0[Timeouts::RETRANS] = 3_000;
    plane.plane().set_timeouts(0, &timeouts).unwrap();
    assert_eq!(
        expiries(&mut plane, 5_000),
        (vec![], 0),
        "nothing is outstanding"
    );
    plane.send(&segment(true, ACK, 5_200, 1_000, 100));
    // 20 ms and 200, and an eighth; then twice that, and so on. With the third the flow is stalled, and ends three
    // seconds after its last packet, not a minute.
    let (found, ended) = expiries(&mut plane, 3_100);
    let (times, numbers): (Vec<_>, Vec<_>) = found.into_iter().unzip();
    assert_eq!(numbers, [1, 2, 3]);
    for (time, wanted) in times.iter().zip([248, 743, 1_733]) {
        assert!((wanted..wanted + 40).contains(time), "{times:?}");
    }
    assert_eq!(plane.count(Counter::Stalled), 1);
    assert_eq!((ended, plane.counters().live()), (1, 0));
}

#[test]
fn who_answers_is_not_stalled() {
    let mut plane = timed();
    plane.send(&segment(true, ACK, 5_200, 1_000, 100));
    let (found, _) = expiries(&mut plane, 2_000);
    assert_eq!(found.len(), 3);
    assert_eq!(plane.count(Counter::Stalled), 1);
    let stalled = |plane: &mut Plane| {
        let flows: Vec<_> = plane.plane().flows().unwrap().iter().collect();
        flows[0].word.seen().is_stalled()
    };
    assert!(stalled(&mut plane));
    plane.send(&segment(true, ACK, 5_200, 1_000, 100));
    plane.receive(&segment(false, ACK, 1_000, 5_300, 0));
    assert!(!stalled(&mut plane));
    assert_eq!(expiries(&mut plane, 5_000), (vec![], 0));
    // The timer begins as if nothing had been.
    plane.send(&segment(true, ACK, 5_300, 1_000, 100));
    let (found, _) = expiries(&mut plane, 400);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0].1, 1);
}

#[test]
fn a_retransmission_is_reported_at_the_next_tick() {
    let mut plane = timed();
    plane.send(&segment(true, ACK, 5_200, 1_000, 100));
    plane.send(&segment(true, ACK, 5_300, 1_000, 100));
    assert_eq!(expiries(&mut plane, 100).0, []);
    // The last of two, long before: a probe.
    plane.send(&segment(true, ACK, 5_300, 1_000, 100));
    assert_eq!(expiries(&mut plane, 110).0, []);
    // The oldest, at its time.
    plane.send(&segment(true, ACK, 5_200, 1_000, 100));
    assert_eq!(expiries(&mut plane, 100).0, [(10, 1)]);
}

#[test]
fn a_timer_that_starts_on_another_cpu_calls_the_stepper_of_the_flows() {
    let mut plane = timed();
    let mut wakes = plane.plane().take_wakes().unwrap();
    while wakes.next().is_some() {}
    plane.step();
    let turn = plane.next_turn().unwrap();
    assert!(turn > plane.now() + 1_000);
    pin_to(1).expect("this test needs two CPUs");
    plane.send(&segment(true, ACK, 5_200, 1_000, 100));
    let called = wakes
        .next()
        .map(|record| u64::from_ne_bytes((*record).try_into().unwrap()));
    assert_eq!(called, Some(0));
    // More data, and the timer runs already.
    plane.send(&segment(true, ACK, 5_300, 1_000, 100));
    assert!(wakes.next().is_none());
    pin_to(0).unwrap();
    let mut reported = 0;
    for _ in 0..4 {
        reported += plane
            .step_all()
            .iter()
            .filter(|it| matches!(it, Told::Rto(_)))
            .count();
        if reported > 0 {
            break;
        }
        let turn = plane.next_turn().unwrap();
        plane.at(turn);
    }
    assert_eq!(reported, 1);
    assert_eq!(plane.count(Counter::Orphans), 0);
}

/// A plane that refuses packets of flows that have expired.
fn enforcing() -> Plane {
    Setup {
        enforce: true,
        ..Setup::default()
    }
    .load()
}

/// A flow that has expired, and that this is the verdict of.
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

/// The answer to it: the other way, with that number, and that acknowledgment if there is one.
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
    expire(&mut plane, 1, Tomb::DROP);
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
    // What goes out passes, and begins a flow as ever. Of a flow in the table nothing is dropped.
    plane.send(&frame(1, true, ACK));
    plane.receive(&frame(1, false, ACK));
    assert_eq!(plane.counters().live(), 1);
    // Nor of one that nobody has said has expired.
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
            Tomb::RESET,
        );
        (header.ack, header.acknowledgment_number) = (true, 77_000);
        // With data, and with options; more of it than the answer is long, nothing, and more than a page.
        for (length, fin) in [(1_400, false), (0, false), (9_000, true), (0, true)] {
            header.fin = fin;
            let packet = segment(&header, &vec![9; length]);
            let expected = reset_frame(v6, &header, 77_000, None);
            assert_eq!(plane.verdict(&packet), (TX, expected));
            header.set_options_raw(&[1; 12]).unwrap();
        }
        // Padded to Ethernet's least.
        let mut padded = segment(&header, &[]);
        padded.resize(padded.len() + 6, 0);
        let expected = reset_frame(v6, &header, 77_000, None);
        assert_eq!(plane.verdict(&padded), (TX, expected));
        // The only ones without an ACK that stacks send are a SYN and a RST.
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
    plane.bury(&bytes, Tomb::RESET);
    let mut tagged = bytes.clone();
    tagged.splice(12..12, [0x81, 0, 0, 7]);
    plane.bury(&tagged, Tomb::RESET);
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
    for (port, verdict) in [(1, Tomb::DROP), (2, Tomb::RESET)] {
        let mut datagram = Vec::new();
        PacketBuilder::ethernet2([2; 6], [4; 6])
            .ipv4([10, 0, 0, 1], [10, 0, 0, 2], 64)
            .udp(port, 53)
            .write(&mut datagram, b"?")
            .unwrap();
        // As the tests' parser sees TCP alone, the key is taken from the table.
        plane.receive(&datagram);
        plane.pass(200_000);
        let key = plane.step()[0].key;
        plane.bury_key(key, verdict);
        // More of them than a source has answers.
        for _ in 0..20 {
            assert_eq!(plane.verdict(&datagram), (DROP, datagram.clone()));
        }
    }
    assert_eq!(plane.count(Counter::EnforcedDropped), 40);
}

#[test]
fn a_syn_passes_and_ends_that_packets_are_refused() {
    let mut plane = enforcing();
    for (client, verdict) in [(1, Tomb::DROP), (2, Tomb::RESET)] {
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
    // One that goes out begins a connection, too.
    expire(&mut plane, 3, Tomb::RESET);
    plane.send(&frame(3, true, SYN));
    assert!(!plane.is_buried(&frame(3, false, SYN)));
    plane.receive(&frame(3, false, SYN | ACK));
    plane.pass(200_000);
    plane.step();
    // The answer to one that was not seen passes.
    expire(&mut plane, 4, Tomb::RESET);
    plane.receive(&frame(4, false, SYN | ACK));
    assert!(plane.is_buried(&frame(4, false, SYN)));
}

#[test]
fn a_source_has_so_many_answers_a_second() {
    let mut plane = enforcing();
    // The same source, and another.
    let clients = [1, 2, 50_001];
    for client in clients {
        plane.bury(&frame(client, false, ACK), Tomb::RESET);
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
    // And the other end of the connection is another source.
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
        // A SYN may have ended it.
        plane.bury(&bytes, Tomb::RESET);
        // So that everything may be answered, and no flow is in the table.
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
    expire(&mut plane, 1, Tomb::DROP);
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

#[test]
fn an_ended_flow_says_how_far_its_sides_have_sent() {
    let mut plane = Setup {
        one_way: false,
        ..Setup::default()
    }
    .load();
    plane.receive(&segment(false, SYN, 999, 0, 0));
    plane.send(&segment(true, SYN | ACK, 4_999, 1_000, 0));
    plane.receive(&segment(false, ACK, 1_000, 5_000, 300));
    plane.send(&segment(true, ACK, 5_000, 1_300, 70));
    plane.pass(60_100);
    let event = plane.step()[0];
    let low_is_client = event.key.sender(Direction::FromLow).port() != 80;
    let expected = if low_is_client {
        [1_300, 5_070]
    } else {
        [5_070, 1_300]
    };
    assert_eq!(event.positions, expected);
    // Of a side that was never seen there is what the other has acknowledged; of a datagram's, nothing.
    plane.receive(&segment(false, SYN, 999, 0, 0));
    plane.pass(200_000);
    let [low, high] = plane.step()[0].positions;
    assert_eq!(
        if low_is_client {
            [low, high]
        } else {
            [high, low]
        },
        [1_000, 0]
    );
}
