//! `twheel flows`

use std::{cmp::Ordering, time::SystemTime};

use anyhow::Result;
use clap::{Args, ValueEnum};
use twheel_common::counter::Counters;

use super::{
    first::{First, Order},
    owner::{Owned, say_notices},
    select::{Numbers, Select, Which, known, while_read},
};
use crate::{
    failure::{Failure, Kind},
    filter::{Field, Filter, Knowable},
    flows::Flow,
    given,
    inspect::Reader,
    model::Tracked,
    output::{
        flow_table, json,
        table::{Cells, HELD},
    },
    owner::Owners,
};

/// List the flows in the table
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel flows
  twheel flows 'state == established and dport == 443 and idle > 30s'
  twheel flows 'src in 10.0.0.0/8 and not port in {22, 53}' --sort expires --limit 20
  twheel flows --json | jq -r .src | sort | uniq -c
  twheel flows --owner 'state == established'   # which processes they belong to")]
pub struct Flows {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    select: Select,
    #[command(flatten)]
    owned: Owned,
    /// Sort key [default: table order, streamed]
    #[arg(long, value_enum, value_name = "KEY")]
    sort: Option<Key>,
    /// Reverse the order
    #[arg(long, requires = "sort")]
    reverse: bool,
    /// Show at most N flows
    #[arg(long, value_name = "N", value_parser = given::count, allow_hyphen_values = true)]
    limit: Option<usize>,
    #[command(flatten)]
    numbers: Numbers,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// What flows are sorted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Key {
    /// Time since the last packet, longest first
    Idle,
    /// Time until it expires, shortest first
    Expires,
    /// Time since the first packet, longest first
    Age,
    /// Packets of both sides together, most first
    Packets,
    /// Bytes of both sides together, most first
    Bytes,
    /// Round trip time of the slower side, longest first
    Rtt,
    /// Address of the initiator
    Src,
    /// Address of the responder
    Dst,
    /// Name of the state
    State,
}

impl Key {
    /// Why flows cannot be sorted by it here; [`None`] if they can.
    pub fn unknown(self, known: Knowable) -> Option<String> {
        let field = match self {
            Self::Packets => Field::Packets,
            Self::Bytes => Field::Bytes,
            Self::Rtt => Field::Rtt,
            _ => return None,
        };
        let why = field.unknown(known)?;
        Some(format!("--sort {}: it {why}", field.name()))
    }
}

impl Order<Tracked> for Key {
    fn compare(self, one: &Tracked, two: &Tracked) -> Ordering {
        let sum = |of: &Tracked, what: fn(&twheel_common::flow::Traffic) -> u64| {
            of.account.map_or(0, |sides| sides.iter().map(what).sum())
        };
        let rtt = |of: &Tracked| {
            let sides = of.timing.unwrap_or_default();
            sides[0].srtt.max(sides[1].srtt)
        };
        match self {
            Self::Idle => two.idle.cmp(&one.idle),
            Self::Expires => one.expires.cmp(&two.expires),
            Self::Age => two.age.cmp(&one.age),
            Self::Packets => sum(two, |it| it.packets).cmp(&sum(one, |it| it.packets)),
            Self::Bytes => sum(two, |it| it.bytes).cmp(&sum(one, |it| it.bytes)),
            Self::Rtt => rtt(two).cmp(&rtt(one)),
            Self::Src => one.flow.src.cmp(&two.flow.src),
            Self::Dst => one.flow.dst.cmp(&two.flow.dst),
            Self::State => one.flow.state.cmp(two.flow.state),
        }
    }
}

impl Flows {
    pub(super) fn execute(self) -> Result<()> {
        let reader = self.select.open()?;
        let filter = self.which.filter_for(&reader)?;
        if let Some(why) = self.sort.and_then(|key| key.unknown(known(&reader))) {
            return Err(Failure::new(Kind::Usage, why).into());
        }
        let mut owners = self.owned.open(Owners::for_listing)?;
        let units = self.numbers.units();
        let listed = while_read(|out| {
            let columns = reader.columns();
            let mut table = flow_table::flows(columns);
            let mut cells = Cells::default();
            // The ages of all flows are of now, however long the list takes.
            let (time, now) = (SystemTime::now(), reader.now()?);
            let sorted = self.sort.map(|key| self.sorted(key, &reader, &filter, now));
            let each = |then: &mut dyn FnMut(&Tracked) -> Result<()>| match &sorted {
                Some(sorted) => sorted.iter().try_for_each(then),
                None => passing(&reader, &filter, now)
                    .take(self.limit.unwrap_or(usize::MAX))
                    .try_for_each(|(_, tracked)| then(&tracked)),
            };
            let count = match &sorted {
                Some(sorted) => sorted.len(),
                None => self.most(&reader)?,
            };
            if !self.json && count > HELD {
                // The owner stands in the last column, which has no width.
                each(&mut |tracked| {
                    let named = reader.known_as(&tracked.flow);
                    flow_table::measure_flow(&mut table, tracked, named, (columns, units));
                    Ok(())
                })?;
            }
            each(&mut |tracked| {
                let mut named = reader.known_as(&tracked.flow);
                let owner = owners.as_mut().and_then(|it| it.find(&tracked.flow, named));
                named.owner = owner.as_ref();
                if self.json {
                    json::tracked(reader.identity(), time, tracked, named, out)?;
                } else {
                    flow_table::flow(tracked, named, (columns, units), &mut cells);
                    table.add_cells(&cells, out)?;
                }
                Ok(())
            })?;
            match self.json {
                true => Ok(()),
                false => Ok(table.end(out)?),
            }
        });
        say_notices(owners.as_ref());
        listed
    }

    /// The first flows that match the filter, in order.
    fn sorted(&self, key: Key, reader: &Reader, filter: &Filter, now: u32) -> Vec<Tracked> {
        let limit = self.limit.unwrap_or(usize::MAX);
        let mut first = First::new(key, self.reverse, limit);
        // `for_each` and not a loop: flows are then passed from one iterator to the next without
        // being copied.
        passing(reader, filter, now).for_each(|(flow, tracked)| first.take(flow.index, tracked));
        first.sorted().collect()
    }

    /// At least as many flows as are listed.
    fn most(&self, reader: &Reader) -> Result<usize> {
        let live = Counters::sum(&reader.counted()?.cpus).live();
        Ok(self.limit.unwrap_or(usize::MAX).min(live as usize))
    }
}

/// The flows that match a filter, in the order of the table.
fn passing<'a>(
    reader: &'a Reader,
    filter: &'a Filter,
    now: u32,
) -> impl Iterator<Item = (Flow, Tracked)> + 'a {
    let flows = reader.flows(now);
    flows.filter(|(_, tracked)| reader.matches(filter, tracked))
}
