//! What the programs of the benches are run with: their object, the CPU, segments.

use std::fs;

use anyhow::{Context, Result};

/// The CPU that everything is measured on.
pub const CPU: u32 = 0;

/// The object in the file that an environment variable names.
pub fn object(variable: &str) -> Result<Vec<u8>> {
    let path = std::env::var_os(variable)
        .with_context(|| format!("{variable} is not set: run this through `cargo xtask bench`"))?;
    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// What the kernel's hash is made for that is to hold so many flows: a quarter more. It has a bucket for each entry, in
/// number rounded up to a power of two, so one that is made for just a power of two has buckets half as many. And an LRU
/// hash that is full pushes out whoever has not been looked up lately, dead or alive, and each CPU keeps some of the
/// free entries to itself.
pub fn hash_entries(flows: u32) -> u32 {
    flows + flows / 4
}

/// IPv4 and TCP without options or flags.
const SEGMENT: [u8; 54] = [
    0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x08, 0x00, // Ethernet
    0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 0, 192, 0, 2, 1, // IPv4
    0, 0, 1, 187, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0, 0, 0, 0, 0, 0, 0, // TCP
];

/// What a segment is.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// Of a flow that is established, or so when first seen.
    Ack,
    /// Of a flow that begins.
    Syn,
    /// The end of a connection that nobody knows: begins no flow.
    Absent,
    /// What the other side says to the first ACK.
    Reply,
    /// Data, up to so many steps from the connection's beginning.
    Data(u32),
}

/// What a packet of data brings that no packet of one step before has brought, …
const STEP: u32 = 100;
/// … and all that it brings: of the steps before, too, so that a flow that had no packet in those misses nothing.
const LENGTH: u16 = 60_000;

impl Segment {
    /// Without the flow's own end, which the programs write.
    pub fn bytes(self) -> [u8; SEGMENT.len()] {
        let mut segment = SEGMENT;
        match self {
            Self::Ack => segment[47] = 0x10,
            Self::Syn => segment[47] = 0x02,
            Self::Absent => {
                segment[37] = 188;
                segment[47] = 0x04;
            }
            Self::Reply => {
                segment[11] = 2;
                segment.copy_within(30..34, 26);
                segment.copy_within(36..38, 34);
                segment[47] = 0x10;
            }
            Self::Data(step) => {
                let seq = (STEP * step).wrapping_sub(LENGTH.into());
                segment[16..18].copy_from_slice(&(40 + LENGTH).to_be_bytes());
                segment[38..42].copy_from_slice(&seq.to_be_bytes());
                segment[47] = 0x10;
            }
        }
        segment
    }
}
