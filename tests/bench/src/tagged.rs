//! What VLAN tags in a frame cost the data plane's program.

use anyhow::{Context, Result, ensure};
use aya::programs::{TestRun, TestRunOptions};
use twheel::{
    clock::Clock,
    data_plane::{self, DataPlane},
};
use twheel_common::counter::Counter;

use crate::{
    inputs::Segment,
    plane,
    report::{Figure, Report, verdict},
    size,
};

/// The tags of the frame.
const TAGS: [(&str, &[u8]); 3] = [
    ("no tag", &[]),
    ("one tag", &[0x81, 0, 0, 7]),
    ("two tags", &[0x88, 0xa8, 0, 9, 0x81, 0, 0, 7]),
];
/// Runs of a program over a frame per round.
const PACKETS: u32 = size(1 << 18, 1 << 8);
/// `XDP_PASS`.
const PASS: u32 = 2;

/// Nanoseconds for one frame, again and again.
pub fn bench(rounds: u32, report: &mut Report) -> Result<()> {
    let clock = Clock::jiffies()?;
    let mut planes = Vec::new();
    for (ways, vlans) in [("--vlan key", 1), ("--vlan ignore", 0)] {
        let mut config = plane::config(clock, std::time::Duration::from_secs(3600), 1 << 16)?;
        config.0.vlans = vlans;
        planes.push((ways, plane::load(data_plane::OBJECT, config, clock)?));
    }
    let mut samples = vec![vec![Vec::new(); TAGS.len()]; planes.len()];
    for _ in 0..rounds {
        for ((_, plane), samples) in planes.iter_mut().zip(&mut samples) {
            for ((_, tag), samples) in TAGS.iter().zip(samples) {
                samples.push(run(plane, tag)?);
            }
        }
    }
    report.say(&format!(
        "\nA frame of one flow, again and again, by `twheel_xdp` as production loads it (the kernel's loop is in all of \
         them):\n{:>10}  {:>20}  {:>20}  key/ignore",
        "", planes[0].0, planes[1].0
    ));
    for (number, (name, _)) in TAGS.iter().enumerate() {
        let [key, ignore] = [0, 1].map(|way: usize| &samples[way][number]);
        let ratios: Vec<_> = key
            .iter()
            .zip(ignore)
            .map(|(key, other)| key / other)
            .collect();
        let figures = [Figure::from_samples(key), Figure::from_samples(ignore)];
        report.say(&format!(
            "{name:>10}  {}  {}",
            Figure::row(&figures),
            verdict(&Figure::from_samples(&ratios), None)
        ));
        report.nanoseconds("touch", &name.replace(' ', "_"), 1, &figures[0]);
    }
    for (_, plane) in &planes {
        let touched = plane.counters()?.get(Counter::Touched);
        let packets = u64::from(PACKETS * rounds) * TAGS.len() as u64;
        ensure!(
            touched + 4 >= packets,
            "of {packets} packets {touched} were of a known flow"
        );
    }
    Ok(())
}

fn run(plane: &mut DataPlane, tag: &[u8]) -> Result<f64> {
    let mut frame = Segment::Ack.bytes().to_vec();
    frame.splice(12..12, tag.iter().copied());
    let result = plane
        .xdp("twheel_xdp")?
        .test_run(TestRunOptions {
            data_in: Some(&frame),
            repeat: PACKETS,
            ..TestRunOptions::new()
        })
        .context("cannot run over a frame")?;
    ensure!(result.return_value == PASS, "a packet does not pass");
    Ok(result.duration.as_nanos() as f64)
}
