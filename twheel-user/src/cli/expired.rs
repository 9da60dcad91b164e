//! `twheel expired`

use std::{
    collections::VecDeque,
    io::Write,
    path::PathBuf,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::Result;
use clap::Args;

use super::complete;
use super::select::{Numbers, Select, Which, event_kind, while_read};
use crate::{
    filter::{Knowable, Subject},
    given,
    history::{self, Past, PastEvent},
    model::{EventKind, FlowEvent},
    output::{json::Json, table::HELD, text::Text},
};

/// List flows that have ended, when and why, from the history on disk
///
/// Oldest first. The history outlives `twheel run` and its pins.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel expired --since 10m
  twheel expired 'reason == idle and state == established' --limit 20
  twheel expired -f                      # and flows as they end, until Ctrl-C
  twheel expired --json --since 1d | jq -r .dst | sort | uniq -c")]
pub struct Expired {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    select: Select,
    /// Show only flows that ended within this time
    #[arg(long, value_name = "DURATION", value_parser = given::duration, allow_hyphen_values = true)]
    since: Option<Duration>,
    /// Show only the last N
    #[arg(long, value_name = "N", value_parser = given::count, allow_hyphen_values = true)]
    limit: Option<usize>,
    /// Kinds of events to show, a list of `begin`, `update`, `end`, `rto`, `reap` and `run`. With a filter, only `end` and `reap` are shown
    #[arg(long, value_name = "KINDS", value_delimiter = ',', value_parser = event_kind, default_value = "end", add = complete::kinds())]
    events: Vec<EventKind>,
    /// Keep printing flows as they end
    #[arg(short, long)]
    follow: bool,
    /// Directory of the histories
    #[arg(long, value_name = "DIR", env = "TWHEEL_HISTORY", default_value = history::DIRECTORY)]
    history: PathBuf,
    #[command(flatten)]
    numbers: Numbers,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

impl Expired {
    pub(super) fn execute(self) -> Result<()> {
        let known = Knowable {
            ended: true,
            accounting: true,
            rto: true,
        };
        let filter = self.which.filter(known)?;
        let name = history::name_of(self.select.interface(), &self.history)?;
        let now = SystemTime::now();
        let since = self.since.and_then(|since| now.checked_sub(since));
        let mut reader =
            history::HistoryReader::open(&self.history, &name, since.unwrap_or(UNIX_EPOCH))?;
        // Start watching before the present events are read, so that none in between is missed.
        let follow = self.follow.then(|| reader.follow()).transpose()?;
        let mut text = Text::new(self.numbers.units());
        let mut print = |held: &mut VecDeque<Past>, out: &mut dyn Write| -> Result<()> {
            if !self.json {
                let flows = held.iter().filter_map(Past::flow);
                flows.for_each(|flow| text.make_room(flow));
            }
            for past in held.drain(..) {
                if self.json {
                    past.write(&mut Json::new(past.identity.clone()), out)?;
                    continue;
                }
                let time = humantime::format_rfc3339_seconds(past.mark.time);
                write!(out, "{time}  ")?;
                past.write(&mut text, out)?;
            }
            Ok(())
        };
        while_read(|out| {
            // With --limit, the latest events that match so far; otherwise those whose endpoints
            // make the columns as wide as they need.
            let mut held = VecDeque::new();
            let mut limit = self.limit;
            let (mut damaged, mut lost, mut missed) = (0, 0, 0);
            let mut refused = None;
            loop {
                while let Some(past) = reader.next()? {
                    let ago = SystemTime::now()
                        .duration_since(past.mark.time)
                        .unwrap_or_default();
                    let named = past.known_as.named();
                    let matches = match &past.event {
                        PastEvent::Flow(FlowEvent::Ended(ended))
                        | PastEvent::Reaped(_, ended, _) => {
                            filter.matches(&Subject::ended(ended, named, ago))
                        }
                        _ => filter.is_empty(),
                    };
                    if !matches || !self.events.contains(&past.kind()) {
                        continue;
                    }
                    held.push_back(past);
                    match limit {
                        Some(limit) if held.len() > limit => drop(held.pop_front()),
                        None if held.len() >= HELD => print(&mut held, out)?,
                        _ => {}
                    }
                }
                print(&mut held, out)?;
                limit = None;
                out.flush()?;
                if reader.damaged > damaged {
                    damaged = reader.damaged;
                    say!("{damaged} records of the history are damaged and were skipped");
                }
                if reader.lost > lost {
                    lost = reader.lost;
                    say!(
                        "up to {lost} events are not in the history: the disk was too slow or full, or no history was kept"
                    );
                }
                if reader.missed > missed {
                    missed = reader.missed;
                    say!(
                        "{missed} segments of the history were removed before they were read: to keep them longer, \
                         give `twheel run` a larger --history-size"
                    );
                }
                refused = refused.or(tell(&mut reader.refused));
                match &follow {
                    Some(follow) => follow.wait()?,
                    None => return refused.map_or(Ok(()), Err),
                }
            }
        })
    }
}

/// Prints why segments could not be read. The last reason is returned, to be reported at the end.
fn tell(refused: &mut Vec<anyhow::Error>) -> Option<anyhow::Error> {
    let last = refused.pop();
    for error in refused.drain(..) {
        say!("twheel: {error:#}");
    }
    last
}
