//! What retransmission timers cost steppers.

use std::{
    os::fd::{AsFd, AsRawFd},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Result, ensure};
use aya::maps::Map;
use nix::time::{ClockId, clock_gettime};
use serde_json::json;
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Load, OBJECT},
    flows::Flow,
    pins::Instance,
    plan,
    plan::receive,
    ring::Signals,
    settings::Settings,
    stepper::{Steppers, pin_to},
    timeouts::Timeouts,
};
use twheel_common::{
    counter::Counter,
    flow::{Direction, FlowKey},
    packet::{Segment, tcp::ACK},
    rto::{Limits, Rare, Timers, Timing},
};

use crate::{
    plan::stepper_time,
    report::{Figure, Report, verdict},
    size,
};

const FLOWS: u32 = size(100_000, 1_000);
const TICK: Duration = Duration::from_millis(10);
/// The interval at which each flow has an acknowledgment and more data, so that its timer starts
/// anew.
const PROGRESS: Duration = Duration::from_millis(100);
const WARM_UP: Duration = Duration::from_secs(size(2, 1));
const WATCHED: Duration = Duration::from_secs(size(8, 1));
/// Bytes in flight: more than are acknowledged one by one.
const DATA: u16 = 1_400;
/// Maximum fraction of a CPU that the steppers may take.
const BOUND: f64 = 0.15;

/// Measures real steppers in real time.
pub fn bench(report: &mut Report) -> Result<()> {
    report.say(&format!(
        "{FLOWS} flows with data in flight, all of one CPU, tick {} ms, a retransmission timeout of 200 ms that starts \
         anew every {} ms\n(which is written to the timers from another CPU, since packets would take all of one). \
         Measured: the CPU time (schedstat)\nof the steppers' threads in {} s.\n",
        TICK.as_millis(),
        PROGRESS.as_millis(),
        WATCHED.as_secs()
    ));
    let clock = Clock::jiffies()?;
    let hour = Duration::from_secs(3600);
    let wanted = Settings {
        tick: TICK,
        timeouts: Timeouts::new(hour, hour),
        max_flows: FLOWS,
        rto: true,
        ..Settings::default()
    };
    let load = Load::new(OBJECT, wanted.config(clock)?, clock);
    let instance = Instance::open(&[format!("bench-{}", std::process::id())])?;
    let result = DataPlane::load(&load, &instance).and_then(|plane| watch(plane, &instance));
    instance.remove()?;
    let (visits, share) = result?;
    report.say(&format!(
        "{visits:.0} visits a second, {:.1} % of one CPU: {}",
        share * 100.0,
        verdict(&Figure::from_samples(&[share]), Some(BOUND))
    ));
    report.object(&json!({
        "bench": "rto",
        "n": FLOWS,
        "visits_per_second": visits,
        "cpu_share": share,
    }));
    Ok(())
}

fn watch(mut plane: DataPlane, instance: &Instance) -> Result<(f64, f64)> {
    plane.pin_programs(instance)?;
    let mut events = plane.take_events()?;
    let signals = Arc::new(Signals::default());
    let steppers = Steppers::start(
        instance.pins(),
        plane.clock(),
        plane.config().tick,
        signals.clone(),
        None,
    )?;
    // Timers expire while the flows are made, but must not while steppers are watched.
    let expired = Arc::new(AtomicU64::new(0));
    thread::spawn({
        let expired = expired.clone();
        move || {
            let runtime = tokio::runtime::Builder::new_current_thread().build();
            let runtime = runtime.expect("a runtime needs nothing that a bench has not");
            let mut batch = Vec::new();
            // Until the process ends.
            loop {
                runtime.block_on(signals.filled());
                events.drain(&mut batch);
                signals.make_room();
                expired.fetch_add(batch.drain(..).count() as u64, Relaxed);
            }
        }
    });
    let timers = Mapped::open(plane.map("RTOS")?)?;
    let limits = Limits {
        min: plane.config().rto.min,
        max: plane.config().rto.max,
    };
    // The flows are on the wheel of CPU 1, where no packet comes in after these.
    pin_to(1)?;
    for flow in 0..FLOWS {
        receive(&mut plane, &segment(flow, 1, 0))?;
        receive(&mut plane, &answer(flow))?;
    }
    // The index of each flow's timers, and which of its sides is the client.
    let server = |flow: &Flow| flow.key.sender(Direction::FromLow).port() == 443;
    let indices: Vec<_> = plane
        .flows()?
        .iter()
        .map(|flow| (flow.index, usize::from(server(&flow))))
        .collect();
    ensure!(indices.len() == FLOWS as usize, "{} flows", indices.len());
    let said = |seq: u32, end: u32, ack: u32| Segment {
        key: FlowKey::default(),
        direction: Direction::FromLow,
        flags: ACK,
        seq,
        ack,
        end,
        bytes: 50,
        stamp: [0; 2],
        window: 1,
        packets: 1,
    };
    // A round trip of a millisecond. Then more data is in flight.
    for (index, direction) in &indices {
        timers.with(*index, *direction, |side| {
            let rare = Rare::default();
            let timing = Timing {
                limits,
                now: micros,
            };
            side.sent(&rare, 1, &said(1, 2, 1), timing);
            side.acknowledged(&rare, 2, &said(0, 0, 2), || micros() + 1_000);
        });
    }
    for flow in 0..FLOWS {
        receive(&mut plane, &segment(flow, 1, DATA))?;
    }
    steppers.call(1);
    pin_to(0)?;
    let progress = |until: Instant| {
        let begun = Instant::now();
        for round in 1.. {
            for (index, direction) in &indices {
                timers.with(*index, *direction, |side| {
                    let ack = side.una.get() + 1;
                    side.acknowledged(
                        &Rare::default(),
                        1 + u32::from(DATA),
                        &said(0, 0, ack),
                        micros,
                    );
                });
            }
            let due = begun + PROGRESS * round;
            if due > until {
                break;
            }
            thread::sleep(due.saturating_duration_since(Instant::now()));
        }
    };
    progress(Instant::now() + WARM_UP);
    let visits = |plane: &DataPlane| anyhow::Ok(plane.counters()?.get(Counter::Visits));
    let early = expired.load(Relaxed);
    let (before, cpu, since) = (visits(&plane)?, stepper_time()?, Instant::now());
    progress(since + WATCHED);
    let (visits, cpu, seconds) = (
        visits(&plane)? - before,
        stepper_time()? - cpu,
        since.elapsed().as_secs_f64(),
    );
    steppers.stop()?;
    let late = expired.load(Relaxed) - early;
    ensure!(visits > u64::from(FLOWS), "the flows were hardly visited");
    ensure!(
        late == 0,
        "{late} timers expired: this machine is too slow for this"
    );
    Ok((visits as f64 / seconds, cpu.as_secs_f64() / seconds))
}

/// A segment with data.
fn segment(flow: u32, seq: u32, length: u16) -> Vec<u8> {
    let mut segment = plan::segment(flow).to_vec();
    segment[16..18].copy_from_slice(&(40 + length).to_be_bytes());
    segment[38..42].copy_from_slice(&seq.to_be_bytes());
    // An open window.
    segment[48] = 4;
    segment.resize(54 + usize::from(length), 0);
    segment
}

/// A segment of the other side; without it there are no timers.
fn answer(flow: u32) -> Vec<u8> {
    let mut segment = segment(flow, 0, 0);
    let (source, destination) = segment[26..34].split_at_mut(4);
    source.swap_with_slice(destination);
    let (source, destination) = segment[34..38].split_at_mut(2);
    source.swap_with_slice(destination);
    segment
}

/// The clock of the timers.
fn micros() -> u32 {
    let now = clock_gettime(ClockId::CLOCK_MONOTONIC).map(Duration::from);
    now.unwrap_or_default().as_micros() as u32
}

/// The map `RTOS`, which the data plane also uses.
struct Mapped {
    timers: *mut Timers,
    count: u32,
}

impl Mapped {
    fn open(map: &Map) -> Result<Self> {
        let Map::Array(data) = map else {
            anyhow::bail!("RTOS is no array");
        };
        let count = data.info()?.max_entries();
        // SAFETY: a new mapping of a map that can be mapped; it lives as long as the process.
        let timers = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                count as usize * size_of::<Timers>(),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                data.fd().as_fd().as_raw_fd(),
                0,
            )
        };
        ensure!(timers != libc::MAP_FAILED, "cannot map RTOS");
        Ok(Self {
            timers: timers.cast(),
            count,
        })
    }

    /// Changes a side, as a CPU does that processes its packets.
    fn with(&self, index: u32, direction: usize, change: impl FnOnce(&twheel_common::rto::Side)) {
        assert!(index < self.count && direction < 2);
        // SAFETY: within the mapping. The data plane reads and writes there, too, each field as a
        // whole.
        change(unsafe { &(*self.timers.add(index as usize)).sides[direction] });
    }
}
