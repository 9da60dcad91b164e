//! Checks whether `twheel run` would work on this host: one finding per question, each with what to
//! do.
//!
//! A check is a function of what was read; [`examine`] does the reading. Nothing is attached, and
//! what is loaded for a trial is unloaded at the end.
//!
//! | question | file |
//! |---|---|
//! | what a finding is | `finding.rs` |
//! | what the kernel and the host offer | `host.rs` |
//! | whether the programs load and run | `programs.rs` |
//! | what the interfaces are, and what is attached to them | `interfaces.rs` |
//! | what is pinned | `pinned.rs` |
//! | what a run itself would refuse | `run.rs` |

mod finding;
mod host;
mod interfaces;
mod pinned;
mod programs;
mod run;
#[cfg(test)]
mod tests;

use std::{fs, path::Path};

use caps::Capability;

pub use self::finding::{Finding, Intended, Status};
use crate::{
    bpf::BPFFS,
    clock::Clock,
    clsact,
    pins::{self, Instance},
    policy::install,
    privilege, tcx,
};

/// The loopback interface, which has this number in every network namespace.
const LOOPBACK: u32 = 1;

/// Checks this host and its interfaces, and tries to load what a run would load.
pub fn examine(intended: &Intended) -> Vec<Finding> {
    let read = |path: &str| fs::read_to_string(path).ok();
    let permitted = crate::host::check_capabilities().is_ok();
    let bpffs = crate::host::check_bpffs(Path::new(BPFFS)).is_ok();
    let can_hide = privilege::has(Capability::CAP_SYS_ADMIN);
    let asked =
        permitted.then(|| crate::host::check_kernel().map_err(|error| format!("{error:#}")));
    let fits = matches!(asked, Some(Ok(())));
    let way = fits.then(|| {
        let found = crate::stepping::find(intended.stepping);
        found.map_err(|error| format!("{error:#}"))
    });
    let trial = match &way {
        Some(Ok(found)) if bpffs && can_hide => {
            Some(programs::trial(intended, found.way).map_err(|error| format!("{error:#}")))
        }
        _ => None,
    };
    let mut findings = vec![
        host::kernel(&crate::host::release(), asked.as_ref()),
        host::btf(Path::new("/sys/kernel/btf/vmlinux").exists()),
        host::capabilities(permitted),
        host::bpffs(bpffs),
        programs::stepping(way.as_ref()),
        programs::programs(trial.as_ref()),
        host::jit(
            read(crate::host::JIT).as_deref(),
            trial.as_ref().is_some_and(Result::is_ok),
        ),
        programs::egress(
            intended.hooks.egress,
            privilege::has(Capability::CAP_NET_ADMIN).then(|| tcx::exists(LOOPBACK)),
            || can_hide.then(clsact::probe),
        ),
        host::clock(Clock::jiffies()),
        host::conntrack(
            read("/proc/sys/net/netfilter/nf_conntrack_count").as_deref(),
            read("/proc/sys/net/netfilter/nf_conntrack_max").as_deref(),
        ),
    ];
    let instances = pins::found();
    // The pins that a run on these interfaces would adopt.
    let kept = match intended.interfaces[..] {
        [] => Ok(None),
        _ => Instance::find(&intended.interfaces),
    };
    let own: Vec<u32> = match (&intended.interfaces[..], &kept) {
        ([], _) => instances
            .iter()
            .flatten()
            .flat_map(|it| pinned::programs_of(&it.path))
            .collect(),
        (_, Ok(Some(pins))) => pinned::programs_of(pins.path()),
        _ => Vec::new(),
    };
    findings.extend(intended.policy.as_deref().map(|file| {
        host::policy(
            file,
            install::check(file, intended.clock, &intended.config.0),
        )
    }));
    findings.extend(interfaces::interfaces(intended, &own));
    findings.extend(pinned::pinned(instances));
    // A user without these permissions cannot check this.
    if permitted && bpffs {
        findings.extend(run::findings(intended, kept));
    }
    findings
}
