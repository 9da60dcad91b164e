//! The script that the machine runs: what is checked on a kernel.

use super::kernels::{Expected, Kernel};

/// The shell functions that checks use.
const INIT: &str = include_str!("init.sh");
/// Ends the machine's output.
const END: &str = "echo \"vm: ended $failed\"\npoweroff -f\n";
/// All options that add to the instructions that the kernel verifies.
pub const EVERYTHING: &str = "--proto tcp,udp,icmp --accounting --rto on --reap enforce=reset \
                              --i-know-this-drops-traffic --policy /policy.toml \
                              --offload /tmp/offload";
/// The policy for those options.
pub const POLICY: &str = "[[rule]]\nname = 'vm'\ndport = 7777\ntimeouts = { established = '1m' }\n";
/// Options that change the programs or their configuration; each is tried in a run of its own.
const OPTIONS: [(&str, &str); 13] = [
    ("proto", "--proto tcp,udp,icmp"),
    ("accounting", "--accounting"),
    ("rto", "--rto on"),
    ("egress-off", "--egress off"),
    (
        "enforce-drop",
        "--reap enforce=drop --i-know-this-drops-traffic",
    ),
    ("policy", "--policy /policy.toml"),
    ("scheme-hashed", "--scheme hashed"),
    ("scheme-simple", "--scheme simple --timeout 10s"),
    ("source-share-off", "--source-share off"),
    ("pickup-strict", "--pickup strict"),
    ("live-frames", "--stepping live-frames"),
    ("offload", "--offload /tmp/offload"),
    ("log-level", "--log-level debug"),
];

/// Tests of a binary: all of them, or the named ones.
pub struct Tests {
    /// Its name: a file or a directory in `tests/tests`.
    pub binary: &'static str,
    names: &'static [&'static str],
    /// Leaves out tests whose names contain one of these.
    but: &'static [&'static str],
}

impl Tests {
    /// The named tests of a binary, or all if none are named.
    const fn named(binary: &'static str, names: &'static [&'static str]) -> Self {
        Self {
            binary,
            names,
            but: &[],
        }
    }

    /// The line of the script that runs them.
    fn check(&self) -> String {
        let Self { binary, names, but } = self;
        let least = names.len().max(1);
        let mut line = format!("check {binary} tests {binary} {least}");
        if !names.is_empty() {
            line += " --exact";
        }
        line.extend(names.iter().map(|name| format!(" {name}")));
        line.extend(but.iter().map(|name| format!(" --skip {name}")));
        line
    }
}

/// Further options, tried if there are two interfaces.
const WITH_PAIR: [(&str, &str); 2] = [
    ("clsact", "--egress clsact"),
    ("two-interfaces", "--iface vm1"),
];

/// Tests of the full matrix: attach, touch, expire, adopt, policy, flush; delete; the reaper's
/// `socket`; outgoing packets with clsact; live frames; other network namespaces; sockets that are
/// passed; a CPU that goes offline and online.
const FULL: [Tests; 8] = [
    Tests::named("namespaces", &[]),
    Tests::named(
        "inspect",
        &[
            "delete::a_flow_that_has_packets_is_not_deleted",
            "delete::what_a_run_has_left_can_be_deleted_without_one",
        ],
    ),
    Tests::named(
        "reap",
        &[
            "sockets::sockets_whose_peers_are_gone_are_closed_and_no_others",
            "sockets::sockets_of_ipv6_that_serve_ipv4_are_closed",
        ],
    ),
    Tests::named(
        "clsact",
        &[
            "a_filter_outlives_its_run_and_the_next_one_replaces_it_in_place",
            "other_peoples_filters_go_on_beside_it",
        ],
    ),
    Tests::named("stepping", &["live_frames_do_what_test_runs_do"]),
    NETNS,
    PASSED,
    HOTPLUG,
];
/// Takes a CPU offline: here nothing else needs that CPU.
const HOTPLUG: Tests = Tests::named(
    "faults_stall",
    &["flows_of_a_cpu_that_goes_wait_until_it_is_back"],
);
/// Tests of each CI run.
const SHORT: [Tests; 4] = [
    Tests::named(
        "namespaces",
        &[
            "a_killed_run_loses_no_flow_and_the_next_one_adopts",
            "a_policy_is_replaced_while_flows_live",
        ],
    ),
    Tests::named(
        "reap",
        &["sockets::sockets_of_ipv6_that_serve_ipv4_are_closed"],
    ),
    NETNS,
    PASSED,
];
/// What the kernel tells of sockets that programs pass.
const PASSED: Tests = Tests::named("passed", &[]);
/// Tests of other network namespaces: the small programs on their interfaces, and the programs that
/// those continue in.
const NETNS: Tests = Tests::named(
    "netns",
    &[
        "later_run::a_run_that_was_killed_is_replaced_in_place",
        "apart::zones_of_two_namespaces_keep_one_address_apart",
    ],
);
/// Kinds of interface: all of them; all that Debian's cloud kernels have; and those that each CI
/// run tries on one kernel.
const INTERFACES: Tests = Tests::named("interfaces", &[]);
const INTERFACES_BUT_PPP: Tests = Tests {
    but: &["device::ppp"],
    ..INTERFACES
};
const SHORT_INTERFACES: Tests = Tests::named(
    "interfaces",
    &[
        "device::vlan",
        "device::bond",
        "device::wireguard",
        "device::gre",
        "device::vrf_member",
    ],
);
const SHORT_INTERFACES_ON: [u32; 2] = [6, 12];
/// The module that Debian's cloud kernels lack.
const PPP: &str = "kernel/drivers/net/ppp/ppp_async.ko";
/// Tests for kernels on which `lo` is the only interface.
const ON_LO: [Tests; 1] = [Tests::named(
    "namespaces",
    &["lo_runs_generic_when_asked_and_when_native_is_refused"],
)];

/// The test binaries that the scripts call.
pub fn binaries() -> impl Iterator<Item = &'static str> {
    FULL.iter().chain([&INTERFACES]).map(|it| it.binary)
}

/// How much to check.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// Everything.
    Full,
    /// What fits into each CI run.
    Short,
}

/// The machine's script for a kernel.
///
/// With a name, it has only the checks of that name, and the ones that are always done.
pub fn script(kernel: &Kernel, extent: Extent, only: Option<&str>) -> String {
    let checks = match kernel.expected {
        Expected::TooOld => "check refused refused \"$(uname -r) has no .*bpf_loop\"\n".to_owned(),
        Expected::Interleaves => "check refused refused 'PREEMPT_RT.*interleave'\n".to_owned(),
        Expected::Attaches => {
            let is_wanted = |line: &&String| {
                let name = line.split(' ').nth(1).unwrap_or_default();
                only.is_none_or(|only| name == only || name.starts_with("doctor"))
            };
            let lines = checks(kernel, extent);
            lines
                .iter()
                .filter(is_wanted)
                .map(|line| format!("{line}\n"))
                .collect()
        }
    };
    format!("{INIT}{checks}check kernel-is-content content\n{END}")
}

fn checks(kernel: &Kernel, extent: Extent) -> Vec<String> {
    let has_modules = kernel.has_modules;
    let mut lines = vec![
        "check doctor doctor default".to_owned(),
        format!("check doctor-everything doctor everything {EVERYTHING}"),
        format!("check run-everything attaches {EVERYTHING}"),
    ];
    if extent == Extent::Full {
        lines.push("check run attaches".to_owned());
        let pair: &[_] = if has_modules { &WITH_PAIR } else { &[] };
        let runs = OPTIONS.iter().chain(pair);
        lines.extend(runs.map(|(name, options)| format!("check run-{name} attaches {options}")));
    }
    lines.push("check detach detaches".to_owned());
    let tests: &[Tests] = match (has_modules, extent) {
        (false, _) => &ON_LO,
        (true, Extent::Full) => &FULL,
        (true, Extent::Short) => &SHORT,
    };
    lines.extend(tests.iter().map(Tests::check));
    if has_modules {
        let interfaces = match extent {
            Extent::Full if kernel.has(PPP) => Some(&INTERFACES),
            Extent::Full => Some(&INTERFACES_BUT_PPP),
            Extent::Short if kernel.release.series() == SHORT_INTERFACES_ON => {
                Some(&SHORT_INTERFACES)
            }
            Extent::Short => None,
        };
        lines.extend(interfaces.map(Tests::check));
    }
    lines
}
