//! Nanoseconds a packet.

use std::time::Duration;

use anyhow::Result;
use twheel::{clock::Clock, progress};
use twheel_common::counter::Counter;

use crate::{
    plane::{self, Bench, PACKETS, Random, Segment},
    report::{Figure, Report, verdict},
};

/// Numbers of flows, and what touch may cost there: so many times the floor.
const SIZES: [(u32, f64); 4] = [(1, 0.75), (1 << 10, 0.75), (1 << 17, 0.75), (1 << 20, 0.75)];
/// Options that cost something, and what touch may cost with them.
const OPTIONS: [(&str, &str, f64); 2] = [
    ("--accounting", "accounting", 0.85),
    ("--rto on", "rto", 1.0),
];
/// The number of flows at which a packet of none is bound, and by how much.
const ABSENT: (u32, f64) = (1 << 20, 1.0);
/// Programs, and what they are given.
const VARIANTS: [(&str, &str, Segment); 6] = [
    ("empty", "empty", Segment::Ack),
    ("parse", "parse", Segment::Ack),
    ("floor", "floor", Segment::Ack),
    ("touch", "touch", Segment::Ack),
    ("absent_floor", "floor_absent", Segment::Absent),
    ("absent_touch", "touch", Segment::Absent),
];
/// Runs before the rounds.
const WARM_UP: u32 = 2;
/// The table is never made smaller than this, so that few flows are not measured in a table that
/// nobody would make.
const SMALLEST_TABLE: u32 = 1 << 16;

/// What was measured at one number of flows.
struct Measured {
    figures: [Figure; VARIANTS.len()],
    /// Touch over floor, of a known flow.
    known: Figure,
    /// And of a packet of no flow.
    absent: Figure,
    at_home: f64,
}

/// All sizes, all variants.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "Nanoseconds a packet: median (least–most) of {rounds} rounds. A round runs each program once, in \
         turn; a run is\none BPF_PROG_TEST_RUN over {PACKETS} packets of flows at random, its time the \
         kernel's `duration`. One CPU. The flows'\naddresses are random.\n\
         `empty` is the loop and the writing of each packet's source, and is in all the others; `parse` \
         adds the parser,\n`floor` to that a lookup in the kernel's hash and a store, `touch` is what \
         production does, by jiffies. Absent: a\nRST of no flow; its floor is the parser and a lookup. \
         The tables are made for as many flows as are in them (at\nleast {SMALLEST_TABLE}) and aged: one flow \
         in 16 at random makes room for a new one, 48 times over.\n\
         The ratio is touch/floor, whole programs: the median of the ratios of each round. At home: flows \
         that stand where\ntheir hash says, and not a little behind.\n"
    ));
    let measured = |option| {
        SIZES
            .iter()
            .map(|&(flows, _)| Ok((flows, measure(flows, rounds, option)?)))
            .collect::<Result<Vec<_>>>()
    };
    let all = measured("")?;
    report.say(&format!(
        "{:>8}  {:>20}  {:>20}  {:>20}  {:>20}  ratio                 at home",
        "flows", "empty", "parse", "floor", "touch"
    ));
    for ((flows, measured), (_, bound)) in all.iter().zip(SIZES) {
        report.say(&format!(
            "{flows:>8}  {}  {:<20}  {:.1} %",
            Figure::row(&measured.figures[..4]),
            verdict(measured.known.median, Some(bound)),
            measured.at_home * 100.0
        ));
        for ((variant, ..), figure) in VARIANTS.iter().zip(&measured.figures) {
            report.nanoseconds("touch", variant, u64::from(*flows), figure);
        }
    }
    report.say(&format!(
        "\n{:>8}  {:>20}  {:>20}  ratio",
        "flows", "absent floor", "absent touch"
    ));
    for (flows, measured) in &all {
        let bound = (*flows == ABSENT.0).then_some(ABSENT.1);
        report.say(&format!(
            "{flows:>8}  {}  {}",
            Figure::row(&measured.figures[4..]),
            verdict(measured.absent.median, bound)
        ));
    }
    for (option, name, bound) in OPTIONS {
        report.say(&format!(
            "\nThe same with {option}.\n{:>8}  {:>20}  {:>20}  ratio",
            "flows", "floor", "touch"
        ));
        for (flows, measured) in measured(option)? {
            report.say(&format!(
                "{flows:>8}  {}  {}",
                Figure::row(&measured.figures[2..4]),
                verdict(measured.known.median, Some(bound))
            ));
            report.nanoseconds("touch", name, flows.into(), &measured.figures[3]);
        }
    }
    Ok(())
}

fn measure(flows: u32, rounds: u32, option: &str) -> Result<Measured> {
    let clock = Clock::jiffies()?;
    // Nothing is due while this runs.
    let timeout = Duration::from_secs(3600);
    let mut config = plane::config(clock, timeout, flows.max(SMALLEST_TABLE))?;
    config.0.accounting = (option == "--accounting").into();
    config.0.rto.on = (option == "--rto on").into();
    let mut bench = Bench::load(config, clock)?;
    let all = bench.age(flows, true)?;
    let one_of = |random: &mut Random| all[random.below(all.len() as u32) as usize];
    let mut samples = plane::no_samples::<{ VARIANTS.len() }>();
    for round in progress::over(format!("{flows} flows"), 0..WARM_UP + rounds) {
        // Not always the same after the same.
        for turn in 0..VARIANTS.len() {
            let number = (turn + round as usize) % VARIANTS.len();
            let (_, program, segment) = VARIANTS[number];
            let order: Vec<_> = (0..PACKETS).map(|_| one_of(&mut bench.random)).collect();
            let duration = bench.run(program, segment, &order)?;
            if round >= WARM_UP {
                samples[number].push(duration.as_nanos() as f64 / PACKETS as f64);
            }
        }
    }
    let packets = PACKETS as u64 * u64::from(WARM_UP + rounds);
    bench.check(Counter::Touched, packets)?;
    bench.check(Counter::NoFlow, packets)?;
    Ok(Measured {
        known: Figure::of(&plane::ratios(&samples, 3, 2)),
        absent: Figure::of(&plane::ratios(&samples, 5, 4)),
        at_home: bench.at_home(),
        figures: samples.map(|samples| Figure::of(&samples)),
    })
}
