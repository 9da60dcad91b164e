//! Ticks of tokio's clock.

use std::time::Duration;

use tokio::time::Instant;

use crate::{error::Error, scheme::LAST_TICK};

/// A clock that began at some instant and has ticks of some length. Ticks are absolute, `begin +
/// k·tick`, so that delays of those who wait for them do not add up.
#[derive(Clone, Copy, Debug)]
pub struct Clock {
    begin: Instant,
    /// In nanoseconds.
    tick: u64,
}

impl Clock {
    /// A clock that begins now.
    pub fn new(tick: Duration) -> Result<Self, Error> {
        let nanos = u64::try_from(tick.as_nanos()).unwrap_or(0);
        Ok(Self {
            begin: Instant::now(),
            tick: Error::check("the tick in nanoseconds", nanos, 1, u64::MAX)?,
        })
    }

    /// The length of a tick.
    pub fn tick(&self) -> Duration {
        Duration::from_nanos(self.tick)
    }

    /// Ticks that have passed.
    pub fn now(&self) -> u64 {
        self.floor(self.begin.elapsed())
    }

    /// The last tick that begins at or before `after`, counted from the beginning.
    fn floor(&self, after: Duration) -> u64 {
        match u64::try_from(after.as_nanos()) {
            Ok(nanos) => nanos / self.tick,
            Err(_) => LAST_TICK,
        }
    }

    /// The first tick that begins at or after an instant: nothing is early.
    pub fn tick_of(&self, instant: Instant) -> u64 {
        self.ceil(instant.saturating_duration_since(self.begin))
    }

    fn ceil(&self, after: Duration) -> u64 {
        match u64::try_from(after.as_nanos()) {
            Ok(nanos) => nanos.div_ceil(self.tick),
            Err(_) => LAST_TICK,
        }
    }

    /// The present tick, and the ticks from it to the first that begins after `interval`: never
    /// early.
    pub fn interval(&self, interval: Duration) -> (u64, u64) {
        let elapsed = self.begin.elapsed();
        let now = self.floor(elapsed);
        (now, self.ceil(elapsed.saturating_add(interval)) - now)
    }

    /// When a tick begins. `None` if that is out of the clock's range.
    pub fn instant(&self, tick: u64) -> Option<Instant> {
        let after = Duration::from_nanos(self.tick.checked_mul(tick)?);
        self.begin.checked_add(after)
    }
}
