//! `twheel delete`

use anyhow::Result;
use clap::Args;
use serde_json::json;
use twheel_common::event::Reason;

use super::select::{Deleting, Select, Which};
use crate::{
    failure::{Failure, Kind},
    filter::Subject,
};

/// Delete the flows that a filter matches
///
/// A flow that has a packet between being chosen and being deleted stays: the kernel compares. Whoever reads the
/// instance's events is told of each flow: reason `deleted`.
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
    /// Say how many would be deleted, and delete none
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
                "say which flows to delete, such as `twheel delete 'src == 192.0.2.7'`; `twheel flush` deletes all",
            )
            .into());
        }
        let chosen = |flow: &crate::flows::Flow, now| {
            reader.tracked(flow, now).is_some_and(|tracked| {
                filter.matches(&Subject::tracked(&tracked, reader.known_as(&tracked.flow)))
            })
        };
        if self.dry_run {
            let now = reader.now()?;
            let flows = reader.table().iter().filter(|flow| chosen(flow, now));
            let count = flows.count();
            let text = format!("{count} flows would be deleted");
            return self.deleting.say(&json!({ "would_delete": count }), &text);
        }
        self.deleting.delete(&reader, chosen, Reason::Deleted)
    }
}
