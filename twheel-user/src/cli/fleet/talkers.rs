//! `twheel fleet talkers`

use anyhow::Result;
use clap::Args;

use super::ask::Asked;
use crate::{
    cli::{
        select::{Numbers, while_read},
        talkers::TalkerLine,
    },
    fleet::sums::{self, By},
    given,
    output::{json, several, table},
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
    by: By,
    /// Show at most N lines
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = given::count, allow_hyphen_values = true)]
    limit: usize,
    #[command(flatten)]
    numbers: Numbers,
}

fn heading(by: By) -> &'static str {
    match by {
        By::Src => "SRC",
        By::Dst => "DST",
        By::Port => "DPORT",
        By::Host => "HOST",
        By::Command => "COMMAND",
        By::Cgroup => "CGROUP",
        By::Rule => "RULE",
    }
}

impl Talkers {
    pub(super) fn execute(self) -> Result<()> {
        let (server, question) = self.asked.open()?;
        let talkers = sums::talkers(&server, &question, self.by, self.limit)?;
        let is_counted = talkers.iter().any(|it| it.counted > 0);
        let is_json = self.asked.place.json;
        while_read(|out| {
            let mut table = table::talkers(heading(self.by), is_counted);
            for it in &talkers {
                let is_counted = it.counted > 0;
                let line = TalkerLine {
                    talker: it.talker.clone(),
                    flows: it.flows,
                    share: it.flows as f64 / it.all as f64,
                    packets: is_counted.then_some(it.packets),
                    bytes: is_counted.then_some(it.bytes),
                };
                match is_json {
                    true => json::write_now("fleet_talker", line, out)?,
                    false => table.row(line.cells(self.numbers.units()), out)?,
                }
            }
            if is_json {
                return Ok(());
            }
            table.end(out)?;
            if let Some(first) = talkers.first()
                && first.talkers > talkers.len() as u64
            {
                let more = first.talkers - talkers.len() as u64;
                writeln!(
                    out,
                    "and {more} more, of {} in total",
                    several(first.all, "flow")
                )?;
            }
            Ok(())
        })
    }
}
