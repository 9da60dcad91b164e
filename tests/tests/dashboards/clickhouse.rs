//! The dashboard on ClickHouse.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use twheel::clickhouse::Server;
use twheel_tests::engine::Engine;

use crate::grafana::{Dashboard, Query, arguments, replaced};

/// Ends of flows of each host.
const ENDS: u64 = 2_000;
/// Numbers that never come, of each host.
const MISSING: u64 = 7;
/// Numbers that were given before the time range.
const EARLIER: u64 = 10;
/// And how many of the last ones of these never came: an outage began then.
const GAP: u64 = 4;
/// The hosts.
const HOSTS: [&str; 3] = ["gw1", "gw2", "it's"];
/// The time range, in seconds.
const RANGE: u64 = 3600;

/// The columns of each panel.
const COLUMNS: [(&str, &[&str]); 16] = [
    ("Ends a second", &["ends"]),
    ("Hosts", &["hosts"]),
    ("Idle ends", &["idle"]),
    ("Missing events", &["missing"]),
    ("Ends a second by host", &["time", "host", "ends"]),
    ("Ends a second by reason", &["time", "reason", "ends"]),
    ("Ends a second by state", &["time", "state", "ends"]),
    ("Ends a second by service", &["time", "service", "ends"]),
    (
        "Leaking services",
        &["service", "idle", "ended", "share", "change"],
    ),
    (
        "Share of established flows that end idle, by service",
        &["time", "service", "share"],
    ),
    (
        "Established flows that end idle, by host",
        &["time", "host", "ends"],
    ),
    (
        "Lost events by host",
        &["host", "instance", "events", "missing"],
    ),
    (
        "Exporters",
        &[
            "host", "instance", "exporter", "behind", "not_sent", "silent",
        ],
    ),
    ("Exporters' delay by host", &["at", "host", "behind"]),
    ("Events not sent by host", &["at", "host", "not_sent"]),
    ("Evicted flows by host", &["time", "host", "ends"]),
];
/// And of one whose rows are actions.
const REAPED: (&str, &[&str]) = ("Reap actions by outcome", &["at", "outcome_of", "actions"]);

/// What a user has chosen above the panels.
struct Chosen {
    host: Option<&'static str>,
    service: Option<&'static str>,
    range: [u64; 2],
    interval: String,
}

impl Chosen {
    /// The query as the data source sends it: first its own macro for "All", then Grafana's
    /// variables, then its macros for times.
    fn fill(&self, query: &str) -> Result<String> {
        // A cluster's tables are distributed, where this is refused.
        let words: Vec<_> = query.split_ascii_whitespace().collect();
        let denied = words.windows(4).find(|it| {
            it[0] != "GLOBAL"
                && it[1] == "IN"
                && it[2].starts_with('(')
                && it[2..].concat().contains("SELECT")
        });
        ensure!(denied.is_none(), "{denied:?} in {query}");
        let mut query = query.to_owned();
        while let Some((before, call)) = query.split_once("$__conditionalAll(") {
            let (given, after) = arguments(call)?;
            let [condition, variable] = given[..] else {
                anyhow::bail!("not two arguments: {call}");
            };
            let choice = match variable {
                "$host" => self.host,
                "$service" => self.service,
                other => anyhow::bail!("an unknown variable {other}"),
            };
            let condition = choice.map_or("1=1", |_| condition);
            query = format!("{before}{condition}{after}");
        }
        for (name, choice) in [("host", self.host), ("service", self.service)] {
            let quoted = format!("'{}'", choice.unwrap_or_default().replace('\'', "\\'"));
            query = query.replace(&format!("${{{name}:singlequote}}"), &quoted);
        }
        query = query.replace("${interval}", &self.interval);
        let [from, to] = self.range.map(|it| format!("toDateTime({it})"));
        query = query
            .replace("$__fromTime", &from)
            .replace("$__toTime", &to);
        while let Some((before, call)) = query.split_once("$__timeFilter(") {
            let (column, after) = arguments(call)?;
            let column = column[0];
            query = format!("{before}{column} >= {from} AND {column} <= {to}{after}");
        }
        replaced(query)
    }
}

/// A time as lines have it.
fn time(now: u64, ago: u64) -> String {
    let at = SystemTime::UNIX_EPOCH + Duration::from_secs(now - ago);
    humantime::format_rfc3339_micros(at).to_string()
}

/// Lines of events as twheel writes them: ends, and a reap event now and then.
fn events(now: u64) -> String {
    let mut lines = String::new();
    // Numbers are judged when all of their minute have been there for a minute.
    let inserted = time(now, 180);
    for (which, host) in HOSTS.into_iter().enumerate() {
        for (seq, ago) in [(1, RANGE + 600), (EARLIER - GAP, RANGE + 500)] {
            let line = json!({
                "schema": 1, "event": "run", "time": time(now, ago), "host": host, "what": "lost",
                "instance": format!("eth0@host.{which}"), "seq": seq, "lost": 1,
                "inserted": inserted,
            });
            let _ = writeln!(lines, "{line}");
        }
        for seq in (1..=ENDS + MISSING).filter(|seq| !(100..100 + MISSING).contains(seq)) {
            let time = time(now, 60 + (ENDS + MISSING - seq) * 3000 / ENDS);
            let (reason, state) = match seq % 7 {
                0..=2 => ("closed", "time_wait"),
                3 => ("reset", "close"),
                4 | 5 => ("idle", "established"),
                _ => ("evicted", "syn_sent"),
            };
            let dport = [80, 443, 5432][seq as usize % 3];
            let line = json!({
                "schema": 1, "event": "end", "time": time, "host": host,
                "instance": format!("eth0@host.{which}"), "seq": EARLIER + seq,
                "flow_id": format!("a8e41df8-7394-8344-a1c0-c79e4b51{seq:04x}"), "start": time,
                "proto": "tcp", "src": "10.0.0.1", "sport": 40_000, "dst": "2001:db8::1",
                "dport": dport, "state": state, "direction": "in", "picked_up": false,
                "reason": reason, "age_us": 1, "idle_us": 1, "inserted": inserted,
            });
            let _ = writeln!(lines, "{line}");
        }
        let line = json!({
            "schema": 1, "event": "reap", "time": time(now, 60), "host": host,
            "instance": format!("eth0@host.{which}"), "seq": EARLIER + ENDS + MISSING + 1,
            "flow_id": "a8e41df8-7394-8344-a1c0-c79e4b51c098", "start": time(now, 60),
            "proto": "tcp", "src": "10.0.0.1", "sport": 1, "dst": "10.0.0.2", "dport": 80,
            "state": "established", "direction": "in", "end_seq": 5, "reason": "idle",
            "age_us": 1, "idle_us": 1, "action": "socket", "outcome": "done",
            "inserted": inserted,
        });
        let _ = writeln!(lines, "{line}");
        // One that has just come, before those with numbers between.
        let line = json!({
            "schema": 1, "event": "run", "time": time(now, 10), "host": host, "what": "lost",
            "instance": format!("eth0@host.{which}"), "seq": EARLIER + ENDS + MISSING + 20, "lost": 1,
        });
        let _ = writeln!(lines, "{line}");
    }
    lines
}

/// Lines of exporters.
fn exports(now: u64) -> String {
    let mut lines = String::new();
    for (which, host) in HOSTS.into_iter().enumerate() {
        for minute in 1..=10 {
            let line = json!({
                "schema": 1, "event": "export", "time": time(now, minute * 60), "host": host,
                "instance": format!("eth0@host.{which}"), "exporter": format!("e{which}"),
                "behind_us": minute * 1000, "not_sent": 3,
            });
            let _ = writeln!(lines, "{line}");
        }
    }
    lines
}

/// Asks a panel's query, and checks the answer's columns.
fn ask(engine: &Server, query: &Query, chosen: &Chosen) -> Result<Vec<Value>> {
    let sql = chosen.fill(&query.text)?;
    let rows = engine.all(&sql, &[]);
    let rows: Vec<Value> = rows.with_context(|| query.panel.clone())?;
    ensure!(!rows.is_empty(), "{} shows nothing: {sql}", query.panel);
    let known: BTreeMap<_, _> = COLUMNS.into_iter().chain([REAPED]).collect();
    let wanted = known.get(&*query.panel);
    let wanted = wanted.with_context(|| format!("an unknown panel {}", query.panel))?;
    for row in &rows {
        let names: Vec<_> = row.as_object().context("no row")?.keys().collect();
        let mut sorted = wanted.to_vec();
        sorted.sort_unstable();
        ensure!(
            names == sorted,
            "{}: {names:?}, not {wanted:?}",
            query.panel
        );
        let number = &row[wanted[wanted.len() - 1]];
        ensure!(number.is_number(), "{}: no number in {row}", query.panel);
        for column in &query.columns {
            ensure!(row[column].is_number(), "{}: no {column}", query.panel);
        }
    }
    Ok(rows)
}

#[test]
fn each_panel_on_clickhouse_shows_something_and_counts_no_event_twice() -> Result<()> {
    let Some(server) = Engine::with_schema()? else {
        return Ok(());
    };
    let engine = server.server("twheel")?;
    let dashboard = Dashboard::read("twheel-fleet-clickhouse", "grafana-clickhouse-datasource")?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
    // Each event comes twice.
    for _ in 0..2 {
        engine.insert("events", events(now).into())?;
    }
    engine.insert("exports", exports(now).into())?;

    let queries = dashboard.queries()?;
    assert_eq!(queries.len(), COLUMNS.len() + 1);
    let chosen = |host, service| -> Result<Chosen> {
        Ok(Chosen {
            host,
            service,
            range: [now - RANGE, now],
            interval: dashboard.interval()?.to_owned(),
        })
    };
    for (host, service, hosts) in [
        (None, None, HOSTS.len() as u64),
        (Some("it's"), None, 1),
        (Some("gw1"), Some("tcp/443"), 1),
    ] {
        let chosen = chosen(host, service)?;
        let mut shown = BTreeMap::new();
        for query in &queries {
            shown.insert(query.panel.clone(), ask(&engine, query, &chosen)?);
        }
        let first = |panel: &str, column: &str| shown[panel][0][column].as_f64();
        let ends = first("Ends a second", "ends").context("no ends")? * RANGE as f64;
        if service.is_none() {
            assert_eq!(ends.round() as u64, ENDS * hosts, "of {host:?}");
        }
        assert_eq!(first("Hosts", "hosts"), Some(hosts as f64));
        assert_eq!(
            first("Missing events", "missing"),
            Some(((GAP + MISSING) * hosts) as f64)
        );
        for panel in ["Ends a second by reason", "Ends a second by state"] {
            let sum: f64 = shown[panel]
                .iter()
                .filter_map(|it| it["ends"].as_f64())
                .sum();
            let interval: f64 = chosen.interval.parse()?;
            assert_eq!((sum * interval).round(), ends.round(), "{panel}");
        }
    }
    for name in ["host", "service"] {
        let query = dashboard.variable(name)?["query"].as_str();
        let sql = chosen(None, None)?.fill(query.context("no query")?)?;
        assert_eq!(engine.all::<Value>(&sql, &[])?.len(), 3, "{name}");
    }
    Ok(())
}
