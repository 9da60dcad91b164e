//! `twheel talkers`

use std::{cmp::Reverse, collections::HashMap, io::Write, net::IpAddr};

use anyhow::Result;
use clap::{Args, ValueEnum, builder::PossibleValuesParser};
use serde::Serialize;

use super::select::{Select, Which, while_read};
use crate::{
    filter::{STATES, Subject},
    model::Tracked,
    output::json,
};

/// Say who fills the table
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel talkers
  twheel talkers --state syn_sent              # who floods
  twheel talkers --by port 'idle > 1h' --limit 5")]
pub struct Talkers {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    select: Select,
    /// Whom to count
    #[arg(long, value_enum, default_value = "src")]
    by: By,
    /// Flows in this state alone
    #[arg(long, value_name = "STATE", value_parser = PossibleValuesParser::new(STATES))]
    state: Option<String>,
    /// So many at most
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Print a JSON object a line
    #[arg(long)]
    json: bool,
}

/// Whom to count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// Addresses of initiators
    Src,
    /// Addresses of responders
    Dst,
    /// Protocols and ports of responders
    Port,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Talker {
    Address(IpAddr),
    Port(&'static str, u16),
}

impl By {
    fn talker(self, flow: &Tracked) -> Talker {
        match self {
            Self::Src => Talker::Address(flow.flow.src.ip()),
            Self::Dst => Talker::Address(flow.flow.dst.ip()),
            Self::Port => Talker::Port(flow.flow.proto, flow.flow.dst.port()),
        }
    }
}

impl std::fmt::Display for Talker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Port(proto, port) => write!(f, "{proto}/{port}"),
        }
    }
}

#[derive(Clone, Copy, Default, Serialize)]
struct Sum {
    flows: u64,
    packets: u64,
    bytes: u64,
}

#[derive(Serialize)]
struct TalkerLine {
    talker: String,
    flows: u64,
    share: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    packets: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<u64>,
}

impl Talkers {
    pub(super) fn execute(self) -> Result<()> {
        let reader = self.select.open()?;
        let filter = self.which.filter_for(&reader)?;
        let now = reader.now()?;
        let mut talkers: HashMap<Talker, Sum> = HashMap::new();
        let mut all = 0u64;
        for (_, tracked) in reader.flows(now) {
            let subject = Subject::tracked(&tracked, reader.known_as(&tracked.flow));
            let is_in = |state: &String| tracked.flow.state == state;
            if !filter.matches(&subject) || !self.state.as_ref().is_none_or(is_in) {
                continue;
            }
            all += 1;
            let share = talkers.entry(self.by.talker(&tracked)).or_default();
            share.flows += 1;
            for sent in tracked.account.into_iter().flatten() {
                share.packets += sent.packets;
                share.bytes += sent.bytes;
            }
        }
        let others = talkers.len().saturating_sub(self.limit);
        let mut talkers: Vec<_> = talkers.into_iter().collect();
        talkers.sort_unstable_by_key(|(talker, share)| (Reverse(share.flows), *talker));
        talkers.truncate(self.limit);
        let counted = reader.table().has_accounts();
        while_read(|out| {
            if !self.json {
                write!(
                    out,
                    "{:<39} {:>10} {:>7}",
                    self.by.heading(),
                    "FLOWS",
                    "SHARE"
                )?;
                writeln!(
                    out,
                    "{}",
                    if counted {
                        "      PACKETS            BYTES"
                    } else {
                        ""
                    }
                )?;
            }
            for (talker, share) in talkers {
                let line = TalkerLine {
                    talker: talker.to_string(),
                    flows: share.flows,
                    share: share.flows as f64 / all as f64,
                    packets: counted.then_some(share.packets),
                    bytes: counted.then_some(share.bytes),
                };
                line.write(self.json, out)?;
            }
            if !self.json && others > 0 {
                writeln!(out, "and {others} more, of {all} flows in all")?;
            }
            Ok(())
        })
    }
}

impl By {
    fn heading(self) -> &'static str {
        match self {
            Self::Src => "SRC",
            Self::Dst => "DST",
            Self::Port => "DPORT",
        }
    }
}

impl TalkerLine {
    fn write(&self, json: bool, out: &mut dyn Write) -> Result<()> {
        if json {
            return Ok(json::write(self, out)?);
        }
        write!(
            out,
            "{:<39} {:>10} {:>6.1}%",
            self.talker,
            self.flows,
            100.0 * self.share
        )?;
        if let (Some(packets), Some(bytes)) = (self.packets, self.bytes) {
            write!(out, " {packets:>12} {bytes:>16}")?;
        }
        Ok(writeln!(out)?)
    }
}
