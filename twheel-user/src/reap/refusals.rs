//! Packets that found no room: they may have been of flows that are back.

use std::collections::VecDeque;

use anyhow::Result;
use aya::maps::Map;
use twheel_common::counter::Counter;

use crate::{call::Callable, data_plane, pins::Pins};

/// The map of counters.
pub(super) fn counters(pins: &Pins) -> Result<Map> {
    pins.map("COUNTERS").map(Map::PerCpuArray)
}

/// Packets that may have been of flows that are back, and are not in the table for want of room.
pub(super) fn refused(counters: &Map) -> Result<u64> {
    let counters = data_plane::counters(counters)?;
    let refusals = [Counter::TableFull, Counter::WindowFull, Counter::Raced];
    Ok(refusals
        .into_iter()
        .map(|counter| counters.get(counter))
        .sum())
}

/// How many there were by when.
pub(super) struct Refusals {
    /// The program that tells the time.
    sweep: Callable,
    counters: Map,
    /// Low 32 bits of the clock and the number, oldest first.
    samples: VecDeque<(u32, u64)>,
}

impl Refusals {
    /// More than anything waits for.
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
        // The time after that: what has come in between counts as later.
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

    /// As of some moment before this one. Of what is older than all that is known nobody can tell: everything counts.
    pub(super) fn before(&self, at: u64) -> u64 {
        let is_before = |(now, _): &&(u32, u64)| (at as u32).wrapping_sub(*now) as i32 > 0;
        let latest = self.samples.iter().rev().find(is_before);
        latest.map_or(0, |(_, refused)| *refused)
    }
}
