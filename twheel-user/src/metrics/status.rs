//! The data of the page, as JSON.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::util::online_cpus;
use serde::Serialize;
use twheel_common::{counter::Counter, wheel::Wheel};

use super::numbers::{Metrics, States, lock};
use crate::{flows::Flows, model, output::json};

/// The flow table is read at most once in this time.
const SCAN_EVERY: Duration = Duration::from_secs(2);

#[derive(Serialize)]
struct Status<'a> {
    version: &'a str,
    interfaces: &'a [String],
    healthy: bool,
    uptime_seconds: f64,
    tick_seconds: f64,
    scheme: &'a str,
    levels: u32,
    slots: u32,
    /// Ticks that have passed, by the clock; `None` before the first step.
    tick: Option<f64>,
    flows: u64,
    max_flows: u32,
    counters: BTreeMap<&'a str, u64>,
    states: States,
    wheels: Vec<Turned>,
    latest: Vec<Ended<'a>>,
}

/// A CPU's wheel.
#[derive(Serialize)]
struct Turned {
    cpu: usize,
    elapsed: u64,
    /// The slots of each level that hold flows.
    occupied: Vec<Vec<u32>>,
}

#[derive(Serialize)]
struct Ended<'a> {
    seconds_ago: f64,
    #[serde(flatten)]
    line: json::FlowLine<'a>,
}

impl Metrics {
    /// The data of the page. Reads the whole flow table, unless it was read a moment ago.
    ///
    /// # Errors
    ///
    /// A map cannot be read.
    pub(super) fn status(&self) -> Result<String> {
        let (config, counters) = (&self.config, self.counters()?);
        let states = self.states()?;
        let latest = lock(&self.latest);
        let status = Status {
            version: env!("CARGO_PKG_VERSION"),
            interfaces: &self.interfaces,
            healthy: self.is_healthy(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            tick_seconds: self.clock.duration(config.tick.into()).as_secs_f64(),
            scheme: config.geometry.scheme_name(),
            levels: config.geometry.levels,
            slots: 1 << config.geometry.bits,
            tick: self.tick(),
            flows: counters.live(),
            max_flows: config.max_flows,
            counters: Counter::ALL
                .iter()
                .map(|counter| (counter.name(), counters.get(*counter)))
                .collect(),
            states,
            wheels: self.wheels()?,
            latest: latest
                .iter()
                .map(|it| Ended {
                    seconds_ago: it.at.elapsed().as_secs_f64(),
                    line: json::ended_line(&self.identity, it.mark, &it.ended, it.known_as.named()),
                })
                .collect(),
        };
        serde_json::to_string(&status).context("cannot write the status")
    }

    /// The present tick. A stepper that sleeps has read the clock long ago, so the time since then
    /// is added.
    fn tick(&self) -> Option<f64> {
        let (units, at) = (*lock(&self.now))?;
        let since = at.elapsed().as_secs_f64() / self.clock.unit().as_secs_f64();
        Some((units as f64 + since) / f64::from(self.config.tick))
    }

    /// Flows by state. Concurrent callers wait for the one that reads the table.
    fn states(&self) -> Result<States> {
        let mut cached = lock(&self.states);
        match &*cached {
            Some((at, states)) if at.elapsed() < SCAN_EVERY => Ok(states.clone()),
            _ => {
                let one_way = self.config.one_way != 0;
                let mut states = States::new();
                for flow in Flows::pinned(&self.pins)?.iter() {
                    *states
                        .entry(model::state(flow.word.seen(), one_way))
                        .or_default() += 1;
                }
                *cached = Some((Instant::now(), states.clone()));
                Ok(states)
            }
        }
    }

    fn wheels(&self) -> Result<Vec<Turned>> {
        let online = online_cpus().map_err(|(path, error)| {
            anyhow::Error::new(error).context(format!("cannot read {path}"))
        })?;
        let wheels = self.wheels.get(&0, 0).context("cannot read the wheels")?;
        Ok(wheels
            .iter()
            .enumerate()
            .filter(|(cpu, _)| online.contains(&(*cpu as u32)))
            .map(|(cpu, wheel)| self.turned(cpu, wheel))
            .collect())
    }

    fn turned(&self, cpu: usize, wheel: &Wheel) -> Turned {
        let geometry = self.config.geometry;
        Turned {
            cpu,
            elapsed: wheel.elapsed,
            occupied: (0..geometry.levels)
                .map(|level| wheel.occupied(geometry, level).collect())
                .collect(),
        }
    }
}
