//! Roots of Debian's releases, in which packages are installed, run, upgraded and purged.
//!
//! `root.sh` does that, in namespaces of its own: no interface of this machine is seen there, and no
//! mount stays. An rpm is put into a Debian root, too, with a database of its own: its scripts need a
//! shell, and an empty root has none.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{
    bounded::{self, Bounded},
    setup,
    sh::{self, say},
    toolchain,
    vm::mirror,
};

/// How long it may take to make a root.
const MAKE: Duration = Duration::from_secs(30 * 60);
/// Debian's releases.
const SUITES: [&str; 2] = ["bookworm", "trixie"];
/// What a root has besides a shell: for the tests here, and for the system that `vm-test` boots.
const PACKAGES: &str = "--include=busybox-static,iproute2,procps,systemd,udev";
const SCRIPT: &str = include_str!("root.sh");

/// Installs, runs, upgrades and removes packages, in each root: a deb and an rpm, and those of the next
/// release.
pub fn test([first, later]: &[[PathBuf; 2]; 2]) -> Result<()> {
    for suite in SUITES {
        let base = base(suite)?;
        for kind in ["deb", "rpm"] {
            let root = sh::target("packages").join(format!("root-{suite}"));
            remove(&root)?;
            sh::run(sh::as_root("cp", [])?.arg("-a").args([&base, &root]))?;
            let tested = put(&root, first, later).and_then(|()| run(kind, &root, suite));
            remove(&root)?;
            tested?;
        }
    }
    say!(
        "Packages install, run, upgrade and go in roots of {}.",
        SUITES.join(" and ")
    );
    Ok(())
}

/// The root of a release, which is made once.
pub fn base(suite: &str) -> Result<PathBuf> {
    let roots = toolchain::cache()?.join("roots");
    let root = roots.join(suite);
    if root.exists() {
        return Ok(root);
    }
    fs::create_dir_all(&roots).with_context(|| format!("cannot make {}", roots.display()))?;
    setup::roots()?;
    say!("Making a root of Debian {suite} with debootstrap; this usually takes 2 min.");
    let partial = roots.join(format!("{suite}.partial"));
    let mirror = mirror()?;
    // Each try begins anew.
    let mut debootstrap = Command::new("sh");
    debootstrap
        .args([
            "-c",
            "rm -rf --one-file-system -- \"$0\" && exec debootstrap \"$@\"",
        ])
        .arg(&partial)
        .args(["--variant=minbase", PACKAGES, suite])
        .arg(&partial)
        .arg(mirror);
    let log = bounded::log("setup-roots");
    Bounded::new(format!("make a root of Debian {suite}"), MAKE, &log)
        .with_root()
        .run(&debootstrap)
        .context("there is no root to test packages in")?;
    if !partial.join("usr/bin/systemd-analyze").exists() {
        bail!(
            "debootstrap has made no whole root of {suite}: see {}",
            log.display()
        );
    }
    sh::run(sh::as_root("mv", [])?.args([&partial, &root]))?;
    Ok(root)
}

fn remove(root: &Path) -> Result<()> {
    sh::run(
        sh::as_root("rm", [])?
            .args(["-rf", "--one-file-system"])
            .arg(root),
    )
}

fn put(root: &Path, first: &[PathBuf; 2], later: &[PathBuf; 2]) -> Result<()> {
    let packages = root.join("packages");
    sh::run(sh::as_root("mkdir", [])?.arg(&packages))?;
    for (names, files) in [
        (["first.deb", "first.rpm"], first),
        (["later.deb", "later.rpm"], later),
    ] {
        for (name, file) in names.iter().zip(files) {
            sh::run(sh::as_root("cp", [])?.arg(file).arg(packages.join(name)))?;
        }
    }
    Ok(())
}

fn run(kind: &str, root: &Path, suite: &str) -> Result<()> {
    let mut unshare = sh::as_root("unshare", [])?;
    unshare.args(["--mount", "--net", "--pid", "--fork", "--kill-child"]);
    unshare.args([
        "--propagation",
        "private",
        "sh",
        "-c",
        SCRIPT,
        "root.sh",
        kind,
    ]);
    sh::run(unshare.arg(root).arg(suite))
        .with_context(|| format!("the {kind} is not well in Debian {suite}"))
}
