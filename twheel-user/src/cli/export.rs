//! `twheel export`

use std::{
    io,
    path::PathBuf,
    thread,
    time::{Duration, Instant, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use super::select::{Select, event_kind};
use crate::{
    export::{
        position::Kept,
        sink::{Sink, Target},
    },
    history::{self, Follow, HistoryReader},
    model::EventKind,
    output::json::Json,
    privilege,
};

/// Send events to other programs and hosts, as they come
///
/// Reads the history as it grows, and goes on where it stopped. It needs no capabilities, only permission to read the
/// history (`twheel run --group`).
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel export json --to tcp:collector.example:5170")]
pub struct Export {
    #[command(subcommand)]
    format: Format,
}

#[derive(Subcommand)]
enum Format {
    Json(JsonExport),
}

/// Send events as lines of JSON to a file or a socket
///
/// Each event arrives at least once. After a connection has ended, up to 8 MiB that the other end may not have read are
/// sent again; `instance` and `seq` tell which lines come twice.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel export json --to tcp:collector.example:5170
  twheel export json --to unix:/run/collector.sock --events end,reap
  twheel export json --to /var/log/twheel.json")]
struct JsonExport {
    /// Where to: a file, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "TARGET")]
    to: Target,
    #[command(flatten)]
    select: Select,
    /// Kinds of events to send, a list of `begin`, `update`, `end`, `rto`, `reap` and `run`
    #[arg(long, value_name = "KINDS", value_delimiter = ',', value_parser = event_kind, default_value = "begin,update,end,rto,reap,run")]
    events: Vec<EventKind>,
    /// Directory of the histories
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    history: PathBuf,
    /// File that keeps how far the export has come; by default one in /var/lib/twheel-export for each history and target
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// End when everything that is in the history now has been sent
    #[arg(long)]
    once: bool,
}

/// The default directory of positions.
const STATES: &str = "/var/lib/twheel-export";
/// Lines are written when they are as long as this, in bytes, or when there are no more.
const FLUSH: usize = 64 << 10;
/// How often the position is kept.
const KEEP: Duration = Duration::from_secs(1);
/// How long to wait before another attempt to connect: at first, and at most.
const RETRY: (Duration, Duration) = (Duration::from_millis(250), Duration::from_secs(15));

impl Export {
    pub(super) fn execute(self) -> Result<()> {
        match self.format {
            Format::Json(json) => json.execute(),
        }
    }
}

impl JsonExport {
    fn execute(self) -> Result<()> {
        let name = history::name_of(self.select.interface(), &self.history)?;
        privilege::give_up_all()?;
        let state = self.state.clone().unwrap_or_else(|| {
            let target: String = self.to.to_string().replace(['/', ':'], "_");
            PathBuf::from(STATES).join(format!("{name}.{target}.json"))
        });
        let mut kept = Kept::open(&state)?;
        let mut said = Said::default();
        let mut wait = RETRY.0;
        loop {
            match Sink::open(&self.to, kept.position) {
                Ok(mut sink) => {
                    said.is_away = false;
                    wait = RETRY.0;
                    match self.send(&name, &mut sink, &mut kept, &mut said)? {
                        Sent::All => return Ok(()),
                        Sent::Broken(error) => say!("twheel: {}: {error}: sending again", self.to),
                    }
                }
                Err(error) if matches!(self.to, Target::File(_)) => {
                    return Err(error).with_context(|| format!("cannot open {}", self.to));
                }
                Err(error) => {
                    if !said.is_away {
                        say!(
                            "twheel: {}: {error}: trying again until it is there",
                            self.to
                        );
                    }
                    said.is_away = true;
                }
            }
            thread::sleep(wait);
            wait = (2 * wait).min(RETRY.1);
        }
    }

    /// Sends what the history has and gets, until the other end closes.
    fn send(&self, name: &str, sink: &mut Sink, kept: &mut Kept, said: &mut Said) -> Result<Sent> {
        let mut reader = HistoryReader::open(&self.history, name, UNIX_EPOCH)?;
        if !reader.go_on(kept.position)? {
            say!("twheel: the history was begun anew: sending it from its beginning");
        }
        let follow: Follow = reader.follow()?;
        let mut lines = Vec::with_capacity(2 * FLUSH);
        let mut saved = Instant::now();
        loop {
            let at = reader.position();
            let past = reader.next()?;
            if let Some(past) = &past
                && self.events.contains(&past.kind())
            {
                let identity = past.identity.clone();
                past.write(&mut Json { identity }, &mut lines)?;
            }
            let is_end = past.is_none();
            if lines.len() >= FLUSH || is_end && !lines.is_empty() {
                let next = if is_end { at } else { reader.position() };
                if let Err(error) = sink.write(&lines, next) {
                    return Ok(Sent::Broken(error));
                }
                lines.clear();
            }
            said.tell(&mut reader);
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
                if self.once {
                    return Ok(Sent::All);
                }
                follow.wait_for(KEEP)?;
            }
        }
    }
}

/// How sending ended.
enum Sent {
    /// All that there was is sent.
    All,
    /// The other end is gone.
    Broken(io::Error),
}

/// What was said already.
#[derive(Default)]
struct Said {
    is_away: bool,
    missed: u64,
    lost: u64,
    damaged: u64,
}

impl Said {
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
            self.lost = reader.lost;
        }
        if reader.damaged > self.damaged {
            say!(
                "twheel: {} records of the history are damaged and were skipped",
                reader.damaged - self.damaged
            );
            self.damaged = reader.damaged;
        }
    }
}
