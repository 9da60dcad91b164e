//! The wheels of an earlier run are stepped while this one loads: with that run's program, which is
//! pinned. So a restart leaves them alone for as long as a process takes to start, and not for as
//! long as the kernel takes to verify programs.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use anyhow::Result;
use aya::util::online_cpus;

use super::Setup;
use crate::{
    call::Callable,
    cpu::pin_to,
    data_plane::{STEP_BUDGET, check_adoptable},
    pins::Instance,
};

/// What steps the wheels until it is dropped.
pub struct Meanwhile {
    ends: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Meanwhile {
    /// Begins, if this run will adopt what the instance has.
    ///
    /// Events wait in the ring until the run reads it. If that is full, flows wait, too.
    pub fn start(instance: &Instance, setup: &Setup) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let mut threads = Vec::new();
        let (config, clock) = (&setup.config.0, setup.clock);
        let is_pinned = instance.object("twheel_step").exists();
        if is_pinned && check_adoptable(&instance.pins(), config, clock).is_ok() {
            let tick = clock.duration(config.tick.into());
            for cpu in online_cpus().unwrap_or_default() {
                let (ends, pins) = (ends.clone(), instance.pins());
                threads.push(thread::spawn(move || {
                    let stepped = pins
                        .callable("twheel_step")
                        .and_then(|program| step(cpu, &program, tick, &ends));
                    if let Err(error) = stepped {
                        log::debug!("CPU {cpu} is not stepped while the programs load: {error:#}");
                    }
                }));
            }
        }
        Self { ends, threads }
    }
}

/// Steps a CPU's wheel each tick.
fn step(cpu: u32, program: &Callable, tick: Duration, ends: &AtomicBool) -> Result<()> {
    pin_to(cpu)?;
    while !ends.load(Ordering::Relaxed) {
        program.step(STEP_BUDGET)?;
        thread::park_timeout(tick);
    }
    Ok(())
}

impl Drop for Meanwhile {
    fn drop(&mut self) {
        self.ends.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            thread.thread().unpark();
            // It returns nothing, and its errors were logged.
            let _ = thread.join();
        }
    }
}
