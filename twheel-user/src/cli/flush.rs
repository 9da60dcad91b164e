//! `twheel flush`

use anyhow::Result;
use clap::Args;
use twheel_common::event::Reason;

use crate::{delete::delete_all, flows::Flows, host, pins::Instance, progress};

/// Delete all flows of an instance that is running, or that `run --keep` has left
///
/// A flow that has a packet between being looked at and being deleted stays. Whoever reads the instance's events is
/// told of each flow: reason `flushed`.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel flush --iface eth0")]
pub struct Flush {
    /// An interface of the instance
    #[arg(long = "iface", value_name = "NAME")]
    interface: String,
}

impl Flush {
    pub(super) fn execute(self) -> Result<()> {
        host::check()?;
        let pins = Instance::of(&self.interface)?;
        let bar = progress::bar("flushing", pins.map("FLOWS")?.info()?.max_entries().into());
        let table = Flows::pinned(&pins)?;
        let flows = table
            .iter()
            .inspect(|flow| bar.set_position(flow.index.into()));
        let tally = delete_all(&pins, flows, Reason::Flushed)?;
        bar.finish_and_clear();
        let busy = match tally.changed {
            0 => String::new(),
            changed => format!(", {changed} had a packet or an end meanwhile"),
        };
        say!("{}: {} flows flushed{busy}", self.interface, tally.done);
        Ok(())
    }
}
