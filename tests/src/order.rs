//! Test runs over packets of chosen flows: `twheel-ebpf/src/bench/packets.rs`.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use aya::{
    maps::{Array, Map, MapData},
    programs::{TestRun, TestRunOptions, Xdp},
};

use crate::plane::PASS;

/// Packets of one run: so many that its beginning and end do not matter, and so few (4 ms) that the
/// machine is in the same state for all programs of a round. The programs use the same number.
pub const PACKETS: usize = 1 << 13;

/// The flows of the next packets, for each CPU: their number, and the source address of each as it
/// appears in the frame (its low half is also the port).
pub struct Order(Array<MapData, [u32; 1 + PACKETS]>);

impl Order {
    /// Opens the map `ORDER` of an object.
    pub fn open(map: &Map) -> Result<Self> {
        let Map::Array(map) = map else {
            anyhow::bail!("ORDER is no array");
        };
        let map = MapData::from_id(map.info()?.id()).context("cannot open ORDER")?;
        Ok(Self(Map::Array(map).try_into()?))
    }

    /// Runs a program over a packet of each of these flows, on this thread's CPU. Returns the
    /// kernel's time for it.
    pub fn run(
        &mut self,
        program: &Xdp,
        cpu: u32,
        frame: &[u8],
        flows: &[u32],
    ) -> Result<Duration> {
        let mut duration = Duration::ZERO;
        for flows in flows.chunks(PACKETS) {
            let mut entry = [0; 1 + PACKETS];
            entry[0] = flows.len() as u32;
            entry[1..=flows.len()].copy_from_slice(flows);
            self.0.set(cpu, entry, 0).context("cannot write ORDER")?;
            let result = program
                .test_run(TestRunOptions {
                    data_in: Some(frame),
                    ..TestRunOptions::new()
                })
                .context("cannot run over packets")?;
            ensure!(
                result.return_value == PASS,
                "a program met a packet that it should not have met"
            );
            duration += result.duration;
        }
        Ok(duration)
    }
}
