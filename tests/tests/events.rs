//! What every event says of itself: host, instance, number, time, and which flow it is about.

use std::{
    collections::{BTreeMap, BTreeSet},
    thread,
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE, require_root},
    pair::{Pair, SERVER},
    running::Twheel,
};

fn parse(line: &str) -> Result<Value> {
    serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))
}

fn parse_all(lines: &[String]) -> Result<Vec<Value>> {
    lines.iter().map(|line| parse(line)).collect()
}

fn number(event: &Value) -> Result<u64> {
    event["seq"]
        .as_u64()
        .with_context(|| format!("no seq: {event}"))
}

fn text<'a>(event: &'a Value, field: &str) -> Result<&'a str> {
    let text = event[field].as_str();
    text.with_context(|| format!("no {field}: {event}"))
}

/// What a command prints.
fn printed(host: &Namespace, args: &[&str]) -> Result<Vec<String>> {
    let ended = host.twheel_once(args)?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    Ok(ended.lines.into_iter().map(|line| line.text).collect())
}

/// The next lines of a run, until this many are of this kind.
fn lines(twheel: &Twheel, kind: &str, count: usize) -> Result<Vec<String>> {
    let (mut lines, mut found) = (Vec::new(), 0);
    let kind = format!("\"event\":\"{kind}\"");
    while found < count {
        let line = twheel.line(PATIENCE)?.context("no more lines")?.text;
        found += usize::from(line.contains(&kind));
        lines.push(line);
    }
    Ok(lines)
}

/// Checks that these events have all numbers from `first` on, each once.
fn assert_numbered(events: &[Value], first: u64) -> Result<()> {
    let numbers = events.iter().map(number).collect::<Result<BTreeSet<_>>>()?;
    assert_eq!(numbers.len(), events.len(), "a number was given twice");
    assert!(
        numbers.iter().copied().eq((first..).take(events.len())),
        "{numbers:?}"
    );
    Ok(())
}

#[test]
fn all_events_of_a_flow_name_it_and_each_event_has_a_number() -> Result<()> {
    require_root();
    const FLOWS: usize = 5;
    let history = Directory::new("events")?;
    let pair = Pair::new()?;
    let args = [
        "--iface",
        SERVER,
        "--timeout",
        "2s",
        "--json",
        "--reap",
        "conntrack,reset",
    ];
    let mut args = args.to_vec();
    args.extend(["--history", history.path()]);
    let before = humantime::format_rfc3339_micros(SystemTime::now()).to_string();
    let twheel = Twheel::start(&pair.server, &args)?;
    let _open = pair.connect_some(FLOWS)?;
    let live = printed(&pair.server, &["flows", "--json"])?;
    let mut told = lines(&twheel, "reap", 2 * FLOWS)?;
    let past = [
        "expired",
        "--iface",
        SERVER,
        "--json",
        "--history",
        history.path(),
    ];
    let past = printed(&pair.server, &past)?;
    let ended = twheel.stop()?;
    assert!(ended.lines.is_empty(), "{ended:?}");
    let after = humantime::format_rfc3339_micros(SystemTime::now()).to_string();

    let ends: Vec<_> = told
        .iter()
        .filter(|it| it.contains("\"event\":\"end\""))
        .cloned()
        .collect();
    assert_eq!(past, ends, "the history says the same, byte for byte");
    told.extend(ended.runs);
    let all = [
        "expired",
        "--iface",
        SERVER,
        "--json",
        "--events",
        "end,rto,reap,run",
        "--history",
        history.path(),
    ];
    let all: BTreeSet<_> = printed(&pair.server, &all)?.into_iter().collect();
    assert_eq!(
        all,
        told.iter().cloned().collect(),
        "all that was told is in the history"
    );
    let shown = [
        "expired",
        "--iface",
        SERVER,
        "--events",
        "run",
        "--history",
        history.path(),
    ];
    let shown = printed(&pair.server, &shown)?;
    assert!(
        shown.len() == 2 && shown[0].contains("run      attached  server0  xdp"),
        "{shown:?}"
    );
    let events = told
        .iter()
        .map(|line| parse(line))
        .collect::<Result<Vec<_>>>()?;
    assert_numbered(&events, 1)?;
    let what: Vec<_> = events.iter().filter_map(|it| it["what"].as_str()).collect();
    assert_eq!(what, ["attached", "summary"]);
    let hosts: BTreeSet<_> = events
        .iter()
        .map(|it| Ok((text(it, "host")?, text(it, "instance")?)))
        .collect::<Result<_>>()?;
    assert_eq!(hosts.len(), 1, "{hosts:?}");

    // All that is said of a flow, by its number.
    let mut flows: BTreeMap<String, Vec<Value>> = BTreeMap::new();
    for event in parse_all(&live)?.into_iter().chain(events) {
        if let Some(id) = event["flow_id"].as_str().map(str::to_owned) {
            flows.entry(id).or_default().push(event);
        }
    }
    assert_eq!(flows.len(), FLOWS);
    for said in flows.values() {
        let [flow, end, one, other] = &said[..] else {
            anyhow::bail!("{said:#?}");
        };
        let kinds = [flow, end, one, other].map(|it| it["event"].as_str());
        assert_eq!(kinds, ["flow", "end", "reap", "reap"].map(Some));
        for event in [end, one, other] {
            for field in ["src", "sport", "dst", "dport", "direction"] {
                assert_eq!(event[field], flow[field], "{event}");
            }
            assert_eq!(event["start"], end["start"], "{event}");
            let (start, time) = (text(event, "start")?, text(event, "time")?);
            assert!(
                *before <= *start && start < time && *time <= *after,
                "{event}"
            );
        }
        assert_eq!([&one["end_seq"], &other["end_seq"]], [&end["seq"]; 2]);
        let life = end["age_us"].as_u64().context("no age")?;
        assert!((2_000_000..3_000_000).contains(&life), "{end}");
    }
    Ok(())
}

#[test]
fn numbers_go_on_after_a_kill_and_begin_anew_with_new_maps() -> Result<()> {
    require_root();
    const FLOWS: usize = 20;
    let pair = Pair::new()?;
    let args = [
        "--iface",
        SERVER,
        "--timeout",
        "300ms",
        "--json",
        "--keep",
        "--history",
        "off",
    ];
    let mut told = Vec::new();
    for _ in 0..3 {
        let twheel = Twheel::start(&pair.server, &args)?;
        let open = pair.connect_some(FLOWS)?;
        told.extend(lines(&twheel, "end", FLOWS)?);
        // The events have left the ring.
        thread::sleep(Duration::from_millis(100));
        told.extend(twheel.kill()?.runs);
        drop(open);
    }
    let events = parse_all(&told)?;
    // The first run has attached; the others have adopted, too.
    assert_eq!(events.len(), 3 * FLOWS + 5);
    assert_numbered(&events, 1)?;
    let instance = text(&events[0], "instance")?;
    assert!(events.iter().all(|it| it["instance"] == instance));

    assert_eq!(
        pair.server
            .twheel_once(&["detach", "--iface", SERVER])?
            .code(),
        Some(0)
    );
    let twheel = Twheel::start(&pair.server, &args[..5])?;
    let anew = parse(twheel.stop()?.runs.first().context("nothing said")?)?;
    assert_eq!(number(&anew)?, 1);
    assert_ne!(text(&anew, "instance")?, instance);
    Ok(())
}

#[test]
fn only_the_kinds_that_are_asked_for_are_printed() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = [
        "--iface",
        SERVER,
        "--timeout",
        "300ms",
        "--json",
        "--reap",
        "conntrack",
    ];
    for (kinds, ends, reaps, runs) in [("reap", 0, 3, 0), ("end,run", 3, 0, 2)] {
        let twheel = Twheel::start(&pair.server, &[&args[..], &["--events", kinds]].concat())?;
        let _open = pair.connect_some(3)?;
        thread::sleep(Duration::from_secs(2));
        let ended = twheel.stop()?;
        let count = |kind: &str| {
            let kind = format!("\"event\":\"{kind}\"");
            ended
                .lines
                .iter()
                .filter(|it| it.text.contains(&kind))
                .count()
        };
        assert_eq!(
            (count("end"), count("reap"), ended.runs.len()),
            (ends, reaps, runs),
            "{kinds}"
        );
    }
    let refused = pair
        .server
        .twheel_once(&["run", "--iface", SERVER, "--events", "ends"])?;
    assert_eq!(refused.code(), Some(2));
    assert!(
        refused.stderr.contains("there is no such kind of events"),
        "{}",
        refused.stderr
    );
    Ok(())
}

#[test]
fn a_history_is_found_by_each_of_its_interfaces_and_listed_when_the_run_is_over() -> Result<()> {
    require_root();
    let history = Directory::new("listed")?;
    let pair = Pair::new()?;
    pair.server.ip("link add second0 type bridge")?;
    pair.server.ip("link set second0 up")?;
    let both = format!("{SERVER},second0");
    let args = ["--iface", &both, "--timeout", "300ms", "--json"];
    let mut args = args.to_vec();
    args.extend(["--history", history.path()]);
    let twheel = Twheel::start(&pair.server, &args)?;
    let _open = pair.connect_some(3)?;
    let told = lines(&twheel, "end", 3)?;
    let name = format!("{SERVER}@netns-{}", pair.server.name());
    let list = |host: &Namespace| -> Result<Value> {
        let list = printed(host, &["list", "--json", "--history", history.path()])?;
        let list = list
            .iter()
            .map(|line| parse(line))
            .collect::<Result<Vec<_>>>()?;
        let found = list.into_iter().find(|it| it["name"] == name.as_str());
        found.context("not listed")
    };
    // From any network namespace.
    for host in [&pair.server, &pair.client] {
        let listed = list(host)?;
        assert_eq!(listed["state"], "running");
        assert_eq!(listed["interfaces"], serde_json::json!(["second0", SERVER]));
    }
    assert!(text(&parse(&told[0])?, "instance")?.starts_with(&name));
    assert_eq!(twheel.stop()?.code(), Some(0));
    let gone = list(&pair.client)?;
    assert_eq!((text(&gone, "state")?, gone.get("pins")), ("gone", None));
    assert_eq!(gone["interfaces"], serde_json::json!(["second0", SERVER]));
    assert!(gone["history"]["bytes"].as_u64() > Some(3 * 100));

    for which in [&["--iface", SERVER][..], &["--iface", "second0"], &[]] {
        let expired = ["expired", "--json", "--history", history.path()];
        assert_eq!(
            printed(&pair.server, &[&expired[..], which].concat())?,
            told,
            "{which:?}"
        );
    }
    // Another namespace has none, even if it is given the same inode one day.
    let other = pair
        .client
        .twheel_once(&["expired", "--history", history.path()])?;
    assert_eq!(other.code(), Some(6), "{other:?}");
    let shown = printed(&pair.server, &["list", "--history", history.path()])?;
    assert!(
        shown
            .iter()
            .any(|line| line.contains("gone") && line.contains("second0")),
        "{shown:?}"
    );
    Ok(())
}
