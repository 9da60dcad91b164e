//! Long flows are reported while they live, and once more at the end of a run.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    ctnetlink::Conntrack,
    directory::Directory,
    is_long,
    netns::{PATIENCE, require_root},
    pair::{Family, Pair, SERVER},
    running::Twheel,
};

fn parse(line: &str) -> Result<Value> {
    serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))
}

fn number(event: &Value, field: &str) -> Result<u64> {
    let number = event[field].as_u64();
    number.with_context(|| format!("no {field}: {event}"))
}

const FIELDS: [&str; 4] = ["orig_packets", "orig_bytes", "reply_packets", "reply_bytes"];

/// Adds what an event has reported.
fn add(sums: &mut [u64; 4], event: &Value) -> Result<()> {
    for (sum, field) in sums.iter_mut().zip(FIELDS) {
        *sum += number(event, &format!("{field}_delta"))?;
        ensure!(*sum == number(event, field)?, "{field}: {sum}, {event}");
    }
    Ok(())
}

/// Packets and bytes that the server's interface has received.
fn received(pair: &Pair) -> Result<[u64; 2]> {
    let shown = pair.server.ip(&format!("-j -s link show {SERVER}"))?;
    let shown: Value = serde_json::from_str(&shown)?;
    let received = &shown[0]["stats64"]["rx"];
    Ok([number(received, "packets")?, number(received, "bytes")?])
}

/// A bulk connection of some seconds (in the long run of an hour, and an active timeout of 10 s):
/// what its updates and its end report adds up to what conntrack and the interface have counted.
#[test]
fn the_updates_and_the_end_of_a_bulk_flow_add_up_to_conntracks_counters() -> Result<()> {
    require_root();
    let (lasts, every) = match is_long() {
        true => (Duration::from_secs(3600), Duration::from_secs(10)),
        false => (Duration::from_secs(6), Duration::from_secs(1)),
    };
    let pair = Pair::new()?;
    // A rule that needs conntrack makes it follow the connections of the namespace.
    pair.server.nft(
        "table ip t {\nchain c {\ntype filter hook input priority 0\nct state new accept\n}\n}\n",
    )?;
    pair.server.enter(|| {
        for name in ["acct", "timestamp"] {
            std::fs::write(format!("/proc/sys/net/netfilter/nf_conntrack_{name}"), "1")?;
        }
        Ok(())
    })?;
    let conntrack = Conntrack::open(&pair.server)?;
    let timeout = format!("{}ms", every.as_millis());
    let twheel = Twheel::start(
        &pair.server,
        &[
            "--iface",
            SERVER,
            "--accounting",
            "--json",
            "--events",
            "begin,update,end",
            "--active-timeout",
            &timeout,
            "--timeout",
            "established=1h,close=1s,time_wait=1s",
        ],
    )?;

    let before = received(&pair)?;
    let mut connection = pair.connect(Family::V4)?;
    let mut receiver = connection.server.try_clone()?;
    let reading = thread::spawn(move || {
        let mut buffer = vec![0; 1 << 16];
        while receiver.read(&mut buffer).is_ok_and(|read| read > 0) {}
    });
    let begun = Instant::now();
    while begun.elapsed() < lasts {
        connection.client.write_all(&[7; 20_000])?;
        thread::sleep(Duration::from_millis(5));
    }
    connection.client.shutdown(std::net::Shutdown::Write)?;
    reading.join().expect("the reader panicked");
    connection.server.shutdown(std::net::Shutdown::Write)?;
    ensure!(connection.client.read(&mut [0])? == 0);
    let counted = conntrack.dump()?;
    let counted: Vec<_> = counted
        .iter()
        .filter(|it| it.src == connection.name)
        .collect();
    ensure!(counted.len() == 1, "{counted:?}");

    let (mut sums, mut updates, mut flow_id) = ([0; 4], 0, None);
    let end = Instant::now() + PATIENCE;
    let age = loop {
        let Some(line) = twheel.line(Duration::from_millis(200))? else {
            ensure!(Instant::now() < end, "the flow does not end");
            continue;
        };
        let event = parse(&line.text)?;
        ensure!(event["sport"] == connection.name.port(), "{event}");
        let id = flow_id.get_or_insert_with(|| event["flow_id"].clone());
        ensure!(event["flow_id"] == *id, "{event}");
        match event["event"].as_str() {
            Some("begin") => ensure!(updates == 0 && event.get("age_us").is_none(), "{event}"),
            Some("update") => {
                add(&mut sums, &event)?;
                updates += 1;
                let interval = number(&event, "interval_us")?;
                let most = every + Duration::from_millis(200);
                ensure!(
                    (every.as_micros()..=most.as_micros()).contains(&u128::from(interval)),
                    "{event}"
                );
            }
            Some("end") => {
                add(&mut sums, &event)?;
                ensure!(event["reason"] == "closed", "{event}");
                break Duration::from_micros(number(&event, "age_us")?);
            }
            _ => anyhow::bail!("{event}"),
        }
    };
    // The flow's own age, not `lasts`: a busy machine makes the last write late.
    ensure!(age >= lasts, "{age:?}");
    let expected = age.as_millis() / every.as_millis();
    ensure!(
        (expected - 1 - expected / 20..=expected).contains(&updates),
        "{updates} updates in {age:?}"
    );
    let sent = counted[0].counts.context("conntrack does not count")?;
    assert_eq!(sums, [sent[0][0], sent[0][1], sent[1][0], sent[1][1]]);
    let [packets, bytes] = received(&pair)?;
    // Beside the flow there were the handshakes with which the pair was tested, before, and
    // neighbour discovery, again and again. (A veth device counts what it receives without the Ethernet header.)
    let (packets, bytes) = (packets - before[0], bytes - before[1]);
    let others = 50 + lasts.as_secs() / 20;
    ensure!(
        (sums[0]..sums[0] + others).contains(&packets),
        "{packets} {sums:?}"
    );
    ensure!(
        (sums[1]..sums[1] + 100 * others).contains(&bytes),
        "{bytes} {sums:?}"
    );
    println!("{updates} updates, {sums:?}");
    Ok(())
}

/// Each flow that is there at the end is reported: also those that had no packet since their last
/// update.
#[test]
fn flows_that_live_at_the_end_of_a_run_are_reported() -> Result<()> {
    require_root();
    let history = Directory::new("final")?;
    let pair = Pair::new()?;
    for active in [&[][..], &["--active-timeout", "500ms"]] {
        let mut args = vec!["--iface", SERVER, "--json", "--accounting"];
        args.extend(["--final-records", "--history", history.path()]);
        args.extend(active);
        let twheel = Twheel::start(&pair.server, &args)?;
        let mut connections = pair.connect_some(5)?;
        // More than the ring holds.
        pair.server.begin_flows(SERVER, 20_000)?;
        thread::sleep(Duration::from_millis(1_200));
        connections[0].talk()?;
        let ended = twheel.stop()?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        let mut last = BTreeMap::new();
        for line in &ended.lines {
            let event = parse(&line.text)?;
            ensure!(event["event"] == "update", "{event}");
            last.insert(event["flow_id"].to_string(), event);
        }
        let live = 20_000 + 5;
        assert_eq!(last.len(), live);
        let summary = parse(ended.runs.last().context("no summary")?)?;
        assert_eq!(
            (number(&summary, "flows")?, number(&summary, "lost")?),
            (live as u64, 0)
        );
        let talked = last
            .values()
            .find(|it| it["sport"] == connections[0].name.port());
        let talked = talked.context("a flow without a record")?;
        assert_eq!(number(talked, "orig_packets")?, 3, "{talked}");
        let since = number(talked, "interval_us")?;
        let age = number(talked, "age_us")?;
        ensure!((since == age) == active.is_empty(), "{talked}");
    }
    Ok(())
}
