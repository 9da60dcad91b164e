//! Environments of Python in the target directory, for tools of tests that come from PyPI.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};

use crate::{
    bounded::{self, Bounded},
    setup,
    sh::{self, say},
};

/// How long pip may take to download and install, and how long what needs no network may take.
const DOWNLOAD: Duration = Duration::from_secs(600);
const LOCAL: Duration = Duration::from_secs(180);

/// The environment `target/tools/NAME` with these packages, which is made if it is not there, or has
/// others. `finish` adds what is in the packages `unpacked`. `takes`: how long that usually takes, in
/// words.
pub fn environment(
    name: &str,
    packages: &[&str],
    unpacked: &[&str],
    takes: &str,
    finish: impl FnOnce(&Environment) -> Result<()>,
) -> Result<PathBuf> {
    let path = sh::target(&format!("tools/{name}"));
    // Written last: what is there without it was not finished.
    let marker = path.join("packages");
    let all = [packages, unpacked].concat();
    let wanted = all.join("\n");
    let is_made = || fs::read_to_string(&marker).is_ok_and(|found| found == wanted);
    if is_made() {
        return Ok(path);
    }
    let lock = sh::target(&format!("tools/{name}.lock"));
    let _lock = bounded::lock(&lock, &format!("install {}", all.join(", ")))?;
    if is_made() {
        return Ok(path);
    }
    setup::python()?;
    let environment = Environment {
        log: bounded::log(&format!("setup-{name}")),
        path,
    };
    say!(
        "Installing {} into {}; this usually takes {takes}. {} has the output.",
        all.join(", "),
        environment.path.display(),
        environment.log.display()
    );
    let begun = Instant::now();
    let _ = fs::remove_file(&marker);
    let mut venv = Command::new("python3");
    venv.args(["-m", "venv", "--clear"]).arg(&environment.path);
    let what = format!(
        "make an environment of Python in {}",
        environment.path.display()
    );
    Bounded::new(what, LOCAL, &environment.log)
        .advice("remove the directory, and try again")
        .run(&venv)?;
    environment.pip("install", &[], packages)?;
    finish(&environment)?;
    fs::write(&marker, wanted).with_context(|| format!("cannot write {}", marker.display()))?;
    say!(
        "Installed {} in {} s.",
        all.join(", "),
        begun.elapsed().as_secs()
    );
    Ok(environment.path)
}

/// An environment that is being made.
pub struct Environment {
    /// Its directory.
    pub path: PathBuf,
    log: PathBuf,
}

impl Environment {
    /// Runs a command of pip, with options, on packages.
    pub fn pip(&self, command: &str, options: &[&Path], packages: &[&str]) -> Result<()> {
        let mut pip = Command::new(self.path.join("bin/python"));
        pip.args(["-m", "pip", command])
            .args(["--progress-bar=off", "--disable-pip-version-check"])
            .args(options)
            .args(packages);
        let what = format!("{command} {} with pip", packages.join(", "));
        Bounded::new(what, DOWNLOAD, &self.log)
            .advice("check the network and pip's index")
            .run(&pip)
    }
}
