//! Reading the flow table while the data plane writes it: through a mapping, without a system call and
//! without holding anybody up.

use std::{
    marker::PhantomData,
    os::fd::AsFd,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{Map, MapInfo};
use memmap2::{MmapOptions, MmapRaw};
use twheel_common::{
    event::Reason,
    flow::{FlowKey, Word},
    step::Delete,
    table::{self, Changed, NODES, Node, Nodes, Reads, Record},
};

use crate::pins::Pins;

/// The table, mapped for reading.
pub struct Flows {
    records: MmapRaw,
    nodes: MmapRaw,
    count: u32,
}

/// A flow, as it was at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Where it stands in the table.
    pub index: u32,
    /// Whose it is.
    pub key: FlowKey,
    /// Time of the latest packet, generation, and what was seen.
    pub word: Word,
    /// Low 32 bits of the clock at its first packet, units.
    pub created: u32,
    /// The CPU on whose wheel it stands.
    pub cpu: u32,
    /// The rule it has met; 0 for none.
    pub rule: u16,
}

impl Flow {
    /// What deletes this flow, unless it has a packet before. (A packet in the very unit of the clock in
    /// which the flow had its latest does not show: whoever minds chooses flows that were idle for one.)
    pub fn delete(&self, reason: Reason) -> Delete {
        Delete {
            index: self.index,
            outcome: reason as u32,
            word: self.word.0,
        }
    }
}

impl Flows {
    /// Maps an instance's table, by its pins.
    pub fn pinned(pins: &Pins) -> Result<Self> {
        let open = |name| anyhow::Ok(Map::Array(pins.map(name)?));
        Self::map(&open("FLOWS")?, &open("NODES")?)
    }

    /// Maps a table: the maps `FLOWS` and `NODES`.
    pub fn map(flows: &Map, nodes: &Map) -> Result<Self> {
        let (records, count) = mapping::<Record>(flows).context("cannot map FLOWS")?;
        let (nodes, values) = mapping::<Nodes>(nodes).context("cannot map NODES")?;
        ensure!(
            values as usize * NODES >= count as usize,
            "NODES has {values} values for {count} records"
        );
        Ok(Self {
            records,
            nodes,
            count,
        })
    }

    /// All flows: each that is in the table from beginning to end of this, once; others perhaps.
    pub fn iter(&self) -> impl Iterator<Item = Flow> {
        (0..self.count).filter_map(|index| self.get(index))
    }

    /// The flow in a record. One that changes all the time while it is looked at so often that its CPU
    /// must have been stopped half way is passed over.
    pub fn get(&self, index: u32) -> Option<Flow> {
        const TRIES: u32 = 1 << 20;
        for _ in 0..TRIES {
            match self.try_get(index) {
                Ok(flow) => return flow,
                // A matter of nanoseconds.
                Err(Changed) => std::hint::spin_loop(),
            }
        }
        None
    }

    fn try_get(&self, index: u32) -> Result<Option<Flow>, Changed> {
        if index >= self.count {
            return Ok(None);
        }
        // SAFETY: within the mapping, which is as long as `self`; the kernel has it aligned to a page.
        // No reference to the record is made: others write there.
        let record = unsafe {
            self.records
                .as_mut_ptr()
                .cast::<Record>()
                .add(index as usize)
        };
        // SAFETY: as above; there are as many nodes as records, or more.
        let node = unsafe { self.nodes.as_mut_ptr().cast::<Node>().add(index as usize) };
        let found = table::read(&Mapped(record, node, PhantomData))?;
        Ok(found.map(|found| Flow {
            index,
            key: found.key,
            word: found.word,
            created: found.created,
            cpu: found.cpu,
            rule: found.rule,
        }))
    }
}

/// An array, mapped for reading, and how many values it has.
fn mapping<T>(map: &Map) -> Result<(MmapRaw, u32)> {
    let Map::Array(data) = map else {
        anyhow::bail!("it is no array");
    };
    let info: MapInfo = data.info()?;
    ensure!(
        info.value_size() as usize == size_of::<T>(),
        "it has values of {} bytes",
        info.value_size()
    );
    let count = info.max_entries();
    let map = MmapOptions::new()
        .len(count as usize * size_of::<T>())
        .map_raw_read_only(&data.fd().as_fd())
        .context("cannot map it")?;
    Ok((map, count))
}

/// A record and its node, of mappings that live as long as this.
struct Mapped<'a>(*mut Record, *mut Node, PhantomData<&'a Flows>);

/// Every access is to aligned words within the mapping, which are only read, and atomically.
impl Reads for Mapped<'_> {
    fn word(&self) -> Word {
        // SAFETY: see above; a `Word` is a `u64`.
        let word = unsafe { AtomicU64::from_ptr((&raw mut (*self.0).word).cast()) };
        Word(word.load(Ordering::Relaxed))
    }

    fn tag(&self) -> u64 {
        // SAFETY: see above.
        let tag = unsafe { AtomicU64::from_ptr(&raw mut (*self.0).tag) };
        tag.load(Ordering::Relaxed)
    }

    fn addresses(&self) -> [u64; 4] {
        // SAFETY: see above; an array of words, each at its place.
        let words = unsafe { &*(&raw mut (*self.0).addresses).cast::<[AtomicU64; 4]>() };
        words.each_ref().map(|word| word.load(Ordering::Relaxed))
    }

    fn created(&self) -> u32 {
        // SAFETY: see above.
        let created = unsafe { AtomicU32::from_ptr(&raw mut (*self.1).created) };
        created.load(Ordering::Relaxed)
    }

    fn fence(&self) {
        fence(Ordering::Acquire);
    }
}
