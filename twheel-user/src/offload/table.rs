//! The flow table of the kernel, as registrations read and mark it.

use std::{
    cell::Cell,
    mem::offset_of,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering, fence},
    },
};

use anyhow::{Context, Result};
use twheel_common::{
    flow::Word,
    key::FlowKey,
    offload::{MARKS, OFFLOADED, Offload, later},
    table::{Hash, LINE, Line, holds_flow},
};
use zerocopy::transmute;

use crate::{
    data_plane,
    flows::{Flow, Flows},
    mapped::Mapped,
    pins::Pins,
};

/// The flow table as registrations see it.
pub trait Table {
    /// The clock, units.
    fn now(&self) -> u64;
    /// The record that holds this flow.
    fn find(&self, key: &FlowKey) -> Option<u32>;
    /// The first record in which this flow may be: the others follow within a window.
    fn home(&self, key: &FlowKey) -> u32;
    /// The word of the flow in a record; `None` if it holds none.
    fn word(&self, record: u32) -> Option<Word>;
    /// The [`MARKS`] of the flow in a record.
    fn marks(&self, record: u32) -> u32;
    /// Whether the flow in a record is marked as registered.
    fn is_marked(&self, record: u32) -> bool {
        self.marks(record) & OFFLOADED != 0
    }
    /// What is kept of the registered flow in a record.
    fn offload(&self, record: u32) -> Offload;
    /// Stores all that is kept of the flow in a record, which is not registered.
    fn set_offload(&self, record: u32, offload: Offload);
    /// It was heard at this time, unless it was later. Packets store that, too.
    fn raise_heard(&self, record: u32, at: u32);
    /// Stores for how long it stays.
    fn set_stay(&self, record: u32, stay: u32);
    /// Gives the flow in a record these marks. From now on its packets are heard, and it stays for its
    /// timeout; or no longer.
    fn mark(&self, record: u32, marks: u32);
}

/// Words of a line.
const LINE_WORDS: usize = size_of::<Line>() / WORD;
const WORD: usize = size_of::<u64>();

/// The maps `FLOWS` and `OFFLOADS`.
pub struct Mapping {
    flows: Arc<Flows>,
    hash: Hash,
    lines: Mapped,
    offloads: Mapped,
    records: u32,
    /// The clock when it was read last, units.
    now: Cell<u64>,
}

impl Mapping {
    /// Maps an instance's table. `now`: low 32 bits of the clock.
    ///
    /// # Errors
    ///
    /// The pins cannot be opened, or the maps not be mapped.
    pub fn new(pins: &Pins, now: u32) -> Result<Self> {
        let flows = Arc::new(Flows::pinned(pins)?);
        let records = flows.records();
        let map = |name: &str, bytes: usize| {
            let map = pins.map(name)?;
            Mapped::new(map.fd(), bytes).with_context(|| format!("cannot map {name}"))
        };
        Ok(Self {
            lines: map(
                "FLOWS",
                records as usize / LINE as usize * size_of::<Line>(),
            )?,
            offloads: {
                let map = pins.map("OFFLOADS")?;
                let values = map.info()?.max_entries() as usize;
                Mapped::new(map.fd(), values * size_of::<Offload>())
                    .context("cannot map OFFLOADS")?
            },
            hash: data_plane::meta(pins)?.hash,
            flows,
            records,
            now: Cell::new(now.into()),
        })
    }

    /// The low 32 bits of the clock are these now. It goes on from when it was set last.
    pub fn set_now(&self, low: u32) {
        let before = self.now.get();
        let passed = low.wrapping_sub(before as u32) as i32;
        self.now
            .set(before.wrapping_add_signed(passed.max(0).into()));
    }

    /// The table, for threads that only read it, and where its flows are.
    pub fn flows(&self) -> (Arc<Flows>, Hash) {
        (self.flows.clone(), self.hash)
    }

    /// Number of records.
    pub fn records(&self) -> u32 {
        self.records
    }

    /// The flow in a record.
    pub fn flow(&self, record: u32) -> Option<Flow> {
        self.flows.get(record)
    }

    /// A word of a record's line, given its offset there in bytes.
    fn line(&self, record: u32, offset: usize) -> &AtomicU64 {
        let line = record as usize / LINE as usize * LINE_WORDS;
        self.lines.word(line + offset / WORD)
    }

    fn slot(record: u32) -> usize {
        (record % LINE) as usize
    }

    /// These marks of a record, and the word of its line where they are.
    fn marks_of(&self, record: u32, marks: u32) -> (u64, &AtomicU64) {
        let mut bits = [0_u32; LINE as usize];
        bits[Self::slot(record)] = marks;
        let word = self.line(record, offset_of!(Line, details));
        (transmute!(bits), word)
    }

    /// The records that are marked.
    pub fn marked(&self) -> Vec<u32> {
        (0..self.records).filter(|it| self.is_marked(*it)).collect()
    }

    /// What is kept of a record's flow. If that has ended since it was looked at, another flow may have
    /// it, but none that is registered: only this thread registers any, and it stores all of it then.
    fn offload_word(&self, record: u32) -> &AtomicU64 {
        let (_, word) = self.marks_of(record, 0);
        let details: [u32; LINE as usize] = transmute!(word.load(Ordering::Acquire));
        self.offloads
            .word((details[Self::slot(record)] & !MARKS) as usize)
    }

    fn change(&self, record: u32, change: impl Fn(&mut Offload)) {
        let changed = |held: u64| {
            let mut offload: Offload = transmute!(held);
            change(&mut offload);
            let changed: u64 = transmute!(offload);
            (changed != held).then_some(changed)
        };
        // What a packet stores meanwhile is compared, too.
        let word = self.offload_word(record);
        let _ = word.fetch_update(Ordering::SeqCst, Ordering::SeqCst, changed);
    }
}

impl Table for Mapping {
    fn now(&self) -> u64 {
        self.now.get()
    }

    fn find(&self, key: &FlowKey) -> Option<u32> {
        let found = self.flows.find(&self.hash, key).ok()?;
        found.map(|flow| flow.index)
    }

    fn home(&self, key: &FlowKey) -> u32 {
        self.hash.place(key).home
    }

    fn word(&self, record: u32) -> Option<Word> {
        if record >= self.records {
            return None;
        }
        let place = |offset, size: usize| {
            self.line(record, offset + size * Self::slot(record))
                .load(Ordering::Relaxed)
        };
        let word = Word(place(offset_of!(Line, words), size_of::<Word>()));
        fence(Ordering::Acquire);
        let tag = place(offset_of!(Line, tags), size_of::<u64>());
        (holds_flow(tag) && !word.is_dead()).then_some(word)
    }

    fn offload(&self, record: u32) -> Offload {
        transmute!(self.offload_word(record).load(Ordering::SeqCst))
    }

    fn marks(&self, record: u32) -> u32 {
        let (_, word) = self.marks_of(record, 0);
        let details: [u32; LINE as usize] = transmute!(word.load(Ordering::Acquire));
        details[Self::slot(record)] & MARKS
    }

    fn set_offload(&self, record: u32, offload: Offload) {
        // Whoever sees the mark that comes next sees this, too.
        let word = self.offload_word(record);
        word.store(transmute!(offload), Ordering::Release);
    }

    fn raise_heard(&self, record: u32, at: u32) {
        self.change(record, |it| it.heard = later(it.heard, at));
    }

    fn set_stay(&self, record: u32, stay: u32) {
        self.change(record, |it| it.stay = stay);
    }

    fn mark(&self, record: u32, marks: u32) {
        if self.marks(record) != 0 {
            let (all, word) = self.marks_of(record, MARKS);
            word.fetch_and(!all, Ordering::SeqCst);
        }
        if marks != 0 {
            let (marks, word) = self.marks_of(record, marks);
            word.fetch_or(marks, Ordering::SeqCst);
        }
    }
}
