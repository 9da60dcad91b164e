//! Flows that userspace deletes.

use std::collections::HashSet;

use twheel::stepper::pin_to;
use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::Direction,
    state::State,
    step::{Delete, Deleted},
};
use twheel_tests::plane::{ACK, RST, SYN, Setup, frame};

use crate::{ended, establish};

#[test]
fn a_flow_that_stands_in_an_inbox_is_deleted() {
    // More than one call takes out of an inbox.
    const FLOWS: u32 = 1_500;
    let mut plane = Setup::default().load();
    for client in 0..FLOWS {
        establish(&mut plane, client);
    }
    // The flows of even clients are closed on the CPU of their wheel, the others on another CPU,
    // which posts them.
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
    let outcome =
        |delete: &Delete| Deleted::from_raw(delete.outcome).expect("the outcome is not valid");
    let mut done = 0;
    // A call that leaves some flows in the inbox has taken others out.
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
    // Nothing of them is left.
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
    // From a CPU other than their wheel's, nothing is deleted.
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
    // Deleting them again has no effect.
    plane.plane().delete(&mut deletes).unwrap();
    assert!(plane.drain().is_empty());
    assert_eq!(plane.plane().tracked().unwrap(), busy.len() as u64);
    assert_eq!(plane.counters().live(), busy.len() as u64);
    // The lists are intact: the other flows end at their time, and a deleted key can begin again.
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
