//! What a fleet's events take in ClickHouse and on Kafka, and what it costs to send and to insert them.

mod lines;

use std::{
    fs,
    process::Stdio,
    sync::{Arc, Mutex},
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, ensure};
use rdkafka::{
    ClientConfig, ClientContext, Statistics,
    producer::{BaseProducer, BaseRecord, Producer, ProducerContext},
    util::Timeout,
};
use serde_json::json;
use twheel::{history::HistoryReader, model::EventKind};
use twheel_tests::{
    directory::Directory,
    fleet::{
        hosts::Network,
        running::{Route, Sums, TOPIC},
        servers::{Broker, Client, Database, Keep, tools},
    },
    netns::PATIENCE,
    pair::SERVER,
};

use self::lines::Lines;
use crate::{
    records,
    report::{Figure, Report},
    size,
};

/// Events in ClickHouse.
const EVENTS: u64 = size(2_000_000, 20_000);
/// Hosts that they come from.
const HOSTS: u64 = 20;
/// Events that one host has in a second, and an insert when exporters insert by themselves.
const SECOND: u64 = 1_000;
/// Events of an insert when ClickHouse reads them from Kafka.
const BLOCK: u64 = 50_000;
/// Events inserted a second's at a time.
const STRAIGHT: u64 = size(200_000, 20_000);
/// Seconds for which a host sends to Kafka as they come.
const PACED: u64 = size(20, 2);
/// Rounds of each export.
const ROUNDS: usize = size(5, 1);
/// The tables that hold what was inserted.
const TABLES: [&str; 3] = ["events", "ends_by_minute", "seqs_by_minute"];

/// Measures sizes, which are those of any machine, and costs, as ratios.
pub fn bench(report: &mut Report) -> Result<()> {
    let tools = tools().context("no tools of a fleet: run `cargo xtask bench fleet`")?;
    let directory = Directory::new("bench-fleet")?;
    let network = Network::new(1, &directory.0.join("hosts"), &|| Ok(()))?;
    let database = Database::start(&network, &tools, directory.0.join("tables"))?;
    let log = directory.0.join("broker.log");
    let _broker = Broker::start(&network, &tools, log, Keep::Memory)?;
    let client = Client::new(&network);
    client.set_up(&[])?;

    report.say(&format!(
        "Ends of TCP flows with --accounting, generated: {HOSTS} hosts, 10 services, 5,000 peers, 1,000 ends a second each.\n"
    ));
    let straight = insert(&client, &database, STRAIGHT, SECOND)?;
    client.set_up_anew()?;
    let block = insert(&client, &database, EVENTS, BLOCK)?;
    stored(report, &client, block.bytes)?;
    kafka(report, &network)?;
    costs(report, &network, &client, [&straight, &block])
}

/// What inserts have taken.
struct Inserted {
    /// Bytes of JSON, a line.
    bytes: f64,
    /// CPU nanoseconds of the engine, a line.
    cpu: f64,
}

/// Inserts so many events of all hosts, in turn.
fn insert(client: &Client, database: &Database, events: u64, each: u64) -> Result<Inserted> {
    let begun = SystemTime::now() - Duration::from_secs(events / HOSTS / SECOND + 60);
    let mut hosts: Vec<_> = (0..HOSTS).map(|host| Lines::new(host, begun)).collect();
    let (mut bytes, mut cpu, mut done, mut turn) = (0, Duration::ZERO, 0, 0);
    while done < events {
        let mut lines = String::new();
        // A block from Kafka has the events of several hosts.
        for _ in 0..each.min(events - done).div_ceil(SECOND) {
            for _ in 0..SECOND.min(events - done) {
                hosts[turn].add(&mut lines);
                done += 1;
            }
            turn = (turn + 1) % hosts.len();
        }
        bytes += lines.len();
        let before = cpu_time(database.pid())?;
        client.insert("events", lines)?;
        cpu += cpu_time(database.pid())? - before;
    }
    let each = |total: f64| total / events as f64;
    Ok(Inserted {
        bytes: each(bytes as f64),
        cpu: each(cpu.as_nanos() as f64),
    })
}

/// Reports what the tables take on disk.
fn stored(report: &mut Report, client: &Client, json: f64) -> Result<()> {
    report.say(&format!(
        "ClickHouse: {EVENTS} events, merged (OPTIMIZE … FINAL). On disk:\n\n\
         {:<28} {:>14} {:>12} {:>12}\n{:<28} {json:>14.2}",
        "", "bytes an event", "bytes", "rows", "as JSON, not stored"
    ));
    for table in TABLES {
        client.run(&format!("OPTIMIZE TABLE twheel.{table} FINAL;\n"))?;
        let sql = format!(
            "SELECT sum(bytes_on_disk) AS bytes, sum(rows) AS rows FROM system.parts \
             WHERE database = 'twheel' AND table = '{table}' AND active"
        );
        let rows = client.rows(&sql)?;
        let number = |key: &str| rows[0][key].as_u64().context("no number");
        let (all, rows) = (number("bytes")?, number("rows")?);
        ensure!(rows > 0, "{table} is empty");
        let bytes = all as f64 / EVENTS as f64;
        report.say(&format!("{table:<28} {bytes:>14.2} {all:>12} {rows:>12}"));
        report.object(&json!({
            "bench": "fleet", "variant": table, "n": EVENTS, "bytes_each": bytes, "rows": rows,
        }));
    }
    Ok(())
}

/// Counts the bytes that a producer has sent.
#[derive(Default)]
struct Sent(Mutex<i64>);

impl ClientContext for Sent {
    fn stats(&self, statistics: Statistics) {
        let sent = statistics
            .brokers
            .values()
            .map(|it| it.txbytes as i64)
            .sum();
        *self.0.lock().unwrap_or_else(|it| it.into_inner()) = sent;
    }
}

impl ProducerContext for Sent {
    type DeliveryOpaque = ();

    fn delivery(&self, _: &rdkafka::message::DeliveryResult<'_>, (): ()) {}
}

/// Reports the bytes of a message as it is sent to a broker.
fn kafka(report: &mut Report, network: &Network) -> Result<()> {
    report.say("\nKafka: bytes a message as sent, with the settings of `twheel export kafka`, 3 partitions\n");
    for (name, compression, is_paced, events) in [
        ("not compressed", "none", true, SECOND * PACED),
        ("zstd, 1,000 a second", "zstd", true, SECOND * PACED),
        (
            "zstd, as fast as they go",
            "zstd",
            false,
            10 * SECOND * PACED,
        ),
    ] {
        let bytes = network
            .hub
            .enter(|| produce(compression, is_paced, events))?;
        report.say(&format!("{name:<28} {bytes:>8.1}"));
        report
            .object(&json!({"bench": "fleet", "variant": name, "n": events, "bytes_each": bytes}));
    }
    Ok(())
}

/// Bytes a message.
fn produce(compression: &str, is_paced: bool, events: u64) -> Result<f64> {
    let producer: BaseProducer<Sent> = ClientConfig::new()
        .set("bootstrap.servers", Broker::address())
        .set("compression.type", compression)
        .set("enable.idempotence", "true")
        .set("acks", "all")
        .set("partitioner", "murmur2_random")
        .set("queue.buffering.max.kbytes", "32768")
        .set("linger.ms", "50")
        .set("statistics.interval.ms", "100")
        .create_with_context(Sent::default())?;
    let mut lines = Lines::new(0, SystemTime::now());
    let begun = Instant::now();
    let mut line = String::new();
    for number in 0..events {
        if is_paced {
            // A hundred times a second, as a stepper writes them.
            let due = Duration::from_millis(number * 1000 / SECOND / 10 * 10);
            while begun.elapsed() < due {
                producer.poll(Duration::from_millis(1));
            }
        }
        line.clear();
        let key = lines.add(&mut line);
        loop {
            let record = BaseRecord::to(TOPIC).key(&key).payload(line.trim_end());
            match producer.send(record) {
                Ok(()) => break,
                Err(_) => producer.poll(Duration::from_millis(5)),
            };
        }
    }
    producer.flush(Timeout::After(PATIENCE))?;
    // The statistics come a moment later.
    let end = Instant::now() + Duration::from_millis(500);
    while Instant::now() < end {
        producer.poll(Duration::from_millis(50));
    }
    let sent: Arc<Sent> = producer.context().clone();
    let sent = *sent.0.lock().unwrap_or_else(|it| it.into_inner());
    ensure!(sent > 0, "no statistics");
    Ok(sent as f64 / events as f64)
}

/// Reports what it costs to send and to insert an event, in units of what it costs to write it as
/// JSON to a file.
fn costs(
    report: &mut Report,
    network: &Network,
    client: &Client,
    inserted: [&Inserted; 2],
) -> Result<()> {
    let host = &network.hosts[0];
    let history = Directory::new("bench-fleet-history")?;
    records::fill(&host.namespace, &history)?;
    let name = host.namespace.history(SERVER);
    let events = ends_in(&history, &name)? as f64;
    let size = size_of(&history.0.join(name))? as f64 / events;
    report.say(&format!(
        "\nThe history on the host: {size:.1} bytes an event on disk"
    ));
    report.object(&json!({"bench": "fleet", "variant": "history", "bytes_each": size}));
    report.say(&format!(
        "\nCPU time an event, of `twheel export … --once` and of the engine with the server in front of it, as a ratio to\n\
         `twheel export json --to FILE`; {ROUNDS} rounds of {events} events, median (least–most)\n"
    ));
    let (brokers, url) = (Broker::address(), Database::url());
    let export = |number: usize, args: &[&str]| -> Result<f64> {
        let state = history.file(&format!("state-{number}-{}", args[0]));
        let all = [&["export"], args, &["--once", "--state", &state]].concat();
        let more = ["--iface", SERVER, "--history", history.path()];
        let mut child = host.twheel(&[&all[..], &more].concat())?;
        let before = records::children()?;
        let output = child.stdin(Stdio::null()).output()?;
        ensure!(output.status.success(), "{output:?}");
        Ok((records::children()? - before).as_nanos() as f64 / events)
    };
    let file = history.file("lines");
    let (mut file_ns, mut kafka, mut clickhouse) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let _ = fs::remove_file(&file);
        let json = export(round, &["json", "--to", &file])?;
        file_ns.push(json);
        let args = [Route::Kafka.name(), "--brokers", &brokers, "--topic", TOPIC];
        kafka.push(export(round, &args)? / json);
        let args = [Route::ClickHouse.name(), "--url", &url];
        clickhouse.push(export(round, &args)? / json);
    }
    let json = Figure::from_samples(&file_ns).median;
    let [straight, block] = inserted.map(|it| Figure::from_samples(&[it.cpu / json]));
    for (name, figure) in [
        ("export kafka", Figure::from_samples(&kafka)),
        ("export clickhouse", Figure::from_samples(&clickhouse)),
        ("engine, inserts of 1,000", straight),
        ("engine, inserts of 50,000", block),
    ] {
        report.say(&format!("{name:<28} {}", Figure::row(&[figure])));
        report.object(&json!({"bench": "fleet", "variant": name, "ratio": figure.median}));
    }
    // Each round has sent the whole history again.
    let [table, view] = client.ends()?.map(counts_of_the_run);
    ensure!(
        [table, view] == [events as u64; 2],
        "sent {ROUNDS} times, {events} ends count as {table} in events, as {view} in ends_by_minute"
    );
    report.say(&format!(
        "\nEach round has sent these {events} events to ClickHouse anew. After all of them events FINAL has {table}, and\n\
         ends_by_minute {view}."
    ));
    Ok(())
}

/// How many ends the hosts have whose events were not generated.
fn counts_of_the_run(sums: Sums) -> u64 {
    let ran = sums
        .iter()
        .filter(|((host, _), _)| !lines::is_generated(host));
    ran.map(|(_, sum)| sum.count).sum()
}

/// How many ends a history has.
fn ends_in(history: &Directory, name: &str) -> Result<u64> {
    let mut reader = HistoryReader::open(&history.0, name, SystemTime::UNIX_EPOCH)?;
    let mut ends = 0;
    while let Some(past) = reader.next()? {
        ends += u64::from(past.kind() == EventKind::End);
    }
    Ok(ends)
}

/// Bytes of the files in a directory.
fn size_of(directory: &std::path::Path) -> Result<u64> {
    let mut bytes = 0;
    for entry in fs::read_dir(directory).with_context(|| directory.display().to_string())? {
        let entry = entry?;
        let known = entry.metadata()?;
        bytes += if known.is_dir() {
            size_of(&entry.path())?
        } else {
            known.len()
        };
    }
    Ok(bytes)
}

/// CPU time of a process so far.
fn cpu_time(pid: u32) -> Result<Duration> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let fields: Vec<_> = stat
        .rsplit_once(") ")
        .context("no stat")?
        .1
        .split(' ')
        .collect();
    let ticks = |at: usize| -> Result<u64> { Ok(fields[at].parse()?) };
    // `utime` and `stime`, in hundredths of a second.
    Ok(Duration::from_millis((ticks(11)? + ticks(12)?) * 10))
}
