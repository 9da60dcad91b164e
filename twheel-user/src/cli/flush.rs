//! `twheel flush`

use anyhow::Result;
use clap::Args;
use twheel_common::event::Reason;

use super::select::{Deleting, Select};

/// Delete all flows of an instance that is running, or that `run --keep` has left
///
/// A flow that has a packet between being looked at and being deleted stays. Whoever reads the instance's events is
/// told of each flow: reason `flushed`.
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
