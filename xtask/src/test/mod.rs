//! `cargo xtask test`: runs the tests and counts them.

mod binaries;
mod jobs;
mod skips;
mod smoke;

use std::{
    collections::BTreeSet,
    fs,
    process::{Command, exit},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use self::{
    binaries::Binary,
    jobs::{Company, Ended, Job, Proof},
    skips::Skip,
};
use crate::{
    fleet_tools, fuzz, kubernetes_tools, prometheus, run, setup,
    sh::{self, say},
};

/// The packages that are built for the host.
const HOST: &str =
    "--workspace --exclude twheel-ebpf --features twheel-tests/kafka,twheel-timers/tokio";

/// What may run beside tests that measure time, measure the machine or change it, and why. An entry
/// applies to the named tests of a binary; or, if it names none, to all tests that no other entry
/// names. All other tests wait for up to a minute for what they expect, or have virtual time; they
/// keep to namespaces, pins and files of their own, and run beside one another. A test is named by
/// its module and its function.
const COMPANY: [(&str, &[&str], Company); 25] = [
    // Whether a reaper acts within 50 ms of a packet that comes back; 100,000 flows within half a
    // second; a rate.
    (
        "tests/reap",
        &[
            "comes_back::a_flow_that_comes_back_before_it_is_refused_survives",
            "comes_back::a_flow_that_comes_back_before_its_socket_is_closed_survives",
            "options::actions_keep_their_rate_and_ctrl_c_does_not_wait_for_them",
            "sockets::sockets_whose_peers_are_gone_are_closed_and_no_others",
            "many::very_many_expiries_at_once_neither_get_lost_nor_wait_for_the_reaper",
        ],
        Company::Timed,
    ),
    ("tests/reap", &[], Company::Quiet),
    // A start within half a second.
    (
        "tests/stepping",
        &["a_start_says_that_it_loads_and_is_attached_in_half_a_second"],
        Company::Timed,
    ),
    // It locks the policies of the whole machine. A start of another test would wait for that lock,
    // and this test's own start would wait for that one.
    (
        "tests/stepping",
        &["a_restart_steps_the_wheels_before_it_has_loaded"],
        Company::None,
    ),
    // Lateness to 100 ms.
    (
        "tests/concurrency",
        &["reset::a_stepper_that_sleeps_is_called_in_time"],
        Company::Timed,
    ),
    // Both CPUs must work on the same flows at the same time: a million state changes.
    ("tests/concurrency", &[], Company::None),
    // A flood from both CPUs, of which no packet may be lost before twheel sees it.
    ("tests/faults_flood", &[], Company::None),
    // A scrape within 2 ms; each flow within 250 ms; no wake-up.
    (
        "tests/metrics",
        &[
            "waiting::a_blocked_output_keeps_nobody_from_asking",
            "waiting::a_million_flows_are_no_more_to_scrape_than_none",
            "waiting::nobody_asks_and_only_the_history_is_kept",
            "numbers::the_numbers_are_those_of_what_was_reported",
        ],
        Company::Timed,
    ),
    // The share of a CPU that `top` uses, which other work would change.
    (
        "tests/top",
        &["a_million_flows_cost_little_to_watch"],
        Company::Timed,
    ),
    // Timers of milliseconds; and it traces the retransmissions of the whole machine.
    ("tests/rto", &[], Company::Timed),
    // Ends of flows are compared with conntrack's, to a few hundredths of a second.
    ("tests/conntrack", &[], Company::Timed),
    // Lateness to 100 ms; wake-ups.
    (
        "tests/namespaces",
        &[
            "an_idle_host_is_left_alone",
            "exactly_the_idle_half_expires_and_on_time",
        ],
        Company::Timed,
    ),
    // These allow 100 ms and more for scheduling, and mostly sleep.
    ("tests/namespaces", &[], Company::Quiet),
    ("tests/adversary", &[], Company::Quiet),
    // 50,000 connections, of which none may expire more than 50 ms later than a tick.
    ("tests/offload_many", &[], Company::Timed),
    // The same number, and none more than 300 ms late, while twheel is killed 50 times.
    ("tests/offload_killed", &[], Company::Timed),
    // It mostly sleeps, and allows 50 ms beyond a tick.
    ("tests/offload", &[], Company::Quiet),
    // It allows 200 ms for an expiry, and fills tables of a million flows.
    ("tests/offload_hostile", &[], Company::Quiet),
    // It mostly sleeps, and allows a second and a half for scheduling.
    ("tests/idle_command", &[], Company::Quiet),
    // These run compilers, and allow a second for an expiry.
    ("tests/offload_programs", &[], Company::Quiet),
    // It mostly sleeps, and compares states within a second.
    ("tests/interfaces", &[], Company::Quiet),
    // It allows 100 ms and the time that the machine is held up.
    ("tests/patterns", &[], Company::Quiet),
    ("tests/faults_crash", &[], Company::Quiet),
    // It holds threads for seconds.
    ("tests/faults_stall", &[], Company::Quiet),
    ("tests/top", &[], Company::Quiet),
];

/// The test binaries that take longest. They begin first, so that the others do not wait for them
/// at the end.
const LONG: [&str; 6] = [
    "fuzzer",
    "tests/faults_crash",
    "tests/clsact",
    "tests/hooks",
    "tests/data_plane",
    "tests/faults_flows",
];

/// Reads the last line of a test binary's output, if it is one: `test result: ok. 3 passed; 0
/// failed; 1 ignored; 0 measured; 2 filtered out; …`.
fn parse(line: &str) -> Option<[usize; 3]> {
    let (_, counts) = line.strip_prefix("test result: ")?.split_once(". ")?;
    let count = |what| {
        let mut counts = counts.split("; ");
        counts.find_map(|count| count.strip_suffix(what)?.trim().parse().ok())
    };
    Some([count("passed")?, count("failed")?, count("ignored")?])
}

/// Tests of faults: the parser beside another one; the test binaries of these names, and two CPUs
/// at one flow table.
const FAULTS: [&str; 2] = [
    "--package twheel-fuzz",
    "--package twheel-tests --test faults_* --test concurrency",
];
/// Tests of a soak: those, and programs that hand over their timeouts.
const SOAKED: [&str; 3] = [
    FAULTS[0],
    FAULTS[1],
    "--package twheel-tests --test offload_*",
];
/// libFuzzer's part of a soak: so many executions, however long they take.
const SOAK: [&str; 2] = ["-runs=10000000", "-max_total_time=0"];

/// Which tests to run, and for how long.
#[derive(Clone, Copy)]
pub struct Which {
    /// In release mode, and with the tests that are otherwise ignored.
    pub exhaustive: bool,
    /// Only the fault tests.
    pub faults: bool,
    /// Only the fault tests and those of handed over timeouts, and for longer.
    pub soak: bool,
}

impl Which {
    /// Whether it is what CI runs.
    fn is_all(self) -> bool {
        !self.exhaustive && !self.faults && !self.soak
    }

    /// What cargo must build for it, one command each.
    fn packages(self) -> &'static [&'static str] {
        if self.soak {
            &SOAKED
        } else if self.faults {
            &FAULTS
        } else {
            &[HOST]
        }
    }

    /// A `cargo test` command for these packages.
    fn cargo(self, built: &run::Built, packages: &str) -> Command {
        let mut cargo = sh::cargo();
        cargo.envs(built.env()).arg("test");
        cargo.args(packages.split(' '));
        cargo.args(self.exhaustive.then_some("--release"));
        cargo
    }

    /// Adds the arguments of a test binary.
    fn arguments(self, command: &mut Command, args: &[String]) {
        if self.soak {
            command.env("TWHEEL_SOAK", "1");
        }
        command.envs(self.exhaustive.then_some(("TWHEEL_EXHAUSTIVE", "1")));
        command.args(self.exhaustive.then_some("--include-ignored"));
        command.args(args);
    }

    /// The jobs of a test binary: one for each kind of company that its tests need.
    fn jobs(self, binary: &Binary, built: &run::Built, args: &[String]) -> Vec<Job> {
        let mut parts = parts(&binary.name);
        if self.soak || !args.is_empty() {
            // In a soak the loads have the machine to themselves. And with names of tests given,
            // those named here would run as well.
            let company = match self.soak {
                true => Company::None,
                false => parts[0].company,
            };
            parts = vec![Part {
                company,
                ..Part::default()
            }];
        }
        let job = |part: Part| {
            let mut command = binary.command();
            command.envs(built.env());
            self.arguments(&mut command, args);
            // One at a time, because they share the labs of their binary.
            command.args(binary.needs_root().then_some("--test-threads=1"));
            command.args(args.is_empty().then_some("--exact"));
            command.args(part.arguments());
            Job {
                name: format!("{}{}", binary.name, part.suffix),
                company: part.company,
                command,
                proof: Proof::Tests,
                is_exact: args.is_empty(),
            }
        };
        parts.into_iter().map(job).collect()
    }

    /// The job for the examples in the documentation, which only cargo can run.
    fn examples(self, built: &run::Built, args: &[String]) -> Job {
        let mut command = self.cargo(built, HOST);
        command.args(["--doc", "--no-fail-fast", "--"]);
        self.arguments(&mut command, args);
        Job {
            name: "examples".to_owned(),
            command,
            company: Company::Any,
            proof: Proof::Tests,
            is_exact: false,
        }
    }
}

/// Tests of a binary that need the same company.
#[derive(Debug, PartialEq, Eq)]
struct Part {
    /// The suffix of the binary's name.
    suffix: &'static str,
    /// Only these tests, if any are named.
    only: Vec<&'static str>,
    /// Not these tests.
    but: Vec<&'static str>,
    company: Company,
}

impl Default for Part {
    fn default() -> Self {
        Self {
            suffix: "",
            only: Vec::new(),
            but: Vec::new(),
            company: Company::Any,
        }
    }
}

impl Part {
    /// The arguments for libtest.
    fn arguments(&self) -> Vec<&'static str> {
        let mut arguments = self.only.clone();
        arguments.extend(self.but.iter().flat_map(|name| ["--skip", name]));
        arguments
    }
}

/// The parts of a binary: first those with named tests, which may have the least beside them, then
/// the rest.
fn parts(binary: &str) -> Vec<Part> {
    let of_it = || COMPANY.iter().filter(|(name, ..)| *name == binary);
    let (named, rest): (Vec<_>, Vec<_>) = of_it().partition(|(_, names, _)| !names.is_empty());
    let mut parts: Vec<_> = named
        .iter()
        .map(|(_, names, company)| Part {
            suffix: company.suffix(),
            only: names.to_vec(),
            company: *company,
            ..Part::default()
        })
        .collect();
    parts.push(Part {
        but: named
            .iter()
            .flat_map(|(_, names, _)| *names)
            .copied()
            .collect(),
        company: rest
            .first()
            .map_or(Company::Any, |(_, _, company)| *company),
        ..Part::default()
    });
    parts
}

/// The results of all tests.
#[derive(Default)]
struct Sum {
    /// Passed, failed, skipped. A test that has left something out counts only as skipped.
    total: [usize; 3],
    skips: Vec<Skip>,
    /// What did not build, failed, or did not end.
    bad: Vec<String>,
}

impl Sum {
    /// Shows the output of a job, and adds its results.
    fn add(&mut self, ended: Ended) {
        let seconds = ended.took.as_secs_f64();
        println!("\n     Running {} ({seconds:.1} s)", ended.name);
        for attempt in &ended.disturbed {
            print!("{}", attempt.stdout);
            say!(
                "what failed of {} was run again: a CPU was held up for {:?}",
                ended.name,
                attempt.held_up
            );
            self.total[0] += attempt.passed;
        }
        // The figures of a job that only had to run are of no interest.
        if ended.proven.is_none() || !ended.is_success() {
            print!("{}", ended.stdout);
            eprint!("{}", ended.stderr);
        }
        if !ended.is_success() {
            let how = match &ended.status {
                Ok(status) => format!("{}: {status}", ended.name),
                Err(error) => format!("{error:#}"),
            };
            self.bad.push(how);
        }
        if let Some(proven) = &ended.proven {
            self.total[usize::from(!ended.is_success())] += 1;
            if let Err(error) = proven {
                say!("{}: {error:#}", ended.name);
            }
            return;
        }
        let mut tests = BTreeSet::new();
        for line in ended.stdout.lines() {
            self.skips.extend(Skip::ignored(line));
            if let Some(skip) = Skip::left_out(line) {
                tests.insert(skip.test.clone());
                self.skips.push(skip);
            }
            for (sum, count) in self.total.iter_mut().zip(parse(line).unwrap_or_default()) {
                *sum += count;
            }
        }
        self.total[0] = self.total[0].saturating_sub(tests.len());
        self.total[2] += tests.len();
    }

    /// Runs libFuzzer for its part of a soak.
    fn fuzz(&mut self) {
        match fuzz::fuzz(false, &SOAK.map(str::to_owned)) {
            Ok(()) => self.total[0] += 1,
            Err(error) => {
                self.total[1] += 1;
                self.bad.push(format!("libFuzzer: {error:#}"));
            }
        }
    }

    /// In CI, a test that was skipped without permission counts as bad.
    fn bound_skips(&mut self) {
        let unknown = self.skips.iter().filter(|skip| !skip.is_allowed());
        let bad = unknown.map(|skip| {
            format!("{skip}: in CI only what xtask/src/test/skips.rs lists may be skipped")
        });
        self.bad.extend(bad);
    }

    /// Returns jobs; notes the error if they could not be made.
    fn take(&mut self, jobs: Result<Vec<Job>>) -> Vec<Job> {
        jobs.unwrap_or_else(|error| {
            self.bad.push(format!("{error:#}"));
            Vec::new()
        })
    }

    /// Prints the results. The count is the last line.
    fn close(&self, took: Duration) {
        let [passed, failed, skipped] = self.total;
        for skip in &self.skips {
            println!("skipped {skip}");
        }
        say!("The tests took {:.0} s.", took.as_secs_f64());
        // Last, so that a log whose beginning or middle is cut has the reason.
        for bad in &self.bad {
            say!("{bad}");
        }
        if failed == 0 && !self.bad.is_empty() {
            say!("Some tests did not build, came to no end, or may not be skipped in CI.");
        }
        println!("{passed} passed, {failed} failed, {skipped} skipped");
    }
}

/// Builds the test binaries, runs them, in parallel where possible, and counts.
pub fn test(which: Which, args: &[String]) -> Result<()> {
    setup::tests()?;
    let mut built = run::build_whole(None)?;
    if !which.faults && !which.soak {
        built.fleet_tools = fleet_tools::install();
        built.kubernetes_tools = kubernetes_tools::install();
        built.prometheus = prometheus::install();
    }
    let mut sum = Sum::default();
    let (mut jobs, mut programs) = (Vec::new(), Vec::new());
    say!("Building the tests; this usually takes 2 to 4 min the first time.");
    for packages in which.packages() {
        match binaries::build(&mut which.cargo(&built, packages)) {
            Ok(it) => {
                let binaries = it.binaries.iter();
                jobs.extend(binaries.flat_map(|it| which.jobs(it, &built, args)));
                programs.extend(it.programs);
            }
            Err(error) => sum.bad.push(format!("{error:#}")),
        }
    }
    if !which.faults && !which.soak {
        jobs.push(which.examples(&built, args));
    }
    // In a release build the benches would measure, for hours.
    if which.is_all() && args.is_empty() {
        jobs.extend(sum.take(smoke::lab(&programs, &built).map(|it| vec![it])));
        jobs.extend(sum.take(smoke::fuzzer().map(|it| vec![it])));
        jobs.extend(sum.take(smoke::benches(
            &programs,
            &built,
            &sh::target("bench-smoke"),
        )));
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
        "Running {} jobs of tests; {} has the output of those that run.",
        jobs.len(),
        directory.display()
    );
    let begun = Instant::now();
    jobs::run(jobs, cpus, &directory, |ended| sum.add(ended));
    if which.soak {
        sum.fuzz();
    }
    if sh::is_ci() {
        sum.bound_skips();
    }
    sum.close(begun.elapsed());
    if !sum.bad.is_empty() {
        // Not an error to print: the count must be the last line.
        exit(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::{COMPANY, Company, parse, parts};
    use crate::sh;

    #[test]
    fn each_test_of_a_binary_is_in_one_part() {
        let whole = parts("tests/bad_input");
        assert_eq!((whole.len(), whole[0].company), (1, Company::Any));
        assert!(whole[0].arguments().is_empty());
        for (binary, names, _) in COMPANY {
            let parts = parts(binary);
            let (rest, named) = parts.split_last().unwrap();
            assert_eq!(
                named.len(),
                COMPANY
                    .iter()
                    .filter(|it| it.0 == binary && !it.1.is_empty())
                    .count()
            );
            assert!(
                named
                    .iter()
                    .all(|part| part.company.at_once(2) == 1 && part.but.is_empty())
            );
            assert!(rest.only.is_empty());
            for name in names {
                assert!(
                    named.iter().any(|part| part.only.contains(name)) && rest.but.contains(name)
                );
            }
        }
    }

    #[test]
    fn each_test_that_is_named_exists() {
        for (binary, names, _) in COMPANY {
            let binary = sh::workspace().join("tests").join(binary);
            for name in names {
                let file = match name.split_once("::") {
                    Some((module, _)) => binary.join(module).with_extension("rs"),
                    None if binary.is_dir() => binary.join("main.rs"),
                    None => binary.with_extension("rs"),
                };
                let text = fs::read_to_string(&file).unwrap();
                let function = name.rsplit("::").next().unwrap_or(name);
                assert!(text.contains(&format!("\nfn {function}() ")), "{name}");
            }
        }
    }

    #[test]
    fn reads_the_result_line() {
        let line = "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 9 filtered out";
        assert_eq!(parse(line), Some([3, 1, 2]));
        assert_eq!(parse("test wheel::fires ... ok"), None);
    }
}
