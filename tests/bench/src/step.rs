//! Nanoseconds of the stepper's work.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use aya::{
    maps::{Array, Map},
    programs::{TestRun, TestRunOptions},
};
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Load, OBJECT, STEP_BUDGET},
    progress,
    stepper::pin_to,
    stepping::Stepping,
};
use twheel_common::{
    counter::Counter,
    event::Record,
    step::{Outcome, Step},
};
use twheel_tests::order::PACKETS;
use zerocopy::IntoBytes;

use crate::{
    inputs::{self, Segment},
    plane::{self, Bench},
    plot,
    report::{Figure, Report, verdict},
    size,
};

/// Numbers of flows. With the first, everything is in the caches, and no lookup waits for memory.
const SIZES: [u32; 3] = [
    size(1 << 13, 1 << 11),
    size(1 << 17, 1 << 12),
    size(1 << 20, 1 << 13),
];
/// In milliseconds, like all times here.
const TIMEOUT: u64 = 60_000;
const TICK: u64 = 100;
/// The time over which flows are touched, so that timer visits spread over many slots.
const SPREAD: u64 = 30_000;
/// The number of portions in which they are touched.
const PORTIONS: usize = 128;
/// Lists of the wheel over the kernel's hash map: the flows to visit, and the slots.
const LISTS: u64 = 1 + 512;
/// Maximum cost of a timer visit, relative to a lookup in the kernel's hash map, for the largest
/// table and for smaller ones.
const REARM: [f64; 2] = [0.22, 0.45];
/// Maximum cost of an eviction, relative to one over the kernel's hash map, …
const EVICT: f64 = 0.15;
/// … and relative to the ring's record alone.
const RECORD: f64 = 1.5;
/// Minimum number of evictions per second.
const RATE: f64 = 2.5e6;

const VARIANTS: [&str; 7] = [
    "rearm_hash",
    "rearm",
    "evict_hash",
    "evict",
    "record",
    "batch",
    "lookup",
];
const REARM_HASH: usize = 0;
const REARM_OURS: usize = 1;
const EVICT_HASH: usize = 2;
const EVICT_OURS: usize = 3;
const RECORD_ALONE: usize = 4;
const BATCH: usize = 5;
const LOOKUP: usize = 6;

/// Which stepper.
#[derive(Clone, Copy)]
pub enum Side {
    /// The one over the kernel's hash map.
    Hash,
    /// twheel's.
    Twheel,
}

/// The result of one turn of a stepper.
#[derive(Default)]
pub struct Turn {
    /// Timer visits.
    pub visits: u64,
    /// Flows that expired.
    pub expired: u64,
    /// The kernel's time for all calls.
    pub in_kernel: Duration,
}

impl Turn {
    /// Mean time per timer visit.
    pub fn nanoseconds(&self) -> f64 {
        self.in_kernel.as_nanos() as f64 / self.visits as f64
    }
}

/// Calls per round, by each way.
const CALLS: u32 = size(2_000, 20);

/// The cost of a stepper call that finds nothing to do, by test runs and by live frames.
fn calls(rounds: u32, report: &mut Report) -> Result<()> {
    let clock = Clock::virtual_ms();
    let config = plane::config(clock, Duration::from_millis(TIMEOUT), SIZES[0])?;
    let load = |stepping| {
        let load = Load {
            stepping,
            ..Load::new(OBJECT, config, clock)
        };
        DataPlane::load_unpinned(&load)
    };
    let planes = [load(Stepping::TestRuns)?, load(Stepping::LiveFrames)?];
    pin_to(inputs::CPU)?;
    let mut samples = plane::no_samples::<2>();
    // The first round warms up.
    for round in 0..rounds + 1 {
        for side in [round as usize % 2, 1 - round as usize % 2] {
            let begun = Instant::now();
            for _ in 0..CALLS {
                planes[side].step(STEP_BUDGET)?;
            }
            if round > 0 {
                samples[side].push(begun.elapsed().as_nanos() as f64 / f64::from(CALLS));
            }
        }
    }
    let figures = [0, 1].map(|side| Figure::from_samples(&samples[side]));
    for (name, figure) in ["call_test_run", "call_live_frame"].iter().zip(&figures) {
        report.nanoseconds("step", name, 0, figure);
    }
    report.say(&format!(
        "A call of the stepper that finds nothing due, from userspace and back, nanoseconds: by a test run {}, by a live \
         frame\n{}: {:.1} times as much.\n",
        Figure::row(&figures[..1]).trim(),
        Figure::row(&figures[1..]).trim(),
        plane::ratio(&samples, 1, 0).median
    ));
    Ok(())
}

/// Maximum cost of an update, relative to an eviction.
const UPDATE: f64 = 1.0;

/// The cost of an update with its event, beside an eviction with its event of the same flows. Both
/// with accounting and an active timeout.
fn updates(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "{:>8}  {:>20}  {:>20}  update/evict",
        "flows", "update", "evict"
    ));
    for flows in SIZES {
        let clock = Clock::virtual_ms();
        let mut config = plane::config(clock, Duration::from_millis(TIMEOUT), flows)?;
        (config.0.accounting, config.0.active_timeout) = (1, SPREAD as u32);
        let mut bench = Bench::load(config, clock)?;
        let mut samples = plane::no_samples::<2>();
        let mut start = 1_000_000;
        for round in progress::over(format!("updates of {flows} flows"), 0..rounds + 1) {
            bench.plane.set_clock(start)?;
            let mut order = bench.age(flows, false, None)?;
            bench.random.shuffle(&mut order);
            let each = SPREAD / 2 / PORTIONS as u64;
            for (portion, flows) in order.chunks(order.len().div_ceil(PORTIONS)).enumerate() {
                bench
                    .plane
                    .set_clock(start + 2 * TICK + each * portion as u64)?;
                bench.run("touch", Segment::Ack, flows)?;
            }
            let flows = order.len() as u64;
            bench.plane.set_clock(start + SPREAD + 2 * TICK)?;
            let updated = turn(&mut bench, Side::Twheel)?;
            bench.plane.set_clock(start + SPREAD + TIMEOUT + 4 * TICK)?;
            let evicted = turn(&mut bench, Side::Twheel)?;
            for (turn, what) in [(&updated, "updates"), (&evicted, "evictions")] {
                ensure!(
                    (turn.visits, turn.expired) == (flows, flows),
                    "{} visits and {} {what} of {flows} flows",
                    turn.visits,
                    turn.expired
                );
            }
            ensure!(bench.plane.tracked()? == 0, "flows are left");
            if round > 0 {
                samples[0].push(updated.nanoseconds());
                samples[1].push(evicted.nanoseconds());
            }
            start += 10 * TIMEOUT;
        }
        bench.check(Counter::EventsLost, 0)?;
        let figures = [0, 1].map(|side| Figure::from_samples(&samples[side]));
        for (name, figure) in ["update", "update_evict"].iter().zip(&figures) {
            report.nanoseconds("step", name, flows.into(), figure);
        }
        report.say(&format!(
            "{flows:>8}  {}  {}",
            Figure::row(&figures),
            verdict(&plane::ratio(&samples, 0, 1), Some(UPDATE))
        ));
    }
    report.say("");
    Ok(())
}

/// Measures the lives of whole tables: begun, touched in another order, visited, evicted.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "Nanoseconds each: median (least–most) of {rounds} rounds. All flows begin at once (and twheel's table is aged: one in \
         16\nat random makes room for a new one, 48 times over), and are then touched in random order: all are due at once \
         and\nvisited (rearm). Then all are due again, from {PORTIONS} slots, and evicted (evict). Time is the kernel's `duration` of \
         calls of\n{STEP_BUDGET} visits; reading the ring after each is not in it. `lookup` is one in the kernel's hash, of each of the \
         flows, in random\norder (`duration` of runs over {PACKETS} packets, less that of runs that do all but the lookup). `hash` is \
         the least that the\nsame takes where flows are in the kernel's hash and keys are the links: 1. look up the key at the head of \
         the list,\nread stamp and state, write two keys of 40 bytes; 2. look up, reserve, compare-and-swap, delete, submit. \
         `record` is\nwhat the ring takes for as many events alone: reserve, fill, submit, a record for each; `batch` what it takes with sixteen \
         in\na record, as twheel has them. Tables of the kernel's hash are made for a quarter more.\nRatios: the median of those of each round (least–most).\n",
    ));
    calls(rounds, report)?;
    report.say(
        "With --accounting and --active-timeout: all flows are due for an update and visited (update), then they are evicted, \
         from\nas many slots.",
    );
    updates(rounds, report)?;
    let mut all = Vec::new();
    for flows in SIZES {
        let samples = measure(flows, rounds)?;
        for (variant, samples) in VARIANTS.iter().zip(&samples) {
            report.nanoseconds(
                "step",
                variant,
                flows.into(),
                &Figure::from_samples(samples),
            );
        }
        all.push((flows, samples));
    }
    let tables = [
        ("rearm", REARM_OURS, "lookup", LOOKUP, REARM.map(Some)),
        ("rearm", REARM_OURS, "hash", REARM_HASH, [None; 2]),
        (
            "evict",
            EVICT_OURS,
            "record",
            RECORD_ALONE,
            [Some(RECORD); 2],
        ),
        ("evict", EVICT_OURS, "hash", EVICT_HASH, [Some(EVICT); 2]),
        ("evict", EVICT_OURS, "batch", BATCH, [None; 2]),
    ];
    for (what, ours, name, other, [large, small]) in tables {
        report.say(&format!(
            "{:>8}  {:>20}  {:>20}  {what}/{name}",
            "flows", what, name
        ));
        for (flows, samples) in &all {
            let figures = [ours, other].map(|it| Figure::from_samples(&samples[it]));
            let bound = if *flows == SIZES[2] { large } else { small };
            report.say(&format!(
                "{flows:>8}  {}  {}",
                Figure::row(&figures),
                verdict(&plane::ratio(samples, ours, other), bound),
            ));
        }
        report.say("");
    }
    for (flows, samples) in &all {
        let rate = 1e9 / Figure::from_samples(&samples[EVICT_OURS]).median;
        let verdict = match rate >= RATE {
            true => "at least",
            false => "BELOW",
        };
        report.say(&format!(
            "Evictions on one core, of {flows} flows: {:.2} million a second ({verdict} {})",
            rate / 1e6,
            RATE / 1e6
        ));
    }
    report.say("Every flow was reported, each round; no event was lost.");
    let points = all.iter().flat_map(|(flows, samples)| {
        VARIANTS.iter().zip(samples).map(|(variant, samples)| {
            let point = (f64::from(*flows), Figure::from_samples(samples).median);
            (variant.replace('_', ", "), point)
        })
    });
    report.plot(
        "flows",
        "A visit, and an eviction with its event",
        ["flows", "nanoseconds"],
        &plot::curves(points),
    )
}

fn measure(flows: u32, rounds: u32) -> Result<[Vec<f64>; VARIANTS.len()]> {
    let clock = Clock::virtual_ms();
    let timeout = Duration::from_millis(TIMEOUT);
    // One timeout for all states: the wheel visits a flow as often as its shortest timeout
    // requires, and that frequency should be known here.
    let config = plane::config(clock, timeout, flows)?;
    let mut bench = Bench::load(config, clock)?;
    let mut samples = plane::no_samples();
    let mut start = 1_000_000;
    // The first round warms up, and leaves the memory of the tables in no particular order.
    for round in progress::over(format!("lives of {flows} flows"), 0..rounds + 1) {
        bench.plane.set_clock(start)?;
        let mut order = bench.age(flows, true, None)?;
        let flows = order.len() as u64;
        bench.run("listed_insert", Segment::Ack, &order)?;
        bench.random.shuffle(&mut order);
        let each = SPREAD / PORTIONS as u64;
        for (portion, flows) in order.chunks(order.len().div_ceil(PORTIONS)).enumerate() {
            let now = start + 2 * TICK + each * portion as u64;
            bench.plane.set_clock(now)?;
            bench.run("listed_touch", Segment::Ack, flows)?;
            bench.run("touch", Segment::Ack, flows)?;
        }
        bench.random.shuffle(&mut order);
        let [without, with] =
            ["parse", "lookup"].map(|program| bench.run(program, Segment::Ack, &order));
        let lookup = with?.as_nanos() as f64 - without?.as_nanos() as f64;
        bench.plane.set_clock(start + TIMEOUT + TICK)?;
        let visited = turns(&mut bench, round)?;
        bench.plane.set_clock(start + SPREAD + TIMEOUT + 4 * TICK)?;
        let evicted = turns(&mut bench, round)?;
        for (visited, evicted) in visited.iter().zip(&evicted) {
            ensure!(
                visited.visits == flows && visited.expired == 0,
                "{} visits of {flows}, {} flows expired early",
                visited.visits,
                visited.expired
            );
            ensure!(
                evicted.visits == flows && evicted.expired == flows,
                "{} visits of {flows}, {} expired",
                evicted.visits,
                evicted.expired
            );
        }
        ensure!(bench.plane.tracked()? == 0, "flows are left");
        bench.run("floor_delete", Segment::Ack, &order)?;
        let [mut records, mut batches] = [Turn::default(), Turn::default()];
        while records.expired < flows {
            call(&mut bench, "bench_record", 0, &mut records)?;
            call(&mut bench, "bench_batch", 0, &mut batches)?;
        }
        let tracked = Map::Array(bench.plane.open("TRACKED")?);
        Array::<_, u64>::try_from(tracked)?.set(0, 0, 0)?;
        if round > 0 {
            let turns = visited.iter().chain(&evicted).chain([&records, &batches]);
            for (samples, turn) in samples.iter_mut().zip(turns) {
                samples.push(turn.in_kernel.as_nanos() as f64 / turn.visits as f64);
            }
            samples[LOOKUP].push(lookup / flows as f64);
        }
        start += 10 * TIMEOUT;
    }
    bench.check(Counter::EventsLost, 0)?;
    Ok(samples)
}

/// One turn of both sides; the one over the kernel's hash map comes first in the result. Which side
/// runs first alternates.
fn turns(bench: &mut Bench, round: u32) -> Result<[Turn; 2]> {
    if round.is_multiple_of(2) {
        let hash = turn(bench, Side::Hash)?;
        Ok([hash, turn(bench, Side::Twheel)?])
    } else {
        let twheel = turn(bench, Side::Twheel)?;
        Ok([turn(bench, Side::Hash)?, twheel])
    }
}

/// Steps until nothing more is due, and reads the ring after each call as in production. Fails
/// unless every eviction has its event.
pub fn turn(bench: &mut Bench, side: Side) -> Result<Turn> {
    let mut turn = Turn::default();
    match side {
        Side::Twheel => loop {
            let step = call(bench, "twheel_step", 0, &mut turn)?;
            match Outcome::from_raw(step.outcome) {
                Some(Outcome::Done) => break,
                Some(Outcome::Budget | Outcome::RingFull) => {}
                None => bail!("the stepper gave no answer"),
            }
        },
        Side::Hash => {
            // Flows move from the first list to the others. In the others, only what is due.
            for list in 0..LISTS {
                while call(bench, "bench_listed_step", list, &mut turn)?.visits == STEP_BUDGET {}
                if list == 0 && turn.visits > 0 {
                    break;
                }
            }
        }
    }
    Ok(turn)
}

/// One call.
fn call(bench: &mut Bench, program: &str, list: u64, turn: &mut Turn) -> Result<Step> {
    let call = Step {
        budget: STEP_BUDGET,
        next: list,
        ..Step::default()
    };
    let mut step = Step::default();
    let result = bench
        .plane
        .xdp(program)?
        .test_run(TestRunOptions {
            data_in: Some(call.as_bytes()),
            data_out: Some(step.as_mut_bytes()),
            ..TestRunOptions::new()
        })
        .context("cannot run a stepper")?;
    // Calls for an empty list are not measured.
    if step.visits > 0 {
        turn.in_kernel += result.duration;
    }
    turn.visits += u64::from(step.visits);
    turn.expired += u64::from(step.expired);
    let mut events: Vec<Record> = Vec::new();
    bench.events.drain(&mut events);
    ensure!(
        events.len() == step.expired as usize,
        "{} events of {} reports; the first: {:?}",
        events.len(),
        step.expired,
        events.first()
    );
    Ok(step)
}
