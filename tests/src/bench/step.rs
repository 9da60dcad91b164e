//! Nanoseconds of what the stepper does.

use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use aya::programs::{TestRun, TestRunOptions};
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Events, STEP_BUDGET},
};
use twheel_common::{
    counter::Counter,
    event::Event,
    step::{Outcome, Step},
};

use crate::{
    plane,
    report::{Figure, Report},
};

const FLOWS: u32 = 1 << 20;
/// Milliseconds, as all times here.
const TIMEOUT: u64 = 60_000;
const TICK: u64 = 100;
/// Flows are touched over this long, so that visits spread them over many slots.
const SPREAD: u64 = 30_000;

/// What one turn of the stepper came to.
#[derive(Default)]
struct Turn {
    visits: u64,
    expired: u64,
    in_kernel: Duration,
}

/// Lives of a whole table: begun, touched in another order, visited, evicted.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    let clock = Clock::virtual_ms();
    let timeout = Duration::from_millis(TIMEOUT);
    // One for all: the wheel comes to a flow as often as its shortest timeout asks, and how often
    // that is should be known here.
    let config = plane::config(clock, timeout, Some(timeout), FLOWS)?;
    let mut plane = plane::load(&plane::object("TWHEEL_BPF_OBJECT")?, config, clock)?;
    let mut events = plane.take_events()?;
    report.say(&format!(
        "Nanoseconds each: median (least–most) of {rounds} rounds. {FLOWS} flows begin at once and are then \
         touched in another\norder: all are due at once and visited (rearm). Then all are due again, from \
         {} slots, and evicted (evict).\nTime is the kernel's `duration` of calls of {STEP_BUDGET} visits; \
         reading the ring is not in it.\n",
        SPREAD / TICK
    ));
    let (mut rearm, mut evict) = (Vec::new(), Vec::new());
    let mut start = 1_000_000;
    // The first round warms up, and leaves the memory of the table in no particular order.
    for round in 0..=rounds {
        plane.set_clock(start)?;
        for flow in 0..FLOWS {
            see(&mut plane, flow)?;
        }
        for number in 0..FLOWS {
            if number % (FLOWS / 256) == 0 {
                let later = SPREAD * u64::from(number) / u64::from(FLOWS);
                plane.set_clock(start + 2 * TICK + later)?;
            }
            // Odd, so that every flow has its turn.
            see(&mut plane, number.wrapping_mul(0x9e37_79b1) % FLOWS)?;
        }
        plane.set_clock(start + TIMEOUT + TICK)?;
        let visited = turn(&mut plane, &mut events)?;
        ensure!(
            visited.visits == u64::from(FLOWS) && visited.expired == 0,
            "{} visits of {FLOWS}, {} flows expired early",
            visited.visits,
            visited.expired
        );
        plane.set_clock(start + SPREAD + TIMEOUT + 4 * TICK)?;
        let evicted = turn(&mut plane, &mut events)?;
        ensure!(
            evicted.expired == u64::from(FLOWS),
            "{} of {FLOWS} flows were reported",
            evicted.expired
        );
        if round > 0 {
            let each = |turn: &Turn| turn.in_kernel.as_nanos() as f64 / turn.visits as f64;
            rearm.push(each(&visited));
            evict.push(each(&evicted));
        }
        start += 10 * TIMEOUT;
    }
    let lost = plane.counters()?.get(Counter::EventsLost);
    ensure!(lost == 0, "{lost} events were lost");
    for (variant, samples) in [("rearm", rearm), ("evict", evict)] {
        let figure = Figure::of(&samples);
        report.nanoseconds("step", variant, u64::from(FLOWS), &figure);
        report.say(&format!(
            "{variant:>8}  {:>7.1} ({:.1}–{:.1})",
            figure.median, figure.min, figure.max
        ));
    }
    report.say("Every flow was reported, each round; no event was lost.");
    Ok(())
}

/// A packet of a flow.
fn see(plane: &mut DataPlane, flow: u32) -> Result<()> {
    plane
        .xdp("twheel_xdp")?
        .test_run(TestRunOptions {
            data_in: Some(&plane::segment(flow)),
            ..TestRunOptions::new()
        })
        .context("cannot run twheel_xdp")?;
    Ok(())
}

/// Steps until nothing more is due, reading the ring after each call as production does. Every
/// eviction has its event, or this fails.
fn turn(plane: &mut DataPlane, events: &mut Events) -> Result<Turn> {
    let mut turn = Turn::default();
    let mut reported = 0;
    let mut batch: Vec<Event> = Vec::new();
    let program = plane.xdp("twheel_step")?;
    loop {
        let call = Step {
            budget: STEP_BUDGET,
            ..Step::default()
        };
        // SAFETY: `Step` is `repr(C)`, integers alone, without padding.
        let data: [u8; size_of::<Step>()] = unsafe { std::mem::transmute(call) };
        let mut out = [0; size_of::<Step>()];
        let result = program
            .test_run(TestRunOptions {
                data_in: Some(&data),
                data_out: Some(&mut out),
                ..TestRunOptions::new()
            })
            .context("cannot run the stepper")?;
        // SAFETY: as above, and any bytes are a valid `Step`.
        let step: Step = unsafe { std::mem::transmute(out) };
        turn.in_kernel += result.duration;
        turn.visits += u64::from(step.visits);
        turn.expired += u64::from(step.expired);
        events.drain(&mut batch);
        reported += batch.len() as u64;
        batch.clear();
        match Outcome::from_raw(step.outcome) {
            Some(Outcome::Done) => break,
            Some(Outcome::Budget | Outcome::RingFull) => {}
            None => bail!("the stepper gave no answer"),
        }
    }
    ensure!(
        reported == turn.expired,
        "{reported} events of {} evictions",
        turn.expired
    );
    Ok(turn)
}
