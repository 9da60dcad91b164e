//! Compares the data plane with an earlier one: two benchmark objects, loaded side by side and run
//! in turn.

use std::{fs, path::Path, time::Duration};

use anyhow::{Context, Result, ensure};
use twheel::{clock::Clock, progress};
use twheel_common::counter::Counter;
use twheel_tests::order::PACKETS;

use crate::{
    inputs::{Segment, object},
    plane::{self, Bench, Random},
    report::{Figure, Report, verdict},
    size,
    step::{self, Side},
};

/// Numbers of flows at which a packet of a known flow is measured.
const SIZES: [u32; 2] = [1, 1 << 10];
/// The options with which that is measured.
const OPTIONS: [&str; 3] = ["", "--accounting", "--rto on"];
/// Maximum cost of a packet of a known flow, relative to before.
const TOUCH: f64 = 1.03;
/// The same for a new flow, a timer visit and an eviction.
const OTHERS: f64 = 1.05;
/// Number of flows for these.
const FLOWS: u32 = size(1 << 13, 1 << 11);
/// The table is never smaller than this.
const SMALLEST_TABLE: u32 = 1 << 16;
/// In milliseconds of virtual time.
const TIMEOUT: u64 = 60_000;
const WARM_UP: u32 = 2;

const NOW: usize = 0;
const BEFORE: usize = 1;

/// Measures the present object beside the one in a file, which must have the same layout.
pub fn bench(before: &Path, rounds: u32, report: &mut Report) -> Result<()> {
    let before = fs::read(before).with_context(|| format!("cannot read {}", before.display()))?;
    let objects = [object("TWHEEL_BENCH_OBJECT")?, before];
    report.say(&format!(
        "Nanoseconds: median (least–most) of {rounds} rounds, now and before, in turn. Ratios are the medians of those of \
         each round.\n{:<34}  {:>20}  {:>20}  ratio",
        "", "now", "before"
    ));
    let mut say = |what: String, samples: &[Vec<f64>; 2], bound: f64| {
        let figures = [NOW, BEFORE].map(|side| Figure::from_samples(&samples[side]));
        report.say(&format!(
            "{what:<34}  {}  {}",
            Figure::row(&figures),
            verdict(&plane::ratio(samples, NOW, BEFORE), Some(bound))
        ));
    };
    for option in OPTIONS {
        for flows in SIZES {
            let samples = touch(&objects, flows, option, rounds)?;
            say(format!("touch, {flows} flows {option}"), &samples, TOUCH);
        }
    }
    let samples = insert(&objects, rounds)?;
    say(format!("new flow, {FLOWS}"), &samples, OTHERS);
    let [visits, evictions] = steps(&objects, rounds)?;
    say(format!("re-arm, {FLOWS} flows"), &visits, OTHERS);
    say(format!("eviction, {FLOWS} flows"), &evictions, OTHERS);
    Ok(())
}

fn load(object: &[u8], clock: Clock, flows: u32, option: &str) -> Result<Bench> {
    // Nothing is due by the real clock while this runs.
    let timeout = match clock.source {
        twheel_common::config::CLOCK_VIRTUAL => Duration::from_millis(TIMEOUT),
        _ => Duration::from_secs(3600),
    };
    let mut config = plane::config(clock, timeout, flows)?;
    config.0.accounting = (option == "--accounting").into();
    config.0.rto.on = (option == "--rto on").into();
    Bench::load_object(object, config, clock)
}

fn touch(objects: &[Vec<u8>; 2], flows: u32, option: &str, rounds: u32) -> Result<[Vec<f64>; 2]> {
    let clock = Clock::jiffies()?;
    let mut sides = Vec::new();
    for object in objects {
        let mut bench = load(object, clock, flows.max(SMALLEST_TABLE), option)?;
        let all = bench.age(flows, false, None)?;
        sides.push((bench, all));
    }
    let mut random = Random::default();
    let mut samples = plane::no_samples();
    for round in progress::over(format!("{flows} flows {option}"), 0..WARM_UP + rounds) {
        for turn in 0..2 {
            let side = (turn + round as usize) % 2;
            let (bench, all) = &mut sides[side];
            let order: Vec<_> = (0..PACKETS)
                .map(|_| all[random.below(all.len() as u32) as usize])
                .collect();
            let took = bench.run("touch", Segment::Ack, &order)?;
            if round >= WARM_UP {
                samples[side].push(took.as_nanos() as f64 / PACKETS as f64);
            }
        }
    }
    for (bench, _) in &sides {
        bench.check(
            Counter::Touched,
            PACKETS as u64 * u64::from(WARM_UP + rounds),
        )?;
    }
    Ok(samples)
}

fn insert(objects: &[Vec<u8>; 2], rounds: u32) -> Result<[Vec<f64>; 2]> {
    let clock = Clock::jiffies()?;
    let mut sides = Vec::new();
    for object in objects {
        let mut bench = load(object, clock, FLOWS * 2, "")?;
        bench.age(FLOWS * 2, false, None)?;
        sides.push(bench);
    }
    let mut samples = plane::no_samples();
    for round in progress::over("new flows", 0..WARM_UP + rounds) {
        for turn in 0..2 {
            let side = (turn + round as usize) % 2;
            let bench = &mut sides[side];
            bench.delete(FLOWS as usize)?;
            let mut took = Duration::ZERO;
            for flows in bench.fresh(FLOWS as usize).chunks(PACKETS) {
                took += bench.run("touch", Segment::Syn, flows)?;
            }
            if round >= WARM_UP {
                samples[side].push(took.as_nanos() as f64 / f64::from(FLOWS));
            }
        }
    }
    Ok(samples)
}

/// Measures timer visits that re-arm, and evictions.
fn steps(objects: &[Vec<u8>; 2], rounds: u32) -> Result<[[Vec<f64>; 2]; 2]> {
    let clock = Clock::virtual_ms();
    let mut sides = Vec::new();
    for object in objects {
        sides.push(load(object, clock, FLOWS, "")?);
    }
    let (mut visits, mut evictions) = (plane::no_samples(), plane::no_samples());
    let mut start = 1_000_000;
    for round in progress::over("steps", 0..WARM_UP + rounds) {
        for turn in 0..2 {
            let side = (turn + round as usize) % 2;
            let bench = &mut sides[side];
            bench.plane.set_clock(start)?;
            let order = bench.fresh(FLOWS as usize);
            bench.run("touch", Segment::Ack, &order)?;
            let flows = bench.plane.tracked()?;
            bench.plane.set_clock(start + TIMEOUT / 2)?;
            bench.run("touch", Segment::Ack, &order)?;
            bench.plane.set_clock(start + TIMEOUT + 200)?;
            let visited = step::turn(bench, Side::Twheel)?;
            ensure!(visited.visits == flows && visited.expired == 0, "early");
            bench.plane.set_clock(start + TIMEOUT * 2)?;
            let evicted = step::turn(bench, Side::Twheel)?;
            ensure!(
                evicted.expired == flows,
                "{} expired of {flows}",
                evicted.expired
            );
            if round >= WARM_UP {
                visits[side].push(visited.nanoseconds());
                evictions[side].push(evicted.nanoseconds());
            }
        }
        start += 4 * TIMEOUT;
    }
    Ok([visits, evictions])
}
