//! The protocol of the flow table, step by step: between any two accesses of one CPU another does a whole operation. (All
//! orders of all accesses are in `table_model.rs`, which takes longer.)
#![allow(missing_docs)]

use std::cell::{Cell, RefCell};

use twheel_common::{
    flow::{FlowKey, Word},
    state::{Seen, SideWay},
    table::{self, BUSY, Begins, Changed, Hash, Inserted, Reads, Record, Records, WINDOW},
};

/// The home of all keys here.
const HOME: u32 = 3;

fn key(number: u32) -> FlowKey {
    // TCP, UDP, ICMP, ICMPv6.
    let proto = [6, 17, 1, 58][number as usize & 3];
    FlowKey::new(
        [0, u64::from(number)],
        80,
        [1, 0],
        1024 + (number >> 2) as u16,
        proto,
    )
    .0
}

fn begins(number: u32) -> Begins {
    Begins {
        seen: Seen(0x20),
        now: 1_000 + u64::from(number),
        cpu: 0x800 + number,
        rule: 0x100 + number as u16,
        positions: [number, 7],
        way: SideWay::ANY,
    }
}

/// What another CPU does.
type Other<'a> = Box<dyn FnOnce(&Table) + 'a>;

/// The memory of a table, each access to which is a step.
struct Table<'a> {
    records: Vec<Cell<Record>>,
    created: Vec<Cell<u32>>,
    /// Steps until the other CPU has its turn.
    left: Cell<u32>,
    other: RefCell<Option<Other<'a>>>,
}

impl<'a> Table<'a> {
    fn new() -> Self {
        let count = (HOME + WINDOW) as usize;
        Self {
            records: vec![Cell::default(); count],
            created: vec![Cell::default(); count],
            left: Cell::new(u32::MAX),
            other: RefCell::new(None),
        }
    }

    /// Lets the other CPU do this before the access of this number.
    fn interrupt(&self, left: u32, other: impl FnOnce(&Table) + 'a) {
        self.left.set(left);
        *self.other.borrow_mut() = Some(Box::new(other));
    }

    /// Whether the other CPU has had its turn.
    fn is_interrupted(&self) -> bool {
        self.other.borrow().is_none()
    }

    fn step(&self) {
        self.assert_whole();
        let left = self.left.get();
        self.left.set(left.wrapping_sub(1));
        if left == 0 {
            let other = self.other.borrow_mut().take();
            other.expect("it has its turn once")(self);
            self.assert_whole();
        }
    }

    fn with<T>(&self, at: usize, change: impl FnOnce(&mut Record) -> T) -> T {
        self.step();
        let mut record = self.records[at].get();
        let result = change(&mut record);
        self.records[at].set(record);
        result
    }

    /// What anybody may see at any time.
    fn assert_whole(&self) {
        let mut live: Vec<FlowKey> = Vec::new();
        for (index, record) in self.records.iter().enumerate() {
            let record = record.get();
            let is_dead = record.word.is_dead() || record.word == Word::default();
            assert!(record.tag != 0 || is_dead, "alive and free: {record:?}");
            if table::holds_flow(record.tag) && !is_dead {
                let home = index as u32 - table::distance(record.tag);
                assert_eq!(home, HOME);
                let hops = self.records[home as usize].get().hops;
                assert!(hops >> (index as u32 - home) & 1 != 0, "not announced");
                live.push(table::key(record.addresses, record.tag));
            }
        }
        let count = live.len();
        live.sort_by_key(|key| (key.addresses(), key.ports()));
        live.dedup();
        assert_eq!(live.len(), count, "a key stands twice");
    }

    /// Nobody does anything: nothing is busy, dead or announced for nothing.
    fn assert_settled(&self, numbers: &[u32]) {
        self.assert_whole();
        let mut hops = 0;
        let mut found = Vec::new();
        for (index, record) in self.records.iter().enumerate() {
            let record = record.get();
            if record.tag == 0 {
                continue;
            }
            assert!(
                record.tag & BUSY == 0 && !record.word.is_dead(),
                "{record:?}"
            );
            hops |= 1 << (index as u32 - HOME);
            let key = table::key(record.addresses, record.tag);
            let number = *numbers
                .iter()
                .find(|number| self::key(**number) == key)
                .expect("the key of somebody else");
            let begun = begins(number);
            assert_eq!(table::cpu(record.tag), begun.cpu);
            assert_eq!(table::rule(record.tag), begun.rule);
            assert_eq!(record.positions, begun.positions);
            assert_eq!(self.find(number), Some(index));
            found.push(number);
        }
        assert_eq!(self.records[HOME as usize].get().hops, hops);
        found.sort();
        assert_eq!(found, numbers);
    }

    fn find(&self, number: u32) -> Option<usize> {
        table::find(self, HOME, &key(number))
    }

    /// Where the key stands, and whether this has entered it.
    fn insert(&self, number: u32) -> Option<(usize, bool)> {
        match table::insert(self, HOME, &key(number), &begins(number)) {
            Inserted::New(at, index) => {
                assert_eq!(at, index as usize);
                Some((at, true))
            }
            Inserted::Exists(at) => Some((at, false)),
            Inserted::Full => None,
        }
    }

    /// Ends the flow of a key, if it is there and nobody touches it meanwhile.
    fn end(&self, number: u32) -> bool {
        let Some(at) = self.find(number) else {
            return false;
        };
        let word = self.records[at].get().word;
        if word.is_dead() || !table::kill(self, at, word) {
            return false;
        }
        table::remove(self, at, at as u32);
        true
    }

    fn word(&self, at: usize) -> Word {
        self.records[at].get().word
    }
}

impl Records for Table<'_> {
    type At = usize;

    fn at(&self, index: u32) -> Option<usize> {
        ((index as usize) < self.records.len()).then_some(index as usize)
    }

    fn tag(&self, at: usize) -> u64 {
        self.with(at, |record| record.tag)
    }

    fn claim(&self, at: usize, tag: u64) -> bool {
        assert!(tag & BUSY != 0, "nobody has written its key");
        self.with(at, |record| {
            let free = record.tag == 0;
            if free {
                record.tag = tag;
            }
            free
        })
    }

    fn set_tag(&self, at: usize, tag: u64) {
        self.with(at, |record| record.tag = tag);
    }

    fn publish(&self, at: usize, tag: u64) {
        self.set_tag(at, tag);
    }

    fn word(&self, at: usize) -> Word {
        self.with(at, |record| record.word)
    }

    fn set_word(&self, at: usize, word: Word) {
        self.with(at, |record| record.word = word);
    }

    fn change(&self, at: usize, old: Word, new: Word) -> Word {
        self.with(at, |record| {
            let held = record.word;
            if held == old {
                record.word = new;
            }
            held
        })
    }

    fn hops(&self, at: usize) -> u32 {
        self.with(at, |record| record.hops)
    }

    fn announce(&self, at: usize, bits: u32) -> u32 {
        self.with(at, |record| {
            let before = record.hops;
            record.hops |= bits;
            before
        })
    }

    fn renounce(&self, at: usize, bits: u32) {
        self.with(at, |record| record.hops &= !bits);
    }

    fn has_addresses(&self, at: usize, key: &FlowKey) -> bool {
        self.with(at, |record| record.addresses == key.addresses())
    }

    fn fill(&self, at: usize, key: &FlowKey, begins: &Begins) {
        self.created[at].set(begins.now as u32);
        self.with(at, |record| {
            assert!(record.tag & BUSY != 0, "the record of somebody else");
            record.addresses = key.addresses();
            record.positions = begins.positions;
        });
    }

    fn repeat(&self, turns: u32, mut turn: impl FnMut(u32) -> bool) {
        for number in 0..turns {
            if turn(number) {
                break;
            }
        }
    }
}

/// A record, as `twheel flows` reads it.
struct Read<'a, 'b>(&'a Table<'b>, usize);

impl Reads for Read<'_, '_> {
    fn word(&self) -> Word {
        Records::word(self.0, self.1)
    }

    fn tag(&self) -> u64 {
        Records::tag(self.0, self.1)
    }

    fn addresses(&self) -> [u64; 4] {
        self.0.with(self.1, |record| record.addresses)
    }

    fn created(&self) -> u32 {
        self.0.step();
        self.0.created[self.1].get()
    }

    fn fence(&self) {}
}

/// Does something with a table that `prepare` has filled, with the other CPU's operation before each of its accesses in
/// turn, and looks at what it came to; how many accesses that were.
fn at_each_step<T>(
    prepare: impl Fn(&Table),
    other: impl Fn(&Table),
    operation: impl Fn(&Table) -> T,
    assert: impl Fn(&Table, T),
) -> u32 {
    for step in 0.. {
        let table = Table::new();
        prepare(&table);
        table.interrupt(step, &other);
        let result = operation(&table);
        if !table.is_interrupted() {
            return step;
        }
        assert(&table, result);
    }
    unreachable!()
}

fn insert(table: &Table, numbers: &[u32]) {
    for number in numbers {
        assert!(table.insert(*number).unwrap().1);
    }
}

#[test]
fn of_two_that_enter_a_key_at_least_one_finds_it_there() {
    for before in [&[][..], &[1], &[1, 2]] {
        let steps = at_each_step(
            |table| insert(table, before),
            |table| {
                table.insert(0);
            },
            |table| table.insert(0),
            |table, entered| {
                let (at, _) = entered.unwrap();
                assert_eq!(table.find(0), Some(at));
                let mut all = vec![0];
                all.extend(before);
                table.assert_settled(&all);
            },
        );
        assert!(steps > 5, "{steps}");
    }
}

#[test]
fn of_two_that_enter_other_keys_both_do() {
    at_each_step(
        |table| insert(table, &[2]),
        |table| insert(table, &[1]),
        |table| table.insert(0),
        |table, entered| {
            assert!(entered.unwrap().1);
            table.assert_settled(&[0, 1, 2]);
        },
    );
}

#[test]
fn a_flow_is_found_once_it_is_entered_and_not_before() {
    at_each_step(
        |_| {},
        |table| {
            let found = table.find(0).map(|at| table.records[at].get());
            assert!(found.is_none_or(|record| record.tag & BUSY == 0));
            // An end would be that of a flow that may yet be withdrawn.
            assert!(table.end(0) == found.is_some());
        },
        |table| table.insert(0).unwrap(),
        |table, _| table.assert_whole(),
    );
}

#[test]
fn a_key_whose_flow_ends_meanwhile_stands_once_or_not_at_all() {
    at_each_step(
        |table| insert(table, &[1, 0]),
        |table| assert!(table.end(0)),
        |table| table.insert(0).unwrap(),
        |table, (_, is_new)| match is_new {
            true => table.assert_settled(&[0, 1]),
            false => table.assert_settled(&[1]),
        },
    );
    // One in front ends, and its record is free.
    at_each_step(
        |table| insert(table, &[1, 0]),
        |table| assert!(table.end(1)),
        |table| table.insert(0).unwrap(),
        |table, (_, is_new)| {
            assert!(!is_new);
            table.assert_settled(&[0]);
        },
    );
}

#[test]
fn a_flow_that_ends_leaves_room_for_the_next() {
    at_each_step(
        |table| insert(table, &[0, 1]),
        |table| {
            table.insert(2);
        },
        |table| table.end(0),
        |table, has_ended| {
            assert!(has_ended);
            table.assert_settled(&[1, 2]);
        },
    );
    at_each_step(
        |table| insert(table, &[0, 1]),
        |table| {
            let has_ended = table.records[3].get().word.is_dead();
            assert_eq!(table.insert(0).unwrap().1, has_ended);
        },
        |table| table.end(0),
        |table, has_ended| {
            assert!(has_ended);
            let is_back = table.find(0).is_some();
            table.assert_settled(if is_back { &[0, 1] } else { &[1] });
        },
    );
}

#[test]
fn a_packet_that_comes_meanwhile_keeps_the_flow() {
    let outcomes = Cell::new([0, 0]);
    at_each_step(
        |table| insert(table, &[0]),
        |table| {
            if let Some(at) = table.find(0) {
                let word = table.word(at);
                let new = word.with(2_000, word.seen());
                table::change(table, at, &key(0), word, new);
            }
        },
        |table| table.end(0),
        |table, has_ended| {
            let mut counts = outcomes.get();
            counts[usize::from(has_ended)] += 1;
            outcomes.set(counts);
            table.assert_settled(if has_ended { &[] } else { &[0] });
        },
    );
    assert!(outcomes.get().iter().all(|often| *often > 0));
}

#[test]
fn a_change_is_of_the_flow_that_was_found() {
    let change = |table: &Table, at: usize, old: Word| {
        let new = old.with(3_000, Seen(old.seen().0 | 0x40));
        (table::change(table, at, &key(0), old, new), new)
    };
    // Nobody else is there.
    let table = Table::new();
    insert(&table, &[0]);
    let word = table.word(3);
    assert_eq!(
        change(&table, 3, word),
        (Some(Ok(table.word(3))), table.word(3))
    );
    assert!(table.word(3) != word);
    assert_eq!(change(&table, 3, word).0, Some(Err(table.word(3))));
    // It ends, and another one has its record.
    at_each_step(
        |table| insert(table, &[0]),
        |table| {
            table.end(0);
            insert(table, &[1]);
        },
        |table| change(table, 3, table.word(3)).0,
        |table, changed| {
            assert!(!matches!(changed, Some(Ok(_))) || table.find(0).is_none());
            table.assert_settled(&[1]);
            let begun = begins(1);
            let word = table.word(3);
            assert_eq!((word.stamp(), word.seen()), (begun.now as u32, begun.seen));
        },
    );
    // Another one has it by now, whose word is known: it is none of this key.
    let table = Table::new();
    insert(&table, &[1]);
    assert_eq!(change(&table, 3, table.word(3)).0, None);
}

#[test]
fn a_flow_that_may_be_withdrawn_is_not_posted() {
    let posts = |table: &Table| {
        let word = table.word(3);
        let new = word.with(3_000, word.seen().posted());
        match table::change(table, 3, &key(0), word, new) {
            Some(Ok(word)) => word.seen().is_posted(),
            _ => false,
        }
    };
    let table = Table::new();
    insert(&table, &[0]);
    assert!(posts(&table));
    // And again.
    assert!(posts(&table));
    at_each_step(
        |_| {},
        |table| {
            let is_busy = table.records[3].get().tag & BUSY != 0;
            let is_alive = !table.word(3).is_dead() && table.word(3) != Word::default();
            let is_posted = is_alive && posts(table);
            assert!(!(is_busy && is_posted));
        },
        |table| table.insert(0),
        |table, _| table.assert_settled(&[0]),
    );
}

#[test]
fn what_is_starting_or_posted_does_not_end() {
    let table = Table::new();
    insert(&table, &[0]);
    let word = table.word(3);
    for seen in [word.seen().starting(), word.seen().posted()] {
        table.set_word(3, word.with_seen(seen));
        assert!(!table.end(0));
        assert_eq!(table.word(3), word.with_seen(seen));
    }
    table.set_word(3, word);
    assert!(!table::kill(&table, 3, word.with(9_000, word.seen())));
    assert!(table.end(0));
}

#[test]
fn a_reader_sees_one_life_or_that_it_changes() {
    let read = |table: &Table| {
        let snapshot = table::read(&Read(table, 3));
        if let Ok(Some(flow)) = snapshot {
            let number = if flow.key == key(0) { 0 } else { 1 };
            let begun = begins(number);
            assert_eq!(flow.key, key(number));
            assert_eq!((flow.cpu, flow.rule), (begun.cpu, begun.rule));
            assert_eq!(flow.created, begun.now as u32);
            assert_eq!(flow.word.seen(), begun.seen);
        }
        snapshot
    };
    let seen = Cell::new([0; 3]);
    at_each_step(
        |table| insert(table, &[0]),
        |table| {
            assert!(table.end(0));
            insert(table, &[1]);
        },
        read,
        |_, snapshot| {
            let mut counts = seen.get();
            counts[match snapshot {
                Ok(Some(flow)) if flow.key == key(0) => 0,
                Ok(Some(_)) => 1,
                Err(Changed) => 2,
                Ok(None) => panic!("there is a flow"),
            }] += 1;
            seen.set(counts);
        },
    );
    assert!(seen.get()[1] > 0 && seen.get()[2] > 0, "{:?}", seen.get());
    // None is there, it is being entered, or it has ended.
    let table = Table::new();
    assert_eq!(read(&table), Ok(None));
    at_each_step(
        |_| {},
        |table| {
            let snapshot = read(table);
            let is_busy = table.records[3].get().tag & BUSY != 0;
            assert!(!is_busy || snapshot == Ok(None));
        },
        |table| table.insert(0),
        |_, _| {},
    );
    insert(&table, &[0]);
    assert!(read(&table).unwrap().is_some());
    let word = table.word(3);
    table.set_word(3, word.with_seen(word.seen().starting()));
    assert_eq!(read(&table), Err(Changed));
    table.set_word(3, word.dead());
    assert_eq!(read(&table), Ok(None));
    // It dies under the reader.
    at_each_step(
        |table| insert(table, &[0]),
        |table| assert!(table.end(0)),
        |table| table::read(&Read(table, 3)),
        |_, snapshot| assert!(!matches!(snapshot, Ok(Some(flow)) if flow.word.is_dead())),
    );
}

#[test]
fn a_full_window_refuses() {
    let table = Table::new();
    let numbers: Vec<u32> = (0..WINDOW).collect();
    insert(&table, &numbers);
    assert_eq!(table.insert(WINDOW), None);
    table.assert_settled(&numbers);
    for number in numbers {
        let at = table.find(number).unwrap();
        assert_eq!(table::distance(table.records[at].get().tag), number);
    }
}

#[test]
fn a_tag_without_its_rule_is_the_same_else() {
    let table = Table::new();
    insert(&table, &[0]);
    let tag = table.records[3].get().tag;
    let without = table::without_rule(tag);
    assert_eq!(table::rule(without), 0);
    assert_eq!(table::cpu(without), table::cpu(tag));
    assert_eq!(without, tag & !(0x1ff << 55));
    let addresses = table.records[3].get().addresses;
    assert_eq!(table::key(addresses, without), key(0));
}

#[test]
fn keys_that_share_a_part_are_others() {
    let [own, address, port] = [[1, 2], [9, 2], [1, 9]].map(|[address, port]| {
        let source = [0, u64::from(address as u8)];
        FlowKey::new(source, port, [0, 77], 443, 6).0
    });
    for other in [address, port] {
        let table = Table::new();
        let enter = |key: &FlowKey| match table::insert(&table, HOME, key, &begins(0)) {
            Inserted::New(at, _) => at,
            _ => panic!("it is there"),
        };
        let (at, beside) = (enter(&own), enter(&other));
        assert_eq!(table::find(&table, HOME, &own), Some(at));
        assert_eq!(table::find(&table, HOME, &other), Some(beside));
        let word = table.word(at);
        assert_eq!(table::change(&table, at, &other, word, word), None);
        assert_eq!(table::change(&table, at, &own, word, word), Some(Ok(word)));
    }
}

#[test]
fn behind_the_last_home_there_is_a_window() {
    for (max_flows, homes, blocks) in [(0, 64, 6), (26, 65, 6), (27, 68, 7), (1_000, 2_500, 159)] {
        let hash = Hash::new([1; 11], max_flows);
        assert_eq!((hash.homes, hash.blocks()), (homes, blocks));
        assert_eq!(hash.records(), blocks * 16);
    }
}

/// Multilinear hashing in pairs, scrambled, by the words of its documentation.
#[test]
fn homes_are_those_of_the_hash() {
    let mut random = 1u64;
    let mut next = || {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        random ^ random >> 29
    };
    for _ in 0..1_000 {
        let hash = Hash::new([(); 11].map(|()| next()), 1_000_000);
        let key = FlowKey::from_parts([(); 4].map(|()| next()), next() & 0xff_ffff_ffff);
        let [a, b, c, d] = key.addresses();
        let mut sum = u128::from(hash.keys[0]);
        for (number, word) in [a, b, c, d, key.ports()].into_iter().enumerate() {
            let [low, high] = [word as u32, (word >> 32) as u32].map(u64::from);
            let first = hash.keys[2 * number + 1].wrapping_add(low);
            let second = hash.keys[2 * number + 2].wrapping_add(high);
            sum += u128::from(first.wrapping_mul(second));
        }
        let mut home = (sum as u64 >> 32) as u32;
        home = home ^ home >> 15;
        home = (u64::from(home) * 0x2c1b_3c6d) as u32;
        home = home ^ home >> 12;
        let home = u128::from(home) * u128::from(hash.homes) / (1 << 32);
        assert_eq!(u128::from(hash.home(&key)), home);
        assert!(hash.blocks() * 16 >= hash.homes + 31 && hash.blocks() * 16 < hash.homes + 47);
    }
}
