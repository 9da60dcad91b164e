//! The segments of a history that is being written: begins and continues them, and removes the
//! oldest as the maximum size is reached.

use std::{
    collections::{HashMap, VecDeque},
    fs::{self, File, OpenOptions},
    io::Write,
    mem,
    os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt},
    path::{Path, PathBuf},
    time::SystemTime,
};

use anyhow::{Context, Result};
use nix::fcntl::OFlag;
use twheel_common::config::NAME_BYTES;

use super::format::{
    BODY, FLOW, HEAD, HEADER, Header, LEAST_BYTES, LOST, NAME, RECORD, RTO, SEGMENTS, is_whole,
    segments, u32_at, u64_at,
};
use super::record::{Body, since_1970};

/// The default maximum size of a history: 64 MiB.
pub const DEFAULT_BYTES: u64 = 64 << 20;

/// A history that is being written.
pub(super) struct Log {
    directory: PathBuf,
    header: Header,
    /// Maximum size of a segment, in bytes.
    segment: u64,
    /// All segments; the last one is written to.
    segments: VecDeque<(u64, PathBuf)>,
    pub(super) file: File,
    /// The file's length.
    length: u64,
    /// Records that are not written yet.
    pub(super) buffer: Vec<u8>,
    /// The names of the host and the instance, with which each segment begins.
    identity: Vec<(u32, String)>,
    /// The names that the segment has, by number.
    named: HashMap<u32, String>,
    /// Events of the present batch that are not in the file yet.
    pub(super) wanted: u64,
    /// How many of those are in the buffer.
    buffered: u64,
    /// Identifies the ring that the events come from; see `mod.rs`.
    ring: u32,
    /// How much of that ring earlier writers have written.
    had: Option<Had>,
    /// Where in that ring the last event of the present batch ends.
    pub(super) end: u64,
    /// Where the last event ends that was appended.
    appended: u64,
    /// Lost events that records in the file count: those lost in the time of this writer, and those
    /// lost before that no earlier record counts.
    noted: u64,
    /// Lost events that records in the buffer count.
    noting: u64,
    before: u64,
    /// Events lost in the time of this writer, as last reported to it.
    lost: u64,
    /// Lost events that the instance had counted when this writer began.
    counted: u64,
}

impl Log {
    /// `bytes`: as to [`Writer::start`](super::Writer::start).
    pub(super) fn open(
        directory: PathBuf,
        header: Header,
        bytes: Option<u64>,
        ring: u32,
        identity: Vec<(u32, String)>,
    ) -> Result<Self> {
        let mut segments = VecDeque::from(segments(&directory)?);
        let length = |(_, path): &(u64, PathBuf)| fs::metadata(path).map_or(0, |it| it.len());
        let mut total: u64 = segments.iter().map(length).sum();
        let bytes = bytes.unwrap_or(total.max(DEFAULT_BYTES));
        let segment = bytes.max(LEAST_BYTES) / SEGMENTS;
        // The maximum size may have been larger when the segments were written.
        while total > bytes && segments.len() > 1 {
            total -= segments.front().map_or(0, length);
            remove_oldest(&mut segments)?;
        }
        let had = last_of(&segments, ring)?;
        let (file, length) = match segments.back() {
            Some((_, path)) => match go_on(path, header)? {
                Some(found) => found,
                None => begin(&directory, &mut segments, header)?,
            },
            None => begin(&directory, &mut segments, header)?,
        };
        Ok(Self {
            directory,
            header,
            segment,
            segments,
            file,
            length,
            buffer: Vec::new(),
            identity,
            named: HashMap::new(),
            wanted: 0,
            buffered: 0,
            ring,
            had,
            end: 0,
            appended: 0,
            noted: 0,
            noting: 0,
            before: 0,
            lost: 0,
            counted: 0,
        })
    }

    /// Continues with a ring that was released up to `released`, of an instance that has counted
    /// `counted` lost events. Returns how many more have left the ring since the last event in the
    /// history. This is an upper bound: it follows from the number of bytes, which may have held
    /// other records, too.
    pub(super) fn adopt(&mut self, released: u64, counted: u64) -> u64 {
        // Events that are not released may be in the history.
        let had = self.had.unwrap_or(Had {
            end: released,
            counted: None,
        });
        let missing = released.saturating_sub(had.end) / BODY as u64;
        // An earlier writer has counted some of these events, and was killed before it could record
        // that here.
        let known = counted - had.counted.unwrap_or(counted).min(counted);
        let lost = missing.saturating_sub(known);
        self.end = had.end.max(released);
        self.appended = self.end;
        self.had = Some(Had {
            end: self.end,
            ..had
        });
        self.counted = counted;
        self.before = missing - lost;
        self.note(lost);
        lost
    }

    /// The present batch ends at `end`. A batch that an earlier run has left in the ring may be in
    /// the history already, and later ones, too.
    pub(super) fn reach(&mut self, end: u64) {
        self.end = self.end.max(end);
    }

    /// Where the last event ends that was appended.
    pub(super) fn appended(&self) -> u64 {
        self.appended
    }

    /// Records that up to the end of the present batch every event is in the file or lost, and that
    /// `lost` events were lost in the time of this writer.
    pub(super) fn note(&mut self, lost: u64) {
        self.lost = lost;
        self.put_lost(self.end);
    }

    /// Records the same for the events before the present batch, if the number has grown.
    pub(super) fn note_more(&mut self, lost: u64) {
        if lost > self.lost || self.before + self.lost > self.noted {
            self.lost = lost;
            self.put_lost(self.appended);
        }
    }

    fn put_lost(&mut self, end: u64) {
        let more = self.before + self.lost - self.noted - self.noting;
        self.noting += more;
        let mut body = [0; BODY];
        body[..8].copy_from_slice(&more.to_ne_bytes());
        body[8..16].copy_from_slice(&(self.counted + self.lost).to_ne_bytes());
        self.put(LOST, since_1970(SystemTime::now()), end, &body);
    }

    /// Whether earlier writers have written the event that ends at `end`.
    pub(super) fn has(&self, end: u64) -> bool {
        self.had.is_some_and(|had| end <= had.end)
    }

    /// Appends an event, behind those of its names that the segment does not have.
    pub(super) fn append(&mut self, entry: &Entry<'_>) -> Result<()> {
        const FLUSH: usize = 1 << 16;
        let Entry { when, end, .. } = *entry;
        let next = self.length + (self.buffer.len() + (2 + entry.more.len()) * RECORD) as u64;
        if next > self.segment {
            self.flush()?;
            self.sync()?;
            (self.file, self.length) = begin(&self.directory, &mut self.segments, self.header)?;
            self.named.clear();
            while self.segments.len() as u64 > SEGMENTS {
                remove_oldest(&mut self.segments)?;
            }
            self.put_lost(self.appended);
        }
        if self.named.is_empty() {
            let identity = mem::take(&mut self.identity);
            self.name(&identity, when, end);
            self.identity = identity;
        }
        self.name(entry.names, when, end);
        for (kind, body) in entry.more {
            self.put(*kind, when, end, body);
        }
        self.put(entry.kind, when, end, entry.body);
        self.appended = end;
        self.buffered += 1;
        if self.buffer.len() > FLUSH {
            self.flush()?;
        }
        Ok(())
    }

    /// Appends those names that the segment does not have.
    fn name(&mut self, names: &[(u32, String)], when: u64, end: u64) {
        for (number, name) in names {
            if self.named.get(number) == Some(name) {
                continue;
            }
            let mut body = [0; BODY];
            body[..4].copy_from_slice(&number.to_ne_bytes());
            body[4..][..name.len().min(NAME_BYTES)]
                .copy_from_slice(&name.as_bytes()[..name.len().min(NAME_BYTES)]);
            self.put(NAME, when, end, &body);
            self.named.insert(*number, name.clone());
        }
    }

    pub(super) fn put(&mut self, kind: u32, when: u64, end: u64, body: &[u8; BODY]) {
        let start = self.buffer.len();
        self.buffer.extend([0; 4]);
        self.buffer.extend(kind.to_ne_bytes());
        self.buffer.extend(when.to_ne_bytes());
        self.buffer.extend(self.ring.to_ne_bytes());
        self.buffer.extend(end.to_ne_bytes());
        self.buffer.extend(body);
        let checksum = crc32fast::hash(&self.buffer[start + 4..]);
        self.buffer[start..start + 4].copy_from_slice(&checksum.to_ne_bytes());
    }

    /// Writes the buffer to the file, so that readers see it.
    pub(super) fn flush(&mut self) -> Result<()> {
        self.file
            .write_all(&self.buffer)
            .context("cannot write the history")?;
        self.length += self.buffer.len() as u64;
        self.buffer.clear();
        self.wanted = self.wanted.saturating_sub(self.buffered);
        self.buffered = 0;
        self.noted += mem::take(&mut self.noting);
        Ok(())
    }

    /// After a failed write, restores the file to its length before. Returns how many events are
    /// lost by that.
    pub(super) fn recover(&mut self) -> u64 {
        // If that fails, too, readers skip the torn record.
        let _ = self.file.set_len(self.length);
        self.buffer.clear();
        self.named.clear();
        self.buffered = 0;
        self.noting = 0;
        // Up to there every event is in the file or lost.
        self.appended = self.end;
        mem::take(&mut self.wanted)
    }

    /// Waits until the file's data is on the disk.
    pub(super) fn sync(&self) -> Result<()> {
        self.file.sync_data().context("cannot write the history")
    }
}

/// What is appended for an event.
pub(super) struct Entry<'a> {
    /// When it was, in microseconds since 1970.
    pub(super) when: u64,
    pub(super) kind: u32,
    pub(super) body: &'a Body,
    /// Where it ends in the ring.
    pub(super) end: u64,
    /// The names that belong to its flow.
    pub(super) names: &'a [(u32, String)],
    /// What else is known of its flow: kinds and bodies of records.
    pub(super) more: &'a [(u32, Body)],
}

/// How much of a ring the segments hold.
#[derive(Clone, Copy)]
struct Had {
    /// Where the last event ends that the history holds or records as lost.
    end: u64,
    /// Lost events that the instance had counted at the last record of lost events.
    counted: Option<u64>,
}

/// How much of a ring the segments hold, if their last records are from that ring.
fn last_of(segments: &VecDeque<(u64, PathBuf)>, ring: u32) -> Result<Option<Had>> {
    let mut had = None;
    for (_, path) in segments.iter().rev() {
        let context = || format!("cannot read {}", path.display());
        let file = File::open(path).with_context(context)?;
        let mut header = [0; HEADER];
        if file.read_exact_at(&mut header, 0).is_err() || Header::read(&header, path).is_err() {
            continue;
        }
        let length = file.metadata().with_context(context)?.len();
        let mut record = [0; RECORD];
        for number in (0..(length - HEADER as u64) / RECORD as u64).rev() {
            let at = HEADER as u64 + number * RECORD as u64;
            file.read_exact_at(&mut record, at).with_context(context)?;
            let kind = u32_at(&record, 4);
            if !is_whole(&record) || ![FLOW, RTO, LOST].contains(&kind) {
                continue;
            }
            if u32_at(&record, 16) != ring {
                return Ok(had);
            }
            let end = u64_at(&record, 20);
            let last = had.get_or_insert(Had { end, counted: None });
            if kind == LOST {
                last.counted = Some(u64_at(&record, HEAD + 8));
                return Ok(had);
            }
        }
    }
    Ok(had)
}

fn remove_oldest(segments: &mut VecDeque<(u64, PathBuf)>) -> Result<()> {
    match segments.pop_front() {
        Some((_, oldest)) => {
            fs::remove_file(&oldest).with_context(|| format!("cannot remove {}", oldest.display()))
        }
        None => Ok(()),
    }
}

/// Creates the next segment.
fn begin(
    directory: &Path,
    segments: &mut VecDeque<(u64, PathBuf)>,
    header: Header,
) -> Result<(File, u64)> {
    let number = segments.back().map_or(1, |(number, _)| number + 1);
    let path = directory.join(format!("{number:010}.history"));
    // Users that may list the directory may read the segment.
    let shared = fs::metadata(directory).map_or(0, |it| it.mode() & 0o040);
    let mut file = OpenOptions::new()
        .append(true)
        .create_new(true)
        .mode(0o600 | shared)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(&path)
        .with_context(|| format!("cannot create {}", path.display()))?;
    if let Err(error) = file.write_all(&header.bytes()) {
        // A segment without a header would make the next attempt fail.
        let _ = fs::remove_file(&path);
        return Err(error).with_context(|| format!("cannot write {}", path.display()));
    }
    // The directory entry, too, must survive a power failure.
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .with_context(|| format!("cannot write {}", directory.display()))?;
    segments.push_back((number, path));
    Ok((file, HEADER as u64))
}

/// Opens the newest segment to continue it, without a record that was torn at its end; `None` if a
/// new segment must be begun.
fn go_on(path: &Path, header: Header) -> Result<Option<(File, u64)>> {
    let context = || format!("cannot open {}", path.display());
    let file = OpenOptions::new()
        .read(true)
        .append(true)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(path)
        .with_context(context)?;
    let length = file.metadata().with_context(context)?.len();
    let mut found = [0; HEADER];
    // A file that is not a history is left as it is; readers report it.
    if file.read_exact_at(&mut found, 0).is_err() || Header::read(&found, path).ok() != Some(header)
    {
        return Ok(None);
    }
    let mut records = (length - HEADER as u64) / RECORD as u64;
    let mut record = [0; RECORD];
    while records > 0 {
        let at = HEADER as u64 + (records - 1) * RECORD as u64;
        file.read_exact_at(&mut record, at).with_context(context)?;
        if is_whole(&record) {
            break;
        }
        records -= 1;
    }
    let length = HEADER as u64 + records * RECORD as u64;
    file.set_len(length).with_context(|| {
        format!(
            "cannot cut off the torn record at the end of {}",
            path.display()
        )
    })?;
    Ok(Some((file, length)))
}
