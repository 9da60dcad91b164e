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
            let name = interface.text();
            match pins::detach(interface)? {
                Some(stay) if stay.is_empty() => say!("{name}: detached"),
                Some(stay) => {
                    let stay = stay.join(", ");
                    say!("{name}: detached; still attached: {stay}");
                }
                None => missing.push(name),
            }
        }
        if missing.is_empty() {
            return Ok(());
        }
        for name in &missing {
            if let Some((_, earlier)) = pins::renamed(name)? {
                let what = format!(
                    "twheel holds {name} by its earlier name: run `twheel detach --iface {earlier}`"
                );
                return Err(Failure::new(Kind::Pins, what).into());
            }
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
