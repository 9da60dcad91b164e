//! Reads a history as it grows, and sends it, whoever dies on the way.

use std::{
    collections::BTreeSet,
    io,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};

use super::{
    Alive, Destination, Format, Sink,
    backlog::Backlog,
    position::{Kept, Last},
};
use crate::{
    history::{HistoryReader, Past, Position},
    identity::Identity,
};

/// The buffer is sent when it is as long as this, in bytes, or when there are no more events.
const FLUSH: usize = 64 << 10;
/// How often the position is kept.
const KEEP: Duration = Duration::from_secs(1);
/// How often to look whether everything has arrived.
const SETTLE: Duration = Duration::from_millis(100);
/// How often an export tells that it is alive.
const ALIVE: Duration = Duration::from_secs(60);
/// How long to wait before another attempt: at first, and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(15));
/// Most sentences about one failure, which may show in several ways.
const SENTENCES: usize = 8;

/// What is sent where.
pub struct Export<'a> {
    /// The directory of the histories.
    pub history: &'a Path,
    /// The name of the history.
    pub name: &'a str,
    /// Where to.
    pub to: &'a dyn Destination,
    /// End when everything that is in the history now has been sent.
    pub once: bool,
}

/// How sending ended.
enum Sent {
    /// All that there was is sent.
    All,
    /// The other end is gone.
    Broken(io::Error),
}

impl Export<'_> {
    /// Sends what the history has and gets, from the kept position on. Tries again, for ever, if the
    /// other end closes or is not there.
    ///
    /// # Errors
    ///
    /// The history cannot be read, or the target is a file that cannot be opened or a pipe whose reader
    /// has closed it. With `once`: the position cannot be kept.
    pub fn run(&self, format: &mut dyn Format, kept: &mut Kept) -> Result<()> {
        let mut said = Said {
            backlog: Backlog::new(kept.last.as_ref()),
            ..Said::default()
        };
        let mut wait = RETRY.0;
        // What was reported since it last worked.
        let mut told = BTreeSet::new();
        let tell = |told: &mut BTreeSet<String>, error: &io::Error, what| {
            let sentence = self.to.complaint(error);
            if told.len() < SENTENCES && !told.contains(&sentence) {
                say!("twheel: {sentence}: {what}");
                told.insert(sentence);
            }
        };
        loop {
            let reader = self.reader(kept, &mut said)?;
            match self.to.open(kept.position) {
                Ok(mut sink) => match said.send(self, (reader, sink.as_mut()), format, kept)? {
                    Sent::All => return kept.keep(kept.position, kept.last.clone()),
                    Sent::Broken(error) if self.to.ends_with(&error, true) => {
                        return Err(error).with_context(|| format!("cannot write {}", self.to));
                    }
                    Sent::Broken(error) => {
                        if sink.has_worked() {
                            told.clear();
                            wait = RETRY.0;
                        }
                        tell(&mut told, &error, "sending again");
                    }
                },
                Err(error) if self.to.ends_with(&error, false) => {
                    return Err(error).with_context(|| format!("cannot open {}", self.to));
                }
                Err(error) => tell(&mut told, &error, "trying again until it is there"),
            }
            thread::sleep(wait);
            wait = (2 * wait).min(RETRY.1);
        }
    }

    /// A reader that stands at the kept position, or at the beginning if the history no longer has that.
    fn reader(&self, kept: &mut Kept, said: &mut Said) -> Result<HistoryReader> {
        let mut reader = HistoryReader::open(self.history, self.name, UNIX_EPOCH)?;
        if !reader.go_on(kept.position)? {
            say!(
                "twheel: the history no longer has the events that were sent last (it was removed, or \
                 cut off after a failure): sending it from its beginning"
            );
            (said.counted, said.removed) = (Position::default(), 0);
            said.keep(kept, Position::default(), None);
        }
        // From now on it counts what is removed.
        if kept.position == Position::default()
            && let Some(oldest) = reader.oldest()?
        {
            kept.position = oldest;
            reader.go_on(oldest)?;
        }
        reader.was_counted_until(said.counted);
        Ok(reader)
    }
}

/// What has been reported of the history that is being read.
#[derive(Default)]
struct Said {
    /// Segments that were removed before they were read, in this session.
    missed: u64,
    /// The newest segment that was reported as removed.
    removed: u64,
    /// Segments were removed before the next event.
    is_cut: bool,
    lost: u64,
    damaged: u64,
    /// What is lost or damaged before this place has been reported.
    counted: Position,
    /// What was read and has not arrived, and what is missing.
    backlog: Backlog,
    /// When the export last told that it is alive, and how far it was behind.
    alive: Option<(Instant, Duration)>,
    /// That the position cannot be kept was said.
    is_unkept: bool,
}

impl Said {
    /// Sends until the other end closes.
    fn send(
        &mut self,
        export: &Export<'_>,
        (mut reader, sink): (HistoryReader, &mut dyn Sink),
        format: &mut dyn Format,
        kept: &mut Kept,
    ) -> Result<Sent> {
        let follow = reader.follow()?;
        self.begin();
        let mut buffer = Vec::with_capacity(2 * FLUSH);
        format.begin(self.backlog.losses.all(), &mut buffer);
        let mut saved = Instant::now();
        loop {
            let at = reader.position();
            let past = reader.next()?;
            let now = Instant::now();
            self.tell(&mut reader, past.as_ref());
            self.alive(&reader, now, format, &mut buffer)?;
            if let Some(past) = &past {
                format.event(past, &mut buffer)?;
            }
            let is_end = past.is_none();
            if is_end || buffer.len() >= FLUSH {
                format.complete(self.backlog.losses.all(), &mut buffer);
                let next = if is_end { at } else { reader.position() };
                // What the format leaves out is behind us, too.
                if (!buffer.is_empty() || self.backlog.is_unwritten())
                    && let Err(error) = sink.write(&buffer, next, format)
                {
                    return Ok(Sent::Broken(error));
                }
                self.backlog.wrote(next);
                buffer.clear();
            }
            if now.duration_since(saved) >= KEEP || is_end {
                saved = now;
                match sink.arrived() {
                    Ok(position) => {
                        self.backlog.arrived(position);
                        self.keep(kept, position, self.backlog.last());
                    }
                    Err(error) => return Ok(Sent::Broken(error)),
                }
                if sink.is_closed() {
                    return Ok(Sent::Broken(io::ErrorKind::ConnectionReset.into()));
                }
            }
            if is_end {
                let is_settled = sink.is_settled();
                if export.once && is_settled {
                    if self.has_caught_up() {
                        continue;
                    }
                    return Ok(Sent::All);
                }
                follow.wait_for(if is_settled { KEEP } else { SETTLE })?;
            }
        }
    }

    /// The history is read again from the kept position on.
    fn begin(&mut self) {
        (self.missed, self.lost, self.damaged) = (0, 0, 0);
        self.is_cut = false;
        self.backlog.begin();
    }

    /// Keeps a position. Events go on if the disk is full: they are sent again if this process ends
    /// before the position can be kept.
    fn keep(&mut self, kept: &mut Kept, position: Position, last: Option<Last>) {
        match kept.keep(position, last) {
            Ok(()) => self.is_unkept = false,
            Err(error) if !self.is_unkept => {
                say!(
                    "twheel: {error:#}: sending goes on; free space there, or events are sent again \
                     after a restart"
                );
                self.is_unkept = true;
            }
            Err(_) => {}
        }
    }

    /// Whether the export was behind when it last told that it is alive, and is not any more.
    fn has_caught_up(&self) -> bool {
        let was_behind = self.alive.is_some_and(|(_, behind)| behind > KEEP);
        was_behind && self.backlog.behind(SystemTime::now()) <= KEEP
    }

    /// Lets the format tell that the export is alive, at the start, once a minute, when events are
    /// missing, and when it has caught up.
    fn alive(
        &mut self,
        reader: &HistoryReader,
        now: Instant,
        format: &mut dyn Format,
        to: &mut Vec<u8>,
    ) -> io::Result<()> {
        if let Some((at, _)) = self.alive {
            // What is missing is told sooner.
            let wait = match self.backlog.losses.has_grown() {
                true => KEEP,
                false => ALIVE,
            };
            if now.duration_since(at) < wait && !self.has_caught_up() {
                return Ok(());
            }
        }
        // A history that has no events yet does not tell whose it is.
        let Some(identity) = reader.identity() else {
            return Ok(());
        };
        let behind = self.backlog.behind(SystemTime::now());
        self.alive = Some((now, behind));
        let mut sums = self.backlog.losses.take_grown();
        if sums.iter().all(|(it, _)| it.instance != identity.instance) {
            let not_sent = self.backlog.losses.of(&identity);
            sums.push((identity, not_sent));
        }
        for (identity, not_sent) in sums {
            let alive = Alive {
                identity,
                behind,
                not_sent,
            };
            format.alive(&alive, to)?;
        }
        Ok(())
    }

    /// Notes what was read, and prints what the history does not have (any more), once.
    fn tell(&mut self, reader: &mut HistoryReader, past: Option<&Past>) {
        for error in reader.refused.drain(..) {
            say!("twheel: {error:#}");
        }
        if reader.missed > self.missed {
            // An earlier session has reported some of them.
            let new = reader.removed.saturating_sub(self.removed);
            let new = new.min(reader.missed - self.missed);
            if new > 0 {
                say!(
                    "twheel: {new} segments of the history were removed before they were sent: give \
                     `twheel run` a larger --history-size"
                );
            }
            self.removed = self.removed.max(reader.removed);
            self.missed = reader.missed;
            self.is_cut = true;
        }
        if let Some(past) = past {
            self.backlog.read(past, self.is_cut);
            self.is_cut = false;
        }
        let (lost, damaged) = (reader.lost - self.lost, reader.damaged - self.damaged);
        if lost > 0 {
            say!(
                "twheel: up to {lost} events are not in the history: the disk was too slow or full, or \
                 no history was kept"
            );
        }
        if damaged > 0 {
            say!("twheel: {damaged} records of the history are damaged and were skipped");
        }
        (self.lost, self.damaged) = (reader.lost, reader.damaged);
        let whose = past.map(|past| past.identity.clone());
        let whose: Option<Arc<Identity>> = whose.or_else(|| reader.identity());
        self.backlog.losses.lost(whose, lost + damaged);
        self.counted = self.counted.max(reader.position());
    }
}
