//! Who turns the wheels: a thread per CPU, asleep until its wheel's next slot.
//!
//! A thread pinned to CPU *i* runs the stepper there, so that nothing else that touches that wheel
//! can run meanwhile. After a step it knows when the next slot has its turn and sleeps until then,
//! or until it is called: by the packet path, for a new flow that is due earlier, or to stop. An
//! idle host sees no wake-up.
//!
//! Where packets take all the time that a CPU has, a stepper would wait for its turn like everybody
//! else, and flows would expire late by that. So it has a real-time priority, as long as it has little to do.

use std::{
    path::PathBuf,
    sync::{
        Arc, Once,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use aya::util::online_cpus;
use nix::sched::sched_getcpu;
use twheel_common::{
    step::{Outcome, Step},
    wheel::NEVER,
};

pub use crate::cpu::{pin_to, run_ahead};
use crate::{call::Callable, clock::Clock, data_plane::STEP_BUDGET, ring::Signals};

/// Calls of a turn that a stepper makes ahead of all that has no real-time priority: 8,192 visits, a few
/// milliseconds. Who has more to do than that goes on as everybody else.
const AHEAD: u32 = 32;

/// Whoever wants to know how steppers do.
pub trait Observer: Send + Sync {
    /// A call is over: how long it took, and the data plane's clock, in units.
    fn stepped(&self, took: Duration, now: u64);
    /// A stepper has ended with an error.
    fn failed(&self);
}

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
    /// A reader that falls behind stops the wheels, and the wheels stop evicting. Nothing is lost, and nothing
    /// grows.
    signals: Arc<Signals>,
    observer: Option<Arc<dyn Observer>>,
    /// A stepper has ended with an error.
    failed: tokio::sync::Notify,
    /// Somebody was told that steppers have no priority.
    told: Once,
}

impl Steppers {
    /// Starts a stepper on every CPU that is online, and waits until each has stepped once: from
    /// then on the packet path calls for what is due.
    pub fn start(
        program: PathBuf,
        clock: Clock,
        tick: u32,
        signals: Arc<Signals>,
        observer: Option<Arc<dyn Observer>>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            program,
            clock,
            tick,
            signals,
            observer,
            failed: tokio::sync::Notify::new(),
            told: Once::new(),
        });
        let cpus = online_cpus()
            .map_err(|(path, error)| anyhow!(error).context(format!("cannot read {path}")))?;
        let mut steppers = Self {
            calls: Vec::new(),
            threads: Vec::new(),
            shared,
        };
        let (ready, is_ready) = channel();
        for cpu in cpus {
            steppers.start_on(cpu, ready.clone())?;
        }
        drop(ready);
        if is_ready.iter().take(steppers.threads.len()).count() < steppers.threads.len() {
            // One has ended before it was ready: its error is the answer.
            steppers.stop()?;
            bail!("a stepper ended before it was ready");
        }
        Ok(steppers)
    }

    fn start_on(&mut self, cpu: u32, ready: Sender<()>) -> Result<()> {
        let (call, calls) = channel();
        let shared = self.shared.clone();
        let thread = thread::Builder::new()
            .name(format!("twheel-step-{cpu}"))
            .spawn(move || {
                let result = shared.run(cpu, &calls, &ready);
                if result.is_err() {
                    if let Some(observer) = &shared.observer {
                        observer.failed();
                    }
                    shared.failed.notify_one();
                }
                result
            })
            .context("cannot start a stepper's thread")?;
        self.calls.push((cpu, call));
        self.threads.push(thread);
        Ok(())
    }

    /// A CPU has come: its stepper goes on, or begins.
    pub fn come(&mut self, cpu: u32) -> Result<()> {
        if self.calls.iter().any(|(of, _)| *of == cpu) {
            self.call(cpu);
            return Ok(());
        }
        // Nobody waits for it.
        self.start_on(cpu, channel().0)
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
        let program = Callable::pinned(&self.program)?;
        if let Err(error) = run_ahead(true) {
            self.told.call_once(|| {
                say!(
                    "twheel: steppers have no real-time priority ({error}): flows expire later where CPUs are busy"
                );
            });
        }
        let mut deadline = self.turn(cpu, &program, Some(ready))?;
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
                Call::Step => deadline = self.turn(cpu, &program, None)?,
            }
        }
    }

    /// Steps until nothing more is due. Returns when to come back; `None`: when called. `ready` is told of the first
    /// call.
    fn turn(
        &self,
        cpu: u32,
        program: &Callable,
        ready: Option<&Sender<()>>,
    ) -> Result<Option<Instant>> {
        let mut calls = 0;
        let deadline = self.calls(cpu, program, &mut calls, ready);
        if calls > AHEAD {
            let _ = run_ahead(true);
        }
        deadline
    }

    fn calls(
        &self,
        cpu: u32,
        program: &Callable,
        calls: &mut u32,
        mut ready: Option<&Sender<()>>,
    ) -> Result<Option<Instant>> {
        loop {
            *calls += 1;
            if *calls == AHEAD + 1 {
                let _ = run_ahead(false);
            }
            // The kernel moves a thread whose CPU goes, and others may move it. There it would step another's wheel, which
            // harms nobody (the program works on the wheel of the CPU that it runs on), and its own would wait for ever.
            if sched_getcpu()? != cpu as usize && pin_to(cpu).is_err() {
                log::warn!("CPU {cpu} is away: its flows wait until it is back");
                return Ok(None);
            }
            let room = self.signals.room();
            let before = Instant::now();
            let result = program.step(STEP_BUDGET)?;
            let stepped = Instant::now();
            if let Some(ready) = ready.take() {
                // Not when the turn is over: nobody reads the ring before all are ready, and more may be due than it
                // holds.
                let _ = ready.send(());
            }
            if let Some(observer) = &self.observer {
                observer.stepped(stepped - before, result.now);
            }
            if result.expired > 0 || result.outcome == Outcome::RingFull as u32 {
                self.signals.fill();
            }
            match Outcome::from_raw(result.outcome) {
                Some(Outcome::Done) if sched_getcpu()? == cpu as usize => {
                    return Ok(self.deadline(stepped, &result));
                }
                Some(Outcome::Done | Outcome::Budget) => {}
                Some(Outcome::RingFull) => {
                    if !self.signals.await_room(room) {
                        // The reader is gone, which only a failure to print makes it.
                        return Ok(None);
                    }
                }
                None => bail!("the stepper gave no answer"),
            }
        }
    }

    /// When the next slot has its turn, after a step that was over at `stepped`.
    fn deadline(&self, stepped: Instant, step: &Step) -> Option<Instant> {
        if step.next == NEVER {
            return None;
        }
        let units = step
            .next
            .saturating_mul(u64::from(self.tick))
            .saturating_sub(step.now);
        // The unit of the step had begun when it was over, so that of the slot has when as many have passed. A
        // little more, since the CPU that counts units may be late; whoever comes too early comes once more.
        let wait = self
            .clock
            .duration(units)
            .saturating_add(self.clock.unit() / 16);
        stepped.checked_add(wait.min(Duration::from_secs(1 << 32)))
    }
}
