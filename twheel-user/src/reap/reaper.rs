//! The reaper as the loop sees it: a bounded queue before a thread.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::Ordering,
        mpsc::{Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use twheel_common::{
    counter::Counter,
    event::{Event, Record},
};

use super::{
    asked::{ActionsInForce, number, unsettled},
    guard::{Guard, Pace},
    mandate::{Mandate, ReaperState},
    refusals::{Refusals, counters},
    scope::Scope,
    worker::{Job, Worker},
};
use crate::{
    action::{Actions, Outcome, Reaped},
    data_plane::LoaderCounters,
    inspect::Reader,
    maps,
    names::Names,
    pins::Pins,
    policy::install::InForce,
};

/// Flows that wait for their actions, at most: 18 MiB.
const QUEUE: usize = 1 << 17;

/// The reaper.
pub struct Reaper {
    queue: Option<Sender<Vec<Job>>>,
    /// Never sent to: its end is what ends the thread.
    _stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<ReaperState>,
    tally: Arc<LoaderCounters>,
    asked: Arc<ActionsInForce>,
    refusals: Mutex<Refusals>,
}

impl Reaper {
    /// Starts it. `results` takes what becomes of each action; a reader that is slow holds up the reaper alone.
    pub fn start(
        pins: &Pins,
        tally: Arc<LoaderCounters>,
        mandate: Mandate,
        results: tokio::sync::mpsc::Sender<Reaped>,
    ) -> Result<Self> {
        let shared = Arc::new(ReaperState::default());
        let lost = unsettled(&tally)?;
        if lost > 0 {
            say!(
                "twheel: up to {lost} actions on expired flows were not done: an earlier run was killed before"
            );
            tally.add(Counter::ReapLost, lost);
        }
        let open = maps::pinned(pins);
        let asked = Arc::new(ActionsInForce(InForce::open(&open)?));
        let refusals = Refusals::new(pins)?;
        let (queue, jobs) = channel();
        let (stop, stopped) = channel();
        let mut worker = Worker {
            asked: asked.clone(),
            counters: counters(pins)?,
            reader: Reader::of(pins.clone())?,
            names: Names::open(&open)?,
            pins: pins.clone(),
            guard: Guard::new(mandate.max_share),
            pace: Pace::new(mandate.rate),
            expired: None,
            enter: pins.callable("twheel_enter")?,
            mandate,
            shared: shared.clone(),
            tally: tally.clone(),
            results,
            stopped,
            began: Instant::now(),
            left: (Duration::ZERO, None),
            scope: Scope::default(),
        };
        let thread = thread::Builder::new()
            .name("twheel-reaper".to_owned())
            .spawn(move || worker.run(&jobs))
            .context("cannot start the reaper's thread")?;
        Ok(Self {
            queue: Some(queue),
            _stop: Some(stop),
            thread: Some(thread),
            shared,
            tally,
            asked,
            refusals: Mutex::new(refusals),
        })
    }

    /// What is known of it.
    pub fn shared(&self) -> Arc<ReaperState> {
        self.shared.clone()
    }

    /// Has it reap those of these flows for which anything is to be done, as far as its queue has room.
    pub fn reap(&self, batch: &[Record]) -> Result<()> {
        let mut flows = self.asked.in_batch(batch)?;
        if flows.is_empty() {
            return Ok(());
        }
        // Before these flows leave the ring: what is asked and not settled when this process is killed is lost.
        self.tally.add(Counter::ReapAsked, number(&flows));
        let queued = self.shared.queued.load(Ordering::Relaxed);
        let room = QUEUE.saturating_sub(queued).min(flows.len());
        let over: Vec<_> = flows.drain(room..).collect();
        for action in over.iter().flat_map(|(_, actions)| actions.iter()) {
            self.shared.add(action, Outcome::Overrun);
        }
        if !over.is_empty() {
            self.tally.add(Counter::ReapSettled, number(&over));
        }
        let mut refusals = self.refusals.lock().unwrap_or_else(PoisonError::into_inner);
        let job = |(event, actions): (Event, Actions)| Job {
            refused: refusals.before(event.at),
            event,
            actions,
        };
        let jobs: Vec<_> = flows.into_iter().map(job).collect();
        refusals.sample()?;
        self.shared.queued.fetch_add(jobs.len(), Ordering::Relaxed);
        if let Some(queue) = &self.queue {
            // It is there until it is told to stop.
            let _ = queue.send(jobs);
        }
        Ok(())
    }

    /// Goes on after a pause.
    pub fn resume(&self) {
        self.shared.resume.store(true, Ordering::Relaxed);
        // The thread may have nothing to do for long: whoever asks is told now.
        self.shared.paused.store(false, Ordering::Relaxed);
    }

    /// Ends it: what waits is not done, and counted.
    pub fn stop(mut self) {
        (self._stop, self.queue) = (None, None);
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it came.
            let _ = thread.join();
        }
    }
}
