//! Several processes at once: runs on one interface, of which one may start, and readers beside a
//! run, which must not disturb it.

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{Read, Seek, SeekFrom, Write},
    net::TcpStream,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::{
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::channel,
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    fcntl::{Flock, FlockArg},
    mount::{MsFlags, mount},
    sched::{CloneFlags, unshare},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel::failure::Kind;
use twheel_tests::{
    is_long,
    netns::{Namespace, PATIENCE, PINS, require_root},
    pair::SERVER,
    running::{Ended, Twheel, once, wait_within},
    stops::{Call, Stops},
};

/// The other end of the cable: here a second interface of the same host.
const OTHER: &str = "other";

fn host() -> Result<Namespace> {
    require_root();
    let host = Namespace::new("readers")?;
    host.ip(&format!("link add {SERVER} type veth peer name {OTHER}"))?;
    host.ip(&format!("link set {SERVER} up"))?;
    host.ip(&format!("link set {OTHER} up"))?;
    Ok(host)
}

fn check_refused(ended: &Ended) -> Result<()> {
    // The other tests of this file start runs, too, and only one run starts at a time.
    let waited = "twheel: waiting for another twheel to finish starting\n";
    let said = ended.stderr.trim();
    let said = said.strip_prefix(waited).unwrap_or(said);
    ensure!(ended.code() == Some(Kind::Pins as i32), "{ended:?}");
    ensure!(
        said.starts_with("twheel: another twheel is using /sys/fs/bpf/twheel/")
            && said.ends_with(": end that `twheel run` first")
            && said.lines().count() == 1,
        "{said}"
    );
    Ok(())
}

fn src(line: &str) -> Result<(String, u64)> {
    let object: Value = serde_json::from_str(line).with_context(|| format!("no JSON: {line:?}"))?;
    let src = object["src"].as_str().context("no src")?.to_owned();
    Ok((src, object["sport"].as_u64().context("no sport")?))
}

#[test]
fn the_second_loader_is_refused_and_the_first_goes_on() -> Result<()> {
    let host = host()?;
    let first = Twheel::start(&host, &["--iface", SERVER, "--timeout", "2s", "--json"])?;
    let (pins, flows) = (host.pins()?, 100);
    host.begin_flows(SERVER, flows)?;
    for interfaces in [
        &["--iface", SERVER][..],
        // Under another name, since an instance is named after its first interface.
        &["--iface", OTHER, "--iface", SERVER],
        // Options that do not suit the existing instance.
        &["--iface", SERVER, "--max-flows", "77", "--mode", "generic"],
    ] {
        check_refused(&host.twheel_once(&[&["run"], interfaces].concat())?)?;
    }
    let mut seen = HashSet::new();
    while seen.len() < flows as usize {
        let line = first
            .line(Duration::from_secs(20))?
            .context("no more flows expire")?;
        ensure!(
            seen.insert(src(&line.text)?),
            "reported twice: {}",
            line.text
        );
    }
    ensure!(host.pins()? == pins, "the first run's pins have changed");
    ensure!(host.attached(SERVER)? == ["xdp", "egress"]);
    ensure!(host.attached(OTHER)?.is_empty());
    let ended = first.stop()?;
    ensure!(
        ended.code() == Some(0) && ended.lines.is_empty(),
        "{ended:?}"
    );
    host.check_clean(SERVER)
}

/// Starts this many runs at once, with these interfaces in turn: exactly one attaches.
fn race(host: &Namespace, starts: usize, interfaces: &[&[&str]]) -> Result<()> {
    let ended = AtomicUsize::new(0);
    let won = thread::scope(|scope| -> Result<Vec<Ended>> {
        let mut threads = Vec::new();
        for number in 0..starts {
            let args = [&["run"], interfaces[number % interfaces.len()]].concat();
            let command = host.twheel(&args)?;
            let ended = &ended;
            threads.push(scope.spawn(move || -> Result<Ended> {
                let twheel = match Twheel::start_command(command, |_| {}) {
                    Ok(twheel) => twheel,
                    // The run has ended, and this is its message.
                    Err(error) => {
                        ended.fetch_add(1, Ordering::SeqCst);
                        bail!("{error}");
                    }
                };
                // The one that attached runs until all others have been refused.
                let end = Instant::now() + Duration::from_secs(30);
                while ended.load(Ordering::SeqCst) < starts - 1 && Instant::now() < end {
                    thread::sleep(Duration::from_millis(20));
                }
                twheel.stop()
            }));
        }
        let mut won = Vec::new();
        for thread in threads {
            match thread.join().expect("a thread panicked") {
                Ok(ended) => won.push(ended),
                Err(error) => {
                    let said = error.to_string();
                    ensure!(said.contains("twheel: another twheel is using"), "{said}");
                }
            }
        }
        Ok(won)
    })?;
    ensure!(won.len() == 1, "{} runs have attached: {won:?}", won.len());
    ensure!(won[0].code() == Some(0), "{won:?}");
    host.check_clean(SERVER)?;
    host.check_clean(OTHER)
}

#[test]
fn of_twenty_that_start_at_once_one_wins() -> Result<()> {
    let host = host()?;
    for _ in 0..if is_long() { 10 } else { 1 } {
        race(&host, 20, &[&["--iface", SERVER]])?;
        // Two names for an instance, each from its first interface.
        race(
            &host,
            20,
            &[
                &["--iface", SERVER, "--iface", OTHER],
                &["--iface", OTHER, "--iface", SERVER],
            ],
        )?;
    }
    Ok(())
}

/// When the directory of all pins is removed.
#[derive(Clone, Copy)]
enum Moment {
    /// After a start has made it, and before it opens it.
    Made,
    /// After it has opened it, and before it locks it. It then locks a directory that is gone.
    Opened,
    /// The same, and it cannot lock it either.
    OpenedAndLocked,
}

/// Removes the directory of all pins as a run that ends does: only if it can lock it. Returns the
/// lock.
fn remove_pins() -> Option<Flock<File>> {
    let root = File::open(PINS).ok()?;
    let lock = Flock::lock(root, FlockArg::LockExclusiveNonblock).ok()?;
    fs::remove_dir(PINS).is_ok().then_some(lock)
}

/// Starts a run and ends it. At each of these moments, one after the other, the directory of all pins
/// is removed. Returns how often it was.
fn start_while_pins_go(host: &Namespace, moments: &[Moment]) -> Result<usize> {
    thread::scope(|scope| {
        let (to_stops, stops) = channel();
        let run = scope.spawn(move || -> Result<()> {
            to_stops.send(Stops::of_this_thread()?)?;
            let ended = Twheel::start(host, &["--iface", SERVER])?.stop()?;
            ensure!(ended.code() == Some(0), "{ended:?}");
            Ok(())
        });
        let (mut removed, mut locked) = (0, None);
        let received = stops.recv().context("nothing is held").and_then(|stops| {
            stops.each(3 * PATIENCE, |call| {
                // Only now: the start has failed to lock what was removed last.
                drop(locked.take());
                let lock = match (moments.get(removed), call) {
                    (Some(Moment::Made), Call::OpenDirectory)
                    | (Some(Moment::Opened | Moment::OpenedAndLocked), Call::Lock) => remove_pins(),
                    _ => None,
                };
                if let Some(lock) = lock {
                    let stays = matches!(moments[removed], Moment::OpenedAndLocked);
                    locked = stays.then_some(lock);
                    removed += 1;
                }
            })
        });
        let ended = run.join().expect("it does not panic");
        ended
            .and(received)
            .with_context(|| format!("removed {removed} times"))?;
        Ok(removed)
    })
}

/// A start makes the directory of all pins unless it is there, opens it, and locks it; only then does
/// nobody remove it any more. A run that ends may remove it before that. The start must notice, and
/// begin again with making it, which it does every 20 ms.
///
/// Here the kernel holds the start before it opens the directory, and before it locks it (see
/// [`twheel_tests::stops`]). While it is held, the directory is removed. So each removal falls between
/// making and locking, and into a try of its own: the first four tries of each start fail, the fifth
/// finds the directory as it has made it. The two starts meet each moment at least twice.
#[test]
fn a_run_starts_while_others_end() -> Result<()> {
    use Moment::{Made, Opened, OpenedAndLocked};
    let host = host()?;
    let removed = host.enter(|| {
        // Pins of its own, which nobody else keeps there.
        unshare(CloneFlags::CLONE_NEWNS)?;
        let none = None::<&str>;
        mount(none, "/", none, MsFlags::MS_PRIVATE | MsFlags::MS_REC, none)?;
        mount(none, "/sys/fs/bpf", Some("bpf"), MsFlags::empty(), none)?;
        let mut removed = 0;
        for moments in [
            [Made, Opened, OpenedAndLocked, Made],
            [OpenedAndLocked, Opened, Made, Opened],
        ] {
            let times = start_while_pins_go(&host, &moments)?;
            ensure!(times == moments.len(), "removed {times} times");
            removed += times;
        }
        Ok(removed)
    })?;
    ensure!(removed >= 5, "removed {removed} times");
    host.check_clean(SERVER)
}

/// A `twheel expired -f` that writes into a file; killed when dropped.
struct Follower {
    child: Child,
    lines: PathBuf,
    errors: PathBuf,
}

impl Follower {
    fn start(host: &Namespace, history: &str, directory: &Path, name: &str) -> Result<Self> {
        let (lines, errors) = (directory.join(name), directory.join(format!("{name}.err")));
        let args = [
            "expired",
            "-f",
            "--json",
            "--iface",
            SERVER,
            "--history",
            history,
        ];
        let mut command = host.twheel(&args)?;
        let child = command
            .stdin(Stdio::null())
            .stdout(File::create(&lines)?)
            .stderr(File::create(&errors)?)
            .spawn()?;
        Ok(Self {
            child,
            lines,
            errors,
        })
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.child.id() as i32), signal)?)
    }

    /// The last whole line that it has printed.
    fn latest(&self) -> Result<Option<String>> {
        // More than two lines take.
        const TAIL: u64 = 8 << 10;
        let mut file = File::open(&self.lines)?;
        let from = file.metadata()?.len().saturating_sub(TAIL);
        file.seek(SeekFrom::Start(from))?;
        let mut tail = Vec::new();
        file.read_to_end(&mut tail)?;
        let tail = String::from_utf8_lossy(&tail);
        let whole = tail.rsplit_once('\n').map_or("", |(whole, _)| whole);
        Ok(whole.lines().last().map(str::to_owned))
    }

    /// Waits until it has printed this flow. Returns its messages on standard error, and the flows
    /// that it has printed.
    fn end(mut self, last: &(String, u64)) -> Result<(String, Vec<(String, u64)>)> {
        let end = Instant::now() + Duration::from_secs(20);
        while !matches!(self.latest()?, Some(line) if src(&line)? == *last) {
            ensure!(
                Instant::now() < end,
                "a follower does not reach the last flow"
            );
            thread::sleep(Duration::from_millis(50));
        }
        let text = fs::read_to_string(&self.lines)?;
        let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
        let shown = whole.lines().map(src).collect::<Result<_>>()?;
        self.signal(Signal::SIGTERM)?;
        wait_within(&mut self.child, Duration::from_secs(5))?
            .context("the follower does not end")?;
        Ok((fs::read_to_string(&self.errors)?, shown))
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Checks that a follower lacks about as many events as it says that it has missed segments: a
/// segment holds about 2,500.
fn check_missed(said: &str, events: usize) -> Result<()> {
    let segments = said.lines().find_map(|line| {
        let (count, _) = line.split_once(" segments of the history were removed")?;
        count.rsplit(' ').next()?.parse::<usize>().ok()
    });
    let segments = segments.with_context(|| format!("no number of missed segments: {said:?}"))?;
    let expected = (segments - 1) * 2_300..=(segments + 1) * 2_700;
    ensure!(
        expected.contains(&events),
        "{events} events are missing, but {segments} segments"
    );
    Ok(())
}

/// Whether `part` contains only members of `whole`, in the same order, each at most once.
fn is_in_order(part: &[(String, u64)], whole: &[(String, u64)]) -> bool {
    let mut rest = whole.iter();
    part.iter().all(|it| rest.any(|other| other == it))
}

/// The page `/metrics`; checks that it is complete.
fn scrape(host: &Namespace, address: &str) -> Result<prometheus_parse::Scrape> {
    let mut stream = host.enter(|| TcpStream::connect(address).context("cannot connect"))?;
    stream.set_read_timeout(Some(Duration::from_secs(20)))?;
    write!(stream, "GET /metrics HTTP/1.1\r\nHost: {address}\r\n\r\n")?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let (_, body) = answer.split_once("\r\n\r\n").context("no body")?;
    let scrape = prometheus_parse::Scrape::parse(body.lines().map(|line| Ok(line.to_owned())))?;
    ensure!(scrape.samples.len() > 50, "samples are missing: {body}");
    Ok(scrape)
}

/// One of its counters.
fn sample(host: &Namespace, address: &str, name: &str) -> Result<usize> {
    let scrape = scrape(host, address)?;
    let sample = scrape.samples.iter().find(|it| it.metric == name);
    match sample.with_context(|| format!("no {name}"))?.value {
        prometheus_parse::Value::Counter(value) => Ok(value as usize),
        ref other => bail!("{name}: {other:?}"),
    }
}

#[test]
fn readers_at_once_lose_nothing_and_disturb_nobody() -> Result<()> {
    let host = host()?;
    let flows: u32 = if is_long() { 120_000 } else { 100_000 };
    let directory = std::env::temp_dir().join(format!("twl-{}-readers", std::process::id()));
    fs::create_dir(&directory)?;
    let result = readers(&host, flows, &directory);
    fs::remove_dir_all(&directory)?;
    result?;
    host.check_clean(SERVER)
}

fn readers(host: &Namespace, flows: u32, directory: &Path) -> Result<()> {
    let history = directory.join("history");
    let history = history.to_str().context("no name")?;
    // Eight segments of 3,640 events.
    let args = [
        "--iface",
        SERVER,
        "--timeout",
        "4s",
        "--json",
        "--metrics",
        "0",
    ];
    let sizes = [
        "--history",
        history,
        "--history-size",
        "4MiB",
        "--max-flows",
        "200000",
    ];
    let run = Twheel::start(host, &[&args[..], &sizes].concat())?;
    let said = run.await_stderr("metrics and page: http://")?;
    let address = said
        .split_once("http://")
        .and_then(|(_, it)| it.split_once('/'));
    let address = address.context("no address")?.0.to_owned();
    let end = Instant::now() + Duration::from_secs(20);
    while fs::read_dir(history)?.count() == 0 {
        ensure!(Instant::now() < end, "the run writes no history");
        thread::sleep(Duration::from_millis(10));
    }
    let followers = (0..3)
        .map(|number| Follower::start(host, history, directory, &format!("follower{number}")))
        .collect::<Result<Vec<_>>>()?;
    let sleeper = Follower::start(host, history, directory, "sleeper")?;
    host.begin_flows(SERVER, 1)?;
    let first = run
        .line(Duration::from_secs(20))?
        .context("no flow expires")?;
    // The sleeper has opened the first segment, and then sleeps through the rest.
    let end = Instant::now() + Duration::from_secs(20);
    while fs::metadata(&sleeper.lines)?.len() == 0 {
        ensure!(Instant::now() < end, "the follower prints nothing");
        thread::sleep(Duration::from_millis(10));
    }
    sleeper.signal(Signal::SIGSTOP)?;

    let (done, asked) = (AtomicBool::new(false), AtomicUsize::new(0));
    let mut reported = vec![src(&first.text)?];
    thread::scope(|scope| -> Result<()> {
        let commands: [&[&str]; 4] = [
            &["flows", "--json"],
            &[
                "flows",
                "idle > 1s",
                "--json",
                "--sort",
                "expires",
                "--limit",
                "100",
            ],
            &["stats", "--json"],
            &["delete", "sport < 1200", "--json", "--history", "off"],
        ];
        let mut readers = Vec::new();
        for command in commands {
            let (done, asked) = (&done, &asked);
            readers.push(scope.spawn(move || -> Result<()> {
                while !done.load(Ordering::Relaxed) {
                    let ended = once(host.twheel(command)?)?;
                    ensure!(ended.code() == Some(0), "{command:?}: {ended:?}");
                    for line in &ended.lines {
                        let object: Result<Value, _> = serde_json::from_str(&line.text);
                        object.with_context(|| format!("{command:?}: no JSON: {}", line.text))?;
                    }
                    asked.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }));
        }
        for _ in 0..2 {
            let (done, asked, address) = (&done, &asked, &address);
            readers.push(scope.spawn(move || -> Result<()> {
                while !done.load(Ordering::Relaxed) {
                    scrape(host, address)?;
                    asked.fetch_add(1, Ordering::Relaxed);
                }
                Ok(())
            }));
        }
        let result = host.begin_flows(SERVER, flows).and_then(|()| {
            while reported.len() < flows as usize + 1 {
                let line = run.line(Duration::from_secs(20))?.with_context(|| {
                    format!("of {flows} flows {} were reported", reported.len() - 1)
                })?;
                reported.push(src(&line.text)?);
            }
            Ok(())
        });
        done.store(true, Ordering::Relaxed);
        for reader in readers {
            reader.join().expect("a reader panicked")?;
        }
        result
    })?;
    sleeper.signal(Signal::SIGCONT)?;

    // The run has lost no event and reported none twice. (The first flow was begun again with the
    // rest.)
    ensure!(reported.len() == flows as usize + 1, "{}", reported.len());
    let distinct: HashSet<_> = reported[1..].iter().collect();
    ensure!(
        distinct.len() == flows as usize,
        "{} distinct",
        distinct.len()
    );
    let stats = once(host.twheel(&["stats", "--json"])?)?;
    let lost = stats
        .lines
        .iter()
        .find(|line| line.text.contains("\"events_lost\""));
    let lost: Value = serde_json::from_str(&lost.context("no events_lost")?.text)?;
    ensure!(lost["total"] == 0, "{lost}");

    // Events for which the disk was too slow are counted, and no reader's view of the history has
    // them.
    let unwritten = sample(host, &address, "twheel_history_lost_total")?;
    host.begin_these(SERVER, flows..flows + 1)?;
    let line = run
        .line(Duration::from_secs(20))?
        .context("the last flow does not expire")?;
    let last = src(&line.text)?;
    reported.push(last.clone());
    let written = reported.len() - unwritten;
    let mut whole = 0;
    for follower in followers {
        let (said, shown) = follower.end(&last)?;
        ensure!(is_in_order(&shown, &reported), "not in order, or twice");
        // A follower that misses events reports so.
        let misses = said.contains("segments of the history were removed before they were read");
        if misses {
            check_missed(&said, written - shown.len())?;
        } else {
            ensure!(
                shown.len() == written,
                "{} of {written}: {said:?}",
                shown.len()
            );
        }
        whole += usize::from(!misses);
    }
    ensure!(whole > 0, "no follower has kept up");
    let (said, shown) = sleeper.end(&last)?;
    ensure!(is_in_order(&shown, &reported), "not in order, or twice");
    ensure!(
        said.contains("segments of the history were removed before they were read"),
        "{said:?}"
    );
    check_missed(&said, written - shown.len())?;
    let segments = fs::read_dir(Path::new(history).join(host.history(SERVER)))?.flatten();
    let segments = segments.filter(|it| it.path().extension().is_some_and(|it| it == "history"));
    ensure!(segments.count() == 8, "the history has not turned over");
    println!(
        "{flows} flows, {unwritten} not in the history, {} answers; {whole} of 3 followers saw all, the one that slept saw {} and reported: {}",
        asked.load(Ordering::Relaxed),
        shown.len(),
        said.trim()
    );
    let ended = run.stop()?;
    ensure!(
        ended.code() == Some(0) && ended.lines.is_empty(),
        "{ended:?}"
    );
    Ok(())
}
