//! `twheel fleet`

mod schema;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Ask about the flows of many hosts, whose events are in ClickHouse
///
/// `twheel export clickhouse` or `twheel export kafka` on each host sends the events there; docs/fleet.md says how the
/// parts fit together.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel fleet schema | clickhouse-client --multiquery")]
pub struct Fleet {
    #[command(subcommand)]
    command: FleetCommand,
}

#[derive(Subcommand)]
enum FleetCommand {
    Schema(schema::SchemaCommand),
}

impl Fleet {
    pub(super) fn execute(self) -> Result<()> {
        match self.command {
            FleetCommand::Schema(schema) => schema.execute(),
        }
    }
}
