//! The page in a browser.

use std::{
    fs,
    io::Write,
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
    thread,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, Map, MapData};
use serde_json::Value;
use twheel_common::config::NAME_BYTES;
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Busy, Family, PORT, Pair, SERVER},
    running::PolicyFile,
};

use crate::{
    Watched,
    browser::{Does, View, between, browse, probe, rates, rows, said, through},
    expiries, millis,
};

/// What the page shows under this name.
fn shown_as(shown: &str, name: &str) -> Result<String> {
    let found = rates(shown).into_iter().find(|(it, _)| it == name);
    Ok(found.with_context(|| format!("no {name}: {shown}"))?.1)
}

/// Traffic of all kinds: connections that talk, that were reset, and one that is half open.
struct Traffic {
    busy: Busy,
    reset: usize,
}

impl Traffic {
    const BUSY: usize = 5;
    const RESET: usize = 3;

    fn start(pair: &Pair) -> Result<Self> {
        let busy = Busy::start(pair.connect_some(Self::BUSY)?, millis(50));
        pair.half_open(Family::V4)?;
        for connection in pair.connect_some(Self::RESET)? {
            connection.reset()?;
        }
        Ok(Self {
            busy,
            reset: Self::RESET,
        })
    }
}

/// The lines of a command.
fn lines(host: &Namespace, args: &[&str]) -> Result<Vec<Value>> {
    let ended = host.twheel_once(args)?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    let parse = |line: &twheel_tests::running::Printed| Ok(serde_json::from_str(&line.text)?);
    ended.lines.iter().map(parse).collect()
}

#[test]
fn the_page_shows_what_the_commands_say() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let options = ["--timeout", "60s,close=1s", "--slots", "64", "--accounting"];
    let watched = Watched::start(&pair.server, &options)?;
    let traffic = Traffic::start(&pair)?;
    let ended = expiries(&watched.twheel, traffic.reset)?;
    let view = View {
        seconds: 6,
        ..View::default()
    };
    let shown = browse(&pair.server, watched.address, view)?;
    assert_eq!(said(&shown, "link"), "live");
    assert_eq!(said(&shown, "interfaces"), SERVER);
    let host = fs::read_to_string("/proc/sys/kernel/hostname")?;
    assert_eq!(said(&shown, "host"), host.trim());
    assert_eq!(said(&shown, "warnings"), "");

    let created = pair.server.counter("created")?;
    let live = created - traffic.reset as u64;
    assert_eq!(shown_as(&shown, "flows")?, live.to_string());
    for name in ["received", "sent"] {
        let bits = shown_as(&shown, name)?;
        ensure!(bits.ends_with("bit/s") && !bits.starts_with("0 "), "{bits}");
    }
    let packets: f64 = shown_as(&shown, "packets/s")?.parse()?;
    // Each of them sends a byte and is answered, 20 times a second at most.
    assert!((10.0..1000.0).contains(&packets), "{packets} packets/s");
    let states = said(&shown, "chart-states");
    ensure!(states.contains("established 5"), "{states}");
    ensure!(states.contains("syn_sent 1"), "{states}");

    for (id, by) in [("sources", "src"), ("services", "port")] {
        let talkers = lines(&pair.server, &["talkers", "--by", by, "--json"])?;
        let rows = rows(&shown, id);
        for talker in &talkers {
            let name = talker["talker"].as_str().context("no name")?;
            let row = rows.iter().find(|row| row[0] == name);
            let row = row.with_context(|| format!("no {name} in {rows:?}"))?;
            assert_eq!(row[1], talker["flows"].to_string(), "{rows:?}");
        }
        assert_eq!(rows.len(), talkers.len(), "{rows:?}");
        // The busy ones have sent something since the pass before.
        ensure!(
            rows.iter().any(|row| row[2] != "0 " && row[2] != "–"),
            "{rows:?}"
        );
    }
    let ends: u64 = rows(&shown, "services")[0][3].parse()?;
    assert_eq!(ends, traffic.reset as u64);

    // The latest comes first.
    let latest = rows(&shown, "latest");
    assert_eq!(latest.len(), traffic.reset, "{latest:?}");
    for (row, expiry) in latest.iter().zip(ended.iter().rev()) {
        let ends = [expiry.src.to_string(), expiry.dst.to_string()];
        assert_eq!(row[1..4], ["tcp", &ends[0], &ends[1]]);
        assert_eq!(row[4..8], ["close", "reset", "", SERVER]);
        ensure!(!row[10].is_empty(), "no bytes: {row:?}");
    }
    let carried = rows(&shown, "carried");
    assert_eq!((carried.len(), &*carried[0][0]), (1, SERVER));
    ensure!(carried[0][1].ends_with("bit/s"), "{carried:?}");
    assert_eq!(said(&shown, "reaper"), "No action was requested.");

    // All flows are due within their timeout, and on the wheels.
    let due: Vec<u64> = between(&shown, "data-flows=\"", "\"")
        .iter()
        .map(|it| it.parse())
        .collect::<Result<_, _>>()?;
    assert_eq!(due.iter().sum::<u64>(), live, "{due:?}");
    // A timeout is two units of the clock longer, so that it is never too short.
    let later: u64 = due[5..].iter().sum();
    assert_eq!(later, 0, "later than in two minutes: {due:?}");
    ensure!(shown.contains("class=\"cell shade0\""), "no slot is lit");
    let turned = between(&shown, "transform=\"rotate(", ")");
    assert_eq!(turned.len() % 3, 0, "not three levels for each CPU");
    let turned = turned.iter().filter_map(|it| it.parse::<f64>().ok());
    assert!(turned.filter(|it| *it < 0.0).count() > 0, "no wheel turns");
    drop(traffic.busy);
    Ok(())
}

#[test]
fn the_page_fits_can_be_read_and_used_without_a_mouse() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let options = ["--timeout", "60s,close=1s", "--accounting"];
    let watched = Watched::start(&pair.server, &options)?;
    let traffic = Traffic::start(&pair)?;
    expiries(&watched.twheel, traffic.reset)?;
    for (width, dark) in [
        (400, false),
        (400, true),
        (1280, false),
        (1280, true),
        (2560, true),
    ] {
        let view = View {
            size: (width, 1000),
            dark,
            seconds: 5,
            ..View::default()
        };
        let found = probe(
            &pair.server,
            watched.address,
            view,
            include_str!("probe.js"),
        )?;
        let how = format!("{width} pixels, dark: {dark}: {found}");
        assert_eq!(found["width"], width, "{how}");
        assert_eq!(found["scrolls"], width, "it scrolls sideways: {how}");
        for wrong in [
            "outside",
            "pale",
            "faint",
            "alike",
            "unreachable",
            "unlabelled",
            "elsewhere",
        ] {
            assert_eq!(found[wrong], Value::Array(Vec::new()), "{wrong}: {how}");
        }
        assert_eq!(found["unscoped"], 0, "{how}");
        let shades = found["shades"].as_array().context("no shades")?;
        let shades: Vec<_> = shades.iter().filter_map(Value::as_f64).collect();
        assert_eq!(shades.len(), 4, "{how}");
        // Each stands out from the one before.
        assert!(
            shades.windows(2).all(|it| it[1] > 1.3 * it[0]),
            "the shades are not in order: {how}"
        );
        let back = found["back"].as_str().context("no colour")?;
        let is_dark = back.starts_with("rgb(20,");
        assert_eq!(is_dark, dark, "{back}");
        assert!(found["usable"].as_u64() >= Some(20), "{how}");
        assert!(found["pictures"].as_u64() >= Some(5), "{how}");
        let headings = found["headings"].as_array().context("no headings")?;
        assert_eq!(headings[1], "Traffic", "the traffic comes first");
        assert_eq!(headings.last(), Some(&Value::from("Wheels")));
    }
    drop(traffic.busy);
    Ok(())
}

/// The chart says what was at the time under the pointer, also when it is drawn again meanwhile.
#[test]
fn a_chart_says_what_is_under_the_pointer() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "60s,close=1s"])?;
    let traffic = Traffic::start(&pair)?;
    // The history has a point each five seconds.
    thread::sleep(Duration::from_secs(6));
    let view = View {
        seconds: 8,
        ..View::default()
    };
    let steps = probe(
        &pair.server,
        watched.address,
        view,
        include_str!("pointer.js"),
    )?;
    let [before, early, late, later, after] = &steps.as_array().context("no list")?[..] else {
        anyhow::bail!("{steps}");
    };
    // The chart is longer than what there is to show: at its left end there is nothing.
    for step in [before, early, after] {
        assert_eq!(step["line"], 0, "{steps}");
        assert_eq!(step["time"], Value::Null, "{steps}");
    }
    for step in [late, later] {
        assert_eq!(step["line"], 1, "{steps}");
        let time = step["time"].as_str().context("no time")?;
        assert_eq!(time.len(), "12:34:56".len(), "{steps}");
        let legend = step["legend"].as_str().context("no legend")?;
        assert!(legend.contains("established "), "{steps}");
    }
    drop(traffic.busy);
    Ok(())
}

#[test]
fn a_search_finds_and_says_what_is_wrong_and_where() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "60s,close=1s"])?;
    let traffic = Traffic::start(&pair)?;
    let ended = expiries(&watched.twheel, traffic.reset)?;
    let view = View {
        seconds: 20,
        ..View::default()
    };
    let steps = probe(
        &pair.server,
        watched.address,
        view,
        include_str!("search.js"),
    )?;
    let ends: Vec<_> = ended.iter().rev().map(|it| it.dst.to_string()).collect();
    assert_eq!(steps["first"], Value::from(ends.clone()), "{steps}");
    // What is typed is no search yet.
    let typed = serde_json::json!({
        "said": "", "found": "The latest 3 ends.", "rows": ends.clone(), "hash": "",
    });
    assert_eq!(steps["typed"], typed, "{steps}");
    let wrong = &steps["wrong"];
    assert_eq!(wrong["told"], 1, "it is said again and again: {steps}");
    let said = wrong["said"].as_str().context("nothing is said")?;
    let mut lines = said.lines();
    let first = lines.next().unwrap_or_default();
    ensure!(first.starts_with("filter, column 20: "), "{said}");
    assert_eq!(lines.next(), Some("  reason == idle and prot == tcp"));
    assert_eq!(lines.next(), Some("                     ^"));
    assert_eq!(wrong["invalid"], "true");
    assert_eq!(wrong["rows"], Value::Array(Vec::new()));
    assert_eq!(
        wrong["link"], "live",
        "a wrong filter is no lost connection"
    );
    assert_eq!(steps["none"]["said"], "");
    let found = "0 of the latest 3 ends match. Earlier ones: twheel expired.";
    assert_eq!(steps["none"]["found"], found);
    let filter = format!("proto == tcp and dport == {PORT}");
    assert_eq!(steps["chosen"]["filter"], *filter);
    assert_eq!(steps["chosen"]["rows"], Value::from(ends));
    assert_eq!(steps["chosen"]["kept"], true, "the focus was lost");
    assert_eq!(steps["sorted"], serde_json::json!(["ends, 5 min"]));

    // The address that the page has then finds the same.
    let hash = steps["chosen"]["hash"].as_str().context("no hash")?;
    let path = format!("/{hash}");
    let view = View {
        path: &path,
        ..View::default()
    };
    let shown = browse(&pair.server, watched.address, view)?;
    assert_eq!(rows(&shown, "latest").len(), ended.len());
    ensure!(crate::browser::said(&shown, "found").starts_with("3 of the latest 3 ends match"));
    drop(traffic.busy);
    Ok(())
}

/// Traffic that changes: over one connection, and new ones that are closed, reset, or left.
fn vary(pair: &Pair, is_over: &AtomicBool) -> Result<()> {
    let mut pouring = pair.connect(Family::V4)?;
    let mut left = Vec::new();
    for round in 0u32.. {
        if is_over.load(Ordering::Relaxed) {
            return Ok(());
        }
        let wave = (6.0 + 4.0 * (f64::from(round) / 40.0).sin()) as u32;
        let (data, mut read) = (vec![0; 8000 * wave as usize], vec![0; 8000 * wave as usize]);
        pouring.client.write_all(&data)?;
        std::io::Read::read_exact(&mut pouring.server, &mut read)?;
        for (number, connection) in pair.connect_some(wave as usize)?.into_iter().enumerate() {
            match number % 4 {
                0 => connection.reset()?,
                1 if round % 3 == 0 => left.push(connection),
                _ => connection.close()?,
            }
        }
        if round % 10 == 0 {
            pair.half_open(Family::V4)?;
        }
        if left.len() > 60 {
            left.drain(..20);
        }
        thread::sleep(millis(150));
    }
    Ok(())
}

#[test]
fn a_page_begins_with_what_was_before_it() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let timeouts = "60s,time_wait=20s,close=2s,established=40s,syn_sent=10s";
    let watched = Watched::start(&pair.server, &["--timeout", timeouts, "--accounting"])?;
    // Points of five seconds are made before anybody looks. Pictures show more of them.
    let seconds = match std::env::var_os("TWHEEL_SCREENSHOT") {
        Some(_) => 150,
        None => 17,
    };
    let is_over = AtomicBool::new(false);
    thread::scope(|scope| {
        let traffic = scope.spawn(|| vary(&pair, &is_over));
        thread::sleep(Duration::from_secs(seconds));
        let shown = see_the_past(&pair, &watched);
        is_over.store(true, Ordering::Relaxed);
        traffic
            .join()
            .map_err(|_| anyhow::anyhow!("no traffic"))??;
        shown
    })
}

/// The page, which has time for one answer, shows what was before it.
fn see_the_past(pair: &Pair, watched: &Watched<'_>) -> Result<()> {
    for (picture, size, dark) in [
        ("page.png", (1280, 1900), false),
        ("page-dark.png", (1280, 1900), true),
        ("page-400.png", (400, 3500), false),
    ] {
        let view = View {
            seconds: 1,
            picture: Some(picture),
            size,
            dark,
            ..View::default()
        };
        let shown = browse(&pair.server, watched.address, view)?;
        for chart in ["bits", "flows"] {
            let of = between(&shown, &format!("id=\"chart-{chart}\""), "</figure>");
            let paths = between(of[0], " d=\"M", "\"");
            assert_eq!(paths.len(), 2, "{of:?}");
            let points = paths[0].matches('L').count() + 1;
            assert!(points >= 3, "{points} points: {paths:?}");
        }
        let states = between(&shown, "id=\"chart-states\"", "</figure>");
        let polygon = between(states[0], "<polygon class=\"c0\" points=\"", "\"");
        assert_eq!(polygon.len(), 1, "{states:?}");
        let reasons = said(&shown, "chart-reasons");
        ensure!(reasons.contains("reset"), "{reasons}");
    }
    Ok(())
}

#[test]
fn what_strangers_say_is_no_markup() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let rule = format!(
        "[[rule]]\nname = \"markup\"\ndport = {PORT}\ntimeouts = {{ established = \"1s\" }}\n"
    );
    let policy = PolicyFile::new("markup", &rule)?;
    let watched = Watched::start(&pair.server, &["--policy", policy.path()])?;
    // A policy cannot contain such a name: somebody has written it into the map.
    let instance = pair.server.instances()?.pop().context("no instance")?;
    let map = Map::Array(MapData::from_pin(instance.join("NAMES"))?);
    let mut names = Array::<_, [u8; NAME_BYTES]>::try_from(map)?;
    let markup = "<img src=x onerror=\"document.title=1\"><script>alert(1)</script>";
    let mut name = [0; NAME_BYTES];
    name[..markup.len()].copy_from_slice(markup.as_bytes());
    let number = (0..100).find(|number| {
        names
            .get(number, 0)
            .is_ok_and(|it| it.starts_with(b"markup"))
    });
    names.set(number.context("no rule")?, name, 0)?;
    let _connection = pair.connect_some(1)?;
    let ended = expiries(&watched.twheel, 1)?;
    assert_eq!(ended[0].rule.as_deref(), Some(markup));
    let host = fs::read_to_string("/proc/sys/kernel/hostname")?;
    // Once among the ends, and once as a filter, in an address that a stranger has passed on.
    for path in [
        "/",
        "/#filter=%3Cimg%20src%3Dx%20onerror%3D%22document.title%3D1%22%3E",
    ] {
        let view = View {
            path,
            ..View::default()
        };
        let shown = browse(&pair.server, watched.address, view)?;
        ensure!(shown.contains("&lt;img src=x onerror="), "{shown}");
        ensure!(!shown.contains("<img"), "{shown}");
        ensure!(!shown.contains("<script>"), "{shown}");
        let title = format!("<title>{}: twheel {SERVER}</title>", host.trim());
        ensure!(shown.contains(&title), "{shown}");
    }
    Ok(())
}

#[test]
fn the_page_says_when_the_connection_is_lost() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &[])?;
    let _connections = pair.connect_some(2)?;
    thread::sleep(Duration::from_secs(6));
    let asked = AtomicU32::new(0);
    // Only the first request for the status is answered.
    let does = |request: &str| {
        let is_status = request.starts_with("GET /api/status");
        match is_status && asked.fetch_add(1, Ordering::Relaxed) > 0 {
            true => Does::Drop,
            false => Does::Pass,
        }
    };
    let shown = through(&pair.server, watched.address, does, |address| {
        let view = View {
            seconds: 5,
            ..View::default()
        };
        browse(&pair.server, address, view)
    })?;
    ensure!(shown.contains("<body class=\"lost\">"), "{shown}");
    let lost = "connection lost: what you see is old; trying again";
    assert_eq!(said(&shown, "link"), lost);
    let states = said(&shown, "chart-states");
    ensure!(
        states.contains("established 2"),
        "the page no longer shows what it showed before: {shown}"
    );
    Ok(())
}
