//! Debian packages, installed with apt-get. What apt-get writes goes to a log.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::{
    bounded::{self, Bounded, Lock},
    sh::{self, say},
    toolchain,
};

/// How long the package lists, the packages and their installation may take.
const UPDATE: Duration = Duration::from_secs(180);
const DOWNLOAD: Duration = Duration::from_secs(600);
const INSTALL: Duration = Duration::from_secs(900);
/// The same, if packages are installed one by one because not all could be installed at once; and
/// for all of them.
const ONE: Duration = Duration::from_secs(120);
const ALL: Duration = Duration::from_secs(360);

/// A mirror that does not answer is given up soon; another apt-get is waited for.
const OPTIONS: [&str; 5] = [
    "-oAcquire::http::Timeout=30",
    "-oAcquire::https::Timeout=30",
    "-oAcquire::Retries=1",
    "-oDPkg::Lock::Timeout=300",
    "-oDPkg::Use-Pty=0",
];
/// Does not replace what the machine has.
const CAREFULLY: [&str; 4] = [
    "--yes",
    "--no-install-recommends",
    "--no-upgrade",
    "--no-remove",
];
/// First finishes what was interrupted.
const FINISH: &str = "dpkg --configure --pending; exec apt-get \"$@\"";
const ADVICE: &str = "check the network and apt's sources, or install what is missing by hand";

/// A package that could not be installed, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The package's name.
    pub package: String,
    /// Why, as part of a sentence.
    pub why: String,
}

/// Tells the user, and installs Debian packages.
pub fn install(packages: &[&str], usually: &str) -> Result<()> {
    sh::require_root().with_context(|| format!("cannot install {}", packages.join(" ")))?;
    let refused = Apt::new()?.install(packages, usually);
    let Some(first) = refused.first() else {
        return Ok(());
    };
    let names: Vec<_> = refused.iter().map(|it| it.package.as_str()).collect();
    bail!(
        "cannot install {} ({}): install it by hand",
        names.join(" "),
        first.why
    )
}

/// Downloads a Debian package into a directory, without what it depends on.
pub fn download(package: &str, directory: &Path, log: &Path) -> Result<()> {
    if sh::which("apt-get").is_empty() {
        bail!("{package} is needed, and there is no apt-get to download it");
    }
    let mut download = apt_get();
    // Root's directories are closed to apt's own user.
    download.args(["-q", "-oAPT::Sandbox::User=root", "download", package]);
    download.current_dir(directory);
    let bounded = Bounded::new(format!("download {package}"), DOWNLOAD, log);
    let bounded = bounded.once().advice(ADVICE);
    // The lists may be missing or old.
    let Err(error) = bounded.run(&download) else {
        return Ok(());
    };
    say!("{error:#}; fetching the lists of packages, and trying again.");
    update()?;
    bounded.run(&download)
}

/// Fetches the package lists, unless this process has done so.
pub fn update() -> Result<()> {
    Apt::new()?.update();
    Ok(())
}

/// The right to change what is installed: one command has it at a time. Who waited for it looks again
/// what is missing.
pub struct Apt {
    _lock: Lock,
}

impl Apt {
    /// Waits for it.
    pub fn new() -> Result<Self> {
        let path = toolchain::cache()?.join("apt.lock");
        bounded::lock(&path, "install packages").map(|lock| Self { _lock: lock })
    }

    /// Fetches the package lists, unless this process has done so. If one repository cannot be
    /// reached, the packages may come from another.
    fn update(&self) {
        static IS_DONE: AtomicBool = AtomicBool::new(false);
        if IS_DONE.swap(true, Ordering::Relaxed) {
            return;
        }
        let log = log();
        let bounded = Bounded::new("fetch all lists of packages", UPDATE, &log);
        let bounded = bounded.quiet().with_root();
        let bounded = bounded.advice("check the network and apt's sources");
        if let Err(error) = bounded.run(apt_get().args(["-q", "update"])) {
            say!("{error:#}; going on with the lists that are there.");
        }
    }

    /// Tells the user, and installs Debian packages: all at once, or those that can be installed.
    /// Returns the others.
    pub fn install(&self, packages: &[&str], usually: &str) -> Vec<Refused> {
        let refuse = |why: &str| {
            let refused = packages.iter().map(|package| refused(package, why));
            refused.collect()
        };
        if sh::which("apt-get").is_empty() {
            return refuse("there is no apt-get here");
        }
        if let Err(error) = sh::require_root() {
            return refuse(&format!("{error:#}"));
        }
        let log = log();
        say!(
            "Installing {} with apt-get; this usually takes {usually}. {} has the output.",
            packages.join(", "),
            log.display()
        );
        let begun = Instant::now();
        self.update();
        let (possible, mut refused) = possible(packages, simulate);
        if !possible.is_empty()
            && let Err(error) = fetch_and_install(&possible, [DOWNLOAD, INSTALL], 2)
        {
            refused.extend(match possible[..] {
                [package] => vec![self::refused(package, format!("{error:#}"))],
                _ => {
                    say!("{error:#}. Trying them one by one.");
                    one_by_one(&possible)
                }
            });
        }
        say!("{}", done(packages.len(), &refused, begun.elapsed()));
        refused
    }
}

/// What is said in the end.
fn done(packages: usize, refused: &[Refused], took: Duration) -> String {
    let seconds = took.as_secs();
    if refused.is_empty() {
        return format!("Installed {packages} packages in {seconds} s.");
    }
    let names: Vec<_> = refused.iter().map(|it| it.package.as_str()).collect();
    format!(
        "Installed {} of {packages} packages in {seconds} s; not {}.",
        packages - refused.len(),
        names.join(", ")
    )
}

fn log() -> PathBuf {
    bounded::log("setup")
}

fn refused(package: &str, why: impl Into<String>) -> Refused {
    Refused {
        package: package.to_owned(),
        why: why.into(),
    }
}

fn apt_get() -> Command {
    let mut apt_get = Command::new("apt-get");
    apt_get.env("DEBIAN_FRONTEND", "noninteractive");
    apt_get.args(OPTIONS);
    apt_get
}

/// The packages that can be installed together, and the others. `simulate` says why not.
fn possible<'a>(
    packages: &[&'a str],
    simulate: impl Fn(&[&str]) -> Result<(), String>,
) -> (Vec<&'a str>, Vec<Refused>) {
    match (simulate(packages), packages) {
        (Ok(()), _) => return (packages.to_vec(), Vec::new()),
        (Err(why), [package]) => return (Vec::new(), vec![refused(package, why)]),
        _ => {}
    }
    let (mut possible, mut others) = (Vec::new(), Vec::new());
    for package in packages {
        possible.push(*package);
        if let Err(why) = simulate(&possible) {
            possible.pop();
            others.push(refused(package, why));
        }
    }
    (possible, others)
}

/// Asks apt whether it can install packages: it needs no network for that.
fn simulate(packages: &[&str]) -> Result<(), String> {
    let output = apt_get()
        .args(["-q", "--simulate", "install"])
        .args(CAREFULLY)
        .args(packages)
        .env("LC_ALL", "C")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| error.to_string())?;
    if output.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&output.stderr);
    Err(format!("apt-get: {}", complaint(&text)))
}

/// The first error in apt's output.
fn complaint(text: &str) -> &str {
    let mut errors = text.lines().filter_map(|line| line.strip_prefix("E: "));
    errors.next().unwrap_or("no reason given")
}

/// Downloads packages with what they depend on, then installs them. The network is used only in the
/// first part, so that no installation is interrupted because a mirror does not answer.
fn fetch_and_install(packages: &[&str], within: [Duration; 2], tries: u32) -> Result<()> {
    let (log, list) = (log(), packages.join(" "));
    let bounded = |what: &str, within| {
        let bounded = Bounded::new(format!("{what} {list}"), within, &log);
        let bounded = bounded.with_root().advice(ADVICE);
        if tries > 1 {
            bounded
        } else {
            bounded.once().brief()
        }
    };
    let mut arguments = vec!["-q", "install"];
    arguments.extend(CAREFULLY);
    arguments.extend(packages);
    let mut download = apt_get();
    download.arg("--download-only").args(&arguments);
    bounded("download", within[0]).run(&download)?;
    let mut install = Command::new("sh");
    install
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-c", FINISH, "sh"])
        .args(OPTIONS)
        .args(&arguments);
    // If it was ended in between, dpkg would have to be repaired.
    bounded("install", within[1]).may_be_left().run(&install)
}

/// Installs packages one by one. Returns those for which that fails.
fn one_by_one(packages: &[&str]) -> Vec<Refused> {
    let begun = Instant::now();
    let install = |package: &&str| {
        if begun.elapsed() > ALL {
            let why = format!("the others took {} s", ALL.as_secs());
            return Some(refused(package, why));
        }
        let result = fetch_and_install(&[package], [ONE, ONE], 1);
        result
            .err()
            .map(|error| refused(package, format!("{error:#}")))
    };
    packages.iter().filter_map(install).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{complaint, done, possible, refused};

    #[test]
    fn packages_that_cannot_be_installed_keep_no_other_from_it() {
        let simulate = |packages: &[&str]| {
            if packages.contains(&"unknown") {
                return Err("unknown".to_owned());
            }
            match packages.contains(&"one") && packages.contains(&"rival") {
                true => Err("a conflict".to_owned()),
                false => Ok(()),
            }
        };
        assert_eq!(
            possible(&["one", "two"], simulate),
            (vec!["one", "two"], vec![])
        );
        assert_eq!(
            possible(&["unknown", "one", "rival", "two"], simulate),
            (
                vec!["one", "two"],
                vec![
                    refused("unknown", "unknown"),
                    refused("rival", "a conflict")
                ]
            )
        );
        assert_eq!(
            possible(&["unknown"], simulate),
            (vec![], vec![refused("unknown", "unknown")])
        );
    }

    #[test]
    fn what_was_done_is_one_line() {
        let took = Duration::from_millis(34_700);
        assert_eq!(done(12, &[], took), "Installed 12 packages in 34 s.");
        assert_eq!(
            done(3, &[refused("one", ""), refused("two", "")], took),
            "Installed 1 of 3 packages in 34 s; not one, two."
        );
    }

    #[test]
    fn the_first_error_of_apt_is_the_reason() {
        let text = "NOTE: a simulation\nE: Unable to locate package x\nE: by glob 'x'\n";
        assert_eq!(complaint(text), "Unable to locate package x");
        assert_eq!(complaint("W: nothing"), "no reason given");
    }
}
