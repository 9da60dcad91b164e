//! `cargo xtask fuzz`.
//!
//! `fuzz/corpus.hex` is the corpus, one input a line. libFuzzer needs a directory with a file for
//! each input, which is made from it.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    apt,
    base::Changed,
    sh::{self, say},
};

/// The fuzz target.
const TARGET: &str = "packet";
/// Seconds of `cargo xtask fuzz`.
const MINUTE: u32 = 60;
/// The length of inputs: longer ones find no more.
const LENGTH: &str = "-max_len=300";
/// Coverage that the compiler counts: edges that were taken, and values that were compared. Stable
/// supports these.
const COVERAGE: [&str; 7] = [
    "--cfg=fuzzing",
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Ccodegen-units=1",
];
/// A nightly also checks every memory access.
const ADDRESSES: &str = "-Zsanitizer=address";

/// What the fuzz target is built from.
const PARTS: [&str; 6] = [
    "twheel-common",
    "fuzz",
    "Cargo.lock",
    "Cargo.toml",
    "xtask/src/fuzz.rs",
    "xtask/src/test/smoke.rs",
];

/// Whether the fuzz target may have changed; if not, it need not run again.
pub fn is_touched(changed: &Changed) -> bool {
    changed.touches(&PARTS)
}

/// The built target, and the corpus in files.
pub struct Fuzzer {
    target: PathBuf,
    corpus: PathBuf,
}

/// Builds the target and runs it from the stored corpus; if `keep`, adds what was found to the
/// corpus.
pub fn fuzz(keep: bool, args: &[String]) -> Result<()> {
    let fuzzer = Fuzzer::build()?;
    sh::run(fuzzer.command(MINUTE).args(args))?;
    if keep {
        fuzzer.keep()?;
    }
    Ok(())
}

impl Fuzzer {
    /// Builds the target, and writes the stored corpus into files.
    pub fn build() -> Result<Self> {
        // libFuzzer is C++, and is built from its sources.
        if ["c++", "g++", "clang++"]
            .iter()
            .all(|it| sh::which(it).is_empty())
        {
            apt::install(&["g++"], "30 s")?;
        }
        let host = host()?;
        let nightly = nightly();
        say!(
            "Building the fuzz target with {}; this usually takes 60 s the first time.",
            nightly.as_deref().unwrap_or("the stable compiler")
        );
        let mut flags = COVERAGE.to_vec();
        let mut cargo = sh::cargo();
        if let Some(nightly) = &nightly {
            flags.push(ADDRESSES);
            // As `cargo +nightly` does.
            cargo = Command::new("cargo");
            cargo.current_dir(sh::workspace());
            sh::forget_xtask(&mut cargo);
            cargo.env_remove("CARGO").env_remove("RUSTC");
            cargo.env("RUSTUP_TOOLCHAIN", nightly);
        }
        let directory = sh::target("fuzz");
        // With --target, the flags do not apply to build scripts.
        cargo
            .args(["build", "--quiet", "--locked", "--release", "-p"])
            .args(["twheel-fuzz", "--features", "libfuzzer", "--bin", TARGET])
            .args(["--target", &host, "--target-dir"])
            .arg(&directory)
            .env("CARGO_PROFILE_RELEASE_DEBUG_ASSERTIONS", "true")
            .env("CARGO_PROFILE_RELEASE_OVERFLOW_CHECKS", "true")
            .env("CARGO_PROFILE_RELEASE_LTO", "off")
            .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"));
        sh::run(&mut cargo)?;
        let fuzzer = Self {
            target: directory.join(host).join("release").join(TARGET),
            corpus: empty("fuzz/corpus")?,
        };
        let kept = fs::read_to_string(corpus()).context("cannot read fuzz/corpus.hex")?;
        for (number, line) in kept.lines().enumerate() {
            let input =
                from_hex(line).with_context(|| format!("fuzz/corpus.hex:{}", number + 1))?;
            fs::write(fuzzer.corpus.join(number.to_string()), input)
                .context("cannot spread the corpus")?;
        }
        Ok(fuzzer)
    }

    /// The command that fuzzes for so many seconds, unless another option says otherwise. In ten
    /// seconds it tries more than a million inputs on one CPU.
    pub fn command(&self, seconds: u32) -> Command {
        let mut command = Command::new(&self.target);
        // libFuzzer writes failing inputs into the current directory.
        command.current_dir(sh::target("fuzz"));
        command.arg(&self.corpus).arg(LENGTH);
        command.arg(format!("-max_total_time={seconds}"));
        command
    }

    /// Minimises the corpus, with the inputs that were found, into `fuzz/corpus.hex`.
    fn keep(&self) -> Result<()> {
        let least = empty("fuzz/least")?;
        sh::run(
            Command::new(&self.target)
                .args(["-merge=1", LENGTH])
                .args([&least, &self.corpus]),
        )?;
        let mut lines = BTreeSet::new();
        for entry in fs::read_dir(&least).context("cannot read what libFuzzer has merged")? {
            let input = fs::read(entry?.path()).context("cannot read an input")?;
            let line: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
            lines.insert((line.len(), line + "\n"));
        }
        let text: String = lines.into_iter().map(|(_, line)| line).collect();
        fs::write(corpus(), text).context("cannot write fuzz/corpus.hex")?;
        say!("Updated fuzz/corpus.hex.");
        Ok(())
    }
}

/// The stored corpus.
fn corpus() -> PathBuf {
    sh::workspace().join("fuzz/corpus.hex")
}

/// An emptied directory below cargo's target directory.
fn empty(path: &str) -> Result<PathBuf> {
    let directory = sh::target(path);
    let _ = fs::remove_dir_all(&directory);
    let failed = || format!("cannot make {}", directory.display());
    fs::create_dir_all(&directory).with_context(failed)?;
    Ok(directory)
}

/// The compiler's name for this machine.
fn host() -> Result<String> {
    let version = sh::output(
        Command::new("rustc")
            .arg("-vV")
            .current_dir(sh::workspace()),
    )?;
    let host = version.lines().find_map(|line| line.strip_prefix("host: "));
    Ok(host.context("rustc does not name its host")?.to_owned())
}

/// A rustup nightly that has the address sanitizer, if there is one.
fn nightly() -> Option<String> {
    let rustup = |args: &[&str]| {
        let output = Command::new("rustup").args(args).output().ok()?;
        Some(String::from_utf8_lossy(&output.stdout).into_owned())
    };
    let list = rustup(&["toolchain", "list"])?;
    let mut names = list
        .lines()
        .filter_map(|line| line.split_whitespace().next());
    let name = names.find(|name| name.contains("nightly"))?;
    let rustc = rustup(&["which", "rustc", "--toolchain", name])?;
    let root = Path::new(rustc.trim()).parent()?.parent()?;
    let host = host().ok()?;
    let libraries = fs::read_dir(root.join("lib/rustlib").join(host).join("lib")).ok()?;
    let mut libraries = libraries.flatten().map(|it| it.file_name());
    libraries
        .any(|it| it.to_string_lossy().contains("rt.asan"))
        .then(|| name.to_owned())
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
