//! What the programs of an instance cost: nanoseconds a packet, and the share of a CPU.
//!
//! The kernel measures each run of a program only while its statistics are switched on
//! (`BPF_ENABLE_STATS`), because that takes time itself: two readings of the clock for each run of
//! any program of the host. So a [`Meter`] switches them on, and off again when it is dropped.

use std::{
    fs, io,
    os::fd::OwnedFd,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::{
    programs::ProgramInfo,
    sys::{Stats, enable_stats},
};

use crate::{
    failure::{Failure, Kind},
    pins::{HOOK_PROGRAMS, Pins},
};

/// Keeps the kernel's statistics of programs switched on until it is dropped.
pub struct Meter {
    /// `None`: they are on all the time.
    _on: Option<OwnedFd>,
}

impl Meter {
    /// Switches them on.
    ///
    /// # Errors
    ///
    /// [`Kind::Permission`]: this process lacks `CAP_SYS_ADMIN`, and they are not on all the time.
    pub fn start() -> Result<Self> {
        const ALWAYS: &str = "/proc/sys/kernel/bpf_stats_enabled";
        match enable_stats(Stats::RunTime) {
            Ok(on) => Ok(Self { _on: Some(on) }),
            Err(_) if fs::read_to_string(ALWAYS).is_ok_and(|it| it.trim() == "1") => {
                Ok(Self { _on: None })
            }
            Err(error) if error.io_error.kind() == io::ErrorKind::PermissionDenied => Err(Failure::new(
                Kind::Permission,
                "not permitted to measure programs without CAP_SYS_ADMIN: run as root, or let root \
                 set `sysctl kernel.bpf_stats_enabled=1`",
            )
            .into()),
            Err(error) => Err(error).context("cannot switch on the kernel's statistics of programs"),
        }
    }
}

/// What the programs of an instance have used so far, while the statistics were on.
#[derive(Clone, Debug)]
pub struct CostReading {
    at: Instant,
    programs: Vec<Used>,
}

#[derive(Clone, Debug)]
struct Used {
    id: u32,
    name: String,
    namespace: Option<String>,
    runs: u64,
    time: Duration,
}

/// What a program has used between two readings.
#[derive(Clone, Debug, PartialEq)]
pub struct Cost {
    /// The name of its pin, such as `twheel_xdp`.
    pub program: String,
    /// The network namespace whose packets it sees; `None`: that of the instance.
    pub namespace: Option<String>,
    /// Its runs. A program that is attached to interfaces runs once for each packet at its hook.
    pub runs: u64,
    /// The time that they took, on all CPUs together.
    pub time: Duration,
    /// The time between the readings.
    pub elapsed: Duration,
}

impl CostReading {
    /// Reads what the programs of an instance have used.
    ///
    /// # Errors
    ///
    /// The instance's pins cannot be listed or opened. A program that has just been removed is left
    /// out.
    pub fn new(pins: &Pins) -> Result<Self> {
        let mut programs = Vec::new();
        let at = Instant::now();
        for pinned in pins.programs()? {
            let info = match ProgramInfo::from_pin(&pinned.path) {
                Ok(info) => info,
                Err(_) if !pinned.path.exists() => continue,
                Err(error) => {
                    let context = || format!("cannot open {}", pinned.path.display());
                    return Err(error).with_context(context);
                }
            };
            programs.push(Used {
                id: info.id(),
                name: pinned.name,
                namespace: pinned.namespace,
                runs: info.run_count(),
                time: info.run_time(),
            });
        }
        Ok(Self { at, programs })
    }

    /// What each program has used since it was loaded, while the statistics were on: its name, its
    /// network namespace if that is not the instance's, its runs, and their time.
    pub fn programs(&self) -> impl Iterator<Item = (&str, Option<&str>, u64, Duration)> {
        let programs = self.programs.iter();
        programs.map(|it| (&*it.name, it.namespace.as_deref(), it.runs, it.time))
    }

    /// What each program has used since an earlier reading. A program that was loaded in between
    /// has no earlier reading, and is left out.
    pub fn since(&self, earlier: &Self) -> Vec<Cost> {
        let elapsed = self.at - earlier.at;
        let used = self.programs.iter().filter_map(|now| {
            let before = earlier.programs.iter().find(|it| it.id == now.id)?;
            Some(Cost {
                program: now.name.clone(),
                namespace: now.namespace.clone(),
                runs: now.runs.saturating_sub(before.runs),
                time: now.time.saturating_sub(before.time),
                elapsed,
            })
        });
        used.collect()
    }
}

impl Cost {
    /// The sum of several programs, under a name of its own.
    pub fn sum<'a>(name: &str, costs: impl IntoIterator<Item = &'a Self>) -> Self {
        let none = Self {
            program: name.to_owned(),
            namespace: None,
            runs: 0,
            time: Duration::ZERO,
            elapsed: Duration::ZERO,
        };
        costs.into_iter().fold(none, |sum, cost| Self {
            runs: sum.runs + cost.runs,
            time: sum.time + cost.time,
            elapsed: sum.elapsed.max(cost.elapsed),
            ..sum
        })
    }

    /// Whether the program is attached to interfaces, so that each run is for a packet. Others are
    /// run by userspace.
    pub fn is_for_packets(&self) -> bool {
        HOOK_PROGRAMS.contains(&self.program.as_str())
    }

    /// Nanoseconds a run; `None` if it did not run.
    pub fn nanos_a_run(&self) -> Option<f64> {
        (self.runs > 0).then(|| self.time.as_nanos() as f64 / self.runs as f64)
    }

    /// Runs a second.
    pub fn runs_a_second(&self) -> f64 {
        self.runs as f64 / self.elapsed.as_secs_f64().max(f64::EPSILON)
    }

    /// Its share of the time of one CPU: 1.0 is all the time of one CPU. Programs run on all CPUs,
    /// so it may be more.
    pub fn cpu_share(&self) -> f64 {
        self.time.as_secs_f64() / self.elapsed.as_secs_f64().max(f64::EPSILON)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(id: u32, runs: u64, nanos: u64) -> Used {
        Used {
            id,
            name: "twheel_xdp".to_owned(),
            namespace: None,
            runs,
            time: Duration::from_nanos(nanos),
        }
    }

    #[test]
    fn a_cost_is_the_difference_of_two_readings_of_one_program() {
        let begun = Instant::now();
        let before = CostReading {
            at: begun,
            programs: vec![used(1, 100, 5_000), used(2, 7, 70)],
        };
        let after = CostReading {
            at: begun + Duration::from_secs(2),
            programs: vec![used(1, 300, 45_000), used(3, 9, 90)],
        };
        let costs = after.since(&before);
        assert_eq!(costs.len(), 1, "{costs:?}");
        assert_eq!(costs[0].nanos_a_run(), Some(200.0));
        assert!((costs[0].runs_a_second() - 100.0).abs() < 1e-9);
        assert!((costs[0].cpu_share() - 20e-6).abs() < 1e-12);
        let sum = Cost::sum("packets", [&costs[0], &costs[0]]);
        assert_eq!((sum.runs, sum.nanos_a_run()), (400, Some(200.0)));
        assert!((sum.cpu_share() - 40e-6).abs() < 1e-12);
        let idle = Cost::sum("none", []);
        assert_eq!(idle.nanos_a_run(), None);
        assert!(idle.cpu_share() == 0.0 && idle.runs_a_second() == 0.0);
    }
}
