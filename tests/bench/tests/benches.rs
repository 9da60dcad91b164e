//! Runs each bench with its smallest sizes, which the programs of a debug build have: it works, and
//! prints figures. Each landing runs three of them, and `cargo xtask test --long` all.

use std::process::Command;

use anyhow::{Context, Result, ensure};
use twheel_tests::{directory::Directory, netns::require_root};

/// Fails unless a page has figures: lines of three numbers or more, below the description of the
/// machine.
fn check_figures(page: &str) -> Result<()> {
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
    ensure!(rows > 0, "the bench has printed no figures: {page}");
    Ok(())
}

/// Runs a bench. Its page, or what it prints if it writes none, has figures.
fn run(name: &str, more: &[&str]) -> Result<()> {
    require_root();
    let out = Directory::new(&format!("bench-{name}"))?;
    let mut bench = Command::new(env!("CARGO_BIN_EXE_twheel-bench"));
    bench.arg("--out").arg(out.path()).arg(name).args(more);
    let output = bench.output().context("cannot run the bench")?;
    ensure!(output.status.success(), "{output:?}");
    // It writes no page.
    if name == "before" {
        return check_figures(&String::from_utf8_lossy(&output.stdout));
    }
    let page = out.file(&format!("{name}.md"));
    let text = std::fs::read_to_string(&page).with_context(|| format!("no page {page}"))?;
    check_figures(&text)
}

#[test]
fn a_page_without_figures_fails() {
    let machine = "Intel, 2 CPUs, 23.5 GiB,\nLinux 6.18.44, clocksource tsc, jiffy 4000 µs\n";
    let row = "   flows    rearm\n    8192   146.9 (139.6–148.7)   227.2 (224.3–253.9)\n";
    assert!(check_figures(&format!("{machine}{row}")).is_ok());
    assert!(check_figures(&format!("{machine}Of 3 rounds, 5 flows.")).is_err());
    assert!(check_figures(row).is_err());
}

#[test]
fn before() -> Result<()> {
    // An earlier object: here the object itself.
    let object = std::env::var("TWHEEL_BENCH_OBJECT")
        .context("TWHEEL_BENCH_OBJECT is not set: run this through `cargo xtask test`")?;
    run("before", &[&object])
}

/// A test of each of these benches.
macro_rules! benches {
    ($($name:ident)*) => {
        $(
            #[test]
            fn $name() -> Result<()> {
                run(stringify!($name), &[])
            }
        )*
    };
}

benches! {
    cores
    expire
    exporter
    idle
    insert
    inspect
    lateness
    memory
    path
    plan
    records
    rto
    scale
    schemes
    step
    touch
}

#[cfg(feature = "kafka")]
benches! { fleet }
