//! The steppers: one thread per CPU, which sleeps until the next slot of that CPU's wheel is due.
//!
//! The thread pinned to CPU *i* runs the stepper program there, so that nothing else that touches
//! that wheel can run at the same time. After a step it knows when the next slot is due. It sleeps
//! until then, or until it is called: by the packet path, for a new flow that is due earlier, or to
//! stop. An idle host has no wake-ups.
//!
//! If packets take all of a CPU's time, a stepper would have to wait for its turn like any thread,
//! and flows would expire late. So a stepper has a real-time priority while it has little to do.

use std::{
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
use crate::{call::Callable, clock::Clock, data_plane::STEP_BUDGET, pins::Pins, ring::Signals};

/// Calls per turn that a stepper makes with real-time priority: 8,192 timer visits, a few
/// milliseconds. If more is due, it continues with normal priority.
const AHEAD: u32 = 32;

/// Observes what the steppers do.
pub trait Observer: Send + Sync {
    /// A call has returned: how long it took, and the data plane's clock, in units.
    fn stepped(&self, took: Duration, now: u64);
    /// A stepper has ended with an error.
    fn failed(&self);
}

/// A message to a stepper.
enum Call {
    /// Step the wheel now.
    Step,
    /// End the thread.
    Stop,
}

/// All steppers.
pub struct Steppers {
    calls: Vec<(u32, Sender<Call>)>,
    threads: Vec<JoinHandle<Result<()>>>,
    shared: Arc<Shared>,
}

/// What all stepper threads share.
struct Shared {
    /// Where the stepper program is pinned, as `twheel_step`.
    pins: Pins,
    clock: Clock,
    /// Length of a tick, in clock units.
    tick: u32,
    /// If the ring's reader falls behind, the steppers wait for it, and the wheels stop ending
    /// flows. So no event is lost, and no queue grows.
    signals: Arc<Signals>,
    observer: Option<Arc<dyn Observer>>,
    /// A stepper has ended with an error.
    failed: tokio::sync::Notify,
    /// The warning that steppers have no real-time priority was logged.
    told: Once,
}

impl Steppers {
    /// Starts a stepper on every CPU that is online, and waits until each has stepped once. From
    /// then on the packet path calls a stepper for what is due.
    pub fn start(
        pins: Pins,
        clock: Clock,
        tick: u32,
        signals: Arc<Signals>,
        observer: Option<Arc<dyn Observer>>,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            pins,
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
            // A stepper ended before it was ready: return its error.
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

    /// A CPU came online: wakes its stepper, or starts one.
    pub fn come(&mut self, cpu: u32) -> Result<()> {
        if self.calls.iter().any(|(of, _)| *of == cpu) {
            self.call(cpu);
            return Ok(());
        }
        // Nobody waits until this one is ready.
        self.start_on(cpu, channel().0)
    }

    /// Calls the stepper of a CPU.
    pub fn call(&self, cpu: u32) {
        for (_, call) in self.calls.iter().filter(|(of, _)| *of == cpu) {
            // If the send fails, the stepper ended with an error, which `stop` reports.
            let _ = call.send(Call::Step);
        }
    }

    /// Waits until a stepper has ended with an error, which [`Steppers::stop`] returns.
    pub async fn failed(&self) {
        self.shared.failed.notified().await;
    }

    /// Ends all steppers. Returns the first error of any.
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
        let program = self.pins.callable("twheel_step")?;
        if let Err(error) = run_ahead(true) {
            self.told.call_once(|| {
                say!(
                    "twheel: steppers have no real-time priority ({error}): flows expire later \
                     where CPUs are busy"
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

    /// Steps until nothing more is due. Returns when the next slot is due; `None`: sleep until
    /// called. `ready` gets a message after the first call.
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
            // The kernel moves a thread off a CPU that goes offline, and other processes may move
            // it. On another CPU the thread would step that CPU's wheel, which is harmless (the
            // program works on the wheel of the CPU that it runs on), but its own wheel would wait
            // for ever.
            if sched_getcpu()? != cpu as usize && pin_to(cpu).is_err() {
                log::warn!("CPU {cpu} is not available to its stepper: its flows wait until it is");
                return Ok(None);
            }
            let room = self.signals.room();
            let before = Instant::now();
            let result = program.step(STEP_BUDGET)?;
            let stepped = Instant::now();
            if let Some(ready) = ready.take() {
                // Not only when the turn is over: nobody reads the ring before all steppers are
                // ready, and more events may be due than the ring holds.
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
                        // The reader has ended. That happens only if it could not print.
                        return Ok(None);
                    }
                }
                None => bail!("the stepper program returned no result"),
            }
        }
    }

    /// When the next slot is due, after a step that returned at `stepped`.
    fn deadline(&self, stepped: Instant, step: &Step) -> Option<Instant> {
        if step.next == NEVER {
            return None;
        }
        let units = step
            .next
            .saturating_mul(u64::from(self.tick))
            .saturating_sub(step.now);
        // At `stepped` the clock unit `step.now` had begun. So after `units` more units the slot's
        // unit has begun. A little is added, since the CPU that counts the units may be late. A
        // stepper that wakes too early steps again.
        let wait = self
            .clock
            .duration(units)
            .saturating_add(self.clock.unit() / 16);
        stepped.checked_add(wait.min(Duration::from_secs(1 << 32)))
    }
}
