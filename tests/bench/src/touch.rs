//! Nanoseconds per packet.

use std::{
    hint::black_box,
    path::Path,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use twheel::{clock::Clock, progress};
use twheel_common::{counter::Counter, table::Hash};
use twheel_tests::order::PACKETS;

use crate::{
    inputs::Segment,
    peers::{self, Peers},
    plane::{self, Bench, Random},
    plot,
    report::{Figure, Report, verdict},
    size, tagged,
};

/// Numbers of flows, each with the maximum cost of a touch relative to the floor.
const SIZES: [(u32, f64); 4] = [
    (1, 0.45),
    (CACHED, 0.45),
    (size(1 << 17, 1 << 11), 0.45),
    (size(1 << 20, 1 << 12), 0.50),
];
/// The number of flows that stay in the processor's caches.
const CACHED: u32 = 1 << 10;
/// Not an option, but the cost of flows of which both sides were seen, while one side sends data.
const DATA: &str = "data: both sides of the flows were seen, and the first packet of a flow in each run moves its sender on";
/// Not options either: the cost of a packet if the programs look up its interface and count for
/// each interface, …
const SEVERAL: &str = "several interfaces";
/// … and if the interface is in a zone, which is part of the key.
const ZONE: &str = "several interfaces, in zones";
/// All flows are registered, as their programs have handed over their timeouts.
const OFFLOAD: &str = "--offload, all flows registered";
/// The same, and as for [`DATA`].
const OFFLOAD_DATA: &str = "--offload, all flows registered, and data";
/// Options that cost more, and the maximum cost of a touch with each.
const OPTIONS: [(&str, &str, Option<f64>); 7] = [
    (SEVERAL, "several", None),
    (ZONE, "zone", None),
    (DATA, "data", None),
    (OFFLOAD, "offload", None),
    (OFFLOAD_DATA, "offload_data", None),
    ("--accounting", "accounting", Some(0.60)),
    ("--rto on", "rto", Some(0.75)),
];
/// Numbers of flows at which the cost of a packet without a flow has a bound, with that bound.
const ABSENT: [(u32, f64); 3] = [(SIZES[0].0, 0.5), (SIZES[1].0, 0.5), (SIZES[3].0, 0.6)];
/// The programs and their input.
const VARIANTS: [(&str, &str, Segment); 10] = [
    ("empty", "empty", Segment::Ack),
    ("parse", "parse", Segment::Ack),
    ("find", "find", Segment::Ack),
    ("floor", "floor", Segment::Ack),
    ("lru", peers::LRU, Segment::Ack),
    ("touch", "touch", Segment::Ack),
    ("absent_floor", "floor_absent", Segment::Absent),
    ("absent_touch", "touch", Segment::Absent),
    ("small", peers::SMALL, Segment::Ack),
    ("resizable", peers::RESIZABLE, Segment::Ack),
];
const EMPTY: usize = 0;
const PARSE: usize = 1;
const FIND: usize = 2;
const FLOOR: usize = 3;
const LRU: usize = 4;
const TOUCH: usize = 5;
const ABSENT_FLOOR: usize = 6;
const ABSENT_TOUCH: usize = 7;
const SMALL: usize = 8;
const RESIZABLE: usize = 9;
/// Runs before the rounds.
const WARM_UP: u32 = 2;
/// The table is never smaller than this, so that few flows are not measured in a table that nobody
/// would make.
const SMALLEST_TABLE: u32 = 1 << 16;

/// The measurements at one number of flows.
struct Measured {
    samples: [Vec<f64>; VARIANTS.len()],
    at_home: f64,
    /// Size of the programs' machine code in bytes.
    code: [u32; VARIANTS.len()],
}

impl Measured {
    /// The variants that were measured: not every kernel has a table for each.
    fn variants(&self) -> impl Iterator<Item = (usize, &(&str, &str, Segment))> {
        let is_measured = |number: usize| !self.samples[number].is_empty();
        VARIANTS
            .iter()
            .enumerate()
            .filter(move |(number, _)| is_measured(*number))
    }

    fn figure(&self, variant: usize) -> Figure {
        Figure::from_samples(&self.samples[variant])
    }

    /// One variant relative to another, round by round.
    fn ratio(&self, side: usize, other: usize) -> Figure {
        plane::ratio(&self.samples, side, other)
    }

    /// How much more one variant takes than another, round by round.
    fn more(&self, side: usize, than: usize) -> Figure {
        let pairs = self.samples[side].iter().zip(&self.samples[than]);
        Figure::from_samples(&pairs.map(|(side, than)| side - than).collect::<Vec<_>>())
    }
}

/// Measures all sizes with all variants.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "Nanoseconds a packet: median (least–most) of {rounds} rounds. A round runs each program once, in \
         turn; a run is\none BPF_PROG_TEST_RUN over {PACKETS} packets of flows at random, its time the \
         kernel's `duration`. One CPU. The flows'\naddresses are random.\n\
         `empty` is the loop and the writing of each packet's source, and is in all the others; `parse` \
         adds the parser,\n`find` to that the lookup in twheel's table; `floor` instead a lookup in the kernel's hash \
         and a store; `lru` is the\nusual tracker: parser, lookup in an LRU hash, a store; `touch` is what \
         production does, by jiffies. Absent: a RST of\nno flow; its floor is the parser and a lookup. \
         The tables are made for as many flows as are in them (at least {SMALLEST_TABLE}; \
         those of\nthe kernel's hash for a quarter more, which has twice the buckets, and an LRU hash \
         pushes out live flows when it is full:\n\
         it was checked that it lost none) and aged: one flow in 16 at random makes room for a new one, 48 times over.\n\
         Ratios are of whole programs: the median of the ratios of each round (least–most). At home: flows \
         that stand where their hash says,\nand not a little behind.\n"
    ));
    let measured = |option| {
        SIZES
            .iter()
            .map(|&(flows, _)| Ok((flows, measure(flows, rounds, option)?)))
            .collect::<Result<Vec<_>>>()
    };
    let all = measured("")?;
    report.say(&format!(
        "{:>8}  {:>20}  {:>20}  {:>20}  touch/floor",
        "flows", "floor", "lru", "touch"
    ));
    for ((flows, measured), (_, bound)) in all.iter().zip(SIZES) {
        report.say(&format!(
            "{flows:>8}  {}  {}",
            Figure::row(&[FLOOR, LRU, TOUCH].map(|variant| measured.figure(variant))),
            verdict(&measured.ratio(TOUCH, FLOOR), Some(bound)),
        ));
        for (number, (variant, ..)) in measured.variants() {
            let figure = measured.figure(number);
            report.nanoseconds("touch", variant, u64::from(*flows), &figure);
        }
    }
    report.say(&format!(
        "\n{:>8}  {:<19}  {:<19}  at home",
        "flows", "lru/floor", "touch/lru"
    ));
    for (flows, measured) in &all {
        report.say(&format!(
            "{flows:>8}  {:<19}  {:<19}  {:.1} %",
            verdict(&measured.ratio(LRU, FLOOR), None),
            verdict(&measured.ratio(TOUCH, LRU), None),
            measured.at_home * 100.0
        ));
    }
    floors(&all, report);
    parts(&all, report);
    report.say(&format!(
        "\n{:>8}  {:>20}  {:>20}  ratio",
        "flows", "absent floor", "absent touch"
    ));
    for (flows, measured) in &all {
        let bound = ABSENT.iter().find(|(size, _)| size == flows);
        let bound = bound.map(|(_, bound)| *bound);
        report.say(&format!(
            "{flows:>8}  {}  {}",
            Figure::row(&[ABSENT_FLOOR, ABSENT_TOUCH].map(|variant| measured.figure(variant))),
            verdict(&measured.ratio(ABSENT_TOUCH, ABSENT_FLOOR), bound)
        ));
    }
    tagged::bench(rounds, report)?;
    let points = all.iter().flat_map(|(flows, measured)| {
        measured.variants().map(|(number, (name, ..))| {
            let point = (f64::from(*flows), measured.figure(number).median);
            (name.replace('_', ", "), point)
        })
    });
    let mut curves = plot::curves(points);
    for (option, name, bound) in OPTIONS {
        let mut curve = Vec::new();
        report.say(&format!(
            "\nThe same with {option}:\n{:>8}  {:>20}  {:>20}  ratio",
            "flows", "floor", "touch"
        ));
        for (flows, measured) in measured(option)? {
            report.say(&format!(
                "{flows:>8}  {}  {}",
                Figure::row(&[FLOOR, TOUCH].map(|variant| measured.figure(variant))),
                verdict(&measured.ratio(TOUCH, FLOOR), bound)
            ));
            report.nanoseconds("touch", name, flows.into(), &measured.figure(TOUCH));
            curve.push((f64::from(flows), measured.figure(TOUCH).median));
        }
        curves.push((format!("touch {option}"), curve));
    }
    report.plot(
        "flows",
        "A packet of a known flow, and of none (absent)",
        ["flows", "nanoseconds"],
        &curves,
    )
}

/// Compares with other tables of the kernel.
fn floors(all: &[(u32, Measured)], report: &mut Report) {
    report.say(&format!(
        "\nOther floors: parser, lookup, a store. `small` is the kernel's hash with the smallest key that IPv4 and TCP allow, 12 \
         bytes, and a\nvalue of 8; `resizable` the kernel's resizable hash, keys and values as `floor` has them.\n\
         {:>8}  {:>20}  {:>20}  {:<19}  {:<19}  touch/resizable",
        "flows", "small", "resizable", "small/floor", "touch/small"
    ));
    for (flows, measured) in all {
        let (figure, ratio) = match measured.samples[RESIZABLE].is_empty() {
            true => (format!("{:>20}", "–"), "–".to_owned()),
            false => (
                Figure::row(&[measured.figure(RESIZABLE)]),
                verdict(&measured.ratio(TOUCH, RESIZABLE), None),
            ),
        };
        report.say(&format!(
            "{flows:>8}  {}  {figure}  {:<19}  {:<19}  {ratio}",
            Figure::row(&[measured.figure(SMALL)]),
            verdict(&measured.ratio(SMALL, FLOOR), None),
            verdict(&measured.ratio(TOUCH, SMALL), None),
        ));
    }
    if all
        .iter()
        .any(|(_, measured)| measured.samples[RESIZABLE].is_empty())
    {
        report.say(peers::NO_RESIZABLE);
    }
}

/// What the nanoseconds of a touch are spent on.
fn parts(all: &[(u32, Measured)], report: &mut Report) {
    report.say(&format!(
        "\nWhat a touch is made of: differences of programs, the median (least–most) of those of each round. Rest: the \
         clock, what\nthe packet says of the flow's state, the stamp if the clock has moved on, a counter.\n\
         {:>8}  {:>20}  {:>20}  {:>20}  {:>20}  floor without parser",
        "flows", "loop", "parser", "find", "rest"
    ));
    for (flows, measured) in all {
        report.say(&format!(
            "{flows:>8}  {}",
            Figure::row(&[
                measured.figure(EMPTY),
                measured.more(PARSE, EMPTY),
                measured.more(FIND, PARSE),
                measured.more(TOUCH, FIND),
                measured.more(FLOOR, PARSE),
            ])
        ));
    }
    let Some((_, cached)) = all.iter().find(|(flows, _)| *flows == CACHED) else {
        return;
    };
    let code = [EMPTY, PARSE, FIND, FLOOR, LRU, TOUCH]
        .map(|variant| format!("{} {}", VARIANTS[variant].0, cached.code[variant]));
    report.say(&format!(
        "\nMachine code, bytes, of all that a program may do; a packet of a known flow runs a small part of it:\n{}.\n{}",
        code.join(", "),
        if Path::new("/sys/bus/event_source/devices/cpu").exists() {
            "What the processor counts of its misses was not read."
        } else {
            "This machine has no counters of a processor (no PMU): what a packet waits for is told by time alone."
        }
    ));
    report.say(&format!(
        "\nOf these, what is more than at {CACHED} flows, where everything is in the caches. The instructions are the same, \
         so this is\nwaiting for memory. A find reads the flow's home and, where the flow is not at home, the record that \
         `hops` names; the rest\nreads no other memory of the flow's, but waits for what was read, writes it, and has the \
         processor begin with the next\npacket's memory that much later. The kernel's hash reads its bucket and the elements \
         chained there, two lines each: three\nor four misses, one after the other.\n\
         {:>8}  {:>8}  {:>8}  {:>8}  {:>8}  {:>8}",
        "flows", "find", "rest", "touch", "floor", "lru"
    ));
    let beyond = |flows| flows > CACHED;
    for (flows, measured) in all.iter().filter(|(flows, _)| beyond(*flows)) {
        let misses = |side, than| measured.more(side, than).median - cached.more(side, than).median;
        report.say(&format!(
            "{flows:>8}  {:>8.1}  {:>8.1}  {:>8.1}  {:>8.1}  {:>8.1}",
            misses(FIND, PARSE),
            misses(TOUCH, FIND),
            misses(TOUCH, PARSE),
            misses(FLOOR, PARSE),
            misses(LRU, PARSE),
        ));
    }
    let figures: Vec<_> = all
        .iter()
        .filter(|(flows, _)| beyond(*flows))
        .map(|(flows, _)| {
            let records = Hash::new([0; 11], *flows).records();
            format!("{:.0} ns at {flows}", miss(records as u32))
        })
        .collect();
    report.say(&format!(
        "One miss alone, by a walk of userspace over as many lines as the table has records:\n{}. (Packets that \
         follow one another overlap theirs, where what\nis read of one does not say where the next begins.)",
        figures.join(", ")
    ));
}

/// Nanoseconds of a cache miss: a walk over this many lines, each of which says which is next.
fn miss(lines: u32) -> f64 {
    const LINE: usize = 64 / size_of::<u32>();
    const STEPS: u32 = size(1 << 18, 1 << 12);
    let mut order: Vec<_> = (0..lines).collect();
    Random::default().shuffle(&mut order);
    let mut memory = vec![0; lines as usize * LINE];
    for (number, line) in order.iter().enumerate() {
        memory[*line as usize * LINE] = order[(number + 1) % order.len()];
    }
    let begun = Instant::now();
    let mut line = 0;
    for _ in 0..STEPS {
        line = memory[line as usize * LINE];
    }
    black_box(line);
    begun.elapsed().as_nanos() as f64 / f64::from(STEPS)
}

fn measure(flows: u32, rounds: u32, option: &str) -> Result<Measured> {
    let clock = Clock::jiffies()?;
    // Nothing is due while this runs.
    let timeout = Duration::from_secs(3600);
    let mut config = plane::config(clock, timeout, flows.max(SMALLEST_TABLE))?;
    config.0.accounting = (option == "--accounting").into();
    config.0.offload = [OFFLOAD, OFFLOAD_DATA].contains(&option).into();
    config.0.rto.on = (option == "--rto on").into();
    let mut bench = match option {
        SEVERAL => Bench::load_several(config, clock, 0)?,
        ZONE => Bench::load_several(config, clock, 1)?,
        _ => Bench::load(config, clock)?,
    };
    let trackers = [peers::LRU, peers::SMALL, peers::RESIZABLE];
    let mut peers = Peers::trackers(&trackers, flows.max(SMALLEST_TABLE))?;
    let all = bench.age(flows, true, Some(&mut peers))?;
    if config.0.offload != 0 {
        bench.register()?;
    }
    let has_data = [DATA, OFFLOAD_DATA].contains(&option);
    let before = match has_data {
        true => Some(Segment::Reply),
        // A flow's first packet since its registration may find a time that looks like one of data.
        false if config.0.offload != 0 => Some(Segment::Ack),
        false => None,
    };
    let mut touched = 0;
    if let Some(segment) = before {
        bench.run("touch", segment, &all)?;
        touched += u64::from(flows);
    }
    let inserts = peers.inserts()?;
    let one_of = |random: &mut Random| all[random.below(all.len() as u32) as usize];
    let mut samples = plane::no_samples::<{ VARIANTS.len() }>();
    for round in progress::over(format!("{flows} flows"), 0..WARM_UP + rounds) {
        // The order changes from round to round.
        for turn in 0..VARIANTS.len() {
            let number = (turn + round as usize) % VARIANTS.len();
            let (_, program, segment) = VARIANTS[number];
            let segment = match segment {
                Segment::Ack if has_data => Segment::Data(1 + round),
                segment => segment,
            };
            let order: Vec<_> = (0..PACKETS).map(|_| one_of(&mut bench.random)).collect();
            let duration = match program {
                peers::RESIZABLE if !peers.has(program) => continue,
                program if peers.has(program) => peers.run(program, segment, &order)?,
                program => bench.run(program, segment, &order)?,
            };
            if round >= WARM_UP {
                samples[number].push(duration.as_nanos() as f64 / PACKETS as f64);
            }
        }
    }
    let packets = PACKETS as u64 * u64::from(WARM_UP + rounds);
    bench.check(Counter::Touched, touched + packets)?;
    bench.check(Counter::NoFlow, packets)?;
    ensure!(
        peers.inserts()? == inserts,
        "a tracker lost flows: the packets of these were no lookups"
    );
    let mut code = [0; VARIANTS.len()];
    for (code, (_, program, _)) in code.iter_mut().zip(VARIANTS) {
        let program = match program {
            peers::RESIZABLE if !peers.has(program) => continue,
            program if peers.has(program) => peers.program(program)?,
            program => bench.plane.xdp(&format!("bench_{program}"))?,
        };
        *code = program
            .info()
            .context("no info of a program")?
            .size_jitted();
    }
    Ok(Measured {
        at_home: bench.at_home(),
        code,
        samples,
    })
}
