//! Requests do not delay the run, and the run waits for no client.

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead, BufReader, Write},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::fcntl::{FcntlArg, fcntl};
use serde_json::Value;
use twheel_holdup::Watch;
use twheel_tests::{
    netns::{PATIENCE, require_root},
    pair::{CLIENT, Pair, SERVER},
};

use crate::{Numbers, Watched, address, connect_to, expiries, millis, reply};

/// How often the threads have waited: the one that reads what the page shows, and the others.
fn switches(watched: &Watched<'_>) -> Result<(u64, BTreeMap<String, u64>)> {
    let mut others = watched.twheel.switches()?;
    let page = others.keys().find(|it| it.ends_with(" twheel-page"));
    let page = page.context("no thread for the page")?.clone();
    Ok((others.remove(&page).unwrap_or_default(), others))
}

#[test]
fn nobody_asks_and_only_the_history_is_kept() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "500ms"])?;
    let _connections = pair.connect_some(2)?;
    expiries(&watched.twheel, 2)?;
    for path in ["/metrics", "/api/status", "/api/ended", "/api/history", "/"] {
        assert_eq!(watched.get(path)?.code, 200);
    }
    thread::sleep(Duration::from_secs(3));
    let (before, others) = switches(&watched)?;
    thread::sleep(Duration::from_secs(11));
    let (after, others_after) = switches(&watched)?;
    assert_eq!(others_after, others, "a thread has run");
    // Once in 5 s; each time it may wait for more than one thing.
    let woken = after - before;
    assert!((2..=12).contains(&woken), "{woken} times in 11 s");
    assert_eq!(watched.get("/healthz")?.code, 200);
    // They have answered before they wait again.
    let end = Instant::now() + PATIENCE;
    while switches(&watched)?.1 == others {
        ensure!(
            Instant::now() < end,
            "this test does not notice threads that run"
        );
        thread::sleep(millis(10));
    }
    Ok(())
}

#[test]
fn a_blocked_output_keeps_nobody_from_asking() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = [
        "run",
        "--iface",
        SERVER,
        "--json",
        "--metrics",
        "0",
        "--timeout",
        "500ms",
    ];
    let mut child = pair
        .server
        .twheel(&args)?
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()?;
    let result = (|| -> Result<()> {
        let unread = child.stdout.take().context("no stdout")?;
        fcntl(&unread, FcntlArg::F_SETPIPE_SZ(4096))?;
        let mut stderr = String::new();
        let mut errors = BufReader::new(child.stderr.take().context("no stderr")?);
        while !stderr.contains("page: ") {
            ensure!(
                errors.read_line(&mut stderr)? > 0,
                "the run has ended: {stderr}"
            );
        }
        let address = address(&stderr)?;
        // About 20 kB, of which the pipe and the buffer in front hold 12.
        let _connections = pair.connect_some(100)?;
        let ask = || {
            let socket = connect_to(&pair.server, address)?;
            reply(
                socket,
                &format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n"),
            )
        };
        let expired = |numbers: &Numbers| numbers.value("twheel_expired_total", &[]);
        let end = Instant::now() + PATIENCE;
        thread::sleep(millis(1500));
        let mut numbers = Numbers::read(&ask()?.body)?;
        while expired(&numbers) < 100.0 && Instant::now() < end {
            thread::sleep(millis(100));
            numbers = Numbers::read(&ask()?.body)?;
        }
        let reported = numbers.sum("twheel_ended_flows_total");
        ensure!(
            expired(&numbers) == 100.0 && reported < 100.0,
            "{reported} flows are reported: the output is not blocked"
        );
        drop(unread);
        Ok(())
    })();
    let _ = child.kill();
    let _ = child.wait();
    result
}

#[test]
fn callers_who_say_nothing_are_sent_away() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "500ms"])?;
    let begun = Instant::now();
    // More than are accepted at once.
    let mut silent: Vec<_> = (0..100).map(|_| watched.connect()).collect::<Result<_>>()?;
    write!(silent[0], "GET /metrics HTTP/1.1\r\nHost")?;
    let _connections = pair.connect_some(3)?;
    assert_eq!(
        expiries(&watched.twheel, 3)?.len(),
        3,
        "the output waited for the clients"
    );
    drop(silent.split_off(64));
    assert_eq!(watched.get("/healthz")?.code, 200);
    let waited = begun.elapsed();
    assert!((millis(900)..millis(6_000)).contains(&waited), "{waited:?}");
    Ok(())
}

/// The longest time that a scrape may take: docs/metrics.md.
const SCRAPE: Duration = Duration::from_micros(1_500);
/// The longest time that the page's data may take: docs/metrics.md.
const PAGE: Duration = Duration::from_millis(5);

/// The most CPU time that is used each second while a page is open: docs/metrics.md.
const LOOK: Duration = Duration::from_millis(100);

/// The CPU time of the thread that reads what the page shows.
fn page_time(watched: &Watched<'_>) -> Result<Duration> {
    for task in fs::read_dir(format!("/proc/{}/task", watched.twheel.pid()))? {
        let task = task?.path();
        if fs::read_to_string(task.join("comm"))? == "twheel-page\n" {
            let times = fs::read_to_string(task.join("schedstat"))?;
            let time = times.split(' ').next().context("no time")?;
            return Ok(Duration::from_nanos(time.parse()?));
        }
    }
    bail!("no thread for the page")
}

/// How long a scrape takes, and its numbers.
fn timed(watched: &Watched<'_>) -> Result<(Duration, Numbers)> {
    let socket = watched.connect()?;
    let asked = Instant::now();
    let request = format!("GET /metrics HTTP/1.1\r\nHost: {}\r\n\r\n", watched.address);
    let body = reply(socket, &request)?.body;
    Ok((asked.elapsed(), Numbers::read(&body)?))
}

#[test]
fn a_million_flows_are_no_more_to_scrape_than_none() -> Result<()> {
    require_root();
    const FLOWS: u32 = 1_000_000;
    let pair = Pair::new()?;
    let options = ["--max-flows", "1100000", "--timeout", "1h"];
    let watched = Watched::start(&pair.server, &options)?;
    let empty = Watched::start_on(&pair.client, CLIENT, &options)?;
    pair.server.begin_flows(SERVER, FLOWS)?;
    let (mut times, mut of_none) = (Vec::new(), Vec::new());
    let watch = Watch::start();
    // Alternately, so that disturbances hit both alike.
    for _ in 0..51 {
        let (time, numbers) = timed(&watched)?;
        times.push(time);
        let live = numbers.value("twheel_flows", &[]);
        assert!(
            (f64::from(FLOWS) * 0.999..=f64::from(FLOWS)).contains(&live),
            "{live} flows"
        );
        let (time, numbers) = timed(&empty)?;
        of_none.push(time);
        assert_eq!(numbers.value("twheel_flows", &[]), 0.0);
    }
    let held_up = watch.stop();
    times.sort();
    of_none.sort();
    // A page that is open: it asks once a second.
    let mut shown = Vec::new();
    let before = page_time(&watched)?;
    let passed = |status: &Value| {
        let services = status["talkers"]["services"].as_array();
        services.is_some_and(|it| it.iter().any(|it| it["name"] == "tcp/80"))
    };
    let watch_page = Watch::start();
    loop {
        let socket = watched.connect()?;
        let asked = Instant::now();
        let request = format!(
            "GET /api/status HTTP/1.1\r\nHost: {}\r\n\r\n",
            watched.address
        );
        let body = reply(socket, &request)?.body;
        shown.push((asked.elapsed(), body));
        let (_, body) = shown.last().context("nothing")?;
        if shown.len() >= 21 && passed(&serde_json::from_str(body)?) {
            break;
        }
        assert!(shown.len() < 60, "no pass over the table ends: {body}");
        thread::sleep(millis(1000));
    }
    let page_held_up = watch_page.stop();
    let look = (page_time(&watched)? - before) / shown.len() as u32;
    let status: Value = serde_json::from_str(&shown.last().context("nothing")?.1)?;
    let mut page: Vec<_> = shown.iter().map(|(took, _)| *took).collect();
    page.sort();
    let of = |times: &[Duration]| {
        let last = times.len() - 1;
        format!("{:?} ({:?}–{:?})", times[last / 2], times[0], times[last])
    };
    println!(
        "A scrape at {FLOWS} flows: {}, with none {}; what the page asks for: {}, {} bytes, \
         and {look:?} of CPU time to read it",
        of(&times),
        of(&of_none),
        of(&page),
        shown[0].1.len()
    );
    assert!(times[25] < SCRAPE + held_up, "{times:?}, {held_up:?}");
    assert!(
        2 * times[25] <= 3 * of_none[25] + held_up,
        "with a million {times:?}, with none {of_none:?}"
    );
    assert!(page[page.len() / 2] < PAGE, "{page:?}");
    assert!(
        page[page.len() - 1] < PAGE + page_held_up,
        "{page:?}, {page_held_up:?}"
    );
    assert!(look < LOOK, "{look:?} of CPU time each second");
    // All flows are alike, so the estimate is exact; so are the sums of a pass.
    let live = status["flows"].as_u64().context("no flows")?;
    assert_eq!(status["states"], serde_json::json!({"unreplied": live}));
    assert!(
        status["estimated_from"].as_u64() < Some(100_000),
        "{status}"
    );
    let services = status["talkers"]["services"].as_array();
    let service = &services.context("no services")?[0];
    assert_eq!(service["flows"], live, "{service}");
    let sources = status["talkers"]["sources"].as_array();
    assert_eq!(sources.context("no sources")?.len(), 10);
    Ok(())
}
