//! What has ended, on disk: a bounded history that outlives the loader.
//!
//! An instance has a directory with segments, of which each is `SEGMENTS`th of the room there is; the oldest goes
//! when a new one is begun. A segment is a header and then records of one size, each with a checksum, so that one that was
//! torn when the power went costs nothing but itself:
//!
//! ```text
//! header   magic 8, version 4, bytes of a record 4, nanoseconds in a clock unit 4, one way 4, zeros 4, checksum 4
//! record   checksum 4, kind 4, when 8 (milliseconds since 1970), ring 4, end 8, body 128
//! ```
//!
//! `ring` tells the ring of events from others that the instance has had, and `end` is where the event ended in it. So a
//! writer that goes on knows which of the events that it finds in the ring the history has: each is in it once, whatever
//! killed whom.
//!
//! The body is an [`Event`]; or, before the first event of a rule in each segment, the rule's number and name; or how many
//! events up to there the history has lost since it said so last, and how many the instance has counted by then, with which
//! each writer and each segment but the first begins, and each writer ends. In machine byte order: a history is read where
//! it was written.

use std::{
    collections::{HashMap, VecDeque},
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io::{self, BufReader, Read as _, Write},
    mem,
    os::fd::AsFd,
    os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt, lchown},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use nix::{
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
    unistd::{Gid, geteuid},
};
use tokio::sync::watch;
use twheel_common::{
    config::NAME_BYTES,
    counter::Counter,
    event::{Event, Record},
};

use crate::{
    call::Callable,
    clock::Clock,
    data_plane::{self, LoaderCounters},
    failure::{Failure, Kind, exit_code},
    maps,
    model::{Expired, KnownAs},
    names::Names,
    patterns::Asked,
    pins::{
        Instance, Pins, all_here, first_of, holding, namespace,
        path::{escape, name},
    },
    ring::{Events, Read},
};

/// Where histories are, unless told otherwise.
pub const DIRECTORY: &str = "/var/lib/twheel";

/// Room for one, unless told otherwise: 64 MiB.
pub const DEFAULT_BYTES: u64 = 64 << 20;

const MAGIC: [u8; 8] = *b"twheel\0h";
/// Changes with [`Event`].
const VERSION: u32 = 4;
const HEADER: usize = 32;
const BODY: usize = size_of::<Event>();
/// Before the body.
const HEAD: usize = 28;
const RECORD: usize = HEAD + BODY;
const SEGMENTS: u64 = 8;
/// The least room that makes sense: a thousand events a segment.
pub const LEAST_BYTES: u64 = SEGMENTS * 1024 * RECORD as u64;

/// The year 9999, milliseconds since 1970: no event is of later.
const LATEST: u64 = 253_370_764_800_000;

const ENDED: u32 = 1;
const NAME: u32 = 2;
const LOST: u32 = 3;

/// Batches on their way to the disk. A disk that falls further behind costs events of the history, which are counted;
/// it holds up neither wheels nor output.
const BATCHES: usize = 16;
/// What was written is on the disk after this, at the latest.
const SYNC: Duration = Duration::from_secs(1);
/// Between two looks whether it was written, for whoever has nothing else to do.
const WRITING: Duration = Duration::from_micros(200);
/// A history that was not written to for so long is removed.
const STALE: Duration = Duration::from_secs(30 * 86_400);

/// Where the history of an instance is written.
pub struct Directory {
    /// With those of other instances.
    all: PathBuf,
    own: PathBuf,
}

impl Directory {
    /// Makes it, or takes the one that is there, below one for all.
    ///
    /// # Errors
    ///
    /// It cannot be made; or what is there is a symbolic link, or somebody else's.
    pub fn make(all: &Path, pins: &Pins) -> Result<Self> {
        let own = all.join(pins.name());
        let context = || format!("cannot create {}, for the history", own.display());
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o755);
        builder.create(all).with_context(context)?;
        match builder.recursive(false).mode(0o700).create(&own) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.with_context(context)?,
        }
        for path in [all, &own] {
            let found = fs::symlink_metadata(path).with_context(context)?;
            let is_ours = [0, geteuid().as_raw()].contains(&found.uid());
            let is_own = path == own;
            // A link to all of them may be the administrator's.
            let is_real = found.is_dir() || !is_own && is_ours;
            if !is_real || is_own && (!is_ours || found.mode() & 0o022 != 0) {
                return Err(Failure::new(
                    Kind::Other,
                    format!(
                        "{} is {} of user {} (mode {:o}), who could put anything there: remove it, or give another \
                         --history",
                        path.display(),
                        if found.is_dir() { "a directory" } else { "a symbolic link" },
                        found.uid(),
                        found.mode() & 0o7777
                    ),
                )
                .into());
            }
        }
        Ok(Self {
            all: all.to_owned(),
            own,
        })
    }

    /// Who may read it, beside its owner: nobody, or a group that this process is in.
    pub fn share(&self, group: Option<Gid>) -> Result<()> {
        let mode = match group {
            Some(_) => 0o750,
            None => 0o700,
        };
        lchown(&self.own, None, group.map(Gid::as_raw))
            .and_then(|()| fs::set_permissions(&self.own, Permissions::from_mode(mode)))
            .with_context(|| format!("cannot set the mode of {}", self.own.display()))
    }
}

/// Writes a history, on a thread of its own.
pub struct Writer {
    /// Until it is to end.
    batches: Option<SyncSender<Arc<Vec<Read>>>>,
    written: watch::Receiver<u64>,
    thread: Option<JoinHandle<()>>,
    lost: Arc<Lost>,
}

/// Events that are not in the history.
struct Lost {
    /// In the time of a writer.
    number: AtomicU64,
    tally: Arc<LoaderCounters>,
}

impl Lost {
    fn add(&self, more: u64) {
        if more > 0 {
            self.number.fetch_add(more, Ordering::Relaxed);
            self.tally.add(Counter::HistoryLost, more);
        }
    }

    fn get(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }
}

impl Writer {
    /// Goes on with an instance's history, or begins one. `bytes`: room for it on disk, at least [`LEAST_BYTES`]; `None`: as
    /// much as it takes, or [`DEFAULT_BYTES`].
    pub fn start(
        directory: &Directory,
        pins: &Pins,
        tally: Arc<LoaderCounters>,
        bytes: Option<u64>,
        clock: Clock,
        one_way: bool,
    ) -> Result<Self> {
        let header = Header {
            unit_ns: clock.unit().subsec_nanos(),
            one_way,
        };
        remove_stale(&directory.all, SystemTime::now())?;
        let mut log = Log::open(directory.own.clone(), header, bytes, ring_of(pins)?)?;
        let events = Events::open(pins.map("EVENTS")?)?;
        let missing = log.adopt(events.released(), tally.get(Counter::HistoryLost)?);
        if missing > 0 {
            say!(
                "twheel: up to {missing} events that have left the ring are not in the history: an earlier run kept \
                 none, or was killed while the disk was slow"
            );
        }
        let names = Names::open(&maps::pinned(pins))?;
        let sweep = pins.callable("twheel_sweep")?;
        let lost = Arc::new(Lost {
            number: AtomicU64::new(0),
            tally,
        });
        lost.add(missing);
        let (batches, inbox) = sync_channel(BATCHES);
        let (tell, written) = watch::channel(0);
        let counter = lost.clone();
        let thread = thread::Builder::new()
            .name("twheel-history".to_owned())
            .spawn(move || {
                let mut failing = false;
                // A disk that was full may have room again.
                while let Err(error) = write(
                    &mut log,
                    &inbox,
                    &tell,
                    &names,
                    &sweep,
                    clock,
                    &counter,
                    &mut failing,
                ) {
                    counter.add(log.recover());
                    // Nobody waits for what is lost.
                    tell.send_replace(log.end);
                    if !failing {
                        say!("twheel: {error:#}: what ends meanwhile is not in the history");
                    }
                    failing = true;
                }
                // What the disk was too slow for may have left the ring. Should this fail, the next writer counts it too.
                log.end = log.end.max(events.released());
                log.note(counter.get());
                let _ = log.flush().and_then(|()| log.sync());
            })
            .context("cannot start the history's thread")?;
        Ok(Self {
            batches: Some(batches),
            written,
            thread: Some(thread),
            lost,
        })
    }

    /// Adds what has ended. Once [`written`](Self::written) says so it is in the file, which outlives this process.
    pub fn add(&self, batch: &Arc<Vec<Read>>) {
        let Some(batches) = &self.batches else {
            return;
        };
        if let Err(TrySendError::Full(batch) | TrySendError::Disconnected(batch)) =
            batches.try_send(batch.clone())
        {
            self.lost.add(ended(&batch).count() as u64);
        }
    }

    /// Adds it and waits until it is in the file, for whoever can wait.
    pub fn add_now(&mut self, batch: Vec<Read>) {
        let (Some(batches), Some(end)) = (&self.batches, batch.last().map(|read| read.end)) else {
            return;
        };
        // The thread is there until it is told to end.
        let _ = batches.send(Arc::new(batch));
        while *self.written.borrow_and_update() < end {
            thread::sleep(WRITING);
        }
    }

    /// Where in the ring the latest event ended that is in the file, or is lost.
    pub fn written(&self) -> watch::Receiver<u64> {
        self.written.clone()
    }

    /// Ends it: what is left is written. Returns how many events are not in the history.
    pub fn end(self) -> u64 {
        let lost = self.lost.clone();
        drop(self);
        lost.get()
    }
}

/// What is left is written.
impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            // A panic there was reported when it came.
            let _ = thread.join();
        }
    }
}

fn ended(batch: &[Read]) -> impl Iterator<Item = (&Event, u64)> {
    batch.iter().filter_map(|read| match &read.record {
        Record::Ended(event) => Some((event, read.end)),
        Record::Rto(_) => None,
    })
}

/// What tells an instance's ring of events from those of earlier ones of its name: their tables had other secrets.
fn ring_of(pins: &Pins) -> Result<u32> {
    let mut checksum = crc32fast::Hasher::new();
    for key in data_plane::meta(pins)?.hash.keys {
        checksum.update(&key.to_ne_bytes());
    }
    Ok(checksum.finalize())
}

#[allow(clippy::too_many_arguments)]
fn write(
    log: &mut Log,
    inbox: &Receiver<Arc<Vec<Read>>>,
    tell: &watch::Sender<u64>,
    names: &Names,
    sweep: &Callable,
    clock: Clock,
    lost: &Lost,
    failing: &mut bool,
) -> Result<()> {
    // How it begins.
    let mut dirty = !log.buffer.is_empty();
    log.flush()?;
    loop {
        let batch = if dirty {
            match inbox.recv_timeout(SYNC) {
                Ok(batch) => batch,
                Err(RecvTimeoutError::Timeout) => {
                    log.sync()?;
                    dirty = false;
                    continue;
                }
                Err(RecvTimeoutError::Disconnected) => return log.sync(),
            }
        } else {
            match inbox.recv() {
                Ok(batch) => batch,
                Err(_) => return Ok(()),
            }
        };
        log.reach(batch.last().map_or(0, |read| read.end));
        let batch: Vec<_> = ended(&batch).filter(|(_, end)| !log.has(*end)).collect();
        log.wanted = batch.len() as u64;
        if log.wanted > 0 {
            log.note_more(lost.get());
            let now = sweep.now()?;
            let wall = since_1970(SystemTime::now());
            for (event, end) in batch {
                // One that another CPU has ended after the time was read is of now.
                let ago = (now.wrapping_sub(event.at as u32) as i32).max(0);
                let when = wall.saturating_sub(clock.duration(ago as u64).as_millis() as u64);
                log.append(when, event, end, |event| named(names, event))?;
            }
            log.flush()?;
            *failing = false;
            dirty = true;
        }
        tell.send_replace(log.end);
    }
}

/// What [`NAME`] has of rules by their numbers, it has of interfaces by their places above this,
const IFACE: u32 = 1 << 16;
/// and of zones by theirs above this.
const ZONE: u32 = 2 << 16;

/// What a flow is known as, by the numbers that [`NAME`] has.
fn named(names: &Names, event: &Event) -> Result<Vec<(u32, String)>> {
    let mut named = Vec::new();
    let mut add = |number: u32, name: Option<String>| named.extend(name.map(|name| (number, name)));
    add(event.rule.into(), names.of(event.rule)?);
    let place = event.point.place();
    add(IFACE | place, names.iface(place)?);
    let zone = event.key.zone();
    if zone != 0 {
        add(ZONE | u32::from(zone), Some(names.zone(zone)?.to_string()));
    }
    Ok(named)
}

/// Milliseconds.
fn since_1970(time: SystemTime) -> u64 {
    time.duration_since(UNIX_EPOCH)
        .map_or(0, |since| since.as_millis() as u64)
}

/// What the events of a segment were measured by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Header {
    unit_ns: u32,
    one_way: bool,
}

impl Header {
    fn bytes(self) -> [u8; HEADER] {
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
    /// It is no history, or one of another version.
    fn read(bytes: &[u8; HEADER], path: &Path) -> Result<Self> {
        let word = |at: usize| u32_at(bytes, 8 + 4 * at);
        let failure = |what: &str| {
            Failure::new(
                Kind::Other,
                format!("{} {what}: move it away to read the rest", path.display()),
            )
        };
        if bytes[..8] != MAGIC {
            return Err(failure("is no history of twheel's").into());
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

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    let mut word = [0; 4];
    word.copy_from_slice(&bytes[at..at + 4]);
    u32::from_ne_bytes(word)
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    let mut word = [0; 8];
    word.copy_from_slice(&bytes[at..at + 8]);
    u64::from_ne_bytes(word)
}

/// The segments of a history, oldest first, by number.
fn segments(directory: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let context = || format!("cannot list {}", directory.display());
    let mut found = Vec::new();
    for entry in fs::read_dir(directory).with_context(context)? {
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

/// A history that is being written.
struct Log {
    directory: PathBuf,
    header: Header,
    /// Bytes of a segment, at most.
    segment: u64,
    /// All segments, the last of which is the one that is written to.
    segments: VecDeque<(u64, PathBuf)>,
    file: File,
    /// Its length.
    length: u64,
    /// Not yet written.
    buffer: Vec<u8>,
    /// Rules of which the segment has the names.
    named: HashMap<u32, String>,
    /// Events of the batch at hand that are not in the file yet.
    wanted: u64,
    /// Those of them that are in the buffer.
    buffered: u64,
    /// Whose events these are: see the module's comment.
    ring: u32,
    /// What earlier writers have written of that ring.
    had: Option<Had>,
    /// Where in that ring the last event of the batch at hand ended.
    end: u64,
    /// And the last that was appended.
    appended: u64,
    /// Events lost, of which the file says so: those in the time of this writer, and what was lost before and is not
    /// among these.
    noted: u64,
    /// And those of which the buffer does.
    noting: u64,
    before: u64,
    /// Those in the time of this writer, when it was last told.
    lost: u64,
    /// What the instance had counted when it began.
    counted: u64,
}

impl Log {
    /// `bytes`: as to [`Writer::start`].
    fn open(directory: PathBuf, header: Header, bytes: Option<u64>, ring: u32) -> Result<Self> {
        let mut segments = VecDeque::from(segments(&directory)?);
        let length = |(_, path): &(u64, PathBuf)| fs::metadata(path).map_or(0, |it| it.len());
        let mut total: u64 = segments.iter().map(length).sum();
        let bytes = bytes.unwrap_or(total.max(DEFAULT_BYTES));
        let segment = bytes.max(LEAST_BYTES) / SEGMENTS;
        // There may have been more room when they were written.
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

    /// Goes on with a ring that was released up to a place, of an instance that has counted so many lost events. Returns
    /// how many more have left it since the last one that is in the history: at most, since what is known is how many
    /// bytes they took, with whatever was between.
    fn adopt(&mut self, released: u64, counted: u64) -> u64 {
        // What has not been released may be in the history.
        let had = self.had.unwrap_or(Had {
            end: released,
            counted: None,
        });
        let missing = released.saturating_sub(had.end) / BODY as u64;
        // An earlier writer has counted some of them, and was killed before it could say so here.
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

    /// There is a batch at hand that ends there. One that an earlier run has left in the ring may be in the history, and more
    /// behind it.
    fn reach(&mut self, end: u64) {
        self.end = self.end.max(end);
    }

    /// Says that up to the end of the batch at hand all is in the file but what was lost, so many events in the time of this
    /// writer.
    fn note(&mut self, lost: u64) {
        self.lost = lost;
        self.put_lost(self.end);
    }

    /// The same, if there is more to say, of what lies before the batch at hand.
    fn note_more(&mut self, lost: u64) {
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

    /// Whether earlier writers have written the event that ends there.
    fn has(&self, end: u64) -> bool {
        self.had.is_some_and(|had| end <= had.end)
    }

    fn append(
        &mut self,
        when: u64,
        event: &Event,
        end: u64,
        names: impl Fn(&Event) -> Result<Vec<(u32, String)>>,
    ) -> Result<()> {
        const FLUSH: usize = 1 << 16;
        let next = self.length + (self.buffer.len() + 2 * RECORD) as u64;
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
        for (number, name) in names(event)? {
            if self.named.get(&number) == Some(&name) {
                continue;
            }
            let mut body = [0; BODY];
            body[..4].copy_from_slice(&number.to_ne_bytes());
            body[4..][..name.len().min(NAME_BYTES)]
                .copy_from_slice(&name.as_bytes()[..name.len().min(NAME_BYTES)]);
            self.put(NAME, when, end, &body);
            self.named.insert(number, name);
        }
        // SAFETY: an `Event` is `repr(C)`, integers alone, without padding.
        let body = unsafe { &*(&raw const *event).cast::<[u8; BODY]>() };
        self.put(ENDED, when, end, body);
        self.appended = end;
        self.buffered += 1;
        if self.buffer.len() > FLUSH {
            self.flush()?;
        }
        Ok(())
    }

    fn put(&mut self, kind: u32, when: u64, end: u64, body: &[u8; BODY]) {
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

    /// Writes what there is, so that readers see it.
    fn flush(&mut self) -> Result<()> {
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

    /// After a failure: leaves the file as it was before. Returns how many events are lost by that.
    fn recover(&mut self) -> u64 {
        // Should that fail too, a reader passes over what is torn.
        let _ = self.file.set_len(self.length);
        self.buffer.clear();
        self.named.clear();
        self.buffered = 0;
        self.noting = 0;
        // Up to there all is in the file, or lost.
        self.appended = self.end;
        mem::take(&mut self.wanted)
    }

    /// And sees it on the disk.
    fn sync(&self) -> Result<()> {
        self.file.sync_data().context("cannot write the history")
    }
}

/// What the segments have of a ring.
#[derive(Clone, Copy)]
struct Had {
    /// Where the last event ended that is there, or is said to be lost.
    end: u64,
    /// Lost events that the instance had counted when that was last said.
    counted: Option<u64>,
}

/// What the segments have of a ring, if it was the last.
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
            if !is_whole(&record) || ![ENDED, LOST].contains(&kind) {
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

/// Removes histories of instances that nobody has written to for long: those of namespaces that are gone would pile up.
fn remove_stale(directory: &Path, now: SystemTime) -> Result<()> {
    let context = || format!("cannot list {}", directory.display());
    for entry in fs::read_dir(directory).with_context(context)? {
        let path = entry.with_context(context)?.path();
        // What belongs to others may not be looked at.
        let is_directory = fs::symlink_metadata(&path).is_ok_and(|it| it.is_dir());
        let Ok(Some(segments)) = is_directory.then(|| segments(&path)).transpose() else {
            continue;
        };
        let written = |(_, path): &(u64, PathBuf)| fs::metadata(path)?.modified();
        let Some(Ok(newest)) = segments.last().map(written) else {
            continue;
        };
        if now.duration_since(newest).is_ok_and(|since| since > STALE) {
            // What else is there is not ours.
            let _ = segments
                .iter()
                .try_for_each(|(_, segment)| fs::remove_file(segment))
                .and_then(|()| fs::remove_dir(&path));
        }
    }
    Ok(())
}

/// Creates the next segment.
fn begin(
    directory: &Path,
    segments: &mut VecDeque<(u64, PathBuf)>,
    header: Header,
) -> Result<(File, u64)> {
    let number = segments.back().map_or(1, |(number, _)| number + 1);
    let path = directory.join(format!("{number:010}.history"));
    // Who may look into the directory may read what is there.
    let shared = fs::metadata(directory).map_or(0, |it| it.mode() & 0o040);
    let mut file = OpenOptions::new()
        .append(true)
        .create_new(true)
        .mode(0o600 | shared)
        .custom_flags(OFlag::O_NOFOLLOW.bits())
        .open(&path)
        .with_context(|| format!("cannot create {}", path.display()))?;
    if let Err(error) = file.write_all(&header.bytes()) {
        // One without a header would be in the way of the next try.
        let _ = fs::remove_file(&path);
        return Err(error).with_context(|| format!("cannot write {}", path.display()));
    }
    // That it is there, too, is to outlive a loss of power.
    File::open(directory)
        .and_then(|directory| directory.sync_all())
        .with_context(|| format!("cannot write {}", directory.display()))?;
    segments.push_back((number, path));
    Ok((file, HEADER as u64))
}

/// Opens the newest segment to go on with it, less what was torn at its end; `None` if a new one must be begun.
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
    // What is no history is left alone: its reader says so.
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
            "cannot cut off what was torn at the end of {}",
            path.display()
        )
    })?;
    Ok(Some((file, length)))
}

fn is_whole(record: &[u8]) -> bool {
    crc32fast::hash(&record[4..]) == u32_at(record, 0)
}

/// The name of the history of an interface: that of the instance that holds it, or that was made for it first and is gone; without one, of the
/// only instance here, or the only one that has left something in `directory`.
///
/// # Errors
///
/// [`Kind::Pins`]: there are several, or none; or what is there is another version's.
pub fn name_of(interface: Option<&str>, directory: &Path) -> Result<String> {
    let none = match Instance::the(interface) {
        Ok(pins) => {
            // A run that waits for its interfaces has none yet, and who may read the history may be kept from it.
            if pins.object("META").exists()
                && let Err(error) = data_plane::meta(&pins)
                && exit_code(&error) == Kind::Pins as u8
            {
                return Err(error);
            }
            return Ok(pins.name());
        }
        Err(none) => none,
    };
    if let Some(interface) = interface {
        return match holding(interface) {
            Ok(others) if !others.is_empty() => Err(none),
            _ => name_left(interface, directory),
        };
    }
    match all_here(directory)?.as_slice() {
        [one] => Ok(name(one)),
        _ => Err(none),
    }
}

/// The name of an instance that is gone and was named after an interface; or after a pattern that stands for it, if that is what has
/// left something in `directory`.
fn name_left(interface: &str, directory: &Path) -> Result<String> {
    let own = format!("{}-{}", namespace()?, escape(interface));
    if directory.join(&own).exists() {
        return Ok(own);
    }
    let stands = |path: &PathBuf| {
        first_of(path)
            .and_then(|first| Asked::parse(&first).ok())
            .is_some_and(|asked| asked.is_pattern() && asked.matches(interface))
    };
    let patterns: Vec<_> = all_here(directory)?.into_iter().filter(stands).collect();
    match patterns.as_slice() {
        [one] => Ok(name(one)),
        _ => Ok(own),
    }
}

/// A flow that has ended, as the history has it.
pub struct Past {
    /// When.
    pub when: SystemTime,
    /// What.
    pub ended: Expired,
    /// What it was known as.
    pub known_as: KnownAs,
}

/// Reads a history from the oldest event on, while it is being written.
pub struct Reader {
    directory: PathBuf,
    open: Option<Segment>,
    /// The number of the segment that was read last.
    last: u64,
    /// Events from before are passed over.
    since: SystemTime,
    /// Records that are damaged, and were passed over.
    pub damaged: u64,
    /// Events that the history has lost, as far as its writers know: at most, where one was killed.
    pub lost: u64,
    /// Segments that were removed, to make room for newer ones, before they were read.
    pub missed: u64,
    /// Segments that cannot be read, and were passed over: why, each in a sentence.
    pub refused: Vec<anyhow::Error>,
}

struct Segment {
    path: PathBuf,
    file: BufReader<File>,
    clock: Clock,
    one_way: bool,
    names: HashMap<u32, String>,
}

impl Reader {
    /// Opens the history of an instance, by its name, below `directory`.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`]: there is none.
    pub fn open(directory: &Path, instance: &str, since: SystemTime) -> Result<Self> {
        let directory = directory.join(instance);
        if !directory.is_dir() {
            return Err(Failure::new(
                Kind::Pins,
                format!(
                    "there is no history at {}: `twheel run` writes one",
                    directory.display()
                ),
            )
            .into());
        }
        Ok(Self {
            directory,
            open: None,
            last: 0,
            since,
            damaged: 0,
            lost: 0,
            missed: 0,
            refused: Vec::new(),
        })
    }

    /// The next event; `None` if there is none yet.
    // No iterator: it may go on after `None`.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Past>> {
        loop {
            if self.open.is_none() && !self.open_next()? {
                return Ok(None);
            }
            let Some(segment) = &mut self.open else {
                return Ok(None);
            };
            let mut record = [0; RECORD];
            if !read_whole(&mut segment.file, &mut record)
                .with_context(|| format!("cannot read {}", segment.path.display()))?
            {
                // Its end; for now, if it is the newest. What came between the two looks is seen by the second.
                let newer = segments(&self.directory)?;
                if newer.iter().all(|(number, _)| *number <= self.last) {
                    return Ok(None);
                }
                if read_whole(&mut segment.file, &mut record)? {
                    segment.file.seek_relative(-(RECORD as i64))?;
                } else {
                    self.open = None;
                }
                continue;
            }
            if !is_whole(&record) || u64_at(&record, 8) > LATEST {
                self.damaged += 1;
                continue;
            }
            let when = UNIX_EPOCH + Duration::from_millis(u64_at(&record, 8));
            if u32_at(&record, 4) == LOST && when >= self.since {
                self.lost += u64_at(&record, HEAD);
            }
            if let Some(past) = segment.take(&record)
                && past.when >= self.since
            {
                return Ok(Some(past));
            }
        }
    }

    /// Opens the next segment that may have events since then. Returns whether there is one.
    fn open_next(&mut self) -> Result<bool> {
        let segments = segments(&self.directory)?;
        let newest = segments.last().map_or(0, |(number, _)| *number);
        for (number, path) in segments {
            if number <= self.last {
                continue;
            }
            let file = match File::open(&path) {
                // The oldest one goes at any moment.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                file => file.with_context(|| format!("cannot open {}", path.display()))?,
            };
            let modified = file.metadata()?.modified()?;
            let mut file = BufReader::with_capacity(RECORD * 512, file);
            let mut header = [0; HEADER];
            if !read_whole(&mut file, &mut header)? {
                // Its writer is about to begin, or died when it did.
                if number < newest {
                    self.last = number;
                }
                continue;
            }
            // The first that is found has nothing before it that anybody could miss.
            if self.last > 0 {
                self.missed += number - self.last - 1;
            }
            self.last = number;
            // To the newest, events may come.
            if modified < self.since && number < newest {
                continue;
            }
            if header == [0; HEADER] {
                // The power went before it was written.
                self.damaged += 1;
                continue;
            }
            let header = match Header::read(&header, &path) {
                Ok(header) => header,
                Err(error) => {
                    self.refused.push(error);
                    continue;
                }
            };
            self.open = Some(Segment {
                path,
                file,
                clock: Clock::of_jiffies(Duration::from_nanos(header.unit_ns.into())),
                one_way: header.one_way,
                names: HashMap::new(),
            });
            return Ok(true);
        }
        Ok(false)
    }

    /// Something to wait with, to be made before what there is has been read.
    pub fn follow(&self) -> Result<Follow> {
        let watch = || -> nix::Result<Inotify> {
            let inotify = Inotify::init(InitFlags::IN_CLOEXEC)?;
            inotify.add_watch(
                &self.directory,
                AddWatchFlags::IN_MODIFY | AddWatchFlags::IN_CREATE,
            )?;
            Ok(inotify)
        };
        let inotify = watch().map_err(io::Error::from);
        let directory = self.directory.display();
        Ok(Follow(
            inotify.with_context(|| format!("cannot watch {directory}"))?,
        ))
    }
}

/// Waits for a history to grow.
pub struct Follow(Inotify);

impl Follow {
    /// Returns when something was written since it was last called.
    ///
    /// # Errors
    ///
    /// A broken pipe, as soon as nobody reads standard output any more.
    pub fn wait(&self) -> Result<()> {
        let stdout = io::stdout();
        let mut watched = [
            PollFd::new(self.0.as_fd(), PollFlags::POLLIN),
            // What is wrong is told unasked.
            PollFd::new(stdout.as_fd(), PollFlags::empty()),
        ];
        match poll(&mut watched, PollTimeout::NONE) {
            Ok(_) | Err(nix::Error::EINTR) => {}
            Err(error) => {
                return Err(io::Error::from(error)).context("cannot wait for the history");
            }
        }
        if watched[1].any() == Some(true) {
            return Err(io::Error::from(io::ErrorKind::BrokenPipe).into());
        }
        match self.0.read_events() {
            Ok(_) | Err(nix::Error::EINTR) => Ok(()),
            Err(error) => Err(io::Error::from(error)).context("cannot wait for the history"),
        }
    }
}

impl Segment {
    fn take(&mut self, record: &[u8; RECORD]) -> Option<Past> {
        let body = &record[HEAD..];
        match u32_at(record, 4) {
            NAME => {
                let name = String::from_utf8_lossy(&body[4..4 + NAME_BYTES]);
                let name = name.trim_end_matches('\0').to_owned();
                self.names.insert(u32_at(body, 0), name);
                None
            }
            ENDED => {
                // SAFETY: `BODY` bytes, and any are a valid `Event`.
                let event = unsafe { body.as_ptr().cast::<Event>().read_unaligned() };
                Some(Past {
                    when: UNIX_EPOCH + Duration::from_millis(u64_at(record, 8)),
                    ended: Expired::new(&event, self.clock, self.one_way)?,
                    known_as: KnownAs {
                        rule: self.names.get(&event.rule.into()).cloned(),
                        iface: self.names.get(&(IFACE | event.point.place())).cloned(),
                        zone: self
                            .names
                            .get(&(ZONE | u32::from(event.key.zone())))
                            .and_then(|zone| zone.parse().ok())
                            .unwrap_or(0),
                    },
                })
            }
            _ => None,
        }
    }
}

/// Fills a buffer; or, where the file ends before, leaves the file where it is.
fn read_whole(file: &mut BufReader<File>, buffer: &mut [u8]) -> io::Result<bool> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read(&mut buffer[filled..]) {
            Ok(0) => {
                file.seek_relative(-(filled as i64))?;
                return Ok(false);
            }
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use twheel_common::{
        event::{Pace, Reason},
        flow::{Direction, FlowKey, Traffic},
        packet::tcp,
        point::Point,
        state::{Seen, View},
    };

    use super::*;
    use crate::failure::exit_code;

    const HEADER_4MS: Header = Header {
        unit_ns: 4_000_000,
        one_way: false,
    };
    const RULE: u16 = 7;
    const RING: u32 = 0xbee;

    fn event(number: u32) -> Event {
        let seen = Seen::first(Direction::FromLow, tcp::SYN, View::default()).unwrap();
        Event {
            key: FlowKey::from_parts([0, 1, 0, 2], 1 << 32 | u64::from(number & 0xffff)),
            at: number.into(),
            age: number,
            idle: 25,
            seen: seen.0,
            reason: Reason::Idle as u32,
            cpu: 0,
            rule: if number.is_multiple_of(2) { RULE } else { 0 },
            point: Point::NONE,
            is_outgoing: 0,
            account: [Traffic::default(); 2],
            pace: [Pace::default(); 2],
            positions: [0; 2],
        }
    }

    fn names(event: &Event) -> Result<Vec<(u32, String)>> {
        let rule = (event.rule != 0).then(|| (event.rule.into(), "web".to_owned()));
        Ok(rule.into_iter().collect())
    }

    fn append(log: &mut Log, numbers: std::ops::Range<u32>) {
        for number in numbers {
            let when = 1000 + u64::from(number);
            log.append(when, &event(number), number.into(), names)
                .unwrap();
        }
    }

    fn open(directory: &Path, bytes: Option<u64>) -> Log {
        Log::open(directory.join("it"), HEADER_4MS, bytes, RING).unwrap()
    }

    fn write(directory: &Path, numbers: std::ops::Range<u32>, bytes: u64) {
        let mut log = open(directory, Some(bytes));
        append(&mut log, numbers);
        log.flush().unwrap();
        log.sync().unwrap();
    }

    /// The ages of all events, units; and how many records are damaged.
    fn read(directory: &Path) -> (Vec<u32>, u64) {
        let mut reader = Reader::open(directory, "it", UNIX_EPOCH).unwrap();
        let mut ages = Vec::new();
        while let Some(past) = reader.next().unwrap() {
            let age = (past.ended.age.as_millis() / 4) as u32;
            assert_eq!(
                past.when,
                UNIX_EPOCH + Duration::from_millis(1000 + u64::from(age))
            );
            assert_eq!(past.ended.idle, Duration::from_millis(100));
            assert_eq!(
                past.known_as.rule.as_deref(),
                age.is_multiple_of(2).then_some("web"),
                "{age}"
            );
            ages.push(age);
        }
        (ages, reader.damaged)
    }

    fn fresh() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        fs::create_dir(directory.path().join("it")).unwrap();
        directory
    }

    fn only_segment(directory: &Path) -> PathBuf {
        let mut segments = segments(&directory.join("it")).unwrap();
        assert_eq!(segments.len(), 1);
        segments.remove(0).1
    }

    #[test]
    fn what_is_written_is_read_in_order_after_any_number_of_restarts() {
        let directory = fresh();
        for from in [0, 100, 101, 350] {
            let to = [100, 101, 350, 500][[0, 100, 101, 350]
                .iter()
                .position(|it| *it == from)
                .unwrap()];
            write(directory.path(), from..to, LEAST_BYTES);
        }
        assert_eq!(read(directory.path()), ((0..500).collect(), 0));
        only_segment(directory.path());
    }

    #[test]
    fn a_writer_knows_what_earlier_ones_have_written_of_its_ring() {
        let directory = fresh();
        let open = |ring| {
            let path = directory.path().join("it");
            Log::open(path, HEADER_4MS, Some(LEAST_BYTES), ring).unwrap()
        };
        assert!(!open(RING).has(0), "nothing yet");
        write(directory.path(), 0..100, LEAST_BYTES);
        let log = open(RING);
        assert!((0..100).all(|end| log.has(end)) && !log.has(100));
        assert!(!open(RING + 1).has(0), "another ring, which begins anew");
        // The name of a rule is written before its event.
        let mut log = open(RING);
        log.put(NAME, 1100, 100, &[0; BODY]);
        log.flush().unwrap();
        assert!(open(RING).has(99) && !open(RING).has(100));
        // A segment that was just begun says nothing.
        let header = fs::read(only_segment(directory.path())).unwrap();
        let next = directory.path().join("it/0000000002.history");
        fs::write(next, &header[..HEADER]).unwrap();
        assert!(open(RING).has(99) && !open(RING).has(100));
        // However far the ring has come since.
        log.flush().unwrap();
        drop(log);
        let mut log = open(RING);
        log.adopt(100, 0);
        assert!(log.has(100));
        assert!((8..63).all(|bits| !log.has(1 << bits)));
        // What is met again takes nothing back.
        log.reach(50);
        log.note(0);
        log.flush().unwrap();
        assert!(open(RING).has(99));
    }

    #[test]
    fn what_has_left_the_ring_and_is_not_in_the_history_is_counted_once() {
        let directory = fresh();
        let mut counted = 0;
        // A writer that finds the ring released so far, and then loses as many, and is killed before it says so or not.
        let mut lost = |released, too_slow, is_killed: bool| {
            let mut log = open(directory.path(), Some(LEAST_BYTES));
            let missing = log.adopt(released, counted);
            log.flush().unwrap();
            if !is_killed {
                log.note(missing + too_slow);
                log.flush().unwrap();
            }
            counted += missing + too_slow;
            missing
        };
        let bytes = |events: u64| events * BODY as u64;
        assert_eq!(lost(bytes(100), 0, false), 0, "it begins there");
        assert_eq!(lost(bytes(100), 0, false), 0);
        assert_eq!(lost(bytes(130) + 8, 5, false), 30, "and 5 by the disk");
        assert_eq!(lost(bytes(130) + 8, 0, false), 0, "once");
        // What is in the history and was not released is not lost.
        assert_eq!(lost(bytes(90), 0, false), 0);
        // 20 were counted and not noted, and 7 neither.
        assert_eq!(lost(bytes(130) + 8, 20, true), 0);
        assert_eq!(lost(bytes(157) + 8, 0, false), 7);
        assert_eq!(lost(bytes(157) + 8, 0, false), 0, "once");
        // Further than 32 bits tell.
        let far = ((9 << 32) - bytes(157) - 8) / BODY as u64;
        assert_eq!(lost(9 << 32, 0, false), far);
        let mut reader = Reader::open(directory.path(), "it", UNIX_EPOCH).unwrap();
        assert!(reader.next().unwrap().is_none());
        assert_eq!(reader.lost, 30 + 5 + 20 + 7 + far);
        assert_eq!(reader.lost, counted);
    }

    #[test]
    fn the_oldest_goes_first_and_the_rest_stays_within_bounds() {
        let directory = fresh();
        for from in (0..30_000).step_by(2500) {
            write(directory.path(), from..from + 2500, LEAST_BYTES);
        }
        let (ages, damaged) = read(directory.path());
        assert_eq!(damaged, 0);
        assert_eq!(*ages.last().unwrap(), 29_999);
        assert!(
            ages.windows(2).all(|two| two[1] == two[0] + 1),
            "without a gap"
        );
        // Seven of eight segments are full, of a thousand records less two of names and the header.
        assert!((7 * 1000..8 * 1024).contains(&ages.len()), "{}", ages.len());
        let sizes = segments(&directory.path().join("it")).unwrap();
        let sizes: u64 = sizes
            .iter()
            .map(|(_, path)| fs::metadata(path).unwrap().len())
            .sum();
        assert!(sizes <= LEAST_BYTES, "{sizes}");
    }

    #[test]
    fn a_write_that_was_torn_costs_the_last_record_alone() {
        let whole = fresh();
        write(whole.path(), 0..10, LEAST_BYTES);
        let bytes = fs::read(only_segment(whole.path())).unwrap();
        // One of them is a name.
        assert_eq!(bytes.len(), HEADER + 11 * RECORD);
        for cut in [1, 3, 17, RECORD - 1] {
            let directory = fresh();
            let path = directory.path().join("it/0000000001.history");
            fs::write(&path, &bytes[..bytes.len() - cut]).unwrap();
            assert_eq!(
                read(directory.path()),
                ((0..9).collect(), 0),
                "less {cut} bytes"
            );
            // And whoever goes on does so behind what is whole.
            write(directory.path(), 9..12, LEAST_BYTES);
            assert_eq!(
                read(directory.path()),
                ((0..12).collect(), 0),
                "less {cut} bytes"
            );
        }
        // As long as it should be, but not written: zeros, which no checksum fits.
        let directory = fresh();
        let path = directory.path().join("it/0000000001.history");
        let mut zeros = bytes.clone();
        zeros[bytes.len() - RECORD..].fill(0);
        fs::write(&path, &zeros).unwrap();
        assert_eq!(read(directory.path()), ((0..9).collect(), 1));
        write(directory.path(), 9..12, LEAST_BYTES);
        assert_eq!(read(directory.path()), ((0..12).collect(), 0));
    }

    #[test]
    fn a_damaged_record_in_the_middle_costs_itself_and_is_counted() {
        let directory = fresh();
        write(directory.path(), 0..10, LEAST_BYTES);
        let path = only_segment(directory.path());
        let mut bytes = fs::read(&path).unwrap();
        bytes[HEADER + 5 * RECORD + 40] ^= 1;
        fs::write(&path, bytes).unwrap();
        let (ages, damaged) = read(directory.path());
        assert_eq!((ages.len(), damaged), (9, 1));
    }

    #[test]
    fn a_disk_that_is_full_for_a_while_costs_what_ends_meanwhile() {
        let directory = fresh();
        let mut log = open(directory.path(), Some(LEAST_BYTES));
        let good = mem::replace(&mut log.file, File::open("/dev/full").unwrap());
        log.wanted = 3;
        append(&mut log, 0..3);
        log.flush().unwrap_err();
        log.file = good;
        assert_eq!(log.recover(), 3);
        log.wanted = 2;
        append(&mut log, 3..5);
        log.flush().unwrap();
        assert_eq!((log.wanted, log.recover()), (0, 0));
        assert_eq!(read(directory.path()), (vec![3, 4], 0));
    }

    #[test]
    fn less_room_than_before_is_kept_to_and_stale_histories_go() {
        let directory = fresh();
        write(directory.path(), 0..20_000, 4 * LEAST_BYTES);
        write(directory.path(), 20_000..20_001, LEAST_BYTES);
        let sizes = segments(&directory.path().join("it")).unwrap();
        let sizes: u64 = sizes
            .iter()
            .map(|(_, path)| fs::metadata(path).unwrap().len())
            .sum();
        assert!(sizes <= LEAST_BYTES, "{sizes}");
        assert_eq!(read(directory.path()).0.last(), Some(&20_000));
        // Who says nothing of room leaves what there is.
        write(directory.path(), 20_001..40_000, 4 * LEAST_BYTES);
        let kept = read(directory.path()).0.len();
        drop(open(directory.path(), None));
        assert_eq!(read(directory.path()).0.len(), kept);

        fs::write(directory.path().join("something else"), "").unwrap();
        let soon = SystemTime::now() + STALE - Duration::from_secs(60);
        remove_stale(directory.path(), soon).unwrap();
        assert!(directory.path().join("it").exists());
        remove_stale(directory.path(), soon + Duration::from_secs(120)).unwrap();
        assert!(!directory.path().join("it").exists());
        assert!(directory.path().join("something else").exists());
    }

    #[test]
    fn a_time_that_no_calendar_has_is_damage() {
        let directory = fresh();
        let mut log = open(directory.path(), Some(LEAST_BYTES));
        log.append(LATEST + 1, &event(1), 1, names).unwrap();
        log.flush().unwrap();
        assert_eq!(read(directory.path()), (vec![], 1));
    }

    #[test]
    fn another_version_is_refused_by_the_reader_and_left_alone_by_the_writer() {
        for (at, part) in [
            (0, "no history"),
            (8, "another version"),
            (16, "damaged at its beginning"),
        ] {
            let directory = fresh();
            write(directory.path(), 0..10, LEAST_BYTES);
            let path = only_segment(directory.path());
            let mut bytes = fs::read(&path).unwrap();
            bytes[at] ^= 0xff;
            fs::write(&path, &bytes).unwrap();
            let mut reader = Reader::open(directory.path(), "it", UNIX_EPOCH).unwrap();
            assert!(reader.next().unwrap().is_none());
            assert!(reader.refused[0].to_string().contains(part));
            write(directory.path(), 10..20, LEAST_BYTES);
            assert_eq!(fs::read(&path).unwrap(), bytes);
            assert_eq!(segments(&directory.path().join("it")).unwrap().len(), 2);
            // The rest is there all the same.
            assert_eq!(read(directory.path()).0, (10..20).collect::<Vec<_>>());
        }
        // Nothing was written yet when the power went.
        let directory = fresh();
        write(directory.path(), 0..10, LEAST_BYTES);
        fs::write(directory.path().join("it/0000000002.history"), [0; HEADER]).unwrap();
        assert_eq!(read(directory.path()), ((0..10).collect(), 1));
        // Too short for a header: whoever began it died.
        let directory = fresh();
        write(directory.path(), 0..10, LEAST_BYTES);
        fs::write(only_segment(directory.path()), &MAGIC[..5]).unwrap();
        write(directory.path(), 10..20, LEAST_BYTES);
        assert_eq!(read(directory.path()).0, (10..20).collect::<Vec<_>>());
        let error = Reader::open(directory.path(), "other", UNIX_EPOCH)
            .map(|_| ())
            .unwrap_err();
        assert_eq!(exit_code(&error), Kind::Pins as u8, "{error}");
    }

    #[test]
    fn a_reader_goes_on_where_a_writer_does() {
        let directory = fresh();
        write(directory.path(), 0..1, LEAST_BYTES);
        let mut reader = Reader::open(directory.path(), "it", UNIX_EPOCH).unwrap();
        let follow = reader.follow().unwrap();
        let mut seen = 0;
        for to in [1, 2, 900, 5000] {
            if to > 1 {
                write(directory.path(), seen..to, LEAST_BYTES);
                follow.wait().unwrap();
            }
            while let Some(past) = reader.next().unwrap() {
                assert_eq!(past.ended.age, Duration::from_millis(4 * u64::from(seen)));
                seen += 1;
            }
            assert_eq!(seen, to);
        }
    }

    #[test]
    fn what_ended_before_is_passed_over() {
        let directory = fresh();
        write(directory.path(), 0..100, LEAST_BYTES);
        let since = UNIX_EPOCH + Duration::from_millis(1090);
        let mut reader = Reader::open(directory.path(), "it", since).unwrap();
        let mut ages = Vec::new();
        while let Some(past) = reader.next().unwrap() {
            ages.push(past.ended.age.as_millis() / 4);
        }
        assert_eq!(ages, (90..100).collect::<Vec<_>>());
    }
}
