//! The registry over a table of the test's own, with a clock that the test moves.

use std::{
    cell::{Cell, RefCell},
    collections::BTreeMap,
};

use twheel_common::{
    key::Direction,
    offload::{Heard, counts, counts_data, is_of_data, later, of_data, replace},
    state::State,
};

use super::*;

/// A table without collisions: a flow's record is its port.
struct Fake {
    now: Cell<u64>,
    records: RefCell<Vec<Record>>,
}

#[derive(Clone, Copy, Default)]
struct Record {
    word: Option<Word>,
    marks: u32,
    offload: Offload,
}

const RECORDS: u16 = 64;

impl Fake {
    fn with<T>(&self, record: u32, act: impl FnOnce(&mut Record) -> T) -> T {
        act(&mut self.records.borrow_mut()[record as usize])
    }
}

/// A record's flow as the data plane has it.
struct Heeded<'a>(&'a Fake, u32);

impl Heard for Heeded<'_> {
    fn raise(&self, to: u32) {
        (&self.0).raise_heard(self.1, to);
    }

    fn exchange(&self, held: u32, stamp: u32) {
        let word = self.0.word(self.1).unwrap();
        assert_eq!(word.stamp(), held);
        self.0.touch(self.1, stamp.into());
    }
}

impl Fake {
    fn touch(&self, record: u32, stamp: u64) {
        self.with(record, |it| {
            let word = it.word.unwrap();
            it.word = Some(Word::new(stamp, word.generation(), word.seen()));
        });
    }

    /// A packet comes, perhaps with data of its sender.
    fn packet(&self, record: u32, data_from: Option<Direction>) {
        let (marks, now) = (self.with(record, |it| it.marks), self.now.get());
        let held = self.word(record).unwrap();
        if data_from.is_some_and(|side| counts(marks, side)) {
            if held.is_older_than(now) || !is_of_data(held.stamp()) {
                self.touch(record, of_data(now));
            }
        } else if held.is_older_than(now) {
            match counts_data(marks) {
                true => replace(&Heeded(self, record), held.stamp(), now),
                false => self.touch(record, now),
            }
        }
    }
}

impl Table for &Fake {
    fn now(&self) -> u64 {
        self.now.get()
    }

    fn find(&self, key: &FlowKey) -> Option<u32> {
        let record = self.home(key);
        self.word(record).map(|_| record)
    }

    fn home(&self, key: &FlowKey) -> u32 {
        key.sender(Direction::FromLow).port().into()
    }

    fn word(&self, record: u32) -> Option<Word> {
        let records = self.records.borrow();
        records.get(record as usize).and_then(|record| record.word)
    }

    fn marks(&self, record: u32) -> u32 {
        self.with(record, |record| record.marks)
    }

    fn offload(&self, record: u32) -> Offload {
        // A window may reach beyond the end.
        let records = self.records.borrow();
        records
            .get(record as usize)
            .map_or_else(Offload::default, |record| record.offload)
    }

    fn set_offload(&self, record: u32, offload: Offload) {
        self.with(record, |record| record.offload = offload);
    }

    fn raise_heard(&self, record: u32, at: u32) {
        self.with(record, |record| {
            record.offload.heard = later(record.offload.heard, at);
        });
    }

    fn set_stay(&self, record: u32, stay: u32) {
        self.with(record, |record| record.offload.stay = stay);
    }

    fn mark(&self, record: u32, marks: u32) {
        self.with(record, |record| record.marks = marks);
    }
}

const SHAPE: Shape = Shape {
    records: RECORDS as u32,
    doubt: 3,
    margin: 1_000,
    one_way: false,
};

/// A flow of which no packet was seen.
fn entered() -> Seen {
    Seen::of_socket(State::Established, Direction::FromLow, &[])
}

fn established() -> Seen {
    entered().told()
}

fn key(record: u16) -> FlowKey {
    FlowKey::new([0, 1], record.to_be(), [0, 2], 80_u16.to_be(), 6).0
}

fn fake() -> Fake {
    // The clock of a machine that has been up for long: its low 32 bits are about to wrap.
    let now = (1 << 32) - 2_000;
    let record = Record {
        word: Some(Word::new(now, 7, established())),
        ..Record::default()
    };
    Fake {
        now: Cell::new(now),
        records: RefCell::new(vec![record; RECORDS.into()]),
    }
}

fn start(record: u16, timeout: u32, owner: u16) -> Start {
    Start {
        key: key(record),
        cookie: 100 + u64::from(record),
        tag: record.into(),
        timeout,
        local: Direction::FromHigh,
        life: Life(3),
        action: Action::Notify,
        owner,
        idle: 0,
    }
}

#[test]
fn what_is_idle_expires_once_and_no_earlier() {
    let table = fake();
    let mut registry = Registry::new(&table, SHAPE);
    let id = registry.start(&start(5, 100, 1)).unwrap();
    assert!((&&table).is_marked(5));
    assert_eq!((&&table).offload(5).stay, 1_200);
    // A packet without data does not count.
    table.now.set(table.now.get() + 60);
    table.packet(5, None);
    table.now.set(table.now.get() + 42);
    assert_eq!(registry.expire(&mut 1_000), None);
    table.now.set(table.now.get() + 1);
    let over = registry.expire(&mut 1_000).unwrap();
    assert_eq!(
        (over.id, over.owner, over.tag, over.cookie),
        (id, 1, 5, 105)
    );
    assert_eq!((over.outcome, over.idle), (Outcome::Expired, 103));
    assert!(!(&&table).is_marked(5));
    assert_eq!((registry.expire(&mut 1_000), registry.next()), (None, None));
    // It may be registered again; the old one is gone.
    assert!(!registry.stop(id, 2));
    registry.start(&start(5, 100, 2)).unwrap();
}

/// A packet that comes while a request waits counts, although the flow was not marked then, and also
/// if the clock was read before.
#[test]
fn what_comes_before_the_mark_and_after_the_restart_counts() {
    let table = fake();
    let now = table.now.get();
    let mut registry = Registry::new(&table, SHAPE);
    let came = |at: u64| table.with(5, |it| it.word = Some(Word::new(at, 7, established())));
    came(now - 10);
    let waited = Start {
        idle: 90,
        ..start(5, 100, 1)
    };
    let id = registry.start(&waited).unwrap();
    assert_eq!((&&table).offload(5).heard, now as u32 - 10);
    assert!(registry.stop(id, 1));
    // The time when a flow was entered is that of no packet.
    table.with(5, |it| it.word = Some(Word::new(now, 7, entered())));
    let id = registry.start(&waited).unwrap();
    assert_eq!((&&table).offload(5).heard, now as u32 - 90);
    assert!(registry.stop(id, 1));

    came(now + 4);
    let id = registry.start(&start(5, 100, 1)).unwrap();
    assert_eq!((&&table).offload(5).heard, now as u32 + 4);
    table.with(5, |it| it.offload.heard = now as u32 + 7);
    assert!(registry.restart(id, 1, None, 0));
    assert_eq!((&&table).offload(5).heard, now as u32 + 7);
    // With the clock read again, it is the restart that counts.
    table.now.set(now + 6_000);
    assert!(registry.restart(id, 1, None, 0));
    assert_eq!((&&table).offload(5).heard, (now + 6_000) as u32);
    // One that has waited began when it was asked for.
    table.now.set(now + 6_050);
    assert!(registry.restart(id, 1, Some(70), 20));
    assert_eq!((&&table).offload(5).heard, (now + 6_030) as u32);
    table.now.set(now + 6_102);
    assert_eq!(registry.expire(&mut 1_000), None);
    table.now.set(now + 6_103);
    assert_eq!(registry.expire(&mut 1_000).map(|over| over.idle), Some(73));
}

#[test]
fn a_timer_does_not_begin_when_its_flow_is_entered() {
    for (life, entry) in [(Life::ANY, 0), (Life(3), 0), (Life(3), 1)] {
        let table = fake();
        let now = table.now.get();
        let mut registry = Registry::new(&table, SHAPE);
        table.with(5, |it| it.word = Some(Word::new(now + entry, 7, entered())));
        let waited = Start {
            idle: 90,
            life,
            ..start(5, 100, 1)
        };
        registry.start(&waited).unwrap();
        table.now.set(now + 12);
        assert_eq!(registry.expire(&mut 1_000), None);
        table.now.set(now + 13);
        let idle = registry.expire(&mut 1_000).map(|over| over.idle);
        assert_eq!(idle, Some(103), "{life:?}, {entry}");
    }
}

/// Else it would seem to lie ahead one day, of a connection that lives on.
#[test]
fn what_is_kept_follows_the_stamp() {
    let table = fake();
    let mut registry = Registry::new(&table, SHAPE);
    let any = Start {
        life: Life::ANY,
        ..start(5, 100, 1)
    };
    registry.start(&any).unwrap();
    table.now.set(table.now.get() + 60);
    table.packet(5, None);
    let stamp = table.now.get();
    table.now.set(stamp + 60);
    assert_eq!(registry.expire(&mut 1_000), None);
    assert_eq!((&&table).offload(5).heard, stamp as u32);
}

#[test]
fn only_its_program_has_a_registration() {
    let table = fake();
    let mut registry = Registry::new(&table, SHAPE);
    let id = registry.start(&start(5, 100, 1)).unwrap();
    assert_eq!(registry.start(&start(5, 100, 2)), Err(Refusal::Taken));
    let other_end = Start {
        local: Direction::FromLow,
        ..start(5, 100, 2)
    };
    assert_eq!(registry.start(&other_end), Err(Refusal::OtherEnd));
    assert!(!registry.restart(id, 2, None, 0) && !registry.stop(id, 2));
    assert!(!registry.stop(Id(id.0 ^ 1 << 48), 1), "the other side");
    registry.start(&start(6, 100, 1)).unwrap();
    registry.start(&start(7, 100, 2)).unwrap();
    // A program that has ended: none of its registrations expires, and others may have its
    // connections at once.
    registry.leave(1);
    assert!(registry.is_leaving(1) && !registry.is_leaving(2));
    let other = registry.start(&start(6, 400, 2)).unwrap();
    table.now.set(table.now.get() + 103);
    assert_eq!(registry.expire(&mut 1_000).map(|over| over.tag), Some(7));
    assert_eq!((registry.expire(&mut 1_000), registry.len()), (None, 1));
    assert!(!registry.has_leaving(), "it has none");
    let all = [8, 9, 10, 11].map(|record| registry.start(&start(record, 400, 3 - record % 2)));
    registry.leave(3);
    let turns = (0..8).take_while(|_| {
        registry.stop_some(1);
        registry.has_leaving()
    });
    assert!(turns.count() > 1, "all at once");
    assert!(!(&&table).is_marked(8) && (&&table).is_marked(9));
    assert!(registry.stop(other, 2));
    for id in [all[1], all[3]] {
        assert!(registry.stop(id.unwrap(), 2));
    }
    registry.start(&start(7, 100, 2)).unwrap();
}

#[test]
fn programs_that_have_ended_are_over_after_one_way_round() {
    let table = fake();
    let mut registry = Registry::new(&table, SHAPE);
    let all: Vec<_> = (0..20)
        .map(|record| registry.start(&start(record, 400, record % 10)).unwrap())
        .collect();
    for owner in 1..10 {
        registry.leave(owner);
    }
    registry.stop_some(20);
    assert!(!registry.has_leaving());
    let tags = all.iter().map(|id| registry.tag(*id, 0));
    assert_eq!(tags.flatten().count(), 2);
    assert_eq!(registry.len(), 2);
    // Who comes after that has the place of one of them, and is not ended.
    let next = registry.start(&start(25, 400, 5)).unwrap();
    registry.stop_some(40);
    assert!(registry.stop(next, 5));
    // Nobody's, and one that has none any more.
    registry.leave(5);
    registry.leave(999);
    assert!(!registry.has_leaving() && !registry.is_leaving(5) && !registry.is_leaving(999));
}

#[test]
fn what_is_not_open_is_refused_and_its_end_is_told() {
    let table = fake();
    let mut registry = Registry::new(&table, SHAPE);
    table.with(4, |it| it.word = None);
    assert_eq!(registry.start(&start(4, 100, 1)), Err(Refusal::Unknown));
    let closing = Seen::of_socket(State::TimeWait, Direction::FromLow, &[]);
    table.with(4, |it| it.word = Some(Word::new(0, 7, closing)));
    assert_eq!(registry.start(&start(4, 100, 1)), Err(Refusal::Ending));

    registry.start(&start(5, 100, 1)).unwrap();
    assert_eq!(
        registry.ended(&key(5), 8, None),
        None,
        "another flow of the record"
    );
    table.with(4, |it| it.word = None);
    assert_eq!(registry.ended(&key(4), 7, None), None, "its neighbour");
    assert_eq!(registry.ended(&key(5), 7, None), None, "it lives");
    table.with(5, |it| *it = Record::default());
    assert_eq!(registry.ended(&key(4), 7, None), None, "its neighbour");
    let over = registry.ended(&key(5), 7, None).unwrap();
    assert_eq!((over.outcome, over.tag), (Outcome::Closed, 5));
    assert_eq!(registry.ended(&key(5), 7, None), None);

    // The end was not told: found out when it would expire. The connection that follows, with the
    // same key, keeps no mark.
    registry.start(&start(6, 100, 1)).unwrap();
    table.with(6, |it| it.word = Some(Word::new(0, 8, established())));
    table.now.set(table.now.get() + 103);
    assert_eq!(
        registry.expire(&mut 1_000).unwrap().outcome,
        Outcome::Unseen
    );
    assert!(!(&&table).is_marked(6));

    // Nor is what another flow has by now changed when its timer is restarted.
    let id = registry.start(&start(8, 100, 1)).unwrap();
    let of_another = Offload {
        heard: 1,
        stay: 5_000,
    };
    table.with(8, |it| (it.word, it.offload) = (None, of_another));
    assert!(registry.restart(id, 1, Some(200), 0));
    assert_eq!((&&table).offload(8), of_another);

    // A flow that had been idle before its timer began has not expired with that.
    for (after, outcome) in [(50, Outcome::Closed), (100, Outcome::Expired)] {
        let id = registry.start(&start(7, 100, 1)).unwrap();
        table.now.set(table.now.get() + after);
        table.with(7, |it| it.word = None);
        let over = registry.ended(&key(7), id.generation(), Some(5_000));
        assert_eq!(over.map(|over| over.outcome), Some(outcome));
        table.with(7, |it| {
            it.word = Some(Word::new(table.now.get(), 9, established()))
        });
    }
}

#[test]
fn a_later_run_goes_on_from_what_the_table_has() {
    let table = fake();
    let mut registry = Registry::new(&table, SHAPE);
    let id = registry.start(&start(5, 100, 1)).unwrap();
    registry.start(&start(6, 100, 1)).unwrap();
    drop(registry);
    table.now.set(table.now.get() + 40);
    let mut registry = Registry::new(&table, SHAPE);
    assert_eq!(
        registry.reclaim(Id(9), &start(9, 100, 3)),
        Err(Refusal::Unknown)
    );
    assert_eq!(registry.reclaim(id, &start(5, 100, 3)), Ok(id));
    table.now.set(table.now.get() + 62);
    assert_eq!(registry.expire(&mut 1_000), None);
    table.now.set(table.now.get() + 1);
    assert_eq!(registry.expire(&mut 1_000).map(|over| over.idle), Some(103));
    registry.release(6);
    assert!(!(&&table).is_marked(6));
}

/// Of data the time stays, whatever follows: what counts by the program's choice, and nothing else.
#[test]
fn packets_after_data_do_not_make_it_later() {
    use Direction::{FromHigh, FromLow};
    // A unit less after data: its stamp is the next odd one.
    for (life, data, idle) in [
        (Life(3), FromLow, Some(89)),
        (Life(3), FromHigh, Some(89)),
        (Life::LOW, FromLow, Some(89)),
        (Life::LOW, FromHigh, Some(120)),
        (Life::ANY, FromLow, None),
    ] {
        let table = fake();
        let mut registry = Registry::new(&table, SHAPE);
        let asked = Start {
            life,
            ..start(5, 80, 1)
        };
        registry.start(&asked).unwrap();
        for (after, data) in [(20, None), (10, Some(data)), (20, None), (20, None)] {
            table.now.set(table.now.get() + after);
            table.packet(5, data);
        }
        assert_eq!(registry.expire(&mut 1_000), None, "{life:?}, {data:?}");
        table.now.set(table.now.get() + 50);
        let idle_of = registry.expire(&mut 1_000).map(|over| over.idle);
        assert_eq!(idle_of, idle, "{life:?}, {data:?}");
        table.now.set(table.now.get() + 33);
        let rest = registry.expire(&mut 1_000).map(|over| over.idle);
        assert_eq!(rest, idle.is_none().then_some(83), "{life:?}, {data:?}");
    }
}

/// A program that reclaims a registration may choose anew what counts. Its time begins then.
#[test]
fn what_counts_may_change_with_a_later_run() {
    let table = fake();
    let id = Registry::new(&table, SHAPE).start(&start(5, 100, 1));
    let id = id.unwrap();
    table.now.set(table.now.get() + 40);
    table.packet(5, Some(Direction::FromLow));
    let reclaim = |life| {
        let mut registry = Registry::new(&table, SHAPE);
        let asked = Start {
            life,
            ..start(5, 100, 1)
        };
        assert_eq!(registry.reclaim(id, &asked), Ok(id));
        registry
    };
    table.now.set(table.now.get() + 30);
    // The latest data was not settled yet.
    let heard = (&&table).offload(5).heard;
    let mut same = reclaim(Life(3));
    assert_eq!((&&table).offload(5).heard, heard);
    table.now.set(table.now.get() + 72);
    assert_eq!(same.expire(&mut 1_000), None);
    drop(same);
    let mut other = reclaim(Life::HIGH);
    assert_eq!((&&table).offload(5).heard, table.now.get() as u32);
    table.now.set(table.now.get() + 102);
    assert_eq!(other.expire(&mut 1_000), None);
    table.now.set(table.now.get() + 1);
    assert_eq!(other.expire(&mut 1_000).map(|over| over.idle), Some(103));
}

/// Starts, restarts, stops, data, time: beside a plain model.
#[test]
fn a_long_walk_is_that_of_the_model() {
    let table = fake();
    let mut registry = Registry::new(&table, SHAPE);
    // By record: the registration, its timeout, and when its timeout began.
    let mut model: BTreeMap<u16, (Id, u32, u64)> = BTreeMap::new();
    let mut random = 1_u64;
    let mut next = |below: u64| {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (random >> 33) % below
    };
    let (mut expired, mut checked) = (0, 0);
    // A timer begins now, or with a packet that came in this unit: if it is restarted, with data alone.
    let begun = |record: u16, now: u64, is_new: bool| {
        let stamp = (&&table).word(record.into()).unwrap().stamp();
        let ahead = stamp.wrapping_sub(now as u32) as i32;
        match is_new || is_of_data(stamp) {
            true => now.saturating_add_signed(ahead.max(0).into()),
            false => now,
        }
    };
    for _ in 0..200_000 {
        let (record, now) = (next(40) as u16, table.now.get());
        let timeout = 1 + next(300) as u32;
        match (next(7), model.get(&record).copied()) {
            (0 | 1, None) => {
                let id = registry.start(&start(record, timeout, 1)).unwrap();
                model.insert(record, (id, timeout, begun(record, now, true)));
            }
            (0, Some((id, ..))) => {
                assert!(registry.restart(id, 1, Some(timeout), 0));
                model.insert(record, (id, timeout, begun(record, now, false)));
            }
            (1, Some((id, timeout, _))) => {
                assert!(registry.restart(id, 1, None, 0));
                model.insert(record, (id, timeout, begun(record, now, false)));
            }
            (2, Some((id, ..))) => {
                assert!(registry.stop(id, 1));
                model.remove(&record);
            }
            (3, held) => {
                table.packet(record.into(), Some(Direction::FromHigh));
                if let Some((id, timeout, _)) = held {
                    model.insert(record, (id, timeout, of_data(now)));
                }
            }
            (4, _) => table.packet(record.into(), None),
            _ => table.now.set(now + next(20)),
        }
        while let Some(over) = registry.expire(&mut 1_000) {
            let (id, timeout, since) = model.remove(&(over.tag as u16)).unwrap();
            let idle = table.now.get() - since;
            assert_eq!((over.id, u64::from(over.idle)), (id, idle));
            assert!(idle >= u64::from(timeout + SHAPE.doubt), "early");
            expired += 1;
        }
        // None that is due is left.
        for (_, timeout, since) in model.values() {
            assert!(
                table.now.get() < since + u64::from(timeout + SHAPE.doubt),
                "late"
            );
            checked += 1;
        }
        assert_eq!(registry.len(), model.len());
    }
    assert!(expired > 1_000 && checked > 100_000, "{expired}, {checked}");
}
