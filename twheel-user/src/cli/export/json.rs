//! `twheel export json`

use anyhow::Result;
use clap::Args;

use super::{Kinds, Source};
use crate::export::{json::Lines, target::Target};

/// Send events as lines of JSON to a file or a socket
///
/// Each event arrives at least once. After a connection has ended, up to 8 MiB that the other end may not have read are
/// sent again; `instance` and `seq` tell which lines come twice.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel export json --to tcp:collector.example:5170
  twheel export json --to unix:/run/collector.sock --events end,reap
  twheel export json --to /var/log/twheel.json")]
pub(super) struct JsonExport {
    /// Where to: a file, unix:PATH or tcp:HOST:PORT
    #[arg(long, value_name = "TARGET")]
    to: Target,
    #[command(flatten)]
    source: Source,
    #[command(flatten)]
    kinds: Kinds,
}

impl JsonExport {
    pub(super) fn execute(self) -> Result<()> {
        let name = self.source.name()?;
        let mut lines = Lines::new(self.kinds.events);
        self.source.send(&name, &self.to, "json", &mut lines)
    }
}
