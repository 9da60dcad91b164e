//! Environments of Python in the target directory, for tools of tests that come from PyPI.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result};

use crate::{
    apt,
    sh::{self, say},
};

/// The environment `target/tools/NAME` with these packages, which is made if it is not there, or has
/// others. `finish` adds what is in the packages `unpacked`. `takes`: how long that usually takes, in
/// words.
pub fn environment(
    name: &str,
    packages: &[&str],
    unpacked: &[&str],
    takes: &str,
    finish: impl FnOnce(&Path) -> Result<()>,
) -> Result<PathBuf> {
    let path = sh::target(&format!("tools/{name}"));
    // Written last: what is there without it was not finished.
    let marker = path.join("packages");
    let all = [packages, unpacked].concat();
    let wanted = all.join("\n");
    if fs::read_to_string(&marker).is_ok_and(|found| found == wanted) {
        return Ok(path);
    }
    let has_venv = Command::new("python3")
        .args(["-c", "import venv, ensurepip"])
        .stderr(Stdio::null())
        .status();
    if !has_venv.is_ok_and(|status| status.success()) {
        apt::install(&["python3-venv"], "20 s")?;
    }
    say!(
        "Installing {} into {}; this usually takes {takes}.",
        all.join(", "),
        path.display()
    );
    let mut venv = Command::new("python3");
    sh::run(venv.args(["-m", "venv", "--clear"]).arg(&path))?;
    sh::run(pip(&path, "install").args(packages))?;
    finish(&path)?;
    fs::write(&marker, wanted).with_context(|| format!("cannot write {}", marker.display()))?;
    Ok(path)
}

/// A command of pip in an environment.
pub fn pip(environment: &Path, command: &str) -> Command {
    let mut pip = Command::new(environment.join("bin/python"));
    pip.args([
        "-m",
        "pip",
        command,
        "--quiet",
        "--disable-pip-version-check",
    ]);
    pip
}
