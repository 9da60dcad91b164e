//! Flows whose packets several CPUs see.

use twheel::stepper::pin_to;
use twheel_common::{event::Reason, state::State};
use twheel_tests::plane::{ACK, FIN, RST, SYN, Setup, frame};

use crate::{ended, establish};

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
    assert_eq!(ended(&on_zero[0]).1, State::FinWait, "CPU 1 saw the FIN");
    assert_eq!(plane.counters().live(), 0);
}

#[test]
fn a_sleeping_stepper_is_called_for_a_flow_that_is_due_earlier() {
    let mut plane = Setup::default().load();
    let mut wakes = plane.plane().take_wakes().unwrap();
    assert_eq!(
        plane.next_turn(),
        None,
        "the stepper waits for an empty wheel"
    );
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
    assert!(
        wakes.next().is_none(),
        "the stepper was called, though its next turn is early enough"
    );
    // Stepped only at the times that it asks for, it finds every end.
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
    assert!(
        wakes.next().is_none(),
        "the stepper was called, though its next turn is early enough"
    );
    // The flow is in the inbox already. Now it becomes due before the stepper's next turn.
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
