//! The table under the model checker.

use std::{collections::HashSet, sync::Mutex};

use loom::sync::atomic::{
    Ordering::{Acquire, Relaxed},
    fence,
};
use twheel_common::{
    flow::{
        Direction::{self, *},
        FlowKey, Word,
    },
    packet::{
        Segment,
        tcp::{self, ACK},
    },
    state::{Change, Known, Seen, SideWay, State, View},
    table::{self, BUSY, Begins, Details, Extras, Inserted, Place, Reads, Records, TWIN},
};

use crate::cell::Cell;

/// The state bits after a SYN; the initiator is the key's low endpoint.
pub const SYN: Seen = Seen(1 << 5);
/// The same after a RST.
pub const RESET: Seen = Seen(1 << 5 | 7);

/// A deliberate error of the memory, to test the model itself.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Broken {
    #[default]
    Nothing,
    /// Records are claimed by a load and a store.
    Claim,
    /// The flow is announced only after checking who was first.
    Announce,
    /// The tag becomes 0 before the bit in the home's bitmap does.
    FreeFirst,
    /// Flows are killed by a store.
    Kill,
    /// A reused record keeps its old generation.
    Generation,
    /// A record gets its word before it gets its key.
    WordFirst,
    /// A flow may end while it is starting.
    Starting,
    /// A CPU that enters a flow is not seen by others until the flow is live.
    Alone,
    /// The reader's loads are in no order.
    Unfenced,
    /// The key is not looked for again before the flow becomes visible. (Packets that look for
    /// their flow find it at home.)
    NoSecondLook,
    /// A segment's effect is stored by a load and a store.
    Note,
    /// Flows with one fingerprint are not marked.
    Twin,
    /// The CPU that has entered a flow releases the record by a store.
    LetGo,
    /// A mark stays on a record that is free by now.
    Mark,
}

/// The next sequence numbers of the sides, the low side first.
pub const POSITIONS: [u32; 2] = [100, 200];

/// A segment without data, with its sender's next sequence number.
pub fn segment(key: &FlowKey, direction: Direction, flags: u8) -> Segment {
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

/// A record.
pub struct Slot {
    tag: Cell,
    word: Cell,
    number: Cell,
    /// The bitmap of the line; the second record's is not used.
    hops: Cell,
}

pub struct Detail {
    /// The address in the lower half, and [`Details::owner`] in the upper.
    key: Cell,
    created: Cell,
    doubt: Cell,
}

/// The tag of a missing record: lines have two records.
const NONE: u64 = BUSY | 1;

pub struct Table {
    pub slots: Vec<Slot>,
    pub details: Vec<Detail>,
    /// The free details of each CPU. (Not loom's mutex: no other CPU uses them.)
    pub free: Mutex<[Vec<u32>; 3]>,
    /// Whether records are freed by a swap. If a store and another CPU's swap race, loom does not
    /// model that the later one remains in memory; here this concerns the mark on a record that is
    /// being freed.
    pub is_marked: bool,
    pub broken: Broken,
}

/// A key. In a scenario, no two keys have the same address; keys with the same port have the same
/// fingerprint.
pub fn key(address: u64, port: u16) -> FlowKey {
    FlowKey::new([0, address], port, [1, 0], 80, 6).0
}

fn address(key: &FlowKey) -> u64 {
    key.addresses()[1]
}

/// The bits of the address in [`Detail::key`].
const ADDRESS: u64 = 0xffff_ffff;

impl Table {
    pub fn new(records: usize, broken: Broken) -> Self {
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

    pub fn find(&self, home: u32, key: &FlowKey) -> Option<usize> {
        table::find(self, self.place(home, key), key)
    }

    pub fn insert(&self, home: u32, key: &FlowKey, now: u64, cpu: u32) -> Inserted<usize> {
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

    /// Whether a packet of a flow in the table finds the flow.
    pub fn finds(&self, key: &FlowKey) -> bool {
        let found = self.find(0, key);
        found.is_some_and(|at| self.detail(at).key.load() & ADDRESS == address(key))
    }

    /// Enters a flow while no other CPU interferes.
    pub fn enter(&self, home: u32, key: &FlowKey, now: u64) -> usize {
        match self.insert(home, key, now, 0) {
            Inserted::New(at, _) => at,
            _ => panic!("the window is full"),
        }
    }

    /// Kills and removes a flow of this CPU. Returns its last word, or `None` if it was changed
    /// meanwhile.
    pub fn evict(&self, at: usize) -> Option<Word> {
        let word = self.word(at);
        self.kill(at, word).then(|| {
            self.remove(at);
            word
        })
    }

    /// Removes a flow that CPU 0 has killed.
    pub fn remove(&self, at: usize) {
        let details = self.slots[at].number.load() as u32;
        table::remove(self, at, at as u32);
        self.give(0, details);
    }

    pub fn kill(&self, at: usize, word: Word) -> bool {
        if self.broken == Broken::Starting {
            return self.change(at, word, word.dead()) == word;
        }
        table::kill(self, at, word)
    }

    /// A SYN on a closed flow, as the data plane handles it. Returns the old flow's `created` and
    /// last word.
    pub fn supersede(&self, at: usize, key: &FlowKey, now: u32) -> Option<(u32, Word)> {
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

    /// Stores when the new flow began. Returns when the previous one did.
    fn begin_anew(&self, at: usize, now: u32) -> u32 {
        let detail = self.detail(at);
        let created = detail.created.load() as u32;
        detail.created.store(now.into());
        self.slots[at]
            .word
            .and(u64::from(Word::STARTED) << 32 | 0xffff_ffff);
        created
    }

    /// A segment of the flow, as the data plane handles it (`touch_change`). Returns the last word
    /// of the flow that it ends.
    pub fn see(&self, at: usize, segment: &Segment, now: u32) -> Option<Word> {
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

    /// Enters an established connection.
    pub fn enter_established(&self, key: &FlowKey) -> usize {
        let at = self.enter(0, key, 1);
        let answer = segment(key, FromHigh, tcp::SYN | ACK);
        self.see(at, &answer, 1);
        self.see(at, &segment(key, FromLow, ACK), 1);
        assert_eq!(self.word(at).seen().state(), State::Established);
        at
    }

    pub fn created(&self, at: usize) -> u32 {
        self.detail(at).created.load() as u32
    }

    /// Stores a packet's stamp.
    pub fn touch(&self, at: usize, now: u32) {
        let stamp = |word| Some(word & !0xffff_ffff | u64::from(now));
        let _ = self.slots[at].word.0.fetch_update(Relaxed, Relaxed, stamp);
    }

    /// A packet that changes its flow's state bits. Returns whether the change was stored.
    pub fn reset(&self, at: usize, key: &FlowKey, now: u64) -> bool {
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

    /// Checks, while no CPU writes, that every record is free or live, that no key occurs twice,
    /// and that the bitmaps name the records of the flows. Returns the words by key.
    pub fn at_rest(&self, homes: &[(FlowKey, u32)]) -> Vec<(FlowKey, Word)> {
        let mut flows = Vec::new();
        let mut hops = vec![0; self.slots.len()];
        for (index, slot) in self.slots.iter().enumerate() {
            let tag = slot.tag.load();
            if tag == 0 || tag == NONE {
                continue;
            }
            assert!(tag != TWIN, "a mark without a flow in record {index}");
            assert!(tag & BUSY == 0, "record {index} was not released");
            let detail = self.detail(index);
            let address = detail.key.load() & ADDRESS;
            let (key, home) = homes
                .iter()
                .find(|(key, _)| self::address(key) == address)
                .expect("a flow with an unknown key");
            hops[*home as usize] |= 1 << (index as u32 - home);
            let word = Word(slot.word.load());
            assert!(!word.is_dead(), "dead in record {index}");
            flows.push((*key, word));
        }
        for (slot, hops) in self.slots.iter().zip(hops) {
            assert_eq!(slot.hops.load(), hops, "bitmap");
        }
        let keys: HashSet<_> = flows.iter().map(|(key, _)| *key).collect();
        assert_eq!(keys.len(), flows.len(), "a key occurs twice");
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

/// A record as seen by a reader that only maps the table.
pub struct Mapped<'a>(pub &'a Table);

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
