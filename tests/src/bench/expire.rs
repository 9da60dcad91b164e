//! What it takes of a CPU to find flows that are idle.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::maps::Array;
use nix::errno::Errno;
use serde_json::json;
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Events, Load, STEP_BUDGET},
    pins::Instance,
    plan::{Costs, Demand, Plan, calibrate},
    progress,
    ring::Signals,
    settings::Wanted,
    stepper::Steppers,
    timeouts::Timeouts,
};
use twheel_common::{counter::Counter, step::Outcome, wheel::NEVER};
use twheel_tests::order::PACKETS;

use crate::{
    batch::Sweeper,
    peers::Peers,
    plan::stepper_stats,
    plane::{self, Bench, CPU, Segment, cpu_time, hash_entries},
    plot::Curve,
    report::{Figure, Report, verdict},
    size,
};

const FLOWS: u32 = size(1_000_000, 10_000);
const PRECISIONS: [Duration; 3] = [
    Duration::from_millis(10),
    Duration::from_millis(100),
    Duration::from_secs(1),
];
const TIMEOUTS: [Duration; 3] = [
    Duration::from_secs(size(10, 1)),
    Duration::from_secs(size(60, 2)),
    Duration::from_secs(size(300, 3)),
];
/// What is bound, and what it may take of a CPU.
const BOUND: (Duration, Duration, f64) = (PRECISIONS[1], TIMEOUTS[1], 0.008);
/// Times that a sweep in the kernel takes, at least.
const SWEEP: f64 = 100.0;

/// Turns of the wheel at what is bound, one after the other.
const TURNS: usize = size(5, 1);
/// No more timeouts than this of virtual time: where the ticks are long, a whole turn of the wheel is hours.
const MOST_TIMEOUTS: u32 = 2;
/// Slots of a level.
const SLOTS: u32 = size(1024, 16);
/// Every flow has so many packets in a timeout.
const TOUCHES: usize = 10;
/// Flows begin, and have their packets, in so many portions a timeout.
const PORTIONS: u32 = size(1_000, 50);
/// The CPU on whose wheel the flows stand; their packets come in on the other.
const WHEEL: u32 = 1;

/// Passes of each sweep.
const PASSES: usize = size(5, 1);

/// Numbers of flows with a timer each.
const TIMED: [u32; 2] = [1, 64];
/// And the most that is tried.
const MOST_TIMED: u32 = 1 << 16;
const ROUNDS: u32 = size(31, 1);

/// What steppers took.
struct Stepped {
    /// Of one CPU.
    share: Figure,
    visits: f64,
    wakes: f64,
}

/// Passes of the sweeps, seconds.
struct Sweeps {
    kernel: Figure,
    batch: Figure,
}

/// Steppers, sweeps, timers.
pub fn bench(report: &mut Report) -> Result<()> {
    let costs = costs()?;
    report.say(&format!(
        "What it takes of one CPU to end idle flows in time, while all flows are live: each has {TOUCHES} packets in \
         a timeout, and\nnone expires. Flows begin one after the other over a timeout and all stand on one wheel.\n\
         Virtual: the clock is moved on tick by tick, and where a stepper would wake up, production's is called until nothing \
         is due:\nits CPU time, and for each wake-up {:.1} µs more, which is what sleeping and waking take here; over a whole \
         turn of the wheel's\nlevel, so that it has the visits of flows that go down a level at once (or over \
         {MOST_TIMEOUTS} timeouts, where that is shorter). At 60 s\nand 100 ms: median (least–most) of {TURNS} turns. Real: \
         production's threads in real time, their CPU time (schedstat) over a turn.\nPredicted: the cost model of \
         `twheel plan --calibrate` in the same run, a visit {:.0} ns.\n",
        costs.wake / 1e3,
        costs.visit,
    ));
    let sweeps = sweeps()?;
    report.say(&format!(
        "{:>8}  {:>7}  {:>9}  {:>9}  {:>10}  {:>22}  predicted",
        "flows", "timeout", "precision", "visits/s", "wake-ups/s", "of one CPU"
    ));
    let mut row = |kind: &str, (flows, timeout, precision), stepping: &Stepped| {
        let predicted = predict(flows, timeout, precision, &costs)?;
        let share = stepping.share;
        report.say(&format!(
            "{flows:>8}  {:>5} s  {:>6} ms  {:>9.0}  {:>10.1}  {:.3} % {:>14}  {:.3} %  {kind}",
            timeout.as_secs(),
            precision.as_millis(),
            stepping.visits,
            stepping.wakes,
            share.median * 100.0,
            if share.rounds > 1 {
                format!("({:.3}–{:.3})", share.min * 100.0, share.max * 100.0)
            } else {
                String::new()
            },
            predicted * 100.0,
        ));
        report.object(&json!({
            "bench": "expire", "variant": format!("stepper_{kind}"), "n": flows,
            "timeout_s": timeout.as_secs(), "precision_ms": precision.as_millis() as u64,
            "cpu_share": share.median, "cpu_share_predicted": predicted,
        }));
        anyhow::Ok(())
    };
    let mut watched = Vec::new();
    for (flows, precision) in [FLOWS, FLOWS, FLOWS, FLOWS / 10].into_iter().zip([
        PRECISIONS[0],
        PRECISIONS[1],
        PRECISIONS[2],
        BOUND.0,
    ]) {
        for timeout in TIMEOUTS {
            let at = (flows, timeout, precision);
            let turns = if at == (FLOWS, BOUND.1, BOUND.0) {
                TURNS
            } else {
                1
            };
            let stepping = virtually(flows, timeout, precision, turns, &costs)?;
            row("virtual", at, &stepping)?;
            watched.push((at, stepping.share.median));
        }
    }
    let real = watch(FLOWS, BOUND.1, BOUND.0)?;
    row("real", (FLOWS, BOUND.1, BOUND.0), &real)?;
    let stepping = |flows, timeout, precision| {
        let found = watched
            .iter()
            .find(|(at, _)| *at == (flows, timeout, precision));
        found.map(|(_, share)| *share).context("not measured")
    };

    report.say(&format!(
        "\nSweeps look at every flow as often as the precision asks, whatever the timeout. One pass over {FLOWS} live flows in \
         an LRU\nhash, median (least–most) of {PASSES}: in the kernel (`for_each_map_elem`; the kernel's `duration`) {:.1} ms \
         ({:.1}–{:.1}); from userspace\n(BPF_MAP_LOOKUP_BATCH of {}, CPU time of the thread) {:.1} ms ({:.1}–{:.1}). \
         A pass in the kernel has all packets of its CPU\nwait until it is over. It was checked that each pass meets every \
         flow, and deletes what is idle.\n\n\
         Of one CPU, {FLOWS} flows (above 100 % it cannot be had):\n\
         {:>9}  {:>10}  {:>10}  {:>10}  {:>14}  {:>14}",
        sweeps.kernel.median * 1e3,
        sweeps.kernel.min * 1e3,
        sweeps.kernel.max * 1e3,
        Sweeper::CHUNK,
        sweeps.batch.median * 1e3,
        sweeps.batch.min * 1e3,
        sweeps.batch.max * 1e3,
        "precision",
        "10 s",
        "60 s",
        "300 s",
        "kernel sweep",
        "batch sweep",
    ));
    let of_sweep = |pass: &Figure, precision: Duration| pass.median / precision.as_secs_f64();
    let mut curves: Vec<_> = TIMEOUTS
        .map(|timeout| (format!("twheel, {} s", timeout.as_secs()), Vec::new()))
        .into();
    curves.push(("kernel sweep".to_owned(), Vec::new()));
    curves.push(("userspace batch sweep".to_owned(), Vec::new()));
    for precision in PRECISIONS {
        let mut row = format!("{:>6} ms", precision.as_millis());
        let mut shares = Vec::new();
        for timeout in TIMEOUTS {
            let share = stepping(FLOWS, timeout, precision)?;
            row += &format!("  {:>8.3} %", share * 100.0);
            shares.push(share);
        }
        for pass in [&sweeps.kernel, &sweeps.batch] {
            let share = of_sweep(pass, precision);
            row += &format!("  {:>12.1} %", share * 100.0);
            shares.push(share);
        }
        for ((_, curve), share) in curves.iter_mut().zip(shares) {
            curve.push((precision.as_secs_f64() * 1e3, share * 100.0));
        }
        report.say(&row);
    }
    let (precision, timeout, most) = BOUND;
    // The dearer of both.
    let share = stepping(FLOWS, timeout, precision)?.max(real.share.median);
    let times = of_sweep(&sweeps.kernel, precision) / share;
    let least = times * sweeps.kernel.min / sweeps.kernel.median;
    report.say(&format!(
        "\nAt {} s and {} ms: {} % of one CPU; the sweep in the kernel takes {times:.0} times that (its fastest pass \
         {least:.0};\n{} {SWEEP}), the one from userspace {:.0} times.",
        timeout.as_secs(),
        precision.as_millis(),
        verdict(&Figure::of(&[share * 100.0]), Some(most * 100.0)),
        if times >= SWEEP { "at least" } else { "BELOW" },
        of_sweep(&sweeps.batch, precision) / share,
    ));
    let measured = |x| {
        (
            "twheel in real time".to_owned(),
            vec![(x, real.share.median * 100.0)],
        )
    };
    curves.push(measured(precision.as_secs_f64() * 1e3));
    report.plot(
        "precision",
        "One million live flows: cost of precision",
        ["precision, ms", "% of one CPU"],
        &curves,
    )?;
    let rate = f64::from(FLOWS) / timeout.as_secs_f64();
    by_rate(&stepping, measured(rate), &sweeps, report)?;
    timers(report)
}

/// Of this machine: the median of three, as a wake-up costs many times as much where others disturb.
fn costs() -> Result<Costs> {
    let mut all = Vec::new();
    for _ in progress::over("calibrating", 0..3) {
        all.push(calibrate(FLOWS.into())?);
    }
    let median = |of: fn(&Costs) -> f64| Figure::of(&all.iter().map(of).collect::<Vec<_>>()).median;
    Ok(Costs {
        visit: median(|costs| costs.visit),
        wake: median(|costs| costs.wake),
    })
}

/// The plot over flows / timeout.
fn by_rate(
    stepping: &dyn Fn(u32, Duration, Duration) -> Result<f64>,
    real: Curve,
    sweeps: &Sweeps,
    report: &mut Report,
) -> Result<()> {
    let precision = BOUND.0;
    let mut curves = vec![real];
    let rate = |flows: u32, timeout: Duration| f64::from(flows) / timeout.as_secs_f64();
    for flows in [FLOWS / 10, FLOWS] {
        let points = TIMEOUTS
            .into_iter()
            .map(|timeout| {
                let share = stepping(flows, timeout, precision)?;
                Ok((rate(flows, timeout), share * 100.0))
            })
            .collect::<Result<_>>()?;
        curves.push((format!("twheel, {flows} flows"), points));
    }
    for (name, pass) in [
        ("kernel sweep", sweeps.kernel),
        ("batch sweep", sweeps.batch),
    ] {
        let share = pass.median / precision.as_secs_f64() * 100.0;
        let points = TIMEOUTS.map(|timeout| (rate(FLOWS, timeout), share)).into();
        curves.push((format!("{name}, {FLOWS} flows"), points));
    }
    report.plot(
        "rate",
        "Cost of flows / timeout, precision 100 ms",
        ["flows / timeout, 1/s", "% of one CPU"],
        &curves,
    )
}

fn wanted(flows: u32, timeout: Duration, precision: Duration) -> Wanted {
    Wanted {
        tick: precision,
        timeouts: Timeouts::new(timeout, timeout),
        max_flows: flows,
        ..Wanted::default()
    }
}

/// The share of one CPU, by the cost model.
fn predict(flows: u32, timeout: Duration, precision: Duration, costs: &Costs) -> Result<f64> {
    let clock = Clock::jiffies()?;
    let config = wanted(flows, timeout, precision).config(clock)?;
    // All flows begin on one CPU.
    let demand = Demand::of(flows, 1, &config, clock);
    let plan = Plan::of(config.0.geometry, &demand, costs).context("no plan")?;
    Ok(plan.share)
}

/// Real steppers over real time.
fn watch(flows: u32, timeout: Duration, precision: Duration) -> Result<Stepped> {
    let clock = Clock::jiffies()?;
    let config = wanted(flows, timeout, precision).config(clock)?;
    let object = plane::object("TWHEEL_BENCH_OBJECT")?;
    let instance = Instance::open(&[format!("bench-{}", std::process::id())])?;
    let result = DataPlane::load(&Load::new(&object, config, clock), &instance)
        .and_then(|plane| step(plane, &instance, flows, timeout));
    instance.remove()?;
    result
}

fn step(
    mut plane: DataPlane,
    instance: &Instance,
    flows: u32,
    timeout: Duration,
) -> Result<Stepped> {
    let program = instance.object("twheel_step");
    plane.xdp("twheel_step")?.pin(&program)?;
    let mut events = Events::open(instance.pins().map("EVENTS")?)?;
    let signals = Arc::<Signals>::default();
    let steppers = Steppers::start(
        program,
        plane.clock(),
        plane.config().tick,
        signals.clone(),
        None,
    )?;
    let mut bench = Bench::of(plane)?;
    let all = bench.fresh(flows as usize);
    let portion = all.len().div_ceil(PORTIONS as usize);
    let turns = timeout / PORTIONS;
    let (begun, mut packets) = (Instant::now(), Packets::default());
    let what = format!("{flows} flows begin over {} s", timeout.as_secs());
    for turn in progress::over(what, 0..all.len().div_ceil(portion)) {
        let end = all.len().min((turn + 1) * portion);
        bench.go_to(WHEEL)?;
        bench.run("touch", Segment::Ack, &all[turn * portion..end])?;
        if turn == 0 {
            steppers.call(WHEEL);
        }
        bench.go_to(CPU)?;
        packets.come(&mut bench, &all[..end], TOUCHES * portion)?;
        let due = begun + turns * (turn as u32 + 1);
        thread::sleep(due.saturating_duration_since(Instant::now()));
    }
    let tracked = bench.plane.tracked()?;
    let mut busy = |bench: &mut Bench, span: Duration| -> Result<()> {
        let (begun, mut turn) = (Instant::now(), 0);
        while begun.elapsed() < span {
            packets.come(bench, &all, TOUCHES * portion)?;
            turn += 1;
            let due = begun + turns * turn;
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        Ok(())
    };
    let (met, (cpu, runs), since) = (
        bench.plane.counters()?.get(Counter::Visits),
        stepper_stats()?,
        Instant::now(),
    );
    let turn = bench
        .plane
        .clock()
        .duration(bench.plane.config().tick.into())
        * SLOTS;
    busy(&mut bench, turn)?;
    let (cpu_after, runs_after) = stepper_stats()?;
    let seconds = since.elapsed().as_secs_f64();
    let met = bench.plane.counters()?.get(Counter::Visits) - met;
    // Nobody reads what is not to come.
    signals.close();
    steppers.stop()?;
    let mut ended = Vec::new();
    events.drain(&mut ended);
    ensure!(
        ended.is_empty(),
        "a live flow expired: this machine is too slow for this"
    );
    bench.all_live(tracked, flows)?;
    Ok(Stepped {
        share: Figure::of(&[(cpu_after - cpu).as_secs_f64() / seconds]),
        visits: met as f64 / seconds,
        wakes: (runs_after - runs) as f64 / seconds,
    })
}

/// Packets of flows that have begun, each once a round, the rounds in different orders: what flows have in common
/// when they begin has no part in when they are due.
#[derive(Default)]
struct Packets {
    round: Vec<u32>,
}

impl Packets {
    /// So many come in.
    fn come(&mut self, bench: &mut Bench, begun: &[u32], count: usize) -> Result<()> {
        let mut left = count;
        while left > 0 {
            if self.round.is_empty() {
                self.round.extend(begun);
                bench.random.shuffle(&mut self.round);
            }
            let rest = self.round.len().saturating_sub(left);
            let flows = self.round.split_off(rest);
            left -= flows.len();
            bench.run("touch", Segment::Ack, &flows)?;
        }
        Ok(())
    }
}

impl Bench {
    /// Fails where flows are gone, or were never there but for those that found no room.
    fn all_live(&self, tracked: u64, flows: u32) -> Result<()> {
        ensure!(
            self.plane.tracked()? == tracked
                && tracked + u64::from(flows) / 100_000 + 1 >= flows.into(),
            "{tracked} flows of {flows} began, {} are left",
            self.plane.tracked()?
        );
        Ok(())
    }
}

/// Virtual time: turns of the wheel, one after the other.
fn virtually(
    flows: u32,
    timeout: Duration,
    precision: Duration,
    turns: usize,
    costs: &Costs,
) -> Result<Stepped> {
    let clock = Clock::virtual_ms();
    let mut bench = Bench::load(wanted(flows, timeout, precision).config(clock)?, clock)?;
    let all = bench.fresh(flows as usize);
    let portion = all.len().div_ceil(PORTIONS as usize);
    let (tick, span) = (precision.as_millis() as u64, timeout.as_millis() as u64);
    let start = 1_000_000;
    let mut now = start;
    let (mut begun, mut packets) = (0, Packets::default());
    let mut next = NEVER;
    // A tick: what comes in, and the stepper if it wakes up for this.
    let mut advance = |bench: &mut Bench, cost: &mut Cost| -> Result<()> {
        now += tick;
        bench.plane.set_clock(now)?;
        let portions = ((now - start) * u64::from(PORTIONS) / span) as usize;
        while begun < portions {
            let from = all.len().min(begun * portion);
            begun += 1;
            let end = all.len().min(begun * portion);
            bench.run("touch", Segment::Ack, &all[from..end])?;
            packets.come(bench, &all[..end], TOUCHES * portion)?;
        }
        // A flow that begins on an empty wheel wakes the stepper.
        if next != NEVER && now / tick < next {
            return Ok(());
        }
        let before = cpu_time()?;
        loop {
            let step = bench.plane.step(STEP_BUDGET)?;
            cost.visits += u64::from(step.visits);
            next = step.next;
            ensure!(step.expired == 0, "a live flow expired");
            if step.outcome == Outcome::Done as u32 {
                break;
            }
        }
        cost.cpu += cpu_time()? - before;
        cost.wakes += 1;
        Ok(())
    };
    let what = |what| format!("{flows} flows, {} s, {tick} ms: {what}", timeout.as_secs());
    for _ in progress::over(what("begin"), 0..(span / tick) as u32) {
        advance(&mut bench, &mut Cost::default())?;
    }
    let tracked = bench.plane.tracked()?;
    // Where timeouts reach into the next level, it is that level's slots that come one by one.
    let slot = u64::from(if span / tick < SLOTS.into() { 1 } else { SLOTS });
    let whole = if slot == 1 {
        SLOTS.into()
    } else {
        span / tick / slot * slot
    };
    let ticks = whole.min(u64::from(MOST_TIMEOUTS) * span / tick);
    let (mut shares, mut cost) = (Vec::new(), Cost::default());
    for _ in 0..turns {
        let mut turn = Cost::default();
        for _ in progress::over(what("live"), 0..ticks as u32) {
            advance(&mut bench, &mut turn)?;
        }
        let spent = turn.cpu.as_nanos() as f64 + turn.wakes as f64 * costs.wake;
        shares.push(spent / (ticks * tick) as f64 / 1e6);
        cost.visits += turn.visits;
        cost.wakes += turn.wakes;
    }
    bench.all_live(tracked, flows)?;
    let seconds = (turns as u64 * ticks * tick) as f64 / 1e3;
    Ok(Stepped {
        share: Figure::of(&shares),
        visits: cost.visits as f64 / seconds,
        wakes: cost.wakes as f64 / seconds,
    })
}

/// What was spent in a turn.
#[derive(Default)]
struct Cost {
    cpu: Duration,
    visits: u64,
    wakes: u64,
}

/// Passes over as many live flows, both kinds in turn.
fn sweeps() -> Result<Sweeps> {
    let mut peers = Peers::load(&["peer_lru", "peer_sweep"], &[("LRU", hash_entries(FLOWS))])?;
    let flows: Vec<_> = plane::addresses(0..FLOWS).collect();
    for flows in flows.chunks(PACKETS) {
        peers.run("peer_lru", Segment::Ack, flows)?;
    }
    // Nothing is idle for so long.
    let timeout = Clock::jiffies()?.units_ceil(Duration::from_secs(3600));
    let mut sweeper = Sweeper::new();
    let (mut kernel, mut batch) = (Vec::new(), Vec::new());
    let mut newest = 0;
    for pass in progress::over("sweeps", 0..PASSES + 1) {
        let (took, met, deleted) = sweep(&mut peers, timeout)?;
        ensure!(
            met == u64::from(FLOWS) && deleted == 0,
            "a sweep met {met} flows of {FLOWS} and deleted {deleted}"
        );
        let swept = sweeper.pass(peers.map("LRU")?, newest)?;
        ensure!(
            swept.met == u64::from(FLOWS) && swept.deleted == 0,
            "a batch sweep met {} flows of {FLOWS} and deleted {}",
            swept.met,
            swept.deleted
        );
        newest = swept.newest.saturating_sub(timeout);
        // The first warms up.
        if pass > 0 {
            kernel.push(took.as_secs_f64());
            batch.push(swept.cpu.as_secs_f64());
        }
    }
    // What is idle goes: in the kernel; and from userspace, whatever has come again.
    thread::sleep(Duration::from_millis(100));
    let (_, _, deleted) = sweep(&mut peers, 1)?;
    ensure!(
        deleted == u64::from(FLOWS),
        "a sweep deleted {deleted} flows of {FLOWS}"
    );
    for flows in flows.chunks(PACKETS) {
        peers.run("peer_lru", Segment::Ack, flows)?;
    }
    let swept = sweeper.pass(peers.map("LRU")?, u64::MAX)?;
    ensure!(
        swept.deleted == u64::from(FLOWS),
        "a batch sweep deleted {} flows of {FLOWS}",
        swept.deleted
    );
    Ok(Sweeps {
        kernel: Figure::of(&kernel),
        batch: Figure::of(&batch),
    })
}

/// One pass in the kernel: its time, flows met, flows deleted.
fn sweep(peers: &mut Peers, timeout: u64) -> Result<(Duration, u64, u64)> {
    let mut pass = Array::<_, [u64; 4]>::try_from(peers.map_mut("PASS")?)?;
    pass.set(0, [timeout, 0, 0, 0], 0)?;
    let took = peers.run("peer_sweep", Segment::Ack, &[0])?;
    let pass = Array::<_, [u64; 4]>::try_from(peers.map("PASS")?)?;
    let [_, _, met, deleted] = pass.get(&0, 0)?;
    Ok((took, met, deleted))
}

/// A timer of the kernel for each flow.
fn timers(report: &mut Report) -> Result<()> {
    report.say(&format!(
        "\nOne `bpf_timer` a flow, moved by every packet: nanoseconds a packet, median (least–most) of {ROUNDS} rounds \
         as in `touch`;\n`floor` is parser, lookup in the kernel's hash and a store.\n\
         {:>8}  {:>20}  {:>20}  {:>20}  {:<22}  timer/touch",
        "flows", "floor", "timer", "touch", "timer/floor"
    ));
    for flows in TIMED {
        let mut peers = load_timers(Duration::from_secs(3600))?;
        let clock = Clock::jiffies()?;
        let config = plane::config(clock, Duration::from_secs(3600), MOST_TIMED)?;
        let mut bench = Bench::load(config, clock)?;
        let all = bench.fresh(flows as usize);
        bench.run("floor_insert", Segment::Ack, &all)?;
        peers.run("peer_timer", Segment::Ack, &all)?;
        bench.run("touch", Segment::Ack, &all)?;
        let mut samples = plane::no_samples::<3>();
        for round in 0..ROUNDS + 1 {
            let order: Vec<_> = (0..PACKETS)
                .map(|_| all[bench.random.below(flows) as usize])
                .collect();
            let floor = bench.run("floor", Segment::Ack, &order)?;
            let timer = peers.run("peer_timer", Segment::Ack, &order)?;
            let touch = bench.run("touch", Segment::Ack, &order)?;
            if round > 0 {
                for (samples, took) in samples.iter_mut().zip([floor, timer, touch]) {
                    samples.push(took.as_nanos() as f64 / PACKETS as f64);
                }
            }
        }
        let [_, made, failed, errno] = timers_of(&peers)?;
        ensure!(
            made == u64::from(flows) && failed == 0,
            "{made} timers of {flows}, {failed} failed: {}",
            errno as i64
        );
        let ratios = [0, 2].map(|other| verdict(&plane::ratio(&samples, 1, other), None));
        let figures = samples.map(|samples| Figure::of(&samples));
        report.nanoseconds("expire", "timer", flows.into(), &figures[1]);
        report.say(&format!(
            "{flows:>8}  {}  {:<22}  {}",
            Figure::row(&figures),
            ratios[0],
            ratios[1]
        ));
    }
    // How many can be had, and that they fire.
    let mut peers = load_timers(Duration::from_secs(2))?;
    let flows: Vec<_> = plane::addresses(0..MOST_TIMED).collect();
    let mut had = Vec::new();
    for packet in 0..3 {
        if packet > 0 {
            thread::sleep(Duration::from_millis(200));
        }
        peers.run("peer_timer", Segment::Ack, &flows)?;
        had.push(timers_of(&peers)?[1].to_string());
    }
    let [_, made, failed, errno] = timers_of(&peers)?;
    thread::sleep(Duration::from_millis(2_500));
    let fired = peers.count("FIRED")?;
    ensure!(fired == made, "{fired} timers of {made} fired");
    report.say(&if failed == 0 {
        format!("{made} new flows in a row: each had its timer, and each timer fired.")
    } else {
        format!(
            "{MOST_TIMED} flows begin in a row: {} of them had a timer after the first packet, {} after the second, {} after \
             the third,\nwhich all fired. The others had none and would stay for ever: bpf_timer_init says {}. A timer is \
             allocated with the packet\nthat makes it, where the kernel may wait neither for memory nor for a lock.",
            had[0],
            had[1],
            had[2],
            Errno::from_raw(-(errno as i64) as i32)
        )
    });
    Ok(())
}

fn load_timers(timeout: Duration) -> Result<Peers> {
    let mut peers = Peers::load(&["peer_timer"], &[("TIMED", MOST_TIMED)])?;
    let mut timers = Array::<_, [u64; 4]>::try_from(peers.map_mut("TIMERS")?)?;
    timers.set(0, [timeout.as_nanos() as u64, 0, 0, 0], 0)?;
    Ok(peers)
}

/// Timeout, timers made, failures, the last one's errno.
fn timers_of(peers: &Peers) -> Result<[u64; 4]> {
    Ok(Array::<_, [u64; 4]>::try_from(peers.map("TIMERS")?)?.get(&0, 0)?)
}
