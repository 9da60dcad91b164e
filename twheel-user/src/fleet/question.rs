//! Which events a question is about, as a part of SQL.

use std::time::{Duration, SystemTime};

use anyhow::Result;
use serde::de::DeserializeOwned;

use super::schema::VERSION;
use crate::{
    clickhouse::Server,
    filter::{
        Filter,
        sql::{Parameters, Rows, micros_of},
    },
};

const MINUTE: Duration = Duration::from_secs(60);

/// Which ended flows, of which hosts, since when.
#[derive(Clone, Debug)]
pub struct Question {
    /// Which flows.
    pub filter: Filter,
    /// The names of the hosts; empty: all.
    pub hosts: Vec<String>,
    /// How long ago the oldest ended.
    pub since: Duration,
    /// The time of the question.
    pub now: SystemTime,
}

/// SQL under way, with its parameters.
pub(super) struct Sql {
    pub(super) text: String,
    pub(super) parameters: Parameters,
}

impl Question {
    /// When the question's time begins.
    pub fn from(&self) -> SystemTime {
        let from = self.now.checked_sub(self.since);
        from.unwrap_or(SystemTime::UNIX_EPOCH)
    }

    /// The same, at the beginning of a minute. What is answered from sums by minute begins there, and
    /// so does what is answered from events instead, so that both have the same answer, as long as
    /// that minute is not older than rows are kept: older ones are removed within about a day, but
    /// not from all tables at once.
    pub fn from_minute(&self) -> SystemTime {
        let minute = MINUTE.as_micros() as i64;
        let from = micros_of(self.from());
        super::row::time(from - from.rem_euclid(minute))
    }

    /// The condition on the name of the host; it begins with ` AND`, or is empty.
    pub(super) fn of_hosts(&self, parameters: &mut Parameters) -> String {
        if self.hosts.is_empty() {
            return String::new();
        }
        let hosts = parameters.bind(self.hosts.clone(), "Array(String)");
        format!(" AND host IN {hosts}")
    }

    /// The condition that a row is of an ended flow that is asked for, from this time on.
    pub(super) fn condition(
        &self,
        rows: Rows,
        from: SystemTime,
        parameters: &mut Parameters,
    ) -> String {
        let filter = self.filter.sql(rows, self.now, parameters);
        let hosts = self.of_hosts(parameters);
        let from = bind_time(from, parameters);
        match rows {
            Rows::Events => format!("event = 'end' AND time >= {from}{hosts} AND {filter}"),
            Rows::Minutes => format!("minute >= {from}{hosts} AND {filter}"),
        }
    }

    /// The events that [`Row`](super::row::Row) describes, oldest first: of these kinds, and only
    /// the last ones if there is a limit. With a filter, only those of the kind `end` match.
    pub fn events(&self, kinds: &[&str], limit: Option<usize>) -> (String, Parameters) {
        let mut parameters = Parameters::default();
        let kinds = parameters.bind(
            kinds.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>(),
            "Array(String)",
        );
        let filter = match self.filter.is_empty() {
            true => String::new(),
            false => {
                let filter = self.filter.sql(Rows::Events, self.now, &mut parameters);
                format!(" AND event = 'end' AND {filter}")
            }
        };
        let hosts = self.of_hosts(&mut parameters);
        let from = bind_time(self.from(), &mut parameters);
        let columns = super::row::selected();
        let mut sql = format!(
            "SELECT {columns} FROM events FINAL \
             WHERE event IN {kinds} AND time >= {from}{hosts}{filter} ORDER BY time"
        );
        if let Some(limit) = limit {
            let limit = parameters.bind(limit as u64, "UInt64");
            sql = format!(
                "SELECT * FROM ({sql} DESC, host DESC, instance DESC, seq DESC LIMIT {limit}) \
                 ORDER BY time_us"
            );
        }
        (sql + ", host, instance, seq", parameters)
    }
}

/// A time, to compare a column with.
pub(super) fn bind_time(time: SystemTime, parameters: &mut Parameters) -> String {
    let micros = parameters.bind(micros_of(time), "Int64");
    format!("fromUnixTimestamp64Micro({micros}, 'UTC')")
}

/// Checks that the server's tables are those that this twheel reads.
///
/// # Errors
///
/// They are of another version, or there are none; or the server was not reached.
pub fn check(server: &Server) -> Result<()> {
    Ok(server.check_version(VERSION)?)
}

/// All rows of an answer.
pub(super) fn ask<T: DeserializeOwned>(server: &Server, sql: &Sql) -> Result<Vec<T>> {
    server.all(&sql.text, sql.parameters.values())
}
