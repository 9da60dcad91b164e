//! Nanoseconds of a new flow.

use std::time::Duration;

use anyhow::Result;
use twheel::clock::Clock;
use twheel_common::counter::Counter;

use crate::{
    plane::{self, Bench, PACKETS, Segment},
    report::{Figure, Report, verdict},
};

const SIZES: [u32; 2] = [1 << 17, 1 << 20];
/// What a new flow may cost: so many times the floor.
const BOUND: f64 = 1.1;
const VARIANTS: [(&str, &str); 2] = [("floor", "floor_insert"), ("touch", "touch")];

/// Fills tables from half to full.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "Nanoseconds a new flow: median (least–most) of {rounds} rounds. A round fills both tables from half \
         to full (the\nflows that they are made for), the same new flows of random addresses, {PACKETS} of \
         them a BPF_PROG_TEST_RUN, the tables\nin turn; its time is the kernel's `duration`. `floor` is the parser \
         and an insertion into the kernel's hash; `touch`\nis what production does with a SYN of a new flow: \
         parse, find nothing, enter, put on the wheel, count. The tables\nwere aged, and before each round \
         half of the flows at random are removed.\n\
         The ratio is touch/floor, whole programs: the median of the ratios of each round.\n\n\
         {:>8}  {:>20}  {:>20}  ratio",
        "flows", "floor", "touch"
    ));
    for flows in SIZES {
        let samples = measure(flows, rounds)?;
        let ratio = Figure::of(&plane::ratios(&samples, 1, 0)).median;
        let figures = samples.map(|samples| Figure::of(&samples));
        for ((variant, _), figure) in VARIANTS.iter().zip(&figures) {
            report.nanoseconds("insert", variant, u64::from(flows), figure);
        }
        report.say(&format!(
            "{flows:>8}  {}  {}",
            Figure::row(&figures),
            verdict(ratio, Some(BOUND))
        ));
    }
    Ok(())
}

fn measure(flows: u32, rounds: u32) -> Result<[Vec<f64>; VARIANTS.len()]> {
    let clock = Clock::jiffies()?;
    // Nothing is due while this runs.
    let config = plane::config(clock, Duration::from_secs(3600), flows)?;
    let mut bench = Bench::load(config, clock)?;
    bench.age(flows, true)?;
    let entered = bench.plane.counters()?.get(Counter::Created);
    let half = flows as usize / 2;
    let mut samples = plane::no_samples();
    // The first warms up.
    for round in 0..=rounds {
        let gone = bench.delete(half)?;
        bench.run("floor_delete", Segment::Ack, &gone)?;
        let mut durations = [Duration::ZERO; VARIANTS.len()];
        for (chunk, flows) in bench.fresh(half).chunks(PACKETS).enumerate() {
            for turn in 0..VARIANTS.len() {
                let number = (turn + chunk) % VARIANTS.len();
                durations[number] += bench.run(VARIANTS[number].1, Segment::Syn, flows)?;
            }
        }
        if round > 0 {
            for (samples, duration) in samples.iter_mut().zip(durations) {
                samples.push(duration.as_nanos() as f64 / half as f64);
            }
        }
    }
    bench.check(
        Counter::Created,
        entered + half as u64 * u64::from(1 + rounds),
    )?;
    Ok(samples)
}
