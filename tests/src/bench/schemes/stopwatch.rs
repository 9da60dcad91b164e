//! The CPU time of this thread: on a machine that others use too, the time on the wall tells more of
//! them.

use std::time::Duration;

use nix::time::{ClockId, clock_gettime};

/// Since when.
pub struct Stopwatch(Duration);

fn now() -> Duration {
    // Every Linux has it.
    clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from)
}

/// From now on.
pub fn start() -> Stopwatch {
    Stopwatch(now())
}

impl Stopwatch {
    /// CPU time since the start.
    pub fn read(&self) -> Duration {
        now().saturating_sub(self.0)
    }
}
