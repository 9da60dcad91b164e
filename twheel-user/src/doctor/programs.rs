//! Tries whether the programs can be loaded and run here.

use std::{
    collections::BTreeMap,
    io, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use nix::{
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
};

use super::finding::{Finding, Intended};
use crate::{
    bpf::BPFFS,
    data_plane::{DataPlane, Load, OBJECT, STEP_BUDGET},
    hooks::Egress,
    output::json,
    stepping::{self, Stepping, Why},
};

/// The result of loading.
pub(super) struct Tried {
    pub(super) verified: BTreeMap<String, u32>,
    pub(super) took: Duration,
}

/// `None`: not tried.
pub(super) fn stepping(found: Option<&Result<stepping::Found, String>>) -> Finding {
    match found {
        Some(Ok(stepping::Found { way, why })) => {
            let way = way.name();
            match why {
                Why::Safe => Finding::ok(
                    "stepping",
                    format!("{way}, which disable softirqs on this kernel"),
                ),
                Why::Asked => Finding::ok("stepping", format!("{way}, as requested")),
                Why::Unsafe => Finding::ok(
                    "stepping",
                    format!("{way}: test runs do not disable softirqs on this kernel"),
                ),
                Why::Untold => Finding::warn(
                    "stepping",
                    format!("{way}: twheel could not find out whether test runs disable softirqs"),
                )
                .remedy(
                    "twheel works, but each step costs more: try again when the CPUs are less busy",
                ),
            }
        }
        Some(Err(error)) => Finding::fail("stepping", error)
            .remedy("boot another kernel: twheel cannot step its wheels safely on this one"),
        None => Finding::warn("stepping", "not tried: how twheel can step its wheels")
            .remedy("run `twheel doctor` as root"),
    }
}

/// Loads the data plane and unloads it. Its pins are in a private bpffs that disappears with this
/// thread, so nothing is left behind however the process ends.
pub(super) fn trial(wanted: &Intended, way: Stepping) -> Result<Tried> {
    let unseen = || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_REC | MsFlags::MS_PRIVATE, none)?;
        mount(Some("bpf"), BPFFS, Some("bpf"), MsFlags::empty(), none)
    };
    let trial = || {
        unseen()
            .map_err(io::Error::from)
            .context("cannot mount a private bpffs for the trial")?;
        load(wanted, way)
    };
    thread::scope(|scope| {
        scope
            .spawn(trial)
            .join()
            .unwrap_or_else(|_| bail!("the trial panicked"))
    })
}

fn load(wanted: &Intended, way: Stepping) -> Result<Tried> {
    let load = Load {
        later: &[],
        stepping: way,
        room: match wanted.interfaces.len() {
            0 | 1 => 0,
            several => several as u32,
        },
        log_level: wanted.log_level,
        ..Load::new(OBJECT, wanted.config, wanted.clock)
    };
    let before = Instant::now();
    let plane = DataPlane::load_unpinned(&load)?;
    let took = before.elapsed();
    plane
        .step(STEP_BUDGET)
        .context("the programs load, but cannot be run")?;
    Ok(Tried {
        took,
        verified: plane.verified()?,
    })
}

/// `None`: not tried.
pub(super) fn programs(trial: Option<&Result<Tried, String>>) -> Finding {
    match trial {
        Some(Ok(Tried { verified, took })) => {
            let most = verified.values().max().copied().unwrap_or_default();
            let ms = took.as_millis() as u64;
            Finding {
                instructions: Some(verified.clone()),
                load_us: Some(json::micros(*took)),
                ..Finding::ok(
                    "programs",
                    format!(
                        "the kernel accepts them: {most} instructions verified at most, loaded in \
                         {ms} ms"
                    ),
                )
            }
        }
        Some(Err(error)) => Finding::fail("programs", error.lines().next().unwrap_or_default())
            .remedy(
                "resolve this first: `twheel run` with the same options would fail in the same way",
            ),
        None => Finding::warn("programs", "not tried: whether the kernel accepts them").remedy(
            "run `twheel doctor` as root, with bpffs mounted: the trial needs CAP_SYS_ADMIN",
        ),
    }
}

/// How a run would see outgoing packets. `tcx`: whether the kernel has TCX, if this user may ask;
/// `clsact` tries a filter; `None`: it could not try.
pub(super) fn egress(
    wanted: Egress,
    tcx: Option<bool>,
    clsact: impl FnOnce() -> Option<Result<()>>,
) -> Finding {
    const NAME: &str = "egress";
    const OFF: &str = "use `--egress off`, which sees only incoming packets";
    match (wanted, tcx) {
        (Egress::Off, _) => {
            return Finding::ok(NAME, "outgoing packets are not seen, as requested");
        }
        (Egress::Auto | Egress::On | Egress::Tcx, Some(true)) => {
            return Finding::ok(NAME, "TCX: outgoing packets can be seen");
        }
        (Egress::Tcx, Some(false)) => {
            return Finding::fail(
                NAME,
                "this kernel has no TCX (CONFIG_NET_XGRESS, Linux 6.6)",
            )
            .remedy("use `--egress clsact` or `--egress auto`");
        }
        (_, None) => {
            return Finding::warn(NAME, "this user may not ask whether the kernel has TCX")
                .remedy("run `twheel doctor` as root");
        }
        (Egress::Clsact, _) | (_, Some(false)) => {}
    }
    match clsact() {
        Some(Ok(())) => Finding::ok(NAME, "clsact: outgoing packets can be seen by a filter"),
        Some(Err(error)) if wanted == Egress::Auto => Finding::warn(
            NAME,
            format!("neither TCX nor clsact, so only incoming packets can be seen: {error:#}"),
        )
        .remedy(
            "boot a kernel with CONFIG_NET_XGRESS (6.6), or with CONFIG_NET_SCH_INGRESS and \
             CONFIG_NET_CLS_BPF",
        ),
        Some(Err(error)) => {
            Finding::fail(NAME, format!("clsact filters do not work: {error:#}")).remedy(OFF)
        }
        None => Finding::warn(NAME, "not tried: whether the kernel has clsact filters")
            .remedy("run `twheel doctor` as root: the trial needs CAP_SYS_ADMIN"),
    }
}
