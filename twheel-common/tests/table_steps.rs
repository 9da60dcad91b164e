//! The protocol of the flow table, step by step: between any two accesses of one CPU another does a whole operation. (All
//! orders of all accesses are in `table_model.rs`, which takes longer.)
#![allow(missing_docs)]

mod memory;

use std::cell::Cell;

use memory::{Memory, Read};
use twheel_common::{
    flow::{FlowKey, Word},
    state::{Seen, SideWay},
    table::{
        self, BUSY, Begins, Changed, Details, Hash, Inserted, LINE, Place, Records, TWIN, WINDOW,
    },
};

/// The home of all keys here.
const HOME: u32 = 4;

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

/// Keys from this number on have the same fingerprint.
const TWINS: u32 = 1_000;

fn place(number: u32) -> Place {
    Place {
        home: HOME,
        fingerprint: u64::from(number.min(TWINS)) << 1 | 1,
    }
}

fn number(key: &FlowKey) -> u32 {
    let mut numbers = (0..=WINDOW).chain(TWINS..TWINS + 4);
    numbers
        .find(|number| self::key(*number) == *key)
        .expect("the key of somebody else")
}

fn begins(number: u32, details: u32) -> Begins {
    Begins {
        seen: Seen(0x20),
        now: 1_000 + u64::from(number),
        cpu: 0x800 + number,
        rule: 0x100 + (number & 0xff) as u16,
        positions: [number, 7],
        way: SideWay::ANY,
        outgoing: 0,
        details,
    }
}

/// The first record.
const AT: usize = HOME as usize;

/// A table, each access to which is a step.
type Table<'a> = Memory<'a>;

fn new<'a>() -> Table<'a> {
    Memory::checked(((HOME + WINDOW) / LINE) as usize, |table| {
        table.assert_whole(false, |key| place(number(key)));
    })
}

/// Nobody does anything: these flows stand there, and nothing else is left.
fn assert_settled(table: &Table, numbers: &[u32]) {
    table.assert_whole(true, |key| place(number(key)));
    let mut found = Vec::new();
    for (index, held) in table.held().enumerate() {
        if held.tag == 0 {
            continue;
        }
        let number = number(&held.key());
        let begun = begins(number, held.number);
        assert_eq!(held.details.cpu(), begun.cpu);
        assert_eq!(held.details.rule(), begun.rule);
        assert_eq!(table.positions(index), begun.positions);
        assert_eq!(find(table, number), Some(index));
        found.push(number);
    }
    found.sort();
    assert_eq!(found, numbers);
    table.assert_given_back(found.len());
}

fn find(table: &Table, number: u32) -> Option<usize> {
    table::find(table, place(number), &key(number))
}

/// Where the key stands, and whether this has entered it.
fn enter(table: &Table, number: u32) -> Option<(usize, bool)> {
    let details = table.take();
    let begins = begins(number, details);
    match table::insert(table, place(number), &key(number), &begins) {
        Inserted::New(at, index) => {
            assert_eq!(at, index as usize);
            Some((at, true))
        }
        Inserted::Exists(at) => {
            table.give(details);
            Some((at, false))
        }
        Inserted::Full => {
            table.give(details);
            None
        }
    }
}

/// Ends the flow of a key, if it is there and nobody touches it meanwhile.
fn end(table: &Table, number: u32) -> bool {
    let Some(at) = find(table, number) else {
        return false;
    };
    let held = table.held_at(at);
    held.key() == key(number) && !held.word.is_dead() && table.end(at, held.word)
}

/// The word of a record, without an access.
fn word_at(table: &Table, at: usize) -> Word {
    table.held_at(at).word
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
        let table = new();
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
        assert!(enter(table, *number).unwrap().1);
    }
}

#[test]
fn of_two_that_enter_a_key_at_least_one_finds_it_there() {
    for before in [&[][..], &[1], &[1, 2]] {
        let steps = at_each_step(
            |table| insert(table, before),
            |table| {
                enter(table, 0);
            },
            |table| enter(table, 0),
            |table, entered| {
                let (at, _) = entered.unwrap();
                assert_eq!(find(table, 0), Some(at));
                let mut all = vec![0];
                all.extend(before);
                assert_settled(table, &all);
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
        |table| enter(table, 0),
        |table, entered| {
            assert!(entered.unwrap().1);
            assert_settled(table, &[0, 1, 2]);
        },
    );
}

#[test]
fn a_flow_is_found_once_it_is_entered_and_not_before() {
    at_each_step(
        |_| {},
        |table| {
            let found = find(table, 0).map(|at| table.held_at(at));
            assert!(found.is_none_or(|record| record.tag & BUSY == 0));
            // An end would be that of a flow that may yet be withdrawn.
            assert!(end(table, 0) == found.is_some());
        },
        |table| enter(table, 0).unwrap(),
        |table, _| table.assert_whole(false, |key| place(number(key))),
    );
}

#[test]
fn a_key_whose_flow_ends_meanwhile_stands_once_or_not_at_all() {
    at_each_step(
        |table| insert(table, &[1, 0]),
        |table| assert!(end(table, 0)),
        |table| enter(table, 0).unwrap(),
        |table, (_, is_new)| match is_new {
            true => assert_settled(table, &[0, 1]),
            false => assert_settled(table, &[1]),
        },
    );
    // One in front ends, and its record is free.
    at_each_step(
        |table| insert(table, &[1, 0]),
        |table| assert!(end(table, 1)),
        |table| enter(table, 0).unwrap(),
        |table, (_, is_new)| {
            assert!(!is_new);
            assert_settled(table, &[0]);
        },
    );
}

#[test]
fn a_flow_that_ends_leaves_room_for_the_next() {
    at_each_step(
        |table| insert(table, &[0, 1]),
        |table| {
            enter(table, 2);
        },
        |table| end(table, 0),
        |table, has_ended| {
            assert!(has_ended);
            assert_settled(table, &[1, 2]);
        },
    );
    at_each_step(
        |table| insert(table, &[0, 1]),
        |table| {
            let has_ended = table.held_at(AT).word.is_dead();
            assert_eq!(enter(table, 0).unwrap().1, has_ended);
        },
        |table| end(table, 0),
        |table, has_ended| {
            assert!(has_ended);
            let is_back = find(table, 0).is_some();
            assert_settled(table, if is_back { &[0, 1] } else { &[1] });
        },
    );
}

#[test]
fn a_packet_that_comes_meanwhile_keeps_the_flow() {
    let outcomes = Cell::new([0, 0]);
    at_each_step(
        |table| insert(table, &[0]),
        |table| {
            if let Some(at) = find(table, 0) {
                let word = word_at(table, at);
                let new = word.with(2_000, word.seen());
                table::change(table, at, &key(0), word, new);
            }
        },
        |table| end(table, 0),
        |table, has_ended| {
            let mut counts = outcomes.get();
            counts[usize::from(has_ended)] += 1;
            outcomes.set(counts);
            assert_settled(table, if has_ended { &[] } else { &[0] });
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
    let table = &new();
    insert(table, &[0]);
    let word = word_at(table, AT);
    assert_eq!(
        change(table, AT, word),
        (Some(Ok(word_at(table, AT))), word_at(table, AT))
    );
    assert!(word_at(table, AT) != word);
    assert_eq!(change(table, AT, word).0, Some(Err(word_at(table, AT))));
    // It ends, and another one has its record.
    at_each_step(
        |table| insert(table, &[0]),
        |table| {
            end(table, 0);
            insert(table, &[1]);
        },
        |table| change(table, AT, word_at(table, AT)).0,
        |table, changed| {
            assert!(!matches!(changed, Some(Ok(_))) || find(table, 0).is_none());
            assert_settled(table, &[1]);
            let begun = begins(1, 0);
            let word = word_at(table, AT);
            assert_eq!((word.stamp(), word.seen()), (begun.now as u32, begun.seen));
        },
    );
    // Another one has it by now, whose word is known: it is none of this key.
    let table = &new();
    insert(table, &[1]);
    assert_eq!(change(table, AT, word_at(table, AT)).0, None);
}

#[test]
fn a_flow_that_may_be_withdrawn_is_not_posted() {
    let posts = |table: &Table| {
        let word = word_at(table, AT);
        let new = word.with(3_000, word.seen().posted());
        match table::change(table, AT, &key(0), word, new) {
            Some(Ok(word)) => word.seen().is_posted(),
            _ => false,
        }
    };
    let table = &new();
    insert(table, &[0]);
    assert!(posts(table));
    // And again.
    assert!(posts(table));
    at_each_step(
        |_| {},
        |table| {
            let is_busy = table.held_at(AT).tag & BUSY != 0;
            let is_alive = !word_at(table, AT).is_dead() && word_at(table, AT) != Word::default();
            let is_posted = is_alive && posts(table);
            assert!(!(is_busy && is_posted));
        },
        |table| enter(table, 0),
        |table, _| assert_settled(table, &[0]),
    );
}

#[test]
fn what_is_starting_or_posted_does_not_end() {
    let table = &new();
    insert(table, &[0]);
    let word = word_at(table, AT);
    for seen in [word.seen().starting(), word.seen().posted()] {
        table.set_word(AT, word.with_seen(seen));
        assert!(!end(table, 0));
        assert_eq!(word_at(table, AT), word.with_seen(seen));
    }
    table.set_word(AT, word);
    assert!(!table::kill(table, AT, word.with(9_000, word.seen())));
    assert!(end(table, 0));
}

#[test]
fn a_reader_sees_one_life_or_that_it_changes() {
    let read = |table: &Table| {
        let snapshot = table::read(&Read(table, AT));
        if let Ok(Some(flow)) = snapshot {
            let number = if flow.key == key(0) { 0 } else { 1 };
            let begun = begins(number, 0);
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
            assert!(end(table, 0));
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
    let table = &new();
    assert_eq!(read(table), Ok(None));
    at_each_step(
        |_| {},
        |table| {
            let snapshot = read(table);
            let is_busy = table.held_at(AT).tag & BUSY != 0;
            assert!(!is_busy || snapshot == Ok(None));
        },
        |table| enter(table, 0),
        |_, _| {},
    );
    insert(table, &[0]);
    assert!(read(table).unwrap().is_some());
    let word = word_at(table, AT);
    table.set_word(AT, word.with_seen(word.seen().starting()));
    assert_eq!(read(table), Err(Changed));
    table.set_word(AT, word.dead());
    assert_eq!(read(table), Ok(None));
    // It dies under the reader.
    at_each_step(
        |table| insert(table, &[0]),
        |table| assert!(end(table, 0)),
        |table| table::read(&Read(table, AT)),
        |_, snapshot| assert!(!matches!(snapshot, Ok(Some(flow)) if flow.word.is_dead())),
    );
}

#[test]
fn a_full_window_refuses() {
    let table = &new();
    let numbers: Vec<u32> = (0..WINDOW).collect();
    insert(table, &numbers);
    assert_eq!(enter(table, WINDOW), None);
    assert_settled(table, &numbers);
    let mut distances: Vec<_> = table
        .held()
        .skip(AT)
        .map(|held| table::distance(held.tag))
        .collect();
    distances.sort();
    assert_eq!(distances, numbers);
}

#[test]
fn an_owner_without_its_rule_is_the_same_else() {
    let table = &new();
    insert(table, &[0]);
    let details = table.held_at(AT).details;
    let without = table::without_rule(details.owner);
    assert_eq!(table::rule(without), 0);
    assert_eq!(table::cpu(without), details.cpu());
    assert_eq!(without, details.owner & !(0x1ff << 20));
    assert_eq!(
        table::key(details.addresses, details.ports, without, 0),
        key(0)
    );
}

#[test]
fn an_owner_has_a_protocol_a_cpu_and_a_rule() {
    const PROTOCOLS: [u8; 4] = [1, 6, 17, 58];
    let key = |proto| FlowKey::new([0, 1], 1, [0, 2], 2, proto).0;
    for proto in PROTOCOLS {
        let owner = Details::owner_of(&key(proto), 0xabc, 0x155);
        let other = table::with_rule(owner, 0x0aa);
        // A number that no rule has.
        let wide = table::with_rule(owner, 0xffff);
        for (owner, rule) in [(owner, 0x155), (other, 0x0aa), (wide, 0x1ff)] {
            assert_eq!((table::cpu(owner), table::rule(owner)), (0xabc, rule));
            for wanted in PROTOCOLS {
                assert_eq!(table::is_of(owner, &key(wanted)), wanted == proto);
            }
        }
    }
}

#[test]
fn keys_that_share_a_part_are_others() {
    let [own, address, port] = [[1, 2], [9, 2], [1, 9]].map(|[address, port]| {
        let source = [0, u64::from(address as u8)];
        FlowKey::new(source, port, [0, 77], 443, 6).0
    });
    // With the same fingerprint, and another one.
    for (other, fingerprint) in [(address, 3), (port, 3), (address, 5), (port, 5)] {
        let table = &Memory::new(((HOME + WINDOW) / LINE) as usize);
        let places = [3, fingerprint].map(|fingerprint| Place {
            home: HOME,
            fingerprint,
        });
        let enter =
            |key: &FlowKey, place| match table::insert(table, place, key, &begins(0, table.take()))
            {
                Inserted::New(at, _) => at,
                _ => panic!("it is there"),
            };
        let (at, beside) = (enter(&own, places[0]), enter(&other, places[1]));
        assert_eq!(table::find(table, places[0], &own), Some(at));
        assert_eq!(table::find(table, places[1], &other), Some(beside));
        let word = word_at(table, at);
        assert_eq!(table::change(table, at, &other, word, word), None);
        assert_eq!(table::change(table, at, &own, word, word), Some(Ok(word)));
    }
}

#[test]
fn two_with_one_fingerprint_are_told_apart() {
    let [first, second] = [TWINS, TWINS + 1];
    let marked = |table: &Table, number| {
        let at = find(table, number).unwrap();
        assert_eq!(table.held_at(at).key(), key(number));
        table.held_at(at).tag & TWIN != 0
    };
    // Both are entered at once.
    at_each_step(
        |_| {},
        |table| insert(table, &[second]),
        |table| enter(table, first),
        |table, entered| {
            assert!(entered.unwrap().1);
            assert!(marked(table, first) && marked(table, second));
            assert_settled(table, &[first, second]);
        },
    );
    // One is looked for while the other is entered: before that is found, it is told apart.
    at_each_step(
        |table| insert(table, &[first]),
        |table| {
            let found = find(table, first).map(|at| table.held_at(at).key());
            assert_eq!(found, Some(key(first)));
            let found = find(table, second).map(|at| table.held_at(at).tag & BUSY);
            assert!(found.is_none_or(|busy| busy == 0));
        },
        |table| enter(table, second),
        |table, _| assert_settled(table, &[first, second]),
    );
    at_each_step(
        |table| insert(table, &[first]),
        |table| insert(table, &[second]),
        |table| find(table, first).map(|at| table.held_at(at).key()),
        |table, found| {
            assert_eq!(found, Some(key(first)));
            assert_settled(table, &[first, second]);
        },
    );
    // One ends while the other is entered, and another flow takes its record.
    for others in [&[][..], &[1, 2]] {
        at_each_step(
            |table| insert(table, &[first]),
            |table| {
                assert!(end(table, first));
                insert(table, others);
            },
            |table| enter(table, second),
            |table, entered| {
                assert!(entered.unwrap().1);
                let mut left = others.to_vec();
                left.push(second);
                assert_settled(table, &left);
            },
        );
    }
}

#[test]
fn behind_the_last_home_there_is_a_window() {
    for (max_flows, homes) in [(0, 64), (64, 64), (65, 65), (1_000, 1_000)] {
        let hash = Hash::new([1; 11], max_flows);
        assert_eq!((hash.homes, hash.lines()), (homes, homes + 31));
        assert_eq!(hash.records(), 2 * homes + 62);
    }
}

/// Multilinear hashing in pairs, scrambled, by the words of its documentation.
#[test]
fn places_are_those_of_the_hash() {
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
        let place = hash.place(&key);
        assert_eq!(u128::from(place.home), 2 * home);
        assert_eq!(place.fingerprint, sum as u64 >> 8 | 1);
    }
}
