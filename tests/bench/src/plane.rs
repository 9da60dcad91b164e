//! A data plane for benchmarks, loaded as in production and attached to nothing, together with the
//! kernel hash maps that it is compared with.

use std::{array, time::Duration};

use anyhow::{Result, ensure};
use aya::maps::{Array, Map};
use nix::time::{ClockId, clock_gettime};
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Events, Load},
    flows::Flows,
    policy::{Policy, install},
    settings::Settings,
    stepper::pin_to,
    timeouts::Timeouts,
    watched::Programs,
};
use twheel_common::{
    config::{Config, Meta, Watched},
    counter::{Counter, FIRST_INTERFACE},
    event::Reason,
    flow::{Direction, FlowKey},
    offload::Life,
    rule::Rule,
    step::{Deleted, MAX_DELETES},
    table::{Hash, Line},
};
use twheel_tests::order::Order;

use crate::{
    inputs::{CPU, Segment, hash_entries, object},
    peers::Peers,
    report::Figure,
};

/// A table is aged by replacing one in this many of its flows, chosen at random, by new ones, …
const BATCHES: usize = 16;
/// … until it has held this many times its number of flows.
const LIVES: usize = 3;

/// A random number generator: SplitMix64.
#[derive(Default)]
pub struct Random(u64);

impl Random {
    fn word(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ word >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ word >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ word >> 31
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u32) -> u32 {
        (((self.word() >> 32) * u64::from(end)) >> 32) as u32
    }

    /// Shuffles numbers.
    pub fn shuffle(&mut self, numbers: &mut [u32]) {
        for end in (1..numbers.len()).rev() {
            numbers.swap(end, self.below(end as u32 + 1) as usize);
        }
    }
}

/// The kernel hash maps in the benchmarks' object.
const HASHES: [&str; 2] = ["FLOOR", "LISTED"];

/// The data plane of the benchmarks.
pub struct Bench {
    /// With the stepper and the deleting program of production.
    pub plane: DataPlane,
    /// Its ring of events.
    pub events: Events,
    /// For everything random.
    pub random: Random,
    cpu: u32,
    /// How many flows have begun so far.
    begun: u32,
    flows: Flows,
    hash: Hash,
    order: Order,
}

impl Bench {
    /// Loads it, with kernel hash maps that have capacity for as many flows.
    pub fn load(config: (Config, Rule), clock: Clock) -> Result<Self> {
        Self::load_object(&object("TWHEEL_BENCH_OBJECT")?, config, clock)
    }

    /// The same as for a run on several interfaces. The interface that packets come in through is
    /// in this zone.
    pub fn load_several(config: (Config, Rule), clock: Clock, zone: u8) -> Result<Self> {
        let object = object("TWHEEL_BENCH_OBJECT")?;
        let plane = load_with_hashes(&object, config, clock, 1)?;
        let interface = Watched {
            place: FIRST_INTERFACE as u16,
            zone,
            flags: 0,
        };
        Programs::open(&plane)?.tell(1, interface)?;
        Self::over(plane)
    }

    /// The same with another object of the benchmarks.
    pub fn load_object(object: &[u8], config: (Config, Rule), clock: Clock) -> Result<Self> {
        Self::over(load_with_hashes(object, config, clock, 0)?)
    }

    /// The same with a data plane that was loaded from the benchmarks' object.
    pub fn over(mut plane: DataPlane) -> Result<Self> {
        let order = Order::open(plane.map("ORDER")?)?;
        let meta = Array::<_, Meta>::try_from(plane.map("META")?)?.get(&0, 0)?;
        Ok(Self {
            events: plane.take_events()?,
            flows: plane.flows()?,
            hash: meta.hash,
            order,
            random: Random::default(),
            cpu: CPU,
            begun: 0,
            plane,
        })
    }

    /// Puts a policy into force.
    pub fn policy(&mut self, text: &str) -> Result<()> {
        let clock = self.plane.clock();
        let timeouts = clock.unit()..=Duration::from_secs(86_400);
        let policy = Policy::parse("bench", text.as_bytes(), timeouts)?;
        let compiled = policy.compile(|_| None)?;
        let open = |name: &str| self.plane.open(name);
        install::install(&open, Some((&policy, &compiled)), clock).map(drop)
    }

    /// Moves this thread to another CPU, on which its packets come in from now on.
    pub fn go_to(&mut self, cpu: u32) -> Result<()> {
        self.cpu = cpu;
        pin_to(cpu)
    }

    /// Runs a program over a packet of each of these flows. Returns the kernel's time for it.
    pub fn run(&mut self, program: &str, segment: Segment, flows: &[u32]) -> Result<Duration> {
        let program = self.plane.xdp(&format!("bench_{program}"))?;
        self.order.run(program, self.cpu, &segment.bytes(), flows)
    }

    /// Deletes flows at random, from twheel's table alone.
    pub fn delete(&mut self, count: usize) -> Result<Vec<u32>> {
        let records = self.hash.records() as u32;
        let mut deleted = Vec::with_capacity(count);
        let mut chosen = Vec::with_capacity(MAX_DELETES);
        let mut events = Vec::new();
        while deleted.len() < count {
            chosen.clear();
            while chosen.len() < MAX_DELETES.min(count - deleted.len()) {
                chosen.extend(self.flows.get(self.random.below(records)));
            }
            let mut entries: Vec<_> = chosen
                .iter()
                .map(|flow| flow.delete(Reason::Deleted))
                .collect();
            self.plane.delete(&mut entries)?;
            for (flow, entry) in chosen.iter().zip(&entries) {
                match Deleted::from_raw(entry.outcome) {
                    Some(Deleted::Done) => deleted.push(source(&flow.key)),
                    // It was chosen twice.
                    Some(Deleted::Changed) => {}
                    outcome => anyhow::bail!("a flow was not deleted: {outcome:?}"),
                }
            }
            self.events.drain_ended(&mut events);
            events.clear();
        }
        Ok(deleted)
    }

    /// New flows, none of which has existed before.
    pub fn fresh(&mut self, count: usize) -> Vec<u32> {
        let begin = self.begun;
        self.begun += count as u32;
        (begin..self.begun).map(address).collect()
    }

    /// Fills twheel's empty table and brings it to the state that long use leads to: its flows have
    /// come one by one to a table that was full. Returns the flows in random order. The floor's
    /// table, if it is wanted, holds the same flows with the same past, and so do the tables of
    /// those peers that are trackers.
    pub fn age(
        &mut self,
        flows: u32,
        with_floor: bool,
        mut peers: Option<&mut Peers>,
    ) -> Result<Vec<u32>> {
        let batch = (flows as usize / BATCHES).max(1);
        let mut come = self.fresh(flows as usize);
        for life in 0..=LIVES * BATCHES {
            if life > 0 {
                let gone = self.delete(batch)?;
                if with_floor {
                    self.run("floor_delete", Segment::Ack, &gone)?;
                }
                if let Some(peers) = &mut peers {
                    peers.remove(&gone)?;
                }
                come = self.fresh(batch);
            }
            self.run("touch", Segment::Ack, &come)?;
            if with_floor {
                self.run("floor_insert", Segment::Ack, &come)?;
            }
            if let Some(peers) = &mut peers {
                peers.enter(&come)?;
            }
        }
        // New flows without a free record in their window have evicted others; their events are not
        // part of the next measurement.
        self.events.drain_ended(&mut Vec::new());
        let mut flows: Vec<_> = self.flows.iter().map(|flow| source(&flow.key)).collect();
        self.random.shuffle(&mut flows);
        Ok(flows)
    }

    /// Registers all flows, as programs do that hand their timeouts over: data of both sides counts.
    pub fn register(&self) -> Result<()> {
        let mut lines = Array::<_, Line>::try_from(Map::Array(self.plane.open("FLOWS")?))?;
        let (low, high) = (Direction::FromLow, Direction::FromHigh);
        let marks = Life(Life::data(low).0 | Life::data(high).0).marks();
        for place in 0..lines.len() {
            let mut line = lines.get(&place, 0)?;
            line.details.iter_mut().for_each(|it| *it |= marks);
            lines.set(place, line, 0)?;
        }
        Ok(())
    }

    /// The fraction of flows that are in their home.
    pub fn at_home(&self) -> f64 {
        let (mut flows, mut at_home) = (0, 0);
        for flow in self.flows.iter() {
            flows += 1;
            at_home += u32::from(self.hash.place(&flow.key).home == flow.index & !1);
        }
        f64::from(at_home) / f64::from(flows)
    }

    /// Checks that a counter has gone up by `wanted`, allowing for the one insertion in 100,000
    /// that may be refused.
    pub fn check(&self, counter: Counter, wanted: u64) -> Result<()> {
        let counted = self.plane.counters()?.get(counter);
        ensure!(
            counted.abs_diff(wanted) <= wanted / 100_000,
            "{}: {counted}, not {wanted}",
            counter.name()
        );
        Ok(())
    }
}

/// Source addresses of flows, for benchmarks without a twheel table.
pub fn addresses(numbers: std::ops::Range<u32>) -> impl Iterator<Item = u32> {
    numbers.map(address)
}

/// The source address of the flow with this number. The programs write it into the packet, and take
/// its low half as the port. As good as random (MurmurHash3's finalizer, a bijection).
fn address(number: u32) -> u32 {
    let mut address = number;
    address = (address ^ address >> 16).wrapping_mul(0x85eb_ca6b);
    address = (address ^ address >> 13).wrapping_mul(0xc2b2_ae35);
    address ^ address >> 16
}

/// The source address of a flow in the table: of the endpoint that is not [`SEGMENT`]'s.
fn source(key: &FlowKey) -> u32 {
    let address = |direction| match key.sender(direction).ip() {
        std::net::IpAddr::V4(address) => u32::from_ne_bytes(address.octets()),
        std::net::IpAddr::V6(_) => 0,
    };
    let destination = u32::from_ne_bytes([192, 0, 2, 1]);
    match [Direction::FromLow, Direction::FromHigh].map(address) {
        [source, to] | [to, source] if to == destination => source,
        _ => 0,
    }
}

/// CPU time of this thread.
pub fn cpu_time() -> Result<Duration> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_err(std::io::Error::from)?;
    Ok(time.into())
}

/// Configuration and timeouts: this timeout for all states, everything else as in production by
/// default.
pub fn config(clock: Clock, timeout: Duration, max_flows: u32) -> Result<(Config, Rule)> {
    Settings {
        timeouts: Timeouts::new(timeout, timeout),
        max_flows,
        ..Settings::default()
    }
    .config(clock)
}

/// Loads an object, with this thread on [`CPU`]. Its pins are removed when this returns.
pub fn load(object: &[u8], config: (Config, Rule), clock: Clock) -> Result<DataPlane> {
    pin_to(CPU)?;
    DataPlane::load_unpinned(&Load::new(object, config, clock))
}

/// The same with the kernel hash maps, and with capacity for this many interfaces; 0: a single one,
/// which is not looked up.
fn load_with_hashes(
    object: &[u8],
    config: (Config, Rule),
    clock: Clock,
    room: u32,
) -> Result<DataPlane> {
    pin_to(CPU)?;
    let entries = hash_entries(config.0.max_flows);
    let load = Load {
        others: HASHES.map(|map| (map, entries)).to_vec(),
        room,
        ..Load::new(object, config, clock)
    };
    DataPlane::load_unpinned(&load)
}

/// Each sample of one side divided by the other side's of the same round.
pub fn ratio<const N: usize>(samples: &[Vec<f64>; N], side: usize, other: usize) -> Figure {
    let pairs = samples[side].iter().zip(&samples[other]);
    Figure::from_samples(&pairs.map(|(side, other)| side / other).collect::<Vec<_>>())
}

/// Empty lists of samples.
pub fn no_samples<const N: usize>() -> [Vec<f64>; N] {
    array::from_fn(|_| Vec::new())
}
