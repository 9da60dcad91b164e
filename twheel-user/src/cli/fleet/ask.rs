//! What the commands that ask a fleet share.

use std::time::{Duration, SystemTime};

use anyhow::Result;
use clap::Args;

use crate::{
    cli::{clickhouse::ClickHouse, select::Which},
    clickhouse::Server,
    filter::{Filter, Knowable},
    fleet::question::{self, Question},
    given,
};

/// Which ended flows.
#[derive(Args)]
pub(super) struct Asked {
    #[command(flatten)]
    which: Which,
    #[command(flatten)]
    pub(super) place: Place,
    /// Only what ended, or happened, within this time
    #[arg(long, value_name = "DURATION", value_parser = given::duration, allow_hyphen_values = true, default_value = "1h")]
    since: Duration,
}

/// Which server, which hosts.
#[derive(Args)]
pub(super) struct Place {
    #[command(flatten)]
    server: ClickHouse,
    /// Only what this host has reported; several can be given
    #[arg(long = "host", value_name = "NAME")]
    hosts: Vec<String>,
    /// Print one JSON object a line
    #[arg(long)]
    pub(super) json: bool,
}

impl Asked {
    /// The server, whose tables are of the right version, and the question.
    pub(super) fn open(&self) -> Result<(Server, Question)> {
        // A filter that is wrong needs no server to say so.
        let filter = self.which.filter(Knowable {
            ended: true,
            accounting: true,
            rto: true,
        })?;
        self.place.open(filter, self.since)
    }
}

impl Place {
    /// The same, with this filter, since so long ago.
    pub(super) fn open(&self, filter: Filter, since: Duration) -> Result<(Server, Question)> {
        let server = self.server.server()?;
        question::check(&server)?;
        let question = Question {
            filter,
            hosts: self.hosts.clone(),
            since,
            now: SystemTime::now(),
        };
        Ok((server, question))
    }
}
