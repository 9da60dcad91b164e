//! Compares what `twheel plan` predicts with what steppers take.

use std::{
    fs,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Load, OBJECT},
    pins::Instance,
    plan::{Demand, Plan, calibrate, see},
    settings::Settings,
    stepper::{Steppers, pin_to},
    timeouts::Timeouts,
};
use twheel_common::{counter::Counter, wheel::WheelScheme};

use crate::{report::Report, size};

const FLOWS: u32 = size(1 << 17, 1 << 12);
const TIMEOUT: Duration = Duration::from_secs(size(4, 2));
const TICK: Duration = Duration::from_millis(20);
/// How long steppers are watched, once all flows have had their first timer visit.
const WATCHED: Duration = Duration::from_secs(size(8, 1));
/// The interval between packets of a flow.
const TOUCHED: Duration = Duration::from_millis(500);
/// Maximum factor between prediction and measurement, either way.
const FACTOR: f64 = 1.5;

/// A wheel for each scheme; the hashed one turns three times in a timeout.
const SHAPES: [(WheelScheme, u32); 3] = [
    (WheelScheme::Simple, 256),
    (WheelScheme::Hashed, 64),
    (WheelScheme::Hierarchical, 64),
];

/// Measures all schemes in real time, with real steppers.
pub fn bench(report: &mut Report) -> Result<()> {
    let costs = calibrate(FLOWS.into())?;
    report.say(&format!(
        "{FLOWS} busy flows, timeout {} s, tick {} ms. Predicted: `twheel plan --calibrate`, a visit {:.0} ns, a wake-up \
         {:.1} µs.\nMeasured: the CPU time (schedstat) that the steppers' threads take in {} s while each flow has a \
         packet every {} ms.\n",
        TIMEOUT.as_secs(),
        TICK.as_millis(),
        costs.visit,
        costs.wake / 1000.0,
        WATCHED.as_secs(),
        TOUCHED.as_millis(),
    ));
    report.say(&format!(
        "{:<13} {:>6} {:>6}  {:>10} {:>10}  {:>10} {:>10}  measured/predicted",
        "scheme", "levels", "slots", "visits/s", "predicted", "of one CPU", "predicted"
    ));
    for (scheme, slots) in SHAPES {
        let clock = Clock::jiffies()?;
        let config = Settings {
            tick: TICK,
            timeouts: Timeouts::new(TIMEOUT, TIMEOUT),
            max_flows: FLOWS,
            scheme,
            slots: Some(slots),
            levels: None,
            ..Settings::default()
        }
        .config(clock)?;
        // All flows begin on one CPU.
        let demand = Demand::new(FLOWS, 1, &config, clock);
        let predicted = Plan::new(config.0.geometry, &demand, &costs).context("no plan")?;
        let instance = Instance::open(&[format!("bench-{}", std::process::id())])?;
        let result = DataPlane::load(&Load::new(OBJECT, config, clock), &instance)
            .and_then(|plane| watch(plane, &instance));
        instance.remove()?;
        let (visits, share) = result?;
        let ratio = share / predicted.share;
        let verdict = if (1.0 / FACTOR..=FACTOR).contains(&ratio) {
            "within"
        } else {
            "BEYOND"
        };
        report.say(&format!(
            "{:<13} {:>6} {slots:>6}  {visits:>10.0} {:>10.0}  {:>8.3} % {:>8.3} %  {ratio:.2} ({verdict} a factor of {FACTOR})",
            scheme.name(),
            config.0.geometry.levels,
            predicted.visits,
            share * 100.0,
            predicted.share * 100.0,
        ));
        report.object(&json!({
            "bench": "plan",
            "variant": scheme.name(),
            "n": FLOWS,
            "visits_per_second": visits,
            "visits_per_second_predicted": predicted.visits,
            "cpu_share": share,
            "cpu_share_predicted": predicted.share,
        }));
    }
    Ok(())
}

/// Timer visits per second, and the fraction of a CPU that steppers take.
fn watch(mut plane: DataPlane, instance: &Instance) -> Result<(f64, f64)> {
    plane.pin_programs(instance)?;
    let mut events = plane.take_events()?;
    let steppers = Steppers::start(
        instance.pins(),
        plane.clock(),
        plane.config().tick,
        Arc::default(),
        None,
    )?;
    // The flows are on the wheel of CPU 1, where no packet touches them.
    pin_to(1)?;
    for flow in 0..FLOWS {
        see(&mut plane, flow)?;
    }
    steppers.call(1);
    pin_to(0)?;
    let turn = |plane: &mut DataPlane, until: Instant| -> Result<()> {
        let mut flow = 0u32;
        let begun = Instant::now();
        while Instant::now() < until {
            for _ in 0..FLOWS / 200 {
                see(plane, flow.wrapping_mul(0x9e37_79b1) % FLOWS)?;
                flow = flow.wrapping_add(1);
            }
            let due = begun + TOUCHED * (flow / (FLOWS / 200)) / 200;
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
        Ok(())
    };
    let begun = Instant::now();
    turn(&mut plane, begun + TIMEOUT + Duration::from_secs(1))?;
    let (visits, cpu, since) = (visits(&plane)?, stepper_time()?, Instant::now());
    turn(&mut plane, since + WATCHED)?;
    let (visits, cpu, seconds) = (
        self::visits(&plane)? - visits,
        stepper_time()? - cpu,
        since.elapsed().as_secs_f64(),
    );
    steppers.stop()?;
    let mut ended = Vec::new();
    events.drain(&mut ended);
    ensure!(
        ended.is_empty(),
        "a busy flow expired: this machine is too slow for this"
    );
    Ok((visits as f64 / seconds, cpu.as_secs_f64() / seconds))
}

fn visits(plane: &DataPlane) -> Result<u64> {
    Ok(plane.counters()?.get(Counter::Visits))
}

/// CPU time of this process's stepper threads.
pub fn stepper_time() -> Result<Duration> {
    Ok(stepper_stats()?.0)
}

/// The same, and how often they were scheduled, which is once per wake-up.
pub fn stepper_stats() -> Result<(Duration, u64)> {
    let (mut time, mut runs) = (0, 0);
    for task in fs::read_dir("/proc/self/task")? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))?.starts_with("twheel-step") {
            let schedstat = fs::read_to_string(task.join("schedstat"))?;
            let mut fields = schedstat.split_whitespace().map(str::parse::<u64>);
            let mut next = || fields.next().context("schedstat");
            time += next()??;
            next()??;
            runs += next()??;
        }
    }
    Ok((Duration::from_nanos(time), runs))
}
