//! Inputs of the benchmarks' programs: their object, the CPU, segments.

use std::fs;

use anyhow::{Context, Result};

/// The CPU on which everything is measured.
pub const CPU: u32 = 0;

/// The object in the file that an environment variable names.
pub fn object(variable: &str) -> Result<Vec<u8>> {
    let path = std::env::var_os(variable)
        .with_context(|| format!("{variable} is not set: run this through `cargo xtask bench`"))?;
    fs::read(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// Capacity of a kernel hash map that is to hold this many flows: a quarter more. The map has a
/// bucket per entry, rounded up to a power of two, so a map made for exactly a power of two has
/// half as many buckets. And a full LRU hash evicts flows that have not been looked up lately, live
/// or not, while each CPU keeps some of the free entries to itself.
pub fn hash_entries(flows: u32) -> u32 {
    flows + flows / 4
}

/// IPv4 and TCP without options or flags.
const SEGMENT: [u8; 54] = [
    0x02, 0, 0, 0, 0, 2, 0x02, 0, 0, 0, 0, 1, 0x08, 0x00, // Ethernet
    0x45, 0, 0, 40, 0, 0, 0, 0, 64, 6, 0, 0, 10, 0, 0, 0, 192, 0, 2, 1, // IPv4
    0, 0, 1, 187, 0, 0, 0, 0, 0, 0, 0, 0, 0x50, 0, 0, 0, 0, 0, 0, 0, // TCP
];

/// The kind of a segment.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Segment {
    /// Belongs to an established flow; a flow first seen with it is established.
    Ack,
    /// Begins a flow.
    Syn,
    /// The end of an unknown connection: begins no flow.
    Absent,
    /// The other side's answer to the first ACK.
    Reply,
    /// Data, up to this many steps from the beginning of the connection.
    Data(u32),
}

/// How many new bytes a data packet carries compared with that of one step before, …
const STEP: u32 = 100;
/// … and how many it carries in all. It repeats bytes of earlier steps, so that a flow that had no
/// packet in those misses nothing.
const LENGTH: u16 = 60_000;

impl Segment {
    /// Without the flow's own endpoint, which the programs fill in.
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
