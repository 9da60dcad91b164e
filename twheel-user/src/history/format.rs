//! The format of a history on disk: segments, headers, records.

use std::{
    fs,
    path::{Path, PathBuf},
};

use crate::pins::path::refused;
use anyhow::{Context, Result};
use twheel_common::event::Event;

use crate::failure::{Failure, Kind};

pub(super) const MAGIC: [u8; 8] = *b"twheel\0h";
/// Must change whenever [`Event`] changes.
pub(super) const VERSION: u32 = 7;
pub(super) const HEADER: usize = 32;
pub(super) const BODY: usize = size_of::<Event>();
/// Bytes of a record before its body.
pub(super) const HEAD: usize = 28;
pub(super) const RECORD: usize = HEAD + BODY;
pub(super) const SEGMENTS: u64 = 8;
/// The smallest maximum size that makes sense: a thousand events per segment.
pub const LEAST_BYTES: u64 = SEGMENTS * 1024 * RECORD as u64;

/// The year 9999, in microseconds since 1970: no event is later.
pub(super) const LATEST: u64 = 253_370_764_800_000_000;

/// An event of a flow.
pub(super) const FLOW: u32 = 1;
pub(super) const NAME: u32 = 2;
pub(super) const LOST: u32 = 3;
pub(super) const RTO: u32 = 4;
pub(super) const REAPED: u32 = 5;
pub(super) const RUN: u32 = 6;
pub(super) const NAT: u32 = 9;
pub(super) const OWNER: u32 = 10;

/// In a [`NAME`], a rule has its own number; an interface has its index plus this,
pub(super) const IFACE: u32 = 1 << 16;
/// and a zone has its index plus this.
pub(super) const ZONE: u32 = 2 << 16;
/// The host's name,
pub(super) const HOST: u32 = 3 << 16;
/// the instance's,
pub(super) const INSTANCE: u32 = HOST + 1;
/// and the seed of its flows' numbers, in hexadecimal: see [`Identity`](crate::identity::Identity).
pub(super) const SEED: u32 = HOST + 2;

/// How to read the numbers in a segment's events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    /// Nanoseconds in a clock unit.
    pub(super) unit_ns: u32,
    /// Only one side of each flow is ever seen.
    pub(super) one_way: bool,
}

impl Header {
    pub(super) fn bytes(self) -> [u8; HEADER] {
        let mut bytes = [0; HEADER];
        bytes[..8].copy_from_slice(&MAGIC);
        for (at, word) in [VERSION, RECORD as u32, self.unit_ns, self.one_way.into()]
            .into_iter()
            .enumerate()
        {
            bytes[8 + 4 * at..][..4].copy_from_slice(&word.to_ne_bytes());
        }
        let checksum = crc32fast::hash(&bytes[..HEADER - 4]);
        bytes[HEADER - 4..].copy_from_slice(&checksum.to_ne_bytes());
        bytes
    }

    /// # Errors
    ///
    /// The file is not a history, or one of another version.
    pub(super) fn read(bytes: &[u8; HEADER], path: &Path) -> Result<Self> {
        let word = |at: usize| u32_at(bytes, 8 + 4 * at);
        let failure = |what: &str| {
            Failure::new(
                Kind::Other,
                format!(
                    "{} {what}: move the file away to read the rest of the history",
                    path.display()
                ),
            )
        };
        if bytes[..8] != MAGIC {
            return Err(failure("is not a history of twheel").into());
        }
        if (word(0), word(1)) != (VERSION, RECORD as u32) {
            return Err(failure("was written by another version of twheel").into());
        }
        if crc32fast::hash(&bytes[..HEADER - 4]) != u32_at(bytes, HEADER - 4) {
            return Err(failure("is damaged at its beginning").into());
        }
        Ok(Self {
            unit_ns: word(2),
            one_way: word(3) != 0,
        })
    }
}

pub(super) fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}

pub(super) fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(word)
}

/// The segments of a history, oldest first, by number.
pub(super) fn segments(directory: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let context = || format!("cannot list {}", directory.display());
    let mut found = Vec::new();
    let listed = fs::read_dir(directory).map_err(|error| refused(error.into(), directory));
    for entry in listed? {
        let path = entry.with_context(context)?.path();
        let number = path.file_name().and_then(|name| {
            let number = name.to_str()?.strip_suffix(".history")?;
            number.parse().ok()
        });
        found.extend(number.map(|number| (number, path)));
    }
    found.sort();
    Ok(found)
}

/// Whether a record's checksum matches.
pub(super) fn is_whole(record: &[u8]) -> bool {
    crc32fast::hash(&record[4..]) == u32_at(record, 0)
}
