//! What a machine needs before anything can run.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use crate::{
    apt, ebpf,
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
/// what says what is in captures; a terminal to drive; a browser, for the page; what says what a unit allows, and which
/// system calls there are; and the benches.
pub fn tests() -> Result<()> {
    benches()?;
    need(&[
        ("strace", "strace", "10 s"),
        ("systemd-analyze", "systemd", "30 s"),
        ("tshark", "tshark", "1 min"),
        ("tmux", "tmux", "10 s"),
        ("chromium", "chromium", "1 min"),
    ])
}

/// What the benches need: what the lab does, and the peers that are no programs of our own.
pub fn benches() -> Result<()> {
    lab()?;
    need(&[
        ("nft", "nftables", "10 s"),
        ("conntrack", "conntrack", "10 s"),
        ("tcpreplay", "tcpreplay", "10 s"),
        ("softflowd", "softflowd", "10 s"),
    ])
}

/// What is copied into machines that boot other kernels.
pub fn vm() -> Result<()> {
    need(&[
        ("busybox", "busybox-static", "5 s"),
        ("cpio", "cpio", "5 s"),
        ("kmod", "kmod", "5 s"),
        ("readelf", "binutils", "10 s"),
        ("ip", "iproute2", "10 s"),
        ("nft", "nftables", "10 s"),
        ("bpftool", "bpftool", "5 s"),
        ("wg", "wireguard-tools", "5 s"),
        ("teamd", "libteam-utils", "5 s"),
    ])
}

/// What links programs for 64-bit ARM.
pub fn aarch64() -> Result<()> {
    need(&[("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu", "30 s")])?;
    if !Path::new("/usr/aarch64-linux-gnu/lib/libc.so").exists() {
        apt::install(&["libc6-dev-arm64-cross"], "20 s")?;
    }
    Ok(())
}

/// What the lab needs: root, `ip` and a bpffs.
pub fn lab() -> Result<()> {
    sh::require_root()?;
    need(&[("ip", "iproute2", "10 s")])?;
    bpffs()
}

/// Installs what is missing: programs, the packages that bring them, and how long that usually takes.
fn need(programs: &[(&str, &str, &str)]) -> Result<()> {
    for (program, package, usually) in programs {
        // A user's PATH may lack sbin, where some distributions keep programs.
        if !Path::new("/usr/sbin").join(program).exists() && sh::which(program).is_empty() {
            apt::install(&[package], usually)?;
        }
    }
    Ok(())
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
