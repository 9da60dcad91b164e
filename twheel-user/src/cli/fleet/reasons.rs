//! `twheel fleet reasons`

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::ask::Asked;
use crate::{
    cli::select::{Numbers, while_read},
    fleet::sums::{self, Reason},
    output::{
        json,
        table::{Column, Table, percent},
    },
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
    #[command(flatten)]
    numbers: Numbers,
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
            let mut table = Table::new([
                Column::text("REASON"),
                Column::text("STATE"),
                Column::number("FLOWS"),
                Column::number("SHARE"),
            ]);
            for reason in &reasons {
                let share = reason.flows as f64 / all as f64;
                if is_json {
                    json::write_now("fleet_reason", ReasonLine { reason, share }, out)?;
                    continue;
                }
                let cells = vec![
                    reason.reason.clone(),
                    reason.state.clone(),
                    self.numbers.units().count(reason.flows),
                    percent(share),
                ];
                table.row(cells, out)?;
            }
            match is_json {
                true => Ok(()),
                false => Ok(table.end(out)?),
            }
        })
    }
}
