//! The memory of a flow table for tests without threads. Another CPU may act between any two
//! accesses of a CPU.

// Each test uses only a part of this module.
#![allow(dead_code)]

use std::cell::{Cell, RefCell};

use twheel_common::{
    flow::{FlowKey, Word},
    table::{self, BUSY, Begins, Details, Extras, LINE, Line, Place, Reads, Records, TWIN},
};

/// An operation of another CPU.
type Other<'a> = Box<dyn FnOnce(&Memory) + 'a>;

/// A check of the memory before each access, and after the other CPU's operation.
type Check = fn(&Memory);

/// The memory of a table.
pub struct Memory<'a> {
    lines: Vec<Cell<Line>>,
    details: Vec<Cell<(Details, Extras)>>,
    free: RefCell<Vec<u32>>,
    check: Option<Check>,
    /// Accesses until the other CPU acts.
    left: Cell<u32>,
    other: RefCell<Option<Other<'a>>>,
}

/// The contents of a record, and the details that it names.
#[derive(Clone, Copy, Debug)]
pub struct Held {
    pub tag: u64,
    pub word: Word,
    pub number: u32,
    pub details: Details,
    pub extras: Extras,
}

impl Held {
    /// The key of its flow.
    pub fn key(&self) -> FlowKey {
        self.details.key(self.extras.vlans)
    }
}

impl<'a> Memory<'a> {
    pub fn new(lines: usize) -> Self {
        let details = lines as u32 * LINE + 8;
        Self {
            lines: vec![Cell::default(); lines],
            details: vec![Cell::default(); details as usize],
            free: RefCell::new((0..details).collect()),
            check: None,
            left: Cell::new(u32::MAX),
            other: RefCell::new(None),
        }
    }

    /// The same, with a check at every access.
    pub fn checked(lines: usize, check: Check) -> Self {
        Self {
            check: Some(check),
            ..Self::new(lines)
        }
    }

    /// Lets the other CPU act before the access with this number.
    pub fn interrupt(&self, left: u32, other: impl FnOnce(&Memory) + 'a) {
        self.left.set(left);
        *self.other.borrow_mut() = Some(Box::new(other));
    }

    /// Whether the other CPU has acted.
    pub fn is_interrupted(&self) -> bool {
        self.other.borrow().is_none()
    }

    fn step(&self) {
        let Some(check) = self.check else { return };
        check(self);
        let left = self.left.get();
        self.left.set(left.wrapping_sub(1));
        if left == 0 {
            let other = self.other.borrow_mut().take();
            other.expect("the other CPU has already acted")(self);
            check(self);
        }
    }

    /// An access to the line of a record; the second argument is the record's place in the line.
    fn with<T>(&self, at: usize, change: impl FnOnce(&mut Line, usize) -> T) -> T {
        self.step();
        let (cell, place) = (&self.lines[at / LINE as usize], at % LINE as usize);
        let mut line = cell.get();
        let result = change(&mut line, place);
        cell.set(line);
        result
    }

    /// The contents of all records, read without an access.
    pub fn held(&self) -> impl Iterator<Item = Held> {
        (0..self.lines.len() * LINE as usize).map(|at| self.held_at(at))
    }

    /// The contents of one record, read without an access.
    pub fn held_at(&self, at: usize) -> Held {
        let (line, place) = (self.lines[at / LINE as usize].get(), at % LINE as usize);
        Held {
            tag: line.tags[place],
            word: line.words[place],
            number: line.details[place],
            details: self.details[line.details[place] as usize].get().0,
            extras: self.details[line.details[place] as usize].get().1,
        }
    }

    /// The bitmap of the records whose flows have this line as their home.
    pub fn hops_of(&self, line: usize) -> u64 {
        self.lines[line].get().hops
    }

    pub fn lines(&self) -> usize {
        self.lines.len()
    }

    pub fn positions(&self, at: usize) -> [u32; 2] {
        self.lines[at / LINE as usize].get().positions[at % LINE as usize]
    }

    /// Takes free details.
    pub fn take(&self) -> u32 {
        self.free.borrow_mut().pop().expect("no free details")
    }

    /// Returns details to the free ones.
    pub fn give(&self, details: u32) {
        self.free.borrow_mut().push(details);
    }

    /// Checks that all details but these many are free.
    pub fn assert_given_back(&self, flows: usize) {
        let mut free = self.free.borrow().clone();
        free.sort();
        free.dedup();
        assert_eq!(free.len(), self.details.len() - flows, "details are lost");
    }

    /// Ends the flow in a record, if its word is this one.
    pub fn end(&self, at: usize, word: Word) -> bool {
        if !table::kill(self, at, word) {
            return false;
        }
        let details = self.lines[at / LINE as usize].get().details[at % LINE as usize];
        table::remove(self, at, at as u32);
        self.give(details);
        true
    }

    /// Checks that each flow is behind its home and announced there, and that no key occurs twice.
    /// If `is_settled`, no operation is under way, and there must be nothing else.
    pub fn assert_whole(&self, is_settled: bool, home: impl Fn(&FlowKey) -> Place) {
        let mut hops = vec![0; self.lines.len()];
        let mut live: Vec<FlowKey> = Vec::new();
        for (index, held) in self.held().enumerate() {
            let is_dead = held.word.is_dead() || held.word == Word::default();
            assert!(held.tag != 0 || is_dead, "alive and free: {held:?}");
            assert!(held.tag != TWIN || !is_settled, "a mark without a flow");
            if held.tag == 0 || held.tag == TWIN {
                continue;
            }
            assert!(!is_settled || held.tag & BUSY == 0 && !is_dead, "{held:?}");
            if !table::holds_flow(held.tag) || is_dead {
                continue;
            }
            let place = home(&held.key());
            let distance = index as u32 - place.home;
            assert_eq!(table::distance(held.tag), distance);
            assert_eq!(held.details.record, index as u32);
            let line = (place.home / LINE) as usize;
            hops[line] |= 1 << distance;
            live.push(held.key());
        }
        for (line, hops) in self.lines.iter().zip(hops) {
            let announced = line.get().hops;
            assert_eq!(announced & hops, hops, "not announced");
            assert!(!is_settled || announced == hops, "announced without a flow");
        }
        let count = live.len();
        live.sort_by_key(|key| (key.addresses(), key.ports()));
        live.dedup();
        assert_eq!(live.len(), count, "a key occurs twice");
    }
}

impl Records for Memory<'_> {
    type At = usize;

    fn at(&self, index: u32) -> Option<usize> {
        ((index as usize) < self.lines.len() * LINE as usize).then_some(index as usize)
    }

    fn beside(&self, first: usize, distance: u32) -> usize {
        first | distance as usize
    }

    fn tag(&self, at: usize) -> u64 {
        self.with(at, |line, place| line.tags[place])
    }

    fn claim(&self, at: usize, tag: u64) -> bool {
        assert!(
            tag & BUSY != 0,
            "a claimed record must be busy until its key is written"
        );
        self.with(at, |line, place| {
            let is_free = line.tags[place] == 0;
            if is_free {
                line.tags[place] = tag;
            }
            is_free
        })
    }

    fn swap_tag(&self, at: usize, old: u64, new: u64) {
        self.with(at, |line, place| {
            if line.tags[place] == old {
                line.tags[place] = new;
            }
        });
    }

    fn set_in_tag(&self, at: usize, bits: u64) -> u64 {
        self.with(at, |line, place| {
            let held = line.tags[place];
            line.tags[place] |= bits;
            held
        })
    }

    fn clear_in_tag(&self, at: usize, bits: u64) {
        self.with(at, |line, place| line.tags[place] &= !bits);
    }

    fn free(&self, at: usize) {
        self.with(at, |line, place| line.tags[place] = 0);
    }

    fn word(&self, at: usize) -> Word {
        self.with(at, |line, place| line.words[place])
    }

    fn set_word(&self, at: usize, word: Word) {
        self.with(at, |line, place| line.words[place] = word);
    }

    fn change(&self, at: usize, old: Word, new: Word) -> Word {
        self.with(at, |line, place| {
            let held = line.words[place];
            if held == old {
                line.words[place] = new;
            }
            held
        })
    }

    fn hops(&self, at: usize) -> u64 {
        self.with(at, |line, _| line.hops)
    }

    fn announce(&self, at: usize, bits: u64) -> u64 {
        self.with(at, |line, _| {
            let before = line.hops;
            line.hops |= bits;
            before
        })
    }

    fn renounce(&self, at: usize, bits: u64) {
        self.with(at, |line, _| line.hops &= !bits);
    }

    fn has_key(&self, at: usize, key: &FlowKey) -> bool {
        let number = self.with(at, |line, place| line.details[place]);
        self.step();
        let (details, extras) = self.details[number as usize].get();
        details.key(extras.vlans) == *key
    }

    fn fill(&self, at: usize, key: &FlowKey, begins: &Begins) {
        let number = begins.details;
        self.with(at, |line, place| {
            assert!(
                line.tags[place] & BUSY != 0,
                "the record belongs to another CPU"
            );
            line.details[place] = number;
            line.positions[place] = begins.positions;
        });
        self.step();
        let details = Details {
            addresses: key.addresses(),
            ports: key.ports() as u32,
            owner: Details::owner_of(key, begins.cpu, begins.rule) | begins.outgoing,
            record: at as u32,
            created: begins.now as u32,
            ..Details::default()
        };
        let extras = Extras {
            vlans: key.packed_vlans(),
            ..Extras::default()
        };
        self.details[number as usize].set((details, extras));
    }

    fn repeat(&self, turns: u32, mut turn: impl FnMut(u32) -> bool) {
        for number in 0..turns {
            if turn(number) {
                break;
            }
        }
    }
}

/// A record as `twheel flows` reads it.
pub struct Read<'a, 'b>(pub &'a Memory<'b>, pub usize);

impl Reads for Read<'_, '_> {
    fn word(&self) -> Word {
        Records::word(self.0, self.1)
    }

    fn tag(&self) -> u64 {
        Records::tag(self.0, self.1)
    }

    fn details(&self) -> Option<(Details, Extras)> {
        let number = self.0.with(self.1, |line, place| line.details[place]);
        self.0.step();
        self.0.details.get(number as usize).map(Cell::get)
    }

    fn fence(&self) {}
}
