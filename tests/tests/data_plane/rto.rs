//! Retransmission timers.

use twheel::stepper::pin_to;
use twheel_common::{counter::Counter, event::Record as Told, flow::Direction, rule::Timeouts};
use twheel_tests::plane::{ACK, Plane, SYN, Setup};

use crate::segment;

/// A data plane with retransmission timers, and a flow in it with an RTT of 20 ms.
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

/// Steps through this many milliseconds. Returns when timers expired, from now on, with their
/// numbers of expiries in a row, and how many flows ended.
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
                other => panic!("{other:?}"),
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
        "a timer expired without outstanding data"
    );
    plane.send(&segment(true, ACK, 5_200, 1_000, 100));
    // 20 ms and 200 ms, and an eighth; then twice that, and so on. At the third expiry the flow is
    // stalled, and ends three seconds after its last packet, not a minute after it.
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
    // The timer starts afresh.
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
    // The last of two segments, sent again early: a probe.
    plane.send(&segment(true, ACK, 5_300, 1_000, 100));
    assert_eq!(expiries(&mut plane, 110).0, []);
    // The oldest segment, sent again when its timer is due.
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
    // More data, while the timer is running.
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
