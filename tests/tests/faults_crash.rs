//! `twheel run` killed again and again, and what it leaves behind.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{BufRead, BufReader, PipeWriter, Read as _, Write},
    net::{SocketAddr, TcpStream},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd},
        unix::process::ExitStatusExt,
    },
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicU32, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result, ensure};
use aya::{
    maps::{Array, Map, MapData, PerCpuArray, loaded_maps},
    programs::{
        ProgramInfo,
        links::{FdLink, PinnedLink},
        loaded_links, loaded_programs,
    },
};
use nix::{
    fcntl::{FcntlArg, fcntl},
    net::if_::if_nametoindex,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel::{
    data_plane::{self, LoaderCounters, STEP_BUDGET},
    history::{self, DEFAULT_BYTES},
    inspect::Reader,
    pins::{Instance, PROGRAMS, Pins},
    ring::{Events, Read},
    stepper::pin_to,
    wheels::{Counted, Wheels},
};
use twheel_common::{
    config::{LAYOUT, Meta},
    counter::Counter,
    event::{BATCH, Record, Staged},
    flow::Direction,
};
use twheel_tests::{
    directory::Directory,
    is_soak,
    netns::{CLIENT, Namespace, PATIENCE, Pair, SERVER, Twheel, require_root},
    plane::{ACK, frame},
};

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// xorshift64*: the same moments again, for who gives the same seed.
struct Random(u64);

impl Random {
    /// From `TWHEEL_SEED`, or the clock.
    fn new() -> Self {
        let clock = SystemTime::now().duration_since(UNIX_EPOCH);
        let clock = clock.map_or(1, |since| since.as_nanos() as u64);
        let seed = std::env::var("TWHEEL_SEED")
            .ok()
            .and_then(|it| it.parse().ok());
        let seed = seed.unwrap_or(clock | 1);
        eprintln!("TWHEEL_SEED={seed}");
        Self(seed)
    }

    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32) % end
    }
}

/// Who sends packets, each of another flow, over the cable, as long as it may: in turn they come in and go out.
struct Sender {
    stop: Arc<AtomicBool>,
    pause: Arc<AtomicBool>,
    sent: Arc<AtomicU32>,
    thread: Option<thread::JoinHandle<Result<()>>>,
}

impl Sender {
    /// Bursts of so many, a millisecond between.
    fn start(pair: &Pair, burst: u32) -> Result<Self> {
        let sockets = [
            open_on(&pair.client, CLIENT)?,
            open_on(&pair.server, SERVER)?,
        ];
        let (stop, pause) = (Arc::<AtomicBool>::default(), Arc::<AtomicBool>::default());
        let sent = Arc::<AtomicU32>::default();
        let (told, paused, counted) = (stop.clone(), pause.clone(), sent.clone());
        let thread = thread::spawn(move || {
            while !told.load(Relaxed) {
                for _ in 0..burst {
                    if paused.load(Relaxed) {
                        break;
                    }
                    let number = counted.load(Relaxed);
                    let bytes = frame(number, false, ACK);
                    let socket = sockets[number as usize % 2].as_raw_fd();
                    // SAFETY: the frame is as long as it says.
                    let sent = unsafe { libc::send(socket, bytes.as_ptr().cast(), bytes.len(), 0) };
                    ensure!(
                        sent == bytes.len() as isize,
                        "{}",
                        std::io::Error::last_os_error()
                    );
                    counted.fetch_add(1, Relaxed);
                }
                thread::sleep(millis(1));
            }
            Ok(())
        });
        Ok(Self {
            stop,
            pause,
            sent,
            thread: Some(thread),
        })
    }

    /// Stops for a while; what is on the cable has come when this returns.
    fn pause(&self, pause: bool) {
        self.pause.store(pause, Relaxed);
        thread::sleep(millis(20));
    }

    fn stop(mut self) -> Result<u32> {
        self.stop.store(true, Relaxed);
        let thread = self.thread.take().context("it runs")?;
        thread.join().expect("the sender panicked")?;
        Ok(self.sent.load(Relaxed))
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
    }
}

/// A packet socket on an interface.
fn open_on(namespace: &Namespace, interface: &str) -> Result<OwnedFd> {
    namespace.enter(|| {
        // SAFETY: plain calls with buffers of their own; the descriptor is nobody else's.
        unsafe {
            let flags = libc::SOCK_RAW | libc::SOCK_CLOEXEC;
            let socket = libc::socket(libc::AF_PACKET, flags, 0);
            ensure!(socket >= 0, "no packet socket");
            let socket = OwnedFd::from_raw_fd(socket);
            let mut address: libc::sockaddr_ll = std::mem::zeroed();
            address.sll_family = libc::AF_PACKET as u16;
            address.sll_ifindex = if_nametoindex(interface)? as i32;
            let address = (&raw const address).cast();
            let length = size_of::<libc::sockaddr_ll>() as libc::socklen_t;
            ensure!(
                libc::bind(socket.as_raw_fd(), address, length) == 0,
                "cannot bind"
            );
            Ok(socket)
        }
    })
}

/// A `twheel run` whose standard output is a pipe that outlives it; killed when this is dropped.
struct Run(Child);

impl Run {
    fn start(namespace: &Namespace, args: &[&str], out: &PipeWriter) -> Result<Self> {
        let child = namespace
            .twheel(args)?
            .stdin(Stdio::null())
            .stdout(out.try_clone()?)
            .stderr(Stdio::null())
            .spawn()?;
        Ok(Self(child))
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        Ok(kill(Pid::from_raw(self.0.id() as i32), signal)?)
    }

    /// Whether it has attached and steps: by its threads, of which each says what it is for.
    fn steps(&self) -> bool {
        let threads = fs::read_dir(format!("/proc/{}/task", self.0.id()));
        let mut threads = threads.into_iter().flatten().filter_map(Result::ok);
        threads.any(|thread| {
            let name = fs::read_to_string(thread.path().join("comm"));
            name.is_ok_and(|name| name.starts_with("twheel-step"))
        })
    }

    fn await_steps(&mut self) -> Result<()> {
        let end = Instant::now() + PATIENCE;
        while !self.steps() {
            let status = self.0.try_wait()?;
            ensure!(status.is_none(), "it has ended: {status:?}");
            ensure!(Instant::now() < end, "it does not come to step");
            thread::sleep(millis(2));
        }
        Ok(())
    }

    /// Kills it. Returns whether it was alive: one that is to end may have.
    fn kill(mut self) -> Result<bool> {
        self.signal(Signal::SIGKILL)?;
        let status = self.0.wait()?;
        let was_alive = status.signal() == Some(Signal::SIGKILL as i32);
        ensure!(was_alive || status.success(), "{status}");
        Ok(was_alive)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn key(line: &str) -> Result<(SocketAddr, SocketAddr)> {
    let value: Value = serde_json::from_str(line).with_context(|| format!("torn: {line:?}"))?;
    let end = |ip: &str, port: &str| -> Result<SocketAddr> {
        let ip = value[ip].as_str().context("no address")?.parse()?;
        Ok(SocketAddr::new(
            ip,
            value[port].as_u64().context("no port")? as u16,
        ))
    };
    Ok((end("src", "sport")?, end("dst", "dport")?))
}

/// The flow of a packet of [`Sender`]'s.
fn key_of(number: u32) -> (SocketAddr, SocketAddr) {
    let ip = (0x0a00_0000 + number / 50_000).to_be_bytes();
    let src = SocketAddr::from((ip, 1024 + (number % 50_000) as u16));
    (src, SocketAddr::from(([192, 0, 2, 1], 80)))
}

fn pinned(namespace: &Namespace) -> Result<PathBuf> {
    match namespace.instances()?.as_slice() {
        [one] => Ok(one.clone()),
        other => anyhow::bail!("not one instance: {other:?}"),
    }
}

/// Events that wait beside the ring, for which their flows' room is still taken.
fn staged(pins: &Pins) -> Result<u64> {
    let staged = PerCpuArray::<_, [u8; size_of::<Staged>()]>::try_from(Map::PerCpuArray(
        pins.map("STAGED")?,
    ))?;
    let of_each = staged.get(&0, 0)?;
    let counts = of_each
        .iter()
        .filter_map(|it| it.first_chunk().copied().map(u64::from_ne_bytes));
    Ok(counts.sum())
}

/// Flows that room is taken for.
fn tracked(pins: &Pins) -> Result<u64> {
    let tracked = Array::<_, u64>::try_from(Map::Array(pins.map("TRACKED")?))?;
    Ok(tracked.get(&0, 0)?)
}

/// While nobody changes it: the flows of the table, those on the wheels, the room that is taken, and what is listed agree.
/// Returns how many.
fn check_accounts(namespace: &Namespace) -> Result<usize> {
    let listed = namespace.enter(|| {
        let pins = Instance::of(SERVER)?;
        let tracked = tracked(&pins)?;
        let counters = data_plane::counters(&Map::PerCpuArray(pins.map("COUNTERS")?))?;
        let staged = staged(&pins)?;
        let reader = Reader::of(pins)?;
        let in_use = reader.table().iter().count();
        assert_eq!(counters.live(), in_use as u64, "created less ended");
        assert_eq!(tracked, in_use as u64 + staged, "room taken");
        let on_wheels = Wheels::read(&reader, reader.now()?)?.count(&reader)?;
        let on_wheels: u64 = on_wheels.iter().map(Counted::flows).sum();
        assert_eq!(on_wheels, in_use as u64, "on the wheels");
        for counter in [Counter::Orphans, Counter::EventsLost, Counter::TableFull] {
            assert_eq!(counters.get(counter), 0, "{}", counter.meaning());
        }
        Ok(in_use)
    })?;
    let ended = namespace.twheel_once(&["flows", "--iface", SERVER, "--json"])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    assert_eq!(ended.lines.len(), listed, "what is listed");
    Ok(listed)
}

/// Maps with so many entries in the kernel, and programs that use them: others have other maps of these names.
fn loaded(entries: u32) -> (usize, BTreeSet<u32>) {
    let maps = loaded_maps().filter_map(Result::ok);
    let maps: BTreeSet<_> = maps
        .filter(|map| map.max_entries() == entries)
        .map(|map| map.id())
        .collect();
    let programs = loaded_programs().filter_map(Result::ok).filter(|program| {
        let used = program.map_ids().ok().flatten().unwrap_or_default();
        used.iter().any(|id| maps.contains(id))
    });
    (maps.len(), programs.map(|it| it.id()).collect())
}

/// The programs of a run whose interface has XDP.
fn programs_by_xdp() -> impl Iterator<Item = &'static str> {
    PROGRAMS.into_iter().filter(|it| *it != "twheel_ingress")
}

/// Programs that are held there by a pin, or by a link in the kernel. Of a run that is killed between the two a hook has
/// another program than the one that is pinned, until the next run.
fn held(instance: &Path) -> Result<BTreeSet<u32>> {
    let mut held = BTreeSet::new();
    for name in programs_by_xdp() {
        held.insert(ProgramInfo::from_pin(instance.join(name))?.id());
    }
    let links = loaded_links().filter_map(Result::ok);
    held.extend(links.map(|link| link.program_id()));
    Ok(held)
}

/// The kernel's numbers of the links that are pinned there.
fn link_ids(instance: &Path) -> Result<[u32; 2]> {
    let id = |hook: &str| -> Result<u32> {
        let link = PinnedLink::from_pin(instance.join(format!("{hook}@{SERVER}")))?;
        Ok(FdLink::from(link).info()?.id())
    };
    Ok([id("xdp")?, id("egress")?])
}

/// Lines that were printed again: in a row, how many each time. A run that was killed while it wrote has written up to 4096
/// bytes that it had not noted, and the next begins with the record in which that begins.
fn repeated(lines: &[String]) -> Result<Vec<usize>> {
    let (mut seen, mut rows) = (BTreeSet::new(), Vec::<Vec<&String>>::new());
    let mut in_row = false;
    for line in lines {
        if seen.insert(key(line)?) {
            in_row = false;
            continue;
        }
        match rows.last_mut() {
            Some(row) if in_row && !row.contains(&line) => row.push(line),
            _ => rows.push(vec![line]),
        }
        in_row = true;
    }
    for row in &rows {
        let bytes: usize = row.iter().skip(BATCH).map(|line| line.len() + 1).sum();
        assert!(bytes <= 4096, "{} lines again, in a row", row.len());
    }
    Ok(rows.iter().map(Vec::len).collect())
}

/// Names of what is pinned of the one instance.
fn names(namespace: &Namespace) -> Result<Vec<String>> {
    let pins = namespace.pins()?;
    let name = |path: &PathBuf| Some(path.file_name()?.to_str()?.to_owned());
    Ok(pins.iter().filter_map(name).collect())
}

#[test]
fn a_run_killed_at_any_moment_loses_no_flow() -> Result<()> {
    require_root();
    let kills = if is_soak() { 200 } else { 60 };
    let mut random = Random::new();
    let history = Directory::new("crash")?;
    let pair = Pair::new()?;
    // Room for all that waits while a start takes long; and nobody else has a table of that size.
    let max_flows = (400_000 + std::process::id() % 50_000).to_string();
    let args = [
        "run",
        "--iface",
        SERVER,
        "--timeout",
        "300ms",
        "--tick",
        "20ms",
        "--keep",
        "--json",
        // So that the kernel has less to verify: a start takes that long, and each kill a start.
        "--source-share",
        "off",
        "--max-flows",
        &max_flows,
        "--history",
        history.path(),
        // All of them: who sends goes by time, and the machine may be slow.
        "--history-size",
        "1GiB",
    ];
    let (reader, writer) = std::io::pipe()?;
    let lines = Arc::new(Mutex::new(Vec::new()));
    let collected = lines.clone();
    let reading = thread::spawn(move || {
        for line in BufReader::new(reader).lines().map_while(Result::ok) {
            collected.lock().unwrap().push(line);
        }
    });

    // From its first packet on everything is seen.
    let begun = Instant::now();
    let first = Twheel::start(&pair.server, &args[1..])?;
    let start = begun.elapsed();
    first.kill()?;
    let instance = pinned(&pair.server)?;
    let pinned_name = instance.file_name().context("a name")?;
    let pinned = names(&pair.server)?;
    let table = pair.server.enter(|| Instance::of(SERVER)?.map("FLOWS"))?;
    let entries = table.info()?.max_entries();
    drop(table);
    let (maps, programs) = loaded(entries);
    assert!(maps > 0 && programs.len() == programs_by_xdp().count());
    let links = link_ids(&instance)?;
    let sender = Sender::start(&pair, 4)?;
    let (mut most, mut total) = (0, 0);
    let (mut starting, mut stepping, mut ending) = (0, 0, 0);
    let mut checks = 0;
    let mut number = 0;
    while starting + stepping + ending < kills {
        number += 1;
        // Where starts take long, all that is sent meanwhile waits; a full table is not what this is about.
        let waiting = pair.server.enter(|| tracked(&Instance::of(SERVER)?))?;
        sender.pause(waiting > 200_000);
        let mut run = Run::start(&pair.server, &args, &writer)?;
        // While they start, when they have something to do, and at their end. Most of a start is the kernel's, which
        // verifies programs: the moments are counted from behind that, or most would fall into it.
        let is_ending = number % 10 == 9;
        let wait = match number % 10 {
            9 => {
                run.await_steps()?;
                thread::sleep(Duration::from_micros(random.below(50_000)));
                run.signal(Signal::SIGINT)?;
                // An end takes a few milliseconds.
                random.below(4_000)
            }
            1 | 6 => {
                run.await_steps()?;
                random.below(150_000)
            }
            5 => random.below(start.as_micros() as u64),
            _ if is_soak() => random.below(start.as_micros() as u64),
            _ => random.below(250_000),
        };
        thread::sleep(Duration::from_micros(wait));
        let steps = run.steps();
        let was_alive = run.kill()?;
        assert!(was_alive || is_ending, "kill {number}");
        match (is_ending, steps) {
            (true, _) => ending += u32::from(was_alive),
            (false, true) => stepping += 1,
            (false, false) => starting += 1,
        }
        assert_eq!(
            pair.server.attached(SERVER)?,
            ["xdp", "egress"],
            "kill {number}"
        );
        assert_eq!(link_ids(&instance)?, links, "not one was attached anew");
        if number % 10 == 0 {
            checks += 1;
            sender.pause(true);
            let flows = check_accounts(&pair.server)?;
            assert_eq!(names(&pair.server)?, pinned);
            await_loaded(entries, maps, || held(&instance))?;
            (most, total) = (most.max(flows), total + flows);
            sender.pause(false);
            eprintln!("{number} kills: {flows} flows");
        }
    }
    assert!(
        stepping >= kills / 5,
        "{stepping} were killed while they stepped"
    );
    assert!(
        ending >= kills / 20,
        "{ending} were killed while they ended"
    );
    let sent = sender.stop()?;
    thread::sleep(millis(500));

    let last = Run::start(&pair.server, &args, &writer)?;
    let end = Instant::now() + PATIENCE;
    let (src, _) = key_of(sent - 1);
    let text = format!("\"src\":\"{}\",\"sport\":{},", src.ip(), src.port());
    while !lines
        .lock()
        .unwrap()
        .iter()
        .rev()
        .any(|line: &String| line.contains(&text))
    {
        ensure!(Instant::now() < end, "the last flow is not reported");
        thread::sleep(millis(50));
    }
    // On a busy machine the other CPU's wheel may be behind.
    while pair.server.enter(|| tracked(&Instance::of(SERVER)?))? > 0 {
        ensure!(Instant::now() < end, "flows are left");
        thread::sleep(millis(50));
    }
    thread::sleep(millis(500));
    assert_eq!(check_accounts(&pair.server)?, 0, "all have ended");
    assert_eq!(loaded(entries).1.len(), programs_by_xdp().count());
    last.signal(Signal::SIGINT)?;
    let mut last = last;
    assert!(last.0.wait()?.success());
    drop((last, writer));
    reading.join().expect("the reader panicked");

    // Each packet was the only one of its flow: that all are reported says that no packet has passed unseen.
    let all: BTreeSet<_> = (0..sent).map(key_of).collect();
    let mut printed = BTreeMap::<_, u32>::new();
    for line in lines.lock().unwrap().iter() {
        *printed.entry(key(line)?).or_default() += 1;
    }
    let missing: Vec<_> = all.iter().filter(|it| !printed.contains_key(it)).collect();
    assert!(
        missing.is_empty(),
        "{} are not printed: {:?}",
        missing.len(),
        missing.first()
    );
    let again = repeated(&lines.lock().unwrap())?;
    eprintln!(
        "{kills} kills in {:?}: {starting} while they started, {stepping} while they stepped, {ending} while they ended; \
         {sent} flows of one packet each, {} tracked at a checkpoint, {most} at most; printed twice: {again:?}",
        begun.elapsed(),
        total / checks
    );
    assert!(again.len() <= (stepping + ending) as usize, "{again:?}");

    let kept = kept(&pair.server, &history)?;
    let segments = history.0.join(pinned_name);
    assert!(
        segments.join("0000000001.history").exists(),
        "it turned over"
    );
    let missing: Vec<_> = all.iter().filter(|it| !kept.contains(it)).collect();
    assert!(
        missing.is_empty(),
        "{} are not in the history: {:?}",
        missing.len(),
        missing.first()
    );
    assert_eq!(kept.len(), printed.len());

    let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    await_clean(&pair.server)?;
    await_loaded(entries, 0, || Ok(BTreeSet::new()))
}

#[test]
fn one_killed_while_it_begins_or_cleans_up_leaves_nothing_that_detach_does_not_find() -> Result<()>
{
    require_root();
    let mut random = Random::new();
    let pair = Pair::new()?;
    let (_reader, writer) = std::io::pipe()?;
    let args = ["run", "--iface", SERVER, "--json"];
    for number in 0..if is_soak() { 100 } else { 10 } {
        if number % 2 == 0 {
            let run = Run::start(&pair.server, &args, &writer)?;
            thread::sleep(Duration::from_micros(random.below(600_000)));
            run.kill()?;
        } else {
            let run = Twheel::start(&pair.server, &args[1..])?;
            kill(Pid::from_raw(run.pid() as i32), Signal::SIGINT)?;
            thread::sleep(Duration::from_micros(random.below(30_000)));
            run.kill()?;
        }
        // 6: there was nothing.
        let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
        assert!(matches!(ended.code(), Some(0 | 6)), "{}", ended.stderr);
        await_clean(&pair.server)?;
    }
    Ok(())
}

#[test]
fn a_run_that_adopts_more_than_its_ring_holds_starts_and_reports_all() -> Result<()> {
    require_root();
    const FLOWS: u32 = 30_000;
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "1s", "--keep", "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    pair.server.begin_flows(SERVER, FLOWS)?;
    let early = twheel.kill()?.lines.len();
    thread::sleep(millis(1500));
    let twheel = Twheel::start(&pair.server, &args)?;
    let mut found = BTreeSet::new();
    let end = Instant::now() + PATIENCE;
    while found.len() + early < FLOWS as usize {
        let line = twheel.line(end.saturating_duration_since(Instant::now()))?;
        let line = line.with_context(|| format!("{} are reported", found.len()))?;
        assert!(found.insert(key(&line.text)?), "twice: {}", line.text);
    }
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert_eq!(ended.lines.len(), 0);
    detached(&pair.server)
}

#[test]
fn runs_killed_while_they_print_lose_no_line() -> Result<()> {
    require_root();
    let flows = if is_soak() { 30_000 } else { 10_000 };
    let mut random = Random::new();
    let history = Directory::new("print")?;
    let pair = Pair::new()?;
    let args = [
        "run",
        "--iface",
        SERVER,
        "--timeout",
        "1s",
        "--keep",
        "--json",
        "--history",
        history.path(),
    ];
    Twheel::start(&pair.server, &args[1..])?.stop()?;
    pair.server.begin_flows(SERVER, flows)?;
    thread::sleep(millis(1500));
    let (reader, writer) = std::io::pipe()?;
    let (tell, lines) = std::sync::mpsc::channel();
    thread::spawn(move || {
        for (number, line) in BufReader::new(reader)
            .lines()
            .map_while(Result::ok)
            .enumerate()
        {
            if number % 50 == 0 {
                // So that there is something to print for a while.
                thread::sleep(millis(2));
            }
            if tell.send(line).is_err() {
                break;
            }
        }
    });
    let (mut printed, mut all, mut kills) = (BTreeSet::new(), Vec::new(), 0);
    let mut take = |line: String| -> Result<usize> {
        printed.insert(key(&line)?);
        all.push(line);
        Ok(printed.len())
    };
    let mut count = 0;
    while count < flows as usize {
        let run = Run::start(&pair.server, &args, &writer)?;
        let line = lines
            .recv_timeout(PATIENCE)
            .with_context(|| format!("{count} lines"))?;
        count = take(line)?;
        thread::sleep(Duration::from_micros(random.below(60_000)));
        run.kill()?;
        kills += 1;
        while let Ok(line) = lines.recv_timeout(millis(50)) {
            count = take(line)?;
        }
    }
    let again = repeated(&all)?;
    eprintln!("{kills} kills, {count} flows, lines printed twice: {again:?}");
    assert!(kills > 1, "killed while there was more to print");
    assert!(again.len() <= kills, "{again:?}");
    let kept = kept(&pair.server, &history)?;
    assert_eq!(kept.len(), count);
    assert_eq!(kept, printed);
    assert_eq!(check_accounts(&pair.server)?, 0);
    detached(&pair.server)
}

#[test]
fn a_history_that_was_cut_within_a_record_goes_on_there() -> Result<()> {
    require_root();
    const FLOWS: u32 = 100;
    const CUT: usize = 40;
    let history = Directory::new("record")?;
    let pair = Pair::new()?;
    let mut args = vec!["--iface", SERVER, "--timeout", "1s", "--keep", "--json"];
    args.extend(["--history", history.path()]);
    Twheel::start(&pair.server, &args)?.stop()?;
    let left = pair.server.enter(|| {
        let (pins, mut events, batch) = end(&pair.server, FLOWS)?;
        assert!(batch.is_sorted_by(|one, next| one.end < next.end && one.free <= next.free));
        let whole = |read: &Read| read.free == read.end;
        assert!(whole(&batch[CUT / BATCH * BATCH - 1]) && !whole(&batch[CUT - 1]));

        // What a run has done that is killed when 40 are in the file, and as many printed.
        let reader = Reader::of(pins)?;
        let mut writer = keep(&history, &reader)?;
        writer.add_now(batch[..CUT].to_vec());
        assert!(events.release(batch[CUT - 1].free));

        // The next one begins with the record.
        let (mut events, mut left) = (Events::open(reader.pins().map("EVENTS")?)?, Vec::new());
        events.read(&mut left, usize::MAX);
        let ends = |of: &[Read]| of.iter().map(|read| read.end).collect::<Vec<_>>();
        assert_eq!(ends(&left), ends(&batch[CUT / BATCH * BATCH..]));
        Ok(left)
    })?;
    let twheel = Twheel::start(&pair.server, &args)?;
    for read in &left {
        let line = twheel.line(PATIENCE)?.context("not all are reported")?;
        let Record::Ended(event) = read.record else {
            anyhow::bail!("{read:?}");
        };
        let ends = [Direction::FromLow, Direction::FromHigh].map(|it| event.key.sender(it));
        assert!(ends.contains(&key(&line.text)?.0), "{}", line.text);
    }
    let ended = twheel.stop()?;
    assert_eq!((ended.code(), ended.lines.len()), (Some(0), 0));
    assert_eq!(kept(&pair.server, &history)?.len(), FLOWS as usize);
    detached(&pair.server)
}

#[test]
fn what_has_left_the_ring_unwritten_is_counted() -> Result<()> {
    require_root();
    const FLOWS: u32 = 100;
    const WRITTEN: usize = 5 * BATCH;
    let history = Directory::new("gap")?;
    let pair = Pair::new()?;
    let mut args = vec!["--iface", SERVER, "--timeout", "1s", "--keep"];
    args.extend(["--history", history.path()]);
    Twheel::start(&pair.server, &args)?.stop()?;
    pair.server.enter(|| {
        let (pins, mut events, mut batch) = end(&pair.server, FLOWS)?;

        // What a run has done whose disk stands still, and which is killed then: all is printed, less is in the file.
        let reader = Reader::of(pins)?;
        let mut writer = keep(&history, &reader)?;
        batch.truncate(WRITTEN);
        writer.add_now(batch);
        // So that it has no time to say that it ends well.
        std::mem::forget(writer);
        events.release_all();
        Ok(())
    })?;
    let lost = FLOWS as usize - WRITTEN;
    let mut metered = args.clone();
    metered.extend(["--metrics", "127.0.0.1:9435"]);
    let twheel = Twheel::start(&pair.server, &metered)?;
    let counted = pair.server.enter(|| scrape("127.0.0.1:9435"))?;
    let line = format!("twheel_history_lost_total {lost}\n");
    assert!(counted.contains(&line), "{counted}");
    let ended = twheel.stop()?;
    assert_eq!(counted_by(&pair.server, "history_lost")?, lost as u64);
    let text = format!("up to {lost} events that have left the ring are not in the history");
    assert!(ended.stderr.contains(&text), "{}", ended.stderr);
    // Once; and whoever reads the history is told.
    let ended = Twheel::start(&pair.server, &args)?.stop()?;
    assert!(
        !ended.stderr.contains("are not in the history"),
        "{}",
        ended.stderr
    );
    let read = ["expired", "--iface", SERVER, "--history", history.path()];
    let ended = pair.server.twheel_once(&read)?;
    assert_eq!(ended.lines.len(), WRITTEN);
    let text = format!("up to {lost} events are not in the history");
    assert!(ended.stderr.contains(&text), "{}", ended.stderr);
    detached(&pair.server)
}

#[test]
fn actions_that_a_killed_run_had_before_it_are_counted() -> Result<()> {
    require_root();
    const FLOWS: u32 = 40;
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "1s", "--keep", "--json"];
    let mut args = args.to_vec();
    args.extend(["--history", "off", "--reap", "conntrack"]);
    let mut slow = args.clone();
    slow.extend(["--reap-rate", "5"]);
    let twheel = Twheel::start(&pair.server, &slow)?;
    pair.server.begin_flows(SERVER, FLOWS)?;
    let (mut expired, mut reaped) = (0, 0);
    while expired < FLOWS || reaped < 3 {
        let line = twheel.line(PATIENCE)?.context("no more comes")?;
        match line.text.contains("\"event\":\"reap\"") {
            true => reaped += 1,
            false => expired += 1,
        }
    }
    let counted = |counter| counted_by(&pair.server, counter);
    // It is counted once it is written.
    let begun = Instant::now();
    while counted("reap_settled")? < reaped {
        assert!(begun.elapsed() < PATIENCE, "{reaped} are not counted");
    }
    twheel.kill()?;
    assert_eq!(counted("reap_asked")?, u64::from(FLOWS));
    let settled = counted("reap_settled")?;
    assert!((reaped..u64::from(FLOWS)).contains(&settled), "{settled}");
    assert_eq!(counted("reap_lost")?, 0, "nobody has said so yet");

    let lost = u64::from(FLOWS) - settled;
    let text = format!("up to {lost} actions on expired flows were not done");
    let ended = Twheel::start(&pair.server, &args)?.stop()?;
    assert!(ended.stderr.contains(&text), "{}", ended.stderr);
    assert_eq!(counted("reap_lost")?, lost);
    // Once.
    let ended = Twheel::start(&pair.server, &args)?.stop()?;
    assert!(!ended.stderr.contains("were not done"), "{}", ended.stderr);
    assert_eq!(counted("reap_lost")?, lost);
    detached(&pair.server)
}

#[test]
fn what_is_not_printed_is_printed_by_the_next_run() -> Result<()> {
    require_root();
    // All fit into the ring: `delete` would make room in a full one, and what it takes out is not printed.
    const FLOWS: u32 = 6_000;
    // Lines that a pipe and a reader of 8 KiB may have had.
    const UNREAD: usize = (4096 + 8192) / 200;
    let pair = Pair::new()?;
    let args = [
        "run",
        "--iface",
        SERVER,
        "--timeout",
        "2s",
        "--tick",
        "20ms",
        "--keep",
    ];
    let mut args = args.to_vec();
    let history = Directory::new("unprinted")?;
    args.extend(["--json", "--history", history.path()]);
    // A disk that is full: a failure, also of who was the first here.
    let full = fs::File::options().write(true).open("/dev/full")?;
    let mut command = pair.server.twheel(&args)?;
    let command = command.stdin(Stdio::null()).stdout(full);
    let mut run = Run(command.stderr(Stdio::piped()).spawn()?);
    run.await_steps()?;
    pair.server.begin_these(SERVER, 0..10)?;
    let mut stderr = String::new();
    let mut pipe = run.0.stderr.take().context("it is piped")?;
    pipe.read_to_string(&mut stderr)?;
    assert_eq!(run.0.wait()?.code(), Some(1), "{stderr}");
    assert!(stderr.contains("No space left"), "{stderr}");
    assert_eq!(pair.server.attached(SERVER)?, ["xdp", "egress"]);

    // Readers that go away after some lines: none.
    let mut printed = BTreeSet::new();
    for (count, begins) in [(500, 10..FLOWS), (1, FLOWS..FLOWS)] {
        let (reader, writer) = std::io::pipe()?;
        fcntl(&writer, FcntlArg::F_SETPIPE_SZ(4096))?;
        let mut run = Run::start(&pair.server, &args, &writer)?;
        drop(writer);
        run.await_steps()?;
        pair.server.begin_these(SERVER, begins)?;
        for line in BufReader::new(reader).lines().take(count) {
            printed.insert(key(&line?)?);
        }
        assert!(run.0.wait()?.success());
        assert_eq!(pair.server.attached(SERVER)?, ["xdp", "egress"]);
    }
    let first: BTreeSet<_> = (0..10).map(key_of).collect();
    assert!(first.is_subset(&printed), "those that met the full disk");

    // Nor does a command that stands in for a loader take it, and what it does itself waits behind.
    pair.server.begin_these(SERVER, FLOWS..FLOWS + 5)?;
    let delete = ["delete", "--iface", SERVER, "--history", history.path()];
    let delete = [&delete[..], &["sport in 7024-7028"]].concat();
    let ended = pair.server.twheel_once(&delete)?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert_eq!(counted_by(&pair.server, "deleted")?, 5);

    let last = Twheel::start(&pair.server, &args[1..])?;
    let deleted: BTreeSet<_> = (FLOWS..FLOWS + 5).map(key_of).collect();
    // A busy machine takes its time to begin; then lines come without a pause.
    let patience = |printed: &BTreeSet<_>| match deleted.is_subset(printed) {
        true => millis(3000),
        false => PATIENCE,
    };
    while let Some(line) = last.line(patience(&printed))? {
        printed.insert(key(&line.text)?);
    }
    assert!(deleted.is_subset(&printed), "those that were deleted");
    let missing = FLOWS as usize + 5 - printed.len();
    assert!(
        missing <= UNREAD,
        "{missing} are neither printed nor were in a pipe"
    );
    assert_eq!(last.stop()?.code(), Some(0));
    assert_eq!(check_accounts(&pair.server)?, 0);
    let all: BTreeSet<_> = (0..FLOWS + 5).map(key_of).collect();
    assert_eq!(kept(&pair.server, &history)?, all);
    detached(&pair.server)
}

#[test]
fn a_run_that_is_refused_takes_nothing_away() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--keep", "--history", "off"];
    Twheel::start(&pair.server, &args)?.stop()?;
    // As when its interface has gone.
    for hook in ["xdp", "egress"] {
        fs::remove_file(pinned(&pair.server)?.join(format!("{hook}@{SERVER}")))?;
    }
    let before = names(&pair.server)?;
    let other = [&["run"], &args[..], &["--max-flows", "4096"]].concat();
    let ended = pair.server.twheel_once(&other)?;
    assert_eq!(ended.code(), Some(6), "{}", ended.stderr);
    assert_eq!(names(&pair.server)?, before);
    let ended = Twheel::start(&pair.server, &args)?.stop()?;
    assert!(ended.stderr.contains("adopted 0 flows"), "{}", ended.stderr);
    detached(&pair.server)
}

/// What the history has, each flow once; nothing is lost or damaged there.
fn kept(namespace: &Namespace, history: &Directory) -> Result<BTreeSet<(SocketAddr, SocketAddr)>> {
    let args = ["expired", "--iface", SERVER, "--json", "--history"];
    let ended = namespace.twheel_once(&[&args[..], &[history.path()]].concat())?;
    assert_eq!((ended.code(), &*ended.stderr), (Some(0), ""));
    let mut kept = BTreeSet::new();
    for line in &ended.lines {
        let key = key(&line.text)?;
        assert!(kept.insert(key), "twice in the history: {}", line.text);
    }
    Ok(kept)
}

/// What `twheel stats` says of a counter.
fn counted_by(namespace: &Namespace, counter: &str) -> Result<u64> {
    let ended = namespace.twheel_once(&["stats", "--iface", SERVER, "--json"])?;
    for line in &ended.lines {
        let value: Value = serde_json::from_str(&line.text)?;
        if value["counter"] == counter {
            return value["total"].as_u64().context("a number");
        }
    }
    anyhow::bail!("no {counter}: {}", ended.stderr)
}

/// Flows that begin and end on this CPU, for which this is to be called in their namespace: where they are pinned, the ring,
/// and what is in it.
fn end(host: &Namespace, flows: u32) -> Result<(Pins, Events, Vec<Read>)> {
    pin_to(0)?;
    host.begin_flows(SERVER, flows)?;
    thread::sleep(millis(1500));
    let pins = Instance::of(SERVER)?;
    pins.callable("twheel_step")?.step(STEP_BUDGET)?;
    let mut events = Events::open(pins.map("EVENTS")?)?;
    let mut batch = Vec::new();
    events.read(&mut batch, usize::MAX);
    assert_eq!(batch.len(), flows as usize);
    Ok((pins, events, batch))
}

/// Keeps an instance's history there, as a run does.
fn keep(history: &Directory, reader: &Reader) -> Result<history::Writer> {
    let directory = history::Directory::make(&history.0, reader.pins())?;
    let tally = Arc::new(LoaderCounters::open(reader.pins())?);
    let (bytes, measure) = (Some(DEFAULT_BYTES), reader.measure());
    history::Writer::start(&directory, reader.pins(), tally, bytes, measure)
}

/// What a run serves.
fn scrape(address: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: 127.0.0.1\r\n\r\n")?;
    Ok(std::io::read_to_string(stream)?)
}

/// Detaches, after which nothing is there.
fn detached(namespace: &Namespace) -> Result<()> {
    let ended = namespace.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    await_clean(namespace)
}

/// The kernel takes a moment to let go of a map or a program.
fn await_loaded(entries: u32, maps: usize, held: impl Fn() -> Result<BTreeSet<u32>>) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let (found, held) = (loaded(entries), held()?);
        if found.0 == maps && found.1.is_subset(&held) {
            return Ok(());
        }
        ensure!(
            Instant::now() < end,
            "{found:?} are loaded, not {maps} maps and {held:?}"
        );
        thread::sleep(millis(20));
    }
}

/// The kernel takes a moment to let go of a link.
fn await_clean(namespace: &Namespace) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        match namespace.check_clean(SERVER) {
            Err(_) if Instant::now() < end => thread::sleep(millis(20)),
            result => return result,
        }
    }
}

/// What a command of another version than the pins' says, and that it leaves them alone.
fn refuses(namespace: &Namespace, args: &[&str], attached: &[&str]) -> Result<()> {
    let ended = namespace.twheel_once(args)?;
    assert_eq!(ended.code(), Some(6), "{args:?}: {}", ended.stderr);
    assert!(
        ended.stderr.contains("another version of twheel"),
        "{args:?}: {}",
        ended.stderr
    );
    assert!(
        ended.stderr.contains("twheel detach"),
        "{args:?}: {}",
        ended.stderr
    );
    assert_eq!(namespace.attached(SERVER)?, attached, "{args:?}");
    Ok(())
}

#[test]
fn pins_of_another_layout_are_refused_and_never_misread() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let keep = || -> Result<PathBuf> {
        let ended = Twheel::start(&pair.server, &["--iface", SERVER, "--keep"])?.stop()?;
        assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
        pinned(&pair.server)
    };
    let mut commands: Vec<Vec<&str>> = [
        "run", "flows", "talkers", "stats", "wheel", "flush", "expired",
    ]
    .map(|command| vec![command, "--iface", SERVER])
    .into();
    commands.push(vec!["delete", "--iface", SERVER, "idle > 10s"]);
    let both = ["xdp", "egress"];

    // Where an earlier version had it, with links that are alive.
    let path = keep()?;
    let version = path.parent().context("a version")?;
    let earlier = version.with_file_name(format!("v{}", LAYOUT - 1));
    fs::create_dir_all(&earlier)?;
    fs::rename(&path, earlier.join(path.file_name().context("a name")?))?;
    let _ = fs::remove_dir(version);
    for command in &commands {
        refuses(&pair.server, command, &both)?;
    }
    let doctor = pair.server.twheel_once(&["doctor"])?;
    let text: String = doctor.lines.iter().map(|line| line.text.as_str()).collect();
    assert!(text.contains("by another version of twheel"), "{text}");
    let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    await_clean(&pair.server)?;

    // Where this version has it, but META says another number.
    let path = keep()?;
    let map = MapData::from_pin(path.join("META"))?;
    let mut map = Array::<_, Meta>::try_from(Map::Array(map))?;
    let meta = map.get(&0, 0)?;
    map.set(
        0,
        Meta {
            layout: LAYOUT - 1,
            ..meta
        },
        0,
    )?;
    for command in &commands {
        refuses(&pair.server, command, &both)?;
    }
    let ended = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    await_clean(&pair.server)
}
