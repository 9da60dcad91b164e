//! The map of counters: which interface each place of it belongs to, and what the running twheel
//! itself counts there.

use std::sync::{Mutex, MutexGuard, PoisonError};

use anyhow::{Context, Result};
use aya::maps::{Array, Map, MapData, PerCpuArray, PerCpuValues};
use twheel_common::counter::{Counter, Counters, USERSPACE};

use crate::pins::Pins;

/// The number of the interface that each place of the map `COUNTERS` belongs to, or 0.
pub fn counted(pins: &Pins) -> Result<Vec<u32>> {
    let map = Array::<_, u32>::try_from(Map::Array(pins.map("COUNTED")?))?;
    (0..map.len())
        .map(|place| map.get(&place, 0).context("cannot read COUNTED"))
        .collect()
}

/// The counters of the map `COUNTERS`, summed over all places and CPUs.
pub fn counters(map: &Map) -> Result<Counters> {
    Ok(Counters::sum(counters_of_places(map)?.iter().flatten()))
}

/// The counters of the map `COUNTERS`, by place and by possible CPU.
pub fn counters_of_places(map: &Map) -> Result<Vec<Vec<Counters>>> {
    let per_cpu = PerCpuArray::<_, Counters>::try_from(map)?;
    (0..per_cpu.len())
        .map(|place| {
            let cpus = per_cpu.get(&place, 0).context("cannot read the counters")?;
            Ok(cpus.iter().copied().collect())
        })
        .collect()
}

/// What the running twheel counts. It is kept beside the programs' counters, and so outlives the
/// run.
pub struct UserCounters(Mutex<Pending>);

struct Pending {
    map: PerCpuArray<MapData, Counters>,
    /// What could not yet be written.
    more: Counters,
}

impl UserCounters {
    /// Opens the pinned maps. Only the process that holds the instance may do so: a counter is read
    /// and then written, which is not atomic.
    pub fn open(pins: &Pins) -> Result<Self> {
        let map = Map::PerCpuArray(pins.map("COUNTERS")?);
        Ok(Self(Mutex::new(Pending {
            map: PerCpuArray::try_from(map)?,
            more: Counters::default(),
        })))
    }

    /// The value of a counter, which includes earlier runs.
    pub fn get(&self, counter: Counter) -> Result<u64> {
        let unwritten = self.lock();
        Ok(unwritten.read()?[0].get(counter) + unwritten.more.get(counter))
    }

    /// Adds to a counter.
    pub fn add(&self, counter: Counter, number: u64) {
        let mut unwritten = self.lock();
        unwritten.more.0[counter as usize] += number;
        if let Err(error) = unwritten.write() {
            log::error!(
                "cannot update the counter {}, and will try again: {error:#}",
                counter.name()
            );
        }
    }

    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Pending {
    /// The counters by CPU; the running twheel counts in those of the first CPU.
    fn read(&self) -> Result<Vec<Counters>> {
        let cpus = self.map.get(&USERSPACE, 0);
        let cpus = cpus.context("cannot read the counters")?;
        Ok(cpus.iter().copied().collect())
    }

    fn write(&mut self) -> Result<()> {
        let mut cpus = self.read()?;
        cpus[0].add(&self.more);
        let cpus = PerCpuValues::try_from(cpus)?;
        let written = self.map.set(USERSPACE, cpus, 0);
        written.context("cannot write the counters")?;
        self.more = Counters::default();
        Ok(())
    }
}
