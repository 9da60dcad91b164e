//! What a machine needs before anything can run.

use std::{fs, path::Path};

use anyhow::{Context, Result, bail};

use crate::{
    ebpf,
    sh::{self, say},
};

/// Does the whole set-up: `cargo xtask setup`.
pub fn setup() -> Result<()> {
    ebpf::objects()?;
    tests()?;
    say!("Ready.");
    Ok(())
}

/// What the tests need: what the lab does; `nft`, for the kernel's own connection tracking beside ours; and
/// what replays captures, and says what is in them; a terminal to drive; a browser, for the page.
pub fn tests() -> Result<()> {
    lab()?;
    if !Path::new("/usr/sbin/nft").exists() && sh::which("nft").is_empty() {
        apt(&["nftables"], "10 s")?;
    }
    if sh::which("tcpreplay").is_empty() {
        apt(&["tcpreplay"], "10 s")?;
    }
    if sh::which("tshark").is_empty() {
        apt(&["tshark"], "1 min")?;
    }
    if sh::which("tmux").is_empty() {
        apt(&["tmux"], "10 s")?;
    }
    if sh::which("chromium").is_empty() {
        apt(&["chromium"], "1 min")?;
    }
    Ok(())
}

/// What the lab needs: root, `ip` and a bpffs.
pub fn lab() -> Result<()> {
    sh::require_root()?;
    // A user's PATH may lack sbin, where some distributions keep `ip`.
    if !Path::new("/usr/sbin/ip").exists() && sh::which("ip").is_empty() {
        apt(&["iproute2"], "10 s")?;
    }
    bpffs()
}

/// Sees to it that a bpffs is mounted: programs and links are pinned there.
pub fn bpffs() -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read the mounts")?;
    if !mounts.contains(" /sys/fs/bpf bpf ") {
        say!("Mounting bpffs on /sys/fs/bpf.");
        let mut mount = sh::as_root("mount", [])?;
        sh::run(mount.args(["-t", "bpf", "bpf", "/sys/fs/bpf"]))?;
    }
    Ok(())
}

/// Installs Debian packages, having said so.
pub fn apt(packages: &[&str], usually: &str) -> Result<()> {
    let list = packages.join(" ");
    if sh::which("apt-get").is_empty() {
        bail!("{list} must be installed, and there is no apt-get to do it");
    }
    let apt_get = || sh::as_root("apt-get", [("DEBIAN_FRONTEND", "noninteractive".as_ref())]);
    apt_get().with_context(|| format!("cannot install {list}"))?;
    say!("Installing {list} with apt-get; this usually takes {usually}.");
    // One repository out of reach fails the update, yet the packages may come from another.
    if let Err(error) = sh::run(apt_get()?.args(["update", "-qq"])) {
        say!("{error:#}; going on with the lists that are there.");
    }
    // What the machine has is not ours to replace.
    let args = "install -qq -y --no-install-recommends --no-upgrade --no-remove";
    sh::run(apt_get()?.args(args.split(' ')).args(packages))
}
