//! `twheel export`

mod clickhouse;
mod ipfix;
mod json;
pub(super) mod kafka;
mod syslog;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, Subcommand};

use super::{
    complete,
    select::{Select, event_kind},
};
use crate::{
    export::{self, Destination, Format, position::Kept},
    history,
    model::EventKind,
    privilege,
};

/// Send events to other programs and hosts, as they come
///
/// Reads the history as it grows, and goes on where it stopped. It needs no capabilities, only permission to read the
/// history (`twheel run --group`).
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel export json --to tcp:collector.example:5170
  twheel export syslog --to unix:/dev/log
  twheel export ipfix --to collector.example:4739
  twheel export kafka --brokers kafka1.example:9092 --topic twheel
  twheel export clickhouse --url http://clickhouse.example:8123")]
pub struct Export {
    #[command(subcommand)]
    format: FormatName,
}

#[derive(Subcommand)]
enum FormatName {
    Json(json::JsonExport),
    Syslog(syslog::SyslogExport),
    Ipfix(ipfix::IpfixExport),
    #[command(name = "clickhouse")]
    ClickHouse(clickhouse::ClickHouseExport),
    Kafka(Box<kafka::KafkaExport>),
}

impl Export {
    pub(super) fn execute(self) -> Result<()> {
        match self.format {
            FormatName::Json(json) => json.execute(),
            FormatName::Syslog(syslog) => syslog.execute(),
            FormatName::Ipfix(ipfix) => ipfix.execute(),
            FormatName::ClickHouse(tables) => tables.execute(),
            FormatName::Kafka(kafka) => kafka.execute(),
        }
    }
}

/// The default directory of positions.
const STATES: &str = "/var/lib/twheel-export";

/// Which events are sent.
#[derive(Args)]
struct Kinds {
    /// Kinds of events to send, a list of `begin`, `update`, `end`, `rto`, `reap` and `run`
    #[arg(long, value_name = "KINDS", value_delimiter = ',', value_parser = event_kind, default_value = "begin,update,end,rto,reap,run", add = complete::kinds())]
    events: Vec<EventKind>,
}

/// What is sent, and from where on.
#[derive(Args)]
struct Source {
    #[command(flatten)]
    select: Select,
    /// Directory of the histories
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    history: PathBuf,
    /// File for the position of the export; by default one in /var/lib/twheel-export for each history and target
    #[arg(long, value_name = "FILE")]
    state: Option<PathBuf>,
    /// End when everything that is in the history now has been sent
    #[arg(long)]
    once: bool,
}

impl Source {
    /// The name of the history.
    fn name(&self) -> Result<String> {
        history::name_of(self.select.interface(), &self.history)
    }

    /// The default file for the position: one for each history and target, whatever the working
    /// directory is.
    fn default_state(&self, name: &str, to: &dyn Destination, kind: &str) -> Result<PathBuf> {
        let mut hash = crc32fast::Hasher::new();
        let history = std::path::absolute(&self.history)?;
        hash.update(history.as_os_str().as_encoded_bytes());
        hash.update(b"\0");
        hash.update(to.lasting_name()?.as_encoded_bytes());
        let hash = hash.finalize();
        Ok(PathBuf::from(STATES).join(format!("{name}.{hash:08x}.{kind}")))
    }

    /// Sends the history of this name. `kind` ends the name of the default file for the position.
    fn send(
        &self,
        name: &str,
        to: &dyn Destination,
        kind: &str,
        format: &mut dyn Format,
    ) -> Result<()> {
        privilege::give_up_all()?;
        let state = match &self.state {
            Some(state) => state.clone(),
            None => self.default_state(name, to, kind)?,
        };
        let export = export::send::Export {
            history: &self.history,
            name,
            to,
            once: self.once,
        };
        export.run(format, &mut Kept::open(&state)?)
    }
}
