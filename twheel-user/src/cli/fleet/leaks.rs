//! `twheel fleet leaks`

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::ask::Asked;
use crate::{
    cli::select::while_read,
    fleet::leaks::{self, By, Leak},
    output::json,
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
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
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
            if !is_json {
                writeln!(
                    out,
                    "{heading:<15} {:>10} {:>10} {:>7} {:>7} {:>8} {:>6}  FIRST",
                    "ENDED", "IDLE", "SHARE", "BEFORE", "CHANGE", "HOSTS"
                )?;
            }
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
                        format!("{:.1}%", 100.0 * line.share_before),
                        format!("{:+.1}%", 100.0 * line.change),
                    ),
                };
                writeln!(
                    out,
                    "{:<15} {:>10} {:>10} {:>6.1}% {before:>7} {change:>8} {:>6}  {}",
                    leak.name.escape_debug().to_string(),
                    line.ended,
                    line.idle,
                    100.0 * line.share,
                    line.hosts,
                    humantime::format_rfc3339_seconds(leak.first),
                )?;
            }
            let more = leaks.len().saturating_sub(self.limit);
            if !is_json && more > 0 {
                writeln!(out, "and {more} more")?;
            }
            Ok(())
        })
    }
}
