//! The flow table on one CPU: compared with a map, at its intended load, and with keys that are not
//! random at all. (`table_model` tests what several CPUs do to it.)
#![allow(missing_docs)]

mod memory;

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap, HashSet},
};

use memory::Memory;
use twheel_common::{
    flow::FlowKey,
    state::{Seen, SideWay},
    table::{self, Begins, Hash, Inserted, LINE, Place, Records, TWIN, WINDOW, find, insert},
};

const SYN: Seen = Seen(0);

fn syn(now: u64, details: u32) -> Begins {
    Begins {
        seen: SYN,
        now,
        cpu: 0,
        rule: 0,
        positions: [0; 2],
        way: SideWay::ANY,
        outgoing: 0,
        details,
    }
}

/// A table that no other CPU uses.
struct Table {
    hash: Hash,
    memory: Memory<'static>,
    /// The bits of the fingerprints that are used.
    fingerprints: u64,
}

impl Table {
    fn new(secret: u64, max_flows: u32) -> Self {
        let mut random = Random(secret);
        let hash = Hash::new([(); 11].map(|()| random.next()), max_flows);
        Self {
            hash,
            memory: Memory::new(hash.lines() as usize),
            fingerprints: u64::MAX,
        }
    }

    fn place(&self, key: &FlowKey) -> Place {
        let Place { home, fingerprint } = self.hash.place(key);
        let fingerprint = fingerprint & self.fingerprints | 1;
        Place { home, fingerprint }
    }

    fn find(&self, key: &FlowKey) -> Option<usize> {
        find(&self.memory, self.place(key), key)
    }

    /// The new record; `None` if the window is full.
    fn insert(&self, key: &FlowKey, now: u64) -> Option<usize> {
        self.insert_at(self.place(key), key, now)
    }

    fn insert_at(&self, place: Place, key: &FlowKey, now: u64) -> Option<usize> {
        let details = self.memory.take();
        match insert(&self.memory, place, key, &syn(now, details)) {
            Inserted::New(at, index) => {
                assert_eq!(at, index as usize);
                Some(at)
            }
            Inserted::Exists(_) => panic!("the key exists already"),
            Inserted::Full => {
                self.memory.give(details);
                None
            }
        }
    }

    fn remove(&self, at: usize) {
        assert!(self.memory.end(at, self.memory.word(at)));
    }

    /// Checks that the bitmaps name exactly the records of the flows. Returns the share of flows at
    /// their homes.
    fn check(&self) -> f64 {
        self.memory.assert_whole(true, |key| self.place(key));
        let (mut flows, mut at_home) = (0, 0);
        for held in self.memory.held().filter(|held| held.tag != 0) {
            flows += 1;
            at_home += u32::from(table::distance(held.tag) < LINE);
        }
        self.memory.assert_given_back(flows as usize);
        f64::from(at_home) / f64::from(flows)
    }
}

/// Keys as an attacker chooses them: from a number to endpoints.
type Keys = fn(u64) -> FlowKey;

fn ipv4(source: u32, port: u16, destination: u32, to: u16) -> FlowKey {
    let map = |address: u32| {
        let bytes = std::net::Ipv4Addr::from_bits(address)
            .to_ipv6_mapped()
            .octets();
        let (high, low) = bytes.split_at(8);
        [high, low].map(|half| u64::from_ne_bytes(half.try_into().unwrap()))
    };
    FlowKey::new(map(source), port.to_be(), map(destination), to.to_be(), 6).0
}

fn ipv6(source: [u64; 2], port: u16, destination: [u64; 2]) -> FlowKey {
    let words = |address: [u64; 2]| address.map(u64::to_be);
    FlowKey::new(
        words(source),
        port.to_be(),
        words(destination),
        443u16.to_be(),
        6,
    )
    .0
}

/// Any IPv6 endpoints.
fn any(number: u64) -> FlowKey {
    let mut random = Random(number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let _ = random.next();
    let mut address = || [random.next(), random.next()];
    let (source, destination) = (address(), address());
    ipv6(source, random.next() as u16, destination)
}

const SETS: [(&str, Keys); 8] = [
    ("consecutive ports", |n| {
        ipv4(0x0a00_0000 + (n >> 16) as u32, n as u16, 0xc000_0201, 443)
    }),
    ("consecutive ports of both ends", |n| {
        ipv4(0x0a00_0001, n as u16 & 0x3ff, 0xc000_0201, (n >> 10) as u16)
    }),
    ("consecutive addresses", |n| {
        ipv4(0x0a00_0000 + n as u32, 1024, 0xc000_0201, 443)
    }),
    ("consecutive addresses, far apart", |n| {
        ipv4((n as u32).reverse_bits(), 1024, 0xc000_0201, 443)
    }),
    ("addresses of both ends", |n| {
        ipv4(
            0x0a00_0000 + (n as u32 & 0x1ff),
            1024,
            0xc000_0000 + (n >> 9) as u32,
            443,
        )
    }),
    // Each differs from the first in one bit, then in two, …
    ("few bits different", |n| {
        let gray = n ^ n >> 1;
        ipv6([gray << 40, 0], (gray >> 24) as u16, [0x2001_0db8 << 32, 1])
    }),
    ("IPv6 with equal high halves", |n| {
        ipv6([0x2001_0db8 << 32, n], 1024, [0x2001_0db8 << 32, 1])
    }),
    ("IPv6 with equal low halves", |n| {
        ipv6([0x2001_0db8 << 32 | n, 1], 1024, [0x2001_0db8 << 32, 1])
    }),
];

/// The result for a table of this capacity under steady churn: for each new flow, a random one is
/// removed.
#[derive(Debug)]
struct Churn {
    refused: u64,
    at_home: f64,
}

fn churn(secret: u64, max_flows: u32, insertions: u64, keys: Keys) -> Churn {
    let table = Table::new(secret, max_flows);
    let mut flows = std::collections::VecDeque::new();
    let mut random = Random(secret ^ 0x5bd1_e995);
    let mut refused = 0;
    for number in 0..insertions {
        if flows.len() == max_flows as usize {
            // A random one, so that no order of adding and removing helps.
            let last = flows.len() - 1;
            flows.swap(random.next() as usize % flows.len(), last);
            table.remove(flows.pop_back().unwrap());
        }
        match table.insert(&keys(number), number) {
            Some(at) => flows.push_back(at),
            None => refused += 1,
        }
    }
    let at_home = table.check();
    Churn { refused, at_home }
}

/// At most one insertion in a million is refused.
#[test]
fn few_are_refused_at_capacity() {
    let is_long = std::env::var_os("TWHEEL_LONG").is_some();
    let (tables, insertions) = if is_long {
        (50, 6_000_000)
    } else {
        (1, 6_000_000)
    };
    let mut refused = 0;
    for secret in 1..=tables {
        let churn = churn(secret, 1 << 16, insertions, any);
        println!("{churn:?}");
        refused += churn.refused;
    }
    assert!(refused <= tables * insertions / 1_000_000, "{refused}");
}

/// How long a flow lives, measured in later flows, in a table of this capacity: by the flow's
/// number. (Not by its record: if flows away from home lived longer than others, windows would fill
/// up. But nobody outside can know which flows these are.)
type Lifetime = fn(&mut Random, capacity: u64, number: u64) -> u64;

const LIFETIMES: [(&str, Lifetime); 12] = [
    ("the same for all", |_, capacity, _| capacity),
    ("the last to come go first", |_, _, number| {
        (1 << 40) - 2 * number
    }),
    ("uniform", |random, capacity, _| {
        random.next() % (2 * capacity)
    }),
    ("exponential", |random, capacity, _| {
        (capacity as f64 * random.exponential()) as u64
    }),
    ("heavy-tailed", |random, capacity, _| {
        (capacity as f64 / 16.0 * (random.exponential() / 1.1).exp()) as u64
    }),
    ("log-normal", |random, capacity, _| {
        let sum: f64 = (0..12).map(|_| random.unit()).sum();
        (capacity as f64 / 4.0 * (2.0 * (sum - 6.0)).exp()) as u64
    }),
    (
        "one in ten a hundred times as long",
        |random, capacity, _| match random.next() % 10 {
            0 => 8 * capacity,
            _ => random.next() % (capacity / 6),
        },
    ),
    (
        "half for ever, half the same",
        |_, capacity, number| match number < capacity / 2 {
            true => 1 << 40,
            false => capacity / 2,
        },
    ),
    (
        "half for ever, half at random",
        |random, capacity, number| match number < capacity / 2 {
            true => 1 << 40,
            false => (capacity as f64 * random.exponential()) as u64,
        },
    ),
    ("many at once", |_, capacity, number| {
        (number / (capacity / 4) + 4) * (capacity / 4) - number
    }),
    (
        "long by day, short by night",
        |random, capacity, number| match number / (4 * capacity) % 2 {
            0 => capacity + random.next() % capacity,
            _ => random.next() % (capacity / 8),
        },
    ),
    (
        "those that live long come together",
        |random, capacity, number| match number % (4 * capacity) < capacity / 8 {
            true => 8 * capacity,
            false => random.next() % (capacity / 2),
        },
    ),
];

/// At most one insertion in a million is refused, however long flows live. The table is full: for
/// each new flow, the one with the earliest end is removed, and all with the same end.
#[test]
fn few_are_refused_under_any_pattern_of_lifetimes() {
    const FLOWS: u32 = 1 << 14;
    const INSERTIONS: u64 = 1_000_000;
    for (secret, (name, lifetime)) in (1..).zip(LIFETIMES) {
        let table = Table::new(secret, FLOWS);
        let mut random = Random(secret);
        // When each flow ends, earliest first.
        let mut ends = BinaryHeap::new();
        let (mut refused, mut full) = (0, 0);
        for number in 0..INSERTIONS {
            if ends.len() == FLOWS as usize {
                let Reverse((first, at)) = ends.pop().unwrap();
                table.remove(at);
                while let Some(&Reverse((end, at))) = ends.peek()
                    && end == first
                {
                    ends.pop();
                    table.remove(at);
                }
            }
            match table.insert(&any(number), number) {
                Some(at) => {
                    let lifetime = lifetime(&mut random, FLOWS.into(), number);
                    ends.push(Reverse((number + lifetime, at)));
                }
                None => refused += 1,
            }
            full += u64::from(ends.len() >= FLOWS as usize / 2);
        }
        println!("{name}: {refused} refused, {} flows", ends.len());
        assert!(
            full > INSERTIONS / 2,
            "{name}: the table was full only {full} times"
        );
        assert!(refused <= INSERTIONS / 1_000_000, "{name}: {refused}");
        table.check();
    }
}

/// An attacker who does not know the secret gains nothing. (Without its mixer, the hash would let
/// one secret in thirty refuse one such flow in fifty.)
#[test]
fn structured_keys_are_no_worse_than_random_ones() {
    const FLOWS: u32 = 10_000;
    let is_long = std::env::var_os("TWHEEL_LONG").is_some();
    let secrets = if is_long { 1_000 } else { 20 };
    let mut refused = 0;
    for secret in 1..=secrets {
        let random = churn(secret, FLOWS, 15_000, any);
        for (name, keys) in SETS {
            let churn = churn(secret, FLOWS, 15_000, keys);
            let text = format!("{name}, secret {secret}: {churn:?}; any keys: {random:?}");
            assert!(churn.refused <= 2, "{text}");
            assert!(churn.at_home > random.at_home * 0.9, "{text}");
            refused += churn.refused;
        }
    }
    let insertions = secrets * SETS.len() as u64 * 15_000;
    assert!(
        refused <= 2 + insertions / 1_000_000,
        "{refused} of {insertions}"
    );
}

#[test]
fn sets_are_of_different_keys() {
    for (name, keys) in SETS.into_iter().chain([("any", any as Keys)]) {
        let all: HashSet<_> = (0..100_000).map(keys).collect();
        assert_eq!(all.len(), 100_000, "{name}");
    }
}

#[test]
fn it_agrees_with_a_map() {
    for secret in 1..=20 {
        // With fingerprints of two bits, too, so that every other flow has a twin.
        let fingerprints = [u64::MAX, 7][secret as usize % 2];
        let table = Table {
            fingerprints,
            ..Table::new(secret, 64)
        };
        let mut map: HashMap<FlowKey, usize> = HashMap::new();
        let mut random = Random(secret);
        for now in 0..20_000 {
            let key = any(random.next() % 300);
            let own = map.get(&key).copied();
            let found = table.find(&key);
            match own {
                Some(_) => assert_eq!(found, own),
                None => assert!(found.is_none_or(|at| is_strange(&table, at, &key))),
            }
            match (own, random.next() % 3) {
                (None, 0) => {}
                (None, _) => match table.insert(&key, now) {
                    Some(at) => assert_eq!(map.insert(key, at), None),
                    None => assert!(map.len() > WINDOW as usize),
                },
                (Some(at), 0) => {
                    map.remove(&key);
                    table.remove(at);
                    let found = table.find(&key);
                    assert!(found.is_none_or(|at| is_strange(&table, at, &key)));
                }
                (Some(at), _) => {
                    // A second insertion finds the first one.
                    let place = table.place(&key);
                    let details = table.memory.take();
                    let again = insert(&table.memory, place, &key, &syn(now, details));
                    assert!(
                        matches!(again, Inserted::Exists(first) if first == at) || map.len() > 64
                    );
                    table.memory.give(details);
                }
            }
            if now % 64 == 0 {
                table.check();
            }
        }
        table.check();
        for (key, at) in &map {
            assert_eq!(table.find(key), Some(*at));
            table.remove(*at);
        }
        table.check();
        assert!(table.memory.held().all(|held| held.tag == 0));
    }
}

/// Whether what was found for a key that is not in the table is another flow with the same
/// fingerprint, which the packet does not change.
fn is_strange(table: &Table, at: usize, key: &FlowKey) -> bool {
    let held = table.memory.held_at(at);
    let place = table.place(&held.key());
    let word = held.word;
    held.key() != *key
        && place == table.place(key)
        && table::change(&table.memory, at, key, word, word.dead()).is_none()
}

/// Thousands of false matches: every flow in the table is found, and no other flow is changed.
#[test]
fn fingerprints_of_twelve_bits_mix_nothing_up() {
    const FLOWS: u32 = 1 << 15;
    let table = Table {
        fingerprints: 0xfff,
        ..Table::new(7, FLOWS)
    };
    let mut flows: Vec<(FlowKey, usize)> = Vec::new();
    let mut random = Random(7);
    let (mut strange, mut twins) = (0, 0);
    for number in 0..2_000_000 {
        if flows.len() == FLOWS as usize {
            let any = random.next() as usize % flows.len();
            let (key, at) = flows.swap_remove(any);
            assert_eq!(table.find(&key), Some(at));
            table.remove(at);
        }
        let key = any(number);
        if let Some(found) = table.find(&key) {
            assert!(is_strange(&table, found, &key));
            strange += 1;
        }
        if let Some(at) = table.insert(&key, number) {
            assert_eq!(table.find(&key), Some(at));
            twins += u32::from(table.memory.held_at(at).tag & TWIN != 0);
            flows.push((key, at));
        }
    }
    table.check();
    for (key, at) in &flows {
        assert_eq!(table.find(key), Some(*at));
    }
    println!("{strange} false matches, {twins} twins");
    assert!(strange > 500 && twins >= strange, "{strange}, {twins}");
}

#[test]
fn a_full_window_refuses_and_a_free_record_is_found() {
    let table = Table::new(1, 64);
    let home = 6;
    // All keys have this home.
    let place = |key: &FlowKey| Place {
        home,
        ..table.hash.place(key)
    };
    let keys: Vec<_> = (0..u64::from(WINDOW)).map(any).collect();
    for key in &keys {
        assert!(table.insert_at(place(key), key, 1).is_some());
    }
    let other = any(99);
    assert_eq!(table.insert_at(place(&other), &other, 1), None);
    let found: HashSet<_> = keys
        .iter()
        .map(|key| find(&table.memory, place(key), key).unwrap())
        .collect();
    assert_eq!(found, (6..6 + WINDOW as usize).collect());
    // There are no records beyond the end of the table, and the last home has a whole window.
    let last = (table.hash.homes as u32 - 1) * LINE;
    let records = table.hash.records() as u32;
    assert_eq!(records, last + WINDOW);
    assert!(table.memory.at(records - 1).is_some() && table.memory.at(records).is_none());
    table.remove(13);
    assert_eq!(table.insert_at(place(&other), &other, 2), Some(13));
    assert_eq!(table.memory.word(13).generation(), 2);
}

/// A flow whose home is full goes where it takes no other flow's home.
#[test]
fn a_flow_goes_home_or_into_an_empty_line_or_where_there_is_room() {
    let table = Table::new(1, 64);
    let enter = |number: u64, home: u32| {
        let place = Place {
            home,
            ..table.hash.place(&any(number))
        };
        table.insert_at(place, &any(number), 1).unwrap()
    };
    assert_eq!(enter(0, 8), 8);
    assert_eq!(enter(1, 8), 9);
    assert_eq!(enter(2, 10), 10);
    // Not beside the flow in record 10.
    assert_eq!(enter(3, 8), 12);
    assert_eq!(enter(4, 8), 14);
    // Every line has a flow now.
    for line in 8..8 + WINDOW / LINE {
        enter(100 + u64::from(line), 2 * line);
    }
    assert_eq!(enter(5, 8), 11);
}

/// xorshift64*.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// From 0 to 1, without 1.
    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// Exponentially distributed, with a mean of 1.
    fn exponential(&mut self) -> f64 {
        -(1.0 - self.unit()).ln()
    }
}
