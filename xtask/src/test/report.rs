//! Counts the results of jobs, and says where the time went.

use std::{
    collections::BTreeSet,
    fs,
    time::{Duration, Instant},
};

use super::{
    jobs::{Attempt, Cost, Ended, Why},
    skips::Skip,
    times,
};
use crate::{
    setup::Missing,
    sh::{self, say},
};

/// How many of the longest jobs the table of times has.
const LONGEST: usize = 20;
/// A job that runs again in more than one of as many runs is a defect of its test.
const RARELY: usize = 5;

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

/// A part of a run, and how long it took.
pub struct Parts {
    parts: Vec<(&'static str, Duration)>,
    begun: Instant,
}

impl Parts {
    /// None yet; the first part begins.
    pub fn begin() -> Self {
        Self {
            parts: Vec::new(),
            begun: Instant::now(),
        }
    }

    /// A part that has just ended took so long; the next one begins.
    pub fn add(&mut self, part: &'static str, took: Duration) {
        self.parts.push((part, took));
        self.begun = Instant::now();
    }

    /// A part has ended, and the next one begins.
    pub fn end(&mut self, part: &'static str) {
        self.parts.push((part, self.begun.elapsed()));
        self.begun = Instant::now();
    }
}

/// The results of all jobs.
pub struct Report {
    /// Passed, failed, skipped. A test that has left something out counts only as skipped.
    total: [usize; 3],
    skips: Vec<Skip>,
    /// What did not build, failed, or did not end.
    pub bad: Vec<String>,
    /// What each job has cost, and whether it has passed.
    costs: Vec<(String, Cost, bool)>,
    /// The jobs that have run again, with the attempts that do not count.
    again: Vec<(String, Vec<Attempt>, bool)>,
    /// Show all of what tests print.
    is_verbose: bool,
    /// How busy the CPUs were while jobs ran, in percent.
    busy: Option<f64>,
}

impl Report {
    /// Before the first job.
    pub fn new(is_verbose: bool) -> Self {
        Self {
            total: [0; 3],
            skips: Vec::new(),
            bad: Vec::new(),
            costs: Vec::new(),
            again: Vec::new(),
            is_verbose,
            busy: None,
        }
    }

    /// Runs what runs jobs, and notes how busy the CPUs were meanwhile.
    pub fn watch<T>(&mut self, run: impl FnOnce(&mut Self) -> T) -> T {
        let before = ticks();
        let result = run(self);
        if let (Some(before), Some(after)) = (before, ticks()) {
            let [all, idle] = [0, 1].map(|at| (after[at] - before[at]) as f64);
            self.busy = Some(100.0 * (1.0 - idle / all.max(1.0)));
        }
        result
    }

    /// Shows the result of a job, and adds it.
    pub fn add(&mut self, ended: Ended) {
        let is_success = ended.is_success();
        let lacks_tool = !is_success && lacks_tool(&ended);
        let mark = match (is_success, lacks_tool) {
            (true, _) => "ok",
            (_, true) => "lacks",
            _ => "FAILED",
        };
        println!(
            "{mark:<6} {:6.1} s  {}",
            ended.cost.took.as_secs_f64(),
            ended.name
        );
        // The figures of a job that only had to run are of no interest.
        if !is_success && !lacks_tool || self.is_verbose && ended.proven.is_none() {
            print!("{}", ended.stdout);
            eprint!("{}", ended.stderr);
        }
        if !is_success && !lacks_tool {
            let how = match &ended.status {
                Ok(status) => format!("{}: {status}", ended.name),
                Err(error) => format!("{error:#}"),
            };
            self.bad.push(how);
        }
        self.costs
            .push((ended.name.clone(), ended.cost, is_success));
        if let Some(proven) = &ended.proven {
            self.total[usize::from(!is_success)] += 1;
            if let Err(error) = proven {
                say!("{}: {error:#}", ended.name);
            }
        } else {
            self.count(&ended, is_success || lacks_tool);
        }
        if !ended.before.is_empty() {
            self.again.push((ended.name, ended.before, is_success));
        }
    }

    /// Counts the tests of a job by libtest's output.
    fn count(&mut self, ended: &Ended, is_success: bool) {
        let mut left_out = BTreeSet::new();
        let mut total = [0; 3];
        for line in ended.stdout.lines() {
            self.skips.extend(Skip::ignored(line));
            if let Some(skip) = Skip::left_out(line) {
                left_out.insert(skip.test.clone());
                self.skips.push(skip);
            }
            for (sum, count) in total.iter_mut().zip(parse(line).unwrap_or_default()) {
                *sum += count;
            }
        }
        if total == [0; 3] {
            // It has died, or a filter has filtered all.
            total[1] = usize::from(!is_success);
            if is_success && left_out.is_empty() {
                self.bad.push(format!("{}: it has run no test", ended.name));
            }
        }
        if lacks_tool(ended) {
            total[1] = 0;
        }
        total[0] = total[0].saturating_sub(left_out.len());
        total[2] += left_out.len();
        for (sum, count) in self.total.iter_mut().zip(total) {
            *sum += count;
        }
    }

    /// Counts something that is no job as a test.
    pub fn add_result(&mut self, name: &str, result: anyhow::Result<()>) {
        self.total[usize::from(result.is_err())] += 1;
        if let Err(error) = result {
            self.bad.push(format!("{name}: {error:#}"));
        }
    }

    /// Says which tools could not be installed. The tests that need one say that they are skipped;
    /// in CI it counts as bad.
    pub fn miss(&mut self, missing: &[Missing]) {
        for missing in missing {
            match sh::is_ci() {
                true => self.bad.push(missing.to_string()),
                false => say!("{missing}."),
            }
        }
    }

    /// In CI, a test that was skipped without permission counts as bad.
    pub fn bound_skips(&mut self) {
        let unknown = self.skips.iter().filter(|skip| !skip.is_allowed());
        let bad = unknown.map(|skip| {
            format!("{skip}: in CI only what xtask/src/test/skips.rs lists may be skipped")
        });
        self.bad.extend(bad);
    }

    /// What jobs have cost, of those that have passed.
    pub fn costs(&self) -> impl Iterator<Item = (&str, Cost)> {
        let passed = self.costs.iter().filter(|(_, _, passed)| *passed);
        passed.map(|(name, cost, _)| (name.as_str(), *cost))
    }

    /// Prints the results. The count is the last line.
    /// `noted`: the file in which it is remembered what ran again.
    pub fn close(mut self, parts: &Parts, noted: Option<&str>) -> bool {
        for skip in &self.skips {
            println!("skipped {skip}");
        }
        self.show_times(parts);
        self.show_again(noted);
        // Last, so that a log whose beginning or middle is cut has the reason.
        for bad in &self.bad {
            say!("{bad}");
        }
        let [passed, failed, skipped] = self.total;
        if failed == 0 && !self.bad.is_empty() {
            say!("Some tests did not build, came to no end, or may not be skipped in CI.");
        }
        println!("{passed} passed, {failed} failed, {skipped} skipped");
        self.bad.is_empty()
    }

    fn show_times(&mut self, parts: &Parts) {
        println!("\nWhere the time went:");
        for (part, took) in &parts.parts {
            println!("{:8.1} s  {part}", took.as_secs_f64());
        }
        if let Some(busy) = self.busy {
            println!("The CPUs were {busy:.0} % busy during the tests.");
        }
        self.costs
            .sort_by_key(|(_, cost, _)| std::cmp::Reverse(cost.took));
        println!("The longest, with the CPUs that each kept busy:");
        for (name, cost, _) in self.costs.iter().take(LONGEST) {
            let took = cost.took.as_secs_f64();
            println!("{took:8.1} s {:4.2}  {name}", cost.cpus());
        }
    }

    fn show_again(&self, noted: Option<&str>) {
        let names: Vec<_> = self.again.iter().map(|it| it.0.as_str()).collect();
        let counts = match noted {
            Some(file) => times::note_again(file, &names),
            None => names.iter().map(|it| ((*it).to_owned(), 1, 1)).collect(),
        };
        println!("Ran again: {}", self.again.len());
        for ((name, attempts, passed), (_, count, runs)) in self.again.iter().zip(counts) {
            for attempt in attempts {
                let why = match attempt.why {
                    Why::Company => "it failed beside others".to_owned(),
                    Why::HeldUp(time) => format!("a CPU was held up for {time:?}"),
                };
                println!("{name}: {why}: {}", reason(&attempt.output));
            }
            let now = if *passed { "passed" } else { "failed" };
            let defect = match count * RARELY > runs && runs == RARELY {
                true => ": a defect of the test, to be mended",
                false => "",
            };
            println!("{name}: {now} alone; ran again in {count} of the last {runs} runs{defect}");
        }
    }
}

/// Whether the job of a test has failed because a program is not there that only some tests need.
pub fn lacks_tool(ended: &Ended) -> bool {
    let skips = ended.stdout.lines().filter_map(Skip::left_out);
    let has_run = ended.stdout.contains("running 1 test\n");
    has_run && !ended.is_success() && skips.into_iter().any(|skip| skip.is_for_tool())
}

/// Why a test has failed, in a line: what it panicked with, or its error.
fn reason(output: &str) -> &str {
    let mut lines = output.lines();
    let error = output.lines().find(|line| line.starts_with("Error: "));
    let panicked = || {
        lines.find(|line| line.contains(" panicked at "))?;
        lines.next()
    };
    error
        .or_else(panicked)
        .or_else(|| output.lines().last())
        .unwrap_or("it said nothing")
}

/// The time of all CPUs since the machine's start, and how much of it they were idle, in ticks
/// (`proc_stat(5)`).
fn ticks() -> Option<[u64; 2]> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let fields: Vec<u64> = stat
        .lines()
        .next()?
        .split_whitespace()
        .filter_map(|it| it.parse().ok())
        .collect();
    // user, nice, system, idle, iowait, irq, softirq, steal; guests are within user.
    let all = fields.iter().take(8).sum();
    Some([all, fields.get(3)? + fields.get(4)?])
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::{Report, parse, reason};
    use crate::test::jobs::{Cost, Ended};

    fn ended(code: u8, stdout: &str) -> Ended {
        let mut command = Command::new("sh");
        let status = command
            .args(["-c", &format!("exit {code}")])
            .status()
            .unwrap();
        Ended {
            name: "a".to_owned(),
            cost: Cost::default(),
            status: Ok(status),
            stdout: stdout.to_owned(),
            stderr: String::new(),
            proven: None,
            before: Vec::new(),
        }
    }

    fn total(code: u8, stdout: &str) -> ([usize; 3], usize) {
        let mut report = Report::new(false);
        report.add(ended(code, stdout));
        (report.total, report.bad.len())
    }

    #[test]
    fn reads_the_result_line() {
        let line = "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 9 filtered out";
        assert_eq!(parse(line), Some([3, 1, 2]));
        assert_eq!(parse("test wheel::fires ... ok"), None);
    }

    #[test]
    fn each_test_counts_once() {
        let line =
            |counts: &str| format!("test result: ok. {counts}; 0 measured; 9 filtered out\n");
        let passed = line("1 passed; 0 failed; 0 ignored");
        assert_eq!(total(0, &passed), ([1, 0, 0], 0));
        assert_eq!(
            total(1, &line("2 passed; 1 failed; 1 ignored")),
            ([2, 1, 1], 1)
        );
        // Something was left out: it counts as skipped.
        let skipped = format!("test b ... skipped: no such tool\n{passed}");
        assert_eq!(total(0, &skipped), ([0, 0, 1], 0));
        // It has died, before it could say how many have failed.
        assert_eq!(total(1, "running 1 test\n"), ([0, 1, 0], 1));
        // It lacks a tool, and so has failed.
        let lacking = format!(
            "running 1 test\ntest b ... \ntest b ... skipped: there is no tmux\nFAILED\n{}",
            line("0 passed; 1 failed; 0 ignored")
        );
        assert_eq!(total(1, &lacking), ([0, 0, 1], 0));
        let failed = lacking.replace("there is no tmux", "a part of it");
        assert_eq!(total(1, &failed).1, 1);
        // It has ended well, and has done nothing.
        let nothing = line("0 passed; 0 failed; 0 ignored");
        assert_eq!(total(0, &nothing), ([0, 0, 0], 1));
    }

    #[test]
    fn a_failure_is_told_in_a_line() {
        let panicked = "thread 'a' (7) panicked at tests/a.rs:7:5:\ntoo late: 60 ms\nnote: run\n";
        assert_eq!(reason(panicked), "too late: 60 ms");
        assert_eq!(reason("a\nError: no line\nb\n"), "Error: no line");
        assert_eq!(reason("a\nb\n"), "b");
        assert_eq!(reason(""), "it said nothing");
    }
}
