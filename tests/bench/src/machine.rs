//! Describes the machine that the figures were measured on.

use std::{fs, process::Command};

use twheel::clock::Clock;

/// CPU, memory, kernel, clock, and what was measured: two lines.
pub fn describe() -> String {
    let read = |path: &str| fs::read_to_string(path).unwrap_or_default();
    let cpuinfo = read("/proc/cpuinfo");
    let field = |name| {
        let mut lines = cpuinfo.lines();
        lines.find_map(|line| Some(line.strip_prefix(name)?.split_once(": ")?.1))
    };
    let model = field("model name").unwrap_or("unknown CPU");
    let is_virtual = field("flags").is_some_and(|it| it.split(' ').any(|it| it == "hypervisor"));
    let cpus = std::thread::available_parallelism().map_or(0, usize::from);
    let meminfo = read("/proc/meminfo");
    let total = meminfo.split_whitespace().nth(1);
    let total = total.and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0);
    let clocksource = read("/sys/devices/system/clocksource/clocksource0/current_clocksource");
    let jiffy = Clock::jiffies().map_or(0, |clock| clock.unit().as_micros());
    format!(
        "{model}, {cpus} CPUs{}, {}, {:.1} GiB of memory,\nLinux {}, clocksource {}, jiffy {jiffy} µs; twheel {}",
        if is_virtual {
            " of a virtual machine"
        } else {
            ""
        },
        caches(),
        total as f64 / f64::from(1 << 20),
        read("/proc/sys/kernel/osrelease").trim(),
        clocksource.trim(),
        commit(),
    )
}

/// The caches of the first CPU that hold data.
fn caches() -> String {
    let cache = |number: u32| {
        let read = |name| {
            let path = format!("/sys/devices/system/cpu/cpu0/cache/index{number}/{name}");
            fs::read_to_string(path).map(|text| text.trim().to_owned())
        };
        let [level, kind, size, shared] =
            ["level", "type", "size", "shared_cpu_list"].map(|name| read(name).ok());
        let shared = if shared? == "0" { "" } else { " shared" };
        Some((kind? != "Instruction").then_some(format!("L{} {}{shared}", level?, size?)))
    };
    let caches: Vec<_> = (0..).map_while(cache).flatten().collect();
    caches.join(", ")
}

/// The commit that this was built from; changes to documents do not count.
fn commit() -> String {
    let git = |arguments: &[&str]| {
        let tree = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
        let out = Command::new("git")
            .arg("-C")
            .arg(tree)
            .args(arguments)
            .output();
        let out = out.ok().filter(|out| out.status.success())?;
        Some(String::from_utf8_lossy(&out.stdout).trim().to_owned())
    };
    let Some(commit) = git(&["rev-parse", "--short", "HEAD"]) else {
        return env!("CARGO_PKG_VERSION").to_owned();
    };
    match git(&["status", "--porcelain", "--", ":/", ":!/docs", ":!/*.md"]) {
        Some(changes) if changes.is_empty() => commit,
        _ => format!("{commit}, changed"),
    }
}
