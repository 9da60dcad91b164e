//! `twheel detach`

use anyhow::Result;
use clap::Args;

use crate::{
    failure::{Failure, Kind},
    host, pins,
};

/// Remove everything that `run --keep`, or a `run` that was killed, has left on an interface
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel detach --iface eth0
  twheel detach --iface eth0 --iface eth1")]
pub struct Detach {
    /// The interface; may be given several times
    #[arg(long = "iface", value_name = "NAME", required = true)]
    interfaces: Vec<String>,
}

impl Detach {
    pub(super) fn execute(self) -> Result<()> {
        host::check()?;
        let mut missing = Vec::new();
        for interface in &self.interfaces {
            if pins::detach(interface)? {
                say!("{interface}: detached");
            } else {
                missing.push(interface.as_str());
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        Err(Failure::new(
            Kind::Pins,
            format!(
                "twheel is not attached to {}: nothing to remove",
                missing.join(", ")
            ),
        )
        .into())
    }
}
