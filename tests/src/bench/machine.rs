//! What the figures were measured on.

use std::fs;

use twheel::clock::Clock;

/// CPU, kernel and clock, one line.
pub fn describe() -> String {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let model = cpuinfo
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "))
        .map_or("unknown CPU", |(_, model)| model);
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let clocksource = read("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    let jiffy = Clock::jiffies().map_or(0, |clock| clock.unit().as_micros());
    format!(
        "{model}, {cpus} CPUs, Linux {}, clocksource {}, jiffy {jiffy} µs",
        read("/proc/sys/kernel/osrelease").trim(),
        clocksource.trim(),
    )
}
