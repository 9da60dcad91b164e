//! The protocol of the flow table, step by step: between any two accesses of one CPU, another CPU
//! does a whole operation. (`table_model` explores all orders of all accesses, which takes longer.)
#![allow(missing_docs)]

mod change;
mod enter;
mod keys;

use self::memory::Memory;
use twheel_common::{
    flow::{FlowKey, Word},
    state::{Seen, SideWay},
    table::{self, Begins, Inserted, LINE, Place, WINDOW},
};

#[path = "../memory/mod.rs"]
mod memory;

/// The home of all keys in these tests.
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

/// Keys with numbers from this on have the same fingerprint.
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
        .expect("an unknown key")
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

/// The first record of the window.
const AT: usize = HOME as usize;

/// A table in which each access is a step.
type Table<'a> = Memory<'a>;

fn new<'a>() -> Table<'a> {
    Memory::checked(((HOME + WINDOW) / LINE) as usize, |table| {
        table.assert_whole(false, |key| place(number(key)));
    })
}

/// Checks, while no operation is under way, that exactly these flows are in the table.
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

/// Enters a key. Returns its record, and whether this call has entered it.
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

/// Ends the flow of a key, if it exists and is not touched meanwhile.
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

/// Runs an operation on a table that `prepare` has filled, with the other CPU's operation before
/// each of its accesses in turn, and checks each result. Returns the number of accesses.
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
