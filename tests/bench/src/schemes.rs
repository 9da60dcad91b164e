//! Nanoseconds and bytes of the schemes of `twheel-timers`, and the tables of the paper.
//!
//! Varghese & Lauck, *Hashed and Hierarchical Timing Wheels*.

mod alloc;
mod contender;
mod document;
mod drain;
mod linux;
mod objects;
mod paper;
mod plot;
mod stopwatch;
mod workload;

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use clap::Args;
use twheel::progress;

use self::{
    contender::Contender,
    workload::{Intervals, Workload},
};
use crate::{
    machine,
    report::{Figure, Report},
    size,
};

/// What is measured, and where to.
#[derive(Args)]
pub struct Options {
    /// Rounds; each measures every scheme once, in turn
    #[arg(long, default_value_t = size(3, 1), value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rounds: u32,
    /// Numbers of timers
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u32).range(1..=16_000_000),
        default_values_t = SIZES)]
    sizes: Vec<u32>,
    /// How long timers run
    #[arg(long, value_enum, value_delimiter = ',', default_values_t = Intervals::ALL)]
    intervals: Vec<Intervals>,
    /// Schemes whose names contain one of these
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
}

const SIZES: [u32; 7] = size(
    [1_000, 3_162, 10_000, 31_623, 100_000, 316_228, 1_000_000],
    [100, 178, 316, 562, 1_000, 1_778, 3_162],
);

impl Options {
    /// Whether this measures everything.
    fn is_all(&self) -> bool {
        self.only.is_empty() && self.sizes == SIZES && self.intervals == Intervals::ALL
    }
}

/// An operation that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Operation {
    Fill,
    Start,
    Stop,
    Rearm,
    Tick,
    Expiry,
    ExpiryRearmed,
}

impl Operation {
    const ALL: [Self; 7] = [
        Self::Fill,
        Self::Start,
        Self::Stop,
        Self::Rearm,
        Self::Tick,
        Self::Expiry,
        Self::ExpiryRearmed,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Fill => "fill",
            Self::Start => "start",
            Self::Stop => "stop",
            Self::Rearm => "re-arm",
            Self::Tick => "empty tick",
            Self::Expiry => "expiry",
            Self::ExpiryRearmed => "expiry after re-arm",
        }
    }

    /// How many times what the wheels take a peer must take at least, with the most timers.
    fn target(self, peer: &str) -> Option<f64> {
        match (peer, self) {
            (_, Self::Fill | Self::ExpiryRearmed) => None,
            // Never behind it.
            (contender::QUAD, _) => Some(1.0),
            (_, Self::Tick) => None,
            // The wheels take at most one and a half times what it takes.
            (contender::LINUX, _) => Some(1.0 / 1.5),
            (_, Self::Start | Self::Stop | Self::Rearm) => Some(3.0),
            (_, Self::Expiry) => Some(2.0),
        }
    }
}

/// Identifies a figure: intervals, index in [`contender::ALL`], operation, number of timers.
type Key = (&'static str, usize, Operation, u32);

/// All results.
#[derive(Default)]
struct Results {
    sizes: Vec<u32>,
    samples: BTreeMap<Key, Vec<f64>>,
    /// Bytes per timer, by contender and number of timers.
    bytes: BTreeMap<(usize, u32), f64>,
    /// The same after some re-arms.
    rearmed: BTreeMap<(usize, u32), f64>,
    /// Microseconds of the longest call while all timers drain, by index in [`drain::SCHEMES`] and
    /// in [`drain::BUDGETS`].
    drains: Vec<[f64; drain::BUDGETS.len()]>,
    /// Nanoseconds of a memory read, by bytes.
    misses: Vec<(f64, f64)>,
}

impl Results {
    fn figure(
        &self,
        intervals: Intervals,
        contender: usize,
        operation: Operation,
        n: u32,
    ) -> Option<Figure> {
        let samples = self.samples(intervals, contender, operation, n)?;
        Some(Figure::from_samples(samples))
    }

    /// By round.
    fn samples(
        &self,
        intervals: Intervals,
        contender: usize,
        operation: Operation,
        n: u32,
    ) -> Option<&[f64]> {
        let key = (intervals.name(), contender, operation, n);
        self.samples.get(&key).map(Vec::as_slice)
    }

    /// Medians by number of timers.
    fn curve(
        &self,
        intervals: Intervals,
        contender: usize,
        operation: Operation,
    ) -> Vec<(f64, f64)> {
        let point = |n: &u32| {
            let figure = self.figure(intervals, contender, operation, *n)?;
            Some((f64::from(*n), figure.median))
        };
        self.sizes.iter().filter_map(point).collect()
    }
}

/// Number of steps in which all timers expire.
const STEPS: u32 = 64;
/// Number of parts in which timers are stopped and started again.
const PARTS: usize = 10;
/// Empty ticks per round.
const TICKS: u32 = size(4096, 256);

/// Measures all schemes with all sizes.
pub fn bench(options: &Options, report: &mut Report) -> Result<()> {
    let mut results = Results {
        sizes: options.sizes.clone(),
        ..Results::default()
    };
    results.sizes.sort_unstable();
    results.sizes.dedup();
    let how = how(options.rounds);
    report.say("Measuring; this usually takes two minutes.");
    for name in &options.only {
        let known = contender::ALL.iter().any(|it| it.name.contains(name));
        ensure!(known, "--only {name}: no scheme has that in its name");
    }
    let wanted = |contender: &usize, n: u32| {
        let contender::Entry { name, most, .. } = contender::ALL[*contender];
        let named = options.only.is_empty() || options.only.iter().any(|it| name.contains(it));
        named && n as usize <= most
    };
    for round in progress::over("rounds", 0..options.rounds + 1) {
        for n in results.sizes.clone() {
            for &intervals in &options.intervals {
                let workload = Workload::new(n as usize, intervals);
                // The first round warms up; it need not be long.
                if round == 0 && n > 100_000 {
                    continue;
                }
                for contender in (0..contender::ALL.len()).filter(|it| wanted(it, n)) {
                    measure(&mut results, round > 0, contender, intervals, &workload)?;
                }
            }
        }
    }
    for n in results.sizes.clone() {
        let workload = Workload::new(n as usize, Intervals::Uniform);
        for contender in (0..contender::ALL.len()).filter(|it| wanted(it, n)) {
            let bytes = rearmed(contender, &workload);
            results.rearmed.insert((contender, n), bytes);
        }
    }
    if let Some(n) = results.sizes.last() {
        let workload = Workload::new(*n as usize, Intervals::Uniform);
        let longest = |name| drain::BUDGETS.map(|budget| drain::longest(name, &workload, budget));
        results.drains = drain::SCHEMES.into_iter().map(longest).collect();
    }
    results.misses = (12..=size(27, 16))
        .map(|log| (f64::from(1 << log), paper::miss(1 << log)))
        .collect();
    emit(&results, report);
    let text = document::write(&machine::describe(), &how, &results);
    report.say(&text);
    // Only a complete measurement makes a page.
    match report.out().filter(|_| options.is_all()) {
        Some(out) => {
            plot::all(&out, &results)?;
            report.page(&text)
        }
        None => Ok(()),
    }
}

fn how(rounds: u32) -> String {
    format!(
        "Nanoseconds each: medians of {rounds} rounds in one run. A round measures all schemes at all numbers of \
         timers, in turn.\nTime is what one \
         thread has had of its CPU: others do not count, but for what they do to the caches. The clock is an argument, or tokio's, paused. The wheels of one level \
         have {} slots, scheme 7 has 3 levels of\n1024, the growing ones levels of 256; scheme 2 searches from \
         the rear. Ids are `u64`.\n\n\
         - fill: n timers into an empty structure that has no space reserved. How much of that is page faults depends on \
         what the\nallocator has at hand, so compare it with care.\n\
         - start: with n armed, a tenth of them is stopped at random, and as many are started: that is timed.\n\
         - re-arm: each timer, in random order, to a new random interval from now, earlier or later.\n\
         - expiry: all timers, as they were started, in {STEPS} jumps of the clock. After re-arm: all, when each \
         has been\nre-armed in random order: a re-arm to a later tick of schemes 4, 6 and 7 is one store, and the timer is met \
         once more than\nit would be, which is paid here. With few timers, much of either is reading our \
         own clock.\n\
         - empty tick: one of {TICKS} ticks while n timers are armed that are due much later. (Of scheme 1 one of {few}: \
         there it is O(n).)\n\
         - stop: each timer, in random order.\n\n\
         Intervals are uniform in 1 to 65,535 ticks, or exponential of mean 16,384 and cut at 65,535. Handles \
         are kept in a vector\nby the driver, in all but three: hierarchical_hash_wheel_timer has ids alone, \
         and its re-arm is a cancel and an insert;\nthe timers of 7 intrusive are parts of the driver's objects \
         (24 bytes each, in one vector), and a handle is a place there;\nthose of the imitation of Linux's timer.c are \
         the driver's own, each an allocation, and a handle is an address.\nThe imitation is written for this bench \
         from the description of kernel/time/timer.c: 9 levels of 64 slots,\n\
         each of which spans 8 slots of the level below, and lists through the timers. Its timers never move \
         down;\nthey expire late by up to an eighth of their interval, and none of the others do.\nSchemes 1 and 2 are measured up to 10,000 timers: beyond \
         that, a tick of the one and a start of the other take too long.\n",
        contender::SLOTS,
        few = TICKS / 64
    )
}

/// One round of one contender.
fn measure(
    results: &mut Results,
    counts: bool,
    contender: usize,
    intervals: Intervals,
    workload: &Workload,
) -> Result<()> {
    let n = workload.first.len();
    let entry = &contender::ALL[contender];
    // A list whose timers are all counted down needs time proportional to n in each tick.
    let ticks = if entry.name.starts_with('1') {
        TICKS / 64
    } else {
        TICKS
    };
    let repeats = (size(20_000, 0) / n).clamp(1, 10);
    let mut totals = [0.0; Operation::ALL.len()];
    for _ in 0..repeats {
        let mut timed = |operation: Operation, work: &mut dyn FnMut()| {
            let begin = stopwatch::start();
            work();
            totals[operation as usize] += begin.read().as_nanos() as f64;
        };
        let before = alloc::live();
        let mut timers = (entry.make)(n);
        timed(Operation::Fill, &mut || timers.start(&workload.first));
        let bytes = each(before, &*timers, n);
        results.bytes.insert((contender, n as u32), bytes);
        for chunk in (0..n).step_by(n.div_ceil(PARTS)) {
            let part = chunk..(chunk + n.div_ceil(PARTS)).min(n);
            let order = &workload.order[part.clone()];
            timers.stop(order);
            timed(Operation::Start, &mut || {
                timers.start_again(order, &workload.first[part.clone()])
            });
        }
        timed(Operation::Rearm, &mut || {
            timers.rearm(&workload.order, &workload.again)
        });
        let mut expire = |timers: &mut dyn Contender, operation| {
            let mut fired = 0;
            for _ in 0..STEPS {
                timers.pass(workload::LONGEST.div_ceil(STEPS));
                timed(operation, &mut || fired += timers.expire());
            }
            if timers.slack() > 0 {
                timers.pass(timers.slack());
                timed(operation, &mut || fired += timers.expire());
            }
            ensure!(
                fired == n,
                "{}: {fired} of {n} timers have fired",
                entry.name
            );
            Ok(())
        };
        expire(&mut *timers, Operation::ExpiryRearmed)?;
        let mut timers = (entry.make)(n);
        timers.start(&workload.first);
        expire(&mut *timers, Operation::Expiry)?;
        timers.start(&workload.far);
        let (fired, took) = timers.tick(ticks);
        ensure!(fired == 0, "{}: {fired} timers were early", entry.name);
        timed(Operation::Stop, &mut || timers.stop(&workload.order));
        totals[Operation::Tick as usize] += took.as_nanos() as f64;
    }
    for operation in Operation::ALL {
        let count = match operation {
            Operation::Tick => ticks as usize,
            _ => n,
        };
        let each = totals[operation as usize] / (count * repeats) as f64;
        if counts {
            let key = (intervals.name(), contender, operation, n as u32);
            results.samples.entry(key).or_default().push(each);
        }
    }
    Ok(())
}

/// Bytes per timer, without the driver's handles, of a structure that was made when this many bytes
/// were allocated.
fn each(before: usize, timers: &dyn Contender, n: usize) -> f64 {
    // Keeps it alive until here.
    std::hint::black_box(timers);
    alloc::live().saturating_sub(before + timers.handles()) as f64 / n as f64
}

/// Bytes per timer after 4 re-arms of each while time passes.
fn rearmed(contender: usize, workload: &Workload) -> f64 {
    let n = workload.first.len();
    let before = alloc::live();
    let mut timers = (contender::ALL[contender].make)(n);
    timers.start(&workload.first);
    for _ in 0..4 {
        timers.pass(100);
        timers.rearm(&workload.order, &workload.far);
        timers.expire();
    }
    each(before, &*timers, n)
}

fn emit(results: &Results, report: &mut Report) {
    for (&(intervals, contender, operation, n), samples) in &results.samples {
        let name = contender::ALL[contender].name;
        let variant = format!("{name}/{}/{intervals}", operation.name());
        report.nanoseconds(
            "schemes",
            &variant,
            n.into(),
            &Figure::from_samples(samples),
        );
    }
    for (what, bytes) in [("started", &results.bytes), ("re-armed", &results.rearmed)] {
        for (&(contender, n), each) in bytes {
            let variant = format!("{}/{what}", contender::ALL[contender].name);
            report.bytes("schemes", &variant, n.into(), (each * f64::from(n)) as u64);
        }
    }
}
