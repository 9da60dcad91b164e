//! A kernel timer for each flow.

use std::{thread, time::Duration};

use anyhow::{Result, ensure};
use aya::maps::Array;
use nix::errno::Errno;
use twheel::clock::Clock;
use twheel_tests::order::PACKETS;

use crate::{
    inputs::Segment,
    peers::Peers,
    plane::{self, Bench},
    report::{Figure, Report, verdict},
    size,
};

/// Numbers of flows, each with a timer.
const TIMED: [u32; 2] = [1, 64];
/// The most flows that are tried.
const MOST_TIMED: u32 = 1 << 16;
const ROUNDS: u32 = size(31, 1);

/// Measures a kernel timer for each flow.
pub fn timers(report: &mut Report) -> Result<()> {
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
        let figures = samples.map(|samples| Figure::from_samples(&samples));
        report.nanoseconds("expire", "timer", flows.into(), &figures[1]);
        report.say(&format!(
            "{flows:>8}  {}  {:<22}  {}",
            Figure::row(&figures),
            ratios[0],
            ratios[1]
        ));
    }
    // Find out how many timers there can be, and that they fire.
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

/// Timeout, timers made, failures, errno of the last failure.
fn timers_of(peers: &Peers) -> Result<[u64; 4]> {
    Ok(Array::<_, [u64; 4]>::try_from(peers.map("TIMERS")?)?.get(&0, 0)?)
}
