//! `twheel talkers`

use std::{cmp::Reverse, collections::HashMap, net::IpAddr};

use anyhow::Result;
use clap::{Args, ValueEnum, builder::PossibleValuesParser};
use serde::Serialize;

use super::{
    owner::say_notices,
    select::{Numbers, Select, Which, while_read},
};
use crate::{
    filter::STATES,
    given,
    model::Tracked,
    output::{json, several, table, units::Units},
    owner::{Owner, Owners},
};

/// Count the flows of each address, port or service: who fills the table
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel talkers
  twheel talkers --state syn_sent              # who floods
  twheel talkers --by port 'idle > 1h' --limit 5
  twheel talkers --by cgroup                   # which services")]
pub struct Talkers {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    select: Select,
    /// What to count by
    #[arg(long, value_enum, default_value = "src")]
    by: By,
    /// Count only flows in this state
    #[arg(long, value_name = "STATE", value_parser = PossibleValuesParser::new(STATES))]
    state: Option<String>,
    /// Show at most N lines
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = given::count, allow_hyphen_values = true)]
    limit: usize,
    #[command(flatten)]
    numbers: Numbers,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// What to count by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum By {
    /// Address of the initiator
    Src,
    /// Address of the responder
    Dst,
    /// Protocol and port of the responder
    Port,
    /// Command of the process that has the local socket; `-`: unknown
    Command,
    /// Cgroup of the local socket; `-`: unknown
    Cgroup,
}

#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Talker {
    Address(IpAddr),
    Port(&'static str, u16),
    Name(Option<Box<str>>),
}

impl By {
    /// `owner`: the flow's, for those that need it.
    fn talker(self, flow: &Tracked, owner: Option<Owner>) -> Talker {
        let owner = owner.unwrap_or_default();
        match self {
            Self::Src => Talker::Address(flow.flow.src.ip()),
            Self::Dst => Talker::Address(flow.flow.dst.ip()),
            Self::Port => Talker::Port(flow.flow.proto, flow.flow.dst.port()),
            Self::Command => Talker::Name(owner.command.map(Box::from)),
            Self::Cgroup => Talker::Name(owner.cgroup.map(Box::from)),
        }
    }

    fn needs_owner(self) -> bool {
        matches!(self, Self::Command | Self::Cgroup)
    }
}

impl std::fmt::Display for Talker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Port(proto, port) => write!(f, "{proto}/{port}"),
            Self::Name(name) => f.write_str(name.as_deref().unwrap_or("-")),
        }
    }
}

#[derive(Clone, Copy, Default, Serialize)]
struct Sum {
    flows: u64,
    packets: u64,
    bytes: u64,
}

/// A talker, for people and as JSON.
#[derive(Serialize)]
pub(super) struct TalkerLine {
    pub(super) talker: String,
    pub(super) flows: u64,
    /// Of all flows.
    pub(super) share: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) packets: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) bytes: Option<u64>,
}

impl Talkers {
    pub(super) fn execute(self) -> Result<()> {
        let reader = self.select.open()?;
        let filter = self.which.filter_for(&reader)?;
        let needs_owner = self.by.needs_owner();
        let mut owners = needs_owner.then(|| Owners::for_listing(Vec::new()));
        let now = reader.now()?;
        let mut talkers: HashMap<Talker, Sum> = HashMap::new();
        let mut all = 0u64;
        for (_, tracked) in reader.flows(now) {
            let is_in = |state: &String| tracked.flow.state == state;
            if !reader.matches(&filter, &tracked) || !self.state.as_ref().is_none_or(is_in) {
                continue;
            }
            all += 1;
            let known = owners.as_mut();
            let owner = known.and_then(|it| it.find(&tracked.flow, reader.known_as(&tracked.flow)));
            let share = talkers.entry(self.by.talker(&tracked, owner)).or_default();
            share.flows += 1;
            for sent in tracked.account.into_iter().flatten() {
                share.packets += sent.packets;
                share.bytes += sent.bytes;
            }
        }
        let others = talkers.len().saturating_sub(self.limit);
        let mut talkers: Vec<_> = talkers.into_iter().collect();
        talkers.sort_unstable_by(|(one, sum), (two, other)| {
            let order = Reverse(sum.flows).cmp(&Reverse(other.flows));
            order.then_with(|| one.cmp(two))
        });
        talkers.truncate(self.limit);
        say_notices(owners.as_ref());
        let counted = reader.table().has_accounts();
        while_read(|out| {
            let mut table = table::talkers(self.by.heading(), counted);
            for (talker, share) in talkers {
                let line = TalkerLine {
                    talker: talker.to_string(),
                    flows: share.flows,
                    share: share.flows as f64 / all as f64,
                    packets: counted.then_some(share.packets),
                    bytes: counted.then_some(share.bytes),
                };
                match self.json {
                    true => json::write_found("talker", reader.identity(), line, out)?,
                    false => table.row(line.cells(self.numbers.units()), out)?,
                }
            }
            if self.json {
                return Ok(());
            }
            table.end(out)?;
            if others > 0 {
                writeln!(
                    out,
                    "and {others} more, of {} in total",
                    several(all, "flow")
                )?;
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
            Self::Command => "COMMAND",
            Self::Cgroup => "CGROUP",
        }
    }
}

impl TalkerLine {
    /// Its cells for people. Hosts that count no packets have none.
    pub(super) fn cells(&self, units: Units) -> Vec<String> {
        let sent = self.packets.zip(self.bytes);
        let sent = sent.map(|(packets, bytes)| [packets, bytes]);
        table::talker(&self.talker, (self.flows, self.share), sent, units)
    }
}
