//! Bytes per flow, and how long a large table takes to load.

use std::{
    thread,
    time::{Duration, Instant},
};

use anyhow::Result;
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Load, RING_BYTES, memlock},
    progress,
};

use crate::{
    inputs::{self, hash_entries},
    peers::Peers,
    plane, plot,
    report::{Figure, Report, verdict},
    size,
};

/// Capacity at which bytes per flow are measured.
const FLOWS: u32 = size(1 << 20, 1 << 15);
/// Capacities at which they are compared.
const SIZES: [u32; 4] = [1 << 14, 1 << 17, FLOWS, MANY];
/// Maximum number of bytes per flow, everything included.
const BOUND: f64 = 160.0;
/// Capacity at which loading is timed.
const MANY: u32 = size(10_000_000, 1 << 18);
/// Maximum loading time in seconds.
const LOAD_BOUND: f64 = 4.0;
const LOADS: usize = size(3, 1);

/// Measures `memlock` of all maps, and the time of a load.
pub fn bench(report: &mut Report) -> Result<()> {
    let clock = Clock::jiffies()?;
    let object = inputs::object("TWHEEL_BPF_OBJECT")?;
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
        verdict(&Figure::from_samples(&[each]), Some(BOUND))
    ));
    compare(&object, clock, report)?;
    let (mut first, mut seconds) = (0.0, Vec::new());
    for load in progress::over("loading", 0..LOADS + 1) {
        let begun = Instant::now();
        let plane = plane::load(&object, config(MANY)?, clock)?;
        // A virtual machine may give free memory back to its host and then takes long to get it
        // again, so the first load is reported separately.
        match load {
            0 => first = begun.elapsed().as_secs_f64(),
            _ => seconds.push(begun.elapsed().as_secs_f64()),
        }
        drop(plane);
        // The kernel frees maps in the background, and the next load should get the same memory.
        // But within two seconds, the memory goes back to the host.
        thread::sleep(Duration::from_millis(300));
    }
    let figure = Figure::from_samples(&seconds);
    let nanoseconds: Vec<_> = seconds.iter().map(|seconds| seconds * 1e9).collect();
    report.nanoseconds(
        "memory",
        "load",
        u64::from(MANY),
        &Figure::from_samples(&nanoseconds),
    );
    report.say(&format!(
        "\nSeconds to load with a capacity of {MANY} flows: {}, median (least–most) of {LOADS} loads after one\n\
         of {first:.3}, in which a virtual machine may wait for its host to give it memory.\n\
         Timed: making and pinning all maps (the kernel clears their memory), the verification of all \
         programs.\nNot timed: reading the file, stepping, attaching.",
        verdict(&figure, Some(LOAD_BOUND)),
    ));
    Ok(())
}

/// Compares with kernel hash maps.
fn compare(object: &[u8], clock: Clock, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "\nBytes a flow, everything included, beside one map of the kernel's: keys of 40 bytes as ours, a value of 40. hash: a \
         lookup's\nfloor, which needs a timer beside it; lru: the usual tracker. Made for as many flows; and for a quarter more, as the \
         other\nbenches have them, with which a full LRU hash pushes out nobody who is alive.\n\n\
         {:>8}  {:>8}  {:>8}  {:>8}  {:>12}  {:>12}  twheel/hash  twheel/lru  twheel/lru, more",
        "flows", "twheel", "hash", "lru", "hash, more", "lru, more"
    ));
    let bench = inputs::object("TWHEEL_BENCH_OBJECT")?;
    let config = |flows| plane::config(clock, Duration::from_secs(60), flows);
    let small = config(SIZES[0])?;
    let mut points = Vec::new();
    for flows in SIZES {
        let ours: u64 = plane::load(object, config(flows)?, clock)?
            .memory()?
            .values()
            .sum();
        let mut bytes = vec![("twheel".to_owned(), ours)];
        for (entries, suffix) in [(flows, ""), (hash_entries(flows), ", a quarter more")] {
            let hash = Load {
                others: vec![("FLOOR", entries)],
                ..Load::new(&bench, small, clock)
            };
            let hash = DataPlane::load_unpinned(&hash)?.memory()?["FLOOR"];
            let lru = Peers::load(&[], &[("LRU", entries)])?;
            bytes.push((format!("hash{suffix}"), hash));
            bytes.push((format!("lru{suffix}"), memlock(lru.map("LRU")?)?));
        }
        let each: Vec<_> = bytes
            .iter()
            .map(|(_, bytes)| *bytes as f64 / f64::from(flows))
            .collect();
        report.say(&format!(
            "{flows:>8}  {:>8.1}  {:>8.1}  {:>8.1}  {:>12.1}  {:>12.1}  {:>11.2}  {:>10.2}  {:>16.2}",
            each[0],
            each[1],
            each[2],
            each[3],
            each[4],
            each[0] / each[1],
            each[0] / each[2],
            each[0] / each[4]
        ));
        for ((name, bytes), each) in bytes.into_iter().zip(each) {
            report.bytes("memory", &name, flows.into(), bytes);
            points.push((name, (f64::from(flows), each)));
        }
    }
    report.plot(
        "flows",
        "Memory of a table",
        ["flows that it is made for", "bytes a flow"],
        &plot::curves(points),
    )
}
