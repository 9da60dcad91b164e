//! Who turns the wheels: a thread per CPU, asleep until its wheel's next slot.
//!
//! A thread pinned to CPU *i* runs the stepper there, so that nothing else that touches that wheel
//! can run meanwhile. After a step it knows when the next slot has its turn and sleeps until then,
//! or until it is called: by the packet path, for a new flow that is due earlier, or to stop. An
//! idle host sees no wake-up.

use std::{
    path::PathBuf,
    sync::{
        Arc, Mutex,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use aya::{programs::Xdp, util::online_cpus};
use aya_obj::programs::XdpAttachType;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    unistd::Pid,
};
use twheel_common::{
    event::Record,
    step::{Outcome, Step},
    wheel::NEVER,
};

use crate::{
    clock::Clock,
    data_plane::{Events, STEP_BUDGET, step},
    metrics::Metrics,
};

/// The ring of events, shared by the steppers that fill it and the task that waits on it.
pub type SharedEvents = Arc<Mutex<Events>>;

/// What a stepper is told.
enum Call {
    /// Look at the wheel now.
    Step,
    /// End.
    Stop,
}

/// All steppers.
pub struct Steppers {
    calls: Vec<(u32, Sender<Call>)>,
    threads: Vec<JoinHandle<Result<()>>>,
    shared: Arc<Shared>,
}

/// What the threads have in common.
struct Shared {
    /// Where the stepper's program is pinned.
    program: PathBuf,
    clock: Clock,
    /// Units.
    tick: u32,
    events: SharedEvents,
    /// Bounded: a reader that falls behind stops the wheels, and the wheels stop evicting. Nothing
    /// is lost, and nothing grows.
    batches: tokio::sync::mpsc::Sender<Vec<Record>>,
    /// Whom to tell how long steps take.
    metrics: Option<Arc<Metrics>>,
    /// A stepper has ended with an error.
    failed: tokio::sync::Notify,
}

impl Steppers {
    /// Starts a stepper on every CPU that is online, and waits until each has stepped once: from
    /// then on the packet path calls for what is due.
    pub fn start(
        program: PathBuf,
        clock: Clock,
        tick: u32,
        events: SharedEvents,
        batches: tokio::sync::mpsc::Sender<Vec<Record>>,
        metrics: Option<Arc<Metrics>>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            program,
            clock,
            tick,
            events,
            batches,
            metrics,
            failed: tokio::sync::Notify::new(),
        });
        let cpus = online_cpus()
            .map_err(|(path, error)| anyhow!(error).context(format!("cannot read {path}")))?;
        let mut steppers = Self {
            calls: Vec::new(),
            threads: Vec::new(),
            shared: shared.clone(),
        };
        let (ready, is_ready) = channel();
        for cpu in cpus {
            let (call, calls) = channel();
            let (shared, ready) = (shared.clone(), ready.clone());
            let thread = thread::Builder::new()
                .name(format!("twheel-step-{cpu}"))
                .spawn(move || {
                    let result = shared.run(cpu, &calls, &ready);
                    if result.is_err() {
                        if let Some(metrics) = &shared.metrics {
                            metrics.failed();
                        }
                        shared.failed.notify_one();
                    }
                    result
                })
                .context("cannot start a stepper's thread")?;
            steppers.calls.push((cpu, call));
            steppers.threads.push(thread);
        }
        drop(ready);
        if is_ready.iter().take(steppers.threads.len()).count() < steppers.threads.len() {
            // One has ended before it was ready: its error is the answer.
            steppers.stop()?;
            bail!("a stepper ended before it was ready");
        }
        Ok(steppers)
    }

    /// Calls the stepper of a CPU.
    pub fn call(&self, cpu: u32) {
        for (_, call) in self.calls.iter().filter(|(of, _)| *of == cpu) {
            // A stepper that is gone has an error, which `stop` reports.
            let _ = call.send(Call::Step);
        }
    }

    /// Waits until a stepper has ended with an error; [`Steppers::stop`] says which.
    pub async fn failed(&self) {
        self.shared.failed.notified().await;
    }

    /// Ends all steppers; the error of the first that had one.
    pub fn stop(self) -> Result<()> {
        for (_, call) in &self.calls {
            let _ = call.send(Call::Stop);
        }
        let mut result = Ok(());
        for thread in self.threads {
            let ended = thread
                .join()
                .unwrap_or_else(|_| Err(anyhow!("a stepper panicked")));
            result = result.and(ended);
        }
        result
    }
}

impl Shared {
    fn run(&self, cpu: u32, calls: &Receiver<Call>, ready: &Sender<()>) -> Result<()> {
        pin_to(cpu)?;
        let program = Xdp::from_pin(&self.program, XdpAttachType::Interface)
            .context("cannot open the pinned stepper")?;
        let mut deadline = self.turn(&program)?;
        let _ = ready.send(());
        loop {
            let call = match deadline {
                Some(at) => {
                    match calls.recv_timeout(at.saturating_duration_since(Instant::now())) {
                        Err(RecvTimeoutError::Timeout) => Call::Step,
                        Err(RecvTimeoutError::Disconnected) => Call::Stop,
                        Ok(call) => call,
                    }
                }
                None => calls.recv().unwrap_or(Call::Stop),
            };
            match call {
                Call::Stop => return Ok(()),
                Call::Step => deadline = self.turn(&program)?,
            }
        }
    }

    /// Steps until nothing more is due. Returns when to come back; `None`: when called.
    fn turn(&self, program: &Xdp) -> Result<Option<Instant>> {
        loop {
            let before = Instant::now();
            let result = step(program, STEP_BUDGET)?;
            if let Some(metrics) = &self.metrics {
                metrics.stepped(before.elapsed(), result.now);
            }
            if result.expired > 0 || result.outcome == Outcome::RingFull as u32 {
                let mut batch = Vec::new();
                self.events
                    .lock()
                    .expect("no holder panics")
                    .drain(&mut batch);
                if !batch.is_empty() && self.batches.blocking_send(batch).is_err() {
                    // The reader is gone, which only a failure to print makes it.
                    return Ok(None);
                }
            }
            match Outcome::from_raw(result.outcome) {
                Some(Outcome::Done) => return Ok(self.deadline(&result)),
                Some(Outcome::Budget) => {}
                // Another stepper may have filled the ring, and be about to drain it.
                Some(Outcome::RingFull) => thread::yield_now(),
                None => bail!("the stepper gave no answer"),
            }
        }
    }

    /// When the next slot has its turn.
    fn deadline(&self, step: &Step) -> Option<Instant> {
        if step.next == NEVER {
            return None;
        }
        let units = step
            .next
            .saturating_mul(u64::from(self.tick))
            .saturating_sub(step.now);
        // The unit in which the step was may be nearly over or just begun: one more is enough.
        let wait = self.clock.duration(units).saturating_add(self.clock.unit());
        Instant::now().checked_add(wait.min(Duration::from_secs(1 << 32)))
    }
}

/// Pins this thread to a CPU.
pub fn pin_to(cpu: u32) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(cpu as usize)
        .and_then(|()| sched_setaffinity(Pid::from_raw(0), &set))
        .with_context(|| {
            format!("cannot run on CPU {cpu}, whose wheel must be stepped there: is a cpuset in the way?")
        })
}
