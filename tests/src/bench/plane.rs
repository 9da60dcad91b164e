//! A data plane of the bench's own, loaded as production loads it and attached to nothing.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use twheel::{
    clock::Clock,
    data_plane::{DataPlane, Load},
    pins::Instance,
    settings::Wanted,
    stepper::pin_to,
};
use twheel_common::config::Config;

/// The CPU that everything is measured on.
const CPU: u32 = 0;
/// IPv4 and TCP without options, the flags ACK alone: a flow that is established when first seen.
const SEGMENT: [u8; 54] = [
    0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x08, 0x00, // Ethernet
    0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 0, 192, 0, 2, 1, // IPv4
    0, 0, 1, 187, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0x10, 0, 0, 0, 0, 0, 0, // TCP
];

/// The segment of a flow, numbered below 2^24.
pub fn segment(flow: u32) -> [u8; SEGMENT.len()] {
    let mut segment = SEGMENT;
    // As the generator of `twheel-ebpf/src/bench.rs` does.
    segment[26..30].copy_from_slice(&(flow << 8 | 10).to_ne_bytes());
    segment[34..36].copy_from_slice(&(flow as u16).to_ne_bytes());
    segment
}

/// The object in the file that an environment variable names.
pub fn object(variable: &str) -> Result<Vec<u8>> {
    let path = std::env::var_os(variable)
        .with_context(|| format!("{variable} is not set: run this through `cargo xtask bench`"))?;
    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Configuration with these timeouts, else as production has it by default.
pub fn config(
    clock: Clock,
    timeout: Duration,
    close_timeout: Option<Duration>,
    max_flows: u32,
) -> Result<Config> {
    Wanted {
        tick: Duration::from_millis(100),
        timeout,
        close_timeout,
        max_flows,
    }
    .config(clock)
}

/// Loads an object, with this thread on [`CPU`]. Its pins are gone when this returns.
pub fn load(object: &[u8], config: Config, clock: Clock) -> Result<DataPlane> {
    pin_to(CPU)?;
    let instance = Instance::open(&[format!("bench-{}", std::process::id())])?;
    let plane = DataPlane::load(
        &Load {
            object,
            config,
            clock,
            ring_bytes: 16 << 20,
            log_level: 0,
        },
        &instance,
    );
    let removed = instance.remove();
    let plane = plane?;
    removed.context("cannot remove the bench's pins")?;
    Ok(plane)
}
