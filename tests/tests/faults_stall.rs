//! A loader that stands still, a stepper that does, CPUs and interfaces that go.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{Ipv4Addr, SocketAddr, TcpStream},
    os::unix::fs::MetadataExt,
    path::PathBuf,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use aya::programs::XdpMode;
use nix::{
    sched::{CpuSet, sched_setaffinity},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use twheel::{pins::Instance, stepper::pin_to};
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE, require_root},
    pair::{Pair, SERVER},
    running::{Expiry, Twheel},
};

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

fn signal(twheel: &Twheel, signal: Signal) -> Result<()> {
    Ok(kill(Pid::from_raw(twheel.pid() as i32), signal)?)
}

/// So many expiries, or as many as come; of each flow one.
fn expiries(
    twheel: &Twheel,
    count: usize,
    within: Duration,
) -> Result<BTreeMap<SocketAddr, Expiry>> {
    let end = Instant::now() + within;
    let mut found = BTreeMap::new();
    while found.len() < count {
        let Some(line) = twheel.line(end.saturating_duration_since(Instant::now()))? else {
            break;
        };
        let expiry = line.expiry()?;
        let twice = found.insert(expiry.src, expiry);
        ensure!(twice.is_none(), "reported twice: {}", line.text);
    }
    Ok(found)
}

/// One number of the metrics that are served in a namespace.
fn metric(namespace: &Namespace, port: u16, name: &str) -> Result<f64> {
    let mut stream = namespace.enter(|| Ok(TcpStream::connect((Ipv4Addr::LOCALHOST, port))?))?;
    stream.write_all(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let value = text
        .lines()
        .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
    Ok(value
        .with_context(|| format!("no {name} in {text}"))?
        .trim()
        .parse()?)
}

/// The thread of a CPU's stepper.
fn stepper(twheel: &Twheel, cpu: u32) -> Result<Pid> {
    thread_of(twheel, &format!("twheel-step-{cpu}"))
}

/// The thread of a name.
fn thread_of(twheel: &Twheel, name: &str) -> Result<Pid> {
    for task in fs::read_dir(format!("/proc/{}/task", twheel.pid()))? {
        let task = task?;
        if fs::read_to_string(task.path().join("comm"))?.trim() == name {
            return Ok(Pid::from_raw(task.file_name().to_string_lossy().parse()?));
        }
    }
    anyhow::bail!("no thread {name}")
}

/// Begins flows up to that number that are not there yet, on the wheel of a CPU.
fn begin(namespace: &Namespace, cpu: u32, flows: u32) -> Result<()> {
    thread::scope(|scope| {
        let begin = || {
            pin_to(cpu)?;
            namespace.begin_flows(SERVER, flows)
        };
        scope.spawn(begin).join().expect("no panic")
    })
}

#[test]
fn what_was_due_while_the_loader_stood_still_is_reported_late_and_once() -> Result<()> {
    require_root();
    const STALL: Duration = Duration::from_secs(30);
    let pair = Pair::new()?;
    let args = [
        "--iface",
        SERVER,
        "--timeout",
        "1s",
        "--json",
        "--metrics",
        "9435",
    ];
    let twheel = Twheel::start(&pair.server, &args)?;
    begin(&pair.server, 0, 2000)?;
    signal(&twheel, Signal::SIGSTOP)?;
    let since = Instant::now();
    // More than the ring holds, on both wheels.
    let mut flows = 2000;
    while since.elapsed() < STALL / 2 {
        flows += 500;
        begin(&pair.server, (flows / 500) % 2, flows)?;
        thread::sleep(millis(100));
    }
    thread::sleep(STALL.saturating_sub(since.elapsed()));
    signal(&twheel, Signal::SIGCONT)?;
    let resumed = Instant::now();
    let found = expiries(&twheel, flows as usize, PATIENCE)?;
    let caught_up = resumed.elapsed();
    assert_eq!(found.len(), flows as usize, "all, and each once");
    let latest = found.values().map(|it| it.idle).max().context("some")?;
    let earliest = found.values().map(|it| it.idle).min().context("some")?;
    // All were due before the loader went on, most of them long before.
    assert!(earliest >= STALL / 2 - millis(1000), "{earliest:?}");
    eprintln!("{flows} flows, idle for {earliest:?} to {latest:?}, reported within {caught_up:?}");

    let late = |bucket: &str| metric(&pair.server, 9435, bucket);
    let count = late("twheel_expiry_lateness_seconds_count")?;
    let on_time = late("twheel_expiry_lateness_seconds_bucket{le=\"2.5\"}")?;
    assert_eq!(
        (count, on_time),
        (f64::from(flows), 0.0),
        "how late they were shows"
    );
    assert_eq!(expiries(&twheel, 1, millis(1500))?.len(), 0, "none twice");
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert!(
        ended
            .stderr
            .contains(&format!("{flows} flows ended, 0 live")),
        "{}",
        ended.stderr
    );
    pair.server.check_clean(SERVER)
}

/// Holds one thread of another process, until it is dropped.
struct Held(Pid);

impl Held {
    fn new(thread: Pid) -> Result<Self> {
        let mut status = 0;
        // SAFETY: requests without memory of ours, and a word that is alive.
        let held = unsafe {
            libc::ptrace(libc::PTRACE_SEIZE, thread.as_raw(), 0, 0) == 0
                && libc::ptrace(libc::PTRACE_INTERRUPT, thread.as_raw(), 0, 0) == 0
                && libc::waitpid(thread.as_raw(), &raw mut status, libc::__WALL) == thread.as_raw()
        };
        ensure!(
            held,
            "cannot hold a thread: {}",
            std::io::Error::last_os_error()
        );
        Ok(Self(thread))
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // SAFETY: without memory of ours.
        unsafe { libc::ptrace(libc::PTRACE_DETACH, self.0.as_raw(), 0, 0) };
    }
}

#[test]
fn while_one_stepper_stands_still_the_others_go_on() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "1s", "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    let held = Held::new(stepper(&twheel, 0)?)?;
    begin(&pair.server, 0, 500)?;
    begin(&pair.server, 1, 1000)?;
    let others = expiries(&twheel, 501, millis(4000))?;
    assert_eq!(others.len(), 500, "those of the other CPU");
    drop(held);
    let late = expiries(&twheel, 500, PATIENCE)?;
    assert_eq!(late.len(), 500, "and then the rest");
    assert!(late.keys().all(|it| !others.contains_key(it)), "each once");
    let of = |it: &BTreeMap<_, Expiry>| it.values().map(|it| it.idle).max().unwrap_or_default();
    eprintln!(
        "idle at the end: {:?}; where the stepper was held {:?}",
        of(&others),
        of(&late)
    );
    assert!(
        late.values().all(|it| it.idle >= millis(3500)),
        "they were late"
    );
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

#[test]
fn a_run_that_is_ended_while_its_history_stands_still_ends_and_has_all() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let history = Directory::new("ended")?;
    let args = ["--iface", SERVER, "--timeout", "1s", "--json", "--history"];
    let twheel = Twheel::start(&pair.server, &[&args[..], &[history.path()]].concat())?;
    begin(&pair.server, 0, 100)?;
    thread::sleep(millis(200));
    let held = Held::new(thread_of(&twheel, "twheel-history")?)?;
    // They have ended by then, and wait for the history.
    thread::sleep(millis(1200));
    signal(&twheel, Signal::SIGINT)?;
    thread::sleep(millis(200));
    drop(held);
    let ended = twheel.wait()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert_eq!(ended.lines.len(), 100);
    let reported = ended.stderr.contains("100 flows ended, 0 live");
    assert!(reported, "{}", ended.stderr);
    let args = ["expired", "--iface", SERVER, "--json", "--history"];
    let kept = pair
        .server
        .twheel_once(&[&args[..], &[history.path()]].concat())?;
    assert_eq!(kept.lines.len(), 100, "{}", kept.stderr);
    pair.server.check_clean(SERVER)
}

#[test]
fn a_stepper_that_is_moved_to_another_cpu_goes_back() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "1s", "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    begin(&pair.server, 1, 10)?;
    let mut set = CpuSet::new();
    set.set(0)?;
    // As the kernel does when the CPU goes.
    sched_setaffinity(stepper(&twheel, 1)?, &set)?;
    assert_eq!(expiries(&twheel, 10, millis(5000))?.len(), 10);
    // The kernel says it again for whoever asks.
    fs::write("/sys/devices/system/cpu/cpu1/uevent", "online")?;
    twheel.await_stderr("CPU 1 came online")?;
    begin(&pair.server, 1, 20)?;
    assert_eq!(expiries(&twheel, 20, millis(5000))?.len(), 20, "it goes on");
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// Brings a CPU back, however the test ends.
struct Online(&'static str);

impl Drop for Online {
    fn drop(&mut self) {
        let _ = fs::write(self.0, "1");
    }
}

#[test]
fn flows_of_a_cpu_that_goes_wait_until_it_is_back() -> Result<()> {
    require_root();
    const CPU: &str = "/sys/devices/system/cpu/cpu1/online";
    // It takes the CPU from everybody on the machine.
    if !twheel_tests::is_soak() && std::env::var_os("TWHEEL_HOTPLUG").is_none() {
        let can = match fs::metadata(CPU) {
            Ok(_) => "this machine has the switch for it",
            Err(_) => "and this machine has no switch for it",
        };
        twheel_tests::skipped(format_args!(
            "no CPU is taken away without TWHEEL_HOTPLUG or TWHEEL_SOAK; {can}"
        ));
        return Ok(());
    }
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "2s", "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    begin(&pair.server, 1, 500)?;
    if let Err(error) = fs::write(CPU, "0") {
        twheel_tests::skipped(format_args!("CPU 1 cannot be taken away here: {error}"));
        return Ok(());
    }
    let online = Online(CPU);
    begin(&pair.server, 0, 1000)?;
    let here = expiries(&twheel, 501, millis(5000));
    drop(online);
    let here = here?;
    assert_eq!(here.len(), 500, "those of the CPU that is there");
    twheel.await_stderr("CPU 1 went offline")?;
    let late = expiries(&twheel, 500, PATIENCE)?;
    assert_eq!(late.len(), 500, "and then the rest");
    assert!(late.keys().all(|it| !here.contains_key(it)), "each once");
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("CPU 1 came online"),
        "{}",
        ended.stderr
    );
    pair.server.check_clean(SERVER)
}

/// The interface that comes and goes.
const LINK: &str = "link0";

/// Who may look at it all: a number is enough.
const GROUP: &str = "65534";

/// All that is pinned, links among it, is the group's to use.
fn check_shared(host: &Namespace) -> Result<()> {
    let pins = host.pins()?;
    let is_link = |pin: &&PathBuf| pin.to_string_lossy().contains('@');
    assert_eq!(pins.iter().filter(is_link).count(), 2, "{pins:?}");
    for pin in pins {
        let found = fs::metadata(&pin)?;
        let (group, mode) = (found.gid().to_string(), found.mode() & 0o777);
        assert_eq!((&*group, mode), (GROUP, 0o660), "{}", pin.display());
    }
    Ok(())
}

/// Creates it, with an address, and a neighbour who never answers.
fn create(host: &Namespace) -> Result<()> {
    host.ip(&format!("link add {LINK} type veth peer name peer0"))?;
    bring_up(host)
}

fn bring_up(host: &Namespace) -> Result<()> {
    host.ip("link set peer0 up")?;
    host.ip(&format!("link set {LINK} up"))?;
    host.ip(&format!("addr replace 10.99.0.1/24 dev {LINK}"))?;
    host.ip(&format!(
        "neigh replace 10.99.0.2 lladdr 02:00:00:00:00:63 dev {LINK} nud permanent"
    ))?;
    Ok(())
}

/// Sends a SYN that nobody answers, and sees it expire.
fn check_seen(host: &Namespace, twheel: &Twheel) -> Result<()> {
    let to = SocketAddr::from(([10, 99, 0, 2], 7777));
    let connected = host.enter(|| Ok(TcpStream::connect_timeout(&to, millis(100))))?;
    ensure!(connected.is_err(), "nobody is there");
    let found = expiries(twheel, 1, millis(4000))?;
    ensure!(
        found.values().any(|it| it.dst == to),
        "it was not seen: {}",
        twheel.stderr()
    );
    Ok(())
}

/// Waits until a text has come so often on standard error.
fn await_times(twheel: &Twheel, text: &str, times: usize) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while twheel.stderr().matches(text).count() < times {
        ensure!(
            Instant::now() < end,
            "{text:?} not {times} times in {}",
            twheel.stderr()
        );
        thread::sleep(millis(10));
    }
    Ok(())
}

#[test]
fn an_interface_that_goes_is_let_go_of_and_attached_again_when_it_is_back() -> Result<()> {
    require_root();
    let host = Namespace::new("wait")?;
    let other = Namespace::new("other")?;
    create(&host)?;
    let args = [
        "--iface",
        LINK,
        "--wait-iface",
        "--timeout",
        "500ms",
        "--group",
        GROUP,
        "--json",
    ];
    let twheel = Twheel::start(&host, &args)?;
    check_seen(&host, &twheel)?;
    check_shared(&host)?;

    // Removed, and made again.
    host.ip(&format!("link del {LINK}"))?;
    await_times(&twheel, "disappeared:", 1)?;
    assert!(
        host.pins()?
            .iter()
            .all(|pin| !pin.to_string_lossy().contains('@')),
        "a link is left"
    );
    create(&host)?;
    await_times(&twheel, ": attached", 2)?;
    check_seen(&host, &twheel)?;
    check_shared(&host)?;

    // Another MTU, another name: it stays what it is.
    host.ip(&format!("link set {LINK} mtu 1400"))?;
    await_times(&twheel, "MTU changed to 1400:", 1)?;
    host.ip(&format!("link set {LINK} down"))?;
    host.ip(&format!("link set {LINK} name other0"))?;
    await_times(&twheel, "renamed to other0:", 1)?;
    assert_eq!(host.attached("other0")?, ["xdp", "egress"]);
    host.ip(&format!("link set other0 name {LINK}"))?;
    await_times(&twheel, &format!("renamed to {LINK}:"), 1)?;
    bring_up(&host)?;
    check_seen(&host, &twheel)?;

    // Another takes its name.
    host.ip(&format!("link set {LINK} down"))?;
    host.ip(&format!("link set {LINK} name other0"))?;
    host.ip("link set peer0 name peer1")?;
    create(&host)?;
    await_times(&twheel, ": attached", 3)?;
    assert_eq!(host.attached(LINK)?, ["xdp", "egress"]);
    await_clean(&host, "other0")?;
    check_seen(&host, &twheel)?;

    // Into another namespace, where it is not to be watched; and back.
    host.ip(&format!("link set {LINK} netns {}", other.name()))?;
    await_times(&twheel, "disappeared:", 2)?;
    await_clean(&other, LINK)?;
    other.ip(&format!("link set {LINK} netns {}", host.name()))?;
    await_times(&twheel, ": attached", 4)?;
    bring_up(&host)?;
    check_seen(&host, &twheel)?;

    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    host.check_clean(LINK)
}

/// The kernel takes a moment to let go of a link.
fn await_clean(host: &Namespace, interface: &str) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while !host.attached(interface)?.is_empty() {
        ensure!(
            Instant::now() < end,
            "left attached: {:?}",
            host.attached(interface)?
        );
        thread::sleep(millis(10));
    }
    Ok(())
}

#[test]
fn links_left_on_what_has_another_name_by_now_are_not_taken_for_those_of_who_has_it() -> Result<()>
{
    require_root();
    let host = Namespace::new("left")?;
    let args = ["--iface", LINK, "--timeout", "500ms", "--json", "--mode"];
    for (mode, peer) in [("auto", "peer1"), ("generic", "peer2")] {
        let args = [&args[..], &[mode]].concat();
        create(&host)?;
        let kept = Twheel::start(&host, &[&args[..], &["--keep"]].concat())?;
        assert_eq!(kept.stop()?.code(), Some(0));
        host.ip(&format!("link set {LINK} down"))?;
        host.ip(&format!("link set {LINK} name other0"))?;
        host.ip(&format!("link set peer0 name {peer}"))?;
        create(&host)?;
        let twheel = Twheel::start(&host, &args)?;
        assert_eq!(host.attached(LINK)?, ["xdp", "egress"], "{mode}");
        await_clean(&host, "other0")?;
        check_seen(&host, &twheel)?;
        assert_eq!(twheel.stop()?.code(), Some(0));
        host.check_clean(LINK)?;
        for name in [LINK, "other0"] {
            host.ip(&format!("link del {name}"))?;
        }
    }
    Ok(())
}

/// Pins what is no link where that of outgoing packets is to be.
fn obstruct(host: &Namespace, interface: &str) -> Result<()> {
    let pins = host.pins()?;
    let map = pins.iter().find(|it| it.ends_with("META"));
    let map = map.context("no pins")?;
    let place = map.with_file_name(format!("egress@{interface}"));
    Ok(fs::hard_link(map, place)?)
}

#[test]
fn an_interface_is_attached_both_ways_or_not_at_all() -> Result<()> {
    require_root();
    let host = Namespace::new("half")?;
    let args = ["--iface", LINK, "--egress", "on", "--timeout", "500ms"];
    let args = [&args[..], &["--json", "--wait-iface"]].concat();

    // One that a run waits for.
    create(&host)?;
    let twheel = Twheel::start(&host, &args)?;
    host.ip(&format!("link del {LINK}"))?;
    await_times(&twheel, "disappeared:", 1)?;
    obstruct(&host, LINK)?;
    // The kernel tells of it once.
    host.ip(&format!("link add {LINK} type veth peer name peer0"))?;
    await_times(&twheel, "trying again when the interface changes", 1)?;
    assert_eq!(host.attached(LINK)?, [""; 0]);
    bring_up(&host)?;
    await_times(&twheel, ": attached", 2)?;
    assert_eq!(host.attached(LINK)?, ["xdp", "egress"]);
    check_seen(&host, &twheel)?;
    assert_eq!(twheel.stop()?.code(), Some(0));

    // One more than an instance has that was kept.
    let kept = Twheel::start(&host, &[&args[..], &["--keep"]].concat())?;
    assert_eq!(kept.stop()?.code(), Some(0));
    obstruct(&host, "peer0")?;
    let more = [&["run"], &args[..], &["--iface", "peer0"]].concat();
    let ended = host.twheel_once(&more)?;
    assert_eq!(ended.code(), Some(1), "{}", ended.stderr);
    await_clean(&host, "peer0")?;
    assert_eq!(host.attached(LINK)?, ["xdp", "egress"]);

    // The same where somebody else sees its incoming packets.
    let pins = host.pins()?;
    let wrong = pins.iter().find(|it| it.ends_with("egress@peer0"));
    fs::remove_file(wrong.context("it is left")?)?;
    let other = host.enter(|| {
        let mut other = Instance::of(LINK)?.xdp("twheel_sweep")?;
        other.attach("peer0", XdpMode::Driver)?;
        Ok(other)
    })?;
    let ended = host.twheel_once(&[&more[..], &["--hook", "xdp"]].concat())?;
    assert_eq!(ended.code(), Some(5), "{}", ended.stderr);
    assert_eq!(host.attached("peer0")?, ["xdp"], "not ours");
    drop(other);
    assert_eq!(host.attached(LINK)?, ["xdp", "egress"]);
    for interface in ["peer0", LINK] {
        host.twheel_once(&["detach", "--iface", interface])?;
    }
    await_clean(&host, LINK)?;
    host.check_clean(LINK)
}

#[test]
fn an_interface_that_is_not_there_is_waited_for_or_said() -> Result<()> {
    require_root();
    let host = Namespace::new("absent")?;
    let args = ["run", "--iface", LINK, "--timeout", "500ms", "--json"];
    let ended = host.twheel_once(&args)?;
    assert_eq!(ended.code(), Some(5), "{}", ended.stderr);
    assert!(ended.stderr.contains("--wait-iface"), "{}", ended.stderr);

    let maker = thread::scope(|scope| {
        let maker = scope.spawn(|| {
            thread::sleep(millis(6000));
            create(&host)
        });
        let mut args = args[1..].to_vec();
        args.push("--wait-iface");
        let twheel = Twheel::start(&host, &args)?;
        assert!(
            twheel
                .stderr()
                .contains("does not exist yet: waiting for it"),
            "{}",
            twheel.stderr()
        );
        maker.join().expect("no panic")?;
        await_times(&twheel, ": attached", 1)?;
        check_seen(&host, &twheel)?;
        assert_eq!(twheel.stop()?.code(), Some(0));
        anyhow::Ok(())
    });
    maker?;

    // Without: said, and the flows that there are end.
    let twheel = Twheel::start(&host, &args[1..])?;
    host.ip(&format!("link del {LINK}"))?;
    let stderr = twheel.await_stderr("disappeared:")?;
    assert!(stderr.contains("--wait-iface"), "{stderr}");
    create(&host)?;
    thread::sleep(millis(500));
    assert_eq!(host.attached(LINK)?, [""; 0], "nobody has asked for that");
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    host.check_clean(LINK)
}
