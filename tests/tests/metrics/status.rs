//! The page's data, asked for directly.

use std::{
    collections::BTreeMap,
    io::{Read, Write},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    netns::{PATIENCE, require_root},
    pair::{CLIENT, Family, PORT, Pair, SERVER},
};

use crate::{Watched, expiries, millis};

impl Watched<'_> {
    /// An answer in JSON.
    pub fn json(&self, path: &str) -> Result<Value> {
        let reply = self.get(path)?;
        ensure!(reply.code == 200, "{path}: {}", reply.body);
        Ok(serde_json::from_str(&reply.body)?)
    }

    /// The status, once it is as wanted.
    pub fn status_when(&self, is_wanted: impl Fn(&Value) -> bool) -> Result<Value> {
        let end = Instant::now() + PATIENCE;
        loop {
            let status = self.json("/api/status")?;
            if is_wanted(&status) {
                return Ok(status);
            }
            ensure!(Instant::now() < end, "it does not come: {status}");
            thread::sleep(millis(300));
        }
    }
}

/// A talker or a service.
fn line<'a>(status: &'a Value, kind: &str, name: &str) -> Result<&'a Value> {
    let lines = status["talkers"][kind].as_array().context("no lines")?;
    let line = lines.iter().find(|it| it["name"] == name);
    line.with_context(|| format!("no {name} in {lines:?}"))
}

#[test]
fn rates_are_those_of_the_traffic() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let options = ["--timeout", "60s", "--accounting"];
    let watched = Watched::start(&pair.server, &options)?;
    let without = Watched::start_on(&pair.client, CLIENT, &[])?;
    let mut connection = pair.connect(Family::V4)?;
    // 2 MB/s for 12 s, less what it takes to send.
    let (data, mut read) = (vec![0; 100_000], vec![0; 100_000]);
    let begun = Instant::now();
    let (mut sent, mut shown) = (0, Vec::new());
    while begun.elapsed() < Duration::from_secs(12) {
        connection.client.write_all(&data)?;
        connection.server.read_exact(&mut read)?;
        sent += data.len();
        thread::sleep(millis(50));
        if sent % 2_000_000 == 0 {
            shown.push((watched.json("/api/status")?, without.json("/api/status")?));
        }
    }
    let true_bits = 8.0 * sent as f64 / begun.elapsed().as_secs_f64();
    let (status, of_client) = shown.last().context("nothing was shown")?;
    // Headers and ACKs, of jumbo segments, add a little.
    let about = |bits: &Value, what: &str| {
        let bits = bits.as_f64().unwrap_or(f64::NAN);
        let is_about = (0.5 * true_bits..1.6 * true_bits).contains(&bits);
        ensure!(is_about, "{what}: {bits} bit/s, in truth {true_bits}");
        Ok(())
    };
    about(&status["rates"]["bits"][0], "received")?;
    about(&status["carried"][0]["bits"][0], "the interface")?;
    assert_eq!(status["carried"][0]["name"], SERVER);
    let client = Family::V4.client().to_string();
    about(&line(status, "sources", &client)?["bits"], "the talker")?;
    let service = format!("tcp/{PORT}");
    about(&line(status, "services", &service)?["bits"], "the service")?;
    // The other side sends what this one receives; without accounting no talker has bits.
    about(&of_client["rates"]["bits"][1], "sent")?;
    assert_eq!(of_client["accounting"], false);
    assert!(line(of_client, "sources", &client)?.get("bits").is_none());

    let history = watched.json("/api/history")?;
    let received = history["rates"]["received"]
        .as_array()
        .context("no rates")?;
    ensure!((1..=3).contains(&received.len()), "{history}");
    about(received.last().context("no point")?, "the history")?;
    let times = history["times"].as_array().context("no times")?;
    assert_eq!(times.len(), received.len());
    let last = times.last().context("no time")?;
    let more = watched.json(&format!("/api/history?since={last}"))?;
    assert_eq!(more["times"], Value::Array(Vec::new()), "{more}");

    // When the traffic ends, so do the rates; the table stays.
    thread::sleep(millis(1200));
    let status = watched.status_when(|it| it["rates"]["packets"] == 0.0)?;
    assert_eq!(status["flows"], 1);
    assert_eq!(status["states"]["established"], 1);
    Ok(())
}

#[test]
fn ends_are_searched_by_filters() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "500ms,close=300ms"])?;
    let idle = pair.connect_some(4)?;
    for connection in pair.connect_some(3)? {
        connection.reset()?;
    }
    expiries(&watched.twheel, 7)?;
    drop(idle);
    for (query, matching, lines) in [
        ("", 7, 7),
        ("?limit=2", 7, 2),
        ("?limit=0", 7, 0),
        ("?filter=reason%20%3D%3D%20reset", 3, 3),
        (
            "?filter=reason+%3D%3D+idle+and+src+%3D%3D+10.77.0.1&limit=1",
            2,
            1,
        ),
        ("?filter=iface+%3D%3D+server0+and+ended+%3C+1h", 7, 7),
        ("?filter=age+%3E+1d", 0, 0),
    ] {
        let found = watched.json(&format!("/api/ended{query}"))?;
        assert_eq!(found["matching"], matching, "{query}: {found}");
        assert_eq!(found["of"], 7, "{query}");
        let flows = found["flows"].as_array().context("no flows")?;
        assert_eq!(flows.len(), lines, "{query}: {found}");
        for flow in flows {
            twheel_tests::schema::check(&without_ago(flow))?;
        }
    }
    for (query, says) in [
        ("?filter=bytes+%3E+1", "is not counted: start twheel with"),
        ("?limit=x", "limit=x: give a whole number"),
        ("?since=foo", "there is no parameter since: give filter="),
        ("?filter=x", "filter, column 1: "),
        ("?filter=%FF", "filter, column 1: "),
        (
            "?filter=expires+%3E+1s",
            "is known only of flows in the table",
        ),
    ] {
        let reply = watched.get(&format!("/api/ended{query}"))?;
        assert_eq!(reply.code, 400, "{query}: {}", reply.body);
        ensure!(reply.body.contains(says), "{query}: {}", reply.body);
        assert_eq!(reply.headers["content-type"], "text/plain; charset=utf-8");
    }
    for query in ["?since=foo", "?since=-1", "?limit=1", "?since=1&since=2"] {
        let reply = watched.get(&format!("/api/history{query}"))?;
        assert_eq!(reply.code, 400, "{query}: {}", reply.body);
        ensure!(reply.body.contains("since=N"), "{query}: {}", reply.body);
    }
    Ok(())
}

/// The line of an end as it is printed.
fn without_ago(flow: &Value) -> String {
    let mut flow = flow.clone();
    if let Some(fields) = flow.as_object_mut() {
        fields.remove("seconds_ago");
    }
    flow.to_string()
}

#[test]
fn the_last_thousand_ends_are_kept() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "300ms"])?;
    pair.server.begin_flows(SERVER, 1500)?;
    expiries(&watched.twheel, 1500)?;
    let found = watched.json("/api/ended?limit=5000")?;
    assert_eq!((&found["of"], &found["kept"]), (&1000.into(), &1000.into()));
    let flows = found["flows"].as_array().context("no flows")?;
    let numbers: Vec<_> = flows.iter().filter_map(|it| it["seq"].as_u64()).collect();
    let ahead: BTreeMap<_, _> = numbers.iter().rev().zip(1u64..).collect();
    assert_eq!(ahead.len(), 1000, "an end comes twice");
    ensure!(
        numbers.iter().all(|it| *it > 400),
        "the latest are not kept"
    );
    let status = watched.status_when(|it| {
        let service = line(it, "services", "tcp/80");
        service.is_ok_and(|it| it["flows"] == 0 && it["ended"] == 1500)
    })?;
    assert_eq!(status["flows"], 0);
    Ok(())
}
