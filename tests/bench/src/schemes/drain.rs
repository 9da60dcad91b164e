//! The longest call of the per-tick bookkeeping while very many timers are due at once.

use twheel_timers::{Hashed, Hierarchical, Scheme, Simple, Timers};

use super::{
    contender::{SLOTS, must},
    stopwatch,
    workload::Workload,
};

/// How many timers a call may look at.
pub const BUDGETS: [usize; 4] = [100, 1_000, 10_000, usize::MAX];

/// The schemes that are measured.
pub const SCHEMES: [&str; 3] = ["4 simple", "6 hashed", "7 hierarchical"];

fn make(name: &str) -> Box<dyn Scheme<u64>> {
    match name {
        "4 simple" => Box::new(Timers::new(must(Simple::new(SLOTS)))),
        "6 hashed" => Box::new(Timers::new(must(Hashed::new(SLOTS)))),
        _ => Box::new(Timers::new(must(Hierarchical::new(3, 1024)))),
    }
}

/// The longest call in microseconds, which includes handing out what it has found. The median of
/// three drains, because a single interrupt can lengthen a call.
pub fn longest(name: &str, workload: &Workload, budget: usize) -> f64 {
    let drain = |_| {
        let mut timers = make(name);
        for (id, interval) in (0..).zip(&workload.first) {
            must(timers.insert(0, (*interval).into(), id));
        }
        let mut longest = 0.0f64;
        loop {
            let begin = stopwatch::start();
            let done = timers.advance(1 << 17, budget);
            while timers.pop_expired().is_some() {}
            longest = longest.max(begin.read().as_nanos() as f64 / 1e3);
            if done {
                assert!(timers.is_empty(), "{name}: not all have fired");
                return longest;
            }
        }
    };
    let mut drains: Vec<f64> = (0..3).map(drain).collect();
    drains.sort_by(f64::total_cmp);
    drains[1]
}
