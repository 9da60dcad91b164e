//! Which hook sees the packets (native XDP, TCX or clsact) beside programs of others, and in which
//! order.

mod interfaces;
mod order;
mod refused;
mod renamed;
mod replaced;
mod ways;

use std::time::Duration;

use anyhow::{Result, ensure};
use nix::net::if_::if_nametoindex;
use twheel::{tc::Way, tcx};
use twheel_tests::{
    netns::Namespace,
    pair::SERVER,
    running::{Ended, Twheel},
    tc::{filters_of, has_qdisc},
};

/// Tracks UDP flows, so each packet is counted, and no packets are sent but those of the test.
const RUN: [&str; 8] = [
    "--iface",
    SERVER,
    "--proto",
    "udp",
    "--accounting",
    "--timeout",
    "udp=10m,udp_stream=10m",
    "--json",
];

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

fn start(host: &Namespace, args: &[&str]) -> Result<Twheel> {
    Twheel::start(host, &[&RUN[..], args].concat())
}

fn run_once(host: &Namespace, args: &[&str]) -> Result<Ended> {
    host.twheel_once(&[&["run"], &RUN[..], args].concat())
}

fn stop(twheel: Twheel) -> Result<()> {
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}

fn detach(host: &Namespace) -> Result<()> {
    let ended = host.twheel_once(&["detach", "--iface", SERVER])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(())
}

/// Nothing of twheel's is left, filters and qdisc included.
fn check_clean(host: &Namespace) -> Result<()> {
    host.check_clean(SERVER)?;
    for way in ["ingress", "egress"] {
        let found = filters_of(host, SERVER, way)?;
        ensure!(found.is_empty(), "filters are left: {way}: {found:?}");
    }
    ensure!(!has_qdisc(host, SERVER)?, "the qdisc is left");
    Ok(())
}

/// The TCX programs of the server, in order.
fn programs(host: &Namespace, way: Way) -> Result<Vec<u32>> {
    host.enter(|| Ok(tcx::programs(if_nametoindex(SERVER)?, way)?))
}

/// Whether a run has pinned something under this name.
fn has_pin(host: &Namespace, name: &str) -> Result<bool> {
    Ok(host.pins()?.iter().any(|it| it.ends_with(name)))
}
