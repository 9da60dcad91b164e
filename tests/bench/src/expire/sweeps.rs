//! Sweeps over all flows, in the kernel and from userspace.

use std::{thread, time::Duration};

use anyhow::{Result, ensure};
use aya::maps::Array;
use twheel::{clock::Clock, progress};
use twheel_tests::order::PACKETS;

use crate::{
    batch::Sweeper,
    inputs::{Segment, hash_entries},
    peers::Peers,
    plane,
    report::Figure,
    size,
};

/// Passes of each sweep.
pub const PASSES: usize = size(5, 1);

/// The time of each pass, in seconds.
pub struct Sweeps {
    pub kernel: Figure,
    pub batch: Figure,
}

/// Passes over this many live flows, both kinds of sweep in turn.
pub fn sweeps(count: u32) -> Result<Sweeps> {
    let mut peers = Peers::load(&["peer_lru", "peer_sweep"], &[("LRU", hash_entries(count))])?;
    let flows: Vec<_> = plane::addresses(0..count).collect();
    for flows in flows.chunks(PACKETS) {
        peers.run("peer_lru", Segment::Ack, flows)?;
    }
    // No flow is idle for this long.
    let timeout = Clock::jiffies()?.units_ceil(Duration::from_secs(3600));
    let mut sweeper = Sweeper::new();
    let (mut kernel, mut batch) = (Vec::new(), Vec::new());
    let mut newest = 0;
    for pass in progress::over("sweeps", 0..PASSES + 1) {
        let (took, met, deleted) = sweep(&mut peers, timeout)?;
        ensure!(
            met == u64::from(count) && deleted == 0,
            "a sweep met {met} flows of {count} and deleted {deleted}"
        );
        let swept = sweeper.pass(peers.map("LRU")?, newest)?;
        ensure!(
            swept.met == u64::from(count) && swept.deleted == 0,
            "a batch sweep met {} flows of {count} and deleted {}",
            swept.met,
            swept.deleted
        );
        newest = swept.newest.saturating_sub(timeout);
        // The first pass warms up.
        if pass > 0 {
            kernel.push(took.as_secs_f64());
            batch.push(swept.cpu.as_secs_f64());
        }
    }
    // Now idle flows are deleted: by the kernel's sweep, then, after they have begun again, from
    // userspace.
    thread::sleep(Duration::from_millis(100));
    let (_, _, deleted) = sweep(&mut peers, 1)?;
    ensure!(
        deleted == u64::from(count),
        "a sweep deleted {deleted} flows of {count}"
    );
    for flows in flows.chunks(PACKETS) {
        peers.run("peer_lru", Segment::Ack, flows)?;
    }
    let swept = sweeper.pass(peers.map("LRU")?, u64::MAX)?;
    ensure!(
        swept.deleted == u64::from(count),
        "a batch sweep deleted {} flows of {count}",
        swept.deleted
    );
    Ok(Sweeps {
        kernel: Figure::from_samples(&kernel),
        batch: Figure::from_samples(&batch),
    })
}

/// One pass in the kernel. Returns its time, the flows met, and the flows deleted.
fn sweep(peers: &mut Peers, timeout: u64) -> Result<(Duration, u64, u64)> {
    let mut pass = Array::<_, [u64; 4]>::try_from(peers.map_mut("PASS")?)?;
    pass.set(0, [timeout, 0, 0, 0], 0)?;
    let took = peers.run("peer_sweep", Segment::Ack, &[0])?;
    let pass = Array::<_, [u64; 4]>::try_from(peers.map("PASS")?)?;
    let [_, _, met, deleted] = pass.get(&0, 0)?;
    Ok((took, met, deleted))
}
