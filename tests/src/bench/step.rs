//! Nanoseconds of what the stepper does.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aya::programs::{TestRun, TestRunOptions};
use twheel::{clock::Clock, data_plane::STEP_BUDGET, progress};
use twheel_common::{
    counter::Counter,
    event::Event,
    step::{Outcome, Step},
};
use twheel_tests::order::PACKETS;

use crate::{
    plane::{self, Bench, Segment},
    report::{Figure, Report, verdict},
};

const FLOWS: u32 = 1 << 20;
/// Milliseconds, as all times here.
const TIMEOUT: u64 = 60_000;
const TICK: u64 = 100;
/// Flows are touched over this long, so that visits spread them over many slots.
const SPREAD: u64 = 30_000;
/// Lists of the wheel over the kernel's hash: the flows to visit, and the slots.
const LISTS: u64 = 1 + 512;
/// What a visit may cost: so many times that over the kernel's hash.
const REARM: f64 = 0.5;
/// And an eviction.
const EVICT: f64 = 0.6;
/// And an eviction over the record of the ring alone.
const RECORD: f64 = 1.5;
/// Evictions a second, at least.
const RATE: f64 = 2.5e6;

const VARIANTS: [&str; 5] = ["rearm_hash", "rearm", "evict_hash", "evict", "record"];

/// Whose stepper.
#[derive(Clone, Copy)]
pub enum Side {
    /// That over the kernel's hash.
    Hash,
    /// Ours.
    Twheel,
}

/// What one turn of a stepper came to.
#[derive(Default)]
pub struct Turn {
    /// Visits to flows.
    pub visits: u64,
    /// Flows that have expired.
    pub expired: u64,
    /// The kernel's time for all calls.
    pub in_kernel: Duration,
}

/// Lives of whole tables: begun, touched in another order, visited, evicted.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "Nanoseconds each: median (least–most) of {rounds} rounds. {FLOWS} flows begin at once (and twheel's \
         table is aged:\none flow in 16 at random makes room for a new one, 48 times over), and are then \
         touched in random order: all\nare due at once and visited (rearm). Then all are due again, from {} \
         slots, and evicted (evict). Time is the\nkernel's `duration` of calls of {STEP_BUDGET} visits; \
         reading the ring after each is not in it. `hash` is the least that\nthe same takes where flows are \
         in the kernel's hash and keys are the links: 1. look up the key at the head of the\nlist, read \
         stamp and state, write two keys of 40 bytes; 2. look up, reserve, compare-and-swap, delete, submit.\n\
         `record alone` is what the ring takes for as many events: reserve, fill, submit.\n\
         The ratio is the median of the ratios of each round.\n",
        SPREAD / TICK
    ));
    let samples = measure(rounds)?;
    let ratio = |side, other| Figure::of(&plane::ratios(&samples, side, other)).median;
    let ratios = [ratio(1, 0), ratio(3, 2)];
    let record = ratio(3, 4);
    let figures = samples.map(|samples| Figure::of(&samples));
    for (variant, figure) in VARIANTS.iter().zip(&figures) {
        report.nanoseconds("step", variant, u64::from(FLOWS), figure);
    }
    report.say(&format!(
        "{:>8}  {:>20}  {:>20}  ratio",
        "", "hash", "twheel"
    ));
    let rows = figures[..4].chunks(2).zip(ratios).zip([REARM, EVICT]);
    for (variant, ((figures, ratio), bound)) in ["rearm", "evict"].iter().zip(rows) {
        report.say(&format!(
            "{variant:>8}  {}  {}",
            Figure::row(figures),
            verdict(ratio, Some(bound))
        ));
    }
    report.say(&format!(
        "\n{:>8}  {:>20}  {:>20}  ratio\n{:>8}  {}  {}",
        "",
        "record alone",
        "twheel",
        "evict",
        Figure::row(&[figures[4], figures[3]]),
        verdict(record, Some(RECORD))
    ));
    let rate = 1e9 / figures[3].median;
    report.say(&format!(
        "\nEvictions on one core: {:.2} million a second ({} {})",
        rate / 1e6,
        if rate >= RATE { "at least" } else { "BELOW" },
        RATE / 1e6
    ));
    report.say("Every flow was reported, each round; no event was lost.");
    Ok(())
}

fn measure(rounds: u32) -> Result<[Vec<f64>; VARIANTS.len()]> {
    let clock = Clock::virtual_ms();
    let timeout = Duration::from_millis(TIMEOUT);
    // One for all: the wheel comes to a flow as often as its shortest timeout asks, and how often
    // that is should be known here.
    let config = plane::config(clock, timeout, FLOWS)?;
    let mut bench = Bench::load(config, clock)?;
    let mut samples = plane::no_samples();
    let mut start = 1_000_000;
    // The first round warms up, and leaves the memory of the tables in no particular order.
    for round in progress::over("lives", 0..rounds + 1) {
        bench.plane.set_clock(start)?;
        let mut order = bench.age(FLOWS, false, None)?;
        let flows = order.len() as u64;
        bench.run("listed_insert", Segment::Ack, &order)?;
        bench.random.shuffle(&mut order);
        let chunks = order.chunks(PACKETS);
        let each = SPREAD / chunks.len() as u64;
        for (chunk, flows) in chunks.enumerate() {
            bench
                .plane
                .set_clock(start + 2 * TICK + each * chunk as u64)?;
            bench.run("listed_touch", Segment::Ack, flows)?;
            bench.run("touch", Segment::Ack, flows)?;
        }
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
        let mut records = Turn::default();
        while records.expired < flows {
            call(&mut bench, "bench_record", 0, &mut records)?;
        }
        if round > 0 {
            let turns = visited.iter().chain(&evicted).chain([&records]);
            for (samples, turn) in samples.iter_mut().zip(turns) {
                samples.push(turn.in_kernel.as_nanos() as f64 / turn.visits as f64);
            }
        }
        start += 10 * TIMEOUT;
    }
    bench.check(Counter::EventsLost, 0)?;
    Ok(samples)
}

/// A turn of both sides, that over the kernel's hash in front. Not always the same is measured first.
fn turns(bench: &mut Bench, round: u32) -> Result<[Turn; 2]> {
    if round.is_multiple_of(2) {
        let hash = turn(bench, Side::Hash)?;
        Ok([hash, turn(bench, Side::Twheel)?])
    } else {
        let twheel = turn(bench, Side::Twheel)?;
        Ok([turn(bench, Side::Hash)?, twheel])
    }
}

/// Steps until nothing more is due, reading the ring after each call as production does. Every
/// eviction has its event, or this fails.
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
            // From the first list flows go to the others: of these, then, only what is due.
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
    // SAFETY: `Step` is `repr(C)`, integers alone, without padding.
    let data: [u8; size_of::<Step>()] = unsafe { std::mem::transmute(call) };
    let mut out = [0; size_of::<Step>()];
    let result = bench
        .plane
        .xdp(program)?
        .test_run(TestRunOptions {
            data_in: Some(&data),
            data_out: Some(&mut out),
            ..TestRunOptions::new()
        })
        .context("cannot run a stepper")?;
    // SAFETY: as above, and any bytes are a valid `Step`.
    let step: Step = unsafe { std::mem::transmute(out) };
    // Calls for an empty list are not what is measured.
    if step.visits > 0 {
        turn.in_kernel += result.duration;
    }
    turn.visits += u64::from(step.visits);
    turn.expired += u64::from(step.expired);
    let mut events: Vec<Event> = Vec::new();
    bench.events.drain_ended(&mut events);
    ensure!(
        events.len() == step.expired as usize,
        "{} events of {} evictions; the first: {:?}",
        events.len(),
        step.expired,
        events.first()
    );
    Ok(step)
}
