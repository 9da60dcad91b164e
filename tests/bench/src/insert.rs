//! Nanoseconds for a new flow.

use std::time::Duration;

use anyhow::Result;
use twheel::{clock::Clock, progress};
use twheel_common::counter::Counter;
use twheel_tests::order::PACKETS;

use crate::{
    inputs::Segment,
    peers::{self, Peers},
    plane::{self, Bench},
    plot,
    report::{Figure, Report, verdict},
    size,
};

const SIZES: [u32; 3] = [
    size(1 << 14, 1 << 12),
    size(1 << 17, 1 << 13),
    size(1 << 20, 1 << 14),
];
/// Maximum cost of a new flow, relative to the floor, …
const BOUND: f64 = 0.9;
/// … and relative to an insertion into an LRU hash.
const LRU_BOUND: f64 = 0.55;
/// Numbers of rules in the policy.
const RULES: [u32; 3] = [0, 10, 100];
/// How many tables are filled to measure the parts.
const PARTS: u32 = 5;
const VARIANTS: [(&str, &str); 4] = [
    ("floor", "floor_insert"),
    ("lru", peers::LRU),
    ("touch", "touch"),
    ("resizable", peers::RESIZABLE),
];
const FLOOR: usize = 0;
const LRU: usize = 1;
const TOUCH: usize = 2;
const RESIZABLE: usize = 3;

/// Fills tables from half to full.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "Nanoseconds a new flow: median (least–most) of {rounds} rounds. A round fills the tables from half \
         to full (those of\nthe kernel's hash are made for a quarter more), the same new flows of random addresses, {PACKETS} of \
         them a BPF_PROG_TEST_RUN, the tables in\nturn; its time is the kernel's `duration`. `floor` is the parser \
         and an insertion into the kernel's hash; `lru` the usual\ntracker: parser, lookup, insertion into an LRU hash; `touch` is what production does with a SYN of a new flow: \
         parse, find nothing, enter, put on the wheel, count. The tables\nwere aged, and before each round \
         half of the flows at random are removed.\n\
         Ratios are of whole programs: the median of the ratios of each round (least–most). With rules: of a \
         policy of so many,\nwhich the flows meet none of; 10 go by port, 100 by port, address and both.\n\n\
         {:>8}  {:>5}  {:>20}  {:>20}  {:>20}  {:<30}  touch/lru",
        "flows", "rules", "floor", "lru", "touch", "touch/floor"
    ));
    let (mut points, mut resizable) = (Vec::new(), Vec::new());
    for flows in SIZES {
        for rules in RULES {
            let samples = measure(flows, rounds, rules)?;
            let [floor, lru] = [FLOOR, LRU].map(|other| plane::ratio(&samples, TOUCH, other));
            let is_measured = |number: &usize| !samples[*number].is_empty();
            let figures: Vec<_> = (0..VARIANTS.len())
                .filter(is_measured)
                .map(|number| (VARIANTS[number].0, Figure::from_samples(&samples[number])))
                .collect();
            for (variant, figure) in &figures {
                let variant = format!("{variant}_{rules}_rules");
                report.nanoseconds("insert", &variant, u64::from(flows), figure);
            }
            if is_measured(&RESIZABLE) && rules == 0 {
                let ratio = plane::ratio(&samples, TOUCH, RESIZABLE);
                resizable.push(format!("{flows:>8}  {}", verdict(&ratio, None)));
            }
            report.say(&format!(
                "{flows:>8}  {rules:>5}  {}  {:<30}  {}",
                Figure::row(
                    &[FLOOR, LRU, TOUCH].map(|variant| Figure::from_samples(&samples[variant]))
                ),
                verdict(&floor, (rules <= 10).then_some(BOUND)),
                verdict(&lru, (rules == 0).then_some(LRU_BOUND))
            ));
            for (variant, figure) in &figures {
                let name = match (*variant, rules) {
                    ("touch", _) => format!("touch, {rules} rules"),
                    (other, 0) => other.to_owned(),
                    _ => continue,
                };
                points.push((name, (f64::from(flows), figure.median)));
            }
        }
    }
    report.say(&format!(
        "\nWhat a new flow is made of, in a table that is filled from empty to half: median (least–most) of {PARTS} tables. `table`: \
         look, count\nin, enter (with the flow's details); `policy`: which of 10 rules it meets; both less the parser. `wheel, rest`: what a touch \
         without\nrules takes more than the table's part: its timer, counters, what is noted of it.\n\n\
         {:>8}  {:>20}  {:>20}  {:>20}",
        "flows", "table", "policy", "wheel, rest"
    ));
    for flows in SIZES {
        let parts = progress::over(format!("parts of {flows} flows"), 0..PARTS)
            .map(|_| parts(flows))
            .collect::<Result<Vec<_>>>()?;
        let figures = [0, 1, 2].map(|part| {
            Figure::from_samples(&parts.iter().map(|parts| parts[part]).collect::<Vec<_>>())
        });
        report.say(&format!("{flows:>8}  {}", Figure::row(&figures)));
    }
    report.say(&match resizable.is_empty() {
        true => format!("\n{}", peers::NO_RESIZABLE),
        false => format!(
            "\nOver an insertion into the kernel's resizable hash, without rules:\n{}",
            resizable.join("\n")
        ),
    });
    report.plot(
        "flows",
        "A new flow",
        ["flows that the tables are made for", "nanoseconds"],
        &plot::curves(points),
    )
}

/// Nanoseconds of the parts of a new flow, each measured in its own table: the table's part, the
/// policy's, and the rest.
fn parts(flows: u32) -> Result<[f64; 3]> {
    let clock = Clock::jiffies()?;
    let filled = |programs: &[&str], rules: u32| -> Result<Vec<f64>> {
        let config = plane::config(clock, Duration::from_secs(3600), flows)?;
        let mut bench = Bench::load(config, clock)?;
        if rules > 0 {
            bench.policy(&policy(rules))?;
        }
        let fresh = bench.fresh(flows as usize / 2);
        let run = |program: &&str| -> Result<f64> {
            let took = bench.run(program, Segment::Syn, &fresh)?;
            Ok(took.as_nanos() as f64 / fresh.len() as f64)
        };
        programs.iter().map(run).collect()
    };
    let [parse, enter] = filled(&["parse", "enter"], 0)?[..] else {
        unreachable!("two programs")
    };
    let rule = filled(&["rule"], RULES[1])?[0];
    let touch = filled(&["touch"], 0)?[0];
    Ok([enter - parse, rule - parse, touch - enter])
}

/// A policy of this many rules, none of which matches the benchmark's flows, which go to 192.0.2.1.
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
    let mut peers = Peers::trackers(&[peers::LRU, peers::RESIZABLE], flows)?;
    bench.age(flows, true, Some(&mut peers))?;
    if rules > 0 {
        bench.policy(&policy(rules))?;
    }
    let entered = bench.plane.counters()?.get(Counter::Created);
    let half = flows as usize / 2;
    let mut samples = plane::no_samples();
    // The first round warms up.
    let what = format!("{flows} flows, {rules} rules");
    for round in progress::over(what, 0..rounds + 1) {
        let gone = bench.delete(half)?;
        bench.run("floor_delete", Segment::Ack, &gone)?;
        peers.remove(&gone)?;
        let mut durations = [Duration::ZERO; VARIANTS.len()];
        for (chunk, flows) in bench.fresh(half).chunks(PACKETS).enumerate() {
            for turn in 0..VARIANTS.len() {
                let number = (turn + chunk) % VARIANTS.len();
                durations[number] += match VARIANTS[number].1 {
                    program if peers.has(program) => peers.run(program, Segment::Syn, flows)?,
                    peers::RESIZABLE => continue,
                    program => bench.run(program, Segment::Syn, flows)?,
                };
            }
        }
        if round > 0 {
            for (samples, duration) in samples.iter_mut().zip(durations) {
                if duration.is_zero() {
                    // There is none.
                    continue;
                }
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
