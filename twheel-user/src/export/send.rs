//! Reads a history as it grows, and sends it, whoever dies on the way.

use std::{
    io,
    path::Path,
    thread,
    time::{Duration, Instant, UNIX_EPOCH},
};

use anyhow::{Context, Result};

use super::{
    Format,
    position::Kept,
    sink::{Sink, Target},
};
use crate::history::HistoryReader;

/// The buffer is sent when it is as long as this, in bytes, or when there are no more events.
const FLUSH: usize = 64 << 10;
/// How often the position is kept.
const KEEP: Duration = Duration::from_secs(1);
/// How long to wait before another attempt: at first, and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(15));
/// A connection that lasts this long has worked. Shorter ones, one after the other, are reported
/// once.
const STEADY: Duration = Duration::from_secs(5);

/// What is sent where.
pub struct Export<'a> {
    /// The directory of the histories.
    pub history: &'a Path,
    /// The name of the history.
    pub name: &'a str,
    /// Where to.
    pub to: &'a Target,
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
        let mut is_away = false;
        loop {
            match Sink::open(self.to, kept.position) {
                Ok(mut sink) => {
                    let began = Instant::now();
                    match self.send(format, &mut sink, kept, &mut said)? {
                        Sent::All => return Ok(()),
                        // The reader of a pipe has closed it.
                        Sent::Broken(error)
                            if matches!(self.to, Target::File(_))
                                && error.kind() == io::ErrorKind::BrokenPipe =>
                        {
                            return Err(error).with_context(|| format!("cannot write {}", self.to));
                        }
                        Sent::Broken(error) => {
                            let was_there = began.elapsed() >= STEADY;
                            if was_there || !is_away {
                                say!("twheel: {}: {error}: sending again", self.to);
                            }
                            is_away = !was_there;
                            if was_there {
                                wait = RETRY.0;
                            }
                        }
                    }
                }
                Err(error) if matches!(self.to, Target::File(_)) => {
                    return Err(error).with_context(|| format!("cannot open {}", self.to));
                }
                Err(error) => {
                    if !is_away {
                        say!(
                            "twheel: {}: {error}: trying again until it is there",
                            self.to
                        );
                    }
                    is_away = true;
                }
            }
            thread::sleep(wait);
            wait = (2 * wait).min(RETRY.1);
        }
    }

    /// Sends until the other end closes.
    fn send(
        &self,
        format: &mut dyn Format,
        sink: &mut Sink,
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
            if let Some(past) = &past {
                format.event(past, &mut buffer)?;
            }
            said.tell(&mut reader);
            let is_end = past.is_none();
            if is_end || buffer.len() >= FLUSH {
                format.complete(said.not_sent, &mut buffer);
                let next = if is_end { at } else { reader.position() };
                if !buffer.is_empty()
                    && let Err(error) = sink.write(&buffer, next, format)
                {
                    return Ok(Sent::Broken(error));
                }
                buffer.clear();
            }
            if saved.elapsed() >= KEEP || is_end {
                saved = Instant::now();
                match sink.arrived() {
                    Ok(position) => kept.keep(position)?,
                    Err(error) => return Ok(Sent::Broken(error)),
                }
                if sink.is_closed() {
                    return Ok(Sent::Broken(io::ErrorKind::ConnectionReset.into()));
                }
            }
            if is_end {
                if self.once && sink.is_settled() {
                    return Ok(Sent::All);
                }
                follow.wait_for(KEEP)?;
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
}

impl Said {
    /// The history is read again from the kept position on.
    fn begin(&mut self) {
        *self = Self {
            not_sent: self.not_sent,
            ..Self::default()
        };
    }

    /// Prints what the history does not have (any more).
    fn tell(&mut self, reader: &mut HistoryReader) {
        for error in reader.refused.drain(..) {
            say!("twheel: {error:#}");
        }
        if reader.missed > self.missed {
            say!(
                "twheel: {} segments of the history were removed before they were sent: give \
                 `twheel run` a larger --history-size",
                reader.missed - self.missed
            );
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
