//! `twheel fleet expired`

use std::io::{self, Write};

use anyhow::Result;
use clap::Args;

use super::ask::Asked;
use crate::{
    cli::{
        complete,
        select::{Numbers, event_kind, while_read},
    },
    fleet::row::Row,
    given,
    history::Past,
    model::EventKind,
    output::{json::Json, table::HELD, text::Text},
};

/// List flows that have ended on any host, when and why
///
/// Oldest first. The lines are those of `twheel expired`, with the host.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel fleet expired --since 10m
  twheel fleet expired 'reason == idle and dport == 5432' --since 1d --limit 20
  twheel fleet expired --host web1 --json --since 1d | jq -r .dst | sort | uniq -c")]
pub(super) struct Expired {
    #[command(flatten)]
    asked: Asked,
    /// Show only the last N
    #[arg(long, value_name = "N", value_parser = given::count, allow_hyphen_values = true)]
    limit: Option<usize>,
    /// Kinds of events to show, a list of `begin`, `update`, `end`, `rto`, `reap` and `run`. With a filter, only `end` is shown
    #[arg(long, value_name = "KINDS", value_delimiter = ',', value_parser = event_kind, default_value = "end", add = complete::kinds())]
    events: Vec<EventKind>,
    #[command(flatten)]
    numbers: Numbers,
}

impl Expired {
    pub(super) fn execute(self) -> Result<()> {
        let (server, question) = self.asked.open()?;
        let kinds: Vec<_> = self.events.iter().map(|kind| kind.name()).collect();
        let (sql, parameters) = question.events(&kinds, self.limit);
        let mut unknown = 0u64;
        let mut text = Text::new(self.numbers.units());
        // Their endpoints make the columns as wide as they need.
        let mut held = Vec::new();
        while_read(|out| {
            server.rows(&sql, parameters.values(), &mut |row: Row| {
                let Some((past, told)) = row.event() else {
                    unknown += 1;
                    return Ok(());
                };
                if self.asked.place.json {
                    let identity = past.identity.clone();
                    return Ok(past.write(&mut Json { identity, told }, out)?);
                }
                held.push(past);
                match held.len() {
                    HELD.. => Ok(print(&mut held, &mut text, out)?),
                    _ => Ok(()),
                }
            })?;
            Ok(print(&mut held, &mut text, out)?)
        })?;
        if unknown > 0 {
            say!(
                "{unknown} events were skipped: a twheel of another version has written them: update this one"
            );
        }
        Ok(())
    }
}

/// Prints events, and keeps none.
fn print(held: &mut Vec<Past>, text: &mut Text, out: &mut dyn Write) -> io::Result<()> {
    let flows = held.iter().filter_map(Past::flow);
    flows.for_each(|flow| text.make_room(flow));
    // A name may have any characters, also those that control a terminal.
    let host = |past: &Past| past.identity.host.escape_debug().to_string();
    let hosts = held.iter().map(|past| host(past).chars().count());
    let wide = hosts.max().unwrap_or(0).max(15);
    for past in held.drain(..) {
        let time = humantime::format_rfc3339_seconds(past.mark.time);
        write!(out, "{time}  {:<wide$}  ", host(&past))?;
        past.write(text, out)?;
    }
    Ok(())
}
