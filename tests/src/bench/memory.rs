//! Bytes a flow, and the time that a large table takes to load.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use twheel::{clock::Clock, data_plane::RING_BYTES, progress};

use crate::{
    plane,
    report::{Figure, Report, verdict},
};

/// Capacity at which bytes are counted.
const FLOWS: u32 = 1 << 20;
/// What a flow may take, everything included.
const BOUND: f64 = 200.0;
/// Capacity at which loading is timed.
const MANY: u32 = 10_000_000;
/// Seconds that it may take.
const LOAD_BOUND: f64 = 4.0;
const LOADS: usize = 3;

/// `memlock` of all maps, and the time of a load.
pub fn bench(report: &mut Report) -> Result<()> {
    let clock = Clock::jiffies()?;
    let object = plane::object("TWHEEL_BPF_OBJECT")?;
    let config = |flows| plane::config(clock, Duration::from_secs(60), flows);
    let plane = plane::load(&object, config(FLOWS)?, clock)?;
    let mut maps: Vec<_> = plane.memory()?.into_iter().collect();
    drop(plane);
    maps.sort_by(|(a, x), (b, y)| y.cmp(x).then(a.cmp(b)));
    report.say(&format!(
        "Bytes that the kernel charges (`memlock` of each map's fdinfo), capacity {FLOWS} flows, ring of \
         {} KiB: as\n`twheel run` makes them. Tables are allocated whole at load: it does not matter how \
         many flows are in them.\n",
        RING_BYTES >> 10
    ));
    let mut total = 0;
    for (map, bytes) in &maps {
        total += bytes;
        report.bytes("memory", map, u64::from(FLOWS), *bytes);
        report.say(&format!("{map:>13}  {bytes:>12}"));
    }
    report.bytes("memory", "total", u64::from(FLOWS), total);
    let each = total as f64 / f64::from(FLOWS);
    report.say(&format!(
        "{:>13}  {total:>12}\n{:>13}  {:>12}",
        "total",
        "a flow",
        verdict(each, Some(BOUND))
    ));
    let mut seconds = Vec::new();
    for load in progress::over("loading", 0..LOADS + 1) {
        let begun = Instant::now();
        let plane = plane::load(&object, config(MANY)?, clock)?;
        // A virtual machine may give its free memory back to its host, which it is then long in getting
        // again: that is not what is measured.
        if load > 0 {
            seconds.push(begun.elapsed().as_secs_f64());
        }
        drop(plane);
        // The kernel frees maps in the background, and the next load is to have the same memory; but
        // within two seconds of that it goes back.
        thread::sleep(Duration::from_millis(300));
    }
    let figure = Figure::of(&seconds);
    let nanoseconds: Vec<_> = seconds.iter().map(|seconds| seconds * 1e9).collect();
    report.nanoseconds("memory", "load", u64::from(MANY), &Figure::of(&nanoseconds));
    report.say(&format!(
        "\nSeconds to load with a capacity of {MANY} flows: {}, median of {LOADS} loads ({:.2}–{:.2}) after one that\n\
         does not count (a virtual machine may wait in it for its host to give it memory).\n\
         Timed: making and pinning all maps (the kernel clears their memory), the verification of all \
         programs.\nNot timed: reading the file, stepping, attaching.",
        verdict(figure.median, Some(LOAD_BOUND)),
        figure.min,
        figure.max,
    ));
    Ok(())
}
