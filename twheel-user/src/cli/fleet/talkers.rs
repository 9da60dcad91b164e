//! `twheel fleet talkers`

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;

use super::ask::Asked;
use crate::{
    cli::select::{Numbers, while_read},
    fleet::sums::{self, By},
    output::{json, table},
};

/// Count the ended flows of all hosts by address, port, host, process or rule
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel fleet talkers --since 1h
  twheel fleet talkers --by host 'reason == evicted' --since 1d
  twheel fleet talkers --by port --limit 5")]
pub(super) struct Talkers {
    #[command(flatten)]
    asked: Asked,
    /// What to count by
    #[arg(long, value_enum, default_value = "src")]
    by: ByName,
    /// Show at most N lines
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    #[command(flatten)]
    numbers: Numbers,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum ByName {
    /// Address of the initiator
    Src,
    /// Address of the responder
    Dst,
    /// Protocol and port of the responder
    Port,
    /// Host that reported the flows
    Host,
    /// Command of the process that has the local socket; `-`: unknown
    Command,
    /// Cgroup of the local socket; `-`: unknown
    Cgroup,
    /// Policy rule; `-`: none
    Rule,
}

impl ByName {
    fn by(self) -> (By, &'static str) {
        match self {
            Self::Src => (By::Src, "SRC"),
            Self::Dst => (By::Dst, "DST"),
            Self::Port => (By::Port, "DPORT"),
            Self::Host => (By::Host, "HOST"),
            Self::Command => (By::Command, "COMMAND"),
            Self::Cgroup => (By::Cgroup, "CGROUP"),
            Self::Rule => (By::Rule, "RULE"),
        }
    }
}

#[derive(Serialize)]
struct TalkerLine<'a> {
    talker: &'a str,
    flows: u64,
    share: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    packets: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

impl Talkers {
    pub(super) fn execute(self) -> Result<()> {
        let (server, question) = self.asked.open()?;
        let (by, heading) = self.by.by();
        let talkers = sums::talkers(&server, &question, by, self.limit)?;
        let is_counted = talkers.iter().any(|it| it.counted > 0);
        let is_json = self.asked.place.json;
        while_read(|out| {
            let mut table = table::talkers(heading, is_counted);
            for it in &talkers {
                let is_counted = it.counted > 0;
                let line = TalkerLine {
                    talker: &it.talker,
                    flows: it.flows,
                    share: it.flows as f64 / it.all as f64,
                    packets: is_counted.then_some(it.packets),
                    bytes: is_counted.then_some(it.bytes),
                };
                if is_json {
                    json::write_now("fleet_talker", line, out)?;
                    continue;
                }
                // Those of hosts that count none have none.
                let sent = is_counted.then_some([it.packets, it.bytes]);
                let flows = (line.flows, line.share);
                table.row(
                    table::talker(&it.talker, flows, sent, self.numbers.units()),
                    out,
                )?;
            }
            if is_json {
                return Ok(());
            }
            table.end(out)?;
            if let Some(first) = talkers.first()
                && first.talkers > talkers.len() as u64
            {
                let more = first.talkers - talkers.len() as u64;
                writeln!(out, "and {more} more, of {} flows in total", first.all)?;
            }
            Ok(())
        })
    }
}
