//! Installs what each command needs on a machine.

use std::{fs, path::Path};

use anyhow::{Context, Result};

use crate::{
    apt, ebpf, fleet_tools, kubernetes_tools, prometheus,
    sh::{self, say},
};

/// Installs everything: `cargo xtask setup`.
pub fn setup() -> Result<()> {
    ebpf::objects()?;
    tests()?;
    kafka()?;
    fleet_tools::install();
    kubernetes_tools::install();
    prometheus::install();
    say!("Ready.");
    Ok(())
}

/// Installs what the tests need: what the lab needs; `nft`, to compare with the kernel's own
/// connection tracking; programs that read packet captures, collect flows and logs, tell what a
/// systemd unit may do, and list system calls; a terminal to drive; a browser, for the web page; and
/// what the benches need.
pub fn tests() -> Result<()> {
    benches()?;
    need(&[
        ("strace", "strace", "10 s"),
        ("systemd-analyze", "systemd", "30 s"),
        ("tshark", "tshark", "1 min"),
        ("nfcapd", "nfdump", "10 s"),
        ("nfacctd", "pmacct", "30 s"),
        ("rsyslogd", "rsyslog", "10 s"),
        ("tmux", "tmux", "10 s"),
        ("chromium", "chromium", "1 min"),
    ])
}

/// Installs what the export to Kafka is built with: OpenSSL, and the compiler for librdkafka.
pub fn kafka() -> Result<()> {
    need(&[
        ("cc", "gcc", "20 s"),
        ("g++", "g++", "20 s"),
        ("make", "make", "5 s"),
        ("pkg-config", "pkg-config", "5 s"),
    ])?;
    if !Path::new("/usr/include/openssl/ssl.h").exists() {
        apt::install(&["libssl-dev"], "10 s")?;
    }
    Ok(())
}

/// Installs a ClickHouse server. The tests start it themselves: the package's own service is stopped.
pub fn clickhouse() -> Result<()> {
    if Path::new("/usr/sbin/clickhouse-server").exists() {
        return Ok(());
    }
    apt::install(&["clickhouse-server"], "30 s")?;
    if !sh::which("systemctl").is_empty() {
        let is_running = Path::new("/run/systemd/system").exists();
        let mut systemctl = sh::as_root("systemctl", [])?;
        systemctl.args(["disable", "--quiet", "clickhouse-server"]);
        sh::run(systemctl.args(is_running.then_some("--now")))?;
    }
    Ok(())
}

/// Installs what the benches need: what the lab needs, and the other trackers that are not our own
/// programs.
pub fn benches() -> Result<()> {
    lab()?;
    need(&[
        ("nft", "nftables", "10 s"),
        ("conntrack", "conntrack", "10 s"),
        ("tcpreplay", "tcpreplay", "10 s"),
        ("softflowd", "softflowd", "10 s"),
    ])?;
    clickhouse()
}

/// Installs the programs that are copied into virtual machines with other kernels.
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

/// Installs what makes and checks packages.
pub fn packages() -> Result<()> {
    need(&[
        ("dpkg-deb", "dpkg", "5 s"),
        ("rpmbuild", "rpm", "20 s"),
        ("lintian", "lintian", "30 s"),
        ("rpmlint", "rpmlint", "20 s"),
    ])
}

/// Installs what makes roots to install packages in.
pub fn roots() -> Result<()> {
    sh::require_root()?;
    need(&[("debootstrap", "debootstrap", "5 s")])
}

/// Installs the linker for 64-bit ARM.
pub fn aarch64() -> Result<()> {
    need(&[("aarch64-linux-gnu-gcc", "gcc-aarch64-linux-gnu", "30 s")])?;
    if !Path::new("/usr/aarch64-linux-gnu/lib/libc.so").exists() {
        apt::install(&["libc6-dev-arm64-cross"], "20 s")?;
    }
    Ok(())
}

/// Provides what the lab needs: root, `ip` and a bpffs.
pub fn lab() -> Result<()> {
    sh::require_root()?;
    need(&[("ip", "iproute2", "10 s")])?;
    bpffs()
}

/// Installs missing programs. Each entry has the program, its packages, and how long they usually
/// take to install.
fn need(programs: &[(&str, &str, &str)]) -> Result<()> {
    for (program, package, usually) in programs {
        // A user's PATH may lack sbin, where some distributions keep programs.
        if !Path::new("/usr/sbin").join(program).exists() && sh::which(program).is_empty() {
            apt::install(&[package], usually)?;
        }
    }
    Ok(())
}

/// Mounts a bpffs if there is none: programs and BPF links are pinned there.
pub fn bpffs() -> Result<()> {
    let mounts = fs::read_to_string("/proc/self/mounts").context("cannot read the mounts")?;
    if !mounts.contains(" /sys/fs/bpf bpf ") {
        say!("Mounting bpffs on /sys/fs/bpf.");
        let mut mount = sh::as_root("mount", [])?;
        sh::run(mount.args(["-t", "bpf", "bpf", "/sys/fs/bpf"]))?;
    }
    Ok(())
}
