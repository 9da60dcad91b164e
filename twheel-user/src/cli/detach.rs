//! `twheel detach`

use anyhow::Result;
use clap::Args;

use super::complete;
use crate::{
    failure::{Failure, Kind},
    host, patterns, pins,
};

/// Remove everything that `run --keep`, or a killed `run`, left on an interface
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel detach --iface eth0
  twheel detach --iface eth0 --iface eth1
  twheel detach --iface 'veth*'")]
pub struct Detach {
    /// Interface, pattern such as 'veth*', all, or a list with commas; may be repeated
    #[arg(long = "iface", value_name = "NAME", required = true, add = complete::instances())]
    interfaces: Vec<String>,
}

impl Detach {
    pub(super) fn execute(self) -> Result<()> {
        host::check()?;
        let interfaces = patterns::parse("--iface", &self.interfaces)?;
        let mut missing = Vec::new();
        for interface in &interfaces {
            if pins::detach(interface)? {
                say!("{}: detached", interface.text());
            } else {
                missing.push(interface.text());
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
