//! `twheel fleet leaks`

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::ask::Asked;
use crate::{
    cli::select::{Numbers, while_read},
    fleet::leaks::{self, By, Leak},
    given,
    output::{
        json,
        table::{Column, Table, percent},
    },
};

/// List services whose established connections end idle instead of closed or reset
///
/// A connection that ends idle was forgotten by both sides. BEFORE is the share in a time of the same length before, and
/// FIRST the first such end that is kept. The time begins at a whole minute.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel fleet leaks --since 1d
  twheel fleet leaks 'dport == 5432' --by host --since 7d")]
pub(super) struct Leaks {
    #[command(flatten)]
    asked: Asked,
    /// What to count by
    #[arg(long, value_enum, default_value = "service")]
    by: By,
    /// Show at most N lines
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = given::count, allow_hyphen_values = true)]
    limit: usize,
    #[command(flatten)]
    numbers: Numbers,
}

#[derive(Serialize)]
struct LeakLine<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    service: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reporter: Option<&'a str>,
    ended: u64,
    idle: u64,
    share: f64,
    ended_before: u64,
    idle_before: u64,
    share_before: f64,
    change: f64,
    hosts: u64,
    first: String,
}

impl<'a> LeakLine<'a> {
    fn new(leak: &'a Leak, by: By) -> Self {
        let (share, share_before) = (leak.now.share(), leak.before.share());
        let name = Some(leak.name.as_str());
        Self {
            service: name.filter(|_| by == By::Service),
            reporter: name.filter(|_| by == By::Host),
            ended: leak.now.ended,
            idle: leak.now.idle,
            share,
            ended_before: leak.before.ended,
            idle_before: leak.before.idle,
            share_before,
            change: share - share_before,
            hosts: leak.hosts,
            first: humantime::format_rfc3339_micros(leak.first).to_string(),
        }
    }
}

impl Leaks {
    pub(super) fn execute(self) -> Result<()> {
        let (server, question) = self.asked.open()?;
        let heading = match self.by {
            By::Service => "SERVICE",
            By::Host => "HOST",
        };
        let leaks = leaks::leaks(&server, &question, self.by)?;
        let is_json = self.asked.place.json;
        while_read(|out| {
            let numbers = ["ENDED", "IDLE", "SHARE", "BEFORE", "CHANGE", "HOSTS"];
            let mut columns = vec![Column::text(heading)];
            columns.extend(numbers.map(Column::number));
            columns.push(Column::text("FIRST"));
            let mut table = Table::new(columns);
            let units = self.numbers.units();
            for leak in leaks.iter().take(self.limit) {
                let line = LeakLine::new(leak, self.by);
                if is_json {
                    json::write_now("fleet_leak", line, out)?;
                    continue;
                }
                // Of a service that had no flows before, nothing has changed.
                let (before, change) = match leak.before.ended {
                    0 => ("-".to_owned(), "-".to_owned()),
                    _ => (
                        percent(line.share_before),
                        format!("{:+.1}%", 100.0 * line.change),
                    ),
                };
                let cells = vec![
                    leak.name.escape_debug().to_string(),
                    units.count(line.ended),
                    units.count(line.idle),
                    percent(line.share),
                    before,
                    change,
                    units.count(line.hosts),
                    humantime::format_rfc3339_seconds(leak.first).to_string(),
                ];
                table.row(cells, out)?;
            }
            if is_json {
                return Ok(());
            }
            table.end(out)?;
            let more = leaks.len().saturating_sub(self.limit);
            if more > 0 {
                writeln!(out, "and {more} more")?;
            }
            Ok(())
        })
    }
}
