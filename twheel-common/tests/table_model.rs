//! The flow table's protocol under a model checker: every interleaving of a few CPUs, and every value
//! that a load may give on a machine with weak ordering.
//!
//! What runs is the code of `twheel_common::table`; the memory is loom's. Loads and stores are relaxed,
//! so that they may give anything that coherence allows. What [`Records`] calls atomic is acquire and
//! release at once, which is less than the data plane has: on x86-64 these are locked instructions, on
//! arm64 `casal`, `swpal`, `ldsetal` (or exclusive pairs and a `dmb ish`), full barriers all of them where
//! they write. A swap that fails orders nothing there, and is relaxed here. The reader that only
//! maps the table depends on the barrier, so here a release fence stands behind every access that writes.
//!
//! A packet's stamp is a store of 32 bits into the half of a word. Loom has no such store; a relaxed
//! read-modify-write of the word is the same to everybody else.
//!
//! Most scenarios are bounded to the preemptions that they name: threads are switched where they end, and
//! at that many points besides.
#![allow(missing_docs)]

use std::{
    collections::HashSet,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Mutex,
};

use loom::{
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
            fence,
        },
    },
    thread,
};
use twheel_common::{
    flow::{Direction, Direction::*, FlowKey, Word},
    packet::{
        Segment,
        tcp::{self, ACK, RST},
    },
    state::{Change, Known, Seen, SideWay, State, View},
    table::{
        self, BUSY, Begins, Changed, Details, Extras, Inserted, Place, Reads, Records, Snapshot,
        TWIN,
    },
};

/// SYN, of an initiator that is the key's low endpoint.
const SYN: Seen = Seen(1 << 5);
/// The same, and a RST.
const RESET: Seen = Seen(1 << 5 | 7);

/// What is wrong with the memory, for the tests of the model itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
enum Broken {
    #[default]
    Nothing,
    /// Records are claimed by a load and a store.
    Claim,
    /// Who was first is looked up before the flow is announced.
    Announce,
    /// The tag becomes 0 before the bit in the home's bitmap does.
    FreeFirst,
    /// Flows are killed by a store.
    Kill,
    /// A record that is used again has its old generation.
    Generation,
    /// A record gets its word before it gets its key.
    WordFirst,
    /// A life may end while it is starting.
    Starting,
    /// Who enters is not seen before it is live.
    Alone,
    /// The reader's loads are in no order.
    Unfenced,
    /// The key is not looked for before it shows. (Packets that look for their flow find it at home.)
    NoSecondLook,
    /// What a segment says is noted by a load and a store.
    Note,
    /// Flows with one fingerprint are not marked.
    Twin,
    /// Who has entered a flow lets go of it by a store.
    LetGo,
    /// A mark on a record that is free by now stays.
    Mark,
}

/// How far the sides have come, the low one first.
const POSITIONS: [u32; 2] = [100, 200];

/// A segment without data, at the place where its sender is.
fn segment(key: &FlowKey, direction: Direction, flags: u8) -> Segment {
    let [own, other] = match direction {
        FromLow => POSITIONS,
        FromHigh => [POSITIONS[1], POSITIONS[0]],
    };
    Segment {
        key: *key,
        direction,
        flags,
        seq: own,
        ack: other,
        end: own,
        ..Segment::NONE
    }
}

/// A word of memory. Loom goes through the orders of two accesses only where it takes them for dependent,
/// and forgets a load of one thread when another loads there as well. So each load is preceded by a turn of a
/// counter, which is dependent on all others, and means nothing else. (A write is dependent on the access before it, be
/// that a load or not.)
struct Cell(AtomicU64, AtomicU64);

impl Cell {
    fn new() -> Self {
        Self(AtomicU64::new(0), AtomicU64::new(0))
    }

    fn load(&self) -> u64 {
        self.1.fetch_add(1, Relaxed);
        self.0.load(Relaxed)
    }

    fn store(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    fn swap(&self, value: u64) {
        self.0.swap(value, AcqRel);
        fence(Release);
    }

    /// What it held.
    fn compare_exchange(&self, old: u64, new: u64) -> u64 {
        match self.0.compare_exchange(old, new, AcqRel, Relaxed) {
            Ok(held) => {
                fence(Release);
                held
            }
            Err(held) => held,
        }
    }

    fn or(&self, bits: u64) -> u64 {
        let held = self.0.fetch_or(bits, AcqRel);
        fence(Release);
        held
    }

    fn and(&self, bits: u64) {
        self.0.fetch_and(bits, AcqRel);
        fence(Release);
    }
}

/// A record.
struct Slot {
    tag: Cell,
    word: Cell,
    number: Cell,
    /// Of the line: the second record's are not used.
    hops: Cell,
}

struct Detail {
    /// The address, and [`Details::owner`] above it.
    key: Cell,
    created: Cell,
    doubt: Cell,
}

/// The tag of a record that there is not, where lines are of two.
const NONE: u64 = BUSY | 1;

struct Table {
    slots: Vec<Slot>,
    details: Vec<Detail>,
    /// Those that are each CPU's to give. (Not loom's: nobody else looks at them.)
    free: Mutex<[Vec<u32>; 3]>,
    /// Records are freed by a swap. Loom knows no order of a store and another CPU's swap, where the last of them is what
    /// memory has: here the mark of a record that is being freed.
    is_marked: bool,
    broken: Broken,
}

/// A key. No two of a scenario have one address; those with one port have one fingerprint.
fn key(address: u64, port: u16) -> FlowKey {
    FlowKey::new([0, address], port, [1, 0], 80, 6).0
}

fn address(key: &FlowKey) -> u64 {
    key.addresses()[1]
}

/// An address in [`Detail::key`].
const ADDRESS: u64 = 0xffff_ffff;

impl Table {
    fn new(records: usize, broken: Broken) -> Self {
        let slot = |_| Slot {
            tag: Cell::new(),
            word: Cell::new(),
            number: Cell::new(),
            hops: Cell::new(),
        };
        let detail = |_| Detail {
            key: Cell::new(),
            created: Cell::new(),
            doubt: Cell::new(),
        };
        let table = Self {
            slots: (0..records.next_multiple_of(2)).map(slot).collect(),
            details: (0..4).map(detail).collect(),
            free: Mutex::new([vec![1, 0], vec![2], vec![3]]),
            is_marked: false,
            broken,
        };
        if !records.is_multiple_of(2) {
            table.slots[records].tag.store(NONE);
        }
        table
    }

    fn place(&self, home: u32, key: &FlowKey) -> Place {
        let fingerprint = key.ports() << 1 | 1;
        Place { home, fingerprint }
    }

    fn find(&self, home: u32, key: &FlowKey) -> Option<usize> {
        table::find(self, self.place(home, key), key)
    }

    fn insert(&self, home: u32, key: &FlowKey, now: u64, cpu: u32) -> Inserted<usize> {
        let details = self.free.lock().unwrap()[cpu as usize].pop().unwrap();
        let begins = Begins {
            seen: SYN,
            now,
            cpu,
            rule: 0,
            positions: [0; 2],
            way: SideWay::ANY,
            outgoing: 0,
            details,
        };
        let inserted = table::insert(self, self.place(home, key), key, &begins);
        if !matches!(inserted, Inserted::New(..)) {
            self.give(cpu, details);
        }
        inserted
    }

    fn give(&self, cpu: u32, details: u32) {
        self.free.lock().unwrap()[cpu as usize].push(details);
    }

    /// The details that a record names.
    fn detail(&self, at: usize) -> &Detail {
        &self.details[self.slots[at].number.load() as usize]
    }

    /// Whether a packet of a flow in the table finds it.
    fn finds(&self, key: &FlowKey) -> bool {
        let found = self.find(0, key);
        found.is_some_and(|at| self.detail(at).key.load() & ADDRESS == address(key))
    }

    /// Enters a flow where nobody can be in the way.
    fn enter(&self, home: u32, key: &FlowKey, now: u64) -> usize {
        match self.insert(home, key, now, 0) {
            Inserted::New(at, _) => at,
            _ => panic!("no room"),
        }
    }

    /// Kills and removes a flow of this CPU; its last word, if it was not changed meanwhile.
    fn evict(&self, at: usize) -> Option<Word> {
        let word = self.word(at);
        self.kill(at, word).then(|| {
            self.remove(at);
            word
        })
    }

    /// Removes a flow that CPU 0 has killed.
    fn remove(&self, at: usize) {
        let details = self.slots[at].number.load() as u32;
        table::remove(self, at, at as u32);
        self.give(0, details);
    }

    fn kill(&self, at: usize, word: Word) -> bool {
        if self.broken == Broken::Starting {
            return self.change(at, word, word.dead()) == word;
        }
        table::kill(self, at, word)
    }

    /// A SYN on a closed flow, as the data plane has it: the old life's `created` and last word.
    fn supersede(&self, at: usize, key: &FlowKey, now: u32) -> Option<(u32, Word)> {
        let old = self.word(at);
        if !old.seen().is_closed() {
            return None;
        }
        let generation = old.generation().wrapping_add(1);
        let new = Word::new(now.into(), generation, SYN.starting());
        match table::change(self, at, key, old, new) {
            Some(Ok(_)) => {}
            _ => return None,
        }
        Some((self.begin_anew(at, now), old))
    }

    /// Notes when the new life has begun. When the one before had.
    fn begin_anew(&self, at: usize, now: u32) -> u32 {
        let detail = self.detail(at);
        let created = detail.created.load() as u32;
        detail.created.store(now.into());
        self.slots[at]
            .word
            .and(u64::from(Word::STARTED) << 32 | 0xffff_ffff);
        created
    }

    /// A segment of the flow, as the data plane has it (`touch_change`): the last word of the life that it ends.
    fn see(&self, at: usize, segment: &Segment, now: u32) -> Option<Word> {
        let view = View::default();
        let doubt = &self.detail(at).doubt;
        let life = self.word(at).generation();
        for _ in 0..6 {
            let word = self.word(at);
            if word.is_dead() || word.generation() != life {
                return None;
            }
            let known = Known {
                positions: POSITIONS,
                doubt: doubt.load() as u32,
                is_own_way: true,
                is_local: false,
            };
            let change = word.seen().next(segment, &known, view);
            let new = match change {
                Change::Add(seen) | Change::Answers(seen) | Change::Places(seen) => {
                    word.with(now.into(), seen)
                }
                Change::Doubt(seen, ..) if segment.flags & tcp::SYN != 0 => word.with_seen(seen),
                Change::Doubt(seen, ..) => word.with(now.into(), seen),
                Change::NewGeneration(seen) if !word.seen().is_starting() => {
                    Word::new(now.into(), life.wrapping_add(1), seen.starting())
                }
                _ => return None,
            };
            let changed = match self.broken {
                Broken::Note => {
                    self.slots[at].word.swap(new.0);
                    Some(Ok(new))
                }
                _ => table::change(self, at, &segment.key, word, new),
            };
            match (changed, change) {
                (Some(Ok(_)), Change::Doubt(_, number, _)) => doubt.store(number.into()),
                (Some(Ok(_)), Change::NewGeneration(_)) => {
                    self.begin_anew(at, now);
                    return Some(word);
                }
                (Some(Err(_)), _) => continue,
                _ => {}
            }
            return None;
        }
        panic!("too many turns");
    }

    /// Enters a connection that is up.
    fn enter_established(&self, key: &FlowKey) -> usize {
        let at = self.enter(0, key, 1);
        let answer = segment(key, FromHigh, tcp::SYN | ACK);
        self.see(at, &answer, 1);
        self.see(at, &segment(key, FromLow, ACK), 1);
        assert_eq!(self.word(at).seen().state(), State::Established);
        at
    }

    fn created(&self, at: usize) -> u32 {
        self.detail(at).created.load() as u32
    }

    /// A packet's stamp.
    fn touch(&self, at: usize, now: u32) {
        let stamp = |word| Some(word & !0xffff_ffff | u64::from(now));
        let _ = self.slots[at].word.0.fetch_update(Relaxed, Relaxed, stamp);
    }

    /// A packet that says something new of its flow; whether that was noted.
    fn reset(&self, at: usize, key: &FlowKey, now: u64) -> bool {
        let mut word = self.word(at);
        let generation = word.generation();
        for _ in 0..3 {
            if word.is_dead() {
                return false;
            }
            let seen = Seen(word.seen().0 | RESET.0);
            match table::change(self, at, key, word, word.with(now, seen)) {
                Some(Ok(_)) => return true,
                Some(Err(held)) if held.generation() == generation => word = held,
                _ => return false,
            }
        }
        panic!("too many turns");
    }

    /// When nobody writes: every record is free or live, no key is there twice, and the bitmaps say
    /// where the flows are. Returns the words by key.
    fn at_rest(&self, homes: &[(FlowKey, u32)]) -> Vec<(FlowKey, Word)> {
        let mut flows = Vec::new();
        let mut hops = vec![0; self.slots.len()];
        for (index, slot) in self.slots.iter().enumerate() {
            let tag = slot.tag.load();
            if tag == 0 || tag == NONE {
                continue;
            }
            assert!(tag != TWIN, "a mark of nobody's in record {index}");
            assert!(tag & BUSY == 0, "record {index} was not let go");
            let detail = self.detail(index);
            let address = detail.key.load() & ADDRESS;
            let (key, home) = homes
                .iter()
                .find(|(key, _)| self::address(key) == address)
                .expect("a flow of nobody");
            hops[*home as usize] |= 1 << (index as u32 - home);
            let word = Word(slot.word.load());
            assert!(!word.is_dead(), "dead in record {index}");
            flows.push((*key, word));
        }
        for (slot, hops) in self.slots.iter().zip(hops) {
            assert_eq!(slot.hops.load(), hops, "bitmap");
        }
        let keys: HashSet<_> = flows.iter().map(|(key, _)| *key).collect();
        assert_eq!(keys.len(), flows.len(), "a key twice");
        let free: usize = self.free.lock().unwrap().iter().map(Vec::len).sum();
        assert_eq!(free + flows.len(), self.details.len(), "details are lost");
        flows
    }
}

impl Records for Table {
    type At = usize;

    fn at(&self, index: u32) -> Option<usize> {
        ((index as usize) < self.slots.len()).then_some(index as usize)
    }

    fn beside(&self, first: usize, distance: u32) -> usize {
        first | distance as usize
    }

    fn tag(&self, at: usize) -> u64 {
        self.slots[at].tag.load()
    }

    fn claim(&self, at: usize, tag: u64) -> bool {
        let place = &self.slots[at].tag;
        if self.broken == Broken::Claim {
            let free = place.load() == 0;
            if free {
                place.swap(tag);
            }
            return free;
        }
        place.compare_exchange(0, tag) == 0
    }

    fn swap_tag(&self, at: usize, old: u64, new: u64) {
        if self.broken != Broken::Mark {
            self.slots[at].tag.compare_exchange(old, new);
        }
    }

    fn set_in_tag(&self, at: usize, bits: u64) -> u64 {
        match self.broken {
            Broken::Twin => self.slots[at].tag.load(),
            _ => self.slots[at].tag.or(bits),
        }
    }

    fn clear_in_tag(&self, at: usize, bits: u64) {
        let tag = &self.slots[at].tag;
        match self.broken {
            Broken::LetGo => tag.swap(tag.load() & !bits),
            _ => tag.and(!bits),
        }
    }

    fn free(&self, at: usize) {
        let tag = &self.slots[at].tag;
        match self.is_marked {
            true => drop(tag.0.swap(0, Relaxed)),
            false => tag.store(0),
        }
    }

    fn word(&self, at: usize) -> Word {
        Word(self.slots[at].word.load())
    }

    fn set_word(&self, at: usize, word: Word) {
        let word = match self.broken {
            Broken::WordFirst if !word.is_dead() => return,
            Broken::Generation => Word::new(word.0, 0, word.seen()),
            _ => word,
        };
        self.slots[at].word.swap(word.0);
    }

    fn change(&self, at: usize, old: Word, new: Word) -> Word {
        let place = &self.slots[at].word;
        if self.broken == Broken::Kill && new.is_dead() {
            let held = Word(place.load());
            if held == old {
                place.swap(new.0);
            }
            return held;
        }
        Word(place.compare_exchange(old.0, new.0))
    }

    fn hops(&self, at: usize) -> u64 {
        match self.broken {
            Broken::NoSecondLook => 0,
            _ => self.slots[at & !1].hops.load(),
        }
    }

    fn announce(&self, at: usize, bits: u64) -> u64 {
        let place = &self.slots[at & !1].hops;
        let earlier = match self.broken {
            Broken::Announce => Some(place.load()),
            _ => None,
        };
        let before = place.or(bits);
        earlier.unwrap_or(before)
    }

    fn renounce(&self, at: usize, bits: u64) {
        if self.broken == Broken::FreeFirst {
            for slot in &self.slots {
                if slot.tag.load() != 0 && Word(slot.word.load()).is_dead() {
                    slot.tag.swap(0);
                }
            }
        }
        self.slots[at & !1].hops.and(!bits);
    }

    fn has_key(&self, at: usize, key: &FlowKey) -> bool {
        if self.broken == Broken::Alone && self.tag(at) & BUSY != 0 {
            return false;
        }
        self.detail(at).key.load() & ADDRESS == address(key)
    }

    fn fill(&self, at: usize, key: &FlowKey, begins: &Begins) {
        let created = begins.now as u32;
        let slot = &self.slots[at];
        if self.broken == Broken::WordFirst {
            let generation = self.word(at).generation().wrapping_add(1);
            slot.word.swap(Word::new(created.into(), generation, SYN).0);
        }
        slot.number.store(begins.details.into());
        let detail = &self.details[begins.details as usize];
        let owner = Details::owner_of(key, begins.cpu, begins.rule);
        detail.key.store(u64::from(owner) << 32 | address(key));
        detail.created.store(created.into());
    }

    fn repeat(&self, turns: u32, mut turn: impl FnMut(u32) -> bool) {
        for number in 0..turns {
            if turn(number) {
                break;
            }
        }
    }
}

/// A record as a reader sees it that only maps the table.
struct Mapped<'a>(&'a Table);

impl Reads for Mapped<'_> {
    fn word(&self) -> Word {
        Word(self.0.slots[0].word.load())
    }

    fn tag(&self) -> u64 {
        self.0.slots[0].tag.load()
    }

    fn details(&self) -> Option<(Details, Extras)> {
        let detail = self.0.detail(0);
        let held = detail.key.load();
        let address = held & ADDRESS;
        let details = Details {
            addresses: [0, address, 1, 0],
            ports: key(address, 1).ports() as u32,
            owner: (held >> 32) as u32,
            created: detail.created.load() as u32,
            ..Details::default()
        };
        Some((details, Extras::default()))
    }

    fn fence(&self) {
        if self.0.broken != Broken::Unfenced {
            fence(Acquire);
        }
    }
}

/// Runs a scenario in every way; the error is what it came to, in one of them.
fn explore(preemptions: Option<usize>, scenario: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = preemptions;
    model.check(scenario);
}

fn finds(scenario: impl FnOnce()) -> bool {
    catch_unwind(AssertUnwindSafe(scenario)).is_err()
}

/// What an insertion came to: the record, and whether it is new.
fn entered(inserted: &Inserted<usize>) -> Option<(usize, bool)> {
    match *inserted {
        Inserted::New(at, index) => {
            assert_eq!(at as u32, index);
            Some((at, true))
        }
        Inserted::Exists(at) => Some((at, false)),
        Inserted::Full => None,
    }
}

/// Two CPUs enter the same key.
fn two_insert(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table::new(3, broken));
        let wanted = key(1, 1);
        let other = table.clone();
        let second = thread::spawn(move || entered(&other.insert(0, &wanted, 2, 1)));
        let first = entered(&table.insert(0, &wanted, 1, 0)).unwrap();
        let second = second.join().unwrap().unwrap();
        assert!(first.1 != second.1, "one is new");
        assert_eq!(first.0, second.0, "the other gives way to it");
        assert_eq!(table.at_rest(&[(wanted, 0)]).len(), 1);
    });
}

/// A CPU enters a key whose flow another one ends and, perhaps, enters again.
fn insert_against_an_eviction_of_the_key(broken: Broken) {
    for again in [false, true] {
        explore(Some(2), move || {
            let table = Arc::new(Table::new(3, broken));
            let wanted = key(1, 1);
            let at = table.enter(0, &wanted, 1);
            let other = table.clone();
            let second = thread::spawn(move || entered(&other.insert(0, &wanted, 3, 1)));
            assert!(table.evict(at).is_some(), "nobody touched it");
            let mine = again.then(|| entered(&table.insert(0, &wanted, 2, 0)).unwrap());
            let second = second.join().unwrap().unwrap();
            let new = [mine, Some(second)]
                .iter()
                .flatten()
                .filter(|(_, new)| *new)
                .count();
            assert!(new <= 1, "the key is there twice");
            assert!(!again || new == 1, "nobody has entered the key");
            assert_eq!(table.at_rest(&[(wanted, 0)]).len(), new);
        });
    }
}

/// Three do.
fn three_insert(broken: Broken) {
    explore(Some(1), move || {
        let table = Arc::new(Table::new(2, broken));
        let wanted = key(1, 1);
        let threads = [1, 2].map(|cpu| {
            let table = table.clone();
            thread::spawn(move || entered(&table.insert(0, &wanted, 2, cpu)))
        });
        let mut results = vec![entered(&table.insert(0, &wanted, 1, 0))];
        results.extend(threads.map(|thread| thread.join().unwrap()));
        let new = results.iter().flatten().filter(|(_, new)| *new).count();
        assert_eq!(new, 1, "one is new");
        assert_eq!(table.at_rest(&[(wanted, 0)]).len(), 1);
    });
}

/// Two CPUs enter the same key while a third frees a record in front.
fn two_insert_behind_an_eviction(broken: Broken) {
    explore(Some(2), move || {
        let table = Arc::new(Table::new(3, broken));
        let (leaving, wanted) = (key(9, 9), key(1, 1));
        let at = table.enter(0, &leaving, 1);
        let threads = [1, 2].map(|cpu| {
            let table = table.clone();
            thread::spawn(move || entered(&table.insert(0, &wanted, 2, cpu)))
        });
        assert!(table.evict(at).is_some());
        let results = threads.map(|thread| thread.join().unwrap().unwrap());
        let new = results.iter().filter(|(_, new)| *new).count();
        assert_eq!(new, 1, "one is new");
        assert_eq!(table.at_rest(&[(wanted, 0)]).len(), 1);
    });
}

/// A CPU enters the same key as another, after it has freed a record in front.
fn two_insert_one_in_front(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table::new(2, broken));
        let (leaving, wanted) = (key(9, 9), key(1, 1));
        let at = table.enter(0, &leaving, 1);
        let other = table.clone();
        let second = thread::spawn(move || entered(&other.insert(0, &wanted, 2, 1)));
        assert!(table.evict(at).is_some());
        let results = [
            entered(&table.insert(0, &wanted, 2, 0)),
            second.join().unwrap(),
        ];
        let new = results.iter().flatten().filter(|(_, new)| *new).count();
        assert_eq!(new, 1, "one is new");
        assert_eq!(table.at_rest(&[(wanted, 0)]).len(), 1);
    });
}

/// A packet resets a flow, or stamps it, while its wheel ends it.
fn eviction_against_a_packet(broken: Broken) {
    for resets in [false, true] {
        explore(None, move || {
            let table = Arc::new(Table::new(1, broken));
            let flow = key(1, 1);
            let at = table.enter(0, &flow, 1);
            let other = table.clone();
            let packet = thread::spawn(move || match other.find(0, &flow) {
                Some(at) if resets => other.reset(at, &flow, 2),
                Some(at) => {
                    other.touch(at, 2);
                    false
                }
                None => false,
            });
            let ended = table.evict(at);
            let noted = packet.join().unwrap();
            let flows = table.at_rest(&[(flow, 0)]);
            match ended {
                // What was noted has been reported.
                Some(word) => {
                    assert!(flows.is_empty());
                    assert_eq!(word.seen() == RESET, noted);
                }
                None => {
                    assert_eq!(flows.len(), 1);
                    assert_eq!(flows[0].1.stamp(), 2);
                    assert_eq!(flows[0].1.seen() == RESET, resets);
                    assert_eq!(noted, resets);
                }
            }
        });
    }
}

/// A packet resets a flow whose record is freed meanwhile, and given to another flow with the same ports.
fn reuse_under_a_packet(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table::new(1, broken));
        let (old, new) = (key(1, 1), key(2, 1));
        let at = table.enter(0, &old, 1);
        let late = table.clone();
        let packet =
            thread::spawn(move || late.find(0, &old).is_some_and(|at| late.reset(at, &old, 1)));
        let other = table.clone();
        let insert = thread::spawn(move || entered(&other.insert(0, &new, 1, 1)));
        let ended = table.evict(at);
        let noted = packet.join().unwrap();
        let inserted = insert.join().unwrap();
        let flows = table.at_rest(&[(old, 0), (new, 0)]);
        assert_eq!(
            flows.len(),
            usize::from(ended.is_none()) + usize::from(inserted.is_some())
        );
        for (key, word) in flows {
            assert_eq!(
                word.seen(),
                if key == old && noted { RESET } else { SYN },
                "a stranger's packet"
            );
        }
    });
}

/// Two CPUs enter different keys where there is one free record, or two.
fn different_keys(broken: Broken) {
    for records in [1, 2] {
        explore(Some(3), move || {
            let table = Arc::new(Table::new(records, broken));
            let (a, b) = (key(1, 1), key(2, 1));
            let other = table.clone();
            let second = thread::spawn(move || entered(&other.insert(0, &b, 2, 1)));
            let results = [entered(&table.insert(0, &a, 1, 0)), second.join().unwrap()];
            let new = results.iter().flatten().filter(|(_, new)| *new).count();
            let flows = table.at_rest(&[(a, 0), (b, 0)]);
            assert_eq!(flows.len(), new);
            assert_eq!(flows.len(), records);
            for (key, _) in flows {
                assert!(table.finds(&key), "another flow with its fingerprint");
            }
        });
    }
}

/// A packet of a flow, while another with its fingerprint is entered in front of it.
fn a_twin_in_front_of_a_packet(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table::new(2, broken));
        let (leaving, flow, twin) = (key(9, 9), key(1, 1), key(2, 1));
        let front = table.enter(0, &leaving, 1);
        table.enter(0, &flow, 1);
        assert!(table.evict(front).is_some());
        let other = table.clone();
        let second = thread::spawn(move || entered(&other.insert(0, &twin, 2, 1)));
        assert!(table.finds(&flow), "its twin");
        assert_eq!(second.join().unwrap(), Some((front, true)));
        assert!(table.finds(&flow) && table.finds(&twin));
        table.at_rest(&[(flow, 0), (twin, 0)]);
    });
}

/// A flow ends while another with its fingerprint is entered.
fn a_twin_that_leaves(broken: Broken) {
    explore(Some(3), move || {
        let table = Arc::new(Table {
            is_marked: true,
            ..Table::new(2, broken)
        });
        let (flow, twin) = (key(1, 1), key(2, 1));
        let at = table.enter(0, &flow, 1);
        let other = table.clone();
        let second = thread::spawn(move || entered(&other.insert(0, &twin, 2, 1)));
        assert!(table.evict(at).is_some());
        assert!(second.join().unwrap().is_some());
        assert!(table.finds(&twin));
        assert_eq!(table.at_rest(&[(flow, 0), (twin, 0)]).len(), 1);
    });
}

/// A SYN begins a new life while the wheel ends the flow, and its record goes to another flow.
fn eviction_against_a_new_life(broken: Broken) {
    explore(Some(2), move || {
        let table = Arc::new(Table::new(1, broken));
        let (flow, stranger) = (key(1, 1), key(2, 1));
        let at = table.enter(0, &flow, 1);
        assert!(table.reset(at, &flow, 1));
        let other = table.clone();
        let packet = thread::spawn(move || {
            other
                .find(0, &flow)
                .and_then(|at| other.supersede(at, &flow, 2))
        });
        let word = table.word(at);
        let ended = table.kill(at, word).then(|| {
            let created = table.created(at);
            table.remove(at);
            (created, word)
        });
        let inserted = entered(&table.insert(0, &stranger, 3, 0));
        let superseded = packet.join().unwrap();
        // Each life ends once, with its own beginning.
        let mut lives: Vec<_> = superseded.into_iter().chain(ended).collect();
        lives.sort_unstable_by_key(|(_, word)| word.generation());
        for (created, word) in &lives {
            assert_eq!(*created, word.stamp(), "another life's beginning");
            assert!(!word.seen().is_starting());
        }
        lives.dedup_by_key(|(_, word)| word.generation());
        let lived = 1 + usize::from(superseded.is_some());
        let flows = table.at_rest(&[(flow, 0), (stranger, 0)]);
        assert_eq!(flows.len(), 1);
        let stands = flows[0].0 == flow;
        assert_eq!(lives.len() + usize::from(stands), lived, "a life twice");
        assert_eq!(inserted.is_some(), !stands);
        assert!(!flows[0].1.seen().is_starting());
        let created = match (stands, superseded) {
            (false, _) => 3,
            (true, Some(_)) => 2,
            (true, None) => 1,
        };
        assert_eq!(table.created(at), created);
    });
}

/// A RST near the next number, and a connection that goes on: each side is seen by a CPU of its own, and its wheel may end
/// the flow meanwhile.
fn an_end_in_doubt_against_both_sides(broken: Broken) {
    for ends in [false, true] {
        explore(Some(3), move || {
            let table = Arc::new(Table::new(1, broken));
            let flow = key(1, 1);
            let at = table.enter_established(&flow);
            let before = table.word(at).seen();
            let near = Segment {
                seq: POSITIONS[0] + 1,
                ..segment(&flow, FromLow, RST)
            };
            table.see(at, &near, 2);
            assert!(table.word(at).seen().is_reset());
            let other = table.clone();
            let packet = thread::spawn(move || other.see(at, &segment(&flow, FromHigh, ACK), 3));
            assert_eq!(table.see(at, &segment(&flow, FromLow, ACK), 3), None);
            let ended = ends.then(|| table.evict(at)).flatten();
            assert_eq!(packet.join().unwrap(), None);
            let flows = table.at_rest(&[(flow, 0)]);
            assert_eq!(flows.len(), usize::from(ended.is_none()));
            // Who has ended has told of what it was.
            for seen in flows.iter().map(|(_, word)| word.seen()) {
                assert_eq!(seen, before, "both went on");
            }
        });
    }
}

/// After a reset a port is used again, and somebody forges a SYN at the same time.
fn candidates(broken: Broken) {
    explore(Some(2), move || {
        let table = Arc::new(Table::new(1, broken));
        let flow = key(1, 1);
        let at = table.enter_established(&flow);
        table.see(at, &segment(&flow, FromLow, RST), 2);
        let syn = |seq: u32| Segment {
            seq,
            end: seq + 1,
            ..segment(&flow, FromLow, tcp::SYN)
        };
        let answer = Segment {
            ack: 5_001,
            ..segment(&flow, FromHigh, tcp::SYN | ACK)
        };
        let other = table.clone();
        let forged = syn(9_000);
        let forger = thread::spawn(move || other.see(at, &forged, 3));
        let mut ended = Vec::new();
        for segment in [&syn(5_000), &answer] {
            ended.extend(table.see(at, segment, 3));
        }
        assert_eq!(forger.join().unwrap(), None, "a SYN alone begins nothing");
        // Sent again, where the forged one came between.
        for segment in [&syn(5_000), &answer] {
            ended.extend(table.see(at, segment, 4));
        }
        assert_eq!(ended.len(), 1, "a life ends once");
        assert!(ended[0].seen().is_reset());
        let flows = table.at_rest(&[(flow, 0)]);
        assert_eq!(flows[0].1.seen().state(), State::SynRecv);
        assert_eq!(flows[0].1.generation(), ended[0].generation() + 1);
    });
}

/// A reader looks at a record that passes from one flow to another, or whose flow begins a new life.
fn reading(broken: Broken) {
    for supersedes in [false, true] {
        explore(Some(3), move || {
            let table = Arc::new(Table::new(1, broken));
            let (old, new) = (key(1, 1), key(2, 1));
            let at = table.enter(0, &old, 1);
            if supersedes {
                assert!(table.reset(at, &old, 1));
            }
            let other = table.clone();
            let writer = thread::spawn(move || {
                if supersedes {
                    assert!(other.supersede(at, &old, 2).is_some());
                } else {
                    assert!(other.evict(at).is_some());
                    assert!(entered(&other.insert(0, &new, 2, 1)).is_some());
                }
            });
            let read = table::read(&Mapped(&table));
            writer.join().unwrap();
            let second = if supersedes { (old, 0) } else { (new, 1) };
            match read {
                Ok(Some(flow)) => {
                    let Snapshot {
                        key,
                        cpu,
                        rule: _,
                        word,
                        created,
                        is_outgoing: _,
                        point: _,
                    } = flow;
                    let whole = match created {
                        1 => (key, cpu) == (old, 0) && word.seen().is_closed() == supersedes,
                        _ => (key, cpu) == second && word.seen() == SYN,
                    };
                    assert!(whole && word.stamp() == created, "torn: {flow:?}");
                }
                Ok(None) => assert!(!supersedes, "a flow that stands is missed"),
                Err(Changed) => {}
            }
            assert!(matches!(
                table::read(&Mapped(&table)),
                Ok(Some(flow)) if flow.created == 2
            ));
        });
    }
}

#[test]
fn a_new_life_and_its_end_do_not_mix() {
    eviction_against_a_new_life(Broken::Nothing);
}

#[test]
fn a_connection_that_goes_on_is_established_again() {
    an_end_in_doubt_against_both_sides(Broken::Nothing);
}

#[test]
fn a_syn_begins_a_life_once_it_is_answered() {
    candidates(Broken::Nothing);
}

#[test]
fn a_note_without_a_swap_is_found() {
    assert!(finds(|| an_end_in_doubt_against_both_sides(Broken::Note)));
    assert!(finds(|| candidates(Broken::Note)));
}

#[test]
fn a_reader_sees_a_flow_whole() {
    reading(Broken::Nothing);
}

#[test]
fn of_two_that_enter_a_key_one_does() {
    two_insert(Broken::Nothing);
}

#[test]
fn a_key_that_ends_and_is_entered_at_once_stands_once_at_most() {
    insert_against_an_eviction_of_the_key(Broken::Nothing);
}

#[test]
fn of_three_that_enter_a_key_one_does() {
    three_insert(Broken::Nothing);
}

#[test]
fn a_record_freed_in_front_brings_no_duplicate() {
    two_insert_behind_an_eviction(Broken::Nothing);
}

#[test]
fn no_two_give_way_to_one_another() {
    two_insert_one_in_front(Broken::Nothing);
}

#[test]
fn a_flow_lives_with_its_packet_or_ends_without() {
    eviction_against_a_packet(Broken::Nothing);
}

#[test]
fn a_late_packet_changes_no_stranger() {
    reuse_under_a_packet(Broken::Nothing);
}

#[test]
fn a_record_has_one_flow() {
    different_keys(Broken::Nothing);
}

#[test]
fn a_packet_finds_its_flow_and_not_its_twin() {
    a_twin_in_front_of_a_packet(Broken::Nothing);
}

#[test]
fn a_twin_that_leaves_takes_its_mark_along() {
    a_twin_that_leaves(Broken::Nothing);
}

#[test]
fn a_claim_without_a_swap_is_found() {
    assert!(finds(|| two_insert(Broken::Claim)));
    assert!(finds(|| different_keys(Broken::Claim)));
}

#[test]
fn a_look_before_the_announcement_alone_is_found() {
    assert!(finds(|| two_insert(Broken::Announce)));
    assert!(finds(|| two_insert_behind_an_eviction(Broken::Announce)));
}

#[test]
fn other_defects_are_found() {
    type Scenario = fn(Broken);
    let defects: [(Broken, Scenario); 14] = [
        (Broken::NoSecondLook, two_insert_one_in_front),
        (Broken::Alone, two_insert),
        (Broken::FreeFirst, reuse_under_a_packet),
        (Broken::Kill, eviction_against_a_packet),
        (Broken::Generation, reuse_under_a_packet),
        (Broken::Generation, reading),
        (Broken::WordFirst, reuse_under_a_packet),
        (Broken::Starting, eviction_against_a_new_life),
        (Broken::Unfenced, reading),
        (Broken::Claim, two_insert_behind_an_eviction),
        (Broken::Twin, different_keys),
        (Broken::Twin, a_twin_in_front_of_a_packet),
        (Broken::LetGo, different_keys),
        (Broken::Mark, a_twin_that_leaves),
    ];
    for (broken, scenario) in defects {
        assert!(finds(|| scenario(broken)), "{broken:?}");
    }
}
