//! The data plane's clock as userspace sees it: units, and their conversion to durations.

use std::{
    io,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use nix::time::{ClockId, clock_getres};
use twheel_common::config::{CLOCK_JIFFIES, CLOCK_VIRTUAL};

/// Which clock the data plane reads, and how long its unit is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Clock {
    /// As in [`twheel_common::config::Config`].
    pub source: u32,
    unit: Duration,
}

impl Clock {
    /// The clock in jiffies, the resolution of the kernel's coarse clocks.
    pub fn jiffies() -> Result<Self> {
        let resolution = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE)
            .map_err(io::Error::from)
            .context("cannot read the length of a jiffy")?;
        Ok(Self {
            source: CLOCK_JIFFIES,
            unit: Duration::from(resolution),
        })
    }

    /// Jiffies of this length, for example those of the host that wrote a file.
    pub fn of_jiffies(unit: Duration) -> Self {
        Self {
            source: CLOCK_JIFFIES,
            // A length of 0 would lead to a division by zero.
            unit: unit.max(Duration::from_nanos(1)),
        }
    }

    /// Virtual time in milliseconds, which moves only when a test moves it.
    pub fn virtual_ms() -> Self {
        Self {
            source: CLOCK_VIRTUAL,
            unit: Duration::from_millis(1),
        }
    }

    /// The length of a unit.
    pub fn unit(&self) -> Duration {
        self.unit
    }

    /// The least number of units that is not shorter than `duration`.
    pub fn units_ceil(&self, duration: Duration) -> u64 {
        let units = duration.as_nanos().div_ceil(self.unit.as_nanos());
        u64::try_from(units).unwrap_or(u64::MAX)
    }

    /// Whole units in `duration`, at most what 32 bits hold.
    pub fn units_floor(&self, duration: Duration) -> u32 {
        let units = duration.as_nanos() / self.unit.as_nanos();
        u32::try_from(units).unwrap_or(u32::MAX)
    }

    /// Units after which `duration` has certainly passed. A stamp of a clock that ticks is up to
    /// one unit old when it is read, and up to one more if a tick comes late, so two units are
    /// added. Virtual time is exact. (How much older a stamp can be beyond that:
    /// [`twheel_common::jiffies`].)
    pub fn timeout(&self, duration: Duration) -> u64 {
        let slack = match self.source {
            CLOCK_JIFFIES => 2,
            _ => 0,
        };
        self.units_ceil(duration).saturating_add(slack)
    }

    /// The length of this many units.
    pub fn duration(&self, units: u64) -> Duration {
        match u32::try_from(units) {
            // The times of flows, the frequent case: avoids a 128-bit division.
            Ok(units) => self.unit.saturating_mul(units),
            Err(_) => Duration::from_nanos_u128(self.unit.as_nanos().saturating_mul(units.into())),
        }
    }
}

/// What the wall clock shows when the data plane's clock shows a time. It follows a wall clock that
/// is set; otherwise a time of the data plane's clock is always the same time of day.
#[derive(Clone, Copy, Debug)]
pub struct Wall {
    clock: Clock,
    /// Low 32 bits of the data plane's clock, and what the wall clock showed then.
    units: u32,
    time: SystemTime,
}

impl Wall {
    /// How far the clocks may drift apart before the wall clock counts as set: two units, since
    /// either may have just moved on when it is read.
    const DRIFT: u32 = 2;

    /// The data plane's clock shows `units`, and the wall clock `time`.
    pub fn new(clock: Clock, units: u32, time: SystemTime) -> Self {
        Self { clock, units, time }
    }

    /// The clocks show this now.
    pub fn follow(&mut self, units: u32, time: SystemTime) {
        let expected = self.time(units);
        let drift = match time.duration_since(expected) {
            Ok(behind) => behind,
            Err(ahead) => ahead.duration(),
        };
        let is_set = drift > self.clock.duration(Self::DRIFT.into());
        self.units = units;
        self.time = if is_set { time } else { expected };
    }

    /// The time of day when the low 32 bits of the data plane's clock were `units`.
    pub fn time(&self, units: u32) -> SystemTime {
        let later = units.wrapping_sub(self.units) as i32;
        let between = self.clock.duration(later.unsigned_abs().into());
        let time = match later {
            0.. => self.time.checked_add(between),
            _ => self.time.checked_sub(between),
        };
        time.unwrap_or(self.time)
    }
}

#[cfg(test)]
mod tests {
    use std::time::UNIX_EPOCH;

    use super::*;

    #[test]
    fn a_time_of_day_stays_what_it_is_until_the_wall_clock_is_set() {
        let clock = Clock::of_jiffies(Duration::from_millis(4));
        let at = |millis| UNIX_EPOCH + Duration::from_millis(millis);
        let mut wall = Wall::new(clock, u32::MAX, at(10_000));
        assert_eq!(wall.time(u32::MAX), at(10_000));
        assert_eq!(wall.time(9), at(10_040), "it wraps");
        assert_eq!(wall.time(u32::MAX - 10), at(9_960));
        // The wall clock is read a little after the other one.
        wall.follow(99, at(10_407));
        assert_eq!(wall.time(9), at(10_040));
        for set in [5_000, 20_000] {
            wall.follow(100, at(set));
            assert_eq!(wall.time(100), at(set));
            assert_eq!(wall.time(101), at(set + 4));
        }
    }
}
