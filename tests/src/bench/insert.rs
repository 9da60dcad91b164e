//! Nanoseconds of a new flow.

use std::time::Duration;

use anyhow::Result;
use twheel::{clock::Clock, progress};
use twheel_common::counter::Counter;
use twheel_tests::order::PACKETS;

use crate::{
    plane::{self, Bench, Segment},
    plot,
    report::{Figure, Report, verdict},
};

const SIZES: [u32; 3] = [1 << 14, 1 << 17, 1 << 20];
/// What a new flow may cost: so many times the floor.
const BOUND: f64 = 1.1;
/// Rules of the policy.
const RULES: [u32; 3] = [0, 10, 100];
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
         The ratio is touch/floor, whole programs: the median of the ratios of each round (least–most). With rules: of a \
         policy of so many,\nwhich the flows meet none of; 10 go by port, 100 by port, address and both.\n\n\
         {:>8}  {:>5}  {:>20}  {:>20}  ratio",
        "flows", "rules", "floor", "touch"
    ));
    let mut points = Vec::new();
    for flows in SIZES {
        for rules in RULES {
            let samples = measure(flows, rounds, rules)?;
            let ratio = plane::ratio(&samples, 1, 0);
            let figures = samples.map(|samples| Figure::of(&samples));
            for ((variant, _), figure) in VARIANTS.iter().zip(&figures) {
                let variant = format!("{variant}_{rules}_rules");
                report.nanoseconds("insert", &variant, u64::from(flows), figure);
            }
            report.say(&format!(
                "{flows:>8}  {rules:>5}  {}  {}",
                Figure::row(&figures),
                verdict(&ratio, (rules <= 10).then_some(BOUND))
            ));
            for ((variant, _), figure) in VARIANTS.iter().zip(&figures) {
                let name = match (*variant, rules) {
                    ("floor", 0) => "floor".to_owned(),
                    ("floor", _) => continue,
                    _ => format!("touch, {rules} rules"),
                };
                points.push((name, (f64::from(flows), figure.median)));
            }
        }
    }
    report.plot(
        "flows",
        "A new flow",
        ["flows that the tables are made for", "nanoseconds"],
        &plot::curves(points),
    )
}

/// A policy of so many rules that none of the bench's flows meets; they go to 192.0.2.1.
fn policy(rules: u32) -> String {
    let rule = |number: u32| {
        let port = format!("dport = {}\n", 10_000 + number);
        let address = format!("src = \"198.51.{number}.0/24\"\n");
        let both = match number % 3 {
            1 if rules > 10 => address,
            2 if rules > 10 => port + &address,
            _ => port,
        };
        format!("[[rule]]\nname = \"{number}\"\n{both}timeouts = {{ established = \"1h\" }}\n")
    };
    (0..rules).map(rule).collect()
}

fn measure(flows: u32, rounds: u32, rules: u32) -> Result<[Vec<f64>; VARIANTS.len()]> {
    let clock = Clock::jiffies()?;
    // Nothing is due while this runs.
    let config = plane::config(clock, Duration::from_secs(3600), flows)?;
    let mut bench = Bench::load(config, clock)?;
    bench.age(flows, true, None)?;
    if rules > 0 {
        bench.policy(&policy(rules))?;
    }
    let entered = bench.plane.counters()?.get(Counter::Created);
    let half = flows as usize / 2;
    let mut samples = plane::no_samples();
    // The first warms up.
    let what = format!("{flows} flows, {rules} rules");
    for round in progress::over(what, 0..rounds + 1) {
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
