//! `twheel fleet hosts`: each host of the test has one thing wrong.

use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::engine::Engine;

use super::{events::micros, number, printed, text};

const MINUTE: u64 = 60;

/// An instance that was made long ago.
const OLD: &str = "eth0@host.5";

/// A `run` event, these are the shortest ones; and when it was inserted, if that was not now.
fn run_event(
    [host, instance]: [&str; 2],
    seq: u64,
    time: SystemTime,
    inserted: Option<SystemTime>,
) -> String {
    let time = humantime::format_rfc3339_micros(time);
    let inserted = inserted.map_or_else(String::new, |at| {
        format!(r#","inserted":"{}""#, humantime::format_rfc3339_millis(at))
    });
    format!(
        r#"{{"schema":1,"event":"run","time":"{time}","host":"{host}","instance":"{instance}","seq":{seq},"what":"lost","lost":1{inserted}}}"#
    ) + "\n"
}

fn export(
    [host, instance]: [&str; 2],
    exporter: &str,
    time: SystemTime,
    [behind_us, not_sent]: [u64; 2],
) -> String {
    let time = humantime::format_rfc3339_micros(time);
    format!(
        r#"{{"schema":1,"event":"export","time":"{time}","host":"{host}","instance":"{instance}","exporter":"{exporter}","behind_us":{behind_us},"not_sent":{not_sent}}}"#
    ) + "\n"
}

#[test]
fn hosts_that_are_silent_behind_or_losing_are_told_from_those_that_are_idle() -> Result<()> {
    let Some(engine) = Engine::with_schema()? else {
        return Ok(());
    };
    let now = SystemTime::now();
    let ago = |minutes: u64| now - Duration::from_secs(minutes * MINUTE);
    let (mut events, mut exports) = (String::new(), String::new());
    let mut run = |host: &str, seqs: &[u64], minutes: u64| {
        for seq in seqs {
            let time = ago(minutes) + Duration::from_millis(*seq);
            // Numbers are judged when they are a minute old.
            let inserted = (host != "late").then(|| now - Duration::from_secs(70));
            events += &run_event([host, OLD], *seq, time, inserted);
        }
    };
    // Events of which the first are late in their order, and came before the time asked for.
    run("ok", &[5, 7], 31);
    run("ok", &[6, 8, 9, 10], 20);
    run("ok", &[11], 1);
    run("idle", &[1, 2], 25);
    run("silent", &[1, 2], 10);
    run("losing", &[1, 2, 5, 6, 4_294_967_301], 1);
    run("behind", &[1], 1);
    run("twice", &[1], 1);
    run("again", &[1], 1);
    run("late", &[1], 3);
    run("old", &[1], 45);
    let mut export = |host: &str, exporter: &str, minutes: &[u64], told: [u64; 2]| {
        for minute in minutes {
            exports += &export([host, OLD], exporter, ago(*minute), told);
        }
    };
    export("ok", "a", &[20, 10, 1, 0], [0, 0]);
    export("idle", "a", &[25, 10, 1, 0], [0, 0]);
    export("silent", "a", &[12, 10], [0, 0]);
    export("losing", "a", &[2, 1, 0], [0, 3]);
    export("behind", "a", &[2, 1, 0], [61_000_000, 0]);
    export("twice", "a", &[5, 3, 1], [0, 0]);
    export("twice", "b", &[4, 2, 0], [0, 1]);
    export("again", "a", &[9, 8, 7], [0, 2]);
    export("again", "b", &[5, 4, 0], [0, 3]);
    export("lone", "a", &[1, 0], [5, 0]);
    let server = engine.server("twheel")?;
    for _ in 0..3 {
        server.insert("events", events.clone().into())?;
        server.insert("exports", exports.clone().into())?;
    }
    let lines = printed(&engine, &["fleet", "hosts", "--since", "30m", "--json"])?;
    let mut found = BTreeMap::new();
    for line in &lines {
        let value: Value = serde_json::from_str(line)?;
        found.insert(text(&value, "host").to_owned(), value);
    }
    // Events, lost, exporters, not sent, status. `late` has no exporter: its events tell its delay.
    type Expected = ([u64; 4], &'static [&'static str]);
    let expected: [(&str, Expected); 9] = [
        ("again", ([1, 0, 1, 5], &["ok"])),
        ("behind", ([1, 0, 1, 0], &["behind"])),
        ("idle", ([2, 0, 1, 0], &["ok"])),
        ("late", ([1, 0, 0, 0], &["behind"])),
        ("lone", ([0, 0, 1, 0], &["ok"])),
        ("losing", ([5, 4_294_967_296, 1, 3], &["losing"])),
        ("ok", ([5, 0, 1, 0], &["ok"])),
        ("silent", ([2, 0, 1, 0], &["silent"])),
        ("twice", ([1, 0, 2, 1], &["two_exporters"])),
    ];
    let names: Vec<_> = found.keys().map(String::as_str).collect();
    ensure!(names == expected.map(|(host, _)| host), "{names:?}");
    for (host, (numbers, status)) in expected {
        let value = &found[host];
        let are = ["events", "lost", "exporters", "not_sent"].map(|name| number(value, name));
        ensure!(are == numbers, "{value}");
        let are: Vec<_> = value["status"].as_array().into_iter().flatten().collect();
        ensure!(are == status, "{value}");
    }
    let delay = |host: &str| number(&found[host], "delay_us") / 1_000_000;
    ensure!(delay("behind") == 61 && delay("ok") == 0, "{found:?}");
    ensure!((180..300).contains(&delay("late")), "{found:?}");
    let last = humantime::parse_rfc3339(text(&found["ok"], "last"))?;
    let expected = micros(ago(1) + Duration::from_millis(11));
    ensure!(micros(last) == expected, "{found:?}");
    ensure!(found["lone"].get("last").is_none(), "{found:?}");
    let alive = humantime::parse_rfc3339(text(&found["silent"], "alive"))?;
    ensure!(micros(alive) == micros(ago(10)), "{found:?}");

    let table = printed(&engine, &["fleet", "hosts", "--since", "30m"])?;
    ensure!(
        table.len() == 10 && table[0].starts_with("HOST"),
        "{table:?}"
    );
    let twice = table.last().context("no table")?;
    ensure!(
        twice.starts_with("twice ") && twice.ends_with("  two exporters"),
        "{twice}"
    );
    let args = [
        "fleet", "hosts", "--since", "30m", "--bad", "--silent", "1h", "--behind", "1h",
    ];
    let bad = printed(&engine, &[&args[..], &["--losing", "4294967296"]].concat())?;
    ensure!(bad.len() == 3, "{bad:?}");
    let bad = printed(&engine, &[&args[..], &["--losing", "4294967297"]].concat())?;
    ensure!(bad.len() == 2, "{bad:?}");
    let one = printed(
        &engine,
        &["fleet", "hosts", "--since", "30m", "--host", "idle"],
    )?;
    ensure!(one.len() == 2 && one[1].ends_with("  ok"), "{one:?}");
    Ok(())
}

/// What `twheel fleet hosts` says of each instance: lost events, and its status.
fn found(engine: &Engine, since: &str) -> Result<BTreeMap<(String, String), (u64, String)>> {
    let lines = printed(engine, &["fleet", "hosts", "--since", since, "--json"])?;
    let mut found = BTreeMap::new();
    for line in &lines {
        let value: Value = serde_json::from_str(line)?;
        let names: Vec<_> = value["status"].as_array().into_iter().flatten().collect();
        let names: Vec<_> = names.iter().filter_map(|it| it.as_str()).collect();
        let name = (
            text(&value, "host").to_owned(),
            text(&value, "instance").to_owned(),
        );
        found.insert(name, (number(&value, "lost"), names.join(" ")));
    }
    Ok(found)
}

/// Numbers are counted from the last one before the time asked for, or from the instance's beginning;
/// and not up to those that have just come, as others may still be on their way.
#[test]
fn lost_numbers_are_counted_from_before_the_time_up_to_a_minute_ago() -> Result<()> {
    let Some(engine) = Engine::with_schema()? else {
        return Ok(());
    };
    let now = SystemTime::now();
    let ago = |seconds: u64| now - Duration::from_secs(seconds);
    let young = format!("eth0@host.{}", micros(ago(600)) / 1_000);
    let mut events = String::new();
    for (host, instance, numbers) in [
        (
            "outage",
            OLD,
            &[(1, 2_700), (2, 2_700), (6, 600), (7, 300)][..],
        ),
        ("begun", &young, &[(3, 300), (4, 299)]),
        ("unknown", OLD, &[(1_003, 300), (1_005, 299)]),
        ("whole", OLD, &[(1, 2_700), (3, 2_699), (2, 600), (4, 599)]),
    ] {
        for (seq, seconds) in numbers {
            let (time, inserted) = (ago(*seconds), Some(ago(70)));
            events += &run_event([host, instance], *seq, time, inserted);
        }
    }
    // The events between these and those before come later.
    for (seq, seconds) in [(1_009, 200), (1_007, 90)] {
        events += &run_event(["unknown", OLD], seq, ago(seconds), None);
    }
    engine.server("twheel")?.insert("events", events.into())?;
    let found = found(&engine, "30m")?;
    for (host, instance, lost) in [
        ("outage", OLD, 3),
        ("begun", &young, 2),
        ("unknown", OLD, 1),
        ("whole", OLD, 0),
    ] {
        let it = found.get(&(host.to_owned(), instance.to_owned()));
        let it = it.context("it is missing")?;
        ensure!(it.0 == lost, "{host}: {it:?}");
        ensure!(it.1.contains("losing") == (lost > 0), "{host}: {it:?}");
    }
    Ok(())
}

/// Of an instance that is older than rows are kept, nobody knows where its numbers began.
#[test]
fn rows_that_were_removed_for_their_age_are_not_lost() -> Result<()> {
    let Some(engine) = Engine::with_schema()? else {
        return Ok(());
    };
    engine.query(
        "ALTER TABLE twheel.seqs_by_minute MODIFY TTL minute + INTERVAL 90 DAY \
         SETTINGS materialize_ttl_after_modify = 0",
    )?;
    let now = SystemTime::now();
    let ago = |days: u64| now - Duration::from_secs(days * 86_400);
    let made = |days: u64| format!("eth0@host.{}", micros(ago(days)) / 1_000);
    let (older, younger) = (made(100), made(80));
    let mut events = String::new();
    for instance in [&older, &younger] {
        for seq in [101, 102, 104] {
            events += &run_event(["web1", instance], seq, ago(50), Some(ago(1)));
        }
    }
    engine.server("twheel")?.insert("events", events.into())?;
    for (since, lost) in [("120d", [1, 101]), ("60d", [1, 1])] {
        let found = found(&engine, since)?;
        let are = [&older, &younger].map(|it| found[&("web1".to_owned(), it.clone())].0);
        ensure!(are == lost, "{since}: {are:?}");
    }
    Ok(())
}

/// A host that was started again has an instance that is silent from then on.
#[test]
fn an_instance_that_a_newer_one_follows_has_ended() -> Result<()> {
    let Some(engine) = Engine::with_schema()? else {
        return Ok(());
    };
    let now = SystemTime::now();
    let ago = |minutes: u64| now - Duration::from_secs(minutes * MINUTE);
    let made = |minutes: u64| micros(ago(minutes)) / 1_000;
    // The names' order is not that of time.
    let first = "eth0@host.999";
    let (second, third) = (
        format!("eth0@host.{}", made(120)),
        format!("eth0@host.{}", made(60)),
    );
    let other = format!("eth1@host.{}", made(600));
    let (mut events, mut exports) = (String::new(), String::new());
    for (host, instance, minutes, behind) in [
        ("web1", first, 130, 90_000_000),
        ("web1", &second, 61, 0),
        ("web1", &third, 0, 0),
        ("web1", &other, 200, 0),
        ("web2", &second, 70, 0),
    ] {
        exports += &export([host, instance], "a", ago(minutes), [behind, 0]);
        events += &run_event([host, instance], 1, ago(minutes), Some(ago(2)));
    }
    events += &run_event(["web1", &second], 3, ago(61), Some(ago(2)));
    let server = engine.server("twheel")?;
    server.insert("events", events.into())?;
    server.insert("exports", exports.into())?;
    let found = found(&engine, "1d")?;
    for (host, instance, status) in [
        ("web1", first, "ended"),
        ("web1", &second, "ended losing"),
        ("web1", &third, "ok"),
        ("web1", &other, "silent"),
        ("web2", &second, "silent"),
    ] {
        let it = found.get(&(host.to_owned(), instance.to_owned()));
        let it = it.context("it is missing")?;
        ensure!(it.1 == status, "{host} {instance}: {it:?}");
    }
    // Nothing is wrong with one that has ended and lost nothing; and a day is the time that is asked for.
    let bad = printed(&engine, &["fleet", "hosts", "--bad"])?;
    ensure!(bad.len() == 4, "{bad:?}");

    // The query for an alert in the documents has the same sense.
    let document = include_str!("../../../docs/fleet.md");
    let (_, alert) = document
        .split_once("-- Instances")
        .context("no alert in the documents")?;
    let (alert, _) = alert.split_once(';').context("no end of the alert")?;
    let rows = engine.query(&format!("-- Instances{alert}"))?;
    let names = ["host", "newest"].map(|name| {
        let names = rows.iter().map(|row| text(row, name).to_owned());
        names.collect::<Vec<_>>()
    });
    ensure!(names[0] == ["web1", "web2"], "{rows:?}");
    ensure!(names[1] == [other, second], "{rows:?}");
    Ok(())
}
