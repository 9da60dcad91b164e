//! Measures the CPU time of this thread. On a shared machine, wall-clock time would mostly show the
//! load of others.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// The CPU time at the start.
pub struct Stopwatch(Duration);

fn now() -> Duration {
    // Every Linux has this clock.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// Starts a stopwatch.
pub fn start() -> Stopwatch {
    Stopwatch(now())
}

impl Stopwatch {
    /// CPU time since the start.
    pub fn read(&self) -> Duration {
        now().saturating_sub(self.0)
    }
}
