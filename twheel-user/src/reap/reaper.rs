//! The reaper as the main loop sees it: a bounded queue, and a thread behind it.

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
    namesakes::Namesakes,
    refusals::{Refusals, counters},
    scope::Scope,
    worker::{Job, Worker},
};
use crate::{
    action::{Actions, News, Outcome},
    data_plane::UserCounters,
    inspect::Reader,
    maps,
    names::Names,
    pins::Pins,
};

/// Most flows in the queue: 18 MiB.
const QUEUE: usize = 1 << 17;

/// The reaper.
pub struct Reaper {
    queue: Option<Sender<Vec<Job>>>,
    /// Nothing is sent through it: dropping it ends the thread.
    _stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
    shared: Arc<ReaperState>,
    tally: Arc<UserCounters>,
    asked: Arc<ActionsInForce>,
    refusals: Mutex<Refusals>,
}

impl Reaper {
    /// Starts the reaper. `results` receives the outcome of each action; if it is not read, only
    /// the reaper waits.
    pub fn start(
        pins: &Pins,
        tally: Arc<UserCounters>,
        mandate: Mandate,
        results: tokio::sync::mpsc::Sender<News>,
    ) -> Result<Self> {
        let shared = Arc::new(ReaperState::default());
        let lost = unsettled(&tally)?;
        if lost > 0 {
            say!(
                "twheel: up to {lost} actions on expired flows were not done, because an earlier \
                 run was killed"
            );
            tally.add(Counter::ReapLost, lost);
        }
        let open = maps::pinned(pins);
        let asked = Arc::new(ActionsInForce::open(pins)?);
        let refusals = Refusals::new(pins)?;
        let (queue, jobs) = channel();
        let (stop, stopped) = channel();
        let mut worker = Worker {
            asked: asked.clone(),
            counters: counters(pins)?,
            reader: Reader::open_pins(pins.clone())?,
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
            namesakes: Namesakes::default(),
            limit: None,
            cgroups: None,
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

    /// The reaper's state.
    pub fn shared(&self) -> Arc<ReaperState> {
        self.shared.clone()
    }

    /// Queues the flows of a batch for which there are actions, as far as the queue has capacity.
    pub fn reap(&self, batch: &[Record]) -> Result<()> {
        let mut flows = self.asked.in_batch(batch)?;
        if flows.is_empty() {
            return Ok(());
        }
        // Counted before these flows leave the ring: if this process is killed, actions that were
        // asked for and not settled are known to be lost.
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
            // The thread runs until it is told to stop.
            let _ = queue.send(jobs);
        }
        Ok(())
    }

    /// Resumes reaping after a pause.
    pub fn resume(&self) {
        self.shared.resume.store(true, Ordering::Relaxed);
        // The thread may have nothing to do for a long time, so the state is updated here, too.
        self.shared.paused.store(false, Ordering::Relaxed);
    }

    /// Ends the reaper. Actions still in the queue are not taken; they are counted.
    pub fn stop(mut self) {
        (self._stop, self.queue) = (None, None);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it occurred.
            let _ = thread.join();
        }
    }
}
