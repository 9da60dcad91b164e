//! The CPU time that it takes to find idle flows.

mod steppers;
mod sweeps;
mod timers;

use std::time::Duration;

use anyhow::{Context, Result};
use serde_json::json;
use twheel::{
    plan::{Costs, calibrate},
    progress,
};

use self::{
    steppers::{MOST_TIMEOUTS, Stepped, TOUCHES, predict, virtually, watch},
    sweeps::{PASSES, Sweeps, sweeps},
    timers::timers,
};
use crate::{
    batch::Sweeper,
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
/// The precision and timeout that have a bound, and the fraction of a CPU that they may take.
const BOUND: (Duration, Duration, f64) = (PRECISIONS[1], TIMEOUTS[1], 0.008);
/// How many times as much a sweep in the kernel takes, at least.
const SWEEP: f64 = 100.0;

/// Turns of the wheel that are measured at that point, one after the other.
const TURNS: usize = size(5, 1);

/// Measures steppers, sweeps and timers.
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
    let sweeps = sweeps(FLOWS)?;
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
    // The more expensive of the two.
    let share = stepping(FLOWS, timeout, precision)?.max(real.share.median);
    let times = of_sweep(&sweeps.kernel, precision) / share;
    let least = times * sweeps.kernel.min / sweeps.kernel.median;
    report.say(&format!(
        "\nAt {} s and {} ms: {} % of one CPU; the sweep in the kernel takes {times:.0} times that (its fastest pass \
         {least:.0};\n{} {SWEEP}), the one from userspace {:.0} times.",
        timeout.as_secs(),
        precision.as_millis(),
        verdict(&Figure::from_samples(&[share * 100.0]), Some(most * 100.0)),
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

/// The costs on this machine: the median of three, because a disturbed wake-up costs many times as
/// much.
fn costs() -> Result<Costs> {
    let mut all = Vec::new();
    for _ in progress::over("calibrating", 0..3) {
        all.push(calibrate(FLOWS.into())?);
    }
    let median = |of: fn(&Costs) -> f64| {
        Figure::from_samples(&all.iter().map(of).collect::<Vec<_>>()).median
    };
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
