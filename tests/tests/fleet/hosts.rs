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

/// A `run` event; these are the shortest ones.
fn run_event(host: &str, seq: u64, time: SystemTime) -> String {
    let time = humantime::format_rfc3339_micros(time);
    format!(
        r#"{{"schema":1,"event":"run","time":"{time}","host":"{host}","instance":"eth0@host.5","seq":{seq},"what":"lost","lost":1}}"#
    ) + "\n"
}

fn export(host: &str, exporter: &str, time: SystemTime, [behind_us, not_sent]: [u64; 2]) -> String {
    let time = humantime::format_rfc3339_micros(time);
    format!(
        r#"{{"schema":1,"event":"export","time":"{time}","host":"{host}","instance":"eth0@host.5","exporter":"{exporter}","behind_us":{behind_us},"not_sent":{not_sent}}}"#
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
            events += &run_event(host, *seq, ago(minutes) + Duration::from_millis(*seq));
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
            exports += &export(host, exporter, ago(*minute), told);
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
