//! The formats of the metrics.

use std::{
    collections::BTreeSet,
    thread,
    time::{Instant, SystemTime},
};

use anyhow::{Context, Result, ensure};
use twheel_tests::{
    netns::{PATIENCE, require_root},
    pair::{Busy, Pair},
};

use crate::{Watched, millis};

/// The samples of a text, without their values.
fn samples(text: &str) -> Vec<&str> {
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| Some(line.rsplit_once(' ')?.0))
        .collect()
}

#[test]
fn metrics_come_in_one_order() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["--timeout", "300ms", "--reap", "socket", "--dry-run"];
    let watched = Watched::start(&pair.server, &args)?;
    let _connections = pair.connect_some(2)?;
    thread::sleep(millis(600));
    let first = watched.get("/metrics")?.body;
    let known: BTreeSet<_> = samples(&first).into_iter().collect();
    for _ in 0..5 {
        let again = watched.get("/metrics")?.body;
        // A verdict that no packet had before may have come.
        let mut again = samples(&again);
        again.retain(|it| known.contains(it));
        assert_eq!(again, samples(&first));
    }
    let of = |name: &str| {
        let samples = samples(&first).into_iter();
        let of: Vec<_> = samples.filter(|it| it.starts_with(name)).collect();
        of
    };
    for (name, least) in [
        ("twheel_reaped_total{", 50),
        ("twheel_packets_total{", 16),
        ("twheel_interface_packets_total{", 1),
        ("twheel_interface_bytes_total{", 2),
    ] {
        let of = of(name);
        ensure!(of.len() >= least, "{of:?}");
        assert!(of.is_sorted(), "{of:?}");
    }
    let types = first.lines().filter(|it| it.starts_with("# TYPE "));
    let types: Vec<_> = types.collect();
    assert!(types.is_sorted(), "{types:?}");
    Ok(())
}

/// The runs and the seconds of the program of a direction.
fn cost(watched: &Watched) -> Result<Option<(f64, f64)>> {
    let text = watched.get("/metrics")?.body;
    let value = |name: &str| {
        let sample = format!("{name}{{namespace=\"\",program=\"twheel_xdp\"}} ");
        let line = text.lines().find_map(|it| it.strip_prefix(&sample));
        line.map(str::parse).transpose()
    };
    let runs = value("twheel_program_runs_total")?;
    let seconds = value("twheel_program_run_seconds_total")?;
    Ok(runs.zip(seconds))
}

/// They count while somebody looks at the cost, and no longer.
#[test]
fn runs_of_programs_are_counted_while_statistics_are_on() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &[])?;
    let busy = Busy::start(pair.connect_some(4)?, millis(2));
    let looked = pair.server.twheel_once(&["stats", "--cost"])?;
    ensure!(looked.code() == Some(0), "{}", looked.stderr);
    let (runs, seconds) = cost(&watched)?.context("nothing counted")?;
    ensure!(runs > 100.0, "{runs}");
    let each = seconds / runs;
    ensure!((1e-8..1e-4).contains(&each), "{each} s each");
    // Other tests may look meanwhile.
    let end = Instant::now() + PATIENCE;
    loop {
        let before = cost(&watched)?;
        thread::sleep(millis(300));
        if cost(&watched)? == before {
            break;
        }
        ensure!(Instant::now() < end, "the statistics stay on");
    }
    busy.stop()?;
    Ok(())
}

#[test]
fn open_metrics_has_exemplars_that_are_events() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "300ms"])?;
    let ask = || {
        watched.send(&format!(
            "GET /metrics HTTP/1.1\r\nHost: {}\r\nAccept: application/openmetrics-text;version=1.0.0,\
             text/plain;q=0.5\r\n\r\n",
            watched.address
        ))
    };
    let none = ask()?.body;
    ensure!(!none.contains(" # {"), "an exemplar of nothing: {none}");
    let connections = pair.connect_some(5)?;
    let mut ids = BTreeSet::new();
    for _ in &connections {
        let line = twheel_tests::netns::PATIENCE;
        let line = watched.twheel.line(line)?.context("no end")?;
        let event: serde_json::Value = serde_json::from_str(&line.text)?;
        ids.insert(event["flow_id"].as_str().context("no flow_id")?.to_owned());
    }
    thread::sleep(millis(200));
    let with = [
        "twheel_ended_flows_total",
        "twheel_expiry_lateness_seconds_bucket",
    ];
    // They are counted a moment after they are printed.
    let has_exemplar = |text: &str, name: &str| {
        let mut lines = text.lines().filter(|it| it.starts_with(name));
        lines.any(|it| it.contains(" # {"))
    };
    let end = Instant::now() + PATIENCE;
    let mut reply = ask()?;
    while !with.iter().all(|name| has_exemplar(&reply.body, name)) && Instant::now() < end {
        thread::sleep(millis(50));
        reply = ask()?;
    }
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    assert_eq!(reply.headers["content-type"], kind);
    let text = reply.body;
    ensure!(text.ends_with("\n# EOF\n"), "{text}");
    let names = text.lines().filter_map(|it| it.strip_prefix("# TYPE "));
    ensure!(names.clone().count() > 30);
    for name in names {
        ensure!(!name.contains("_total"), "{name}");
    }
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH)?;
    let mut found = BTreeSet::new();
    for line in text.lines().filter(|it| it.contains(" # {")) {
        let (sample, exemplar) = line.split_once(" # {flow_id=\"").context("no flow")?;
        let (id, rest) = exemplar.split_once("\"} ").context("no end of the id")?;
        ensure!(ids.contains(id), "{id} is no event: {ids:?}");
        let (value, time) = rest.split_once(' ').context("no time")?;
        let (value, time): (f64, f64) = (value.parse()?, time.parse()?);
        let ago = now.as_secs_f64() - time;
        assert!((-0.1..30.0).contains(&ago), "{line}");
        if let Some((_, bound)) = sample.split_once("le=\"") {
            let bound = bound.split('"').next().unwrap_or_default();
            assert!(bound == "+Inf" || value <= bound.parse()?, "{line}");
            ensure!(bound.contains(['.', '+']), "{line}");
        }
        found.insert(sample.split(['{', ' ']).next().unwrap_or_default());
    }
    assert_eq!(found, BTreeSet::from(with), "{text}");
    // Whoever does not ask for it gets Prometheus' own format.
    let plain = watched.get("/metrics")?;
    assert_eq!(plain.headers["content-type"], "text/plain; version=0.0.4");
    ensure!(!plain.body.contains("# {") && !plain.body.contains("EOF"));
    Ok(())
}
