//! The figures of the paper that are not nanoseconds per operation.

use twheel_timers::{End, Hashed, Ordered, Scheme, Timers};

use super::{contender::must, stopwatch, workload::Random};
use crate::size;

/// Fits a straight line to points by least squares. Returns its value at 0 and its slope.
pub fn line(points: &[(f64, f64)]) -> (f64, f64) {
    let count = points.len() as f64;
    let mean = |of: fn(&(f64, f64)) -> f64| points.iter().map(of).sum::<f64>() / count;
    let (x, y) = (mean(|point| point.0), mean(|point| point.1));
    let covariance: f64 = points
        .iter()
        .map(|point| (point.0 - x) * (point.1 - y))
        .sum();
    let variance: f64 = points.iter().map(|point| (point.0 - x).powi(2)).sum();
    let slope = covariance / variance;
    (y - slope * x, slope)
}

/// Element reads of an insertion into scheme 2, with about n timers armed: the 2 that link the
/// timer into the list, and those of the search.
pub fn insertion(end: End, draw: fn(&mut Random) -> f64) -> Vec<(f64, f64)> {
    /// The mean interval in ticks: so long that no two deadlines are equal.
    const MEAN: f64 = 1e7;
    const INSERTIONS: u32 = size(20_000, 500);
    let mut random = Random(11);
    let point = |n: f64| {
        let mut timers = Timers::new(Ordered::new(end));
        let (mut now, mut reads, mut armed) = (0.0, 0, 0.0);
        let mut insert = |random: &mut Random, timers: &mut Timers<(), Ordered>| {
            // Timers start at random times, at the rate that keeps n of them armed.
            now += random.exponential() * MEAN / n;
            while !timers.advance(now as u64, usize::MAX) {}
            while timers.pop_expired().is_some() {}
            let armed = timers.len();
            let interval = (draw(random) * MEAN) as u64;
            must(timers.insert(now as u64, interval, ()));
            armed as f64
        };
        // Until no timer is left that started while the list was still filling.
        for _ in 0..20 * n as u32 {
            insert(&mut random, &mut timers);
        }
        let before = timers.structure().reads();
        for _ in 0..INSERTIONS {
            armed += insert(&mut random, &mut timers);
        }
        reads += timers.structure().reads() - before;
        let each = |sum: f64| sum / f64::from(INSERTIONS);
        (each(armed), 2.0 + each(reads as f64))
    };
    [25.0, 50.0, 100.0, 200.0, 400.0]
        .into_iter()
        .map(point)
        .collect()
}

/// Nanoseconds of a tick of scheme 6, by the number of timers per slot, none of which is due for
/// long.
pub fn hashed_tick() -> Vec<(f64, f64)> {
    const SLOTS: u32 = 256;
    const TURNS: u64 = size(64, 4);
    let point = |load: u32| {
        let mut timers = Timers::new(must(Hashed::new(SLOTS)));
        for id in 0..load * SLOTS {
            must(timers.insert(0, (1 << 40) + u64::from(id), ()));
        }
        let mut best = f64::INFINITY;
        for round in 0..5 {
            let begin = stopwatch::start();
            let ticks = TURNS * u64::from(SLOTS);
            for tick in 1..=ticks {
                timers.advance(round * ticks + tick, usize::MAX);
            }
            best = best.min(begin.read().as_nanos() as f64 / ticks as f64);
        }
        (f64::from(load), best)
    };
    [1, 2, 4, 6, 8, 12, 16].into_iter().map(point).collect()
}

/// Nanoseconds of one memory read whose address depends on the previous read, within this many
/// bytes.
pub fn miss(bytes: usize) -> f64 {
    const LINE: usize = 64 / size_of::<u64>();
    const READS: usize = size(1 << 18, 1 << 10);
    let lines = (bytes / 64).max(2);
    let mut random = Random(13);
    // One cycle through all lines (Sattolo's algorithm).
    let mut next: Vec<usize> = (0..lines).collect();
    for at in (1..lines).rev() {
        next.swap(at, (random.unit() * at as f64) as usize);
    }
    let mut memory = vec![0u64; lines * LINE];
    for (at, next) in next.iter().enumerate() {
        memory[at * LINE] = (next * LINE) as u64;
    }
    drop(next);
    let mut at = 0;
    let mut walk = |reads: usize| {
        let begin = stopwatch::start();
        for _ in 0..reads {
            at = memory[at as usize];
        }
        begin.read().as_nanos() as f64 / reads as f64
    };
    walk(READS);
    let each = walk(READS);
    std::hint::black_box(at);
    each
}
