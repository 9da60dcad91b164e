//! What others do, for comparison: flows in the kernel's LRU hash, `twheel-ebpf/src/bench/trackers.rs`.

use std::collections::HashSet;

use anyhow::{Context, Result};
use aya::{
    Ebpf, EbpfLoader,
    maps::{HashMap, PerCpuArray},
    programs::Xdp,
};
use twheel_common::flow::FlowKey;

use crate::{
    order::Order,
    plane::{ACK, frame},
};

/// The LRU hash and its program.
pub struct Lru(Ebpf);

impl Lru {
    /// Loads it for this many flows.
    pub fn load(flows: u32) -> Result<Self> {
        let path = std::env::var_os("TWHEEL_PEERS_OBJECT")
            .context("TWHEEL_PEERS_OBJECT is not set: run this through `cargo xtask test`")?;
        let object = std::fs::read(path).context("cannot read the peers' object")?;
        let mut bpf = EbpfLoader::new()
            .map_max_entries("LRU", flows)
            .load(&object)
            .context("cannot load the peers")?;
        let program = bpf.program_mut("peer_lru").context("no peer_lru")?;
        <&mut Xdp>::try_from(program)?.load()?;
        Ok(Self(bpf))
    }

    /// Runs the program on a packet of each flow, in order, on this thread's CPU. A flow is given
    /// by its source address as it appears in the frame; the low half is also the port.
    pub fn receive(&self, cpu: u32, flows: &[u32]) -> Result<()> {
        let mut order = Order::open(self.0.map("ORDER").context("no ORDER")?)?;
        let program = self.0.program("peer_lru").context("no peer_lru")?;
        order.run(program.try_into()?, cpu, &frame(0, false, ACK), flows)?;
        Ok(())
    }

    /// How often a packet's flow was missing and was entered.
    pub fn inserts(&self) -> Result<u64> {
        let map = self.0.map("INSERTS").context("no INSERTS")?;
        let inserts = PerCpuArray::<_, u64>::try_from(map)?;
        Ok(inserts.get(&0, 0)?.iter().sum())
    }

    /// The flows in the hash.
    pub fn keys(&self) -> Result<HashSet<FlowKey>> {
        let map = self.0.map("LRU").context("no LRU")?;
        let table = HashMap::<_, FlowKey, [u64; 5]>::try_from(map)?;
        Ok(table.keys().collect::<Result<_, _>>()?)
    }
}
