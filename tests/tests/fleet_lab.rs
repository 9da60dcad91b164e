//! A small fleet from end to end: what `twheel fleet` says is what the hosts' histories have,
//! whoever is killed on the way, and however often events are sent.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::atomic::Ordering::Relaxed,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    fleet::{
        carry::Carrier,
        hosts::{Host, Network},
        running::{Route, Sum, Sums, TOPIC, ends},
        servers::{Broker, Client, Database, Keep, STORE, tools},
        traffic::{Load, Traffic},
    },
    netns::require_root,
    process::Process,
};

/// The longest time until what is in the histories is in ClickHouse.
const ARRIVE: Duration = Duration::from_secs(60);
/// Between two kills.
const WHILE: Duration = Duration::from_secs(3);
/// Longer than the longest timeout of the fleet's flows.
const SETTLE: Duration = Duration::from_secs(6);
/// The exporters: the number of the host, where it sends, the file of its position. Two hosts have
/// two, by mistake.
const EXPORTERS: [(usize, Route, &str); 6] = [
    (0, Route::Kafka, "kafka"),
    (1, Route::Kafka, "kafka"),
    (1, Route::Kafka, "kafka-too"),
    (2, Route::ClickHouse, "clickhouse"),
    (3, Route::ClickHouse, "clickhouse"),
    (3, Route::Kafka, "kafka"),
];

/// Starts an exporter.
fn export(hosts: &[Host], number: usize) -> Result<Process> {
    let (host, route, state) = EXPORTERS[number];
    hosts[host].export(route, state, &[])
}

/// The lines of a command of `twheel fleet`.
fn asked(client: &Client, args: &[&str]) -> Result<Vec<Value>> {
    let text = client.twheel(&[args, &["--json"]].concat())?;
    text.lines()
        .map(|it| Ok(serde_json::from_str(it)?))
        .collect()
}

/// Waits until each exporter has told that it is there. (`hosts` says so a minute later: those that
/// came one after another are not two at a time.)
fn await_exporters(client: &Client, hosts: &[Host]) -> Result<()> {
    let mut wanted = BTreeMap::new();
    for (host, ..) in EXPORTERS {
        *wanted.entry(hosts[host].name.clone()).or_default() += 1;
    }
    let end = Instant::now() + ARRIVE;
    loop {
        let mut told = BTreeMap::new();
        for row in
            client.rows("SELECT host, uniqExact(exporter) AS n FROM exports GROUP BY host")?
        {
            let host = row["host"].as_str().context("no host")?;
            told.insert(host.to_owned(), row["n"].as_u64().context("no number")?);
        }
        if told == wanted {
            return Ok(());
        }
        ensure!(Instant::now() < end, "{told:?}, not {wanted:?}");
        thread::sleep(Duration::from_millis(200));
    }
}

/// The ends of each instance, as `twheel fleet expired` prints them; none of them twice.
fn expired(client: &Client) -> Result<Sums> {
    let (mut sums, mut seen) = (Sums::new(), BTreeSet::new());
    for event in asked(client, &["expired", "--since", "1h"])? {
        let text = |key: &str| event[key].as_str().context("no text").map(str::to_owned);
        let (key, seq) = ((text("host")?, text("instance")?), event["seq"].as_u64());
        let seq = seq.context("no seq")?;
        ensure!(seen.insert((key.clone(), seq)), "twice: {event}");
        let sum: &mut Sum = sums.entry(key).or_default();
        sum.count += 1;
        sum.seqs = sum.seqs.wrapping_add(seq);
    }
    Ok(sums)
}

/// Checks that every command says what the histories say.
fn check(client: &Client, hosts: &[Host], wanted: &Sums) -> Result<()> {
    assert_eq!(&expired(client)?, wanted, "expired");
    let all: u64 = wanted.values().map(|it| it.count).sum();
    let sum = |lines: &[Value], key: &str| -> u64 {
        lines.iter().filter_map(|line| line[key].as_u64()).sum()
    };
    let reasons = asked(client, &["reasons"])?;
    assert_eq!(sum(&reasons, "flows"), all, "reasons: {reasons:?}");
    // The hosts' histories say the same of the service that leaks.
    let mut leaks = Sum::default();
    for host in hosts {
        let filter = "dport == 8443 and reason == idle and state == established";
        leaks.count += host
            .lines(&["expired", filter, "--json", "--events", "end"])?
            .len() as u64;
    }
    let of_service = asked(client, &["leaks", "dport == 8443"])?;
    assert_eq!(sum(&of_service, "idle"), leaks.count, "{of_service:?}");
    assert!(leaks.count > 0);
    let told = asked(client, &["hosts"])?;
    assert_eq!(told.len(), hosts.len(), "{told:?}");
    assert_eq!(sum(&told, "lost"), 0, "{told:?}");
    assert_eq!(sum(&told, "not_sent"), 0, "{told:?}");
    Ok(())
}

#[test]
fn whoever_is_killed_and_whatever_comes_twice_the_sums_are_those_of_the_histories() -> Result<()> {
    require_root();
    let Some(tools) = tools() else {
        return Ok(());
    };
    let directory = Directory::new("fleet-lab")?;
    let network = Network::new(4, &directory.0, &|| Ok(()))?;
    let log = directory.0.join("broker.log");
    let mut broker = Broker::start(&network, &tools, log, Keep::Store(STORE))?;
    let mut database = Database::start(&network, &tools, directory.0.join("tables"))?;
    let client = Client::new(&network);
    client.set_up_with_topic()?;
    let carrier = Carrier::start(&network, TOPIC)?;
    let mut runs = Vec::new();
    for host in &network.hosts {
        runs.push(host.run()?);
    }
    let mut exporters = Vec::new();
    for number in 0..EXPORTERS.len() {
        exporters.push(export(&network.hosts, number)?);
    }
    let load = Load {
        pause: Duration::from_millis(40),
        connections: None,
    };
    let mut traffic = Traffic::start(&network.hosts, load)?;

    await_exporters(&client, &network.hosts)?;
    // Each of them in turn, in the middle of its work.
    broker.kill()?;
    thread::sleep(WHILE);
    broker.again(&network)?;
    thread::sleep(WHILE);
    database.kill()?;
    thread::sleep(WHILE);
    database.restart(&network)?;
    thread::sleep(WHILE);
    for (number, exporter) in exporters.iter_mut().enumerate() {
        exporter.kill()?;
        *exporter = export(&network.hosts, number)?;
    }
    traffic.check()?;
    thread::sleep(WHILE);
    traffic.stop()?;
    thread::sleep(SETTLE);
    for run in runs {
        run.stop()?;
    }
    let wanted = ends(&network.hosts)?;
    assert_eq!(wanted.len(), network.hosts.len());
    assert!(wanted.values().all(|it| it.count > 100), "{wanted:?}");
    client.await_ends(&wanted, ARRIVE)?;
    check(&client, &network.hosts, &wanted)?;

    // All that the histories have is sent again, by both ways.
    let before = carrier.carried.load(Relaxed);
    for host in &network.hosts {
        for route in [Route::Kafka, Route::ClickHouse] {
            let again = format!("again-{}", route.name());
            host.export(route, &again, &["--once"])?.wait()?;
        }
    }
    let all: u64 = wanted.values().map(|it| it.count).sum();
    let end = Instant::now() + ARRIVE;
    while carrier.carried.load(Relaxed) < before + all {
        ensure!(Instant::now() < end, "the events do not come again");
        thread::sleep(Duration::from_millis(100));
    }
    client.await_ends(&wanted, ARRIVE)?;
    check(&client, &network.hosts, &wanted)?;
    carrier.stop()?;
    exporters.iter_mut().try_for_each(Process::kill)?;
    database.stop()
}
