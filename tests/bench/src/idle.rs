//! The cost of a running twheel that has nothing to do, and what remains of flows that have ended.

use std::{
    collections::BTreeMap,
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use twheel::progress;
use twheel_common::counter::Counter;
use twheel_tests::{netns::PATIENCE, running::Twheel};

use crate::{
    real::{self, History, Lab, WATCHED},
    report::Report,
    size,
};

/// How long to wait, after the start or after a flow, before measuring.
const SETTLED: Duration = Duration::from_secs(size(3, 1));
/// Flows that begin at once.
const BATCH: u32 = size(10_000, 1_000);
/// The most flows in the table: further flows wait.
const LIVE: u64 = size(400_000, 20_000);
/// Memory is read each time this many flows have ended.
pub const ROUND: u32 = size(1_000_000, 10_000);
/// After this many addresses the flows repeat; the first ones have all expired by then.
const ADDRESSES: u32 = 10_000_000;

/// Resources that a process holds.
#[derive(Clone, Copy, Debug)]
struct Held {
    resident: u64,
    anonymous: u64,
    peak: u64,
    maps: u64,
    descriptors: usize,
    threads: usize,
}

impl Held {
    fn by(pid: u32) -> Result<Self> {
        let [descriptors, threads] = real::handles(pid)?;
        Ok(Self {
            resident: real::memory(pid, "VmRSS")?,
            anonymous: real::memory(pid, "RssAnon")?,
            peak: real::memory(pid, "VmHWM")?,
            maps: real::memlock(pid)?,
            descriptors,
            threads,
        })
    }
}

/// Measures both.
pub fn bench(seconds: u32, flows: u32, report: &mut Report) -> Result<()> {
    wake_ups(seconds, report)?;
    growth(flows, report)
}

fn wake_ups(seconds: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "Wake-ups in {seconds} s of a real `twheel run` with default options and a history, on a veth to which nobody sends: \
         what the\nscheduler has counted for all its threads (`status`: switches, voluntary or not; `schedstat`: turns on a \
         CPU, and\nnanoseconds there), before and after. With a flow: one that is established and has five days left."
    ));
    report.say(&format!(
        "\n{:<12} {:>8} {:>9} {:>8} {:>12}",
        "", "threads", "switches", "turns", "nanoseconds"
    ));
    for name in ["no flow", "with a flow"] {
        let (lab, history) = (Lab::new()?, History::new("idle"));
        let arguments = ["--iface", WATCHED, "--history", history.path()];
        let twheel = Twheel::start(lab.namespace(), &arguments)?;
        if name != "no flow" {
            real::establish(&lab.pins()?)?;
        }
        thread::sleep(SETTLED);
        let before = (twheel.switches()?, turns(twheel.pid())?);
        for _ in progress::over(name, 0..seconds) {
            thread::sleep(Duration::from_secs(1));
        }
        let after = (twheel.switches()?, turns(twheel.pid())?);
        ensure!(before.0.keys().eq(after.0.keys()), "threads came or went");
        let flows = lab.namespace().twheel_once(&["flows", "--json"])?.lines;
        let expiries = flows.iter().map(|line| -> Result<u64> {
            let flow: serde_json::Value = serde_json::from_str(&line.text)?;
            flow["expires_us"].as_u64().context("no expires_us")
        });
        let expiries = expiries.collect::<Result<Vec<_>>>()?;
        let as_said = match expiries[..] {
            [] => name == "no flow",
            [left] => name != "no flow" && left > 4 * 86_400_000_000,
            _ => false,
        };
        ensure!(as_said, "{name}, but in the table: {expiries:?} ms");
        let sum = |switches: &BTreeMap<_, u64>| switches.values().sum::<u64>();
        let switches = sum(&after.0) - sum(&before.0);
        let [turns, nanoseconds] = [0, 1].map(|at| after.1[at] - before.1[at]);
        let verdict = match switches + turns + nanoseconds {
            0 => "(none)",
            _ => "(NOT IDLE)",
        };
        report.say(&format!(
            "{name:<12} {:>8} {switches:>9} {turns:>8} {nanoseconds:>12} {verdict}",
            after.0.len()
        ));
        report.object(&json!({
            "bench": "idle", "variant": name, "seconds": seconds,
            "switches": switches, "turns": turns, "nanoseconds": nanoseconds,
        }));
        twheel.stop()?;
    }
    Ok(())
}

/// How often all threads of a process were scheduled, and for how many nanoseconds.
fn turns(pid: u32) -> Result<[u64; 2]> {
    let mut sum = [0; 2];
    for task in fs::read_dir(format!("/proc/{pid}/task"))? {
        let schedstat = fs::read_to_string(task?.path().join("schedstat"))?;
        let fields: Vec<u64> = schedstat
            .split_whitespace()
            .map(str::parse)
            .collect::<Result<_, _>>()?;
        let [on, _, turns] = fields[..] else {
            anyhow::bail!("schedstat: {schedstat}");
        };
        sum = [sum[0] + turns, sum[1] + on];
    }
    Ok(sum)
}

fn growth(flows: u32, report: &mut Report) -> Result<()> {
    report.say(&format!(
        "\nMemory of a real `twheel run --timeout 1s` while {flows} flows expire. Their packets go through its program, two at \
         once;\nat most some {LIVE} are in the table. Its history has 8 MiB on disk, its output goes to /dev/null. Looked at \
         whenever another\nmillion has begun and none is left: `status` of the process, `memlock` of its maps."
    ));
    let (lab, history) = (Lab::new()?, History::new("growth"));
    let arguments = format!(
        "--iface {WATCHED} --timeout 1s --max-flows {} --history-size 8MiB --history {}",
        LIVE + 2 * u64::from(BATCH),
        history.path()
    );
    let arguments: Vec<_> = arguments.split(' ').collect();
    let twheel = Twheel::start_muted(lab.namespace(), &arguments)?;
    let (pid, pins) = (twheel.pid(), lab.pins()?);
    let begun = Instant::now();
    let mut held = Vec::new();
    let bar = progress::bar("flows expire", flows.into());
    for from in (0..flows).step_by(BATCH as usize) {
        let end = Instant::now() + PATIENCE;
        let all_gone = from % ROUND == 0;
        while real::tracked(&pins)? > if all_gone { 0 } else { LIVE } {
            ensure!(Instant::now() < end, "flows do not expire");
            thread::sleep(Duration::from_millis(5));
        }
        if all_gone {
            thread::sleep(SETTLED / 10);
            held.push(Held::by(pid)?);
        }
        let count = BATCH.min(flows - from);
        let first = from % ADDRESSES;
        real::begin(&pins, first..first + count)?;
        bar.inc(count.into());
    }
    let end = Instant::now() + PATIENCE;
    while real::tracked(&pins)? > 0 {
        ensure!(Instant::now() < end, "flows do not expire");
        thread::sleep(Duration::from_millis(5));
    }
    thread::sleep(SETTLED / 10);
    held.push(Held::by(pid)?);
    let seconds = begun.elapsed().as_secs_f64();
    let counters = real::counters(&pins)?;
    let ended = twheel.stop()?;
    let count = |counter| counters.get(counter);
    let begun = count(Counter::Created);
    let refused = count(Counter::WindowFull);
    // If a window is full, a flow is evicted for the new one, or the new one is refused.
    let [expired, evicted] = [Counter::Expired, Counter::Evicted].map(count);
    ensure!(
        begun + refused == u64::from(flows) && expired + evicted == begun,
        "{begun} flows began, {refused} found no room, {expired} expired, {evicted} were evicted"
    );
    let reported = format!("{begun} flows ended, 0 live");
    ensure!(
        ended.stderr.contains(&reported),
        "not reported: {}",
        ended.stderr
    );
    let lost = ended.stderr.lines().find_map(|line| {
        let count = line.trim().split_once("  events missing from the history");
        count?.0.parse::<u64>().ok()
    });

    let kib = |bytes: u64| format!("{} KiB", bytes >> 10);
    report.say(&format!(
        "\n{:>12} {:>12} {:>12} {:>12} {:>12} {:>12} {:>8}",
        "expired", "resident", "of it own", "peak", "maps", "descriptors", "threads"
    ));
    for (round, held) in held.iter().enumerate() {
        let expired = (round as u32 * ROUND).min(flows);
        report.say(&format!(
            "{expired:>12} {:>12} {:>12} {:>12} {:>12} {:>12} {:>8}",
            kib(held.resident),
            kib(held.anonymous),
            kib(held.peak),
            kib(held.maps),
            held.descriptors,
            held.threads
        ));
        report.object(&json!({
            "bench": "idle", "variant": "growth", "n": expired, "rss": held.resident, "rss_anon": held.anonymous,
            "peak": held.peak, "memlock": held.maps, "descriptors": held.descriptors, "threads": held.threads,
        }));
    }
    let half = held.len() / 2;
    let (first, last) = held.get(half).zip(held.last()).context("too few flows")?;
    ensure!(
        (first.maps, first.descriptors, first.threads)
            == (last.maps, last.descriptors, last.threads),
        "maps, descriptors or threads have grown: {first:?}, {last:?}"
    );
    // Anonymous memory only: the kernel may reclaim and reload file pages at any time.
    let most = |rounds: &[Held]| rounds.iter().map(|held| held.anonymous).max().unwrap_or(0);
    let begin = held.get(1).map_or(0, |held| held.anonymous);
    let own = most(&held[half..]).saturating_sub(first.anonymous);
    let resident = last.resident.saturating_sub(first.resident);
    let peak = last.peak.saturating_sub(first.peak);
    let verdict = match own.max(peak) {
        0 => "none",
        _ => "SOME",
    };
    report.say(&format!(
        "\nGrowth in the second half, {} expiries: {verdict} (its own {}, all that is resident {}, peak {}; maps,\n\
         descriptors and threads 0). From the first million to the half it was {} of its own. All {begun} flows were reported ({refused} found no room in their window), {:.0} a \
         second, more than\nthe disk took: {} of them are not in the history.",
        flows - half as u32 * ROUND,
        kib(own),
        kib(resident),
        kib(peak),
        kib(first.anonymous.saturating_sub(begin)),
        begun as f64 / seconds,
        lost.unwrap_or_default(),
    ));
    Ok(())
}
