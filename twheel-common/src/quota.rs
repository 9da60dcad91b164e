//! Quotas of a full table: which sources hold more than theirs, and which of their flows go when others want room.
//!
//! Userspace counts and writes, when the packet path has found the table full of established flows; the packet path
//! reads only then. What it reads is old by as long as the scan took, and is forgotten after [`LASTS`] seconds.

/// In the ring of calls, in the place of a CPU's number: the table is full of established flows.
pub const CALL: u64 = u64::MAX;
/// How long what was counted is good for, seconds. The packet path calls again after one, as long as somebody wants room.
pub const LASTS: u64 = 10;
/// Sources that can hold too much at once: with a quota of 1 % a hundred can, and twice as many where flows count for
/// both their ends.
pub const MAX_OVER_QUOTA: u32 = 256;
/// Flows of theirs that each CPU can give up between two scans; a power of two.
pub const VICTIMS: usize = 2048;

/// A source that holds more than its quota.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OverQuota {
    /// Flows above its quota: so many may go. Signed, since CPUs that take the last one at once go below.
    pub excess: i64,
    /// Clock units: after this it is not known to hold too much.
    pub until: u64,
}

/// Flows of such sources, on one CPU's wheel: those first that were idle for longest.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct Victims {
    /// The next to go.
    pub next: u32,
    /// How many there are.
    pub count: u32,
    /// Where they stand in the table, or stood: who takes one looks whose it is.
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

/// Who answers for an address, as a key has it: an IPv4 address itself, an IPv6 address's network of 64 bits, of which
/// one host can have all addresses.
#[inline(always)]
pub fn source([network, host]: [u64; 2]) -> [u64; 2] {
    // IPv4 is mapped into IPv6: its first eight bytes are 0.
    if network == 0 {
        [network, host]
    } else {
        [network, 0]
    }
}
