//! What a user may ask `twheel run` for, checked, and converted to the units of the data plane.

use std::{ops::RangeInclusive, time::Duration};

use anyhow::Result;
use twheel_common::{
    config::{CLOCK_JIFFIES, Config, Enforce, Rto},
    enforce::MAX_RATE,
    jiffies::MAX_STALL,
    packet::Protocols,
    rule::Rule,
    wheel::{Geometry, MAX_BITS, MAX_LEVELS, MIN_BITS, WheelScheme},
};

use crate::{
    clock::Clock,
    failure::{Failure, Kind},
    given::written,
    timeouts::Timeouts,
};

/// The most flows that a table may be made for: what the kernel can number, and what fits the
/// memory of a large host.
pub const MAX_FLOWS: u32 = 1 << 26;
/// How many slots a level of a wheel may have.
pub const SLOTS: RangeInclusive<u32> = 1 << MIN_BITS..=1 << MAX_BITS;
/// Stamps are 32 bits wide and compared by their distance. With timeouts up to a quarter of the
/// circle, userspace may stall for up to another quarter.
const MAX_TIMEOUT_UNITS: u64 = 1 << 30;
/// The longest tick.
const MAX_TICK: Duration = Duration::from_secs(3600);

/// Durations and sizes as a user gives them.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Precision of expiry.
    pub tick: Duration,
    /// The timeouts of flows that match no rule.
    pub timeouts: Timeouts,
    /// Whether only one direction will be seen.
    pub one_way: bool,
    /// Whether a flow must begin with a SYN.
    pub strict: bool,
    /// Whether answers may come in through the interface that the first packet came in through.
    pub one_armed: bool,
    /// The protocols to track.
    pub protocols: Protocols,
    /// Whether packets and bytes are counted.
    pub accounting: bool,
    /// Whether the beginnings of flows are reported.
    pub begins: bool,
    /// After how long a live flow is reported; `None`: never.
    pub active_timeout: Option<Duration>,
    /// Whether retransmission timers run.
    pub rto: bool,
    /// Minimum added to the RTT to form the retransmission timeout.
    pub rto_min: Duration,
    /// Maximum of the retransmission timeout.
    pub rto_max: Duration,
    /// Number of expiries in a row after which a flow is stalled.
    pub max_retrans: u32,
    /// Whether packets of expired flows are answered instead of passed.
    pub enforce: bool,
    /// Whether packets of an expired flow are refused for a moment, while its socket is closed.
    pub hold: bool,
    /// Maximum number of answers to a source per second; up to [`MAX_RATE`].
    pub enforce_rate: u32,
    /// Whether over-quota sources make room for others in a full table.
    pub share: bool,
    /// Whether VLAN tags are part of a flow's key.
    pub vlans: bool,
    /// Whether programs can hand over timeouts for their connections.
    pub offload: bool,
    /// Capacity of the table.
    pub max_flows: u32,
    /// The timer scheme.
    pub scheme: WheelScheme,
    /// Slots per level, rounded up to a power of two; `None`: chosen to suit the scheme.
    pub slots: Option<u32>,
    /// Number of levels; `None`: chosen to suit the scheme.
    pub levels: Option<u32>,
}

impl Default for Settings {
    /// The defaults of `twheel run`.
    fn default() -> Self {
        Self {
            tick: Duration::from_millis(100),
            timeouts: Timeouts::default(),
            one_way: false,
            strict: false,
            one_armed: false,
            protocols: Protocols::TCP,
            accounting: false,
            begins: false,
            active_timeout: None,
            rto: false,
            rto_min: Duration::from_millis(200),
            rto_max: Duration::from_secs(120),
            max_retrans: 3,
            enforce: false,
            hold: false,
            enforce_rate: 10,
            share: false,
            vlans: true,
            offload: false,
            max_flows: 131_072,
            scheme: WheelScheme::Hierarchical,
            slots: None,
            levels: None,
        }
    }
}

impl Settings {
    /// The data plane's configuration, and the timeouts of flows that match no rule.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: a value is not allowed; the message says what is.
    pub fn config(&self, clock: Clock) -> Result<(Config, Rule)> {
        let Self {
            tick, max_flows, ..
        } = *self;
        if !(1..=MAX_FLOWS).contains(&max_flows) {
            return usage(format!("--max-flows {max_flows}: give 1 to {MAX_FLOWS}"));
        }
        if !(clock.unit()..=MAX_TICK).contains(&tick) {
            return usage(format!(
                "--tick {}: give {} (the resolution of this kernel's clock) to {}",
                written(tick),
                written(clock.unit()),
                written(MAX_TICK)
            ));
        }
        // Of two options that conflict, name the one that the user gave.
        let shortest = self.timeouts.of.into_iter().min().unwrap_or_default();
        if shortest < tick && shortest >= clock.unit() && tick != Self::default().tick {
            return usage(format!(
                "--tick {}: give {} (the resolution of this kernel's clock) to {} (the shortest \
                 timeout)",
                written(tick),
                written(clock.unit()),
                written(shortest)
            ));
        }
        let rto = self.retransmission(clock)?;
        let rule = self
            .timeouts
            .units(clock, tick, longest_timeout(clock), self.one_way)?;
        let tick = clock.units_ceil(tick) as u32;
        let active_timeout = match self.active_timeout {
            None => 0,
            Some(timeout) => active_timeout(timeout, self.tick, clock)?,
        };
        let longest = rule.timeouts.longest();
        let config = Config {
            tick,
            // A deadline may lie anywhere within a tick, so the wheel must reach one tick beyond
            // the timeout.
            geometry: self.geometry(clock, tick, u64::from(longest.div_ceil(tick)) + 1)?,
            clock: clock.source,
            max_flows,
            one_way: self.one_way.into(),
            strict: self.strict.into(),
            one_armed: self.one_armed.into(),
            max_stall: match clock.source {
                CLOCK_JIFFIES => MAX_STALL,
                _ => 0,
            },
            protocols: self.protocols.0,
            accounting: self.accounting.into(),
            begins: self.begins.into(),
            active_timeout,
            rto,
            enforce: match (self.enforce, self.hold) {
                (true, _) => Enforce::FOR_GOOD,
                (false, true) => Enforce::FOR_A_MOMENT,
                (false, false) => Enforce::NEVER,
            },
            enforce_rate: self.enforce_rate.min(MAX_RATE),
            quota: self.share.into(),
            live: 0,
            vlans: self.vlans.into(),
            watched: 0,
            offload: self.offload.into(),
            details: 0,
            two_seconds: clock.units_ceil(Duration::from_secs(2)) as u32,
        };
        Ok((config, rule))
    }
}

impl Settings {
    fn retransmission(&self, clock: Clock) -> Result<Rto> {
        const MAX: Duration = Duration::from_secs(600);
        let (min, max) = (self.rto_min, self.rto_max);
        if !(clock.unit()..=MAX).contains(&max) || !(clock.unit()..=max).contains(&min) {
            return usage(format!(
                "--rto-min {} --rto-max {}: give {} (the resolution of this kernel's clock) to {}, \
                 the smaller first",
                written(min),
                written(max),
                written(clock.unit()),
                written(MAX)
            ));
        }
        if !(1..=255).contains(&self.max_retrans) {
            return usage(format!("--max-retrans {}: give 1 to 255", self.max_retrans));
        }
        Ok(Rto {
            on: self.rto.into(),
            min: min.as_micros() as u32,
            max: max.as_micros() as u32,
            max_retrans: self.max_retrans,
            unit: clock.unit().as_micros() as u32,
        })
    }
}

/// An active timeout in units, rounded up.
fn active_timeout(timeout: Duration, tick: Duration, clock: Clock) -> Result<u32> {
    let longest = longest_timeout(clock);
    if !(tick..=longest).contains(&timeout) {
        return usage(format!(
            "--active-timeout {}: give {} (a tick of the wheel) to {}",
            written(timeout),
            written(tick),
            written(longest)
        ));
    }
    Ok(clock.units_ceil(timeout) as u32)
}

/// The longest timeout that the clock can measure, in whole days.
pub fn longest_timeout(clock: Clock) -> Duration {
    whole_days(clock.duration(MAX_TIMEOUT_UNITS - 1))
}

/// Rounded down to days.
fn whole_days(duration: Duration) -> Duration {
    const DAY: u64 = 86_400;
    Duration::from_secs(duration.as_secs() / DAY * DAY)
}

impl Settings {
    /// The shape of a wheel that must distinguish timers due up to `reach` ticks ahead.
    fn geometry(&self, clock: Clock, tick: u32, reach: u64) -> Result<Geometry> {
        if let Some(slots) = self.slots
            && !SLOTS.contains(&slots)
        {
            return usage(format!(
                "--slots {slots}: give {} to {}",
                SLOTS.start(),
                SLOTS.end()
            ));
        }
        let levels = match self.scheme {
            WheelScheme::Simple | WheelScheme::Hashed => 1..=1,
            WheelScheme::Hierarchical => 1..=MAX_LEVELS as u32,
        };
        if let Some(given) = self.levels
            && !levels.contains(&given)
        {
            let has = match (*levels.start(), *levels.end()) {
                (1, 1) => "1".to_owned(),
                (least, most) => format!("{least} to {most}"),
            };
            return usage(format!(
                "--levels {given}: give {has}, as many as a {} wheel has",
                self.scheme.name()
            ));
        }
        let bits = |slots: u32| slots.next_power_of_two().ilog2();
        Ok(match self.scheme {
            WheelScheme::Hierarchical => {
                let bits = bits(self.slots.unwrap_or(1024));
                let most = most_levels(bits, tick);
                let levels = self.levels.unwrap_or(most.min(3));
                if levels > most {
                    let reach = Geometry::hierarchical(levels - 1, bits).range();
                    return usage(format!(
                        "--levels {levels}: {} levels of {} slots of {} already reach {} ahead, \
                         and the clock only {}: give 1 to {most}",
                        levels - 1,
                        1 << bits,
                        written(clock.duration(tick.into())),
                        written(whole_days(clock.duration(reach * u64::from(tick)))),
                        written(whole_days(clock.duration(MAX_TIMEOUT_UNITS))),
                    ));
                }
                Geometry::hierarchical(levels, bits)
            }
            WheelScheme::Hashed => Geometry::hashed(bits(self.slots.unwrap_or(1024))),
            WheelScheme::Simple => {
                // A flow cannot be put into the slot that the hand is on, so one more is needed.
                let least = reach.saturating_add(1).min(u64::from(*SLOTS.end())) as u32;
                let geometry = Geometry::simple(bits(self.slots.unwrap_or(least.max(1024))));
                if geometry.range() < reach {
                    let range = (geometry.range() - 1) * u64::from(tick);
                    return usage(format!(
                        "--scheme simple: {} slots of {} reach {} ahead, but they must reach as \
                         far as the longest timeout: give a longer --tick, more --slots (up to \
                         {}), or another --scheme",
                        geometry.slots(),
                        written(clock.duration(tick.into())),
                        written(clock.duration(range)),
                        SLOTS.end(),
                    ));
                }
                geometry
            }
        })
    }
}

/// How many levels of this many slots there can be before the highest exceeds what the clock can
/// measure.
pub fn most_levels(bits: u32, tick: u32) -> u32 {
    let reaches = |levels: &u32| {
        u128::from(Geometry::hierarchical(*levels, bits).range()) * u128::from(tick)
            < u128::from(MAX_TIMEOUT_UNITS)
    };
    1 + (1..MAX_LEVELS as u32).take_while(reaches).count() as u32
}

fn usage<T>(message: String) -> Result<T> {
    Err(Failure::new(Kind::Usage, message).into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::exit_code;

    fn wanted() -> Settings {
        Settings {
            max_flows: 1,
            ..Settings::default()
        }
    }

    fn timeouts(list: &str) -> Timeouts {
        Timeouts::parse(list).unwrap()
    }

    #[test]
    fn durations_become_units() {
        let (config, rule) = wanted().config(Clock::virtual_ms()).unwrap();
        assert_eq!(config.tick, 100);
        assert_eq!(
            rule.timeouts.0[..8],
            [
                120_000,
                60_000,
                432_000_000,
                120_000,
                60_000,
                30_000,
                120_000,
                10_000
            ]
        );
    }

    #[test]
    fn levels_by_default_follow_the_tick() {
        let (config, _) = Settings {
            tick: Duration::from_secs(3_600),
            timeouts: Timeouts::new(Duration::from_secs(86_400), Duration::from_secs(86_400)),
            ..wanted()
        }
        .config(Clock::virtual_ms())
        .unwrap();
        assert_eq!(config.geometry, Geometry::hierarchical(1, 10));
    }

    #[test]
    fn each_scheme_has_a_geometry() {
        let geometry = |wanted: Settings| wanted.config(Clock::virtual_ms()).unwrap().0.geometry;
        assert_eq!(geometry(wanted()), Geometry::hierarchical(3, 10));
        let hashed = Settings {
            scheme: WheelScheme::Hashed,
            slots: Some(500),
            ..wanted()
        };
        assert_eq!(geometry(hashed), Geometry::hashed(9));
        // 60 s are 600 ticks; if they end in the middle of a tick, 601.
        let simple = Settings {
            scheme: WheelScheme::Simple,
            slots: Some(601),
            timeouts: timeouts("60s"),
            ..wanted()
        };
        assert_eq!(geometry(simple), Geometry::simple(10));
        let longer = Settings {
            timeouts: timeouts("300s"),
            slots: None,
            ..simple
        };
        assert_eq!(geometry(longer), Geometry::simple(12));
    }

    #[test]
    fn a_simple_wheel_says_how_far_it_reaches() {
        let simple = |timeout_ms| Settings {
            scheme: WheelScheme::Simple,
            slots: Some(512),
            timeouts: Timeouts::new(Duration::from_millis(timeout_ms), Duration::from_secs(1)),
            ..wanted()
        };
        // A timeout of 510 ticks: with a deadline in the middle of a tick it needs 511 slots ahead.
        assert!(simple(51_000).config(Clock::virtual_ms()).is_ok());
        let error = simple(51_001).config(Clock::virtual_ms()).unwrap_err();
        assert!(error.to_string().contains("reach 51s ahead"), "{error}");
        assert_eq!(exit_code(&error), Kind::Usage as u8);
    }

    #[test]
    fn absurd_values_are_refused_by_name() {
        let day = Duration::from_secs(86_400);
        let zero = Duration::ZERO;
        let cases = [
            (
                "--max-flows 0:",
                Settings {
                    max_flows: 0,
                    ..wanted()
                },
            ),
            (
                "--max-flows",
                Settings {
                    max_flows: u32::MAX,
                    ..wanted()
                },
            ),
            (
                "--tick 0s:",
                Settings {
                    tick: zero,
                    ..wanted()
                },
            ),
            (
                "--tick",
                Settings {
                    tick: Duration::MAX,
                    ..wanted()
                },
            ),
            (
                "--timeout 0s:",
                Settings {
                    timeouts: Timeouts::new(zero, zero),
                    ..wanted()
                },
            ),
            (
                "--timeout",
                Settings {
                    timeouts: Timeouts::new(day * 13, day),
                    ..wanted()
                },
            ),
            (
                "--timeout",
                Settings {
                    timeouts: Timeouts::new(Duration::MAX, day),
                    ..wanted()
                },
            ),
            (
                "--slots 0:",
                Settings {
                    slots: Some(0),
                    ..wanted()
                },
            ),
            (
                "--slots 8192:",
                Settings {
                    slots: Some(8192),
                    ..wanted()
                },
            ),
            (
                "--levels 0:",
                Settings {
                    levels: Some(0),
                    ..wanted()
                },
            ),
            (
                "--levels 5:",
                Settings {
                    levels: Some(5),
                    ..wanted()
                },
            ),
            (
                "--levels 2: give 1, as many as a hashed wheel has",
                Settings {
                    levels: Some(2),
                    scheme: WheelScheme::Hashed,
                    ..wanted()
                },
            ),
            (
                "--levels 4: 3 levels of 4096 slots of 100ms already reach 79517d ahead, and \
                 the clock only 12d: give 1 to 2",
                Settings {
                    levels: Some(4),
                    slots: Some(4096),
                    ..wanted()
                },
            ),
            (
                "--tick 61s: give 1ms (the resolution of this kernel's clock) to 10s (the \
                 shortest timeout)",
                Settings {
                    tick: Duration::from_secs(61),
                    ..wanted()
                },
            ),
            (
                "--timeout close=99ms: give 100ms (the tick) to 12d",
                Settings {
                    timeouts: timeouts("close=99ms"),
                    ..wanted()
                },
            ),
            (
                "--levels 3: give 1, as many as a simple wheel has",
                Settings {
                    levels: Some(3),
                    scheme: WheelScheme::Simple,
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
