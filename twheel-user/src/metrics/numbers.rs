//! The numbers of a running instance, for Prometheus.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use aya::maps::Map;
use prometheus::{
    Gauge, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder, core::Collector,
};
use twheel_common::{
    config::Config,
    counter::{Counter, Counters},
    event::{Event, Reason},
    rule::Timeouts,
};

use super::{
    ends::{Ends, Latest},
    exemplars::{Exemplars, to_open_metrics},
    history::History,
    links, offload, programs,
    sample::Sample,
};
use crate::{
    action::{Action, Outcome},
    clock::Clock,
    cost::CostReading,
    data_plane::{self, DataPlane},
    identity::Identity,
    maps,
    model::{Ended, KnownAs, Mark},
    offload::Tally,
    pins::Pins,
    policy::install::InForce,
    reap,
    stepper::Observer,
    watched,
};

/// In seconds. One timer visit takes a fraction of a microsecond, and a step has at most 256.
const STEP_BUCKETS: [f64; 12] = [
    1e-6, 2.5e-6, 5e-6, 1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 1e-2, 1e-1,
];

/// In seconds. A flow is late by less than a tick, which is 10 ms to some seconds, plus the time by
/// which the stepper was delayed.
pub(super) const LATENESS_BUCKETS: [f64; 13] = [
    0.005, 0.01, 0.025, 0.05, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 3600.0,
];

/// Most pairs of interface and direction by which ended flows are counted.
const MAX_INTERFACE_COUNTERS: usize = 4096;

/// The numbers of a running instance.
pub struct Metrics {
    registry: Registry,
    ended: IntCounterVec,
    steps: Histogram,
    lateness: Histogram,
    /// Flows that stand for the numbers above.
    exemplars: Mutex<Exemplars>,
    pub(super) ends: Mutex<Ends>,
    /// What the page shows; `None` if nobody takes samples.
    pub(super) sample: Mutex<Option<Arc<Sample>>>,
    pub(super) history: Mutex<History>,
    /// Ended flows by interface and direction of their initiators' packets.
    by_interface: Mutex<BTreeMap<(String, &'static str), u64>>,
    failed: AtomicBool,
    /// The data plane's clock at the latest step, and when that was.
    pub(super) now: Mutex<Option<(u64, Instant)>>,
    pub(super) started: Instant,
    pub(super) interfaces: Vec<String>,
    pub(super) config: Config,
    pub(super) clock: Clock,
    pub(super) pins: Pins,
    pub(super) identity: Arc<Identity>,
    counters: Map,
    timeouts: InForce,
    pub(super) reaper: OnceLock<Arc<reap::ReaperState>>,
    offload: OnceLock<Tally>,
}

impl Metrics {
    /// For a data plane that is loaded and pinned.
    pub fn new(
        plane: &DataPlane,
        pins: &Pins,
        identity: Arc<Identity>,
        interfaces: &[String],
    ) -> Result<Self> {
        let registry = Registry::new();
        let ended = IntCounterVec::new(
            Opts::new(
                "twheel_ended_flows_total",
                "ended flows that were reported, by reason and state",
            ),
            &["reason", "state"],
        )?;
        let steps = Histogram::with_opts(
            HistogramOpts::new(
                "twheel_step_seconds",
                "duration of a stepper's call, which makes at most 256 timer visits",
            )
            .buckets(STEP_BUCKETS.to_vec()),
        )?;
        let lateness = Histogram::with_opts(
            HistogramOpts::new(
                "twheel_expiry_lateness_seconds",
                "how long after its timeout a flow ended, for the reasons idle, closed and reset",
            )
            .buckets(LATENESS_BUCKETS.to_vec()),
        )?;
        let started = Gauge::new(
            "process_start_time_seconds",
            "start of the process, in seconds since the epoch",
        )?;
        started.set(
            SystemTime::now()
                .duration_since(UNIX_EPOCH)
                .map_or(0.0, |since| since.as_secs_f64()),
        );
        let most = IntGauge::new("twheel_max_flows", "capacity of the flow table")?;
        most.set(plane.config().max_flows.into());
        let build = IntGaugeVec::new(
            Opts::new(
                "twheel_build_info",
                "1, with the version of twheel as a label",
            ),
            &["version"],
        )?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        let collectors: [Box<dyn Collector>; 6] = [
            Box::new(ended.clone()),
            Box::new(steps.clone()),
            Box::new(lateness.clone()),
            Box::new(started),
            Box::new(most),
            Box::new(build),
        ];
        for collector in collectors {
            registry.register(collector)?;
        }
        Ok(Self {
            registry,
            ended,
            steps,
            lateness,
            exemplars: Mutex::default(),
            ends: Mutex::default(),
            sample: Mutex::default(),
            history: Mutex::default(),
            by_interface: Mutex::default(),
            failed: AtomicBool::new(false),
            now: Mutex::default(),
            started: Instant::now(),
            interfaces: interfaces.to_vec(),
            config: *plane.config(),
            clock: plane.clock(),
            pins: pins.clone(),
            identity,
            counters: Map::PerCpuArray(pins.map("COUNTERS")?),
            timeouts: InForce::open(&maps::pinned(pins))?,
            reaper: OnceLock::new(),
            offload: OnceLock::new(),
        })
    }

    /// Adds the reaper's counters. Only the first call has an effect.
    pub fn watch(&self, reaper: Arc<reap::ReaperState>) {
        // A second call would pass the reaper of the same run.
        let _ = self.reaper.set(reaper);
    }

    /// Adds what is counted of timeouts that programs hand over. Only the first call has an effect.
    pub fn watch_programs(&self, tally: Tally) {
        // A second call would pass the tally of the same run.
        let _ = self.offload.set(tally);
    }

    /// Whether all steppers run.
    pub fn is_healthy(&self) -> bool {
        !self.failed.load(Ordering::Relaxed)
    }

    /// Begins to count ended flows that were read together.
    pub fn batch(&self) -> Batch<'_> {
        Batch {
            metrics: self,
            timeouts: BTreeMap::new(),
        }
    }

    /// All numbers, in Prometheus' text format.
    ///
    /// # Errors
    ///
    /// The kernel's counters cannot be read.
    pub fn text(&self) -> Result<String> {
        let places = data_plane::counters_of_places(&self.counters)?;
        // A registry puts metrics in order.
        let registry = Registry::new();
        kernel(&Counters::sum(places.iter().flatten()), &registry)?;
        let interfaces = watched::by_interface(&self.pins, &places)?;
        self.of_interfaces(&interfaces, &registry)?;
        if let Some(reaper) = self.reaper.get() {
            reaped(reaper, &registry)?;
        }
        if let Some(tally) = self.offload.get() {
            offload::register(tally, &registry)?;
        }
        // Without them the others are still worth serving.
        if let Ok(reading) = CostReading::new(&self.pins) {
            programs::register(&reading, &registry)?;
        }
        let mut families = self.registry.gather();
        families.extend(registry.gather());
        families.sort_by(|one, two| one.name().cmp(two.name()));
        TextEncoder::new()
            .encode_to_string(&families)
            .context("cannot write the metrics")
    }

    /// The same in the format of OpenMetrics, with exemplars.
    ///
    /// # Errors
    ///
    /// The kernel's counters cannot be read.
    pub(super) fn open_metrics(&self) -> Result<String> {
        let text = self.text()?;
        let exemplars = lock(&self.exemplars).by_sample(&self.identity);
        Ok(to_open_metrics(&text, &exemplars))
    }

    /// The metric families that have one value per interface.
    fn of_interfaces(
        &self,
        interfaces: &[(String, Counters)],
        registry: &Registry,
    ) -> prometheus::Result<()> {
        let info = IntGaugeVec::new(
            Opts::new(
                "twheel_interface_info",
                "1, for each interface of the instance",
            ),
            &["interface"],
        )?;
        let packets = IntCounterVec::new(
            Opts::new(
                "twheel_interface_packets_total",
                "packets of each interface, by verdict",
            ),
            &["interface", "verdict"],
        )?;
        let carried = IntCounterVec::new(
            Opts::new(
                "twheel_interface_bytes_total",
                "bytes of each interface of this network namespace, by direction, as the kernel \
                 counts them",
            ),
            &["interface", "direction"],
        )?;
        let ended = IntCounterVec::new(
            Opts::new(
                "twheel_interface_ended_flows_total",
                "ended flows that were reported, by interface and direction of their initiators' \
                 packets",
            ),
            &["interface", "direction"],
        )?;
        // Without them the others are still worth serving.
        let bytes = links::bytes().unwrap_or_default();
        let mut by_interface = lock(&self.by_interface);
        // Drops interfaces that disappeared and whose place another interface has taken.
        let names: BTreeSet<_> = interfaces.iter().map(|(name, _)| name.as_str()).collect();
        by_interface.retain(|(name, _), _| names.contains(name.as_str()));
        for (name, counters) in interfaces {
            info.with_label_values(&[name]).set(1);
            for verdict in Counter::VERDICTS {
                let count = counters.get(verdict);
                if count > 0 {
                    let labels = [name.as_str(), verdict.name()];
                    packets.with_label_values(&labels).inc_by(count);
                }
            }
            for (at, direction) in ["in", "out"].into_iter().enumerate() {
                let labels = [name.as_str(), direction];
                if let Some(bytes) = bytes.get(name) {
                    carried.with_label_values(&labels).inc_by(bytes[at]);
                }
                let count = by_interface.get(&(name.clone(), direction));
                let ended = ended.with_label_values(&labels);
                ended.inc_by(count.copied().unwrap_or(0));
            }
        }
        let collectors: [Box<dyn Collector>; 4] = [
            Box::new(info),
            Box::new(packets),
            Box::new(carried),
            Box::new(ended),
        ];
        // A registry leaves out a family without metrics.
        collectors
            .into_iter()
            .try_for_each(|it| registry.register(it))
    }
}

impl Observer for Metrics {
    fn stepped(&self, took: Duration, now: u64) {
        self.steps.observe(took.as_secs_f64());
        *lock(&self.now) = Some((now, Instant::now()));
    }

    /// From now on the instance is not healthy.
    fn failed(&self) {
        self.failed.store(true, Ordering::Relaxed);
    }
}

/// The metric families of the reaper's counters.
fn reaped(reaper: &reap::ReaperState, registry: &Registry) -> prometheus::Result<()> {
    let actions = IntCounterVec::new(
        Opts::new(
            "twheel_reaped_total",
            "actions on expired flows, by action and outcome",
        ),
        &["action", "outcome"],
    )?;
    for action in Action::ALL {
        for outcome in Outcome::ALL {
            let count = reaper.count(action, *outcome);
            let labels = [action.name(), outcome.name()];
            actions.with_label_values(&labels).inc_by(count);
        }
    }
    let paused = IntGauge::new(
        "twheel_reaper_paused",
        "1 while the reaper is paused, because it would have reaped too many flows",
    )?;
    paused.set(reaper.is_paused().into());
    registry.register(Box::new(actions))?;
    registry.register(Box::new(paused))
}

/// The metric families of the data plane's counters.
fn kernel(counters: &Counters, registry: &Registry) -> prometheus::Result<()> {
    let flows = IntGauge::new("twheel_flows", "flows in the table")?;
    flows.set(counters.live() as i64);
    let packets = IntCounterVec::new(
        Opts::new("twheel_packets_total", "packets, by verdict"),
        &["verdict"],
    )?;
    for counter in Counter::ALL {
        if Counter::VERDICTS.contains(counter) {
            let packets = packets.with_label_values(&[counter.name()]);
            packets.inc_by(counters.get(*counter));
        } else {
            let name = format!("twheel_{}_total", counter.name());
            let family = IntCounter::new(name, counter.meaning())?;
            family.inc_by(counters.get(*counter));
            registry.register(Box::new(family))?;
        }
    }
    registry.register(Box::new(flows))?;
    registry.register(Box::new(packets))
}

/// Counts ended flows that were read together, so that the timeouts of each rule are looked up
/// once.
pub struct Batch<'a> {
    metrics: &'a Metrics,
    timeouts: BTreeMap<u32, Option<Timeouts>>,
}

impl Batch<'_> {
    /// Counts an ended flow.
    pub fn ended(&mut self, mark: Mark, event: &Event, ended: &Ended, known_as: &KnownAs) {
        let metrics = self.metrics;
        metrics
            .ended
            .with_label_values(&[ended.reason.name(), ended.flow.state])
            .inc();
        let lateness = self.lateness(event, ended.reason);
        let lateness = lateness.map(|it| it.as_secs_f64());
        if let Some(lateness) = lateness {
            metrics.lateness.observe(lateness);
        }
        lock(&metrics.exemplars).note(mark, ended, lateness);
        if let Some(iface) = &known_as.iface {
            let mut by_interface = lock(&metrics.by_interface);
            // Thousands of interfaces have appeared and disappeared since the last request: these
            // counters start anew.
            if by_interface.len() >= MAX_INTERFACE_COUNTERS {
                by_interface.clear();
            }
            *by_interface
                .entry((iface.clone(), ended.flow.direction()))
                .or_default() += 1;
        }
        lock(&metrics.ends).add(Latest {
            at: Instant::now(),
            mark,
            ended: *ended,
            known_as: known_as.clone(),
        });
    }

    /// How late a flow ended whose deadline had passed; `None` if it ended for another reason. If a
    /// policy has just shortened the timeout, the lateness counts from the new deadline, which may
    /// lie in the past.
    fn lateness(&mut self, event: &Event, reason: Reason) -> Option<Duration> {
        if !matches!(reason, Reason::Idle | Reason::Closed | Reason::Reset) {
            return None;
        }
        let timeouts = self.timeouts.entry(event.rule.into()).or_insert_with(|| {
            // If the timeouts cannot be read, the lateness is not counted.
            let rule = self.metrics.timeouts.rule(event.rule).ok()?;
            Some(rule.timeouts)
        });
        let timeout = timeouts.as_ref()?.timeout(event.seen());
        let late = event.idle.saturating_sub(timeout);
        Some(self.metrics.clock.duration(late.into()))
    }
}

/// Ignores poisoning: no panic can leave a change half done here.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_counter_is_in_one_family() {
        let mut counters = Counters::default();
        for (number, value) in counters.0.iter_mut().enumerate() {
            *value = 1 << number;
        }
        let registry = Registry::new();
        kernel(&counters, &registry).unwrap();
        let families = registry.gather();
        let mut values = BTreeSet::new();
        for family in families.iter().filter(|it| it.name().ends_with("_total")) {
            assert!(!family.help().is_empty(), "{}", family.name());
            for metric in family.get_metric() {
                assert!(values.insert(metric.get_counter().get_value() as u64));
            }
        }
        let all: BTreeSet<u64> = counters.0.into_iter().collect();
        assert_eq!(values, all);
        let names: BTreeSet<_> = families.iter().map(|it| it.name()).collect();
        assert_eq!(names.len(), families.len(), "no family twice");
    }
}
