//! Programs that are run to see that they run: the lab, the fuzzer for a minute, each bench with
//! its smallest sizes.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, ensure};

use super::{
    binaries::Program,
    jobs::{Company, Job, Proof},
};
use crate::{fuzz::Fuzzer, recording, run::Built, sh};

/// The benches, and what may run beside each: nothing, if it fails without the CPUs that it needs.
const BENCHES: [(&str, Company); 18] = [
    ("before", Company::Quiet),
    ("cores", Company::None),
    ("expire", Company::None),
    ("exporter", Company::None),
    ("fleet", Company::Quiet),
    ("idle", Company::Quiet),
    ("insert", Company::Quiet),
    ("inspect", Company::Quiet),
    ("lateness", Company::None),
    ("memory", Company::Quiet),
    ("path", Company::None),
    ("plan", Company::None),
    ("records", Company::Quiet),
    ("rto", Company::None),
    ("scale", Company::Quiet),
    ("schemes", Company::Quiet),
    ("step", Company::Quiet),
    ("touch", Company::Quiet),
];
/// Inputs that the fuzzer must try in a minute, on a slow and busy machine.
const INPUTS: u64 = 100_000;
/// The number of connections of each habit, and the habits, of the lab.
const LAB: [&str; 5] = ["busy", "idle", "closed", "reset", "half-open"];

/// Runs the lab of `cargo xtask run` to its end.
pub fn lab(programs: &[Program], built: &Built) -> Result<Job> {
    let mut command = command(programs, "twheel-lab")?;
    command.envs(built.env());
    Ok(Job {
        name: "lab".to_owned(),
        command,
        company: Company::Quiet,
        proof: Proof::Output(Box::new(lab_is_shown)),
        is_exact: false,
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
    // Other tests start theirs at the same time.
    let is_shown = |line: &&str| !line.ends_with("waiting for another twheel to finish starting");
    let shown: Vec<_> = output.lines().filter(is_shown).collect();
    recording::shows(&shown.join("\n"))
}

/// Runs libFuzzer for a minute.
pub fn fuzzer() -> Result<Job> {
    Ok(Job {
        name: "fuzzer".to_owned(),
        command: Fuzzer::build()?.command(10),
        company: Company::Any,
        proof: Proof::Output(Box::new(fuzzer_has_run)),
        is_exact: false,
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

/// Runs each bench with the smallest sizes, which the programs of a debug build have. Writes pages
/// to `directory`.
pub fn benches(programs: &[Program], built: &Built, directory: &Path) -> Result<Vec<Job>> {
    fs::create_dir_all(directory)
        .with_context(|| format!("cannot make {}", directory.display()))?;
    let job = |(name, company): (&'static str, Company)| {
        let mut command = command(programs, "twheel-bench")?;
        command.envs(built.env());
        command.arg("--out").arg(directory).arg(name);
        let page = directory.join(format!("{name}.md"));
        let _ = fs::remove_file(&page);
        if name == "before" {
            // It writes no page. Its argument is the object itself.
            command.arg(&built.objects.bench);
        }
        let proof = move |output: &str| match name {
            "before" => has_rows(output),
            _ => {
                let text = fs::read_to_string(&page);
                has_rows(&text.with_context(|| format!("cannot read {}", page.display()))?)
            }
        };
        Ok(Job {
            name: format!("bench/{name}"),
            command,
            company,
            proof: Proof::Output(Box::new(proof)),
            is_exact: false,
        })
    };
    BENCHES.into_iter().map(job).collect()
}

/// Fails unless a page has figures: lines of three numbers or more, below the description of the
/// machine.
fn has_rows(page: &str) -> Result<()> {
    let is_number = |word: &&str| {
        let word = word.trim_matches(|c: char| !c.is_ascii_digit());
        !word.is_empty() && word.parse::<f64>().is_ok()
    };
    let is_row = |line: &&str| line.split_whitespace().filter(is_number).count() >= 3;
    let machine = page.lines().position(|line| line.contains("clocksource"));
    let rest = page
        .lines()
        .skip(machine.context("no line of the machine")? + 1);
    let rows = rest.filter(is_row).count();
    ensure!(rows > 0, "the bench has printed no figures");
    Ok(())
}

/// A command that runs a program of the tests as root.
fn command(programs: &[Program], name: &str) -> Result<Command> {
    let program = programs.iter().find(|it| it.name == name);
    let program = program.with_context(|| format!("cargo has built no {name}"))?;
    if sh::is_root() {
        return Ok(Command::new(&program.executable));
    }
    let mut sudo = Command::new("sudo");
    sudo.arg("-E").arg(&program.executable);
    Ok(sudo)
}

#[cfg(test)]
mod tests {
    use super::{LAB, fuzzer_has_run, has_rows, lab_was_right};

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

    #[test]
    fn a_page_without_figures_fails() {
        let machine = "Intel, 2 CPUs, 23.5 GiB,\nLinux 6.18.44, clocksource tsc, jiffy 4000 µs\n";
        let row = "   flows    rearm\n    8192   146.9 (139.6–148.7)   227.2 (224.3–253.9)\n";
        assert!(has_rows(&format!("{machine}{row}")).is_ok());
        assert!(has_rows(&format!("{machine}Of 3 rounds, 5 flows.")).is_err());
        assert!(has_rows(row).is_err());
    }
}
