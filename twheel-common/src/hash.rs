//! Where to look for a key in the table: its home and its fingerprint.

use crate::{
    key::FlowKey,
    record::{DISTANCE, LINE, WINDOW},
};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The secrets that make the home of a key unpredictable, and the size of the table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Hash {
    /// Secret random numbers.
    pub keys: [u64; 11],
    /// Number of lines that are homes; at least [`WINDOW`] / [`LINE`] − 1 more lines follow them.
    pub homes: u64,
}

/// Where to look for a flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// Index of the first record of its home.
    pub home: u32,
    /// Its fingerprint.
    pub fingerprint: u64,
}

impl Hash {
    /// For a table of this capacity: a line, two records, for each flow.
    pub fn new(keys: [u64; 11], max_flows: u32) -> Self {
        let homes = u64::from(max_flows).max(64);
        Self { keys, homes }
    }

    /// Number of lines of the table.
    pub const fn lines(&self) -> u64 {
        self.homes + (WINDOW / LINE) as u64 - 1
    }

    /// Number of records of the table.
    pub const fn records(&self) -> u64 {
        self.lines() * LINE as u64
    }

    /// The home of a key, and its fingerprint.
    ///
    /// Multilinear hashing in pairs (Lemire & Kaser, *Strongly universal string hashing is fast*,
    /// 2014): without the secrets nobody can construct collisions, whatever the addresses and
    /// ports. But the hash is linear, and one secret in fifty places consecutive addresses or ports
    /// side by side. So a permutation scrambles its upper 32 bits, which keeps the first property.
    #[inline(always)]
    pub fn place(&self, key: &FlowKey) -> Place {
        let [k, a, b, c, d, e, f, g, h, i, j] = self.keys;
        let words = key.addresses();
        let pair = |x: u64, k: u64, l: u64| {
            k.wrapping_add(x & 0xffff_ffff)
                .wrapping_mul(l.wrapping_add(x >> 32))
        };
        let sum = k
            .wrapping_add(pair(words[0], a, b))
            .wrapping_add(pair(words[1], c, d))
            .wrapping_add(pair(words[2], e, f))
            .wrapping_add(pair(words[3], g, h))
            .wrapping_add(pair(key.ports(), i, j));
        let mut hash = (sum >> 32) as u32;
        hash ^= hash >> 15;
        hash = hash.wrapping_mul(0x2c1b_3c6d);
        hash ^= hash >> 12;
        let line = (u64::from(hash).wrapping_mul(self.homes) >> 32) as u32;
        Place {
            home: line * LINE,
            fingerprint: sum >> (64 - DISTANCE) | 1,
        }
    }
}
