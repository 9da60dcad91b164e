//! Reading the flow table while the data plane writes it: through a mapping, without a system call and
//! without holding anybody up.

use std::{
    os::fd::AsFd,
    ptr,
    sync::atomic::{AtomicU32, AtomicU64, Ordering, fence},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{Map, MapInfo};
use memmap2::{MmapOptions, MmapRaw};
use twheel_common::{
    flow::{FlowKey, Word},
    step::Delete,
    table::{self, Record, cpu, holds_flow},
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

    /// The flow in a record.
    pub fn get(&self, index: u32) -> Option<Flow> {
        loop {
            match self.try_get(index) {
                Ok(flow) => return flow,
                // It changed meanwhile: a matter of nanoseconds.
                Err(Changed) => std::hint::spin_loop(),
            }
        }
    }

    fn try_get(&self, index: u32) -> Result<Option<Flow>, Changed> {
        if index >= self.records {
            return Ok(None);
        }
        // SAFETY: within the mapping, which is as long as `self`; the kernel has it aligned to a page.
        // No reference to the record is made: others write there.
        let record = unsafe { self.map.as_mut_ptr().cast::<Record>().add(index as usize) };
        // SAFETY: as above; aligned words, which are only read, and atomically.
        let (tag, word, created) = unsafe {
            (
                AtomicU64::from_ptr(&raw mut (*record).tag),
                AtomicU64::from_ptr((&raw mut (*record).word).cast()),
                AtomicU32::from_ptr(&raw mut (*record).created),
            )
        };
        // A record gets another generation before another key, and its key before it goes live. So if it
        // is live after a generation was read, and the generation has not changed after the rest was, the
        // rest is of that generation.
        let before = Word(word.load(Ordering::Acquire));
        let live = tag.load(Ordering::Acquire);
        if !holds_flow(live) || before.is_dead() {
            return Ok(None);
        }
        // SAFETY: as above. Others may write meanwhile, which the check below finds; hence volatile.
        let addresses = unsafe { ptr::read_volatile(&raw const (*record).addresses) };
        let created = created.load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        let after = Word(word.load(Ordering::Acquire));
        if after.generation() != before.generation()
            || tag.load(Ordering::Relaxed) != live
            || before.seen().is_starting()
        {
            return Err(Changed);
        }
        Ok(Some(Flow {
            index,
            key: table::key(addresses, live),
            word: before,
            created,
            cpu: cpu(live),
        }))
    }
}

/// The record changed while it was read.
struct Changed;
