//! What a report does with events, without a kernel.

use std::{cell::RefCell, io, mem, rc::Rc, time::UNIX_EPOCH};

use twheel_common::{
    event::{Birth, Pace},
    flow::{Direction, FlowKey, Traffic},
    packet::tcp,
    point::Point,
    state::{Seen, View},
};

use super::*;
use crate::{
    action::Reaped,
    clock::{Clock, Wall},
    model::Flow,
    output::text::Text,
    ring::Read,
};

/// What was done, in order.
type Log = Rc<RefCell<Vec<String>>>;

/// Stations that note each call.
struct Noted {
    log: Log,
    ring: Vec<Read>,
    kept: Option<watch::Receiver<u64>>,
    /// The error of each write, if writes are to fail.
    broken: Option<io::ErrorKind>,
}

impl Noted {
    fn note(&self, what: impl Into<String>) {
        self.log.borrow_mut().push(what.into());
    }
}

impl Stations for Noted {
    fn read(&mut self, _: usize) -> Result<Option<Batch>> {
        let events = mem::take(&mut self.ring);
        let wall = Wall::new(clock(), 0, UNIX_EPOCH);
        Ok((!events.is_empty()).then_some(Batch::new(events, wall)))
    }

    fn keep_own(&self, _: Vec<(Mark, Own)>) {}

    fn mark(&self) -> Mark {
        Mark {
            number: 1_000,
            time: UNIX_EPOCH,
        }
    }

    fn mark_of(&self, ended: &Event) -> Mark {
        Mark {
            number: ended.number,
            time: UNIX_EPOCH,
        }
    }

    fn keep(&self, batch: &Arc<Batch>) {
        self.note(format!("history {}", batch.events.len()));
    }

    fn kept(&self) -> Option<watch::Receiver<u64>> {
        self.kept.clone()
    }

    fn reap(&self, records: &[Record]) -> Result<()> {
        self.note(format!("reaper {}", records.len()));
        Ok(())
    }

    fn known_as(&self, _: &Flow) -> Result<KnownAs> {
        Ok(KnownAs {
            rule: Some("web".to_owned()),
            ..KnownAs::default()
        })
    }

    fn count(&self, ended: &[(Mark, &Event, Ended, KnownAs)]) {
        self.note(format!("metrics {}", ended.len()));
    }

    fn print(&mut self, lines: &[u8]) -> io::Result<()> {
        if let Some(kind) = self.broken {
            return Err(kind.into());
        }
        for line in str::from_utf8(lines).unwrap().lines() {
            assert!(line.contains("rule web"), "{line}");
            let age = line.split_once("age").unwrap().1;
            self.note(format!("output {}", age.split_whitespace().next().unwrap()));
        }
        Ok(())
    }

    fn release(&mut self, end: u64) -> bool {
        self.note(format!("release {end}"));
        true
    }

    fn release_all(&mut self) -> bool {
        false
    }
}

fn ended(age: u32) -> Record {
    let seen = Seen::first(Direction::FromLow, tcp::SYN, View::default()).unwrap();
    Record::Ended(Event {
        key: FlowKey::from_parts([0, 1, 0, 2], 1 << 32 | u64::from(age)),
        number: age.into(),
        at: 0,
        age,
        idle: 25,
        seen: seen.0,
        reason: Reason::Idle as u32,
        cpu: 0,
        rule: 7,
        point: Point::NONE,
        birth: Birth::default(),
        account: [Traffic::default(); 2],
        pace: [Pace::default(); 2],
        positions: [0; 2],
        before: Default::default(),
        since: 0,
        updates: 0,
    })
}

/// Ends of flows of these ages, in seconds, each in a record of its own.
fn read(ages: &[u32]) -> Vec<Read> {
    let read = |(number, age): (u64, &u32)| Read {
        record: ended(*age),
        end: 100 * number,
        free: 100 * number,
    };
    (1..).zip(ages).map(read).collect()
}

fn clock() -> Clock {
    Clock::of_jiffies(Duration::from_secs(1))
}

fn report(keep: bool, kept: Option<watch::Receiver<u64>>) -> (Report<Noted>, Log) {
    let log = Log::default();
    let stations = Noted {
        log: log.clone(),
        ring: Vec::new(),
        kept,
        broken: None,
    };
    let measure = Measure {
        clock: clock(),
        one_way: false,
    };
    let mut life = Life::opened(keep, false);
    life.loaded(false);
    life.running();
    let printer = Printer {
        output: Box::new(Text::default()),
        kinds: EventKind::ALL.to_vec(),
        notes: Notes::default(),
    };
    (
        Report::new(stations, printer, measure, life, Arc::default()),
        log,
    )
}

fn done(log: &Log) -> Vec<String> {
    mem::take(&mut *log.borrow_mut())
}

#[test]
fn an_event_comes_by_history_reaper_metrics_and_output_and_then_leaves_the_ring() {
    let (mut report, log) = report(false, None);
    report.stations.ring = read(&[10, 20]);
    assert!(report.go_on().unwrap());
    let all = [
        "history 2",
        "reaper 2",
        "metrics 2",
        "output 10.0s",
        "output 20.0s",
        "release 200",
    ];
    assert_eq!(done(&log), all);
    assert!(!report.go_on().unwrap());
    assert_eq!(done(&log), [""; 0]);
}

#[test]
fn a_record_of_several_events_leaves_the_ring_as_a_whole() {
    let (mut report, log) = report(false, None);
    let mut batch = read(&[1, 2, 3]);
    // The first two events are of one record; the last event's record has more events.
    (batch[0].free, batch[2].free) = (0, 200);
    report.stations.ring = batch;
    report.go_on().unwrap();
    let released = |it: &String| it.starts_with("release");
    let released: Vec<_> = done(&log).into_iter().filter(released).collect();
    assert_eq!(released, ["release 200"]);
}

#[test]
fn nothing_is_done_before_the_history_has_it() {
    let (tell, kept) = watch::channel(0);
    let (mut report, log) = report(false, Some(kept));
    report.stations.ring = read(&[10, 20]);
    assert!(report.go_on().unwrap());
    assert_eq!(done(&log), ["history 2"]);
    tell.send_replace(100);
    assert!(report.go_on().unwrap(), "half of it waits for the rest");
    assert_eq!(done(&log), [""; 0]);
    tell.send_replace(200);
    assert!(report.go_on().unwrap());
    assert_eq!(done(&log)[..2], ["reaper 2", "metrics 2"]);
}

#[test]
fn what_cannot_be_read_is_passed_over() {
    let (mut report, log) = report(false, None);
    let mut batch = read(&[1, 2]);
    if let Record::Ended(event) = &mut batch[0].record {
        event.reason = 99;
    }
    report.stations.ring = batch;
    report.go_on().unwrap();
    let all = [
        "history 2",
        "reaper 2",
        "metrics 1",
        "output 2.0s",
        "release 200",
    ];
    assert_eq!(done(&log), all);
}

#[test]
fn without_a_reader_events_stay_in_the_ring_if_the_instance_does() {
    for (keep, kind) in [
        (false, io::ErrorKind::BrokenPipe),
        (true, io::ErrorKind::BrokenPipe),
        (true, io::ErrorKind::StorageFull),
    ] {
        let (mut report, log) = report(keep, None);
        report.stations.broken = Some(kind);
        report.stations.ring = read(&[1]);
        let result = report.go_on();
        assert_eq!(result.is_ok(), kind == io::ErrorKind::BrokenPipe);
        assert!(report.is_closed());
        let released = done(&log).contains(&"release 100".to_owned());
        assert_eq!(released, !keep, "{kind}");
        report.stations.ring = read(&[2]);
        assert_eq!(report.go_on().unwrap(), !keep);
        assert_eq!(done(&log).is_empty(), keep);
    }
}

#[test]
fn what_became_of_actions_is_printed_too() {
    let (mut report, log) = report(false, None);
    let Record::Ended(event) = ended(3) else {
        panic!("an end");
    };
    let mut results = vec![News::Reaped(Box::new(Reaped {
        event,
        action: Action::Socket,
        outcome: Outcome::Failed,
        error: Some("no age of it".to_owned()),
    }))];
    report.reaped(&mut results).unwrap();
    assert!(results.is_empty());
    assert_eq!(done(&log), ["output of"]);
    assert_eq!(report.failures["no age of it"], 1);
}
