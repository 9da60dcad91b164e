//! What runs on the hosts of a fleet: `twheel run` and its exporters; and whether what their
//! histories have has arrived.

use std::{
    collections::BTreeMap,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::{
    hosts::{Host, IFACE},
    servers::{Broker, Client, Database},
};
use crate::process::Process;

/// The topic of the events.
pub const TOPIC: &str = "twheel";
/// Timeouts with which flows end soon.
pub const TIMEOUTS: &str = "2s,established=4s,udp=2s,udp_stream=2s,time_wait=1s,close=1s";

/// Where an exporter sends events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Route {
    /// To the broker.
    Kafka,
    /// Straight to ClickHouse.
    ClickHouse,
}

impl Route {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::Kafka => "kafka",
            Self::ClickHouse => "clickhouse",
        }
    }
}

/// Events, as a sum that tells what is missing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sum {
    /// How many.
    pub count: u64,
    /// The sum of their numbers, modulo 2^64.
    pub seqs: u64,
}

/// The ends of each instance, by host and instance.
pub type Sums = BTreeMap<(String, String), Sum>;

impl Host {
    /// Starts `twheel run` and waits until it is attached.
    ///
    /// # Errors
    ///
    /// It does not start.
    pub fn run(&self) -> Result<Process> {
        let args = ["run", "--iface", IFACE, "--events", "run", "--accounting"];
        let more = [
            "--proto",
            "tcp,udp,icmp",
            "--tick",
            "100ms",
            "--max-flows",
            "8192",
        ];
        let timeouts = ["--timeout", TIMEOUTS];
        let mut run = self.start("run.log", &[&args[..], &more, &timeouts].concat())?;
        run.await_text("attached")?;
        Ok(run)
    }

    /// Starts an exporter, which keeps its position in a file of this name.
    ///
    /// # Errors
    ///
    /// It cannot be started.
    pub fn export(&self, route: Route, state: &str, more: &[&str]) -> Result<Process> {
        let (brokers, url, position) = (Broker::address(), Database::url(), self.file(state));
        let mut args = vec![
            "export",
            route.name(),
            "--iface",
            IFACE,
            "--state",
            &position,
        ];
        match route {
            Route::Kafka => args.extend(["--brokers", &brokers, "--topic", TOPIC]),
            Route::ClickHouse => args.extend(["--url", &url]),
        }
        args.extend(more);
        self.start(&format!("{state}.log"), &args)
    }

    /// The file with the messages of the exporter with this position.
    pub fn log(&self, state: &str) -> PathBuf {
        self.directory.join(format!("{state}.log"))
    }

    /// Adds up the ends in this host's history.
    ///
    /// # Errors
    ///
    /// The history cannot be read.
    pub fn ends(&self) -> Result<Sums> {
        let mut sums = Sums::new();
        for line in self.lines(&["expired", "--json", "--events", "end", "--iface", IFACE])? {
            let event: Value = serde_json::from_str(&line)?;
            let text = |key: &str| event[key].as_str().context("no text").map(str::to_owned);
            let sum = sums.entry((text("host")?, text("instance")?)).or_default();
            sum.count += 1;
            sum.seqs = sum
                .seqs
                .wrapping_add(event["seq"].as_u64().context("no seq")?);
        }
        Ok(sums)
    }
}

/// Adds up the ends in the histories of all hosts.
///
/// # Errors
///
/// A history cannot be read.
pub fn ends(hosts: &[Host]) -> Result<Sums> {
    let mut sums = Sums::new();
    for host in hosts {
        sums.extend(host.ends()?);
    }
    Ok(sums)
}

impl Client<'_> {
    /// Adds up the ends of flows in ClickHouse, in the table of events and in the view by minute.
    ///
    /// # Errors
    ///
    /// The engine does not answer.
    pub fn ends(&self) -> Result<[Sums; 2]> {
        let table = "SELECT host, instance, count() AS count, sum(seq) AS seqs FROM events FINAL \
                     WHERE event = 'end' GROUP BY host, instance";
        let view = "SELECT host, instance, groupBitmapMerge(ends) AS count, \
                    arraySum(bitmapToArray(groupBitmapMergeState(ends))) AS seqs \
                    FROM ends_by_minute GROUP BY host, instance";
        Ok([self.sums(table)?, self.sums(view)?])
    }

    fn sums(&self, sql: &str) -> Result<Sums> {
        let sum = |row: Value| {
            let text = |key: &str| row[key].as_str().context("no text").map(str::to_owned);
            let number = |key: &str| row[key].as_u64().context("no number");
            let sum = Sum {
                count: number("count")?,
                seqs: number("seqs")?,
            };
            Ok(((text("host")?, text("instance")?), sum))
        };
        self.rows(sql)?.into_iter().map(sum).collect()
    }

    /// Waits until ClickHouse has these ends and no others, in the table and in the view.
    ///
    /// # Errors
    ///
    /// They are not there within this time.
    pub fn await_ends(&self, wanted: &Sums, within: Duration) -> Result<()> {
        let end = Instant::now() + within;
        loop {
            // The engine may be away for a moment.
            let is = self.ends();
            if is.as_ref().is_ok_and(|is| is.iter().all(|it| it == wanted)) {
                return Ok(());
            }
            let late = Instant::now() >= end;
            ensure!(!late, "{}", difference(wanted, &is?));
            thread::sleep(Duration::from_millis(200));
        }
    }
}

/// What differs, a line for each instance.
fn difference(wanted: &Sums, is: &[Sums; 2]) -> String {
    let mut lines = vec!["what ClickHouse has differs from the histories:".to_owned()];
    let all = wanted.keys().chain(is.iter().flat_map(BTreeMap::keys));
    let all: std::collections::BTreeSet<_> = all.collect();
    for key in all {
        let sums = [wanted, &is[0], &is[1]].map(|it| it.get(key).copied().unwrap_or_default());
        if sums[0] != sums[1] || sums[0] != sums[2] {
            let [history, table, view] = sums.map(|it| it.count);
            lines.push(format!(
                "{} {}: {history} ends in the history, {table} in events, {view} in ends_by_minute",
                key.0, key.1
            ));
        }
    }
    lines.join("\n")
}
