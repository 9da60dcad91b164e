//! What commands need on a machine: what shows that it is there, its Debian package, and what for.

use std::{
    fmt,
    path::Path,
    process::{Command, Stdio},
};

use crate::sh;

/// What something is needed for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Group {
    /// The lab: network namespaces.
    Lab,
    /// Tests, besides what the benches need.
    Tests,
    /// Benches, and tests.
    Benches,
    /// Building the export to Kafka.
    Kafka,
    /// A server of ClickHouse.
    ClickHouse,
    /// Making environments of Python.
    Python,
    /// Building libFuzzer.
    Fuzzer,
    /// The programs that are copied into virtual machines.
    Vm,
    /// The emulator of virtual machines.
    Qemu,
    /// Making and checking packages.
    Packages,
    /// Making roots to install packages in.
    Roots,
    /// Linking for 64-bit ARM.
    Aarch64,
}

use Group::{
    Aarch64, Benches, ClickHouse, Fuzzer, Kafka, Lab, Packages, Python, Qemu, Roots, Tests, Vm,
};

/// What `cargo xtask test` needs.
pub const TESTING: [Group; 7] = [Lab, Kafka, Fuzzer, Tests, Benches, ClickHouse, Python];
/// Without these no test can be built or run.
pub const ESSENTIAL: [Group; 3] = [Lab, Kafka, Fuzzer];
/// What `.ci/run` needs besides: virtual machines.
pub const MACHINES: [Group; 2] = [Vm, Qemu];

/// What shows that something is there.
#[derive(Clone, Copy, Debug)]
pub enum Shown {
    /// A program.
    Program(&'static str),
    /// Any of these programs.
    Any(&'static [&'static str]),
    /// A file.
    File(&'static str),
    /// Modules of Python, separated by commas.
    Modules(&'static str),
}

use Shown::{Any, File, Modules, Program};

impl Shown {
    /// Whether it is there.
    pub fn is_there(self) -> bool {
        match self {
            Program(name) => is_program(name),
            Any(names) => names.iter().any(|name| is_program(name)),
            File(path) => Path::new(path).exists(),
            Modules(names) => Command::new("python3")
                .args(["-c", &format!("import {names}")])
                .stderr(Stdio::null())
                .status()
                .is_ok_and(|status| status.success()),
        }
    }
}

/// A user's PATH may lack sbin, where some distributions keep programs.
fn is_program(name: &str) -> bool {
    Path::new("/usr/sbin").join(name).exists() || !sh::which(name).is_empty()
}

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Program(name) | File(name) => f.write_str(name),
            Any(names) => f.write_str(&names.join(" or ")),
            Modules(names) => write!(f, "python3 with {names}"),
        }
    }
}

/// Shows that a server of ClickHouse is installed.
pub const CLICKHOUSE: &str = "/usr/sbin/clickhouse-server";

/// For which groups something is needed, and to do what; what shows that it is there, and the Debian
/// package that has it.
type Needs = (
    &'static [Group],
    &'static str,
    &'static [(Shown, &'static str)],
);

const NEEDS: [Needs; 23] = [
    (&[Lab, Vm], "make labs", &[(Program("ip"), "iproute2")]),
    (
        &[Kafka],
        "build the export to Kafka",
        &[
            (Program("cc"), "gcc"),
            (Program("g++"), "g++"),
            (Program("make"), "make"),
            (Program("pkg-config"), "pkg-config"),
            (File("/usr/include/openssl/ssl.h"), "libssl-dev"),
        ],
    ),
    (
        &[Fuzzer],
        "build libFuzzer",
        &[(Any(&["c++", "g++", "clang++"]), "g++")],
    ),
    (
        &[Benches, Vm],
        "filter and translate packets in labs",
        &[(Program("nft"), "nftables")],
    ),
    (
        &[Benches],
        "ask the kernel's own tracking in a bench",
        &[(Program("conntrack"), "conntrack")],
    ),
    (
        &[Benches],
        "send captures",
        &[(Program("tcpreplay"), "tcpreplay")],
    ),
    (
        &[Benches],
        "compare twheel with in a bench",
        &[(Program("softflowd"), "softflowd")],
    ),
    (
        &[ClickHouse],
        "send events to",
        &[(File(CLICKHOUSE), "clickhouse-server")],
    ),
    (
        &[Tests],
        "see the system calls of a service",
        &[(Program("strace"), "strace")],
    ),
    (
        &[Tests],
        "check units",
        &[(Program("systemd-analyze"), "systemd")],
    ),
    (
        &[Tests],
        "read packets beside twheel",
        &[(Program("tshark"), "tshark")],
    ),
    (
        &[Tests],
        "collect flow records",
        &[
            (Program("nfcapd"), "nfdump"),
            (Program("nfacctd"), "pmacct"),
        ],
    ),
    (
        &[Tests],
        "send events to",
        &[(Program("rsyslogd"), "rsyslog")],
    ),
    (
        &[Tests],
        "run `twheel top` in",
        &[(Program("tmux"), "tmux")],
    ),
    (
        &[Tests],
        "open the page of metrics",
        &[(Program("chromium"), "chromium")],
    ),
    (
        &[Python],
        "install tools from PyPI",
        &[(Modules("venv, ensurepip"), "python3-venv")],
    ),
    (
        &[Vm],
        "copy into virtual machines",
        &[
            (Program("busybox"), "busybox-static"),
            (Program("kmod"), "kmod"),
            (Program("bpftool"), "bpftool"),
            (Program("wg"), "wireguard-tools"),
            (Program("teamd"), "libteam-utils"),
        ],
    ),
    (
        &[Vm],
        "make virtual machines",
        &[(Program("cpio"), "cpio"), (Program("readelf"), "binutils")],
    ),
    (
        &[Qemu],
        "emulate virtual machines",
        &[(Program("qemu-system-x86_64"), "qemu-system-x86")],
    ),
    (
        &[Packages],
        "make packages",
        &[(Program("dpkg-deb"), "dpkg"), (Program("rpmbuild"), "rpm")],
    ),
    (
        &[Packages],
        "check packages",
        &[
            (Program("lintian"), "lintian"),
            (Program("rpmlint"), "rpmlint"),
        ],
    ),
    (
        &[Roots],
        "make roots of Debian",
        &[(Program("debootstrap"), "debootstrap")],
    ),
    (
        &[Aarch64],
        "link for 64-bit ARM",
        &[
            (Program("aarch64-linux-gnu-gcc"), "gcc-aarch64-linux-gnu"),
            (
                File("/usr/aarch64-linux-gnu/lib/libc.so"),
                "libc6-dev-arm64-cross",
            ),
        ],
    ),
];

/// Something that is needed.
#[derive(Clone, Copy, Debug)]
pub struct Need {
    /// For which groups.
    pub groups: &'static [Group],
    /// What is done with it, as a verb.
    pub to: &'static str,
    /// What shows that it is there.
    pub shown: Shown,
    /// Its Debian package.
    pub package: &'static str,
}

impl Need {
    fn is_for_any_of(&self, groups: &[Group]) -> bool {
        self.groups.iter().any(|it| groups.contains(it))
    }
}

/// What is needed for some groups and not there.
pub fn lacking(groups: &[Group], is_there: impl Fn(Shown) -> bool) -> Vec<Need> {
    let all = NEEDS.iter().flat_map(|(groups, to, what)| {
        what.iter().map(|(shown, package)| Need {
            groups,
            to,
            shown: *shown,
            package,
        })
    });
    all.filter(|it| it.is_for_any_of(groups) && !is_there(it.shown))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn packages(groups: &[Group], there: &[&str]) -> Vec<&'static str> {
        let is_there = |shown: Shown| there.contains(&shown.to_string().as_str());
        let lacking = lacking(groups, is_there);
        lacking.iter().map(|it| it.package).collect()
    }

    #[test]
    fn only_what_is_missing_of_the_groups_is_installed() {
        assert_eq!(packages(&[Lab], &[]), ["iproute2"]);
        assert!(packages(&[Lab], &["ip"]).is_empty());
        assert_eq!(
            packages(&[Kafka, Roots], &["g++", "make", "cc"]),
            ["pkg-config", "libssl-dev", "debootstrap"]
        );
        // What several groups need is listed once.
        let both = packages(&[Lab, Vm, Benches], &[]);
        for package in ["iproute2", "nftables"] {
            assert_eq!(both.iter().filter(|it| **it == package).count(), 1);
        }
    }

    #[test]
    fn what_no_test_can_do_without_is_installed_for_tests() {
        assert!(ESSENTIAL.iter().all(|it| TESTING.contains(it)));
        let installed = packages(&TESTING, &[]);
        let essential = packages(&ESSENTIAL, &[]);
        assert!(essential.iter().all(|it| installed.contains(it)));
        for package in ["tshark", "chromium", "clickhouse-server", "python3-venv"] {
            assert!(installed.contains(&package) && !essential.contains(&package));
        }
        assert!(packages(&MACHINES, &[]).contains(&"qemu-system-x86"));
    }

    #[test]
    fn something_is_shown_by_a_program_one_of_several_or_a_file() {
        assert!(Program("sh").is_there() && !Program("twheel-no-such-program").is_there());
        assert!(Any(&["twheel-no-such-program", "sh"]).is_there());
        assert!(File("/proc/self/stat").is_there() && !File("/nonexistent").is_there());
        assert!(!Modules("twheel_no_such_module").is_there());
    }
}
