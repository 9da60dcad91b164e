//! What the page shows of an instance at a time. A thread of its own takes such samples, once in
//! five seconds for the history, and once a second while somebody looks. So a request reads no map,
//! and is answered as fast with a million flows as with none.

use std::{
    collections::BTreeMap,
    sync::{Arc, mpsc},
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::maps::Map;
use serde::Serialize;
use twheel_common::{
    counter::{Counter, Counters},
    event::Reason,
};

use super::{
    history::{Reasons, STEP},
    links,
    numbers::{Metrics, lock},
    pass::{Part, Passes},
    rings::{Rings, read_rings},
    talkers::{Shown, Sums, Talkers},
};
use crate::{data_plane, inspect::Reader, watched};

/// Least time between two samples.
const LOOK: Duration = Duration::from_secs(1);
/// Interfaces that the page lists, those with the most packets.
const INTERFACES: usize = 100;

/// What happens a second, over the time between two samples.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Rates {
    /// Bits that the interfaces receive and send, as the kernel counts them; `None` if it is not
    /// known of any.
    pub(super) bits: Option<[f64; 2]>,
    /// Packets that belong to flows.
    pub(super) packets: f64,
    /// Flows that begin.
    pub(super) created: f64,
    /// Flows that end.
    pub(super) ended: f64,
    /// Events that are lost.
    pub(super) lost: f64,
    /// Packets that would have begun a flow and found no room.
    pub(super) no_room: f64,
}

/// An interface of the instance.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Interface {
    name: String,
    #[serde(flatten)]
    rates: Rates,
}

/// What the page shows.
#[derive(Clone)]
pub(super) struct Sample {
    pub(super) at: Instant,
    pub(super) counters: Counters,
    pub(super) rates: Option<Rates>,
    pub(super) part: Part,
    pub(super) rings: Rings,
    pub(super) talkers: Arc<Shown>,
    /// When the talkers were last put together.
    pub(super) talked: Instant,
    pub(super) interfaces: Vec<Interface>,
    /// How many there are.
    pub(super) interface_count: usize,
}

/// What is counted from the beginning.
struct Reading {
    at: Instant,
    counters: Counters,
    /// By place: new ones come behind those that were there.
    interfaces: Vec<(String, Counters)>,
    bytes: BTreeMap<String, [u64; 2]>,
    reasons: Reasons,
}

/// The thread that takes samples; ends it when it is dropped.
pub(super) struct Sampler {
    ask: Option<mpsc::SyncSender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Takes a first sample and starts the thread.
    ///
    /// # Errors
    ///
    /// The instance cannot be read.
    pub(super) fn start(metrics: Arc<Metrics>) -> Result<(Self, Asker)> {
        let mut worker = Worker::new(metrics.clone())?;
        worker.look()?;
        worker.point = worker.last.clone();
        let (ask, asked) = mpsc::sync_channel(1);
        let thread = thread::Builder::new()
            .name("twheel-page".to_owned())
            .spawn(move || worker.run(&asked))
            .context("cannot start the page's thread")?;
        let asker = Asker(ask.clone());
        let sampler = Self {
            ask: Some(ask),
            thread: Some(thread),
        };
        Ok((sampler, asker))
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // The thread ends once nobody can ask any more: the askers are dropped before this.
        drop(self.ask.take());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// Asks for a new sample.
#[derive(Clone)]
pub(super) struct Asker(mpsc::SyncSender<()>);

impl Asker {
    /// Asks for one as soon as the last one is old enough. Does not wait for it.
    pub(super) fn ask(&self) {
        // If the channel is full, one was asked for already.
        let _ = self.0.try_send(());
    }
}

struct Worker {
    metrics: Arc<Metrics>,
    passes: Passes,
    talkers: Talkers,
    /// Ends since the last whole pass, and when that was.
    ended: Sums,
    passed: Instant,
    shown: (Arc<Shown>, Instant),
    rings: Rings,
    /// When somebody last asked.
    asked: Instant,
    /// The last sample, and the last one for the history.
    last: Option<Arc<Reading>>,
    point: Option<Arc<Reading>>,
    /// The last sample failed.
    failed: bool,
}

impl Worker {
    fn new(metrics: Arc<Metrics>) -> Result<Self> {
        let now = Instant::now();
        Ok(Self {
            passes: Passes::new(Reader::open_pins(metrics.pins.clone())?),
            metrics,
            talkers: Talkers::default(),
            ended: Sums::default(),
            passed: now,
            shown: (Arc::default(), now),
            rings: Rings::default(),
            asked: now,
            last: None,
            point: None,
            failed: false,
        })
    }

    /// Takes samples until nobody can ask any more.
    fn run(&mut self, asked: &mpsc::Receiver<()>) {
        let mut point = Instant::now() + STEP;
        loop {
            let left = point.saturating_duration_since(Instant::now());
            let is_asked = match asked.recv_timeout(left) {
                Ok(()) => true,
                Err(mpsc::RecvTimeoutError::Timeout) => false,
                Err(mpsc::RecvTimeoutError::Disconnected) => return,
            };
            if is_asked && !self.rest(asked) {
                return;
            }
            if is_asked {
                self.asked = Instant::now();
            }
            let is_point = Instant::now() >= point;
            if is_point {
                // After a suspension no points are made up.
                point = (point + STEP).max(Instant::now());
            }
            // Over a shorter time than that, rates would say little.
            let is_fresh = self.last.as_ref().is_some_and(|it| it.at.elapsed() < LOOK);
            let looked = if is_fresh { Ok(()) } else { self.look() };
            match looked {
                Ok(()) => {
                    self.failed = false;
                    if is_point {
                        self.add_point();
                    }
                }
                Err(error) if !self.failed => {
                    self.failed = true;
                    log::error!("cannot read what the page shows: {error:#}");
                }
                Err(_) => {}
            }
        }
    }

    /// Waits until the last sample is old enough. Returns whether somebody can still ask.
    fn rest(&self, asked: &mpsc::Receiver<()>) -> bool {
        let until = self.last.as_ref().map_or(self.passed, |last| last.at) + LOOK;
        loop {
            match asked.recv_timeout(until.saturating_duration_since(Instant::now())) {
                Ok(()) => {}
                Err(mpsc::RecvTimeoutError::Timeout) => return true,
                Err(mpsc::RecvTimeoutError::Disconnected) => return false,
            }
        }
    }

    /// Takes a sample.
    fn look(&mut self) -> Result<()> {
        let metrics = self.metrics.clone();
        let reading = Reading::take(&metrics)?;
        let (part, whole) = self.passes.go_on(reading.counters.live())?;
        let ended = lock(&metrics.ends).take_sums();
        let before = self.last.as_deref();
        let since = before.map_or(Duration::ZERO, |before| reading.at - before.at);
        self.talkers.ended(&ended, since);
        self.ended.merge(&ended);
        if let Some(found) = whole {
            let now = Instant::now();
            let ended = std::mem::take(&mut self.ended);
            let accounting = metrics.config.accounting != 0;
            let shown = self
                .talkers
                .passed(found, &ended, now - self.passed, accounting);
            self.shown = (Arc::new(shown), now);
            self.passed = now;
        }
        // Otherwise nobody sees them.
        if self.asked.elapsed() <= STEP {
            self.rings = read_rings(&self.passes.reader)?;
        }
        let (interfaces, interface_count) = reading.interfaces(before);
        let sample = Sample {
            at: reading.at,
            counters: reading.counters,
            rates: before.map(|before| reading.rates(before)),
            part,
            rings: self.rings.clone(),
            talkers: self.shown.0.clone(),
            talked: self.shown.1,
            interfaces,
            interface_count,
        };
        *lock(&metrics.sample) = Some(Arc::new(sample));
        self.last = Some(Arc::new(reading));
        Ok(())
    }

    /// Adds the last sample to the history, with the rates since the last point.
    fn add_point(&mut self) {
        let sample = lock(&self.metrics.sample).clone();
        if let (Some(now), Some(before), Some(sample)) = (&self.last, &self.point, sample) {
            lock(&self.metrics.history).add(
                &now.rates(before),
                now.reasons(before),
                now.counters.live(),
                &sample.part.states,
            );
        }
        self.point = self.last.clone();
    }
}

impl Reading {
    fn take(metrics: &Metrics) -> Result<Self> {
        let map = Map::PerCpuArray(metrics.pins.map("COUNTERS")?);
        let at = Instant::now();
        let places = data_plane::counters_of_places(&map)?;
        Ok(Self {
            at,
            counters: Counters::sum(places.iter().flatten()),
            interfaces: watched::by_interface(&metrics.pins, &places)?,
            // Without them the rest is still worth showing.
            bytes: links::bytes().unwrap_or_default(),
            reasons: lock(&metrics.ends).reasons,
        })
    }

    fn seconds(&self, before: &Self) -> f64 {
        (self.at - before.at).as_secs_f64().max(1e-3)
    }

    /// Bits a second of an interface, by its number among them. It may have had another name.
    fn bits(&self, before: &Self, number: usize) -> Option<[f64; 2]> {
        let bytes = |of: &Self| of.bytes.get(&of.interfaces.get(number)?.0).copied();
        let (now, before_it) = (bytes(self)?, bytes(before)?);
        let seconds = self.seconds(before);
        // An interface that was made anew under the same name counts from 0.
        let bits = |at: usize| 8.0 * now[at].saturating_sub(before_it[at]) as f64 / seconds;
        Some([bits(0), bits(1)])
    }

    fn rates(&self, before: &Self) -> Rates {
        let known: Vec<_> = (0..self.interfaces.len())
            .filter_map(|number| self.bits(before, number))
            .collect();
        let sum = |at: usize| known.iter().map(|bits| bits[at]).sum::<f64>();
        Rates {
            bits: (!known.is_empty()).then(|| [sum(0), sum(1)]),
            ..rates(&self.counters, &before.counters, self.seconds(before))
        }
    }

    /// The interfaces with the most packets, and how many there are.
    fn interfaces(&self, before: Option<&Self>) -> (Vec<Interface>, usize) {
        let none = Counters::default();
        let seconds = before.map_or(f64::INFINITY, |before| self.seconds(before));
        let mut interfaces: Vec<_> = self
            .interfaces
            .iter()
            .enumerate()
            .map(|(number, (name, counters))| {
                let was = before.and_then(|it| it.interfaces.get(number));
                let was = was.map_or(&none, |(_, counters)| counters);
                let rates = Rates {
                    bits: before.and_then(|before| self.bits(before, number)),
                    ..rates(counters, was, seconds)
                };
                let name = name.clone();
                Interface { name, rates }
            })
            .collect();
        let count = interfaces.len();
        interfaces.sort_by(|one, two| {
            let order = two.rates.packets.total_cmp(&one.rates.packets);
            order.then_with(|| one.name.cmp(&two.name))
        });
        interfaces.truncate(INTERFACES);
        (interfaces, count)
    }

    /// Ends a second by reason.
    fn reasons(&self, before: &Self) -> [f64; Reason::ALL.len()] {
        let seconds = self.seconds(before);
        std::array::from_fn(|at| (self.reasons[at] - before.reasons[at]) as f64 / seconds)
    }
}

/// The rates of counters, without bits.
fn rates(now: &Counters, before: &Counters, seconds: f64) -> Rates {
    let rate = |counters: &[Counter]| {
        let sum = |of: &Counters| counters.iter().map(|it| of.get(*it)).sum::<u64>();
        sum(now).saturating_sub(sum(before)) as f64 / seconds
    };
    Rates {
        bits: None,
        packets: rate(&[Counter::Touched, Counter::Created]),
        created: rate(&[Counter::Created, Counter::Superseded]),
        ended: rate(&ENDS),
        lost: rate(&[Counter::EventsLost, Counter::HistoryLost]),
        no_room: rate(&[Counter::TableFull, Counter::WindowFull]),
    }
}

/// What counts ends.
const ENDS: [Counter; 4] = [
    Counter::Expired,
    Counter::Evicted,
    Counter::Deleted,
    Counter::Superseded,
];
