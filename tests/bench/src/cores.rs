//! Two CPUs that touch flows at the same time.

use std::{
    sync::Barrier,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use aya::programs::Xdp;
use twheel::{clock::Clock, progress, stepper::pin_to};
use twheel_common::counter::Counter;
use twheel_tests::order::{Order, PACKETS};

use crate::{
    inputs::{Segment, hash_entries},
    peers::Peers,
    plane::{self, Bench},
    plot,
    report::{Figure, Report, verdict},
    size,
};

/// Flows per CPU.
const SIZES: [u32; 4] = [1, 1 << 10, size(1 << 17, 1 << 11), size(1 << 20, 1 << 12)];
/// As in `touch`.
const SMALLEST_TABLE: u32 = 1 << 16;
/// Maximum cost of a packet on flows that both CPUs touch, relative to flows that only one CPU
/// touches.
const BOUND: f64 = 1.8;
/// Runs per CPU and round, one after the other.
const RUNS: usize = size(8, 32);
/// How many of these must overlap with the other CPU's runs completely, at least.
const TOGETHER: usize = size(RUNS / 4, 1);

/// Which CPU touches which flows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Case {
    /// One CPU runs while the other sleeps.
    Alone,
    /// Each CPU has its own flows.
    Disjoint,
    /// Both CPUs have the same flows, each in its own order.
    Same,
}

const CASES: [Case; 3] = [Case::Alone, Case::Disjoint, Case::Same];
const ALONE: usize = 0;
const DISJOINT: usize = 1;
const SAME: usize = 2;

/// Measures touch and the LRU hash.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "Nanoseconds a packet on each of two CPUs that touch flows at the same time: median (least–most) of {rounds} rounds. \
         Disjoint:\neach CPU has so many flows of its own; same: both have the same flows, each in a random order of its \
         own; alone: one\nCPU runs and the other does not. In a round each CPU has {RUNS} runs of {PACKETS} packets, after a \
         common start; a run counts\nwhere the other CPU's runs had begun before it and ended after it. Time is the kernel's \
         `duration`; of both CPUs it is that of the sum of their packets a second. The tables are freshly\nfilled, with all flows of both CPUs. Where these are more than the caches hold, the same flows are half as many lines as \
         disjoint\nones, which shows where CPUs share a cache. `lru` is the usual tracker, an LRU hash. {}\n\
         Ratios: the median of those of each round (least–most). The bound is that of the packets of two CPUs a second: on the same flows at least 1/{BOUND} of those on disjoint \
         ones.\n",
        siblings()
    ));
    let heading = |report: &mut Report, name| {
        report.say(&format!(
            "{:>8}  {:>20}  {:>20}  {:>20}  {:<30}  same/alone",
            name, "alone", "disjoint", "same", "same/disjoint"
        ));
    };
    let (mut all, mut points) = (Vec::new(), Vec::new());
    for flows in SIZES {
        all.push((flows, measure(flows, rounds)?));
    }
    for (variant, name) in ["touch", "lru"].into_iter().enumerate() {
        heading(report, name);
        for (flows, samples) in &all {
            let samples = &samples[variant];
            let ratio = |side, other| plane::ratio(samples, side, other);
            let bound = (variant == 0).then_some(BOUND);
            let figures = [ALONE, DISJOINT, SAME].map(|case| Figure::from_samples(&samples[case]));
            report.say(&format!(
                "{flows:>8}  {}  {:<30}  {}",
                Figure::row(&figures),
                verdict(&ratio(SAME, DISJOINT), bound),
                verdict(&ratio(SAME, ALONE), None)
            ));
            for (figure, case) in figures.iter().zip(["alone", "disjoint", "same"]) {
                let variant = format!("{name}_{case}");
                report.nanoseconds("cores", &variant, (*flows).into(), figure);
                points.push((
                    variant.replace('_', ", "),
                    (f64::from(*flows), figure.median),
                ));
            }
        }
        report.say("");
    }
    report.say(
        "The clock is jiffies: of all packets of a flow in a jiffy one stores the time, the others only read, so both CPUs \
         keep\nthe line. Counters are each CPU's own. The LRU hash is stored to by every packet.",
    );
    report.plot(
        "flows",
        "A packet on each of two CPUs at once",
        ["flows of a CPU", "nanoseconds"],
        &plot::curves(points),
    )
}

/// Whether both CPUs are threads of one core, which then share more than memory.
fn siblings() -> String {
    let path = "/sys/devices/system/cpu/cpu0/topology/thread_siblings_list";
    match std::fs::read_to_string(path) {
        Ok(list) if list.trim() == "0" => "By the kernel the CPUs are two cores.".to_owned(),
        Ok(list) => format!(
            "By the kernel CPU 0 is of a core with the threads {}.",
            list.trim()
        ),
        Err(_) => String::new(),
    }
}

/// Samples of touch and of the LRU hash, for each of the three cases.
fn measure(flows: u32, rounds: u32) -> Result<[[Vec<f64>; CASES.len()]; 2]> {
    let clock = Clock::jiffies()?;
    // Nothing is due while this runs.
    let timeout = Duration::from_secs(3600);
    let entries = (2 * flows).max(SMALLEST_TABLE);
    let mut bench = Bench::load(plane::config(clock, timeout, entries)?, clock)?;
    let mut lru = Peers::load(&["peer_lru"], &[("LRU", hash_entries(entries))])?;
    let all = bench.fresh(2 * flows as usize);
    bench.run("touch", Segment::Ack, &all)?;
    for flows in all.chunks(PACKETS) {
        lru.run("peer_lru", Segment::Ack, flows)?;
    }
    let (created, inserts) = (counted(&bench, Counter::Created)?, lru.inserts()?);
    let halves = [&all[..flows as usize], &all[flows as usize..]];
    let two = |order| anyhow::Ok([Order::open(order)?, Order::open(order)?]);
    let mut orders = two(bench.plane.map("ORDER")?)?;
    let mut lru_orders = two(lru.map("ORDER")?)?;
    let mut samples = [plane::no_samples(), plane::no_samples()];
    for round in progress::over(format!("{flows} flows"), 0..rounds + 1) {
        for turn in 0..2 * CASES.len() {
            let number = (turn + round as usize) % (2 * CASES.len());
            let (variant, case) = (number % 2, number / 2);
            let mut work = |half: &[u32]| -> Vec<Vec<u32>> {
                let mut one = || half[bench.random.below(half.len() as u32) as usize];
                let mut run = || (0..PACKETS).map(|_| one()).collect();
                (0..RUNS).map(|_| run()).collect()
            };
            let second = match CASES[case] {
                // Each CPU runs alone in turn.
                Case::Alone => Vec::new(),
                Case::Disjoint => work(halves[1]),
                Case::Same => work(halves[0]),
            };
            let mut work = [work(halves[0]), second];
            if round.is_multiple_of(2) {
                work.reverse();
            }
            let sample = if variant == 0 {
                together(bench.plane.xdp("bench_touch")?, &mut orders, &work)?
            } else {
                together(lru.program("peer_lru")?, &mut lru_orders, &work)?
            };
            // The first round warms up.
            if round > 0 {
                samples[variant][case].push(sample);
            }
        }
    }
    ensure!(
        counted(&bench, Counter::Created)? == created && lru.inserts()? == inserts,
        "packets began flows: they were not those of flows in the table"
    );
    let packets = u64::from(rounds + 1) * (5 * RUNS * PACKETS) as u64;
    bench.check(Counter::Touched, packets)?;
    Ok(samples)
}

fn counted(bench: &Bench, counter: Counter) -> Result<u64> {
    Ok(bench.plane.counters()?.get(counter))
}

/// Runs both CPUs at the same time. Returns nanoseconds per packet, from those runs of each CPU
/// that lie within the other's.
fn together(program: &Xdp, orders: &mut [Order; 2], work: &[Vec<Vec<u32>>; 2]) -> Result<f64> {
    let busy = work.iter().filter(|runs| !runs.is_empty()).count();
    let start = Barrier::new(busy);
    let ran = thread::scope(|scope| {
        let threads: Vec<_> = orders
            .iter_mut()
            .zip(work)
            .zip(0..)
            .filter(|((_, runs), _)| !runs.is_empty())
            .map(|((order, runs), cpu)| {
                let start = &start;
                scope.spawn(move || {
                    pin_to(cpu)?;
                    start.wait();
                    let run = |flows: &Vec<u32>| {
                        let begun = Instant::now();
                        let took = order.run(program, cpu, &Segment::Ack.bytes(), flows)?;
                        Ok((begun, Instant::now(), took))
                    };
                    runs.iter().map(run).collect::<Result<Vec<_>>>()
                })
            })
            .collect();
        threads
            .into_iter()
            .map(|thread| thread.join().expect("a thread of the bench panicked"))
            .collect::<Result<Vec<_>>>()
    })?;
    let mut took = Vec::new();
    for (number, runs) in ran.iter().enumerate() {
        let other = &ran[(number + 1) % ran.len()];
        let (Some(first), Some(last)) = (other.first(), other.last()) else {
            continue;
        };
        let within = runs
            .iter()
            .filter(|(begun, ended, _)| first.0 <= *begun && *ended <= last.1);
        let of_this: Vec<_> = within
            .map(|(.., took)| took.as_nanos() as f64 / PACKETS as f64)
            .collect();
        ensure!(
            of_this.len() >= TOGETHER,
            "the CPUs did not run at the same time"
        );
        // Packets per second of one CPU.
        took.push(Figure::from_samples(&of_this).median.recip());
    }
    // The combined rate of both, as nanoseconds per packet of one CPU.
    Ok(took.len() as f64 / took.iter().sum::<f64>())
}
