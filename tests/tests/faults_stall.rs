//! A run that is stopped, a stepper that is held, and CPUs and interfaces that disappear.

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
use twheel::{data_plane::RING_BYTES, pins::Instance, stepper::pin_to};
use twheel_common::event::Event;
use twheel_tests::{
    directory::Directory,
    is_long,
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

/// Reads this many expiries, or those that come within the time; each flow has one.
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

/// A number from the metrics that a run in this namespace serves.
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

/// The thread with this name.
fn thread_of(twheel: &Twheel, name: &str) -> Result<Pid> {
    for task in fs::read_dir(format!("/proc/{}/task", twheel.pid()))? {
        let task = task?;
        if fs::read_to_string(task.path().join("comm"))?.trim() == name {
            return Ok(Pid::from_raw(task.file_name().to_string_lossy().parse()?));
        }
    }
    anyhow::bail!("no thread {name}")
}

/// Begins the flows up to this number that do not exist yet, on the wheel of a CPU.
fn begin(namespace: &Namespace, cpu: u32, flows: u32) -> Result<()> {
    thread::scope(|scope| {
        let begin = || {
            pin_to(cpu)?;
            namespace.begin_flows(SERVER, flows)
        };
        scope.spawn(begin).join().expect("the thread panicked")
    })
}

#[test]
fn what_was_due_while_the_loader_stood_still_is_reported_late_and_once() -> Result<()> {
    require_root();
    let stall = Duration::from_secs(if is_long() { 30 } else { 10 });
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "1s", "--json"];
    let args = [&args[..], &["--metrics", "9435"]].concat();
    let twheel = Twheel::start(&pair.server, &args)?;
    begin(&pair.server, 0, 2000)?;
    signal(&twheel, Signal::SIGSTOP)?;
    let since = Instant::now();
    // More flows than the ring holds events, on both wheels.
    let mut flows = 2000;
    while since.elapsed() < stall / 2 {
        flows += 500;
        begin(&pair.server, (flows / 500) % 2, flows)?;
        thread::sleep(millis(100));
    }
    let ring = RING_BYTES as usize / size_of::<Event>();
    assert!(flows as usize > ring, "{flows} flows, {ring} events");
    // From the last packet on: on a busy machine, the last flows begin late.
    thread::sleep(stall / 2);
    signal(&twheel, Signal::SIGCONT)?;
    let resumed = Instant::now();
    let found = expiries(&twheel, flows as usize, PATIENCE)?;
    let caught_up = resumed.elapsed();
    assert_eq!(found.len(), flows as usize, "flows reported once each");
    let latest = found.values().map(|it| it.idle).max().context("some")?;
    let earliest = found.values().map(|it| it.idle).min().context("some")?;
    // All were due before the run continued, most of them long before.
    assert!(earliest >= stall / 2 - millis(1000), "{earliest:?}");
    eprintln!("{flows} flows, idle for {earliest:?} to {latest:?}, reported within {caught_up:?}");

    let late = |bucket: &str| metric(&pair.server, 9435, bucket);
    let count = late("twheel_expiry_lateness_seconds_count")?;
    let on_time = late("twheel_expiry_lateness_seconds_bucket{le=\"2.5\"}")?;
    assert_eq!(
        (count, on_time),
        (f64::from(flows), 0.0),
        "the reports do not show how late they were"
    );
    assert_eq!(expiries(&twheel, 1, millis(1500))?.len(), 0, "duplicates");
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

/// Holds a thread of another process until it is dropped.
struct Held(Pid);

impl Held {
    fn new(thread: Pid) -> Result<Self> {
        let mut status = 0;
        // SAFETY: requests that use none of our memory, and one with a word that lives until the
        // call returns.
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
        // SAFETY: it uses none of our memory.
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
    assert_eq!(others.len(), 500, "flows of the other CPU");
    drop(held);
    let late = expiries(&twheel, 500, PATIENCE)?;
    assert_eq!(late.len(), 500, "flows of the held stepper");
    assert!(late.keys().all(|it| !others.contains_key(it)), "duplicates");
    let of = |it: &BTreeMap<_, Expiry>| it.values().map(|it| it.idle).max().unwrap_or_default();
    eprintln!(
        "idle at the end: {:?}; where the stepper was held {:?}",
        of(&others),
        of(&late)
    );
    assert!(
        late.values().all(|it| it.idle >= millis(3500)),
        "they were not late"
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
    // The flows have ended by then, and their events wait for the history.
    thread::sleep(millis(1200));
    pair.server.await_expired(100, Instant::now() + PATIENCE)?;
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
    // The kernel does this when the CPU goes offline.
    sched_setaffinity(stepper(&twheel, 1)?, &set)?;
    assert_eq!(expiries(&twheel, 10, millis(5000))?.len(), 10);
    // The kernel repeats the event on request.
    fs::write("/sys/devices/system/cpu/cpu1/uevent", "online")?;
    twheel.await_stderr("CPU 1 came online")?;
    begin(&pair.server, 1, 20)?;
    assert_eq!(expiries(&twheel, 20, millis(5000))?.len(), 20, "it resumed");
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

/// Brings a CPU back online, however the test ends.
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
    // This takes the CPU away from every process on the machine.
    if !is_long() && std::env::var_os("TWHEEL_HOTPLUG").is_none() {
        let can = match fs::metadata(CPU) {
            Ok(_) => "this machine has the switch for it",
            Err(_) => "and this machine has no switch for it",
        };
        twheel_tests::skipped(format_args!(
            "no CPU is taken offline without TWHEEL_HOTPLUG or TWHEEL_LONG; {can}"
        ));
        return Ok(());
    }
    let pair = Pair::new()?;
    let args = ["--iface", SERVER, "--timeout", "2s", "--json"];
    let twheel = Twheel::start(&pair.server, &args)?;
    begin(&pair.server, 1, 500)?;
    if let Err(error) = fs::write(CPU, "0") {
        twheel_tests::skipped(format_args!("CPU 1 cannot be taken offline here: {error}"));
        return Ok(());
    }
    let online = Online(CPU);
    begin(&pair.server, 0, 1000)?;
    let here = expiries(&twheel, 501, millis(5000));
    drop(online);
    let here = here?;
    assert_eq!(here.len(), 500, "flows of the CPU that is online");
    twheel.await_stderr("CPU 1 went offline")?;
    let late = expiries(&twheel, 500, PATIENCE)?;
    assert_eq!(late.len(), 500, "flows of the CPU that was offline");
    assert!(late.keys().all(|it| !here.contains_key(it)), "duplicates");
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

/// The group that may read everything; a number suffices.
const GROUP: &str = "65534";

/// Checks that the group may use everything that is pinned but one map, BPF links included.
fn check_shared(host: &Namespace) -> Result<()> {
    let pins = host.pins()?;
    let is_link = |pin: &&PathBuf| pin.to_string_lossy().contains('@');
    assert_eq!(pins.iter().filter(is_link).count(), 2, "{pins:?}");
    for pin in pins {
        let found = fs::metadata(&pin)?;
        let (group, mode) = (found.gid().to_string(), found.mode() & 0o777);
        // What proves whose a handed-over timeout is, is not for the group.
        let is_secret = pin.ends_with("OFFLOAD_KEY");
        let is_right = is_secret && mode == 0o600 || (&*group, mode) == (GROUP, 0o660);
        assert!(is_right, "{group} {mode:o} {}", pin.display());
    }
    Ok(())
}

/// Creates the interface, with an address and a neighbour that never answers.
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

/// Sends a SYN that stays unanswered, and checks that its flow expires.
fn check_seen(host: &Namespace, twheel: &Twheel) -> Result<()> {
    let to = SocketAddr::from(([10, 99, 0, 2], 7777));
    let connected = host.enter(|| Ok(TcpStream::connect_timeout(&to, millis(100))))?;
    ensure!(connected.is_err(), "the neighbour must not answer");
    let found = expiries(twheel, 1, millis(4000))?;
    ensure!(
        found.values().any(|it| it.dst == to),
        "the SYN was not seen: {}",
        twheel.stderr()
    );
    Ok(())
}

/// Waits until a text occurs this many times on standard error.
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

    // Removed and created again.
    host.ip(&format!("link del {LINK}"))?;
    await_times(&twheel, "disappeared:", 1)?;
    assert!(
        host.pins()?
            .iter()
            .all(|pin| !pin.to_string_lossy().contains('@')),
        "a BPF link is left"
    );
    create(&host)?;
    await_times(&twheel, ": attached", 2)?;
    check_seen(&host, &twheel)?;
    check_shared(&host)?;

    // Another MTU, another name: it is still the same interface.
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

    // Another interface takes its name.
    host.ip(&format!("link set {LINK} down"))?;
    host.ip(&format!("link set {LINK} name other0"))?;
    host.ip("link set peer0 name peer1")?;
    create(&host)?;
    await_times(&twheel, ": attached", 3)?;
    assert_eq!(host.attached(LINK)?, ["xdp", "egress"]);
    await_clean(&host, "other0")?;
    check_seen(&host, &twheel)?;

    // Moved to another namespace, where it must not be watched, and back.
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

/// Waits until nothing is attached: the kernel removes BPF links with a short delay.
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

/// Pins something other than a BPF link at the place of the link for outgoing packets.
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

    // An interface that a run waits for.
    create(&host)?;
    let twheel = Twheel::start(&host, &args)?;
    host.ip(&format!("link del {LINK}"))?;
    await_times(&twheel, "disappeared:", 1)?;
    obstruct(&host, LINK)?;
    // The kernel reports it once.
    host.ip(&format!("link add {LINK} type veth peer name peer0"))?;
    await_times(&twheel, "trying again when the interface changes", 1)?;
    assert_eq!(host.attached(LINK)?, [""; 0]);
    bring_up(&host)?;
    await_times(&twheel, ": attached", 2)?;
    assert_eq!(host.attached(LINK)?, ["xdp", "egress"]);
    check_seen(&host, &twheel)?;
    assert_eq!(twheel.stop()?.code(), Some(0));

    // An interface more than a kept instance has.
    let kept = Twheel::start(&host, &[&args[..], &["--keep"]].concat())?;
    assert_eq!(kept.stop()?.code(), Some(0));
    obstruct(&host, "peer0")?;
    let more = [&["run"], &args[..], &["--iface", "peer0"]].concat();
    let ended = host.twheel_once(&more)?;
    assert_eq!(ended.code(), Some(1), "{}", ended.stderr);
    await_clean(&host, "peer0")?;
    assert_eq!(host.attached(LINK)?, ["xdp", "egress"]);

    // The same while another program sees its incoming packets.
    let pins = host.pins()?;
    let wrong = pins.iter().find(|it| it.ends_with("egress@peer0"));
    fs::remove_file(wrong.context("the wrong pin is gone")?)?;
    let other = host.enter(|| {
        let mut other = Instance::with(LINK)?.xdp("twheel_sweep")?;
        other.attach("peer0", XdpMode::Driver)?;
        Ok(other)
    })?;
    let ended = host.twheel_once(&[&more[..], &["--hook", "xdp"]].concat())?;
    assert_eq!(ended.code(), Some(5), "{}", ended.stderr);
    assert_eq!(host.attached("peer0")?, ["xdp"], "the other program only");
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
        maker.join().expect("the thread panicked")?;
        await_times(&twheel, ": attached", 1)?;
        check_seen(&host, &twheel)?;
        assert_eq!(twheel.stop()?.code(), Some(0));
        anyhow::Ok(())
    });
    maker?;

    // Without the option, the run reports it, and the existing flows end.
    let twheel = Twheel::start(&host, &args[1..])?;
    host.ip(&format!("link del {LINK}"))?;
    let stderr = twheel.await_stderr("disappeared:")?;
    assert!(stderr.contains("--wait-iface"), "{stderr}");
    create(&host)?;
    thread::sleep(millis(500));
    assert_eq!(host.attached(LINK)?, [""; 0], "attached unasked");
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    host.check_clean(LINK)
}
