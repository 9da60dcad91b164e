//! What it costs to turn the events of a history into records that leave the host.

use std::{
    io::Write,
    process::Stdio,
    time::{Duration, Instant, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use serde_json::json;
use twheel::{
    export::{
        Format,
        ipfix::{Config, Ipfix},
    },
    history::{HistoryReader, Past},
    output::json::Json,
    stepper::pin_to,
};
use twheel_tests::{
    broker::Broker,
    clickhouse_server::{ClickHouse, Setup},
    directory::Directory,
    netns::Namespace,
    netns::PATIENCE,
    pair::SERVER,
    running::{Twheel, twheel_bin},
    sending::outside,
};

use crate::{
    report::{Figure, Report},
    size,
};

const EVENTS: u32 = size(100_000, 5_000);
const ROUNDS: usize = size(15, 1);
/// How often as many flows end for what is exported.
const TIMES: u32 = size(10, 1);
/// Lines of JSON that are asked for, a second on one core.
const LINES: f64 = 1.5e6;

/// Events that are asked for of an export to Kafka or to ClickHouse, a second on one core.
const SENT: f64 = 5e4;

/// Records of IPFIX that are asked for.
const RECORDS: f64 = 2e6;

/// Measures encoders over events in memory, and a whole export.
pub fn bench(report: &mut Report) -> Result<()> {
    let history = Directory::new("bench-records")?;
    let host = Namespace::new("bench")?;
    // Before this thread, and with it all that it starts, is kept on one CPU.
    let (broker, server) = (Broker::start()?, ClickHouse::start(&Setup::default())?);
    let events = fill(&host, &history)?;
    let json = measure(&events, |past, to| {
        if let Some(past) = past {
            let identity = past.identity.clone();
            past.write(&mut Json::new(identity), to)?;
        }
        Ok(())
    })?;
    report.say(&format!(
        "The ends of {EVENTS} TCP flows with --accounting, of one packet each, from a history in memory, written on one CPU\nto a \
         buffer that is emptied each 64 KiB; {ROUNDS} rounds, median (least–most) in nanoseconds a record.\n"
    ));
    report.say(&format!(
        "{:<28} {:>21}  {:>12}",
        "", "ns a record", "a second"
    ));
    row(report, "lines of JSON", &json, LINES);
    for (name, biflow, pen) in [
        ("IPFIX", false, None),
        ("IPFIX, reverse elements", true, None),
        ("IPFIX, private elements", false, Some(32473)),
    ] {
        let config = Config {
            domain: 1,
            name: "eth0@host".to_owned(),
            pen,
            biflow,
            most: 1400,
        };
        let mut ipfix = Ipfix::new(config, true, Duration::from_secs(60));
        let mut first = Vec::new();
        ipfix.begin(0, &mut first);
        ipfix.complete(0, &mut first);
        let figure = measure(&events, |past, to| match past {
            Some(past) => Ok(ipfix.event(past, to)?),
            None => {
                ipfix.complete(0, to);
                Ok(())
            }
        })?;
        row(report, name, &figure, RECORDS);
        report.object(&json!({ "bench": "records", "variant": name, "ns": figure.median }));
    }
    let seconds = export(&host, &history)?;
    let rate = f64::from(EVENTS * TIMES) / seconds.median;
    report.say(&format!(
        "\n`twheel export json --once` of such a history, of {} ends, to a file in memory, reading and checksums included:\n\
         {:.0} events a second of CPU time.",
        EVENTS * TIMES,
        rate
    ));
    report.object(&json!({
        "bench": "records",
        "json_ns": json.median,
        "export_json_per_second": rate,
    }));
    let history = outside(&history, &host)?;
    report.say(
        "\nThe same events from that history, `--once`, to servers on this machine: the exporter on one CPU, a server on that and \
         another\none; up to the last acknowledgement, start and end included. Events a second (least–most).\n"
    );
    report.say(&format!(
        "{:<28} {:>21} {:>21}",
        "", "of CPU time", "of wall time"
    ));
    if let Some(broker) = broker {
        broker.create("twheel", 6)?;
        for compression in ["zstd", "lz4", "none"] {
            let to = broker.address();
            let args = [
                "kafka",
                "--brokers",
                &to,
                "--topic",
                "twheel",
                "--compression",
                compression,
            ];
            sent(report, &format!("kafka, {compression}"), &history, &args)?;
        }
    }
    if let Some(server) = server {
        let url = server.url();
        sent(
            report,
            "clickhouse",
            &history,
            &["clickhouse", "--url", &url],
        )?;
    }
    Ok(())
}

/// A row for an export to a server.
fn sent(report: &mut Report, name: &str, history: &str, args: &[&str]) -> Result<()> {
    let (mut of_cpu, mut of_wall) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS.min(5) {
        let state = format!("{history}/state-{name}-{round}");
        let (before, begun) = (children()?, Instant::now());
        let status = std::process::Command::new(twheel_bin()?)
            .arg("export")
            .args(args)
            .args([
                "--once",
                "--iface",
                SERVER,
                "--history",
                history,
                "--state",
                &state,
            ])
            .stdin(Stdio::null())
            .status()?;
        ensure!(status.success(), "the export failed");
        of_wall.push(f64::from(EVENTS * TIMES) / begun.elapsed().as_secs_f64());
        of_cpu.push(f64::from(EVENTS * TIMES) / (children()? - before).as_secs_f64());
    }
    let (of_cpu, of_wall) = (
        Figure::from_samples(&of_cpu),
        Figure::from_samples(&of_wall),
    );
    let verdict = match of_cpu.median.min(of_wall.median) >= SENT {
        true => "at least",
        false => "BELOW",
    };
    report.say(&format!(
        "{name:<28} {}  {verdict} {SENT}",
        Figure::row(&[of_cpu, of_wall])
    ));
    report.object(&json!({
        "bench": "records",
        "variant": name,
        "per_cpu_second": of_cpu.median,
        "per_second": of_wall.median,
    }));
    Ok(())
}

fn row(report: &mut Report, name: &str, figure: &Figure, bound: f64) {
    let rate = 1e9 / figure.median;
    let verdict = match rate >= bound {
        true => "at least",
        false => "BELOW",
    };
    report.say(&format!(
        "{name:<28} {}  {rate:>12.0}  {verdict} {bound}",
        Figure::row(&[*figure])
    ));
}

/// Nanoseconds of each event. `write` gets none before the buffer is emptied.
fn measure(
    events: &[Past],
    mut write: impl FnMut(Option<&Past>, &mut Vec<u8>) -> Result<()>,
) -> Result<Figure> {
    const FLUSH: usize = 64 << 10;
    pin_to(0)?;
    let mut to = Vec::with_capacity(2 * FLUSH);
    let mut samples = Vec::new();
    for round in 0..=ROUNDS {
        let begun = Instant::now();
        for past in events {
            if to.len() > FLUSH {
                write(None, &mut to)?;
                std::hint::black_box(&to);
                to.clear();
            }
            write(Some(past), &mut to)?;
        }
        // The first round warms up.
        if round > 0 || ROUNDS == 1 {
            samples.push(begun.elapsed().as_nanos() as f64 / events.len() as f64);
        }
    }
    Ok(Figure::from_samples(&samples))
}

/// A history with the ends of as many flows, several times, and the first of these.
pub fn fill(host: &Namespace, history: &Directory) -> Result<Vec<Past>> {
    host.ip(&format!("link add {SERVER} type veth peer name other0"))?;
    for interface in [SERVER, "other0"] {
        host.ip(&format!("link set {interface} up"))?;
    }
    let mut args = vec!["--iface", SERVER, "--timeout", "500ms", "--accounting"];
    args.extend(["--history", history.path(), "--history-size", "1GiB"]);
    let twheel = Twheel::start_muted(host, &args)?;
    let mut reader = HistoryReader::open(&history.0, &host.history(SERVER), UNIX_EPOCH)?;
    let mut events = Vec::new();
    for time in 0..TIMES {
        host.begin_flows(SERVER, EVENTS)?;
        let end = Instant::now() + PATIENCE + Duration::from_secs(60);
        let mut ends = 0;
        while ends < EVENTS {
            match reader.next()? {
                Some(past) if past.kind() == twheel::model::EventKind::End => {
                    ends += 1;
                    if time == 0 {
                        events.push(past);
                    }
                }
                Some(_) => {}
                None => std::thread::sleep(Duration::from_millis(100)),
            }
            ensure!(Instant::now() < end, "{ends} of {EVENTS} events");
        }
    }
    twheel.stop()?;
    Ok(events)
}

/// CPU seconds of a whole export.
fn export(host: &Namespace, history: &Directory) -> Result<Figure> {
    let mut samples = Vec::new();
    for round in 0..ROUNDS.min(5) {
        let (to, state) = (
            history.file(&format!("lines{round}")),
            history.file(&format!("state{round}")),
        );
        let args = ["export", "json", "--once", "--to", &to, "--state", &state];
        let mut child = host
            .twheel(&[&args[..], &["--iface", SERVER, "--history", history.path()]].concat())?
            .stdin(Stdio::null())
            .spawn()?;
        std::io::stdout().flush()?;
        let before = children()?;
        ensure!(child.wait()?.success(), "the export failed");
        samples.push((children()? - before).as_secs_f64());
        std::fs::remove_file(&to).context("nothing was exported")?;
    }
    Ok(Figure::from_samples(&samples))
}

/// CPU time of the children that have ended.
pub fn children() -> Result<Duration> {
    use nix::sys::resource::{UsageWho, getrusage};
    let usage = getrusage(UsageWho::RUSAGE_CHILDREN)?;
    let times = [usage.user_time(), usage.system_time()];
    Ok(times
        .iter()
        .map(|it| Duration::new(it.tv_sec() as u64, it.tv_usec() as u32 * 1000))
        .sum())
}
