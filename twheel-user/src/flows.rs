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
    flow::{FlowKey, Word},
    step::Delete,
    table::{self, Changed, Reads, Record},
};

/// The table, mapped for reading.
pub struct Flows {
    map: MmapRaw,
    records: u32,
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
}

impl Flow {
    /// What deletes this flow, unless it has a packet before. (A packet in the very unit of the clock in
    /// which the flow had its latest does not show: whoever minds chooses flows that were idle for one.)
    pub fn delete(&self) -> Delete {
        Delete {
            index: self.index,
            outcome: 0,
            word: self.word.0,
        }
    }
}

impl Flows {
    /// Maps a table: the map `FLOWS`.
    pub fn map(map: &Map) -> Result<Self> {
        let Map::Array(data) = map else {
            anyhow::bail!("FLOWS is not an array");
        };
        let info: MapInfo = data.info()?;
        ensure!(
            info.value_size() as usize == size_of::<Record>(),
            "FLOWS has values of {} bytes",
            info.value_size()
        );
        let records = info.max_entries();
        let map = MmapOptions::new()
            .len(records as usize * size_of::<Record>())
            .map_raw_read_only(&data.fd().as_fd())
            .context("cannot map the flow table")?;
        Ok(Self { map, records })
    }

    /// All flows: each that is in the table from beginning to end of this, once; others perhaps.
    pub fn iter(&self) -> impl Iterator<Item = Flow> {
        (0..self.records).filter_map(|index| self.get(index))
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
        if index >= self.records {
            return Ok(None);
        }
        // SAFETY: within the mapping, which is as long as `self`; the kernel has it aligned to a page.
        // No reference to the record is made: others write there.
        let record = unsafe { self.map.as_mut_ptr().cast::<Record>().add(index as usize) };
        let found = table::read(&Mapped(record, PhantomData))?;
        Ok(found.map(|found| Flow {
            index,
            key: found.key,
            word: found.word,
            created: found.created,
            cpu: found.cpu,
        }))
    }
}

/// A record of a mapping that lives as long as this.
struct Mapped<'a>(*mut Record, PhantomData<&'a Flows>);

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
        let created = unsafe { AtomicU32::from_ptr(&raw mut (*self.0).created) };
        created.load(Ordering::Relaxed)
    }

    fn fence(&self) {
        fence(Ordering::Acquire);
    }
}
