//! `cargo xtask rebuilds`: after the tests and the lints, nothing of what they have built is built
//! again, whichever way it is asked for.

use std::process::Command;

use anyhow::{Context, Result, ensure};

use crate::{
    binaries::{self, Selection},
    ebpf, lint,
    sh::{self, say},
    vm,
};

/// What cargo says of a crate that it compiles, checks or documents.
const WORK: [&str; 3] = ["Compiling ", "Checking ", "Documenting "];

/// Fails if cargo has anything to do for the tests, by `cargo xtask` or by itself; for the lab and the
/// virtual machines; or for the lints.
pub fn check() -> Result<()> {
    let objects = ebpf::objects()?;
    let mut ways = Vec::new();
    for (what, selection) in [
        ("cargo xtask test", Selection::All),
        ("cargo xtask run", Selection::Tests(Vec::new())),
        ("cargo xtask vm-test", vm::selection()),
    ] {
        let mut cargo = binaries::cargo("test", &selection, &objects);
        cargo.arg("--no-run");
        ways.push((what, cargo));
    }
    let mut plain = Command::new("cargo");
    plain.current_dir(sh::workspace());
    sh::forget_xtask(&mut plain);
    plain.args(["test", "--no-run"]);
    plain.args(binaries::HOST.split(' '));
    ways.push(("cargo test", plain));
    ways.extend(
        lint::commands(false)
            .into_iter()
            .map(|it| ("cargo xtask lint", it)),
    );
    for (what, cargo) in &mut ways {
        let output = cargo
            .output()
            .with_context(|| format!("cannot run {what}"))?;
        let said = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "{what} fails: {said}");
        let built: Vec<_> = work(&said).collect();
        ensure!(
            built.is_empty(),
            "{what} builds again what was built ({} says why): {built:#?}",
            "CARGO_LOG=cargo::core::compiler::fingerprint=info"
        );
    }
    say!("Nothing is built twice.");
    Ok(())
}

/// The lines in which cargo says that it works.
fn work(said: &str) -> impl Iterator<Item = &str> {
    let lines = said.lines().map(str::trim_start);
    lines.filter(|line| WORK.iter().any(|it| line.starts_with(it)))
}

#[cfg(test)]
mod tests {
    use super::work;

    #[test]
    fn what_cargo_does_is_seen() {
        let said = "    Blocking waiting for file lock on build directory\n   Compiling a v1\n    \
                    Checking b v2\n Documenting c v3\n    Finished `test` profile\n";
        let built: Vec<_> = work(said).collect();
        assert_eq!(
            built,
            ["Compiling a v1", "Checking b v2", "Documenting c v3"]
        );
        assert_eq!(work("    Finished `test` profile\n").count(), 0);
    }
}
