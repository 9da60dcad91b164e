//! Services that leak connections: their established flows end because nothing comes any more
//! (`idle`), not because a side closes or resets them.

use std::{
    collections::HashMap,
    time::{Duration, SystemTime},
};

use anyhow::Result;
use serde::Deserialize;

use super::{
    question::{Question, Sql, ask},
    row,
};
use crate::{
    clickhouse::Server,
    filter::sql::{Parameters, Rows, micros_of},
};

/// What leaks are counted by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum By {
    /// Protocol and port of the responder
    Service,
    /// Host that reported the flows
    Host,
}

impl By {
    /// The expression of its name, a text. `port`: the column of the port.
    fn sql(self, port: &str) -> String {
        match self {
            Self::Service => format!("concat(proto, '/', toString({port}))"),
            Self::Host => "toString(host)".to_owned(),
        }
    }
}

/// Established flows of TCP that ended, and those of them that ended `idle`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ends {
    /// How many ended: `idle` while they were established, `closed` or `reset`.
    pub ended: u64,
    /// How many ended `idle`.
    pub idle: u64,
}

impl Ends {
    /// The share that ended `idle`; 0 if none ended.
    pub fn share(self) -> f64 {
        match self.ended {
            0 => 0.0,
            ended => self.idle as f64 / ended as f64,
        }
    }
}

/// A service, or a host, of which flows ended `idle`.
#[derive(Clone, Debug, PartialEq)]
pub struct Leak {
    /// The service, as `tcp/443`, or the host.
    pub name: String,
    /// In the time that was asked for.
    pub now: Ends,
    /// In a time of the same length before.
    pub before: Ends,
    /// The hosts that reported `idle` ends in the time that was asked for.
    pub hosts: u64,
    /// The first `idle` end that is kept, to the minute.
    pub first: SystemTime,
}

#[derive(Deserialize)]
struct Counted {
    name: String,
    ended: u64,
    idle: u64,
    ended_before: u64,
    idle_before: u64,
    hosts: u64,
}

#[derive(Deserialize)]
struct First {
    name: String,
    first_us: i64,
}

/// Established flows that ended `idle`.
const IDLE: &str = "proto = 'tcp' AND reason = 'idle' AND state = 'established'";
/// Flows whose end tells something.
const ENDED: &str = "proto = 'tcp' AND (reason IN ('closed', 'reset') OR reason = 'idle' AND state = 'established')";

/// What leaks, most `idle` ends first. The time begins at a whole minute.
///
/// # Errors
///
/// The server was not reached, or has refused the question.
pub fn leaks(server: &Server, question: &Question, by: By) -> Result<Vec<Leak>> {
    let rows = match question.filter.fits_minutes(true) {
        true => Rows::Minutes,
        false => Rows::Events,
    };
    let counted: Vec<Counted> = ask(server, &counts(question, rows, by))?;
    let firsts: Vec<First> = ask(server, &firsts(question, rows, by))?;
    let firsts: HashMap<_, _> = firsts
        .into_iter()
        .map(|first| (first.name, first.first_us))
        .collect();
    let leak = |it: Counted| Leak {
        first: row::time(firsts.get(&it.name).copied().unwrap_or_default()),
        name: it.name,
        now: Ends {
            ended: it.ended,
            idle: it.idle,
        },
        before: Ends {
            ended: it.ended_before,
            idle: it.idle_before,
        },
        hosts: it.hosts,
    };
    Ok(counted.into_iter().map(leak).collect())
}

fn counts(question: &Question, rows: Rows, by: By) -> Sql {
    let mut parameters = Parameters::default();
    let from = question.from_minute();
    // The time before is as long as that from its beginning until now.
    let length = question.now.duration_since(from).unwrap_or_default();
    let minutes = Duration::from_secs(length.as_secs().div_ceil(60) * 60);
    let before = from.checked_sub(minutes).unwrap_or(SystemTime::UNIX_EPOCH);
    let condition = question.condition(rows, before, &mut parameters);
    let from = parameters.bind(micros_of(from), "Int64");
    let from = format!("fromUnixTimestamp64Micro({from}, 'UTC')");
    let ended = match rows {
        Rows::Minutes => format!(
            "SELECT host, instance, proto, service, minute >= {from} AS is_now, \
             reason = 'idle' AS is_idle, groupBitmapMerge(ends) AS flows FROM ends_by_minute \
             WHERE {ENDED} AND {condition} GROUP BY host, instance, proto, service, is_now, is_idle"
        ),
        Rows::Events => format!(
            "SELECT host, instance, proto, dport AS service, time >= {from} AS is_now, \
             reason = 'idle' AS is_idle, count() AS flows FROM events FINAL \
             WHERE {ENDED} AND {condition} GROUP BY host, instance, proto, service, is_now, is_idle"
        ),
    };
    let name = by.sql("service");
    let text = format!(
        "SELECT {name} AS name, sumIf(flows, is_now) AS ended, \
         sumIf(flows, is_now AND is_idle) AS idle, sumIf(flows, NOT is_now) AS ended_before, \
         sumIf(flows, NOT is_now AND is_idle) AS idle_before, \
         uniqExactIf(host, is_now AND is_idle) AS hosts FROM ({ended}) \
         GROUP BY name HAVING idle > 0 ORDER BY idle DESC, name"
    );
    Sql { text, parameters }
}

/// The first ends that are kept. Duplicates change nothing here.
fn firsts(question: &Question, rows: Rows, by: By) -> Sql {
    let mut parameters = Parameters::default();
    let condition = question.condition(rows, SystemTime::UNIX_EPOCH, &mut parameters);
    let (table, time, port) = match rows {
        Rows::Minutes => ("ends_by_minute", "minute", "service"),
        Rows::Events => ("events", "toStartOfMinute(time, 'UTC')", "dport"),
    };
    let name = by.sql(port);
    let text = format!(
        "SELECT {name} AS name, toInt64(toUnixTimestamp(min({time}))) * 1000000 AS first_us \
         FROM {table} WHERE {IDLE} AND {condition} GROUP BY name"
    );
    Sql { text, parameters }
}
