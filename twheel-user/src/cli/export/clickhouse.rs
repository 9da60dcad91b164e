//! `twheel export clickhouse`

use std::sync::Arc;

use anyhow::Result;
use clap::Args;

use super::{Kinds, Source};
use crate::{
    cli::clickhouse::ClickHouse,
    export::{json::Lines, tables::Tables},
    fleet::schema::VERSION,
};

/// Send events to the tables of a ClickHouse server
///
/// `twheel fleet schema` prints the tables. Each event arrives at least once; those that come twice are told by `host`,
/// `instance` and `seq`, and ClickHouse keeps one of them.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel export clickhouse --url http://clickhouse.example:8123
  twheel export clickhouse --url https://clickhouse.example:8443 --user twheel --password-file /etc/twheel/password")]
pub(super) struct ClickHouseExport {
    #[command(flatten)]
    server: ClickHouse,
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    kinds: Kinds,
}

impl ClickHouseExport {
    pub(super) fn execute(self) -> Result<()> {
        let name = self.source.name()?;
        // Before this process gives up what lets it read the password.
        let to = Tables {
            server: Arc::new(self.server.server()?),
            version: VERSION,
        };
        let mut lines = Lines::with_own(self.kinds.events);
        self.source.send(&name, &to, "clickhouse", &mut lines)
    }
}
