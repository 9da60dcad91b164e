//! Which details are free. (`pool_model.rs` tests what several CPUs do to the depot.)
#![allow(missing_docs)]

use std::{cell::Cell, collections::HashSet};

use twheel_common::{
    pool::{CHAIN, Pool, SHELF, Shelf, give, next, take},
    wheel::Link,
};

struct Memory {
    next: Vec<Cell<Link>>,
    below: Vec<Cell<Link>>,
    depot: Cell<u64>,
    fresh: Cell<u32>,
    /// Another CPU always gets to the depot first.
    is_busy: Cell<bool>,
    attempts: Cell<u32>,
}

impl Memory {
    fn new(details: u32) -> Self {
        let links = || (0..details).map(|_| Cell::new(Link::NONE)).collect();
        Self {
            next: links(),
            below: links(),
            depot: Cell::default(),
            fresh: Cell::default(),
            is_busy: Cell::default(),
            attempts: Cell::default(),
        }
    }

    /// The number of chains in the depot.
    fn chains(&self) -> usize {
        let first = Link::from_raw(self.depot.get() as u32);
        std::iter::successors(first.as_flow(), |details| self.below(*details).as_flow()).count()
    }
}

impl Pool for Memory {
    fn next(&self, details: u32) -> Link {
        self.next[details as usize].get()
    }

    fn set_next(&self, details: u32, next: Link) {
        self.next[details as usize].set(next);
    }

    fn below(&self, details: u32) -> Link {
        self.below[details as usize].get()
    }

    fn set_below(&self, details: u32, below: Link) {
        self.below[details as usize].set(below);
    }

    fn depot(&self) -> u64 {
        self.depot.get()
    }

    fn change_depot(&self, old: u64, new: u64) -> u64 {
        self.attempts.set(self.attempts.get() + 1);
        if self.is_busy.get() {
            return !old;
        }
        assert_eq!(old, self.depot.get());
        assert_ne!(
            old >> 32,
            new >> 32,
            "the new head must have another version"
        );
        self.depot.replace(new)
    }

    fn fresh(&self) -> Option<u32> {
        let first = self.fresh.get();
        ((first + CHAIN) as usize <= self.next.len()).then(|| {
            self.fresh.set(first + CHAIN);
            first
        })
    }

    fn repeat(&self, turns: u32, mut turn: impl FnMut(u32) -> bool) {
        for number in 0..turns {
            if turn(number) {
                break;
            }
        }
    }
}

/// The number of details on a shelf.
fn lying(memory: &Memory, shelf: &Shelf) -> u32 {
    let chain = |first: Link| {
        std::iter::successors(first.as_flow(), |details| memory.next(*details).as_flow()).count()
    };
    let linked = chain(shelf.free) + chain(shelf.spare);
    linked as u32 + shelf.fresh_end - shelf.fresh
}

#[test]
fn all_are_given_once_and_then_there_are_none() {
    let memory = Memory::new(4 * CHAIN);
    let mut shelf = Shelf::default();
    let mut taken = HashSet::new();
    for _ in 0..4 * CHAIN {
        let expected = (shelf.fresh != shelf.fresh_end).then(|| next(&shelf));
        let details = take(&memory, &mut shelf).unwrap();
        assert!(expected.is_none_or(|expected| expected == details));
        assert!(taken.insert(details), "details {details} taken twice");
    }
    assert_eq!(take(&memory, &mut shelf), None);
    for details in 0..4 * CHAIN {
        give(&memory, &mut shelf, details);
        assert_eq!(
            next(&shelf),
            details,
            "the details that were given back last must be taken first"
        );
        assert!(lying(&memory, &shelf) <= SHELF);
    }
    // The shelf keeps two chains; the depot has the rest.
    assert_eq!(memory.chains(), 2);
    assert_eq!(lying(&memory, &shelf), 2 * CHAIN);
    for _ in 0..4 * CHAIN {
        assert!(taken.remove(&take(&memory, &mut shelf).unwrap()));
    }
    assert_eq!(take(&memory, &mut shelf), None);
}

#[test]
fn what_one_cpu_gives_back_another_takes() {
    let memory = Memory::new(8 * CHAIN);
    let [mut takes, mut gives] = [Shelf::default(); 2];
    let mut held = Vec::new();
    for turn in 0..100 * CHAIN {
        held.push(take(&memory, &mut takes).expect("no free details"));
        if held.len() > CHAIN as usize {
            give(&memory, &mut gives, held.remove(turn as usize % held.len()));
        }
        for shelf in [&takes, &gives] {
            assert!(lying(&memory, shelf) <= SHELF);
        }
    }
    // The details of the first turns have sufficed for all of them.
    let once: HashSet<_> = held.iter().collect();
    assert_eq!(once.len(), held.len());
}

#[test]
fn random_cpus_lose_and_share_nothing() {
    const DETAILS: u32 = 12 * CHAIN;
    let memory = Memory::new(DETAILS);
    let mut shelves = [Shelf::default(); 3];
    let mut held: Vec<u32> = Vec::new();
    let mut random = 0x9e37_79b9_7f4a_7c15_u64;
    for turn in 0..200_000_u32 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let shelf = &mut shelves[(random >> 20) as usize % 3];
        // Alternates between phases in which more details are taken and phases in which more are
        // given back.
        let takes = (random >> 40) % 8 < if turn / 2_000 % 2 == 0 { 6 } else { 2 };
        if takes {
            held.extend(take(&memory, shelf));
        } else if !held.is_empty() {
            let at = (random >> 44) as usize % held.len();
            give(&memory, shelf, held.swap_remove(at));
        }
        if turn % 1_000 == 0 {
            let mut once = held.clone();
            once.sort_unstable();
            once.dedup();
            assert_eq!(once.len(), held.len());
            let lie: u32 = shelves.iter().map(|shelf| lying(&memory, shelf)).sum();
            let untouched = DETAILS - memory.fresh.get();
            let stored = memory.chains() as u32 * CHAIN;
            assert_eq!(held.len() as u32 + lie + untouched + stored, DETAILS);
        }
    }
    // All details can still be taken.
    loop {
        let taken: Vec<_> = shelves
            .iter_mut()
            .filter_map(|shelf| take(&memory, shelf))
            .collect();
        if taken.is_empty() {
            break;
        }
        held.extend(taken);
    }
    assert_eq!(held.len() as u32, DETAILS);
}

#[test]
fn who_does_not_get_to_the_depot_goes_another_way() {
    let memory = Memory::new(5 * CHAIN);
    let mut full = Shelf::default();
    let all: Vec<_> = (0..3 * CHAIN)
        .map(|_| take(&memory, &mut full).unwrap())
        .collect();
    for details in &all {
        give(&memory, &mut full, *details);
    }
    assert_eq!(memory.chains(), 1);
    memory.is_busy.set(true);
    // It takes details that were never used.
    let mut shelf = Shelf::default();
    memory.attempts.set(0);
    let details = take(&memory, &mut shelf).unwrap();
    assert!(memory.attempts.get() > 1 && !all.contains(&details));
    // It keeps details that it cannot bring to the depot.
    give(&memory, &mut full, details);
    for _ in 1..CHAIN {
        let details = take(&memory, &mut shelf).unwrap();
        give(&memory, &mut full, details);
    }
    assert_eq!(memory.chains(), 1);
    assert_eq!(lying(&memory, &full), 3 * CHAIN);
    let another = take(&memory, &mut shelf).unwrap();
    memory.is_busy.set(false);
    give(&memory, &mut full, another);
    assert_eq!(memory.chains(), 2);
}
