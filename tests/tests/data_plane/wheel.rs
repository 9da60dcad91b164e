//! When flows expire: the wheel compared with a map of deadlines, other schemes, stalls and
//! budgets.

use std::collections::{BTreeMap, HashSet};

use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::Direction,
    packet::parse,
    state::{Change, State},
    step::Outcome,
    tracked::Tracked,
    wheel::WheelScheme,
};
use twheel_tests::{
    is_long,
    plane::{ACK, FIN, RST, SYN, Setup, frame, twins},
};

use crate::{ONE_WAY, Random, all_ended, ended, establish, port};

/// Packets are stamped by a clock that may stand still for six units and then jump.
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
            // Either a packet or a step reads the clock now.
            match by_packet {
                true => establish(&mut plane, 2),
                false => assert!(plane.step().is_empty()),
            }
            plane.at(due - 1);
            assert!(plane.step().is_empty(), "too early, after {jump} units");
            plane.at(due);
            assert_eq!(plane.step().len(), 1, "too late, after {jump} units");
        }
    }
}

#[test]
fn the_wheel_agrees_with_a_map_of_deadlines_over_days() {
    use WheelScheme::*;
    const TWINS: u64 = 2_000_000;
    // The number of random operations (packets, time passing, steps) for each scheme.
    let operations = if is_long() { 1_000_000 } else { 100_000 };
    for (scheme, slots, tick, timeout, close, start) in [
        (Hierarchical, None, 100, 60_000, 10_000, 1_000_000),
        // In this case, flows have twins.
        (Hierarchical, None, 100, 60_000, 10_000, TWINS),
        // Stamps wrap around in this case, and ticks too.
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
                // The deadline of its twin would change.
                continue;
            }
            let frame = frame(client, random.below(2) == 0, flags);
            plane.receive(&frame);
            let now = plane.now();
            let segment = parse(frame.as_slice()).unwrap();
            match oracle.get_mut(&client) {
                None => {
                    if let Some(flow) = Tracked::first(&segment, ONE_WAY) {
                        let due = now + u64::from(timeouts.timeout(flow.seen));
                        oracle.insert(client, (due, flow));
                    }
                }
                Some((due, flow)) => match flow.see(&segment, ONE_WAY) {
                    Change::Ignored | Change::Ended | Change::AddIfItLasts(_) => {}
                    // A SYN in doubt does not keep the flow alive.
                    Change::Doubt(..) if flags & SYN != 0 => {}
                    _ => *due = now + u64::from(timeouts.timeout(flow.seen)),
                },
            }
            plane.pass(match random.below(30) {
                0 => random.below(timeout * 2),
                1 => random.below(timeout / 4),
                _ => random.below(close / 4),
            });
            // `must`: flows that were due at the last tick have ended. `may`: flows that are due
            // now may have ended, if a visit came for another reason.
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
        assert!(ends > 300, "only {ends} flows ended: too few to compare");
    }
}

#[test]
fn three_schemes_report_the_same_flows_at_the_same_steps() {
    let mut planes = [
        (WheelScheme::Simple, None),
        (WheelScheme::Hashed, Some(8)),
        (WheelScheme::Hierarchical, Some(4)),
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
        // Steps come at any time, not only when ticks begin.
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
        (WheelScheme::Hierarchical, None),
        (WheelScheme::Hashed, None),
        (WheelScheme::Simple, None),
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
            // The new flow has woken the stepper.
            assert!(plane.step().is_empty());
            plane.pass(60_100);
            assert_eq!(all_ended(&plane.step()), [(Reason::Idle, State::SynSent)]);
            let visits = plane.count(Counter::Visits) - visits;
            // A cascade counts as a visit, and a timer moves at most the shortest timeout ahead at
            // once.
            assert!(visits <= 8, "{scheme:?}, hour {hour}: {visits} visits");
        }
    }
}

#[test]
fn a_stall_of_hours_evicts_nobody_for_the_stalls_sake() {
    let mut plane = Setup::default().load();
    for client in 0..500 {
        establish(&mut plane, client);
    }
    // No step for three hours; at the end, half of the flows have a packet.
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
