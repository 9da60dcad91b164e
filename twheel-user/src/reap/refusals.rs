//! Packets for which there was no free record: they may have belonged to flows that are alive
//! again.

use std::collections::VecDeque;

use anyhow::Result;
use aya::maps::Map;
use twheel_common::counter::Counter;

use crate::{call::Callable, data_plane, pins::Pins};

/// The map of counters.
pub(super) fn counters(pins: &Pins) -> Result<Map> {
    pins.map("COUNTERS").map(Map::PerCpuArray)
}

/// The number of packets that may have belonged to flows that are alive again, and that are not in
/// the table because it was full.
pub(super) fn refused(counters: &Map) -> Result<u64> {
    let counters = data_plane::counters(counters)?;
    let refusals = [Counter::TableFull, Counter::WindowFull, Counter::Raced];
    Ok(refusals
        .into_iter()
        .map(|counter| counters.get(counter))
        .sum())
}

/// The number of such packets at several times.
pub(super) struct Refusals {
    /// The program that tells the time.
    sweep: Callable,
    counters: Map,
    /// The low 32 bits of the clock and the number of packets, oldest first.
    samples: VecDeque<(u32, u64)>,
}

impl Refusals {
    /// More samples than any wait in the queue spans.
    const SAMPLES: usize = 256;

    pub(super) fn new(pins: &Pins) -> Result<Self> {
        let mut refusals = Self {
            sweep: pins.callable("twheel_sweep")?,
            counters: counters(pins)?,
            samples: VecDeque::new(),
        };
        refusals.sample()?;
        Ok(refusals)
    }

    pub(super) fn sample(&mut self) -> Result<()> {
        let refused = refused(&self.counters)?;
        // The time is read after the number, so a packet between the two counts as later.
        let now = self.sweep.now()?;
        if self
            .samples
            .back()
            .is_some_and(|(latest, _)| *latest == now)
        {
            return Ok(());
        }
        self.samples.push_back((now, refused));
        if self.samples.len() > Self::SAMPLES {
            self.samples.pop_front();
        }
        Ok(())
    }

    /// The number at the latest sample before `at`. If `at` is older than all samples, 0, so that
    /// every packet counts as later.
    pub(super) fn before(&self, at: u64) -> u64 {
        let is_before = |(now, _): &&(u32, u64)| (at as u32).wrapping_sub(*now) as i32 > 0;
        let latest = self.samples.iter().rev().find(is_before);
        latest.map_or(0, |(_, refused)| *refused)
    }
}
