//! Quotas of a full table: which sources hold more than their quota, and which of their flows are
//! evicted first.
//!
//! Userspace counts and writes these, once the packet path has found the table full of established
//! flows; the packet path reads them only then. The numbers are as old as the scan took, and expire
//! after [`LASTS`] seconds.

#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// In the ring of calls, in place of a CPU's number: the table is full of established flows.
pub const CALL: u64 = u64::MAX;
/// How long the counts are valid, in seconds. The packet path calls again after one second, as long
/// as new flows need capacity.
pub const LASTS: u64 = 10;
/// Most sources that can be over their quota at once: with a quota of 1 % a hundred can, and twice
/// as many if flows count for both their ends.
pub const MAX_OVER_QUOTA: u32 = 256;
/// How many flows of over-quota sources each CPU can evict between two scans; a power of two.
pub const VICTIMS: usize = 2048;

/// A source that holds more than its quota.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct OverQuota {
    /// Flows above its quota, which may be evicted. Signed, because CPUs that take the last one at
    /// the same time make it negative.
    pub excess: i64,
    /// In clock units: after this time the source no longer counts as over its quota.
    pub until: u64,
}

/// Flows of over-quota sources on one CPU's wheel, those that were idle for longest first.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Victims {
    /// The next flow to evict.
    pub next: u32,
    /// The number of flows.
    pub count: u32,
    /// Indices of the flows' records. A record may hold another flow by now, so check its source.
    pub flows: [u32; VICTIMS],
}

impl Default for Victims {
    fn default() -> Self {
        Self {
            next: 0,
            count: 0,
            flows: [0; VICTIMS],
        }
    }
}

/// The source that an address counts for, as a key has it: an IPv4 address itself; for IPv6 the
/// network of 64 bits, because one host can have all of its addresses.
#[inline(always)]
pub fn source([network, host]: [u64; 2]) -> [u64; 2] {
    // IPv4 is mapped into IPv6: its first eight bytes are 0.
    if network == 0 {
        [network, host]
    } else {
        [network, 0]
    }
}
