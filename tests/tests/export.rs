//! Events that leave the host, as they come, whoever dies on the way.

use std::{
    collections::BTreeSet,
    io::{BufRead, BufReader},
    net::TcpListener,
    process::{Command, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    is_long,
    netns::{PATIENCE, require_root},
    pair::{Pair, SERVER},
    process::Process,
    running::{Twheel, once},
    schema,
};

const ALL: &str = "end,rto,reap,run";

fn printed(pair: &Pair, args: &[&str]) -> Result<Vec<String>> {
    let ended = pair.server.twheel_once(args)?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    Ok(ended.lines.into_iter().map(|line| line.text).collect())
}

/// The arguments of a run whose flows expire soon, and whose history is here.
fn run(history: &Directory) -> Vec<&str> {
    let args = ["--iface", SERVER, "--timeout", "300ms", "--json"];
    [&args[..], &["--history", history.path()]].concat()
}

/// The events of these kinds in a history.
fn past(pair: &Pair, history: &Directory, kinds: &str) -> Result<Vec<String>> {
    let args = ["expired", "--json", "--events", kinds, "--iface", SERVER];
    printed(pair, &[&args[..], &["--history", history.path()]].concat())
}

/// Exports a history as lines of JSON. The position is kept beside it.
fn export(pair: &Pair, history: &Directory, to: &str, more: &[&str]) -> Result<Command> {
    let state = history.file("state");
    let args = ["export", "json", "--to", to, "--iface", SERVER];
    let args = [&args[..], &["--state", &state, "--history", history.path()]].concat();
    pair.server.twheel(&[&args[..], more].concat())
}

/// An event's instance and number.
fn which(line: &str) -> Result<(String, u64)> {
    let event: Value = serde_json::from_str(line).with_context(|| format!("no JSON: {line}"))?;
    let instance = event["instance"].as_str().context("no instance")?;
    Ok((
        instance.to_owned(),
        event["seq"].as_u64().context("no seq")?,
    ))
}

/// A collector that stores whole lines, and at times goes away for a moment.
struct Collector {
    stored: Arc<Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Collector {
    /// `listener` has been made in the exporter's network namespace. `lines`: after so many the first
    /// connection is closed, without reading what has arrived; after twice as many the second.
    fn start(listener: TcpListener, lines: usize) -> Self {
        let (stored, stop) = (
            Arc::<Mutex<Vec<String>>>::default(),
            Arc::<AtomicBool>::default(),
        );
        let (into, is_over) = (stored.clone(), stop.clone());
        let thread = thread::spawn(move || {
            listener.set_nonblocking(true).unwrap();
            let mut most = 0_usize;
            while !is_over.load(Relaxed) {
                let Ok((stream, _)) = listener.accept() else {
                    thread::sleep(Duration::from_millis(5));
                    continue;
                };
                most = most.saturating_add(lines);
                stream.set_nonblocking(false).unwrap();
                stream
                    .set_read_timeout(Some(Duration::from_millis(100)))
                    .unwrap();
                let mut reader = BufReader::new(stream);
                let (mut line, mut left) = (String::new(), most);
                while left > 0 && !is_over.load(Relaxed) {
                    match reader.read_line(&mut line) {
                        Ok(0) => break,
                        Ok(_) if line.ends_with('\n') => {
                            into.lock().unwrap().push(line.trim_end().to_owned());
                            line.clear();
                            left -= 1;
                        }
                        // Half of a line, or nothing for now.
                        Ok(_) => {}
                        Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                        Err(_) => break,
                    }
                }
            }
        });
        Self {
            stored,
            stop,
            thread: Some(thread),
        }
    }

    fn stored(&self) -> Vec<String> {
        self.stored.lock().unwrap().clone()
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

#[test]
fn whoever_is_killed_each_event_arrives_and_its_number_tells_what_came_twice() -> Result<()> {
    require_root();
    let kills = if is_long() { 100 } else { 12 };
    let history = Directory::new("export")?;
    let pair = Pair::new()?;
    let args = run(&history);
    let twheel = Twheel::start(&pair.server, &args)?;
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind("127.0.0.1:0")?))?;
    let to = format!("tcp:{}", listener.local_addr()?);
    let collector = Collector::start(listener, 700);

    for round in 0..kills {
        let mut exporter = export(&pair, &history, &to, &[])?
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        pair.server
            .begin_these(SERVER, 200 * round..200 * (round + 1))?;
        thread::sleep(Duration::from_millis(u64::from(50 + 97 * (round % 7))));
        exporter.kill()?;
        exporter.wait()?;
    }
    let flows = 200 * kills as usize;
    let end = Instant::now() + PATIENCE;
    pair.server.await_expired(flows as u64, end)?;
    let told = loop {
        let told = past(&pair, &history, ALL)?;
        if told
            .iter()
            .filter(|it| it.contains("\"event\":\"end\""))
            .count()
            == flows
        {
            break told;
        }
        ensure!(Instant::now() < end, "{} of {flows}", told.len());
        thread::sleep(Duration::from_millis(100));
    };
    let mut exporter = export(&pair, &history, &to, &[])?
        .stderr(Stdio::null())
        .spawn()?;
    let wanted: BTreeSet<_> = told.iter().cloned().collect();
    let stored = loop {
        let stored: BTreeSet<_> = collector.stored().into_iter().collect();
        if stored.len() >= wanted.len() {
            break stored;
        }
        ensure!(
            Instant::now() < end + PATIENCE,
            "{} of {}",
            stored.len(),
            wanted.len()
        );
        thread::sleep(Duration::from_millis(100));
    };
    exporter.kill()?;
    exporter.wait()?;
    let differs: Vec<_> = stored.symmetric_difference(&wanted).take(10).collect();
    assert!(
        differs.is_empty(),
        "what was stored is what the history has: {differs:#?}"
    );
    let numbers = stored
        .iter()
        .map(|line| which(line))
        .collect::<Result<BTreeSet<_>>>()?;
    assert_eq!(numbers.len(), stored.len(), "two events with one number");
    for line in &stored {
        schema::check(line)?;
    }
    println!(
        "{} lines for {} events",
        collector.stored().len(),
        stored.len()
    );
    twheel.kill()?;
    Ok(())
}

#[test]
fn a_file_has_what_the_history_has_once() -> Result<()> {
    require_root();
    let history = Directory::new("export-file")?;
    let pair = Pair::new()?;
    let args = run(&history);
    let (file, state) = (history.file("lines"), history.file("state"));
    let export = || once(export(&pair, &history, &file, &["--once"])?);
    for _ in 0..3 {
        let twheel = Twheel::start(&pair.server, &args)?;
        pair.server.begin_flows(SERVER, 50)?;
        twheel.ends(50)?;
        assert_eq!(twheel.stop()?.code(), Some(0));
        let ended = export()?;
        assert_eq!((ended.code(), ended.lines.len()), (Some(0), 0), "{ended:?}");
        let lines = std::fs::read_to_string(&file)?;
        assert!(lines.lines().eq(past(&pair, &history, ALL)?), "{lines}");
    }
    // Whoever removes the history begins anew.
    std::fs::write(&state, "{\"segment\":9,\"record\":1}")?;
    std::fs::remove_file(&file)?;
    let ended = export()?;
    assert!(
        ended.stderr.contains("sending it from its beginning"),
        "{ended:?}"
    );
    assert!(
        std::fs::read_to_string(&file)?
            .lines()
            .eq(past(&pair, &history, ALL)?)
    );
    Ok(())
}

#[test]
fn an_export_says_what_is_wrong_and_keeps_trying() -> Result<()> {
    require_root();
    let history = Directory::new("export-bad")?;
    let pair = Pair::new()?;
    let export = |to: &str, state: &str| -> Vec<String> {
        [
            "export",
            "json",
            "--to",
            to,
            "--state",
            state,
            "--once",
            "--history",
            history.path(),
        ]
        .map(str::to_owned)
        .to_vec()
    };
    let once = |args: &[String]| {
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        pair.server.twheel_once(&args)
    };
    let state = format!("{}/state", history.path());
    let none = once(&export("/tmp/nothing", &state))?;
    assert_eq!(none.code(), Some(6), "{none:?}");
    let bad = once(&export("tcp:host", &state))?;
    assert_eq!(
        (bad.code(), bad.stderr.contains("give a host and a port")),
        (Some(2), true),
        "{bad:?}"
    );

    let args = run(&history);
    Twheel::start(&pair.server, &args)?.stop()?;
    std::fs::write(&state, "nonsense")?;
    let refused = once(&export("/tmp/nothing", &state))?;
    assert_eq!(refused.code(), Some(1), "{refused:?}");
    assert!(
        refused.stderr.contains("is not the position of an export"),
        "{refused:?}"
    );
    std::fs::remove_file(&state)?;
    let nowhere = once(&export("/nowhere/lines", &state))?;
    assert!(
        nowhere.stderr.contains("cannot open /nowhere/lines"),
        "{nowhere:?}"
    );

    // A collector that comes later.
    let port = pair
        .server
        .enter(|| Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?))?;
    let args = export(&format!("tcp:{port}"), &state);
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let exporter = pair.server.twheel(&args)?;
    let mut exporter = Process::start(exporter, history.0.join("said"))?;
    exporter.await_text("trying again until it is there")?;
    let listener = pair.server.enter(|| Ok(TcpListener::bind(port)?))?;
    let collector = Collector::start(listener, usize::MAX);
    assert_eq!(exporter.ended(PATIENCE)?.code(), Some(0));
    let said = exporter.log();
    assert!(
        said.matches("trying again until it is there").count() == 1,
        "{said}"
    );
    let end = Instant::now() + PATIENCE;
    while collector.stored().len() < 2 {
        ensure!(Instant::now() < end, "{:?}", collector.stored());
        thread::sleep(Duration::from_millis(20));
    }
    Ok(())
}

/// A history that turns over while nobody sends it: what is gone is said, and all that is left
/// arrives.
#[test]
fn what_the_history_dropped_before_it_was_sent_is_said() -> Result<()> {
    require_root();
    let history = Directory::new("export-gone")?;
    let pair = Pair::new()?;
    let mut args = vec!["--iface", SERVER, "--timeout", "300ms", "--json"];
    let least = twheel::history::LEAST_BYTES.to_string();
    args.extend(["--history", history.path(), "--history-size", &least]);
    let twheel = Twheel::start_muted(&pair.server, &args)?;
    let file = history.file("lines");
    let export = || once(export(&pair, &history, &file, &["--once"])?);
    // Eight segments of a thousand events each.
    for (flows, drops) in [(0..500, false), (500..20_500, true)] {
        let last = u64::from(flows.end);
        pair.server.begin_these(SERVER, flows)?;
        let end = Instant::now() + PATIENCE;
        while pair.server.counter("expired")? < last {
            ensure!(Instant::now() < end, "the flows do not expire");
            thread::sleep(Duration::from_millis(100));
        }
        // The history is written a moment later.
        thread::sleep(Duration::from_secs(1));
        let ended = export()?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        let said = "segments of the history were removed before they were sent";
        ensure!(ended.stderr.contains(said) == drops, "{}", ended.stderr);
    }
    twheel.stop()?;
    let ended = export()?;
    ensure!(
        ended.code() == Some(0) && ended.lines.is_empty(),
        "{ended:?}"
    );
    let sent = std::fs::read_to_string(&file)?;
    let sent: BTreeSet<_> = sent.lines().map(which).collect::<Result<_>>()?;
    let left = past(&pair, &history, ALL)?;
    ensure!(left.len() > 5_000, "{}", left.len());
    for line in &left {
        ensure!(sent.contains(&which(line)?), "not sent: {line}");
    }
    // One gap, where the segments are missing.
    let numbers: Vec<_> = sent.iter().map(|it| it.1).collect();
    let gaps = numbers.windows(2).filter(|it| it[1] != it[0] + 1).count();
    assert_eq!(gaps, 1, "{} lines", sent.len());
    Ok(())
}

/// Many flows that end at once (in the long run a million): the export is behind by little, takes
/// less than a CPU, and holds nothing up.
#[test]
fn an_export_keeps_up_with_many_ends() -> Result<()> {
    require_root();
    let flows: u32 = if is_long() { 1_000_000 } else { 50_000 };
    let history = Directory::new("export-many")?;
    let pair = Pair::new()?;
    let most = (flows + flows / 4).to_string();
    let mut args = vec!["--iface", SERVER, "--timeout", "1s", "--max-flows", &most];
    args.extend(["--history", history.path(), "--history-size", "1GiB"]);
    let twheel = Twheel::start_muted(&pair.server, &args)?;
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind("127.0.0.1:0")?))?;
    let to = format!("tcp:{}", listener.local_addr()?);
    let mut exporter = export(&pair, &history, &to, &[])?
        .stdin(Stdio::null())
        .stderr(Stdio::null())
        .spawn()?;
    let (stream, _) = listener.accept()?;
    let reading = thread::spawn(move || -> Result<(u64, Option<Instant>)> {
        let mut ends = 0;
        for line in BufReader::new(stream).lines() {
            ends += u64::from(line?.contains("\"event\":\"end\""));
            if ends == u64::from(flows) {
                return Ok((ends, Some(Instant::now())));
            }
        }
        Ok((ends, None))
    });
    let begun = Instant::now();
    pair.server.begin_flows(SERVER, flows)?;
    let end = Instant::now() + PATIENCE + Duration::from_secs(60);
    while pair.server.counter("expired")? < u64::from(flows) {
        ensure!(Instant::now() < end, "the flows do not expire");
        thread::sleep(Duration::from_millis(20));
    }
    let (expired, took) = (Instant::now(), begun.elapsed());
    let (ends, arrived) = reading.join().expect("the reader panicked")?;
    let behind = arrived
        .with_context(|| format!("{ends} of {flows} arrived"))?
        .saturating_duration_since(expired);
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", exporter.id()))?;
    let times: Vec<_> = stat.rsplit(')').next().unwrap_or("").split(' ').collect();
    let ticks = times[12].parse::<u64>()? + times[13].parse::<u64>()?;
    exporter.kill()?;
    exporter.wait()?;
    ensure!(pair.server.counter("events_lost")? == 0);
    ensure!(pair.server.counter("history_lost")? == 0);
    println!(
        "{flows} flows began and ended in {took:?}; the export was {behind:?} behind and took {} ms of CPU time",
        10 * ticks
    );
    ensure!(behind < Duration::from_secs(5), "{behind:?} behind");
    twheel.stop()?;
    Ok(())
}

#[test]
fn pipes_and_devices_are_files_too() -> Result<()> {
    require_root();
    let history = Directory::new("export-special")?;
    let pair = Pair::new()?;
    let args = run(&history);
    let twheel = Twheel::start(&pair.server, &args)?;
    pair.server.begin_flows(SERVER, 50)?;
    twheel.ends(50)?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    let past = past(&pair, &history, "end")?;
    assert_eq!(past.len(), 50);

    let export = |to: &str, name: &str| -> Vec<String> {
        let state = history.file(name);
        let args = [
            "export", "json", "--to", to, "--iface", SERVER, "--events", "end",
        ];
        let args = [&args[..], &["--state", &state, "--history", history.path()]].concat();
        args.into_iter().map(str::to_owned).collect()
    };
    let once = |to: &str, name: &str| {
        let args = export(to, name);
        let args: Vec<_> = args.iter().map(String::as_str).chain(["--once"]).collect();
        let ended = pair.server.twheel_once(&args)?;
        ensure!(
            ended.code() == Some(0) && ended.stderr.is_empty(),
            "{ended:?}"
        );
        let lines = ended.lines.into_iter().map(|line| line.text);
        anyhow::Ok(lines.collect::<Vec<_>>())
    };
    assert!(once("/dev/null", "null")?.is_empty());
    assert_eq!(once("/dev/stdout", "stdout")?, past);
    let fifo = history.file("fifo");
    nix::unistd::mkfifo(&*fifo, nix::sys::stat::Mode::S_IRWXU)?;
    let path = fifo.clone();
    let reader = thread::spawn(move || std::fs::read_to_string(path));
    assert!(once(&fifo, "fifo-state")?.is_empty());
    let read = reader.join().expect("a panic")?;
    assert!(read.lines().eq(&past), "{read}");
    // Nothing is sent twice.
    assert!(once("/dev/stdout", "stdout")?.is_empty());

    // A reader that has read enough ends the export, as that of any command does.
    let path = fifo.clone();
    let reader = thread::spawn(move || -> Result<String> {
        let mut line = String::new();
        BufReader::new(std::fs::File::open(path)?).read_line(&mut line)?;
        Ok(line)
    });
    let args = export(&fifo, "head");
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let mut exporter = pair.server.twheel(&args)?.spawn()?;
    assert_eq!(reader.join().expect("a panic")?.trim_end(), past[0]);
    let twheel = Twheel::start(
        &pair.server,
        &[
            "--iface",
            SERVER,
            "--timeout",
            "300ms",
            "--history",
            history.path(),
        ],
    )?;
    pair.server.begin_flows(SERVER, 1)?;
    let ended = twheel_tests::running::wait_within(&mut exporter, PATIENCE)?;
    assert_eq!(ended.context("it does not end")?.code(), Some(0));
    twheel.stop()?;
    Ok(())
}

/// A history that was removed and begun anew has other records in the place where the export stood.
#[test]
fn a_history_that_was_begun_anew_is_sent_from_its_beginning() -> Result<()> {
    require_root();
    let history = Directory::new("export-anew")?;
    let pair = Pair::new()?;
    let args = run(&history);
    let file = history.file("lines");
    let mut sent = Vec::new();
    for _ in 0..2 {
        let twheel = Twheel::start(&pair.server, &args)?;
        pair.server.begin_flows(SERVER, 20)?;
        twheel.ends(20)?;
        assert_eq!(twheel.stop()?.code(), Some(0));
        let ended = once(export(&pair, &history, &file, &["--once"])?)?;
        ensure!(ended.code() == Some(0), "{ended:?}");
        sent.push(ended.stderr);
        std::fs::remove_dir_all(history.0.join(pair.server.history(SERVER)))?;
    }
    let said = "sending it from its beginning";
    ensure!(
        !sent[0].contains(said) && sent[1].contains(said),
        "{sent:?}"
    );
    let lines = std::fs::read_to_string(&file)?;
    let ends = lines.lines().filter(|it| it.contains("\"event\":\"end\""));
    assert_eq!(ends.count(), 40);
    Ok(())
}
