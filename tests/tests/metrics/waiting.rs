//! Requests do not delay the run, and the run waits for no client.

use std::{
    io::{BufRead, BufReader, Write},
    process::Stdio,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::fcntl::{FcntlArg, fcntl};
use twheel_holdup::Watch;
use twheel_tests::{
    netns::require_root,
    pair::{CLIENT, Pair, SERVER},
};

use crate::{Numbers, Watched, address, connect_to, expiries, millis, reply};

#[test]
fn nobody_asks_and_nobody_wakes() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let watched = Watched::start(&pair.server, &["--timeout", "500ms"])?;
    let _connections = pair.connect_some(2)?;
    expiries(&watched.twheel, 2)?;
    for path in ["/metrics", "/api/status", "/"] {
        assert_eq!(watched.get(path)?.code, 200);
    }
    // The thread that has read the table waits for another request for a while, and then ends.
    thread::sleep(Duration::from_secs(12));
    let before = watched.twheel.switches()?;
    thread::sleep(Duration::from_secs(3));
    assert_eq!(watched.twheel.switches()?, before, "a thread has run");
    assert_eq!(watched.get("/healthz")?.code, 200);
    assert_ne!(
        watched.twheel.switches()?,
        before,
        "this test does not notice threads that run"
    );
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
        thread::sleep(millis(1500));
        let ask = || {
            let socket = connect_to(&pair.server, address)?;
            reply(
                socket,
                &format!("GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n"),
            )
        };
        let numbers = Numbers::read(&ask()?.body)?;
        let reported = numbers.sum("twheel_ended_flows_total");
        ensure!(
            numbers.value("twheel_expired_total", &[]) == 100.0 && reported < 100.0,
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
    let begun = Instant::now();
    let status = watched.get("/api/status")?;
    let page = begun.elapsed();
    println!(
        "A scrape at {FLOWS} flows: {:?} ({:?}–{:?}), with none {:?} ({:?}–{:?}); what the page asks for, which reads the \
         table: {page:?}, {} bytes",
        times[25],
        times[0],
        times[50],
        of_none[25],
        of_none[0],
        of_none[50],
        status.body.len()
    );
    assert!(times[25] < SCRAPE + held_up, "{times:?}, {held_up:?}");
    assert!(
        2 * times[25] <= 3 * of_none[25] + held_up,
        "with a million {times:?}, with none {of_none:?}"
    );
    let status: serde_json::Value = serde_json::from_str(&status.body)?;
    let states = status["states"]["unreplied"].as_f64().unwrap_or_default();
    assert!(states >= f64::from(FLOWS) * 0.999, "{}", status["states"]);
    Ok(())
}
