//! Bytes a flow.

use std::time::Duration;

use anyhow::Result;
use twheel::clock::Clock;

use crate::{plane, report::Report};

/// Capacity at which it is measured.
const FLOWS: u32 = 1 << 20;
/// What a flow may take, everything included.
const BOUND: f64 = 320.0;

/// `memlock` of all maps.
pub fn bench(report: &mut Report) -> Result<()> {
    let clock = Clock::jiffies()?;
    let config = plane::config(clock, Duration::from_secs(60), None, FLOWS)?;
    let plane = plane::load(&plane::object("TWHEEL_BPF_OBJECT")?, config, clock)?;
    let mut maps: Vec<_> = plane.memory()?.into_iter().collect();
    maps.sort_by(|(a, x), (b, y)| y.cmp(x).then(a.cmp(b)));
    report.say(&format!(
        "Bytes that the kernel charges (`memlock` of each map's fdinfo), capacity {FLOWS} flows, ring of \
         16 MiB.\nTables are allocated whole at load: it does not matter how many flows are in them.\n"
    ));
    let mut total = 0;
    for (map, bytes) in &maps {
        total += bytes;
        report.bytes("memory", map, u64::from(FLOWS), *bytes);
        report.say(&format!("{map:>10}  {bytes:>12}"));
    }
    report.bytes("memory", "total", u64::from(FLOWS), total);
    let each = total as f64 / f64::from(FLOWS);
    let verdict = if each <= BOUND { "within" } else { "ABOVE" };
    report.say(&format!(
        "{:>10}  {total:>12}  {each:.1} a flow ({verdict} {BOUND})",
        "total"
    ));
    Ok(())
}
