//! How late flows expire while packets keep all CPUs busy.

use std::{
    fs,
    sync::atomic::{AtomicBool, Ordering::Relaxed},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use twheel::{
    data_plane::Events,
    progress,
    stepper::{pin_to, run_ahead},
};
use twheel_common::{counter::Counter, event::Record, flow::Direction};
use twheel_tests::running::Twheel;

use crate::{
    real::{self, CPUS, Lab, Sender, WATCHED},
    report::{Figure, Report, verdict},
    size,
};

/// Flows that begin per minute.
const A_MINUTE: u64 = 1_000_000;
const TIMEOUT: Duration = Duration::from_secs(size(10, 2));
const TICK: Duration = Duration::from_millis(100);
/// How late 999 of 1,000 flows may be, in addition to a tick.
const BEYOND: Duration = Duration::from_millis(5);
/// The load: flows on each CPU that have packets all the time.
const BUSY: u32 = 1 << 10;
/// The number of the first of these flows.
const BUSY_FROM: u32 = 1 << 23;
/// Packets of the load between two readings of the clock.
const BURST: usize = 16;
/// How long the load continues after the last flow is due.
const AFTER: Duration = Duration::from_secs(2);
/// Maximum fraction of a CPU that may have been idle under the load.
const IDLE: f64 = 0.02;
/// How long a thread that does nothing sleeps at a time.
const NAP: Duration = Duration::from_millis(10);
/// How long a thread that watches the ring sleeps at a time.
const LOOK: Duration = Duration::from_micros(500);
/// The columns, and the fraction of flows that are later than the figure there.
const QUANTILES: [(&str, f64); 6] = [
    ("least", 1.0),
    ("median", 0.5),
    ("p99", 0.01),
    ("p99.9", 0.001),
    ("p99.99", 0.0001),
    ("most", 0.0),
];

/// The end of a flow as it was reported.
struct End {
    flow: u32,
    at: Instant,
    idle: Duration,
}

/// The end of a flow as it was seen in the ring.
type Seen = (u32, Instant);

/// The results of a run, in milliseconds, sorted.
struct Measured {
    ring: Vec<f64>,
    event: Vec<f64>,
    line: Vec<f64>,
    /// How late the threads that only sleep woke up.
    naps: Vec<f64>,
    packets: u64,
    seconds: f64,
    idle: f64,
}

/// Measures a `twheel run`.
pub fn bench(seconds: u32, report: &mut Report) -> Result<()> {
    let flows = (A_MINUTE * u64::from(seconds) / 60) as u32;
    report.say(&format!(
        "How late {flows} flows expire, which begin evenly over {seconds} s, have one packet, and are due over {seconds} s. A real\n\
         `twheel run --json --timeout {0}s`, tick {1} ms, in a namespace of its own on a veth, both directions, native XDP. On\n\
         each of {CPUS} CPUs a thread does nothing but send frames of {BUSY} busy flows through a packet socket on the other end\n\
         of the cable; the kernel runs XDP and the stack on each in a softirq of that CPU. Flows begin with frames of the same\n\
         threads.\n\
         Ring: from the moment before its frame was sent to that in which another process, which looks every {2} µs with the\n\
         priority of steppers, has found its end in the ring of events, by the monotonic clock, less {0} s. Event: the same by\n\
         the program's own clock of jiffies (`idle_ms`). Line: as ring, but to the moment in which another process has read\n\
         the line of its end: that is all there is between, output and pipe included. Machine: by how much a thread on each CPU that does nothing\n\
         but sleep, with the priority of steppers, is back later than it asked for. Deadlines are not rounded up for any: up to a tick and a\n\
         jiffy, which rounding takes, count as late. Early would be told if it were by more than a look and a send take.\n",
        TIMEOUT.as_secs(),
        TICK.as_millis(),
        LOOK.as_micros(),
    ));
    let measured = measure(flows, Duration::from_secs(seconds.into()))?;
    report.say(&format!(
        "Load: {:.2} million packets a second and CPU, CPUs idle for {:.2} % of the time.\n",
        measured.packets as f64 / measured.seconds / f64::from(CPUS) / 1e6,
        measured.idle * 100.0
    ));
    let names = QUANTILES.map(|(name, _)| format!("{name:>9}")).concat();
    report.say(&format!("{:<14}{names}", "ms late"));
    let sides = [
        ("ring", &measured.ring),
        ("event", &measured.event),
        ("line", &measured.line),
        ("machine", &measured.naps),
    ];
    let mut curves = Vec::new();
    for (name, sorted) in sides {
        let values = QUANTILES.map(|(_, share)| later(sorted, share));
        let cells = values.map(|value| format!("{value:>9.1}")).concat();
        report.say(&format!("{name:<14}{cells}"));
        let [min, median, p99, p999, p9999, max] = values;
        report.object(&json!({
            "bench": "lateness", "variant": name, "n": flows,
            "min_ms": min, "median_ms": median, "p99_ms": p99, "p99_9_ms": p999, "p99_99_ms": p9999, "max_ms": max,
        }));
        let points = (0..=6 * 8)
            .map(|eighth| 10f64.powf(f64::from(eighth) / 8.0))
            .filter(|one_in| *one_in <= sorted.len() as f64)
            .map(|one_in| (one_in, later(sorted, 1.0 / one_in)))
            .filter(|(_, late)| *late > 0.0);
        curves.push((name.to_owned(), points.collect()));
    }
    let early = |sorted: &[f64]| sorted.iter().take_while(|late| **late < 0.0).count();
    for (clock, sorted) in [
        ("the program's", &measured.event),
        ("the other", &measured.ring),
    ] {
        ensure!(
            early(sorted) == 0,
            "{} flows ended early by {clock} clock, by up to {:.1} ms",
            early(sorted),
            -sorted[0]
        );
    }
    let bound = (TICK + BEYOND).as_secs_f64() * 1e3;
    report.say(&format!(
        "\nAll {flows} were reported, each once, none early by either clock. The bound is a tick and 5 ms for 99.9 % of the \
         ends\nas they come into the ring: {} ms. (A line waits for those who print and read it, too, which have no priority over the load.)",
        verdict(&Figure::from_samples(&[later(&measured.ring, 0.001)]), Some(bound)),
    ));
    report.plot(
        "late",
        "How late flows expire under full load",
        ["one flow in so many is later", "ms"],
        &curves,
    )
}

/// The value that this fraction of all values exceeds.
fn later(sorted: &[f64], share: f64) -> f64 {
    let index = (sorted.len() as f64 * (1.0 - share)).ceil() as usize;
    sorted[index.clamp(1, sorted.len()) - 1]
}

fn measure(flows: u32, spread: Duration) -> Result<Measured> {
    let lab = Lab::new()?;
    // Every flow is in the table for its timeout.
    let live = (u64::from(flows) * TIMEOUT.as_secs()).div_ceil(spread.as_secs());
    let room = live.min(flows.into()) * 3 / 2 + u64::from(2 * CPUS * BUSY);
    let arguments = format!(
        "--iface {WATCHED} --mode native --json --timeout {}s --max-flows {room}",
        TIMEOUT.as_secs()
    );
    let arguments: Vec<_> = arguments.split(' ').collect();
    let twheel = Twheel::start(lab.namespace(), &arguments)?;
    let sockets = (0..CPUS)
        .map(|_| lab.sender())
        .collect::<Result<Vec<_>>>()?;
    let mut events = Events::open(lab.pins()?.map("EVENTS")?)?;
    let stop = AtomicBool::new(false);
    let before = idle_time()?;
    let begun = Instant::now() + Duration::from_millis(100);
    let beginnings = Beginnings {
        begun,
        spread,
        flows,
    };
    let (sent, naps, seen, ends) = thread::scope(|scope| {
        let senders: Vec<_> = (0..)
            .zip(sockets)
            .map(|(cpu, sender)| {
                let stop = &stop;
                scope.spawn(move || {
                    pin_to(cpu)?;
                    send(sender, cpu, beginnings, stop)
                })
            })
            .collect();
        let nappers: Vec<_> = (0..CPUS)
            .map(|cpu| {
                let stop = &stop;
                scope.spawn(move || nap(cpu, stop))
            })
            .collect();
        let looker = scope.spawn(|| look(&mut events, &stop, flows));
        let ends = listen(&twheel, begun + spread + TIMEOUT + AFTER, flows);
        stop.store(true, Relaxed);
        (joined(senders), joined(nappers), joined(vec![looker]), ends)
    });
    let (sent, naps, seen, ends) = (sent?, naps?, seen?.concat(), ends?);
    let (idle, seconds) = (idle_time()? - before, begun.elapsed().as_secs_f64());
    let counters = real::counters(&lab.pins()?)?;
    twheel.stop()?;
    let idle = idle.as_secs_f64() / seconds / f64::from(CPUS);
    ensure!(
        idle < IDLE,
        "CPUs were idle for {:.1} %: no full load",
        idle * 100.0
    );
    let busy = u64::from(CPUS * BUSY);
    let created = counters.get(Counter::Created);
    ensure!(created == u64::from(flows) + busy, "{created} flows began");
    each_once(flows, ends.iter().map(|end| end.flow)).context("reported")?;
    each_once(flows, seen.iter().map(|(flow, _)| *flow)).context("in the ring")?;
    let sent = |flow: u32| sent[(flow % CPUS) as usize][(flow / CPUS) as usize];
    let (mut event, mut line) = (Vec::new(), Vec::new());
    let late = |idle: Duration| (idle.as_secs_f64() - TIMEOUT.as_secs_f64()) * 1e3;
    for End { flow, at, idle } in ends {
        event.push(late(idle));
        line.push(late(at - sent(flow)));
    }
    let ring = seen.iter().map(|(flow, at)| late(*at - sent(*flow)));
    let mut ring: Vec<_> = ring.collect();
    ring.sort_by(f64::total_cmp);
    event.sort_by(f64::total_cmp);
    line.sort_by(f64::total_cmp);
    let mut naps = naps.concat();
    naps.sort_by(f64::total_cmp);
    Ok(Measured {
        naps,
        ring,
        event,
        line,
        packets: counters.get(Counter::Touched),
        seconds,
        idle,
    })
}

/// When flows begin, one after the other.
#[derive(Clone, Copy)]
struct Beginnings {
    /// When the first begins.
    begun: Instant,
    /// The time over which they begin.
    spread: Duration,
    flows: u32,
}

/// Sends packets of busy flows, and the packets with which other flows begin at their times.
/// Returns those times.
fn send(
    mut sender: Sender,
    cpu: u32,
    beginnings: Beginnings,
    stop: &AtomicBool,
) -> Result<Vec<Instant>> {
    let Beginnings {
        begun,
        spread,
        flows,
    } = beginnings;
    let from = BUSY_FROM + cpu * BUSY;
    let load: Vec<_> = (from..from + BUSY).map(real::segment).collect();
    let mut load = load.iter().cycle();
    let mut sent = Vec::with_capacity((flows / CPUS) as usize + 1);
    let mut flow = cpu;
    while !stop.load(Relaxed) {
        while flow < flows && Instant::now() >= begun + spread * flow / flows {
            let segment = real::segment(flow);
            sent.push(Instant::now());
            sender.send(&segment)?;
            flow += CPUS;
        }
        for segment in load.by_ref().take(BURST) {
            sender.send(segment)?;
        }
    }
    Ok(sent)
}

/// The results of threads.
fn joined<T>(threads: Vec<thread::ScopedJoinHandle<'_, Result<T>>>) -> Result<Vec<T>> {
    let join = |thread: thread::ScopedJoinHandle<'_, Result<T>>| {
        thread
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    };
    threads.into_iter().map(join).collect()
}

/// Sleeps again and again, and measures how late it wakes up.
fn nap(cpu: u32, stop: &AtomicBool) -> Result<Vec<f64>> {
    pin_to(cpu)?;
    run_ahead(true).context("no real-time priority")?;
    let mut late = Vec::new();
    while !stop.load(Relaxed) {
        let asleep = Instant::now();
        thread::sleep(NAP);
        late.push((asleep.elapsed() - NAP).as_secs_f64() * 1e3);
    }
    Ok(late)
}

fn each_once(flows: u32, ended: impl Iterator<Item = u32>) -> Result<()> {
    let mut once = vec![false; flows as usize];
    for flow in ended {
        let before = std::mem::replace(&mut once[flow as usize], true);
        ensure!(!before, "a flow ended twice");
    }
    let missing = once.iter().filter(|ended| !**ended).count();
    ensure!(missing == 0, "{missing} flows of {flows} did not end");
    Ok(())
}

/// Watches the ring without consuming anything, because twheel reads it. Between two looks an
/// event's space in the ring must not be reused for other events. The number of events found shows
/// at the end whether that was so.
fn look(events: &mut Events, stop: &AtomicBool, flows: u32) -> Result<Vec<Seen>> {
    run_ahead(true).context("no real-time priority")?;
    let (mut seen, mut read) = (Vec::with_capacity(flows as usize), Vec::new());
    while !stop.load(Relaxed) {
        thread::sleep(LOOK);
        events.read(&mut read, usize::MAX);
        let at = Instant::now();
        for read in read.drain(..) {
            let Record::Ended(event) = read.record else {
                continue;
            };
            let ends = [Direction::FromLow, Direction::FromHigh].map(|it| event.key.sender(it));
            let mut flow = ends.iter().filter_map(|end| real::flow_of(end.ip()));
            let flow = flow.find(|flow| *flow < flows);
            seen.push((flow.context("a busy flow expired")?, at));
        }
    }
    Ok(seen)
}

/// Reads what twheel reports.
fn listen(twheel: &Twheel, until: Instant, flows: u32) -> Result<Vec<End>> {
    let mut ends = Vec::with_capacity(flows as usize);
    let bar = progress::bar("flows expire", flows.into());
    while let Some(line) = twheel.line(until.saturating_duration_since(Instant::now()))? {
        let expiry = line.expiry()?;
        let flow = real::flow_of(expiry.src.ip()).filter(|flow| *flow < flows);
        let flow = flow.with_context(|| format!("a busy flow expired: {}", line.text))?;
        ensure!(expiry.reason == "idle", "not idle: {}", line.text);
        bar.inc(1);
        ends.push(End {
            flow,
            at: line.at,
            idle: expiry.idle,
        });
    }
    Ok(ends)
}

/// How long all CPUs together have been idle.
fn idle_time() -> Result<Duration> {
    let stat = fs::read_to_string("/proc/stat")?;
    let line = stat.lines().next().context("no line")?;
    let field = |number| -> Result<u64> {
        let field = line.split_ascii_whitespace().nth(number);
        Ok(field.context("too short a line")?.parse()?)
    };
    // Idle, and waiting for a disk; in hundredths of a second.
    Ok(Duration::from_millis((field(4)? + field(5)?) * 10))
}
