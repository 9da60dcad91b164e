//! Events go to the tables of a ClickHouse server, a real one, whoever dies on the way.

mod position;
mod unit;

use std::{
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    clickhouse_server::{ClickHouse, PASSWORD, Setup, USER},
    is_long,
    netns::{PATIENCE, require_root},
    sending::{Exporter, Sending},
};

fn export(sending: &Sending, name: &str, url: &str, more: &[&str]) -> Result<Exporter> {
    sending.exporter(name, &[&["clickhouse", "--url", url], more].concat())
}

/// Waits until the server has so many events, each counted once.
fn until(server: &ClickHouse, events: usize) -> Result<()> {
    let end = Instant::now() + 2 * PATIENCE;
    loop {
        let there = server.number("SELECT count() FROM twheel.events FINAL")?;
        if there >= events as u64 {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{there} of {events}");
        thread::sleep(Duration::from_millis(100));
    }
}

/// Asserts that the server has what the history has.
fn has(server: &ClickHouse, told: &[Value]) -> Result<()> {
    let sum = |name: &str| told.iter().filter_map(|it| it[name].as_u64()).sum::<u64>();
    let sums = [
        "seq",
        "sport",
        "dport",
        "age_us",
        "idle_us",
        "orig_packets",
        "orig_bytes",
    ];
    let sql = sums.map(|name| format!("sum({name})")).join(", ");
    let answer = server.ask(&format!("SELECT count(), {sql} FROM twheel.events FINAL"))?;
    let wanted = [told.len() as u64].into_iter().chain(sums.map(sum));
    let wanted: Vec<_> = wanted.map(|it| it.to_string()).collect();
    assert_eq!(answer, [wanted.join("\t")]);
    for name in [
        "event", "host", "instance", "reason", "flow_id", "src", "what",
    ] {
        let mut wanted: Vec<_> = told
            .iter()
            .map(|it| it[name].as_str().unwrap_or_default().to_owned())
            .collect();
        wanted.sort();
        let sql = format!("SELECT {name} FROM twheel.events FINAL ORDER BY {name}");
        assert!(server.ask(&sql)? == wanted, "{name}");
    }
    Ok(())
}

fn parsed<'a>(lines: impl Iterator<Item = &'a String>) -> Result<Vec<Value>> {
    lines.map(|line| Ok(serde_json::from_str(line)?)).collect()
}

#[test]
fn whoever_is_killed_the_server_has_what_the_history_has() -> Result<()> {
    require_root();
    let Some(mut server) = ClickHouse::start(&Setup::default())? else {
        return Ok(());
    };
    let kills: u64 = if is_long() { 60 } else { 12 };
    let mut sending = Sending::start("clickhouse-killed")?;
    let url = server.url();
    for round in 0..kills {
        let exporter = export(&sending, "state", &url, &[])?;
        sending.begin(300)?;
        thread::sleep(Duration::from_millis(200 + 397 * (round % 5)));
        // The server goes, too: while the exporter runs, and while it does not.
        match round % 4 {
            1 => {
                server.kill();
                thread::sleep(Duration::from_millis(500));
                server.again()?;
            }
            2 => {
                server.stop()?;
                thread::sleep(Duration::from_millis(500));
                server.go_on()?;
                thread::sleep(Duration::from_millis(300));
            }
            _ => {}
        }
        exporter.kill()?;
    }
    let told = sending.end()?;
    let exporter = export(&sending, "state", &url, &["--once"])?;
    ensure!(exporter.code()? == Some(0), "it does not end");
    has(&server, &parsed(told.values())?)?;
    let rows = server.number("SELECT count() FROM twheel.events")?;
    println!("{rows} rows for {} events", told.len());
    // Each exporter that lived has told that it did.
    let exporters = server.number("SELECT uniqExact(exporter) FROM twheel.exports")?;
    ensure!(exporters > 1, "{exporters}");
    // Nothing is sent twice without need.
    let exporter = export(&sending, "state", &url, &["--once"])?;
    ensure!(exporter.code()? == Some(0), "it does not end");
    ensure!(server.number("SELECT count() FROM twheel.events")? <= rows);
    Ok(())
}

#[test]
fn two_exporters_of_one_instance_are_told_and_each_event_counts_once() -> Result<()> {
    require_root();
    let Some(server) = ClickHouse::start(&Setup::default())? else {
        return Ok(());
    };
    let mut sending = Sending::start("clickhouse-two")?;
    let exporters = ["one", "two"].map(|name| export(&sending, name, &server.url(), &[]));
    sending.begin(500)?;
    let told = sending.end()?;
    until(&server, told.len())?;
    let end = Instant::now() + PATIENCE;
    while server.number("SELECT uniqExact(exporter) FROM twheel.exports")? < 2 {
        ensure!(Instant::now() < end, "no two exporters");
        thread::sleep(Duration::from_millis(100));
    }
    has(&server, &parsed(told.values())?)?;
    let sql = "SELECT max(behind_us), sum(not_sent), uniqExact(instance) FROM twheel.exports";
    let answer = server.ask(sql)?.join("");
    let (behind, rest) = answer.split_once('\t').context("no row")?;
    ensure!(behind.parse::<u64>()? < 60_000_000, "{answer}");
    assert_eq!(rest, "0\t1");
    for exporter in exporters {
        let exporter = exporter?;
        assert_eq!(exporter.said(), "");
        exporter.kill()?;
    }
    Ok(())
}

#[test]
fn an_export_says_what_is_wrong_with_the_server_and_goes_on_when_it_is_right() -> Result<()> {
    require_root();
    let Some(mut server) = ClickHouse::start(&Setup::default())? else {
        return Ok(());
    };
    let mut sending = Sending::start("clickhouse-bad")?;
    sending.begin(50)?;
    let told = sending.end()?;
    let url = server.url();
    let password = sending.history.file("password");
    let login = ["--user", USER, "--password-file", &password];

    fs::write(&password, "wrong\n")?;
    let mut exporter = export(&sending, "state", &url, &login)?;
    let said = exporter.says("refuses the user exporter or the password")?;
    ensure!(said.contains("--password-file"), "{said}");
    exporter.kill()?;

    let mut exporter = export(&sending, "none", &url, &["--database", "nothing"])?;
    exporter.says("the database nothing or its tables are not at")?;
    exporter.kill()?;

    // A schema of another version, then of the right one: the exporter goes on by itself.
    fs::write(&password, format!("{PASSWORD}\n"))?;
    let version = twheel::fleet::schema::VERSION;
    let set = |version: u32| {
        let sql = format!("INSERT INTO twheel.schema_version (version) VALUES ({version})");
        server.ask(&sql)
    };
    set(version + 7)?;
    let mut exporter = export(&sending, "state", &url, &login)?;
    let said = exporter.says(&format!("are of version {}", version + 7))?;
    ensure!(said.contains("update this twheel"), "{said}");
    ensure!(server.number("SELECT count() FROM twheel.events")? == 0);
    server.ask("DROP TABLE twheel.schema_version")?;
    exporter.says("twheel fleet schema | clickhouse-client")?;
    server.ask("CREATE TABLE twheel.schema_version (version UInt32) ENGINE = Log")?;
    exporter.says("are of version 0")?;
    server.ask(&format!(
        "INSERT INTO twheel.schema_version VALUES ({version})"
    ))?;
    until(&server, told.len())?;
    has(&server, &parsed(told.values())?)?;
    let said = exporter.said();
    for sentence in [
        "version 0",
        &format!("version {}", version + 7),
        "its tables are not at",
    ] {
        assert_eq!(said.matches(sentence).count(), 1, "once: {said}");
    }
    exporter.kill()?;

    // No server: once, though it is tried again and again.
    server.kill();
    let mut exporter = export(&sending, "again", &url, &[])?;
    exporter.says("cannot reach ClickHouse at")?;
    thread::sleep(Duration::from_secs(2));
    let said = exporter.said();
    assert_eq!(said.lines().count(), 1, "{said}");
    ensure!(said.contains("Connection refused"), "{said}");
    server.again()?;
    until(&server, told.len())?;
    exporter.kill()?;

    // Arguments that cannot be used.
    for (args, says) in [
        (
            &["--url", "localhost"][..],
            "is not the address of a ClickHouse server",
        ),
        (&["--url", "http://u:p@a:1"], "--password-file"),
        (&["--url", "http://a:99999"], "from 1 to 65535"),
        (&["--database", ""], "--database is empty"),
        (&["--user", "a\u{1}"], "--user has a control character"),
        (&["--password-file", "/nothing"], "cannot read the password"),
        (&["--ca", "/nothing"], "--ca is for a server with TLS"),
        (
            &["--url", "https://localhost:8443", "--ca", "/nothing"],
            "cannot read /nothing",
        ),
    ] {
        let exporter = sending.exporter("usage", &[&["clickhouse"], args].concat())?;
        let said = sending.history.file("usage.said");
        let code = if says.starts_with("cannot read") {
            1
        } else {
            2
        };
        assert_eq!(exporter.code()?, Some(code), "{args:?}");
        let said = fs::read_to_string(said)?;
        ensure!(said.contains(says), "{args:?}: {said}");
    }
    Ok(())
}

#[test]
fn tls_is_that_of_a_trusted_authority() -> Result<()> {
    require_root();
    let names = vec!["localhost".to_owned(), "127.0.0.1".to_owned()];
    let made = rcgen::generate_simple_self_signed(names)?;
    let mut sending = Sending::start("clickhouse-tls")?;
    let (certificate, key) = (
        sending.history.0.join("c.pem"),
        sending.history.0.join("k.pem"),
    );
    fs::write(&certificate, made.cert.pem())?;
    fs::write(&key, made.signing_key.serialize_pem())?;
    let setup = Setup {
        tls: Some((certificate.clone(), key)),
        ..Setup::default()
    };
    let Some(server) = ClickHouse::start(&setup)? else {
        return Ok(());
    };
    sending.begin(20)?;
    let told = sending.end()?;
    let mut exporter = export(&sending, "state", &server.https(), &[])?;
    let said = exporter.says("TLS with ClickHouse at")?;
    ensure!(said.contains("--ca"), "{said}");
    exporter.kill()?;
    // HTTPS where there is none.
    let url = server.url().replace("http", "https");
    let mut exporter = export(&sending, "plain", &url, &[])?;
    let said = exporter.says("ClickHouse at https://")?;
    // The server takes the bytes for the beginning of a line, or answers in plain text.
    let says = ["and takes TLS there", "http:// in the URL"];
    ensure!(says.iter().any(|it| said.contains(it)), "{said}");
    exporter.kill()?;
    ensure!(server.number("SELECT count() FROM twheel.events")? == 0);
    let ca = certificate.to_str().context("a path")?;
    let exporter = export(&sending, "state", &server.https(), &["--ca", ca, "--once"])?;
    ensure!(exporter.code()? == Some(0), "it does not end");
    has(&server, &parsed(told.values())?)
}

/// The server's disk, a small one, is full of something else.
#[test]
fn a_full_disk_at_the_server_loses_nothing() -> Result<()> {
    require_root();
    let setup = Setup {
        disk: Some(48 << 20),
        ..Setup::default()
    };
    let Some(server) = ClickHouse::start(&setup)? else {
        return Ok(());
    };
    let mut sending = Sending::start("clickhouse-full")?;
    sending.begin(500)?;
    let other = server.data().join("something-else");
    // As much as there is room for.
    let _ = fs::write(&other, vec![1; 64 << 20]);
    let mut exporter = export(&sending, "state", &server.url(), &[])?;
    let said = exporter.says("the disk of ClickHouse at")?;
    ensure!(said.contains("is full: free space there"), "{said}");
    thread::sleep(Duration::from_secs(2));
    assert_eq!(exporter.said().lines().count(), 1, "{}", exporter.said());
    fs::remove_file(&other)?;
    let told = sending.end()?;
    until(&server, told.len())?;
    has(&server, &parsed(told.values())?)?;
    exporter.kill()
}

/// The server stands still for a while: what the exporter holds is bounded.
#[test]
fn memory_is_bounded_while_the_server_is_away() -> Result<()> {
    require_root();
    let Some(server) = ClickHouse::start(&Setup::default())? else {
        return Ok(());
    };
    let flows = if is_long() { 350_000 } else { 200_000 };
    let mut sending = Sending::start("clickhouse-memory")?;
    let exporter = export(&sending, "state", &server.url(), &[])?;
    sending.begin(100)?;
    until(&server, 100)?;
    let before = exporter.memory()?;
    server.stop()?;
    let mut most = 0;
    for _ in 0..10 {
        sending.begin(flows / 10)?;
        thread::sleep(Duration::from_millis(500));
        most = most.max(exporter.memory()?);
    }
    server.go_on()?;
    let told = sending.end()?;
    until(&server, told.len())?;
    most = most.max(exporter.memory()?);
    println!(
        "{before} bytes before, {most} at most, {} events",
        told.len()
    );
    // Two batches, and the copies of one in the HTTP client.
    ensure!(most < 64 << 20, "{most} bytes");
    has(&server, &parsed(told.values())?)?;
    exporter.kill()
}

/// The number of the last event before a position that is kept.
fn kept(position: &str) -> Result<u64> {
    let position: Value = serde_json::from_str(position)?;
    position["last"]["number"].as_u64().context("no number")
}

/// The history turns over while the server is away: all that is left arrives, and what is missing is
/// told.
#[test]
fn what_the_history_dropped_while_the_server_was_away_is_counted() -> Result<()> {
    require_root();
    let Some(mut server) = ClickHouse::start(&Setup::default())? else {
        return Ok(());
    };
    let least = twheel::history::LEAST_BYTES.to_string();
    let mut sending = Sending::start_with("clickhouse-gone", &least)?;
    let mut exporter = export(&sending, "state", &server.url(), &[])?;
    sending.begin(500)?;
    until(&server, 500)?;
    // The exporter knows that they have arrived.
    let end = Instant::now() + PATIENCE;
    while !fs::read_to_string(sending.history.file("state"))
        .is_ok_and(|it| kept(&it).is_ok_and(|it| it >= 500))
    {
        ensure!(Instant::now() < end, "the position is not kept");
        thread::sleep(Duration::from_millis(100));
    }
    server.kill();
    // Eight segments of a thousand events each.
    for _ in 0..10 {
        sending.begin(2_000)?;
        sending.expire()?;
    }
    server.again()?;
    exporter.says("segments of the history were removed before they were sent")?;
    let end = Instant::now() + PATIENCE;
    let told = loop {
        let told = server.number("SELECT max(not_sent) FROM twheel.exports")?;
        if told > 0 {
            break told;
        }
        ensure!(Instant::now() < end, "nothing is told");
        thread::sleep(Duration::from_millis(100));
    };
    let left = sending.told()?;
    ensure!(left.len() > 5_000, "{}", left.len());
    let last = left.keys().map(|it| it.1).max().context("no event")?;
    let sql = format!("SELECT count() FROM twheel.events FINAL WHERE seq <= {last}");
    let newest = format!("SELECT count() FROM twheel.events WHERE seq = {last}");
    while server.number(&newest)? == 0 {
        ensure!(Instant::now() < end, "the last event does not arrive");
        thread::sleep(Duration::from_millis(100));
    }
    let missing = last - server.number(&sql)?;
    println!("{missing} events are missing, and {told} are told");
    assert_eq!(told, missing);
    exporter.kill()
}

/// A server that refuses what it gets, and an exporter that is started again meanwhile: what the history
/// dropped is told once, and counted once, however often it is found.
#[test]
fn what_is_missing_counts_once_however_often_it_is_tried() -> Result<()> {
    require_root();
    let Some(server) = ClickHouse::start(&Setup::default())? else {
        return Ok(());
    };
    let least = twheel::history::LEAST_BYTES.to_string();
    let mut sending = Sending::start_with("clickhouse-refused", &least)?;
    let exporter = export(&sending, "state", &server.url(), &[])?;
    sending.begin(500)?;
    until(&server, 500)?;
    sending.expire()?;
    exporter.kill()?;
    server.ask("RENAME TABLE twheel.events TO twheel.away")?;
    // Eight segments of a thousand events each.
    for _ in 0..10 {
        sending.begin(2_000)?;
        sending.expire()?;
    }
    let mut exporter = export(&sending, "state", &server.url(), &[])?;
    exporter.says("its tables are not at")?;
    let begun = exporter.said();
    let removed = "segments of the history were removed before they were sent";
    ensure!(begun.matches(removed).count() == 1, "{begun}");
    // More attempts, after 250 ms, 500 ms, 1 s and 2 s.
    thread::sleep(Duration::from_secs(5));
    assert_eq!(exporter.said(), begun);
    server.ask("RENAME TABLE twheel.away TO twheel.events")?;
    let left = sending.told()?;
    let last = left.keys().map(|it| it.1).max().context("no event")?;
    let end = Instant::now() + 2 * PATIENCE;
    let newest = format!("SELECT count() FROM twheel.events WHERE seq = {last}");
    while server.number(&newest)? == 0 {
        ensure!(Instant::now() < end, "the last event does not arrive");
        thread::sleep(Duration::from_millis(100));
    }
    let sql = format!("SELECT count() FROM twheel.events FINAL WHERE seq <= {last}");
    let missing = last - server.number(&sql)?;
    ensure!(missing > 1_000, "{missing}");
    let told = "SELECT max(not_sent) FROM twheel.exports";
    while server.number(told)? == 0 {
        ensure!(Instant::now() < end, "nothing is told");
        thread::sleep(Duration::from_millis(100));
    }
    println!("{missing} events are missing");
    assert_eq!(server.number(told)?, missing);
    exporter.kill()
}
