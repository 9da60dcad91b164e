//! `cargo xtask test`: runs the tests and counts them.

mod binaries;
mod jobs;

use std::{
    fs,
    process::{Command, exit},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use self::{
    binaries::Binary,
    jobs::{Company, Ended, Job},
};
use crate::{
    fuzz, run, setup,
    sh::{self, say},
};

/// The packages of the host.
const HOST: &str = "--workspace --exclude twheel-ebpf";

/// What may run beside the test binaries that measure time or the machine, or change it, and why. All others wait for
/// what is to happen for as long as a minute, or have virtual time; they keep to namespaces, pins and files of their
/// own, and run beside one another.
const COMPANY: [(&str, Company); 10] = [
    // Whether a reaper is within 50 ms of a packet that comes back; 100,000 flows within half a second.
    ("tests/reap", Company::None),
    // Both CPUs must be at the same flows at the same time: a million changes of states.
    ("tests/concurrency", Company::None),
    // A flood from both CPUs, of which no packet may be lost on the way.
    ("tests/faults_flood", Company::None),
    // A scrape within 50 ms; each flow within 250 ms.
    ("tests/metrics", Company::None),
    // `top` has its share of a CPU for as long as nobody else wants it.
    ("tests/top", Company::None),
    // Milliseconds of timers; and it traces the retransmissions of the whole machine.
    ("tests/rto", Company::None),
    // Ends are compared with conntrack's to a few hundredths of a second.
    ("tests/conntrack", Company::None),
    // It holds threads, and what waits for them has its time.
    ("tests/faults_stall", Company::None),
    // These allow 100 ms and more for scheduling, and sleep most of the time.
    ("tests/namespaces", Company::Quiet),
    ("tests/faults_crash", Company::Quiet),
];

/// The test binaries that take the longest, which begin first, so that no other waits for them in the end.
const LONG: [&str; 4] = [
    "tests/faults_crash",
    "tests/clsact",
    "tests/data_plane",
    "tests/faults_flows",
];

/// Reads the line that ends the output of a test binary, if it is one:
/// `test result: ok. 3 passed; 0 failed; 1 ignored; 0 measured; 2 filtered out; …`.
fn parse(line: &str) -> Option<[usize; 3]> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |what| {
        let mut counts = counts.split("; ");
        counts.find_map(|count| count.strip_suffix(what)?.trim().parse().ok())
    };
    Some([count("passed")?, count("failed")?, count("ignored")?])
}

/// Reads the line of a test that was skipped, if it is one: its name, and the reason it gives.
fn skip(line: &str) -> Option<String> {
    let (name, reason) = line.strip_prefix("test ")?.split_once(" ... ignored")?;
    let reason = reason.strip_prefix(", ").unwrap_or("no reason given");
    Some(format!("{name}: {reason}"))
}

/// Reads what a test says that it leaves out (`twheel_tests::skipped`). With one thread libtest has begun the line.
fn left_out(line: &str) -> Option<String> {
    let (test, what) = line.split_once("skipped: ")?;
    let test = test.strip_prefix("test ").unwrap_or_default();
    let test = test.strip_suffix(" ... ").unwrap_or("a test");
    Some(format!("of {test}: {what}"))
}

/// Tests of faults: the parser beside another; the test binaries of these names, and the two CPUs at the flow table.
const FAULTS: [&str; 2] = [
    "--package twheel-fuzz",
    "--package twheel-tests --test faults_* --test concurrency",
];
/// libFuzzer's share of a soak: executions, however long they take.
const SOAK: [&str; 2] = ["-runs=10000000", "-max_total_time=0"];

/// Which tests, and how long.
#[derive(Clone, Copy)]
pub struct Which {
    /// In release mode, and those that are ignored else.
    pub exhaustive: bool,
    /// Only those of faults.
    pub faults: bool,
    /// Only those, and longer.
    pub soak: bool,
}

impl Which {
    /// What cargo is to build for it, one command each.
    fn packages(self) -> &'static [&'static str] {
        if self.faults || self.soak {
            &FAULTS
        } else {
            &[HOST]
        }
    }

    /// A `cargo test` of these packages.
    fn cargo(self, built: &run::Built, packages: &str) -> Command {
        let mut cargo = sh::cargo();
        cargo.envs(built.env()).arg("test");
        cargo.args(packages.split(' '));
        cargo.args(self.exhaustive.then_some("--release"));
        cargo
    }

    /// Completes the command of a test binary.
    fn arguments(self, command: &mut Command, args: &[String]) {
        if self.soak {
            command.env("TWHEEL_SOAK", "1");
            command.env("TWHEEL_STRESS_SECONDS", "60");
        }
        command.envs(self.exhaustive.then_some(("TWHEEL_EXHAUSTIVE", "1")));
        command.args(self.exhaustive.then_some("--include-ignored"));
        command.args(args);
    }

    /// What may run beside a test binary. In a soak nothing may: its loads are to have the machine.
    fn company(self, name: &str) -> Company {
        let known = COMPANY.iter().find(|(known, _)| *known == name);
        match self.soak {
            true => Company::None,
            false => known.map_or(Company::Any, |(_, company)| *company),
        }
    }

    /// The job of a test binary.
    fn job(self, binary: &Binary, built: &run::Built, args: &[String]) -> Job {
        let mut command = binary.command();
        command.envs(built.env());
        self.arguments(&mut command, args);
        // One at a time: they share the labs of their binary.
        command.args(binary.needs_root().then_some("--test-threads=1"));
        Job {
            company: self.company(&binary.name),
            name: binary.name.clone(),
            command,
        }
    }

    /// The job of the examples in the documentation, which cargo alone can run.
    fn examples(self, built: &run::Built, args: &[String]) -> Job {
        let mut command = self.cargo(built, HOST);
        command.args(["--doc", "--no-fail-fast", "--"]);
        self.arguments(&mut command, args);
        Job {
            name: "examples".to_owned(),
            command,
            company: Company::Any,
        }
    }
}

/// What the tests have come to.
#[derive(Default)]
struct Sum {
    /// Passed, failed, skipped.
    total: [usize; 3],
    skips: Vec<String>,
    /// What did not build, failed, or came to no end.
    bad: Vec<String>,
}

impl Sum {
    /// Shows the output of a job, and adds up.
    fn add(&mut self, ended: Ended) {
        let seconds = ended.took.as_secs_f64();
        println!("\n     Running {} ({seconds:.1} s)", ended.name);
        print!("{}", ended.stdout);
        eprint!("{}", ended.stderr);
        if !ended.is_success() {
            let how = match &ended.status {
                Ok(status) => format!("{}: {status}", ended.name),
                Err(error) => format!("{error:#}"),
            };
            self.bad.push(how);
        }
        for line in ended.stdout.lines() {
            self.skips.extend(skip(line));
            let left_out = left_out(line);
            self.total[2] += usize::from(left_out.is_some());
            self.skips.extend(left_out);
            for (sum, count) in self.total.iter_mut().zip(parse(line).unwrap_or_default()) {
                *sum += count;
            }
        }
    }

    /// Runs libFuzzer for its share of a soak.
    fn fuzz(&mut self) {
        let result = match fuzz::nightly() {
            Ok(_) => fuzz::fuzz(false, &SOAK.map(str::to_owned)),
            Err(error) => {
                self.total[2] += 1;
                self.skips.push(format!("libFuzzer: {error}"));
                return;
            }
        };
        match result {
            Ok(()) => self.total[0] += 1,
            Err(error) => {
                self.total[1] += 1;
                self.bad.push(format!("libFuzzer: {error:#}"));
            }
        }
    }

    /// Prints it. The count is the last line.
    fn close(&self, took: Duration) {
        let [passed, failed, skipped] = self.total;
        for bad in &self.bad {
            say!("{bad}");
        }
        if failed == 0 && !self.bad.is_empty() {
            say!("Some tests did not build, or did not come to an end.");
        }
        for reason in &self.skips {
            println!("skipped {reason}");
        }
        say!("The tests took {:.0} s.", took.as_secs_f64());
        println!("{passed} passed, {failed} failed, {skipped} skipped");
    }
}

/// Builds the test binaries, runs them, several at a time where they bear it, and counts.
pub fn test(which: Which, args: &[String]) -> Result<()> {
    setup::tests()?;
    let built = run::build(None)?;
    let mut sum = Sum::default();
    let mut jobs = Vec::new();
    say!("Building the tests; this usually takes 2 to 4 min the first time.");
    for packages in which.packages() {
        match binaries::build(&mut which.cargo(&built, packages)) {
            Ok(binaries) => jobs.extend(binaries.iter().map(|it| which.job(it, &built, args))),
            Err(error) => sum.bad.push(format!("{error:#}")),
        }
    }
    if !which.faults && !which.soak {
        jobs.push(which.examples(&built, args));
    }
    jobs.sort_by_key(|job| {
        LONG.iter()
            .position(|name| *name == job.name)
            .unwrap_or(LONG.len())
    });

    let directory = sh::target("test-output");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    say!(
        "Running {} test binaries; {} has the output of those that run.",
        jobs.len(),
        directory.display()
    );
    let begun = Instant::now();
    jobs::run(jobs, cpus, &directory, |ended| sum.add(ended));
    if which.soak {
        sum.fuzz();
    }
    sum.close(begun.elapsed());
    if !sum.bad.is_empty() {
        // Not an error to print: the count is the last line.
        exit(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{left_out, parse, skip};

    #[test]
    fn reads_why_a_test_is_skipped() {
        let line = "test long ... ignored, takes an hour";
        assert_eq!(skip(line).as_deref(), Some("long: takes an hour"));
        assert_eq!(skip("test wheel::fires ... ok"), None);
    }

    #[test]
    fn reads_what_a_test_leaves_out() {
        let of = |test: &str| Some(format!("of {test}: no such tool"));
        assert_eq!(left_out("test a ... skipped: no such tool"), of("a"));
        assert_eq!(left_out("skipped: no such tool"), of("a test"));
        assert_eq!(left_out("test a ... ok"), None);
    }

    #[test]
    fn reads_the_result_line() {
        let line = "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 9 filtered out";
        assert_eq!(parse(line), Some([3, 1, 2]));
        assert_eq!(parse("test wheel::fires ... ok"), None);
    }
}
