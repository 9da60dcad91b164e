//! What `twheel run` may be asked for, checked, in the units of the data plane.

use std::time::Duration;

use anyhow::Result;
use humantime::format_duration;
use twheel_common::{config::Config, flow::Timeouts, wheel::Geometry};

use crate::{
    clock::Clock,
    failure::{Failure, Kind},
};

/// Flows a table may be made for: what the kernel can number, and the memory of a large host.
pub const MAX_FLOWS: u32 = 1 << 26;
/// Stamps are 32 bits wide and compared by their distance: a quarter of the circle is safe against
/// any stall of userspace up to another quarter.
const MAX_TIMEOUT_UNITS: u64 = 1 << 30;
/// A wheel that turns once an hour is as slow as anybody wants.
const MAX_TICK: Duration = Duration::from_secs(3600);

/// Durations and sizes as a user gives them.
#[derive(Clone, Copy, Debug)]
pub struct Wanted {
    /// Precision of expiry.
    pub tick: Duration,
    /// Idle timeout of a flow.
    pub timeout: Duration,
    /// Idle timeout of a flow that is closed; `None`: the default, but not more than `timeout`.
    pub close_timeout: Option<Duration>,
    /// Capacity of the table.
    pub max_flows: u32,
}

/// conntrack's `nf_conntrack_tcp_timeout_close`.
pub const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

impl Wanted {
    /// The data plane's configuration.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`], with the value and what is allowed.
    pub fn config(&self, clock: Clock) -> Result<Config> {
        let Self {
            tick,
            timeout,
            close_timeout,
            max_flows,
        } = *self;
        if !(1..=MAX_FLOWS).contains(&max_flows) {
            return usage(format!("--max-flows {max_flows}: give 1 to {MAX_FLOWS}"));
        }
        if !(clock.unit()..=MAX_TICK).contains(&tick) {
            return usage(format!(
                "--tick {}: give {} (the resolution of this kernel's clock) to {}",
                format_duration(tick),
                format_duration(clock.unit()),
                format_duration(MAX_TICK)
            ));
        }
        let close_timeout = close_timeout.unwrap_or(CLOSE_TIMEOUT.min(timeout));
        let units = |name: &str, timeout: Duration| -> Result<u32> {
            let units = clock.timeout(timeout);
            if timeout < tick || units > MAX_TIMEOUT_UNITS {
                let longest = clock.duration(MAX_TIMEOUT_UNITS - 1).as_secs() / 86_400;
                return usage(format!(
                    "{name} {}: give {} (the tick) to {longest} days",
                    format_duration(timeout),
                    format_duration(tick),
                ));
            }
            Ok(units as u32)
        };
        Ok(Config {
            timeouts: Timeouts {
                idle: units("--timeout", timeout)?,
                close: units("--close-timeout", close_timeout)?,
            },
            tick: clock.units_ceil(tick) as u32,
            geometry: Geometry::default(),
            clock: clock.source,
            max_flows,
        })
    }
}

fn usage<T>(message: String) -> Result<T> {
    Err(Failure::new(Kind::Usage, message).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::exit_code;

    fn wanted() -> Wanted {
        Wanted {
            tick: Duration::from_millis(100),
            timeout: Duration::from_secs(60),
            close_timeout: None,
            max_flows: 1,
        }
    }

    #[test]
    fn durations_become_units() {
        let config = wanted().config(Clock::virtual_ms()).unwrap();
        assert_eq!(config.tick, 100);
        assert_eq!(
            config.timeouts,
            Timeouts {
                idle: 60_000,
                close: 10_000
            }
        );
    }

    #[test]
    fn a_close_timeout_by_default_is_no_longer_than_the_timeout() {
        let timeout = Duration::from_secs(2);
        let config = Wanted {
            timeout,
            ..wanted()
        }
        .config(Clock::virtual_ms())
        .unwrap();
        assert_eq!(config.timeouts.close, 2_000);
    }

    #[test]
    fn absurd_values_are_refused_by_name() {
        let day = Duration::from_secs(86_400);
        let zero = Duration::ZERO;
        let cases = [
            (
                "--max-flows 0:",
                Wanted {
                    max_flows: 0,
                    ..wanted()
                },
            ),
            (
                "--max-flows",
                Wanted {
                    max_flows: u32::MAX,
                    ..wanted()
                },
            ),
            (
                "--tick 0s:",
                Wanted {
                    tick: zero,
                    ..wanted()
                },
            ),
            (
                "--tick",
                Wanted {
                    tick: Duration::MAX,
                    ..wanted()
                },
            ),
            (
                "--timeout 0s:",
                Wanted {
                    timeout: zero,
                    ..wanted()
                },
            ),
            (
                "--timeout",
                Wanted {
                    timeout: day * 13,
                    ..wanted()
                },
            ),
            (
                "--timeout",
                Wanted {
                    timeout: Duration::MAX,
                    ..wanted()
                },
            ),
            (
                "--close-timeout 0s:",
                Wanted {
                    close_timeout: Some(zero),
                    ..wanted()
                },
            ),
        ];
        for (name, wanted) in cases {
            let error = wanted.config(Clock::virtual_ms()).unwrap_err();
            assert!(error.to_string().starts_with(name), "{error}");
            assert_eq!(exit_code(&error), Kind::Usage as u8);
        }
    }
}
