//! Installs what each command needs on a machine: all that is missing of it, in one go.

mod needs;

use std::{fmt, fs, path::Path};

use anyhow::{Context, Result, bail, ensure};

use self::needs::{
    CLICKHOUSE, ESSENTIAL,
    Group::{self, Aarch64, Benches, ClickHouse, Kafka, Lab, Packages, Python, Qemu, Roots, Vm},
    MACHINES, Need, Shown, TESTING, lacking,
};
use crate::{
    apt::{Apt, Refused},
    downloads, ebpf,
    sh::{self, say},
    toolchain, vm,
};

/// A tool that could not be installed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Missing {
    /// Its name.
    pub tool: String,
    /// What is missing, for what, what to do, and why it was not installed.
    pub sentence: String,
    groups: &'static [Group],
}

impl Missing {
    fn new(need: &Need, refused: &[Refused]) -> Self {
        let package = need.package;
        let refused = refused.iter().find(|it| it.package == package);
        let remedy = match refused {
            Some(refused) => format!("install the package {package} by hand ({})", refused.why),
            None => format!("the package {package} is installed and does not have it"),
        };
        Self {
            tool: need.shown.to_string(),
            sentence: format!("there is no {} to {}: {remedy}", need.shown, need.to),
            groups: need.groups,
        }
    }

    fn is_for(&self, groups: &[Group]) -> bool {
        self.groups.iter().any(|it| groups.contains(it))
    }
}

impl fmt::Display for Missing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.sentence)
    }
}

/// How long the installation of so many packages usually takes.
fn usually(packages: usize) -> &'static str {
    match packages {
        0..=2 => "20 s",
        3..=9 => "30 s",
        _ => "1 to 2 min",
    }
}

/// Installs what is missing for some groups, and packages for a compiler, with one call of apt-get.
/// Returns what is missing after all.
fn install(groups: &[Group], compiler: impl Fn() -> Vec<&'static str>) -> Result<Vec<Missing>> {
    let is_complete = || lacking(groups, Shown::is_there).is_empty() && compiler().is_empty();
    if is_complete() {
        return Ok(Vec::new());
    }
    let apt = Apt::new()?;
    // Another command may have installed it meanwhile.
    let (needs, compiler) = (lacking(groups, Shown::is_there), compiler());
    let mut packages = compiler.clone();
    for need in &needs {
        if !packages.contains(&need.package) {
            packages.push(need.package);
        }
    }
    if packages.is_empty() {
        return Ok(Vec::new());
    }
    let had_clickhouse = Path::new(CLICKHOUSE).exists();
    let refused = apt.install(&packages, usually(packages.len()));
    if !had_clickhouse && Path::new(CLICKHOUSE).exists() {
        stop_clickhouse()?;
    }
    let needs = needs.iter().filter(|need| !need.shown.is_there());
    let mut missing: Vec<_> = needs.map(|need| Missing::new(need, &refused)).collect();
    let parts = refused
        .iter()
        .filter(|it| compiler.contains(&it.package.as_str()));
    missing.extend(parts.map(|it| Missing {
        tool: it.package.clone(),
        sentence: format!(
            "there is no {} to build the eBPF objects: install a rustup nightly with rust-src, \
             or the package by hand ({})",
            it.package, it.why
        ),
        groups: &[],
    }));
    Ok(missing)
}

/// As [`install`]. Fails if anything is missing.
fn require(groups: &[Group]) -> Result<()> {
    require_none(&install(groups, Vec::new)?)
}

fn require_none(missing: &[Missing]) -> Result<()> {
    let sentences: Vec<_> = missing.iter().map(|it| it.sentence.as_str()).collect();
    ensure!(missing.is_empty(), "{}", sentences.join("; "));
    Ok(())
}

/// The package's own service: tests start the server themselves.
fn stop_clickhouse() -> Result<()> {
    if sh::which("systemctl").is_empty() {
        return Ok(());
    }
    let is_running = Path::new("/run/systemd/system").exists();
    let mut systemctl = sh::as_root("systemctl", [])?;
    systemctl.args(["disable", "--quiet", "clickhouse-server"]);
    sh::run(systemctl.args(is_running.then_some("--now")))
        .context("the service clickhouse-server was just installed and still runs: stop it")
}

/// Installs everything: `cargo xtask setup`.
pub fn setup() -> Result<()> {
    let missing = tests()?;
    let downloads = downloads::start();
    let objects = ebpf::objects();
    downloads.wait();
    objects?;
    for missing in &missing {
        say!("{missing}.");
    }
    say!("Ready.");
    Ok(())
}

/// Installs what `cargo xtask test` needs: what the lab needs, and a compiler; `nft`, to compare with
/// the kernel's own connection tracking; programs that read packet captures, collect flows and logs,
/// tell what a systemd unit may do, and list system calls; a terminal to drive; a browser, for the web
/// page; a server of ClickHouse; and what the benches need. Returns the tools that are missing after
/// all, each of which only a few tests need.
pub fn tests() -> Result<Vec<Missing>> {
    // Whoever has changed the eBPF programs is given a compiler when they are built.
    testing(&TESTING, Vec::new)
}

/// Installs what `.ci/run` needs: as [`tests`], what virtual machines need, and the compiler that has
/// built the committed objects. QEMU is not installed if others must be removed for it: then it is
/// unpacked later.
pub fn landing() -> Result<Vec<Missing>> {
    let mut groups = [&TESTING[..], &MACHINES].concat();
    if vm::has_qemu() {
        groups.retain(|it| *it != Qemu);
    }
    let mut missing = testing(&groups, toolchain::packages)?;
    missing.retain(|it| !it.is_for(&[Qemu]));
    Ok(missing)
}

/// Returns what is missing after all. Fails if no test can run without it.
fn testing(groups: &[Group], compiler: impl Fn() -> Vec<&'static str>) -> Result<Vec<Missing>> {
    root_and_bpffs()?;
    let missing = install(groups, compiler)?;
    let (essential, others): (Vec<_>, Vec<_>) =
        missing.into_iter().partition(|it| it.is_for(&ESSENTIAL));
    require_none(&essential)?;
    Ok(others)
}

/// Installs what the export to Kafka is built with: OpenSSL, and the compiler for librdkafka.
pub fn kafka() -> Result<()> {
    require(&[Kafka])
}

/// Installs what the benches need: what the lab needs, the other trackers that are not our own
/// programs, and a server of ClickHouse. The benches start it themselves: the package's own service
/// is stopped.
pub fn benches() -> Result<()> {
    root_and_bpffs()?;
    require(&[Lab, Benches, ClickHouse])
}

/// Installs what makes environments of Python.
pub fn python() -> Result<()> {
    require(&[Python])
}

/// Installs the programs that are copied into virtual machines with other kernels.
pub fn vm() -> Result<()> {
    require(&[Vm])
}

/// Installs what makes and checks packages.
pub fn packages() -> Result<()> {
    require(&[Packages])
}

/// Installs what makes roots to install packages in.
pub fn roots() -> Result<()> {
    sh::require_root()?;
    require(&[Roots])
}

/// Installs the linker for 64-bit ARM.
pub fn aarch64() -> Result<()> {
    require(&[Aarch64])
}

/// Provides what the lab needs: root, `ip` and a bpffs.
pub fn lab() -> Result<()> {
    root_and_bpffs()?;
    require(&[Lab])
}

fn root_and_bpffs() -> Result<()> {
    sh::require_root().context("cannot make labs and load eBPF programs")?;
    bpffs()
}

/// Where BPF programs and links are pinned.
const BPFFS: &str = "/sys/fs/bpf";

/// Mounts a bpffs if there is none.
pub fn bpffs() -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read the mounts")?;
    if mounts.contains(&format!(" {BPFFS} bpf ")) {
        return Ok(());
    }
    say!("Mounting bpffs on {BPFFS}.");
    let mut mount = sh::as_root("mount", [])?;
    mount.args(["-t", "bpf", "bpf", BPFFS]);
    let output = mount.output().context("cannot run `mount`")?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        // Its second line tells where to look further.
        let said = said.lines().next().unwrap_or("mount: no reason given");
        bail!(no_bpffs(
            Path::new(BPFFS).is_dir(),
            said.trim_end_matches('.')
        ));
    }
    Ok(())
}

/// Why there is no bpffs, and what to do. `said`: what mount said.
fn no_bpffs(is_there: bool, said: &str) -> String {
    let remedy = if is_there {
        "run this on the host, or in a privileged container"
    } else {
        "mount sysfs on /sys, on a kernel with CONFIG_BPF_SYSCALL"
    };
    format!("cannot mount the BPF file system on {BPFFS} ({said}): {remedy}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_missing_is_told_in_one_sentence() {
        let tshark = lacking(&[Group::Tests], |shown| shown.to_string() != "tshark")[0];
        let refused = Refused {
            package: "tshark".to_owned(),
            why: "apt-get: Unable to locate package tshark".to_owned(),
        };
        let missing = Missing::new(&tshark, &[refused]);
        assert_eq!(
            missing.to_string(),
            "there is no tshark to read packets beside twheel: install the package tshark by hand \
             (apt-get: Unable to locate package tshark)"
        );
        assert!(!missing.is_for(&ESSENTIAL));
        let ip = lacking(&[Lab], |_| false)[0];
        let missing = Missing::new(&ip, &[]);
        assert!(missing.is_for(&ESSENTIAL));
        assert_eq!(
            require_none(&[missing]).unwrap_err().to_string(),
            "there is no ip to make labs: the package iproute2 is installed and does not have it"
        );
    }

    #[test]
    fn a_bpffs_that_cannot_be_mounted_is_told_with_a_remedy() {
        assert_eq!(
            no_bpffs(true, "mount: permission denied"),
            "cannot mount the BPF file system on /sys/fs/bpf (mount: permission denied): run this on \
             the host, or in a privileged container"
        );
        assert!(no_bpffs(false, "").contains("mount sysfs on /sys"));
    }
}
