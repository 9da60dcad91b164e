//! `twheel delete`

use anyhow::Result;
use clap::Args;
use serde_json::json;
use twheel_common::event::Reason;

use super::select::{Deleting, Select, Which};
use crate::{
    failure::{Failure, Kind},
    output::several,
};

/// Delete the flows that a filter matches
///
/// A flow that has had a packet since it was selected is not deleted. Each deleted flow has an event, with reason
/// `deleted`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel delete 'src == 192.0.2.7' --dry-run
  twheel delete 'state == syn_sent and idle > 10s'
  twheel flush --iface eth0              # all flows")]
pub struct Delete {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    select: Select,
    /// Report how many flows would be deleted, and delete none
    #[arg(long)]
    dry_run: bool,
    #[command(flatten)]
    deleting: Deleting,
}

impl Delete {
    pub(super) fn execute(self) -> Result<()> {
        let reader = self.select.open()?;
        let filter = self.which.filter_for(&reader)?;
        if filter.is_empty() {
            return Err(Failure::new(
                Kind::Usage,
                "give a filter, such as `twheel delete 'src == 192.0.2.7'`; to delete all flows, use `twheel flush`",
            )
            .into());
        }
        let chosen = |flow: &crate::flows::Flow, now| {
            let tracked = reader.tracked(flow, now);
            tracked.is_some_and(|tracked| reader.matches(&filter, &tracked))
        };
        if self.dry_run {
            let now = reader.now()?;
            let flows = reader.table().iter().filter(|flow| chosen(flow, now));
            let count = flows.count();
            let text = format!("{} would be deleted", several(count as u64, "flow"));
            return self.deleting.say(&json!({ "would_delete": count }), &text);
        }
        self.deleting.delete(&reader, chosen, Reason::Deleted)
    }
}
