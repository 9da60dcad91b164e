//! Prometheus, for the tests of the dashboards: Debian's package, unpacked and not installed, so that
//! its service does not run.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};

use crate::{
    apt, bounded,
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
        let lock = sh::target("tools/prometheus.lock");
        let _lock = bounded::lock(&lock, "unpack Prometheus")?;
        if !program.exists() {
            unpack(&directory)?;
        }
    }
    Ok(program)
}

/// Makes the directory, which exists only once everything is in it.
fn unpack(directory: &Path) -> Result<()> {
    say!("Unpacking prometheus in the target directory; this usually takes 10 s.");
    let partial = directory.with_extension("partial");
    for old in [directory, &partial] {
        let _ = fs::remove_dir_all(old);
    }
    fs::create_dir_all(&partial).with_context(|| format!("cannot make {}", partial.display()))?;
    apt::download("prometheus", &partial, &bounded::log("setup-prometheus"))?;
    let is_package = |path: &PathBuf| path.extension().is_some_and(|it| it == "deb");
    let mut packages = fs::read_dir(&partial)?.flatten().map(|it| it.path());
    let package = packages
        .find(is_package)
        .context("apt-get has downloaded no package")?;
    let mut unpack = Command::new("dpkg-deb");
    sh::run(unpack.arg("-x").args([&package, &partial]))?;
    fs::remove_file(package).context("cannot remove the package of Prometheus")?;
    ensure!(
        partial.join(PROGRAM).exists(),
        "Debian's package prometheus has no {PROGRAM}"
    );
    fs::rename(&partial, directory).with_context(|| format!("cannot make {}", directory.display()))
}
