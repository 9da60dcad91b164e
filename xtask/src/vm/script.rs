//! What is checked on a kernel: the script that the machine runs.

use super::kernels::{Expected, Kernel};

/// The functions that the checks are made of.
const INIT: &str = include_str!("init.sh");
/// Ends the machine's output.
const END: &str = "echo \"vm: ended $failed\"\npoweroff -f\n";
/// All options that add to what the kernel verifies.
pub const EVERYTHING: &str = "--proto tcp,udp,icmp --accounting --rto on --reap enforce=reset \
                              --i-know-this-drops-traffic --policy /policy.toml";
/// The policy of those.
pub const POLICY: &str = "[[rule]]\nname = 'vm'\ndport = 7777\ntimeouts = { established = '1m' }\n";
/// Options that change the programs or what they are told, one run each.
const OPTIONS: [(&str, &str); 12] = [
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
    ("log-level", "--log-level debug"),
];

/// Tests of a binary: all of them, or those of these names.
pub struct Tests {
    /// The file in `tests/tests`.
    pub binary: &'static str,
    names: &'static [&'static str],
}

/// The same, where there are two interfaces.
const WITH_PAIR: [(&str, &str); 2] = [
    ("clsact", "--egress clsact"),
    ("two-interfaces", "--iface vm1"),
];

/// Of the matrix: attach, touch, expire, adopt, policy, flush; delete; the reaper's `socket`; outgoing packets by clsact; live
/// frames; a CPU that goes and comes back.
const FULL: [Tests; 6] = [
    Tests {
        binary: "namespaces",
        names: &[],
    },
    Tests {
        binary: "inspect",
        names: &[
            "a_flow_that_has_packets_is_not_deleted",
            "what_a_run_has_left_can_be_deleted_without_one",
        ],
    },
    Tests {
        binary: "reap",
        names: &[
            "sockets_whose_peers_are_gone_are_closed_and_no_others",
            "sockets_of_ipv6_that_serve_ipv4_are_closed",
        ],
    },
    Tests {
        binary: "clsact",
        names: &[
            "a_filter_outlives_its_run_and_the_next_one_replaces_it_in_place",
            "other_peoples_filters_go_on_beside_it",
        ],
    },
    Tests {
        binary: "stepping",
        names: &["live_frames_do_what_test_runs_do"],
    },
    HOTPLUG,
];
/// A CPU that goes: here it is nobody else's.
const HOTPLUG: Tests = Tests {
    binary: "faults_stall",
    names: &["flows_of_a_cpu_that_goes_wait_until_it_is_back"],
};
/// Of each run of CI.
const SHORT: [Tests; 2] = [
    Tests {
        binary: "namespaces",
        names: &[
            "a_killed_run_loses_no_flow_and_the_next_one_adopts",
            "a_policy_is_replaced_while_flows_live",
        ],
    },
    Tests {
        binary: "reap",
        names: &["sockets_of_ipv6_that_serve_ipv4_are_closed"],
    },
];
/// Where `lo` is the only interface.
const ON_LO: [Tests; 1] = [Tests {
    binary: "namespaces",
    names: &["lo_runs_generic_when_asked_and_when_native_is_refused"],
}];

/// The binaries of tests that the scripts call.
pub fn binaries() -> impl Iterator<Item = &'static str> {
    FULL.iter().map(|it| it.binary)
}

/// How much is checked.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Extent {
    /// All.
    Full,
    /// What fits into each run of CI.
    Short,
}

/// The machine's script for a kernel.
pub fn script(kernel: &Kernel, extent: Extent) -> String {
    let checks = match kernel.expected {
        Expected::TooOld => "check refused refused \"$(uname -r) has no .*bpf_loop\"\n".to_owned(),
        Expected::Interleaves => "check refused refused 'PREEMPT_RT.*interleave'\n".to_owned(),
        Expected::Attaches => checks(kernel.has_modules, extent),
    };
    format!("{INIT}{checks}check kernel-is-content content\n{END}")
}

fn checks(has_modules: bool, extent: Extent) -> String {
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
    lines.extend(tests.iter().map(|Tests { binary, names }| {
        let least = names.len().max(1);
        let exact = if names.is_empty() { "" } else { "--exact " };
        format!(
            "check {binary} tests {binary} {least} {exact}{}",
            names.join(" ")
        )
    }));
    lines.push(String::new());
    lines.join("\n")
}
