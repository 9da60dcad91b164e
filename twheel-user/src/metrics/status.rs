//! What the page shows, as JSON.

use std::{collections::BTreeMap, time::Instant};

use anyhow::{Context, Result};
use serde::Serialize;
use twheel_common::counter::Counter;

use super::{
    numbers::{Metrics, lock},
    pass::DUE,
    rings::Rings,
    sample::{Interface, Rates},
    talkers,
};
use crate::{
    action::{Action, Outcome},
    reap::ReaperState,
};

#[derive(Serialize)]
struct Status<'a> {
    version: &'a str,
    host: &'a str,
    pid: u32,
    /// What was asked to be watched.
    interfaces: &'a [String],
    healthy: bool,
    uptime_seconds: f64,
    /// How old the rest is.
    age_seconds: f64,
    tick_seconds: f64,
    scheme: &'a str,
    levels: u32,
    slots: u32,
    /// Ticks that have passed, by the clock; `None` before the first step.
    tick: Option<f64>,
    accounting: bool,
    flows: u64,
    max_flows: u32,
    counters: BTreeMap<&'a str, u64>,
    /// `None`: there was no sample before this one.
    rates: Option<&'a Rates>,
    states: &'a BTreeMap<&'static str, u64>,
    /// Flows that `states` and `due` were counted from, if these are estimates.
    #[serde(skip_serializing_if = "Option::is_none")]
    estimated_from: Option<u64>,
    due: Vec<Due>,
    wheels: &'a Rings,
    talkers: &'a talkers::Shown,
    talkers_age_seconds: f64,
    carried: &'a [Interface],
    interface_count: usize,
    reaper: Option<Reaper>,
}

/// Flows that are due within a time, and not within the one before.
#[derive(Serialize)]
struct Due {
    /// In seconds; `None`: any time.
    within: Option<u64>,
    flows: u64,
}

#[derive(Serialize)]
struct Reaper {
    paused: bool,
    /// Flows whose actions wait.
    queued: usize,
    outcomes: Vec<Reaped>,
}

#[derive(Serialize)]
struct Reaped {
    action: &'static str,
    outcome: &'static str,
    meaning: &'static str,
    count: u64,
}

impl Reaper {
    fn new(state: &ReaperState) -> Self {
        let outcomes = Action::ALL.into_iter().flat_map(|action| {
            Outcome::ALL.iter().map(move |outcome| Reaped {
                action: action.name(),
                outcome: outcome.name(),
                meaning: outcome.meaning(),
                count: state.count(action, *outcome),
            })
        });
        Self {
            paused: state.is_paused(),
            queued: state.queued(),
            outcomes: outcomes.filter(|it| it.count > 0).collect(),
        }
    }
}

impl Metrics {
    /// What the page shows, from the last sample: it reads no map.
    ///
    /// # Errors
    ///
    /// There is no sample.
    pub(super) fn status(&self) -> Result<String> {
        let sample = lock(&self.sample).clone().context("no sample was taken")?;
        let (config, counters) = (&self.config, &sample.counters);
        let bounds = DUE.iter().map(|bound| Some(bound.as_secs()));
        let status = Status {
            version: env!("CARGO_PKG_VERSION"),
            host: &self.identity.host,
            pid: std::process::id(),
            interfaces: &self.interfaces,
            healthy: self.is_healthy(),
            uptime_seconds: self.started.elapsed().as_secs_f64(),
            age_seconds: sample.at.elapsed().as_secs_f64(),
            tick_seconds: self.clock.duration(config.tick.into()).as_secs_f64(),
            scheme: config.geometry.scheme_name(),
            levels: config.geometry.levels,
            slots: 1 << config.geometry.bits,
            tick: self.tick(),
            accounting: config.accounting != 0,
            flows: counters.live(),
            max_flows: config.max_flows,
            counters: Counter::ALL
                .iter()
                .map(|counter| (counter.name(), counters.get(*counter)))
                .collect(),
            rates: sample.rates.as_ref(),
            states: &sample.part.states,
            estimated_from: (!sample.part.is_whole).then_some(sample.part.read),
            due: bounds
                .chain([None])
                .zip(sample.part.due)
                .map(|(within, flows)| Due { within, flows })
                .collect(),
            wheels: &sample.rings,
            talkers: &sample.talkers,
            talkers_age_seconds: sample.talked.elapsed().as_secs_f64(),
            carried: &sample.interfaces,
            interface_count: sample.interface_count,
            reaper: self.reaper.get().map(|it| Reaper::new(it)),
        };
        serde_json::to_string(&status).context("cannot write the status")
    }

    /// The present tick. A stepper that sleeps has read the clock long ago, so the time since then
    /// is added.
    fn tick(&self) -> Option<f64> {
        let (units, at): (u64, Instant) = (*lock(&self.now))?;
        let since = at.elapsed().as_secs_f64() / self.clock.unit().as_secs_f64();
        Some((units as f64 + since) / f64::from(self.config.tick))
    }
}
