//! Computes the cost of stepping a wheel, by the cost model of Varghese & Lauck (section 7 of the
//! ToN paper: scheme 6 n·c/M a tick, scheme 7 n·m·c/T), for timers that are re-armed lazily.
//!
//! A busy flow is not moved by its packets. When the wheel visits it, the wheel finds that its
//! deadline has moved and re-arms it. So only the number of timer visits matters. For a flow that
//! is armed `d` ticks ahead, the visits are:
//!
//! - scheme 4: one every `d` ticks;
//! - scheme 6, `M` slots: one every `d` ticks, or one every round if `d` is longer than a round;
//! - scheme 7, levels of `M` slots: if `M^l <= d < M^(l+1)`, the flow is in a slot of level `l` and
//!   is visited when that slot begins: every `⌊d / M^l⌋` slots of the level, and whenever a slot of
//!   the level above begins. That is `⌈M / ⌊d / M^l⌋⌉` times in `M^(l+1)` ticks.

use std::{
    hint::black_box,
    sync::mpsc::channel,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::programs::{TestRun, TestRunOptions};
use nix::time::{ClockId, clock_gettime};
use twheel_common::{
    config::Config,
    counter::Counters,
    pool::SHELF,
    rule::Rule,
    state::State,
    step::Outcome,
    table::{Details, Extras, Hash, Line},
    wheel::{Geometry, Heads, MAX_BITS, MAX_LEVELS, MIN_BITS, Wheel, WheelScheme},
};

use crate::{
    clock::Clock,
    cpu::pin_to,
    data_plane::{DataPlane, Load, OBJECT, RING_BYTES, STEP_BUDGET},
    settings::{Settings, most_levels},
    timeouts::Timeouts,
};

/// The costs on a machine, in nanoseconds.
#[derive(Clone, Copy, Debug)]
pub struct Costs {
    /// A timer visit that re-arms a flow.
    pub visit: f64,
    /// A stepper that wakes up, finds nothing due, and sleeps again.
    pub wake: f64,
}

impl Costs {
    /// The costs on the machine that twheel was developed on, for a table of this many flows: if
    /// the table is larger than the caches, a timer visit costs a cache miss or two.
    pub fn typical(flows: u64) -> Self {
        let visit = match flows {
            0..=4_096 => 40.0,
            4_097..=524_288 => 140.0,
            _ => 170.0,
        };
        Self {
            visit,
            wake: 22_000.0,
        }
    }
}

/// The load that a host has to track.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
    /// Live flows.
    pub flows: u64,
    /// How many ticks ahead a flow is armed.
    pub ahead: u64,
    /// Length of a tick.
    pub tick: Duration,
    /// Length of a tick in units of the data plane's clock.
    pub units: u32,
    /// The number of CPUs; each has a wheel.
    pub cpus: u64,
}

impl Demand {
    /// This many busy, established flows with this configuration.
    pub fn new(flows: u32, cpus: usize, (config, rule): &(Config, Rule), clock: Clock) -> Self {
        let established = rule.timeouts.0[State::Established as usize];
        Self {
            flows: flows.into(),
            ahead: established.div_ceil(config.tick).into(),
            tick: clock.duration(config.tick.into()),
            units: config.tick,
            cpus: cpus as u64,
        }
    }
}

/// What a geometry costs for a demand.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// The shape of the wheel.
    pub geometry: Geometry,
    /// Timer visits per second on all CPUs together.
    pub visits: f64,
    /// Fraction of one CPU that all steppers use together.
    pub share: f64,
    /// Memory of table, wheels and rings, in bytes.
    pub memory: u64,
}

impl Plan {
    /// The plan for a wheel; `None` if the wheel does not fit: a simple wheel that does not reach
    /// far enough, or more levels than the clock can use.
    pub fn new(geometry: Geometry, demand: &Demand, costs: &Costs) -> Option<Self> {
        let simple = geometry.scheme == WheelScheme::Simple as u32;
        // A deadline may lie anywhere within a tick, so the wheel must reach one tick beyond the
        // timeout.
        if simple && geometry.range() < demand.ahead + 1 {
            return None;
        }
        if geometry.levels > most_levels(geometry.bits, demand.units) {
            return None;
        }
        let ticks = 1.0 / demand.tick.as_secs_f64();
        let visits = demand.flows as f64 * visits_a_tick(geometry, demand.ahead) * ticks;
        // Steppers wake up for ticks at which something is due.
        let each = visits / ticks / demand.cpus as f64;
        let wakes = demand.cpus as f64 * ticks * (1.0 - (-each).exp());
        let share = (visits * costs.visit + wakes * costs.wake) / 1e9;
        Some(Self {
            geometry,
            visits,
            share,
            memory: memory(geometry, demand.flows, demand.cpus),
        })
    }

    /// The best plan for each scheme, in the schemes' order: the one that uses the least CPU or,
    /// among those within a fiftieth of that, the least memory.
    pub fn all(demand: &Demand, costs: &Costs) -> Vec<Self> {
        [
            WheelScheme::Simple,
            WheelScheme::Hashed,
            WheelScheme::Hierarchical,
        ]
        .into_iter()
        .filter_map(|scheme| {
            let plans = (MIN_BITS..=MAX_BITS).flat_map(|bits| shapes(scheme, bits));
            plans
                .filter_map(|geometry| Self::new(geometry, demand, costs))
                .reduce(Self::better)
        })
        .collect()
    }

    /// The better of two plans; the second if they are equal.
    pub fn better(self, other: Self) -> Self {
        let alike = (self.share - other.share).abs() <= 0.02 * self.share.min(other.share);
        let first = if alike {
            self.memory < other.memory
        } else {
            self.share < other.share
        };
        if first { self } else { other }
    }
}

fn shapes(scheme: WheelScheme, bits: u32) -> Vec<Geometry> {
    match scheme {
        WheelScheme::Simple => vec![Geometry::simple(bits)],
        WheelScheme::Hashed => vec![Geometry::hashed(bits)],
        WheelScheme::Hierarchical => (2..=MAX_LEVELS as u32)
            .map(|levels| Geometry::hierarchical(levels, bits))
            .collect(),
    }
}

/// Timer visits per tick to a busy flow that is armed this many ticks ahead.
fn visits_a_tick(geometry: Geometry, ahead: u64) -> f64 {
    let slots = 1u64 << geometry.bits;
    if geometry.scheme == WheelScheme::Hashed as u32 {
        return 1.0 / ahead.clamp(1, slots) as f64;
    }
    let ahead = ahead.clamp(1, geometry.range());
    match WheelScheme::from_raw(geometry.scheme) {
        Some(WheelScheme::Hierarchical) => {
            let mut unit = 1;
            let mut level = 1;
            while level < geometry.levels && ahead / unit >= slots {
                unit *= slots;
                level += 1;
            }
            if level == geometry.levels {
                // There is no level above whose slots it could be in.
                return 1.0 / (ahead / unit * unit) as f64;
            }
            slots.div_ceil(ahead / unit) as f64 / (unit * slots) as f64
        }
        _ => 1.0 / ahead as f64,
    }
}

/// Memory of the ring and of the maps that grow with flows, slots and CPUs, in bytes.
fn memory(geometry: Geometry, flows: u64, cpus: u64) -> u64 {
    let lines = Hash::new([0; 11], flows.try_into().unwrap_or(u32::MAX)).lines();
    let details = flows + cpus * u64::from(SHELF);
    let wheel = u64::from(geometry.slots() + 1) * size_of::<Heads>() as u64
        + (size_of::<Wheel>() + size_of::<Counters>()) as u64;
    lines * size_of::<Line>() as u64
        + details * (size_of::<Details>() + size_of::<Extras>()) as u64
        + cpus * wheel
        + u64::from(RING_BYTES)
}

/// The most flows that a machine is measured with: beyond this, the cost per flow no longer grows.
const MOST: u64 = 1 << 20;

/// Measures this machine with a table of this many flows. Takes a second or two, and attaches
/// nothing.
pub fn calibrate(flows: u64) -> Result<Costs> {
    let flows = flows.clamp(1_024, MOST).next_power_of_two() as u32;
    pin_to(0)?;
    let clock = Clock::virtual_ms();
    let timeout = Duration::from_secs(60);
    let wanted = Settings {
        tick: Duration::from_millis(100),
        timeouts: Timeouts::new(timeout, timeout),
        max_flows: flows,
        ..Settings::default()
    }
    .config(clock)?;
    let mut plane = DataPlane::load_unpinned(&Load::new(OBJECT, wanted, clock))?;

    let timeout = timeout.as_millis() as u64;
    let mut now = timeout;
    plane.set_clock(now)?;
    for flow in 0..flows {
        see(&mut plane, flow)?;
    }
    let mut visits = Vec::new();
    for _ in 0..3 {
        // An odd factor, so that every flow gets its packet, and neighbours in the wheel are not
        // neighbours in the table.
        for number in 0..flows {
            if number % (flows / 256) == 0 {
                plane.set_clock(now + 200 + timeout / 2 * u64::from(number) / u64::from(flows))?;
            }
            see(&mut plane, number.wrapping_mul(0x9e37_79b1) % flows)?;
        }
        now += timeout + 100;
        plane.set_clock(now)?;
        let mut met = 0;
        let begun = cpu_time()?;
        loop {
            let step = plane.step(STEP_BUDGET)?;
            met += u64::from(step.visits);
            ensure!(step.expired == 0, "a busy flow expired");
            if step.outcome == Outcome::Done as u32 {
                break;
            }
        }
        let taken = cpu_time()? - begun;
        ensure!(met >= u64::from(flows), "{met} visits to {flows} flows");
        visits.push(taken.as_nanos() as f64 / met as f64);
    }
    Ok(Costs {
        visit: median(&mut visits),
        wake: wake(&mut plane)?,
    })
}

/// CPU time of a stepper that wakes up and finds nothing to do.
fn wake(plane: &mut DataPlane) -> Result<f64> {
    const TIMES: u32 = 200;
    let (_keep, calls) = channel::<()>();
    let begun = cpu_time()?;
    for _ in 0..TIMES {
        let deadline = Instant::now() + Duration::from_micros(500);
        let _ = black_box(calls.recv_timeout(deadline.saturating_duration_since(Instant::now())));
        plane.step(STEP_BUDGET)?;
    }
    Ok((cpu_time()? - begun).as_nanos() as f64 / f64::from(TIMES))
}

/// Runs the data plane on an incoming packet of a flow, whose number is below 2^24.
pub fn see(plane: &mut DataPlane, flow: u32) -> Result<()> {
    receive(plane, &segment(flow))
}

/// An ACK of one of many flows to one server.
pub fn segment(flow: u32) -> [u8; 54] {
    let mut segment = [
        0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x08, 0x00, // Ethernet
        0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 0, 192, 0, 2, 1, // IPv4
        0, 0, 1, 187, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 0, 0, 0, 0, 0, 0, // TCP, ACK
    ];
    segment[27..30].copy_from_slice(&flow.to_be_bytes()[1..]);
    segment[34..36].copy_from_slice(&(flow as u16).to_be_bytes());
    segment
}

/// Runs the data plane on a frame as if it had come in.
pub fn receive(plane: &mut DataPlane, frame: &[u8]) -> Result<()> {
    plane
        .xdp("twheel_xdp")?
        .test_run(TestRunOptions {
            data_in: Some(frame),
            ..TestRunOptions::new()
        })
        .context("cannot run twheel_xdp")?;
    Ok(())
}

/// CPU time of this thread.
fn cpu_time() -> Result<Duration> {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID)
        .map_err(std::io::Error::from)
        .context("cannot read the CPU time of a thread")?;
    Ok(time.into())
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Counts the timer visits to a busy flow on a wheel that this function turns itself.
    fn visits(geometry: Geometry, ahead: u64, ticks: u64) -> f64 {
        let mut wheel = Wheel::default();
        let mut slots = BTreeMap::new();
        let mut visits = 0;
        let slot = wheel.slot(geometry, ahead);
        wheel.occupy(geometry, slot.index);
        slots.insert(slot.index, ());
        while let Some(slot) = wheel.first(geometry) {
            if slot.starts > ticks {
                break;
            }
            wheel.take(geometry, slot);
            visits += 1;
            // It had a packet just now.
            let next = wheel.again(geometry, wheel.elapsed + ahead);
            wheel.occupy(geometry, next.index);
        }
        visits as f64 / ticks as f64
    }

    #[test]
    fn the_model_is_what_the_wheel_does() {
        for geometry in [
            Geometry::simple(12),
            Geometry::hashed(1),
            Geometry::hashed(2),
            Geometry::hashed(6),
            Geometry::hashed(12),
            Geometry::hierarchical(2, 4),
            Geometry::hierarchical(3, 6),
            Geometry::hierarchical(3, 10),
            Geometry::hierarchical(4, 12),
        ] {
            for ahead in [1, 2, 15, 16, 17, 63, 64, 65, 100, 601, 1023, 1025, 3001] {
                if geometry.scheme == WheelScheme::Simple as u32 && geometry.range() < ahead {
                    continue;
                }
                let counted = visits(geometry, ahead, 2_000_000);
                let modelled = visits_a_tick(geometry, ahead);
                let ratio = modelled / counted;
                assert!(
                    (0.9..1.1).contains(&ratio),
                    "{geometry:?}, {ahead} ahead: {modelled} a tick, counted {counted}"
                );
            }
        }
    }

    #[test]
    fn the_share_grows_with_flows_over_timeout_and_not_with_precision() {
        let costs = Costs {
            visit: 100.0,
            wake: 0.0,
        };
        let share = |flows, ahead, tick| {
            let demand = Demand {
                flows,
                ahead,
                tick: Duration::from_millis(tick),
                units: tick as u32,
                cpus: 2,
            };
            Plan::new(Geometry::hashed(12), &demand, &costs)
                .unwrap()
                .share
        };
        let base = share(1_000_000, 600, 100);
        assert!((base - 1_000_000.0 / 60.0 * 100e-9).abs() < 1e-9);
        assert!((share(2_000_000, 600, 100) / base - 2.0).abs() < 1e-9);
        assert!((share(1_000_000, 1200, 100) / base - 0.5).abs() < 1e-9);
        assert!((share(1_000_000, 1200, 50) / base - 1.0).abs() < 1e-9);
    }

    #[test]
    fn wake_ups_cost_and_every_cpu_has_a_wheel() {
        let costs = Costs {
            visit: 0.0,
            wake: 1e6,
        };
        let plan = |flows, cpus| {
            let demand = Demand {
                flows,
                ahead: 10,
                tick: Duration::from_millis(100),
                units: 100,
                cpus,
            };
            Plan::new(Geometry::hashed(10), &demand, &costs).unwrap()
        };
        // Ten ticks a second, each with something due, at a millisecond each.
        assert!((plan(1_000_000, 2).share - 0.02).abs() < 1e-6);
        assert!(plan(1, 1).share < 0.002, "an idle wheel is not woken up");
        let wheel = plan(1_000, 3).memory - plan(1_000, 2).memory;
        let least = (1 << 10) * size_of::<Heads>() + size_of::<Wheel>();
        assert!(wheel >= least as u64, "{wheel} bytes a wheel");
        let lines = |flows| Hash::new([0; 11], flows).lines();
        let details = (size_of::<Details>() + size_of::<Extras>()) as u64;
        assert_eq!(
            plan(2_000, 2).memory - plan(1_000, 2).memory,
            (lines(2_000) - lines(1_000)) * size_of::<Line>() as u64 + 1_000 * details
        );
    }

    #[test]
    fn a_simple_wheel_that_does_not_reach_is_no_plan() {
        let demand = Demand {
            flows: 1,
            ahead: 4_095,
            tick: Duration::from_millis(100),
            units: 100,
            cpus: 1,
        };
        let plans = Plan::all(&demand, &Costs::typical(1));
        let schemes: Vec<_> = plans.iter().map(|plan| plan.geometry.scheme).collect();
        assert_eq!(
            schemes,
            [WheelScheme::Hashed as u32, WheelScheme::Hierarchical as u32]
        );
    }
}
