//! `cargo xtask test`: runs the tests and counts them.

use std::{
    io::{BufRead, BufReader},
    process::{Command, Stdio, exit},
};

use anyhow::{Context, Result};

use crate::{
    run, setup,
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

/// Runs the tests of the host crates, then those that need root, whatever became of the former.
pub fn test(exhaustive: bool, args: &[String]) -> Result<()> {
    setup::tests()?;
    let built = run::build(None)?;
    let mut total = [0; 3];
    let mut skips = Vec::new();
    let mut ended_well = true;
    for (packages, flags) in [
        (HOST, None),
        // One at a time: these measure time, and share the kernel.
        (ROOT, Some("--test-threads=1")),
    ] {
        let mut cargo = sh::cargo();
        cargo.envs(built.env()).args(["test", "--no-fail-fast"]);
        cargo.args(packages.split(' '));
        if packages == ROOT && !sh::is_root() {
            cargo.args(["--config", "target.'cfg(unix)'.runner = ['sudo', '-E']"]);
        }
        cargo.args(exhaustive.then_some("--release")).arg("--");
        cargo.envs(exhaustive.then_some(("TWHEEL_EXHAUSTIVE", "1")));
        cargo.args(exhaustive.then_some("--include-ignored"));
        cargo.args(flags).args(args);
        ended_well &= run_counting(&mut cargo, &mut total, &mut skips)?;
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
    use super::{parse, skip};

    #[test]
    fn reads_why_a_test_is_skipped() {
        let line = "test long ... ignored, takes an hour";
        assert_eq!(skip(line).as_deref(), Some("long: takes an hour"));
        assert_eq!(skip("test wheel::fires ... ok"), None);
    }

    #[test]
    fn reads_the_result_line() {
        let line = "test result: FAILED. 3 passed; 1 failed; 2 ignored; 0 measured; 9 filtered out";
        assert_eq!(parse(line), Some([3, 1, 2]));
        assert_eq!(parse("test wheel::fires ... ok"), None);
    }
}
