//! Programs that are run to see that they run: the lab, and the fuzzer.

use anyhow::{Context, Result, ensure};

use super::{
    jobs::{Company, Job, Proof},
    plan::apart,
    times::Times,
};
use crate::{binaries::Compiled, fuzz::Fuzzer, recording, run::Built};

/// Inputs that the fuzzer must try, on a slow and busy machine, too.
const INPUTS: u64 = 100_000;
/// Seconds that the fuzzer runs for in a landing, and in the long run.
const SECONDS: [u32; 2] = [10, 600];
/// The habits of the lab's connections.
const LAB: [&str; 5] = ["busy", "idle", "closed", "reset", "half-open"];

/// Runs the lab of `cargo xtask run` to its end.
pub fn lab(compiled: &Compiled, built: &Built, times: &Times) -> Result<Job> {
    let mut command = apart(compiled.program("twheel-lab")?, Company::Quiet);
    command.envs(built.env());
    Ok(Job {
        name: "lab".to_owned(),
        command,
        company: Company::Quiet,
        proof: Proof::Output(Box::new(lab_is_shown)),
        cost: times.of("lab"),
    })
}

fn lab_was_right(output: &str) -> Result<()> {
    for habit in LAB {
        let row = output
            .lines()
            .find(|line| line.starts_with(habit) && line.contains("  yes"));
        ensure!(row.is_some(), "the lab's table has no good row of {habit}");
    }
    ensure!(
        output.contains("All as it should be."),
        "the lab does not say that all is as it should be"
    );
    Ok(())
}

/// The lab is right, and the README's picture shows it.
fn lab_is_shown(output: &str) -> Result<()> {
    lab_was_right(output)?;
    recording::shows(output)
}

/// Runs libFuzzer.
pub fn fuzzer(is_long: bool, times: &Times) -> Result<Job> {
    let seconds = SECONDS[usize::from(is_long)];
    Ok(Job {
        name: "fuzzer".to_owned(),
        command: Fuzzer::build()?.command(seconds),
        company: Company::Any,
        proof: Proof::Output(Box::new(fuzzer_has_run)),
        cost: times.of("fuzzer"),
    })
}

/// Checks for lines such as `#180 INITED cov: 812 ft: 2102 …` and `Done 9000000 runs in 61
/// second(s)`.
fn fuzzer_has_run(output: &str) -> Result<()> {
    ensure!(
        output.contains(" cov: "),
        "libFuzzer has seen no code covered"
    );
    let runs = output.lines().find_map(|line| {
        line.strip_prefix("Done ")?
            .split_once(" runs")?
            .0
            .parse()
            .ok()
    });
    let runs: u64 = runs.context("libFuzzer does not say that it is done")?;
    ensure!(runs >= INPUTS, "libFuzzer had {runs} inputs only");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::{LAB, fuzzer_has_run, lab_was_right};

    #[test]
    fn a_lab_without_a_good_row_fails() {
        let mut output: Vec<_> = LAB
            .iter()
            .map(|habit| format!("{habit:<9}            5        5  close  reset   yes"))
            .collect();
        output.push("All as it should be. Nothing is left behind".to_owned());
        assert!(lab_was_right(&output.join("\n")).is_ok());
        for at in 0..output.len() {
            let mut output = output.clone();
            output[at] = output[at].replace("yes", "NO").replace("All", "Not");
            assert!(lab_was_right(&output.join("\n")).is_err(), "{output:?}");
        }
    }

    #[test]
    fn a_fuzzer_that_has_seen_nothing_fails() {
        let output = "#180\tINITED cov: 812 ft: 2102\nDone 9000000 runs in 61 second(s)\n";
        assert!(fuzzer_has_run(output).is_ok());
        for (from, to) in [("cov", "con"), ("Done", "Gone"), ("9000000", "90")] {
            assert!(fuzzer_has_run(&output.replace(from, to)).is_err());
        }
    }
}
