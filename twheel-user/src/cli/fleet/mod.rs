//! `twheel fleet`

mod ask;
mod expired;
mod hosts;
mod leaks;
mod reasons;
mod schema;
mod talkers;

use anyhow::Result;
use clap::{Args, Subcommand};

/// Ask about the flows of many hosts, whose events are in ClickHouse
///
/// `twheel export clickhouse` or `twheel export kafka` on each host sends the events there; docs/fleet.md says how the
/// parts fit together.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel fleet schema | clickhouse-client --multiquery
  twheel fleet leaks --since 1d
  twheel fleet hosts --since 1d
  twheel fleet expired 'reason == idle and dport == 5432' --since 1h")]
pub struct Fleet {
    #[command(subcommand)]
    command: FleetCommand,
}

#[derive(Subcommand)]
enum FleetCommand {
    Schema(schema::SchemaCommand),
    Expired(expired::Expired),
    Talkers(talkers::Talkers),
    Reasons(reasons::Reasons),
    Hosts(hosts::Hosts),
    Leaks(leaks::Leaks),
}

impl Fleet {
    pub(super) fn execute(self) -> Result<()> {
        match self.command {
            FleetCommand::Schema(schema) => schema.execute(),
            FleetCommand::Expired(expired) => expired.execute(),
            FleetCommand::Talkers(talkers) => talkers.execute(),
            FleetCommand::Reasons(reasons) => reasons.execute(),
            FleetCommand::Hosts(hosts) => hosts.execute(),
            FleetCommand::Leaks(leaks) => leaks.execute(),
        }
    }
}
