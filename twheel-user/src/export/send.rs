//! Reads a history as it grows, and sends it, whoever dies on the way.

use std::{
    collections::BTreeSet,
    io,
    path::Path,
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};

use super::{Alive, Destination, Format, Sink, backlog::Backlog, position::Kept};
use crate::history::HistoryReader;

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
    /// The history cannot be read, the position cannot be kept, or the target is a file that cannot
    /// be opened or a pipe whose reader has closed it.
    pub fn run(&self, format: &mut dyn Format, kept: &mut Kept) -> Result<()> {
        let mut said = Said::default();
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
            match self.to.open(kept.position) {
                Ok(mut sink) => match self.send(format, sink.as_mut(), kept, &mut said)? {
                    Sent::All => return Ok(()),
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

    /// Sends until the other end closes.
    fn send(
        &self,
        format: &mut dyn Format,
        sink: &mut dyn Sink,
        kept: &mut Kept,
        said: &mut Said,
    ) -> Result<Sent> {
        let mut reader = HistoryReader::open(self.history, self.name, UNIX_EPOCH)?;
        if !reader.go_on(kept.position)? {
            say!(
                "twheel: the history no longer has the events that were sent last (it was removed, or \
                 cut off after a failure): sending it from its beginning"
            );
        }
        let follow = reader.follow()?;
        said.begin();
        let mut buffer = Vec::with_capacity(2 * FLUSH);
        format.begin(said.not_sent, &mut buffer);
        let mut saved = Instant::now();
        loop {
            let at = reader.position();
            let past = reader.next()?;
            let gap = past.as_ref().map_or(0, |past| said.backlog.read(past));
            said.tell(&mut reader, gap);
            said.alive(&reader, format, &mut buffer)?;
            if let Some(past) = &past {
                format.event(past, &mut buffer)?;
            }
            let is_end = past.is_none();
            if is_end || buffer.len() >= FLUSH {
                format.complete(said.not_sent, &mut buffer);
                let next = if is_end { at } else { reader.position() };
                // What the format leaves out is behind us, too.
                if (!buffer.is_empty() || said.backlog.is_unwritten())
                    && let Err(error) = sink.write(&buffer, next, format)
                {
                    return Ok(Sent::Broken(error));
                }
                said.backlog.wrote(next);
                buffer.clear();
            }
            if saved.elapsed() >= KEEP || is_end {
                saved = Instant::now();
                match sink.arrived() {
                    Ok(position) => {
                        said.backlog.arrived(position);
                        kept.keep(position)?;
                    }
                    Err(error) => return Ok(Sent::Broken(error)),
                }
                if sink.is_closed() {
                    return Ok(Sent::Broken(io::ErrorKind::ConnectionReset.into()));
                }
            }
            if is_end {
                let is_settled = sink.is_settled();
                if self.once && is_settled {
                    return Ok(Sent::All);
                }
                follow.wait_for(if is_settled { KEEP } else { SETTLE })?;
            }
        }
    }
}

/// What has been reported of the history that is being read.
#[derive(Default)]
struct Said {
    missed: u64,
    lost: u64,
    damaged: u64,
    /// Events that are missing, in all: an upper bound, since what is sent again counts again.
    not_sent: u64,
    /// What was read and has not arrived.
    backlog: Backlog,
    /// When the export last told that it is alive, and how many events were missing then.
    alive: Option<(Instant, u64)>,
}

impl Said {
    /// The history is read again from the kept position on.
    fn begin(&mut self) {
        (self.missed, self.lost, self.damaged) = (0, 0, 0);
        self.backlog.begin();
    }

    /// Lets the format tell that the export is alive, at the start, once a minute, and when events are
    /// missing.
    fn alive(
        &mut self,
        reader: &HistoryReader,
        format: &mut dyn Format,
        to: &mut Vec<u8>,
    ) -> io::Result<()> {
        if let Some((at, not_sent)) = self.alive {
            // What is missing is told sooner.
            let wait = if self.not_sent == not_sent {
                ALIVE
            } else {
                KEEP
            };
            if at.elapsed() < wait {
                return Ok(());
            }
        }
        // A history that has no events yet does not tell whose it is.
        let Some(identity) = reader.identity() else {
            return Ok(());
        };
        self.alive = Some((Instant::now(), self.not_sent));
        let alive = Alive {
            identity,
            behind: self.backlog.behind(SystemTime::now()),
            not_sent: self.not_sent,
        };
        format.alive(&alive, to)
    }

    /// Prints what the history does not have (any more). `gap`: how many numbers are missing before the
    /// event that was read last.
    fn tell(&mut self, reader: &mut HistoryReader, gap: u64) {
        for error in reader.refused.drain(..) {
            say!("twheel: {error:#}");
        }
        if reader.missed > self.missed {
            say!(
                "twheel: {} segments of the history were removed before they were sent: give \
                 `twheel run` a larger --history-size",
                reader.missed - self.missed
            );
            self.not_sent += gap;
            self.missed = reader.missed;
        }
        if reader.lost > self.lost {
            say!(
                "twheel: up to {} events are not in the history: the disk was too slow or full, or \
                 no history was kept",
                reader.lost - self.lost
            );
            self.not_sent += reader.lost - self.lost;
            self.lost = reader.lost;
        }
        if reader.damaged > self.damaged {
            say!(
                "twheel: {} records of the history are damaged and were skipped",
                reader.damaged - self.damaged
            );
            self.not_sent += reader.damaged - self.damaged;
            self.damaged = reader.damaged;
        }
    }
}
