//! Debian packages, installed with apt-get.

use std::{
    path::Path,
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use crate::sh::{self, say};

/// Tells the user, and installs Debian packages.
pub fn install(packages: &[&str], usually: &str) -> Result<()> {
    let list = packages.join(" ");
    if sh::which("apt-get").is_empty() {
        bail!("{list} must be installed, and there is no apt-get to do it");
    }
    let apt_get = || sh::as_root("apt-get", [("DEBIAN_FRONTEND", "noninteractive".as_ref())]);
    apt_get().with_context(|| format!("cannot install {list}"))?;
    say!("Installing {list} with apt-get; this usually takes {usually}.");
    // If one repository cannot be reached, the update fails, but the packages may come from
    // another.
    if let Err(error) = sh::run(apt_get()?.args(["update", "-qq"])) {
        say!("{error:#}; going on with the lists that are there.");
    }
    // Waits while another apt-get installs something; does not replace what the machine has.
    let args = "-o DPkg::Lock::Timeout=300 install -qq -y --no-install-recommends --no-upgrade \
                --no-remove";
    sh::run(apt_get()?.args(args.split_whitespace()).args(packages))
}

/// Downloads a Debian package into a directory, without what it depends on.
pub fn download(package: &str, directory: &Path) -> Result<()> {
    if sh::which("apt-get").is_empty() {
        bail!("{package} is needed, and there is no apt-get to download it");
    }
    let download = || {
        let mut apt_get = Command::new("apt-get");
        // Root's directories are closed to apt's own user.
        apt_get.args(["-qq", "-o", "APT::Sandbox::User=root", "download", package]);
        apt_get.current_dir(directory);
        apt_get
    };
    // The lists may be missing or old.
    if sh::run(download().stderr(Stdio::null())).is_err() {
        sh::run(sh::as_root("apt-get", [])?.args(["update", "-qq"]))?;
        sh::run(&mut download()).with_context(|| format!("cannot download {package}"))?;
    }
    Ok(())
}
