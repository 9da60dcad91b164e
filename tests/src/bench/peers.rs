//! What others do, as programs of its own object: `twheel-ebpf/src/bench/peers.rs`.

use std::time::Duration;

use anyhow::{Context, Result};
use aya::{
    Ebpf, EbpfLoader,
    maps::{Map, PerCpuArray},
    programs::Xdp,
};
use twheel::stepper::pin_to;

use twheel_tests::order::Order;

use crate::plane::{self, CPU, Segment};

/// The peers, loaded and attached to nothing.
pub struct Peers {
    bpf: Ebpf,
    order: Order,
}

impl Peers {
    /// Loads these programs, with maps of these sizes.
    pub fn load(programs: &[&str], sizes: &[(&str, u32)]) -> Result<Self> {
        pin_to(CPU)?;
        let object = plane::object("TWHEEL_PEERS_OBJECT")?;
        let mut loader = EbpfLoader::new();
        for (map, entries) in sizes {
            loader.map_max_entries(map, *entries);
        }
        let mut bpf = loader.load(&object).context("cannot load the peers")?;
        for program in programs {
            program_of(&mut bpf, program)?
                .load()
                .with_context(|| format!("cannot load {program}"))?;
        }
        Ok(Self {
            order: Order::open(bpf.map("ORDER").context("the object has no map ORDER")?)?,
            bpf,
        })
    }

    /// A map.
    pub fn map(&self, name: &str) -> Result<&Map> {
        let map = self.bpf.map(name);
        map.with_context(|| format!("the object has no map {name}"))
    }

    /// The same, to write to.
    pub fn map_mut(&mut self, name: &str) -> Result<&mut Map> {
        let map = self.bpf.map_mut(name);
        map.with_context(|| format!("the object has no map {name}"))
    }

    /// Flows that have been inserted into `LRU`.
    pub fn inserts(&self) -> Result<u64> {
        self.count("INSERTS")
    }

    /// The sum of a counter of each CPU.
    pub fn count(&self, map: &str) -> Result<u64> {
        let counter = PerCpuArray::<_, u64>::try_from(self.map(map)?)?;
        Ok(counter.get(&0, 0)?.iter().sum())
    }

    /// A program that was loaded.
    pub fn program(&mut self, name: &str) -> Result<&mut Xdp> {
        program_of(&mut self.bpf, name)
    }

    /// Runs a program over a packet of each of these flows; the kernel's time for it.
    pub fn run(&mut self, program: &str, segment: Segment, flows: &[u32]) -> Result<Duration> {
        let program = program_of(&mut self.bpf, program)?;
        self.order.run(program, CPU, &segment.bytes(), flows)
    }
}

fn program_of<'a>(bpf: &'a mut Ebpf, name: &str) -> Result<&'a mut Xdp> {
    let program = bpf.program_mut(name);
    let program = program.with_context(|| format!("the object has no program {name}"))?;
    Ok(program.try_into()?)
}
