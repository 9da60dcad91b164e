//! Reads a history, also while it is being written.

use std::{
    collections::HashMap,
    fs::File,
    io::{self, BufReader, Read as _},
    os::{fd::AsFd, unix::fs::FileExt},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::inotify::{AddWatchFlags, InitFlags, Inotify},
};
use serde::{Deserialize, Serialize};
use twheel_common::config::NAME_BYTES;

use super::format::{
    HEAD, HEADER, HOST, Header, IFACE, INSTANCE, LATEST, LOST, NAME, NAT, OWNER, RECORD, SEED,
    ZONE, is_whole, segments, u32_at, u64_at,
};
use super::record::{self, Known, Stored};
use crate::{
    action::Reaped,
    clock::Clock,
    failure::{Failure, Kind},
    identity::Identity,
    model::{Ended, EventKind, Flow, FlowEvent, KnownAs, Mark, Measure, RunEvent, Translation},
    output::Output,
    owner::Owner,
};

/// A place in a history: everything before it was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Position {
    /// The number of a segment; 0: before the first one.
    pub segment: u64,
    /// The number of records of it that were read.
    pub record: u64,
    /// The checksum of the last of these records, which tells this history from another one; 0: not
    /// known.
    #[serde(default)]
    pub checksum: u32,
}

/// What is told in a history.
pub enum PastEvent {
    /// An event of a flow.
    Flow(FlowEvent),
    /// An action on an expired flow: which event reported the flow's end, that end, what was done.
    Reaped(Mark, Ended, Box<Reaped>),
    /// Something of the run itself.
    Run(RunEvent),
}

/// An event from the history.
pub struct Past {
    /// Which event it is, and when it was.
    pub mark: Mark,
    /// Who reported it.
    pub identity: Arc<Identity>,
    /// What is told.
    pub event: PastEvent,
    /// The names that belong to the flow, if it is about one.
    pub known_as: KnownAs,
}

impl Past {
    /// Its kind.
    pub fn kind(&self) -> EventKind {
        match &self.event {
            PastEvent::Flow(event) => event.kind(),
            PastEvent::Reaped(..) => EventKind::Reap,
            PastEvent::Run(_) => EventKind::Run,
        }
    }

    /// The flow that it is about, if it is about one.
    pub fn flow(&self) -> Option<&Flow> {
        match &self.event {
            PastEvent::Flow(event) => Some(event.flow()),
            PastEvent::Reaped(_, ended, _) => Some(&ended.flow),
            PastEvent::Run(_) => None,
        }
    }

    /// Writes it. `output` is that of its [`identity`](Self::identity).
    pub fn write(&self, output: &mut dyn Output, to: &mut dyn io::Write) -> io::Result<()> {
        let (mark, named) = (self.mark, self.known_as.named());
        match &self.event {
            PastEvent::Flow(event) => output.flow(mark, event, named, to),
            PastEvent::Reaped(end, ended, reaped) => {
                output.reaped(mark, (*end, ended, reaped), named, to)
            }
            PastEvent::Run(event) => output.run(mark, event, to),
        }
    }
}

/// Reads a history from the oldest event on, also while it is being written.
pub struct HistoryReader {
    directory: PathBuf,
    open: Option<Segment>,
    /// The number of the segment that was opened last.
    last: u64,
    /// Earlier events are skipped.
    since: SystemTime,
    /// What comes before was read by an earlier reader.
    from: Position,
    /// What is lost, damaged or refused before this place was counted by an earlier reader.
    counted: Position,
    /// Damaged records, which were skipped.
    pub damaged: u64,
    /// Events that the history has lost, as its writers recorded; an upper bound if a writer was
    /// killed.
    pub lost: u64,
    /// Segments that were removed before they were read, because the history had reached its
    /// maximum size.
    pub missed: u64,
    /// The newest of them; 0: none.
    pub removed: u64,
    /// Segments that cannot be read, and were skipped: why, each in a sentence.
    pub refused: Vec<anyhow::Error>,
}

struct Segment {
    path: PathBuf,
    file: BufReader<File>,
    clock: Clock,
    one_way: bool,
    names: HashMap<u32, String>,
    identity: Arc<Identity>,
    /// The translation of the flow of the next event, and where that event ends in the ring.
    nat: Option<(u64, Translation)>,
    /// The owner of its socket, likewise.
    owner: Option<(u64, Owner)>,
    /// The number of records that were read.
    read: u64,
    /// The checksum of the last of them.
    checksum: u32,
}

impl HistoryReader {
    /// Opens the history of the instance of this name, below `directory`.
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
            from: Position::default(),
            counted: Position::default(),
            damaged: 0,
            lost: 0,
            missed: 0,
            removed: 0,
            refused: Vec::new(),
        })
    }

    /// Goes on where an earlier reader stood. If the history does not have what that has read, it is
    /// another one, or was cut off after a failed write or a power failure; then it is read from its
    /// beginning. Returns whether it is the same.
    pub fn go_on(&mut self, from: Position) -> Result<bool> {
        let segments = segments(&self.directory)?;
        let newest = segments.last().map_or(0, |(number, _)| *number);
        if from.segment == 0 || newest < from.segment {
            return Ok(from.segment == 0);
        }
        let same = segments.iter().find(|(number, _)| *number == from.segment);
        // (A segment that was removed is counted as missed.)
        if let Some((_, path)) = same
            && from.record > 0
            && from.checksum != 0
        {
            let mut record = [0; RECORD];
            let at = HEADER as u64 + (from.record - 1) * RECORD as u64;
            let file =
                File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
            let is_there = file.read_exact_at(&mut record, at).is_ok();
            if !is_there || u32_at(&record, 0) != from.checksum {
                return Ok(false);
            }
        }
        self.from = from;
        self.last = from.segment - 1;
        Ok(true)
    }

    /// Counts and refuses only what comes after this place: an earlier reader of the same history has
    /// come so far.
    pub fn was_counted_until(&mut self, place: Position) {
        self.counted = place;
    }

    /// The place before everything that the history has; `None` if it has nothing.
    pub fn oldest(&self) -> Result<Option<Position>> {
        let segments = segments(&self.directory)?;
        Ok(segments.first().map(|(number, _)| Position {
            segment: *number,
            ..Position::default()
        }))
    }

    /// Where this reader stands.
    pub fn position(&self) -> Position {
        match &self.open {
            Some(segment) => Position {
                segment: self.last,
                record: segment.read,
                checksum: segment.checksum,
            },
            // Between two segments, or before the first.
            None => Position {
                segment: self.last,
                record: 0,
                checksum: 0,
            }
            .max(self.from),
        }
    }

    /// Who reported the events of the segment that is being read; `None` if that is not known yet.
    pub fn identity(&self) -> Option<Arc<Identity>> {
        let identity = &self.open.as_ref()?.identity;
        (!identity.instance.is_empty()).then(|| identity.clone())
    }

    /// The next event; `None` if there is none yet.
    // Not an iterator: more events may follow after `None`.
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
                // The end of the segment; if it is the newest, for now. A record may have been
                // appended before a newer segment was begun, so read once more.
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
            segment.read += 1;
            segment.checksum = u32_at(&record, 0);
            let was_read = (self.last, segment.read) <= (self.from.segment, self.from.record);
            let counts = !was_read
                && (self.last, segment.read) > (self.counted.segment, self.counted.record);
            if !is_whole(&record) || u64_at(&record, 8) > LATEST {
                self.damaged += u64::from(counts);
                continue;
            }
            let when = record::time(u64_at(&record, 8));
            if u32_at(&record, 4) == LOST && when >= self.since && counts {
                self.lost += u64_at(&record, HEAD);
            }
            if let Some(past) = segment.take(&record)
                && past.mark.time >= self.since
                && !was_read
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
                // The oldest segment may be removed at any moment.
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                file => file.with_context(|| format!("cannot open {}", path.display()))?,
            };
            let modified = file.metadata()?.modified()?;
            let mut file = BufReader::with_capacity(RECORD * 512, file);
            let mut header = [0; HEADER];
            if !read_whole(&mut file, &mut header)? {
                // The header is not written yet, or the writer died before it wrote it.
                if number < newest {
                    self.last = number;
                }
                continue;
            }
            // The first segment that is found: none before it counts as missed.
            if (self.last > 0 || self.from.segment > 0) && number > self.last + 1 {
                self.missed += number - self.last - 1;
                self.removed = number - 1;
            }
            self.last = number;
            // Events may still be appended to the newest segment.
            if modified < self.since && number < newest {
                continue;
            }
            if header == [0; HEADER] {
                // The power failed before the header was written.
                self.damaged += u64::from(number > self.counted.segment);
                continue;
            }
            let header = match Header::read(&header, &path) {
                Ok(header) => header,
                Err(error) => {
                    if number > self.counted.segment {
                        self.refused.push(error);
                    }
                    continue;
                }
            };
            self.open = Some(Segment {
                path,
                file,
                clock: Clock::of_jiffies(Duration::from_nanos(header.unit_ns.into())),
                one_way: header.one_way,
                names: HashMap::new(),
                identity: Arc::default(),
                nat: None,
                owner: None,
                read: 0,
                checksum: 0,
            });
            return Ok(true);
        }
        Ok(false)
    }

    /// Returns a means to wait for more events. Create it before you read the present ones, so that
    /// you miss none.
    pub fn follow(&self) -> Result<Follow> {
        let watch = || -> nix::Result<Inotify> {
            let inotify = Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?;
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
    /// Returns when something was written since the last call, or this time has passed.
    pub fn wait_for(&self, most: Duration) -> Result<()> {
        let mut watched = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        let most = PollTimeout::try_from(most).unwrap_or(PollTimeout::MAX);
        match poll(&mut watched, most) {
            Ok(_) | Err(nix::Error::EINTR) => self.forget(),
            Err(error) => Err(io::Error::from(error)).context("cannot wait for the history"),
        }
    }

    /// Returns when something was written since the last call.
    ///
    /// # Errors
    ///
    /// A broken pipe, as soon as the reader of standard output has gone.
    pub fn wait(&self) -> Result<()> {
        let stdout = io::stdout();
        let mut watched = [
            PollFd::new(self.0.as_fd(), PollFlags::POLLIN),
            // `poll` reports errors even if no events are requested.
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
        self.forget()
    }

    fn forget(&self) -> Result<()> {
        match self.0.read_events() {
            Ok(_) | Err(nix::Error::EINTR | nix::Error::EAGAIN) => Ok(()),
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
                let identity = Arc::make_mut(&mut self.identity);
                match u32_at(body, 0) {
                    HOST => identity.host = name,
                    INSTANCE => identity.instance = name,
                    SEED => identity.seed = u64::from_str_radix(&name, 16).unwrap_or(0),
                    number => drop(self.names.insert(number, name)),
                }
                None
            }
            NAT => {
                self.nat = Some((u64_at(record, 20), record::nat(body)));
                None
            }
            OWNER => {
                self.owner = Some((u64_at(record, 20), record::owner(body)));
                None
            }
            kind => {
                let (number, stored) = record::read(kind, body)?;
                let mark = Mark {
                    number,
                    time: record::time(u64_at(record, 8)),
                };
                let (nat, owner) = (self.nat.take(), self.owner.take());
                let mut past = self.past(mark, stored)?;
                // After a kill it may belong to an event that was not written.
                let end = u64_at(record, 20);
                past.known_as.nat = nat.filter(|(it, _)| *it == end).map(|(_, nat)| nat);
                let owner = owner.filter(|(it, _)| *it == end);
                past.known_as.owner = owner.map(|(_, owner)| Arc::new(owner));
                Some(past)
            }
        }
    }

    fn past(&self, mark: Mark, stored: Stored) -> Option<Past> {
        let measure = Measure {
            clock: self.clock,
            one_way: self.one_way,
        };
        let (event, known) = match stored {
            Stored::Ring(record) => {
                let event = FlowEvent::new(&record, measure)?;
                (PastEvent::Flow(event), Some(record::known_in(&record)))
            }
            Stored::Reaped(end, reaped) => {
                let known = record::known(&reaped.event);
                let ended = Ended::new(&reaped.event, self.clock, self.one_way)?;
                (PastEvent::Reaped(end, ended, Box::new(reaped)), Some(known))
            }
            Stored::Run(event) => (PastEvent::Run(event), None),
        };
        Some(Past {
            mark,
            identity: self.identity.clone(),
            event,
            known_as: known.map(|known| self.known_as(known)).unwrap_or_default(),
        })
    }

    fn known_as(&self, (rule, point, zone): Known) -> KnownAs {
        let name = |number: u32| self.names.get(&number).cloned();
        KnownAs {
            rule: name(rule.into()),
            iface: name(IFACE | point.interface()),
            zone: name(ZONE | u32::from(zone))
                .and_then(|zone| zone.parse().ok())
                .unwrap_or(0),
            nat: None,
            owner: None,
        }
    }
}

/// Fills a buffer; if the file ends first, restores the file's position and returns false.
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
