//! What has ended, on disk: a bounded history that outlives the loader.
//!
//! An instance has a directory with segments, of which each is `SEGMENTS`th of the room there is; the oldest goes
//! when a new one is begun. A segment is a header and then records of one size, each with a checksum, so that one that was
//! torn when the power went costs nothing but itself:
//!
//! ```text
//! header   magic 8, version 4, bytes of a record 4, nanoseconds in a clock unit 4, one way 4, zeros 4, checksum 4
//! record   checksum 4, kind 4, when 8 (milliseconds since 1970), body 128
//! ```
//!
//! The body is an [`Event`]; or, before the first event of a rule in each segment, the rule's number and name. In machine
//! byte order: a history is read where it was written.

use std::{
    collections::{HashMap, VecDeque},
    fs::{self, DirBuilder, File, OpenOptions},
    io::{self, BufReader, Read, Write},
    mem,
    os::fd::AsFd,
    os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt},
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
use aya::programs::Xdp;
use nix::{
    fcntl::OFlag,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
};
use twheel_common::{
    config::NAME_BYTES,
    event::{Event, Record},
};

use crate::{
    clock::Clock,
    data_plane,
    failure::{Failure, Kind},
    output::Expired,
    pins::Pins,
    policy::install::{self, Names},
};

/// Where histories are, unless told otherwise.
pub const DIRECTORY: &str = "/var/lib/twheel";

/// Room for one, unless told otherwise: 64 MiB.
pub const DEFAULT_BYTES: u64 = 64 << 20;

const MAGIC: [u8; 8] = *b"twheel\0h";
/// Changes with [`Event`].
const VERSION: u32 = 1;
const HEADER: usize = 32;
const BODY: usize = size_of::<Event>();
const RECORD: usize = 16 + BODY;
const SEGMENTS: u64 = 8;
/// The least room that makes sense: a thousand events a segment.
pub const LEAST_BYTES: u64 = SEGMENTS * 1024 * RECORD as u64;

/// The year 9999, milliseconds since 1970: no event is of later.
const LATEST: u64 = 253_370_764_800_000;

const ENDED: u32 = 1;
const NAME: u32 = 2;

/// Batches on their way to the disk. A disk that falls further behind costs events of the history, which are counted;
/// it holds up neither wheels nor output.
const BATCHES: usize = 16;
/// What was written is on the disk after this, at the latest.
const SYNC: Duration = Duration::from_secs(1);
/// A history that was not written to for so long is removed.
const STALE: Duration = Duration::from_secs(30 * 86_400);

/// Writes a history, on a thread of its own.
pub struct Writer {
    /// Until it is to end.
    batches: Option<SyncSender<Vec<Record>>>,
    thread: Option<JoinHandle<()>>,
    lost: Arc<AtomicU64>,
}

impl Writer {
    /// Goes on with an instance's history below `directory`, or begins one. `bytes`: room for it on disk, at least
    /// [`LEAST_BYTES`].
    pub fn start(
        directory: &Path,
        pins: &Pins,
        bytes: u64,
        clock: Clock,
        one_way: bool,
    ) -> Result<Self> {
        let path = directory.join(pins.name());
        DirBuilder::new()
            .recursive(true)
            .mode(0o700)
            .create(&path)
            .with_context(|| format!("cannot create {}, for the history", path.display()))?;
        let header = Header {
            unit_ns: clock.unit().subsec_nanos(),
            one_way,
        };
        remove_stale(directory, SystemTime::now())?;
        let mut log = Log::open(path, header, bytes)?;
        let names = Names::open(&install::pinned(pins))?;
        let sweep = pins.xdp("twheel_sweep")?;
        let lost = Arc::new(AtomicU64::new(0));
        let (batches, inbox) = sync_channel(BATCHES);
        let counter = lost.clone();
        let thread = thread::Builder::new()
            .name("twheel-history".to_owned())
            .spawn(move || {
                let mut failing = false;
                // A disk that was full may have room again.
                while let Err(error) = write(&mut log, &inbox, &names, &sweep, clock, &mut failing)
                {
                    let lost = log.recover();
                    counter.fetch_add(lost, Ordering::Relaxed);
                    if !failing {
                        say!("twheel: {error:#}: what ends meanwhile is not in the history");
                    }
                    failing = true;
                }
            })
            .context("cannot start the history's thread")?;
        Ok(Self {
            batches: Some(batches),
            thread: Some(thread),
            lost,
        })
    }

    /// Adds what has ended.
    pub fn add(&self, batch: Vec<Record>) {
        let Some(batches) = &self.batches else {
            return;
        };
        if let Err(TrySendError::Full(batch) | TrySendError::Disconnected(batch)) =
            batches.try_send(batch)
        {
            let lost = ended(&batch).count() as u64;
            self.lost.fetch_add(lost, Ordering::Relaxed);
        }
    }

    /// The same, for whoever can wait.
    pub fn add_all(&self, batch: Vec<Record>) {
        if let Some(batches) = &self.batches {
            // The thread is there until it is told to end.
            let _ = batches.send(batch);
        }
    }

    /// Events that are not in the history, because the disk was too slow or full.
    pub fn lost(&self) -> Arc<AtomicU64> {
        self.lost.clone()
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

fn ended(batch: &[Record]) -> impl Iterator<Item = &Event> {
    batch.iter().filter_map(|record| match record {
        Record::Ended(event) => Some(event),
        Record::Rto(_) => None,
    })
}

fn write(
    log: &mut Log,
    inbox: &Receiver<Vec<Record>>,
    names: &Names,
    sweep: &Xdp,
    clock: Clock,
    failing: &mut bool,
) -> Result<()> {
    let mut dirty = false;
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
        log.wanted = ended(&batch).count() as u64;
        if log.wanted == 0 {
            continue;
        }
        let now = data_plane::now(sweep)?;
        let wall = since_1970(SystemTime::now());
        for event in ended(&batch) {
            // One that another CPU has ended after the time was read is of now.
            let ago = (now.wrapping_sub(event.at as u32) as i32).max(0);
            let when = wall.saturating_sub(clock.duration(ago as u64).as_millis() as u64);
            log.append(when, event, |rule| names.of(rule))?;
        }
        log.flush()?;
        *failing = false;
        dirty = true;
    }
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
}

impl Log {
    fn open(directory: PathBuf, header: Header, bytes: u64) -> Result<Self> {
        let mut segments = VecDeque::from(segments(&directory)?);
        let segment = bytes.max(LEAST_BYTES) / SEGMENTS;
        // There may have been more room when they were written.
        let length = |(_, path): &(u64, PathBuf)| fs::metadata(path).map_or(0, |it| it.len());
        let mut total: u64 = segments.iter().map(length).sum();
        while total > bytes && segments.len() > 1 {
            total -= segments.front().map_or(0, length);
            remove_oldest(&mut segments)?;
        }
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
        })
    }

    fn append(
        &mut self,
        when: u64,
        event: &Event,
        name: impl Fn(u16) -> Result<Option<String>>,
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
        }
        if let Some(name) = name(event.rule as u16)?
            && self.named.get(&event.rule) != Some(&name)
        {
            let mut body = [0; BODY];
            body[..4].copy_from_slice(&event.rule.to_ne_bytes());
            body[4..][..name.len().min(NAME_BYTES)]
                .copy_from_slice(&name.as_bytes()[..name.len().min(NAME_BYTES)]);
            self.put(NAME, when, &body);
            self.named.insert(event.rule, name);
        }
        // SAFETY: an `Event` is `repr(C)`, integers alone, without padding.
        let body = unsafe { &*(&raw const *event).cast::<[u8; BODY]>() };
        self.put(ENDED, when, body);
        self.buffered += 1;
        if self.buffer.len() > FLUSH {
            self.flush()?;
        }
        Ok(())
    }

    fn put(&mut self, kind: u32, when: u64, body: &[u8; BODY]) {
        let start = self.buffer.len();
        self.buffer.extend([0; 4]);
        self.buffer.extend(kind.to_ne_bytes());
        self.buffer.extend(when.to_ne_bytes());
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
        Ok(())
    }

    /// After a failure: leaves the file as it was before. Returns how many events are lost by that.
    fn recover(&mut self) -> u64 {
        // Should that fail too, a reader passes over what is torn.
        let _ = self.file.set_len(self.length);
        self.buffer.clear();
        self.named.clear();
        self.buffered = 0;
        mem::take(&mut self.wanted)
    }

    /// And sees it on the disk.
    fn sync(&self) -> Result<()> {
        self.file.sync_data().context("cannot write the history")
    }
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
        let Some(segments) = path.is_dir().then(|| segments(&path)).transpose()? else {
            continue;
        };
        let written = |(_, path): &(u64, PathBuf)| fs::metadata(path)?.modified();
        let Some(Ok(newest)) = segments.last().map(written) else {
            continue;
        };
        if now.duration_since(newest).is_ok_and(|since| since > STALE) {
            for (_, segment) in &segments {
                fs::remove_file(segment)
                    .with_context(|| format!("cannot remove {}", segment.display()))?;
            }
            // What else is there is not ours.
            let _ = fs::remove_dir(&path);
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
    let mut file = OpenOptions::new()
        .append(true)
        .create_new(true)
        .mode(0o600)
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

/// A flow that has ended, as the history has it.
pub struct Past {
    /// When.
    pub when: SystemTime,
    /// What.
    pub ended: Expired,
    /// The rule that it had met.
    pub rule: Option<String>,
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
                continue;
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
        let body = &record[16..];
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
                    rule: self.names.get(&event.rule).cloned(),
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
        state::{Seen, View},
    };

    use super::*;
    use crate::failure::exit_code;

    const HEADER_4MS: Header = Header {
        unit_ns: 4_000_000,
        one_way: false,
    };
    const RULE: u32 = 7;

    fn event(number: u32) -> Event {
        let seen = Seen::first(Direction::FromLow, tcp::SYN, View::default()).unwrap();
        Event {
            key: FlowKey::from_parts([0, 1, 0, 2], 6 << 32 | u64::from(number & 0xffff)),
            at: number.into(),
            age: number,
            idle: 25,
            seen: seen.0.into(),
            reason: Reason::Idle as u32,
            cpu: 0,
            rule: if number.is_multiple_of(2) { RULE } else { 0 },
            account: [Traffic::default(); 2],
            pace: [Pace::default(); 2],
            positions: [0; 2],
        }
    }

    fn name(rule: u16) -> Result<Option<String>> {
        Ok((rule != 0).then(|| "web".to_owned()))
    }

    fn write(directory: &Path, numbers: std::ops::Range<u32>, bytes: u64) {
        let mut log = Log::open(directory.join("it"), HEADER_4MS, bytes).unwrap();
        for number in numbers {
            log.append(1000 + u64::from(number), &event(number), name)
                .unwrap();
        }
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
                past.rule.as_deref(),
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
        let mut log = Log::open(directory.path().join("it"), HEADER_4MS, LEAST_BYTES).unwrap();
        let good = mem::replace(&mut log.file, File::open("/dev/full").unwrap());
        log.wanted = 3;
        for number in 0..3 {
            log.append(1000 + u64::from(number), &event(number), name)
                .unwrap();
        }
        log.flush().unwrap_err();
        log.file = good;
        assert_eq!(log.recover(), 3);
        log.wanted = 2;
        for number in 3..5 {
            log.append(1000 + u64::from(number), &event(number), name)
                .unwrap();
        }
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
        let mut log = Log::open(directory.path().join("it"), HEADER_4MS, LEAST_BYTES).unwrap();
        log.append(LATEST + 1, &event(1), name).unwrap();
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
