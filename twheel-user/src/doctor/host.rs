//! What the kernel and the host offer: one finding per question.

use std::path::Path;

use anyhow::Result;

use super::finding::Finding;
use crate::{bpf::BPFFS, clock::Clock, given::written, host};

/// Conntrack's table counts as nearly full from this percentage on.
const NEARLY_FULL: u64 = 90;

/// Whether the kernel has what the programs need; `None`: this user may not ask.
pub(super) fn kernel(release: &str, answer: Option<&Result<(), String>>) -> Finding {
    match answer {
        Some(Ok(())) => Finding::ok("kernel", release),
        Some(Err(error)) => Finding::fail("kernel", error).remedy("boot a newer kernel"),
        None => Finding::warn(
            "kernel",
            format!("{release}: this user may not ask the kernel for its features"),
        )
        .remedy("run `twheel doctor` as root"),
    }
}

pub(super) fn policy(file: &Path, checked: Result<()>) -> Finding {
    match checked {
        Ok(()) => Finding::ok("policy", file.display().to_string()),
        Err(error) => Finding::fail("policy", format!("{error:#}"))
            .remedy(format!("run `twheel policy check {}`", file.display())),
    }
}

pub(super) fn btf(there: bool) -> Finding {
    if there {
        return Finding::ok("BTF", "the kernel has type information");
    }
    Finding::warn(
        "BTF",
        "there is no /sys/kernel/btf/vmlinux: twheel works, but tools such as bpftool show less",
    )
    .remedy("boot a kernel with CONFIG_DEBUG_INFO_BTF")
}

pub(super) fn capabilities(permitted: bool) -> Finding {
    if permitted {
        return Finding::ok("capabilities", "this user may load and attach programs");
    }
    Finding::warn(
        "capabilities",
        "this user may not load programs, so some checks are skipped",
    )
    .remedy("run twheel as root, or with CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN")
}

pub(super) fn bpffs(mounted: bool) -> Finding {
    if mounted {
        return Finding::ok("bpffs", format!("mounted at {BPFFS}"));
    }
    Finding::fail("bpffs", format!("not mounted at {BPFFS}"))
        .remedy(format!("mount -t bpf bpf {BPFFS}"))
}

/// The setting is visible only in the host's own network namespace.
pub(super) fn jit(setting: Option<&str>, loads: bool) -> Finding {
    match setting {
        _ if host::is_off(setting) => Finding::fail(
            "JIT",
            "off: the kernel's interpreter cannot run twheel's programs",
        )
        .remedy("sysctl -w net.core.bpf_jit_enable=1"),
        Some(_) => Finding::ok("JIT", "on"),
        None if loads => Finding::ok("JIT", "on: the programs load, and they need it"),
        None => Finding::warn(
            "JIT",
            "this user cannot read the setting in this network namespace",
        )
        .remedy("run `twheel doctor` as root, or in the host's own network namespace"),
    }
}

pub(super) fn clock(clock: Result<Clock>) -> Finding {
    match clock {
        Ok(clock) => {
            let unit = written(clock.unit());
            Finding::ok(
                "clock",
                format!("ticks every {unit}: --tick {unit} or longer"),
            )
        }
        Err(error) => Finding::fail("clock", format!("{error:#}"))
            .remedy("report this: the kernel should have CLOCK_MONOTONIC_COARSE"),
    }
}

pub(super) fn conntrack(count: Option<&str>, most: Option<&str>) -> Finding {
    let number = |text: Option<&str>| text?.trim().parse::<u64>().ok();
    let (Some(count), Some(most)) = (number(count), number(most)) else {
        return Finding::ok("conntrack", "not loaded: `--timeout inherit` would fail");
    };
    let what = format!("{count} of {most} entries");
    if count * 100 > most * NEARLY_FULL {
        return Finding::warn(
            "conntrack",
            format!("{what}: nearly full: conntrack will drop new connections"),
        )
        .remedy(format!(
            "sysctl -w net.netfilter.nf_conntrack_max={}, or shorten conntrack's timeouts",
            most.saturating_mul(2)
        ));
    }
    Finding::ok("conntrack", what)
}
