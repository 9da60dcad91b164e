//! `cargo xtask test`: runs the tests and counts them.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio, exit},
};

use anyhow::{Context, Result};

use crate::{
    fuzz, run, setup,
    sh::{self, say},
};

const HOST: &str = "--workspace --exclude twheel-ebpf --exclude twheel-tests";
const ROOT: &str = "--package twheel-tests";

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
const PARSER: &str = "--package twheel-fuzz";
const FAULTS: &str = "--package twheel-tests --test faults_* --test concurrency";
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

/// Runs the tests of the host crates, then those that need root, whatever became of the former.
pub fn test(which: Which, args: &[String]) -> Result<()> {
    let Which {
        exhaustive, soak, ..
    } = which;
    let faults = which.faults || soak;
    setup::tests()?;
    let built = run::build(None)?;
    let mut total = [0; 3];
    let mut skips = Vec::new();
    let mut ended_well = true;
    let (host, root) = if faults {
        (PARSER, FAULTS)
    } else {
        (HOST, ROOT)
    };
    for (packages, flags) in [
        (host, None),
        // One at a time: these measure time, and share the kernel.
        (root, Some("--test-threads=1")),
    ] {
        let mut cargo = sh::cargo();
        cargo.envs(built.env()).args(["test", "--no-fail-fast"]);
        cargo.args(packages.split(' '));
        if soak {
            cargo.env("TWHEEL_SOAK", "1");
            cargo.env("TWHEEL_STRESS_SECONDS", "60");
        }
        if packages == root && !sh::is_root() {
            cargo.args(["--config", "target.'cfg(unix)'.runner = ['sudo', '-E']"]);
        }
        cargo.args(exhaustive.then_some("--release")).arg("--");
        cargo.envs(exhaustive.then_some(("TWHEEL_EXHAUSTIVE", "1")));
        cargo.args(exhaustive.then_some("--include-ignored"));
        cargo.args(flags).args(args);
        ended_well &= run_counting(&mut cargo, &mut total, &mut skips)?;
    }

    if soak {
        match fuzz::nightly() {
            Ok(_) => match fuzz::fuzz(false, &SOAK.map(str::to_owned)) {
                Ok(()) => total[0] += 1,
                Err(error) => {
                    say!("libFuzzer: {error:#}");
                    total[1] += 1;
                    ended_well = false;
                }
            },
            Err(error) => {
                total[2] += 1;
                skips.push(format!("libFuzzer: {error}"));
            }
        }
    }

    let [passed, failed, skipped] = total;
    if failed == 0 && !ended_well {
        say!("Some tests did not build, or did not come to an end.");
    }
    for reason in &skips {
        println!("skipped {reason}");
    }
    println!("{passed} passed, {failed} failed, {skipped} skipped");
    if !ended_well {
        // Not an error to print: the count is the last line.
        exit(1);
    }
    Ok(())
}

/// Passes the output of `cargo test` on, and adds up. Returns whether cargo was content.
fn run_counting(
    cargo: &mut Command,
    total: &mut [usize; 3],
    skips: &mut Vec<String>,
) -> Result<bool> {
    let mut child = cargo
        .stdout(Stdio::piped())
        .spawn()
        .context("cannot run cargo test")?;
    let stdout = child.stdout.take().context("cargo test has no stdout")?;
    for line in BufReader::new(stdout).split(b'\n') {
        let line = line.context("cannot read from cargo test")?;
        let line = String::from_utf8_lossy(&line);
        println!("{line}");
        skips.extend(skip(&line));
        let left_out = left_out(&line);
        total[2] += usize::from(left_out.is_some());
        skips.extend(left_out);
        for (sum, count) in total.iter_mut().zip(parse(&line).unwrap_or_default()) {
            *sum += count;
        }
    }
    Ok(child
        .wait()
        .context("cannot wait for cargo test")?
        .success())
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
