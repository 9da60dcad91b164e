//! `cargo xtask test`: runs the tests, counts them, and says where the time went.

mod busy;
mod jobs;
mod plan;
mod report;
mod skips;
mod smoke;
mod times;

use std::{fs, process::exit, thread};

use anyhow::{Context, Result, ensure};
use clap::Args;

use self::{
    jobs::{Company, Job, Proof},
    plan::Plan,
    report::{Parts, Report},
    times::Times,
};
use crate::{
    base::{Base, loom_is_touched},
    binaries::{Binary, Compiled, Selection},
    downloads, fuzz, mutants,
    run::{self, Built},
    setup,
    sh::{self, say},
    vm,
};

/// The parts in which jobs run.
const PHASES: [&str; 3] = [
    "tests beside one another",
    "tests alone",
    "tests that failed in company, alone",
];
/// The test binary with a test of each bench.
const BENCHES: &str = "bench/benches";
/// The packages whose tests run programs of others.
const WITH_PROGRAMS: [&str; 2] = ["twheel-tests", "twheel-bench"];
/// The test that runs an example of another package, too.
const WITH_EXAMPLES: &str = "offload_programs";
/// The tests that need tools which are downloaded.
const WITH_TOOLS: [&str; 7] = [
    "benches",
    "clickhouse",
    "dashboards",
    "fleet",
    "fleet_lab",
    "kafka",
    "kubernetes",
];
/// The test binaries with models, which loom checks.
const MODELS: [&str; 4] = [
    "twheel-common/inbox_model",
    "twheel-common/offload_model",
    "twheel-common/pool_model",
    "twheel-common/table_model",
];
/// The packages whose documentation has examples: with the others, cargo would build twheel once
/// more. In those `doctest = false`, which lint holds them to.
const EXAMPLES: &str =
    "--package twheel-timers --package twheel-client --features twheel-timers/tokio";
/// The tests of faults: their binaries.
const FAULTS: [&str; 3] = ["tests/faults_", "tests/concurrency", "fuzz/"];
/// libFuzzer's part of the long run: so many executions, however long they take.
const LONG_FUZZ: [&str; 2] = ["-runs=10000000", "-max_total_time=0"];

/// Which tests to run, and for how long.
#[derive(Args)]
pub struct Options {
    /// Only this integration test, such as hooks; builds what it needs and no more. May be repeated
    #[arg(long = "test", value_name = "NAME", conflicts_with = "package")]
    tests: Vec<String>,
    /// Only the tests of this package, such as twheel-common
    #[arg(long, short, value_name = "NAME")]
    package: Option<String>,
    /// Only the fault tests: floods, crashes, stalls, hostile packets
    #[arg(long, conflicts_with_all = ["tests", "package"])]
    faults: bool,
    /// The long run, of hours: larger loads, ignored tests, all benches, the release program; then,
    /// unless tests are chosen, all mutants and all kernels
    #[arg(long)]
    long: bool,
    /// With --long: no mutants and no kernels, which have commands of their own
    #[arg(long, requires = "long")]
    only_tests: bool,
    /// Beside a busy loop on each CPU
    #[arg(long)]
    busy: bool,
    /// Filter on test names, and other arguments for the test binaries
    #[arg(last = true)]
    args: Vec<String>,
}

impl Options {
    /// Whether no tests are chosen.
    fn is_all(&self) -> bool {
        self.tests.is_empty() && self.package.is_none() && !self.faults && self.args.is_empty()
    }

    fn selection(&self) -> Result<Selection> {
        Ok(if let Some(package) = &self.package {
            ensure!(
                !WITH_PROGRAMS.contains(&package.as_str()),
                "the tests of {package} run other programs: choose some with --test"
            );
            Selection::Package(package.clone())
        } else if self.faults {
            let names = ["faults_*", "concurrency", "packet"];
            Selection::Tests(names.map(str::to_owned).into())
        } else if self.tests.is_empty() || self.tests.iter().any(|it| it == WITH_EXAMPLES) {
            Selection::All
        } else {
            Selection::Tests(self.tests.clone())
        })
    }

    /// Whether the tests need the tools that are downloaded.
    fn needs_tools(&self) -> bool {
        let chosen = |name: &&str| self.tests.iter().any(|it| it == name);
        let is_any = self.tests.is_empty() && self.package.is_none() && !self.faults;
        is_any || WITH_TOOLS.iter().any(chosen)
    }

    /// Whether the tests of a binary are chosen. Others are built only for the programs beside them.
    fn has(&self, binary: &Binary) -> bool {
        if self.faults {
            FAULTS.iter().any(|it| binary.name.starts_with(it))
        } else {
            let name = binary.name.rsplit('/').next().unwrap_or_default();
            // As cargo has it, but for patterns other than a star at the end.
            let is = |chosen: &String| match chosen.strip_suffix('*') {
                Some(start) => name.starts_with(start),
                None => name == chosen,
            };
            self.tests.is_empty() || self.tests.iter().any(is)
        }
    }
}

/// Builds the tests, runs them, many at a time, and counts.
pub fn test(options: &Options) -> Result<()> {
    let mut parts = Parts::begin();
    let selection = options.selection()?;
    let missing = match selection {
        // Its tests run nothing but themselves.
        Selection::Package(_) => {
            setup::kafka()?;
            Vec::new()
        }
        _ => setup::tests()?,
    };
    let downloads = options.needs_tools().then(downloads::start);
    parts.end("set-up");
    let (mut built, mut compiled) = run::tests(&selection)?;
    if options.long {
        // Only the program: the rest of a release build would measure, for hours.
        built.twheel = run::release_whole(&["twheel"])?.twheel;
    }
    let times = Times::load();
    let mut report = Report::new(!options.is_all());
    report.miss(&missing);
    let left_out = options.left_out();
    let fuzzer =
        (options.is_all() && !left_out.fuzzer).then(|| smoke::fuzzer(options.long, &times));
    parts.end("build");
    if let Some(downloads) = downloads {
        let tools = downloads.wait();
        built.fleet_tools = tools.fleet_tools;
        built.kubernetes_tools = tools.kubernetes_tools;
        built.prometheus = tools.prometheus;
    }
    parts.end("downloads that took longer than the build");
    let is_run = |binary: &Binary| !left_out.models || !MODELS.contains(&binary.name.as_str());
    compiled.binaries.retain(is_run);
    let mut jobs = options.jobs(&built, &compiled, &times, &mut report);
    match fuzzer.transpose() {
        Ok(fuzzer) => jobs.extend(fuzzer),
        Err(error) => report.bad.push(format!("{error:#}")),
    }

    let directory = sh::target("test-output");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let loops = options.busy.then(busy::Loops::start).transpose()?;
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    say!(
        "Running {} jobs of tests; {} has the output of those that run.",
        jobs.len(),
        directory.display()
    );
    if jobs.is_empty() {
        report
            .bad
            .push("no test is chosen: is the name right?".to_owned());
    }
    let phases =
        report.watch(|report| jobs::run(jobs, cpus, &directory, |ended| report.add(ended)));
    drop(loops);
    for (phase, took) in PHASES.into_iter().zip(phases) {
        parts.add(phase, took);
    }
    if options.long {
        options.go_on(&mut report);
        parts.end("libFuzzer, mutants, kernels");
    }
    if sh::is_ci() {
        report.bound_skips();
    }
    // Of a few tests alone, or beside others, times would be of no use.
    let is_whole = options.is_all() && !options.long;
    if is_whole && !options.busy {
        times.save(report.costs());
    }
    let noted = match (is_whole, options.busy) {
        (false, _) => None,
        (true, false) => Some("test-again"),
        (true, true) => Some("test-again-busy"),
    };
    if !report.close(&parts, noted) {
        // Not an error to print: the count must be the last line.
        exit(1);
    }
    Ok(())
}

/// What a landing leaves out, because nothing that it is made of has changed.
struct LeftOut {
    /// libFuzzer.
    fuzzer: bool,
    /// The models.
    models: bool,
}

impl Options {
    /// What is left out of these tests, which is said.
    fn left_out(&self) -> LeftOut {
        if self.long || !self.is_all() {
            return LeftOut {
                fuzzer: false,
                models: false,
            };
        }
        let changed = Base::find().changed();
        let left_out = LeftOut {
            fuzzer: !fuzz::is_touched(&changed),
            models: !loom_is_touched(&changed),
        };
        for (is_left_out, what) in [
            (left_out.fuzzer, "libFuzzer"),
            (left_out.models, "the models of twheel-common"),
        ] {
            if is_left_out {
                let why = changed.why();
                say!("Leaving out {what}: nothing that it is made of has changed ({why}).");
            }
        }
        left_out
    }

    fn jobs(
        &self,
        built: &Built,
        compiled: &Compiled,
        times: &Times,
        report: &mut Report,
    ) -> Vec<Job> {
        let mut env = built.env();
        if self.long {
            env.push(("TWHEEL_LONG", "1".as_ref()));
        }
        let plan = Plan {
            env,
            args: &self.args,
            is_long: self.long,
            times,
        };
        let mut jobs = Vec::new();
        let mut add = |more: Result<Vec<Job>>| match more {
            Ok(more) => jobs.extend(more),
            Err(error) => report.bad.push(format!("{error:#}")),
        };
        for binary in compiled.binaries.iter().filter(|it| self.has(it)) {
            let wanted = (binary.name == BENCHES && self.is_all() && !self.long).then(in_turn);
            add(match wanted {
                Some(turn) => plan.jobs(binary, turn),
                None => plan.jobs(binary, <[String]>::to_vec),
            });
        }
        if self.is_all() {
            add(Ok(vec![Self::examples(times)]));
            add(smoke::lab(compiled, built, times).map(|it| vec![it]));
        }
        jobs
    }

    /// The job for the examples in the documentation, which only cargo can run.
    fn examples(times: &Times) -> Job {
        let mut command = sh::cargo();
        command.args(["test", "--doc", "--no-fail-fast"]);
        command.args(EXAMPLES.split(' '));
        Job {
            name: "examples".to_owned(),
            command,
            company: Company::Any,
            proof: Proof::Tests,
            cost: times.of("examples"),
        }
    }

    /// What the long run has after the tests.
    fn go_on(&self, report: &mut Report) {
        if self.is_all() || self.faults {
            report.add_result(
                "libFuzzer",
                fuzz::fuzz(false, &LONG_FUZZ.map(str::to_owned)),
            );
        }
        if self.is_all() && !self.only_tests {
            report.add_result("mutants", mutants::mutants(&[], false));
            report.add_result("kernels", vm::test(&vm::Options::all()));
        }
    }
}

/// Chooses the tests of the benches whose turn it is: another three with each commit. Without git, as
/// in an archive of the sources, always the same.
fn in_turn() -> impl Fn(&[String]) -> Vec<String> {
    let count = sh::output(sh::git().args(["rev-list", "--count", "HEAD"]));
    let count = count.ok().and_then(|it| it.trim().parse().ok());
    let count = count.unwrap_or_default();
    move |tests: &[String]| {
        // Not a bench.
        let (mut chosen, benches): (Vec<_>, Vec<_>) = tests
            .iter()
            .cloned()
            .partition(|it| it == "a_page_without_figures_fails");
        chosen.extend(plan::in_turn(&benches, count));
        chosen
    }
}
