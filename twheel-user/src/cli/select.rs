//! What the commands that read an instance have in common.

use std::{
    io::{self, BufWriter, StdoutLock, Write},
    ops::RangeInclusive,
    path::PathBuf,
    time::Duration,
};

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twheel_common::event::Reason;

use crate::{
    delete::{Unread, delete_all},
    filter::{Filter, Knowable},
    flows::Flow,
    history, host,
    inspect::Reader,
    output::json,
};

/// Which instance.
#[derive(Args)]
pub struct Select {
    /// An interface of the instance; may be left out where there is just one instance
    #[arg(long = "iface", value_name = "NAME")]
    interface: Option<String>,
}

impl Select {
    /// Opens it for reading.
    pub fn open(&self) -> Result<Reader> {
        host::check_pins()?;
        Reader::open(self.interface())
    }

    /// The interface, if one was given.
    pub fn interface(&self) -> Option<&str> {
        self.interface.as_deref()
    }
}

/// Flows are deleted.
#[derive(Args)]
pub struct Deleting {
    /// Where histories are: where no loader reads the events of what is deleted, they are kept there. Or `off`
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    history: PathBuf,
    /// Print a JSON object
    #[arg(long)]
    json: bool,
}

impl Deleting {
    /// Deletes the flows that are chosen, and says how many those were.
    pub fn delete(
        &self,
        reader: &Reader,
        chosen: impl Fn(&Flow, u32) -> bool + Send,
        reason: Reason,
    ) -> Result<()> {
        let mut unread = Unread::open(reader, &self.history)?;
        let tally = delete_all(reader, chosen, reason, unread.as_mut())?;
        self.say(&tally, &tally.to_string())
    }

    /// Says how it went, to programs or to people.
    pub fn say(&self, object: &impl Serialize, text: &str) -> Result<()> {
        if !self.json {
            say!("{text}");
            return Ok(());
        }
        while_read(|out| Ok(json::write(object, out)?))
    }
}

/// Which of its flows.
#[derive(Args)]
pub struct Which {
    /// Which flows: an expression such as `state == established and dport == 443 and idle > 30s`; all of docs/filter.md
    #[arg(value_name = "FILTER")]
    filter: Vec<String>,
}

impl Which {
    /// The filter, as the flows of an instance can be asked.
    pub fn filter_for(&self, reader: &Reader) -> Result<Filter> {
        self.filter(known(reader))
    }

    /// The filter.
    pub fn filter(&self, known: Knowable) -> Result<Filter> {
        Filter::parse(&self.text(), known)
    }

    /// The same, as it was given.
    pub fn text(&self) -> String {
        self.filter.join(" ")
    }
}

/// What is known of the flows of an instance.
pub fn known(reader: &Reader) -> Knowable {
    Knowable {
        ended: false,
        accounting: reader.table().has_accounts(),
        rto: reader.table().has_timers(),
    }
}

/// Standard output, buffered.
pub fn stdout() -> BufWriter<StdoutLock<'static>> {
    BufWriter::with_capacity(1 << 16, io::stdout().lock())
}

/// Does what writes to standard output. What was written before a failure is there to be read.
pub fn while_read(write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut out = stdout();
    let result = write(&mut out);
    let flushed = out.flush();
    // What is left would be written when it is dropped.
    drop(out.into_parts());
    result.and(flushed.map_err(Into::into))
}

/// Between two looks: not so short that it would be all there is to do, and no longer than a day.
pub fn interval(text: &str) -> Result<Duration, String> {
    const ALLOWED: RangeInclusive<Duration> =
        Duration::from_millis(100)..=Duration::from_secs(86_400);
    match humantime::parse_duration(text) {
        Ok(interval) if ALLOWED.contains(&interval) => Ok(interval),
        Ok(_) => Err("give 100ms to 1day".to_owned()),
        Err(error) => Err(error.to_string()),
    }
}
