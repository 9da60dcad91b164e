//! Debian packages, installed with apt-get.

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
    // Does not replace what the machine has.
    let args = "install -qq -y --no-install-recommends --no-upgrade --no-remove";
    sh::run(apt_get()?.args(args.split(' ')).args(packages))
}
