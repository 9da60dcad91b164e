//! `twheel fleet reasons`

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::ask::Asked;
use crate::{
    cli::select::while_read,
    fleet::sums::{self, Reason},
    output::json,
};

/// Count the ended flows of all hosts by reason and state
///
/// The time begins at a whole minute.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel fleet reasons --since 1d
  twheel fleet reasons 'proto == tcp and dport == 443' --json")]
pub(super) struct Reasons {
    #[command(flatten)]
    asked: Asked,
}

#[derive(Serialize)]
struct ReasonLine<'a> {
    #[serde(flatten)]
    reason: &'a Reason,
    share: f64,
}

impl Reasons {
    pub(super) fn execute(self) -> Result<()> {
        let (server, question) = self.asked.open()?;
        let reasons = sums::reasons(&server, &question)?;
        let all: u64 = reasons.iter().map(|it| it.flows).sum();
        let is_json = self.asked.place.json;
        while_read(|out| {
            if !is_json {
                writeln!(
                    out,
                    "{:<11} {:<11} {:>12} {:>7}",
                    "REASON", "STATE", "FLOWS", "SHARE"
                )?;
            }
            for reason in &reasons {
                let share = reason.flows as f64 / all as f64;
                if is_json {
                    json::write_now("fleet_reason", ReasonLine { reason, share }, out)?;
                    continue;
                }
                writeln!(
                    out,
                    "{:<11} {:<11} {:>12} {:>6.1}%",
                    reason.reason,
                    reason.state,
                    reason.flows,
                    100.0 * share
                )?;
            }
            Ok(())
        })
    }
}
