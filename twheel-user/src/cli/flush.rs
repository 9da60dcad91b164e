//! `twheel flush`

use anyhow::Result;
use clap::Args;
use twheel_common::event::Reason;

use super::select::{Deleting, Select};

/// Delete all flows of an instance, running or left by `run --keep`
///
/// A flow that has had a packet since it was selected is not deleted. Each deleted flow has an event, with reason
/// `flushed`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel flush
  twheel flush --iface eth0
  twheel delete 'src == 192.0.2.7'       # some of them")]
pub struct Flush {
    #[command(flatten)]
    select: Select,
    #[command(flatten)]
    deleting: Deleting,
}

impl Flush {
    pub(super) fn execute(self) -> Result<()> {
        let reader = self.select.open()?;
        self.deleting.delete(&reader, |_, _| true, Reason::Flushed)
    }
}
