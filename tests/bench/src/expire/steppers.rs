//! Steppers, in real and in virtual time.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Events, Load, STEP_BUDGET},
    pins::Instance,
    plan::{Costs, Demand, Plan},
    progress,
    ring::Signals,
    settings::Settings,
    stepper::Steppers,
    timeouts::Timeouts,
};
use twheel_common::{counter::Counter, step::Outcome, wheel::NEVER};

use crate::{
    inputs::{self, CPU, Segment},
    plan::stepper_stats,
    plane::{Bench, cpu_time},
    report::Figure,
    size,
};

/// Slots per level.
const SLOTS: u32 = size(1024, 16);
/// Flows begin, and have their packets, in this many portions per timeout.
const PORTIONS: u32 = size(1_000, 50);
/// The CPU whose wheel the flows are on; their packets come in on the other CPU.
const WHEEL: u32 = 1;

/// The most timeouts of virtual time to run: with long ticks, a full turn of the wheel takes hours.
pub const MOST_TIMEOUTS: u32 = 2;
/// Packets per flow and timeout.
pub const TOUCHES: usize = 10;

/// What steppers cost.
pub struct Stepped {
    /// Fraction of one CPU.
    pub share: Figure,
    pub visits: f64,
    pub wakes: f64,
}

fn wanted(flows: u32, timeout: Duration, precision: Duration) -> Settings {
    Settings {
        tick: precision,
        timeouts: Timeouts::new(timeout, timeout),
        max_flows: flows,
        ..Settings::default()
    }
}

/// The fraction of one CPU that the cost model predicts.
pub fn predict(flows: u32, timeout: Duration, precision: Duration, costs: &Costs) -> Result<f64> {
    let clock = Clock::jiffies()?;
    let config = wanted(flows, timeout, precision).config(clock)?;
    // All flows begin on one CPU.
    let demand = Demand::new(flows, 1, &config, clock);
    let plan = Plan::new(config.0.geometry, &demand, costs).context("no plan")?;
    Ok(plan.share)
}

/// Runs real steppers in real time.
pub fn watch(flows: u32, timeout: Duration, precision: Duration) -> Result<Stepped> {
    let clock = Clock::jiffies()?;
    let config = wanted(flows, timeout, precision).config(clock)?;
    let object = inputs::object("TWHEEL_BENCH_OBJECT")?;
    let instance = Instance::open(&[format!("bench-{}", std::process::id())])?;
    let result = DataPlane::load(&Load::new(&object, config, clock), &instance)
        .and_then(|plane| step(plane, &instance, flows, timeout));
    instance.remove()?;
    result
}

fn step(
    mut plane: DataPlane,
    instance: &Instance,
    flows: u32,
    timeout: Duration,
) -> Result<Stepped> {
    // `pin_programs` would fail: the object of the bench lacks the programs of hooks.
    plane.open("CALLS")?.pin(instance.object("CALLS"))?;
    plane
        .xdp("twheel_step")?
        .pin(instance.object("twheel_step"))?;
    let mut events = Events::open(instance.pins().map("EVENTS")?)?;
    let signals = Arc::<Signals>::default();
    let steppers = Steppers::start(
        instance.pins(),
        plane.clock(),
        plane.config().tick,
        signals.clone(),
        None,
    )?;
    let mut bench = Bench::over(plane)?;
    let all = bench.fresh(flows as usize);
    let portion = all.len().div_ceil(PORTIONS as usize);
    let turns = timeout / PORTIONS;
    let (begun, mut packets) = (Instant::now(), Packets::default());
    let what = format!("{flows} flows begin over {} s", timeout.as_secs());
    for turn in progress::over(what, 0..all.len().div_ceil(portion)) {
        let end = all.len().min((turn + 1) * portion);
        bench.go_to(WHEEL)?;
        bench.run("touch", Segment::Ack, &all[turn * portion..end])?;
        if turn == 0 {
            steppers.call(WHEEL);
        }
        bench.go_to(CPU)?;
        packets.come(&mut bench, &all[..end], TOUCHES * portion)?;
        let due = begun + turns * (turn as u32 + 1);
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    let tracked = bench.plane.tracked()?;
    let mut busy = |bench: &mut Bench, span: Duration| -> Result<()> {
        let (begun, mut turn) = (Instant::now(), 0);
        while begun.elapsed() < span {
            packets.come(bench, &all, TOUCHES * portion)?;
            turn += 1;
            let due = begun + turns * turn;
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        Ok(())
    };
    let (met, (cpu, runs), since) = (
        bench.plane.counters()?.get(Counter::Visits),
        stepper_stats()?,
        Instant::now(),
    );
    let turn = bench
        .plane
        .clock()
        .duration(bench.plane.config().tick.into())
        * SLOTS;
    busy(&mut bench, turn)?;
    let (cpu_after, runs_after) = stepper_stats()?;
    let seconds = since.elapsed().as_secs_f64();
    let met = bench.plane.counters()?.get(Counter::Visits) - met;
    // No events will follow that anyone would read.
    signals.close();
    steppers.stop()?;
    let mut ended = Vec::new();
    events.drain(&mut ended);
    ensure!(
        ended.is_empty(),
        "a live flow expired: this machine is too slow for this"
    );
    bench.all_live(tracked, flows)?;
    Ok(Stepped {
        share: Figure::from_samples(&[(cpu_after - cpu).as_secs_f64() / seconds]),
        visits: met as f64 / seconds,
        wakes: (runs_after - runs) as f64 / seconds,
    })
}

/// Packets of flows that have begun, one per flow and round, each round in another order. So flows
/// that began together do not stay due together.
#[derive(Default)]
struct Packets {
    round: Vec<u32>,
}

impl Packets {
    /// Runs this many of the packets.
    fn come(&mut self, bench: &mut Bench, begun: &[u32], count: usize) -> Result<()> {
        let mut left = count;
        while left > 0 {
            if self.round.is_empty() {
                self.round.extend(begun);
                bench.random.shuffle(&mut self.round);
            }
            let rest = self.round.len().saturating_sub(left);
            let flows = self.round.split_off(rest);
            left -= flows.len();
            bench.run("touch", Segment::Ack, &flows)?;
        }
        Ok(())
    }
}

impl Bench {
    /// Fails if flows are missing, except those that were refused because there was no free record.
    fn all_live(&self, tracked: u64, flows: u32) -> Result<()> {
        ensure!(
            self.plane.tracked()? == tracked
                && tracked + u64::from(flows) / 100_000 + 1 >= flows.into(),
            "{tracked} flows of {flows} began, {} are left",
            self.plane.tracked()?
        );
        Ok(())
    }
}

/// Virtual time: turns of the wheel, one after the other.
pub fn virtually(
    flows: u32,
    timeout: Duration,
    precision: Duration,
    turns: usize,
    costs: &Costs,
) -> Result<Stepped> {
    let clock = Clock::virtual_ms();
    let mut bench = Bench::load(wanted(flows, timeout, precision).config(clock)?, clock)?;
    let all = bench.fresh(flows as usize);
    let portion = all.len().div_ceil(PORTIONS as usize);
    let (tick, span) = (precision.as_millis() as u64, timeout.as_millis() as u64);
    let start = 1_000_000;
    let mut now = start;
    let (mut begun, mut packets) = (0, Packets::default());
    let mut next = NEVER;
    // One tick: incoming packets, and the stepper if it wakes up for this tick.
    let mut advance = |bench: &mut Bench, cost: &mut Cost| -> Result<()> {
        now += tick;
        bench.plane.set_clock(now)?;
        let portions = ((now - start) * u64::from(PORTIONS) / span) as usize;
        while begun < portions {
            let from = all.len().min(begun * portion);
            begun += 1;
            let end = all.len().min(begun * portion);
            bench.run("touch", Segment::Ack, &all[from..end])?;
            packets.come(bench, &all[..end], TOUCHES * portion)?;
        }
        // A flow that begins on an empty wheel wakes the stepper.
        if next != NEVER && now / tick < next {
            return Ok(());
        }
        let before = cpu_time()?;
        loop {
            let step = bench.plane.step(STEP_BUDGET)?;
            cost.visits += u64::from(step.visits);
            next = step.next;
            ensure!(step.expired == 0, "a live flow expired");
            if step.outcome == Outcome::Done as u32 {
                break;
            }
        }
        cost.cpu += cpu_time()? - before;
        cost.wakes += 1;
        Ok(())
    };
    let what = |what| format!("{flows} flows, {} s, {tick} ms: {what}", timeout.as_secs());
    for _ in progress::over(what("begin"), 0..(span / tick) as u32) {
        advance(&mut bench, &mut Cost::default())?;
    }
    let tracked = bench.plane.tracked()?;
    // If timeouts reach into the next level, that level's slots are the ones that come one by one.
    let slot = u64::from(if span / tick < SLOTS.into() { 1 } else { SLOTS });
    let whole = if slot == 1 {
        SLOTS.into()
    } else {
        span / tick / slot * slot
    };
    let ticks = whole.min(u64::from(MOST_TIMEOUTS) * span / tick);
    let (mut shares, mut cost) = (Vec::new(), Cost::default());
    for _ in 0..turns {
        let mut turn = Cost::default();
        for _ in progress::over(what("live"), 0..ticks as u32) {
            advance(&mut bench, &mut turn)?;
        }
        let spent = turn.cpu.as_nanos() as f64 + turn.wakes as f64 * costs.wake;
        shares.push(spent / (ticks * tick) as f64 / 1e6);
        cost.visits += turn.visits;
        cost.wakes += turn.wakes;
    }
    bench.all_live(tracked, flows)?;
    let seconds = (turns as u64 * ticks * tick) as f64 / 1e3;
    Ok(Stepped {
        share: Figure::from_samples(&shares),
        visits: cost.visits as f64 / seconds,
        wakes: cost.wakes as f64 / seconds,
    })
}

/// What one turn cost.
#[derive(Default)]
struct Cost {
    cpu: Duration,
    visits: u64,
    wakes: u64,
}
