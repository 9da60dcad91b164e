//! How flows begin, live and end.

use std::net::SocketAddr;

use twheel::{clock::Clock, output::Ended};
use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::{Direction, MAX_AGE, Word},
    state::State,
    table::{Details, LINE, Line},
};
use twheel_tests::plane::{ACK, FIN, Plane, RST, SYN, Setup, frame};

use crate::{all_ended, establish, index, segment};

#[test]
fn an_idle_flow_expires_at_the_first_tick_after_its_timeout() {
    let mut plane = Setup::default().load();
    plane.at(1_000_030);
    establish(&mut plane, 7);
    plane.at(1_060_029);
    assert!(plane.step().is_empty(), "early");
    plane.at(1_060_099);
    assert!(plane.step().is_empty(), "expired before the tick");
    plane.at(1_060_100);
    let events = plane.step();
    assert_eq!(events.len(), 1);
    let ended = Ended::new(&events[0], Clock::virtual_ms(), true).unwrap();
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
    assert!(plane.step().is_empty(), "one FIN has closed the flow");
    plane.send(&frame(1, true, FIN | ACK));
    plane.receive(&frame(1, false, ACK));
    assert_eq!(plane.count(Counter::Created), 1);
    plane.pass(10_100);
    assert_eq!(
        all_ended(&plane.step()),
        [(Reason::Closed, State::TimeWait)]
    );
    // A FIN or RST is sent again after the connection's end.
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
    assert!(
        !plane.ring_is_readable(),
        "the flow ended before the SYN was answered"
    );
    plane.send(&frame(1, true, SYN | ACK));
    assert!(plane.ring_is_readable(), "userspace was not woken");
    let events = plane.drain();
    assert_eq!(all_ended(&events), [(Reason::Superseded, State::Close)]);
    assert_eq!((events[0].age, events[0].idle), (1_000, 1_000));
    plane.receive(&frame(1, false, ACK));
    plane.pass(59_999);
    assert!(
        plane.step().is_empty(),
        "the new flow ended with the old one"
    );
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

/// Changes a line of records without the data plane's knowledge. The closure also gets the record's
/// number in the line.
fn edit_line<T>(plane: &mut Plane, index: u32, edit: impl FnOnce(&mut Line, usize) -> T) -> T {
    let map = plane.plane().bpf_mut().map_mut("FLOWS").unwrap();
    let mut map = aya::maps::Array::<_, Line>::try_from(map).unwrap();
    let mut line = map.get(&(index / LINE), 0).unwrap();
    let result = edit(&mut line, (index % LINE) as usize);
    map.set(index / LINE, line, 0).unwrap();
    result
}

/// The same for the details of a flow.
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
    // The flow is visited once a minute.
    for second in 0..600 {
        plane.pass(1_000);
        plane.receive(&frame(1, false, ACK));
        plane.step();
        let age = age(&mut plane);
        assert!(age <= MAX_AGE + 61_000, "{age} after {second} s");
        assert!(age >= MAX_AGE - 20_000, "{age}: the age has wrapped");
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
    // As if another CPU had been held up while it superseded the flow.
    plane.pass(1);
    plane.receive(&frame(1, false, SYN));
    plane.receive(&frame(1, true, SYN | ACK));
    assert_eq!(plane.count(Counter::Superseded), 0);
    assert_eq!(plane.count(Counter::Raced), 1);
    plane.pass(10_100);
    assert!(plane.step().is_empty());
    assert_eq!(plane.counters().live(), 1);
    let flows = plane.plane().flows().unwrap();
    assert_eq!(
        flows.get(flow),
        None,
        "the flow's beginning is not known yet"
    );
    // The other CPU continues, and the flow ends at the next tick.
    edit_line(&mut plane, flow, |line, record| {
        line.words[record].0 &= u64::from(Word::STARTED) << 32 | 0xffff_ffff;
    });
    plane.pass(100);
    assert_eq!(all_ended(&plane.step()), [(Reason::Reset, State::Close)]);
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
    // For a side that was never seen, the event has what the other side has acknowledged; for a
    // datagram's side, nothing.
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
