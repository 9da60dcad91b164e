//! What the commands that read an instance share.

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

use super::complete;
use crate::{
    delete::{Unread, delete_all},
    failure::{Failure, Kind},
    filter::{Filter, Knowable},
    flows::Flow,
    given, history, host,
    inspect::Reader,
    model::EventKind,
    output::{json, units::Units},
    patterns::{self, Asked},
    pins::Instance,
};

/// Which instance.
#[derive(Args)]
pub struct Select {
    /// Interface that selects the instance, or a list of its interfaces; not needed if there is just one instance
    #[arg(long = "iface", value_name = "NAME", value_parser = interfaces, add = complete::selected())]
    interface: Option<Interfaces>,
}

/// Interfaces of one instance.
#[derive(Clone)]
struct Interfaces(Vec<Asked>);

/// Reads a list of interfaces.
fn interfaces(text: &str) -> Result<Interfaces, String> {
    let asked = patterns::parse("--iface", &[text.to_owned()]);
    asked.map(Interfaces).map_err(|error| error.to_string())
}

impl Select {
    /// Opens the instance for reading.
    pub fn open(&self) -> Result<Reader> {
        host::check_pins()?;
        let reader = Reader::open(self.interface())?;
        let others = self.interface.iter().flat_map(|it| it.0.iter().skip(1));
        for other in others.map(Asked::text) {
            if Instance::with(other)?.path() != reader.pins().path() {
                let what = format!(
                    "--iface: {other} belongs to another instance than {}: give interfaces of one",
                    self.interface().unwrap_or_default()
                );
                return Err(Failure::new(Kind::Usage, what).into());
            }
        }
        Ok(reader)
    }

    /// The interface, if one was given; of a list, the first.
    pub fn interface(&self) -> Option<&str> {
        Some(self.interface.as_ref()?.0.first()?.text())
    }
}

/// Flows are deleted.
#[derive(Args)]
pub struct Deleting {
    /// Directory of the histories, where the ended flows are written if no `twheel run` is running; `off` keeps none
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    history: PathBuf,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

impl Deleting {
    /// Deletes the flows for which `chosen` is true, and prints how many were deleted.
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

    /// Prints the result, as JSON or as text.
    pub fn say(&self, object: &impl Serialize, text: &str) -> Result<()> {
        if !self.json {
            say!("{text}");
            return Ok(());
        }
        while_read(|out| Ok(json::write_now("deletion", object, out)?))
    }
}

/// How numbers are printed.
#[derive(Args)]
pub struct Numbers {
    /// Print numbers in full, and not as 1.23M; k, M, G and T are powers of 1000
    #[arg(long)]
    bytes: bool,
}

impl Numbers {
    /// The units to print numbers in.
    pub fn units(&self) -> Units {
        match self.bytes {
            true => Units::Exact,
            false => Units::Human,
        }
    }
}

/// Which of its flows.
#[derive(Args)]
pub struct Which {
    /// Filter, such as `state == established and dport == 443 and idle > 30s`; `twheel help filter` lists the fields
    #[arg(value_name = "FILTER", add = complete::filter())]
    filter: Vec<String>,
}

impl Which {
    /// The filter, checked against the fields that are known of this instance.
    pub fn filter_for(&self, reader: &Reader) -> Result<Filter> {
        self.filter(known(reader))
    }

    /// The filter, checked against the known fields.
    pub fn filter(&self, known: Knowable) -> Result<Filter> {
        Filter::parse(&self.text(), known)
    }

    /// The filter's text.
    pub fn text(&self) -> String {
        self.filter.join(" ")
    }
}

/// The fields that are known of an instance's flows.
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

/// Runs a function that writes to standard output. What it has written before an error is still
/// flushed.
pub fn while_read(write: impl FnOnce(&mut dyn Write) -> Result<()>) -> Result<()> {
    let mut out = stdout();
    let result = write(&mut out);
    let flushed = out.flush();
    // If the flush failed, dropping the writer would try to write the rest again.
    drop(out.into_parts());
    result.and(flushed.map_err(Into::into))
}

/// Parses an interval: at least long enough that reading does not take all of the time, and at most
/// a day.
pub fn interval(text: &str) -> Result<Duration, String> {
    const ALLOWED: RangeInclusive<Duration> =
        Duration::from_millis(100)..=Duration::from_secs(86_400);
    match given::duration(text)? {
        interval if ALLOWED.contains(&interval) => Ok(interval),
        _ => Err("give an interval from 100ms to 1d".to_owned()),
    }
}

/// Parses the name of a kind of events.
///
/// # Errors
///
/// There is no such kind.
pub fn event_kind(name: &str) -> Result<EventKind, String> {
    let found = EventKind::ALL.iter().find(|kind| kind.name() == name);
    found.copied().ok_or_else(|| {
        let names: Vec<_> = EventKind::ALL.iter().map(|kind| kind.name()).collect();
        format!(
            "there is no such kind of events: give some of {}",
            names.join(", ")
        )
    })
}
