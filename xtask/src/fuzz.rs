//! `cargo xtask fuzz`.
//!
//! `fuzz/corpus.hex` is the corpus, an input a line: what libFuzzer wants is a directory with a file for each.

use std::{collections::BTreeSet, fs, path::PathBuf, process::Command};

use anyhow::{Context, Result, bail};

use crate::{
    setup,
    sh::{self, say},
    toolchain,
};

/// The one version of cargo-fuzz that is used.
const CARGO_FUZZ: &str = "0.13.2";
/// The target.
const TARGET: &str = "packet";
/// Seconds, unless another option says otherwise; longer inputs find nothing that these do not.
const DEFAULTS: [&str; 2] = ["-max_total_time=60", "-max_len=300"];

/// Builds the target and runs it, from the corpus that is kept; if `keep`, what it has found is added to that.
pub fn fuzz(keep: bool, args: &[String]) -> Result<()> {
    let nightly = nightly()?;
    if ["c++", "g++", "clang++"]
        .iter()
        .all(|it| sh::which(it).is_empty())
    {
        setup::apt(&["g++"], "30 s")?;
    }
    let tool = cargo_fuzz()?;
    let spread = sh::target("fuzz/corpus");
    let least = sh::target("fuzz/least");
    for directory in [&spread, &least] {
        let _ = fs::remove_dir_all(directory);
        let failed = || format!("cannot make {}", directory.display());
        fs::create_dir_all(directory).with_context(failed)?;
    }
    let file = sh::workspace().join("fuzz/corpus.hex");
    let kept = fs::read_to_string(&file).context("cannot read fuzz/corpus.hex")?;
    for (number, line) in kept.lines().enumerate() {
        let input = from_hex(line).with_context(|| format!("fuzz/corpus.hex:{}", number + 1))?;
        fs::write(spread.join(number.to_string()), input).context("cannot spread the corpus")?;
    }
    say!("Building the target with {nightly}; this usually takes 60 s the first time.");
    let run = |directories: &[&PathBuf], options: &[&str]| {
        let mut command = Command::new(&tool);
        command.current_dir(sh::workspace());
        // As `cargo +nightly fuzz` would: cargo-fuzz asks whatever cargo and rustc it is pointed to.
        command
            .env_remove("CARGO")
            .env("RUSTUP_TOOLCHAIN", &nightly);
        command.args(["fuzz", "run", "--features", "libfuzzer", TARGET]);
        command.args(directories).arg("--").args(options).args(args);
        sh::run(&mut command)
    };
    run(&[&spread], &DEFAULTS)?;
    if keep {
        run(&[&least, &spread], &["-merge=1"])?;
        let mut lines = BTreeSet::new();
        for entry in fs::read_dir(&least).context("cannot read what libFuzzer has merged")? {
            let input = fs::read(entry?.path()).context("cannot read an input")?;
            let line: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
            lines.insert((line.len(), line + "\n"));
        }
        let text: String = lines.into_iter().map(|(_, line)| line).collect();
        fs::write(&file, text).context("cannot write fuzz/corpus.hex")?;
        say!("Updated fuzz/corpus.hex.");
    }
    Ok(())
}

/// A nightly of rustup's: libFuzzer's instrumentation is no part of stable.
pub fn nightly() -> Result<String> {
    let list = Command::new("rustup").args(["toolchain", "list"]).output();
    let list = list.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let names = list.unwrap_or_default();
    let mut names = names
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    match names.find(|name| name.contains("nightly")) {
        Some(name) => Ok(name.to_owned()),
        None => bail!(
            "libFuzzer needs a nightly compiler, and rustup has none: `rustup toolchain install nightly`. \
             Without it, `cargo test -p twheel-fuzz` makes packets at random and compares the same"
        ),
    }
}

/// cargo-fuzz, built here if need be.
fn cargo_fuzz() -> Result<PathBuf> {
    let tools = toolchain::cache()?.join("tools");
    let cached = tools.join("bin/cargo-fuzz");
    let found = sh::which("cargo-fuzz").into_iter().next();
    if let Some(tool) = found.or_else(|| cached.exists().then(|| cached.clone())) {
        return Ok(tool);
    }
    say!(
        "Building cargo-fuzz {CARGO_FUZZ} into {}; this usually takes 40 s.",
        tools.display()
    );
    sh::run(
        sh::cargo()
            .args([
                "install",
                "cargo-fuzz",
                "--quiet",
                "--locked",
                "--version",
                CARGO_FUZZ,
            ])
            .arg("--root")
            .arg(&tools),
    )?;
    Ok(cached)
}

fn from_hex(line: &str) -> Option<Vec<u8>> {
    let digits: Option<Vec<_>> = line.chars().map(|digit| digit.to_digit(16)).collect();
    let digits = digits.filter(|digits| digits.len() % 2 == 0)?;
    Some(
        digits
            .chunks(2)
            .map(|pair| (pair[0] << 4 | pair[1]) as u8)
            .collect(),
    )
}
