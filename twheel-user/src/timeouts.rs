//! How long a flow may be idle in each state: conntrack's defaults, and `--timeout`.

use std::{
    fmt,
    fs::{self, File},
    os::unix::fs::FileExt,
    time::Duration,
};

use anyhow::{Context, Result, anyhow};
use twheel_common::{
    policy::{TIMEOUTS as COUNT, TimeoutName},
    rule::{self, Rule},
    state::State,
};

use crate::{
    clock::Clock,
    failure::{Failure, Kind},
    given::{self, written},
};

/// Their names, by the numbers of [`rule::Timeouts`].
pub const NAMES: [&str; COUNT] = TimeoutName::NAMES;

/// The sysctls of conntrack's timeouts, in the order of [`NAMES`].
const SYSCTLS: [&str; COUNT] = [
    "tcp_timeout_syn_sent",
    "tcp_timeout_syn_recv",
    "tcp_timeout_established",
    "tcp_timeout_fin_wait",
    "tcp_timeout_close_wait",
    "tcp_timeout_last_ack",
    "tcp_timeout_time_wait",
    "tcp_timeout_close",
    "tcp_timeout_unacknowledged",
    "udp_timeout",
    "udp_timeout_stream",
    "icmp_timeout",
    "tcp_timeout_max_retrans",
];

/// conntrack's timeouts in a network namespace. The files stay open, because the values may change.
pub struct Sysctls([File; COUNT]);

impl Sysctls {
    /// Opens those of this thread's network namespace.
    pub fn open() -> Result<Self> {
        let mut files = Vec::new();
        for name in SYSCTLS {
            let path = sysctl(name);
            files.push(File::open(&path).with_context(|| format!("cannot open {path}"))?);
        }
        let files = files.try_into();
        files.map(Self).map_err(|_| anyhow!("as many as there are"))
    }

    /// Reads the timeout with this number.
    pub fn timeout(&self, number: usize) -> Result<Duration> {
        let mut text = [0; 32];
        let read = self.0[number].read_at(&mut text, 0);
        let read = read.with_context(|| format!("cannot read {}", sysctl(SYSCTLS[number])))?;
        let text = String::from_utf8_lossy(&text[..read]);
        seconds(SYSCTLS[number], &text)
    }
}

fn sysctl(name: &str) -> String {
    format!("/proc/sys/net/netfilter/nf_conntrack_{name}")
}

fn seconds(name: &str, text: &str) -> Result<Duration> {
    let text = text.trim();
    let seconds = text.parse();
    let seconds =
        seconds.with_context(|| format!("{} does not contain a number: {text}", sysctl(name)))?;
    Ok(Duration::from_secs(seconds))
}

/// Timeouts as a user gives them, by the numbers of [`NAMES`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// The timeouts.
    pub of: [Duration; COUNT],
    /// Whether the user gave `unreplied`.
    unreplied: bool,
    /// The plain duration that the user gave, which limits all.
    limit: Option<Duration>,
}

impl Default for Timeouts {
    /// The defaults of `nf_conntrack_proto_tcp.c`, `_udp.c` and `_icmp.c`; `unreplied` is
    /// conntrack's `tcp_timeout_unacknowledged`.
    fn default() -> Self {
        let seconds = [
            120, 60, 432_000, 120, 60, 30, 120, 10, 300, 30, 120, 30, 300,
        ];
        Self {
            of: seconds.map(Duration::from_secs),
            unreplied: false,
            limit: None,
        }
    }
}

impl Timeouts {
    /// One timeout for all flows that are not over, and one for those that both sides have closed. If
    /// they are the same, a refusal names no state.
    pub fn new(idle: Duration, closed: Duration) -> Self {
        let mut timeouts = Self {
            of: [idle; COUNT],
            unreplied: true,
            limit: (idle == closed).then_some(idle),
        };
        for state in [State::LastAck, State::TimeWait, State::Close] {
            timeouts.of[state as usize] = closed;
        }
        timeouts
    }

    /// Reads `--timeout`: a list whose items are `NAME=DURATION`; a plain duration, which
    /// `established` gets and no timeout exceeds; or `inherit`, which stands for this host's
    /// conntrack timeouts. Later items win over earlier ones of another kind.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: an item cannot be read, or sets what an earlier one has set;
    /// [`Kind::Unsupported`] if there is nothing to inherit.
    pub fn parse(list: &str) -> Result<Self> {
        let mut timeouts = Self::default();
        let mut given = Vec::new();
        for item in list.split(',').map(str::trim) {
            let what = match item.split_once('=') {
                Some((name, _)) => name.trim(),
                None if item == "inherit" => item,
                None => "a duration for all states",
            };
            if given.contains(&what) {
                return Err(usage(format!(
                    "--timeout {list}: {what} is given twice: give it once"
                )));
            }
            given.push(what);
            match item.split_once('=') {
                Some((name, value)) => {
                    let value = duration(value.trim(), item)?;
                    timeouts.set(name.trim(), value)?;
                }
                None if item == "inherit" => timeouts = Self::inherit()?,
                None => timeouts.limit(duration(item, item)?),
            }
        }
        Ok(timeouts)
    }

    fn set(&mut self, name: &str, value: Duration) -> Result<()> {
        let Some(number) = NAMES.iter().position(|it| *it == name) else {
            return Err(usage(format!(
                "--timeout {name}: unknown name: give one of {}",
                NAMES.join(", ")
            )));
        };
        self.unreplied |= number == rule::Timeouts::UNREPLIED;
        self.of[number] = value;
        Ok(())
    }

    fn limit(&mut self, most: Duration) {
        for timeout in &mut self.of {
            *timeout = most.min(*timeout);
        }
        self.of[State::Established as usize] = most;
        self.limit = Some(most);
    }

    /// conntrack's timeouts on this host.
    fn inherit() -> Result<Self> {
        let mut timeouts = Self::default();
        for (timeout, sysctl) in timeouts.of.iter_mut().zip(SYSCTLS) {
            let path = self::sysctl(sysctl);
            let text = fs::read_to_string(&path).map_err(|error| {
                Failure::new(
                    Kind::Unsupported,
                    format!(
                        "--timeout inherit: cannot read {path} ({error}): load nf_conntrack, or \
                         name the timeouts"
                    ),
                )
            })?;
            *timeout = seconds(sysctl, &text)?;
        }
        Ok(timeouts)
    }

    /// Converts the timeouts to units of the data plane's clock. If only one direction is seen, an
    /// established flow counts as replied to.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: a timeout is out of range (the bounds are allowed).
    pub fn units(
        &self,
        clock: Clock,
        least: Duration,
        most: Duration,
        one_way: bool,
    ) -> Result<Rule> {
        let mut units = [0; rule::Timeouts::COUNT];
        for ((units, timeout), name) in units.iter_mut().zip(self.of).zip(NAMES) {
            if !(least..=most).contains(&timeout) {
                // A plain duration names no state, and so the refusal names none.
                let of = match self.limit == Some(timeout) {
                    true => String::new(),
                    false => format!("{name}="),
                };
                return Err(usage(format!(
                    "--timeout {of}{}: give {} (the tick) to {}",
                    written(timeout),
                    written(least),
                    written(most),
                )));
            }
            *units = clock.timeout(timeout) as u32;
        }
        let rule = Rule {
            timeouts: rule::Timeouts(units),
            ..Rule::default()
        };
        Ok(if one_way {
            rule.one_way(self.unreplied)
        } else {
            rule
        })
    }
}

impl fmt::Display for Timeouts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (number, (name, timeout)) in NAMES.iter().zip(self.of).enumerate() {
            let comma = if number > 0 { "," } else { "" };
            write!(f, "{comma}{name}={}", written(timeout))?;
        }
        Ok(())
    }
}

/// Reads a duration, of this item of the list.
fn duration(text: &str, item: &str) -> Result<Duration> {
    given::duration(text).map_err(|error| usage(format!("--timeout {item}: {error}")))
}

fn usage(message: String) -> anyhow::Error {
    Failure::new(Kind::Usage, message).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::exit_code;

    fn seconds(list: &str) -> [u64; COUNT] {
        Timeouts::parse(list).unwrap().of.map(|it| it.as_secs())
    }

    #[test]
    fn conntracks_are_the_defaults() {
        let defaults = Timeouts::default().of.map(|it| it.as_secs());
        assert_eq!(
            defaults,
            [
                120, 60, 432_000, 120, 60, 30, 120, 10, 300, 30, 120, 30, 300
            ]
        );
    }

    #[test]
    fn a_list_is_read_from_left_to_right() {
        assert_eq!(seconds("established=1h, syn_sent=20s")[..3], [20, 60, 3600]);
        assert_eq!(
            seconds("60s,close=2s"),
            [60, 60, 60, 60, 60, 30, 60, 2, 60, 30, 60, 30, 60]
        );
        assert_eq!(seconds("close=2s,1s")[7], 1);
        let all = Timeouts::default().to_string();
        assert_eq!(Timeouts::parse(&all).unwrap().of, Timeouts::default().of);
    }

    #[test]
    fn what_is_no_timeout_is_refused_by_name() {
        for (list, says) in [
            ("soon", "--timeout soon:"),
            ("close=", "--timeout close=: give a duration with its unit"),
            ("closed=2s", "--timeout closed: unknown name"),
            ("", "--timeout :"),
            (
                "close=1h,established=1h, close =2h",
                "--timeout close=1h,established=1h, close =2h: close is given twice",
            ),
            (
                "5m,10m",
                "--timeout 5m,10m: a duration for all states is given twice",
            ),
            (
                "inherit,inherit",
                "--timeout inherit,inherit: inherit is given twice",
            ),
        ] {
            let error = Timeouts::parse(list).unwrap_err();
            assert!(error.to_string().starts_with(says), "{error}");
            assert_eq!(exit_code(&error), Kind::Usage as u8);
        }
    }

    #[test]
    fn one_direction_is_as_good_as_two_where_it_is_all() {
        let second = Duration::from_secs(1);
        let units = |list: &str, one_way| {
            let timeouts = Timeouts::parse(list).unwrap();
            let most = Duration::from_secs(864_000);
            timeouts
                .units(Clock::virtual_ms(), second, most, one_way)
                .unwrap()
                .timeouts
                .0
        };
        assert_eq!(units("1h", false)[8], 300_000);
        assert_eq!(units("1h", false)[13], 0);
        assert_eq!(units("1h", true)[8], 3_600_000);
        assert_eq!(units("1h", true)[13], 10_000);
        assert_eq!(units("1h,unreplied=7s", true)[8], 7_000);
    }
}
