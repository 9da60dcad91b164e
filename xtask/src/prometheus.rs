//! Prometheus, for the tests of the dashboards: Debian's package, unpacked and not installed, so that
//! its service does not run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{
    apt,
    sh::{self, say},
};

/// The program in the package.
const PROGRAM: &str = "usr/bin/prometheus";

/// By this variable tests find the program.
pub const VARIABLE: &str = "TWHEEL_PROMETHEUS";

/// The path of the program: the one that [`VARIABLE`] names, the installed one, or one unpacked in
/// the target directory. `None`: it cannot be had, which is said; the tests that need it are skipped.
pub fn install() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os(VARIABLE) {
        return Some(given.into());
    }
    program()
        .inspect_err(|error| say!("{error:#}; tests that need Prometheus are skipped."))
        .ok()
}

fn program() -> Result<PathBuf> {
    if let Some(installed) = sh::which("prometheus").pop() {
        return Ok(installed);
    }
    let directory = sh::target("tools/prometheus");
    let program = directory.join(PROGRAM);
    if !program.exists() {
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot make {}", directory.display()))?;
        unpack(&directory)?;
        ensure!(
            program.exists(),
            "Debian's package prometheus has no {PROGRAM}"
        );
    }
    Ok(program)
}

fn unpack(directory: &Path) -> Result<()> {
    say!("Unpacking prometheus in the target directory; this usually takes 10 s.");
    apt::download("prometheus", directory)?;
    let is_package = |path: &PathBuf| path.extension().is_some_and(|it| it == "deb");
    let mut packages = fs::read_dir(directory)?.flatten().map(|it| it.path());
    let package = packages
        .find(is_package)
        .context("apt-get has downloaded no package")?;
    sh::run(
        Command::new("dpkg-deb")
            .arg("-x")
            .arg(&package)
            .arg(directory),
    )?;
    Ok(fs::remove_file(package)?)
}
