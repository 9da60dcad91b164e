//! What is done to flows that have expired: real sockets, real conntrack, real resets.
#![allow(missing_docs)]

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashSet},
    fs,
    io::{ErrorKind, Read, Write},
    net::{IpAddr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel_tests::{
    ctnetlink::Conntrack,
    netns::{
        Connection, Ended, Family, Namespace, PATIENCE, PORT, Pair, PolicyFile, SERVER, Twheel,
        require_root,
    },
};

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// A line of output, read; and when it came.
#[derive(Debug)]
struct Said {
    at: Instant,
    value: Value,
}

impl Said {
    fn is(&self, event: &str) -> bool {
        self.value["event"] == event
    }

    fn text(&self, key: &str) -> &str {
        self.value[key].as_str().unwrap_or_default()
    }

    fn src(&self) -> SocketAddr {
        let ip: IpAddr = self.text("src").parse().expect("an address");
        SocketAddr::new(ip, self.value["sport"].as_u64().expect("a port") as u16)
    }
}

/// Reads what it says until as many actions were reported, or until that time.
fn actions(twheel: &Twheel, count: usize, within: Duration) -> Result<Vec<Said>> {
    events(twheel, "reap", count, within)
}

/// The same of other events.
fn events(twheel: &Twheel, event: &str, count: usize, within: Duration) -> Result<Vec<Said>> {
    let end = Instant::now() + within;
    let (mut said, mut done) = (Vec::new(), 0);
    while done < count
        && let Some(line) = twheel.line(end.saturating_duration_since(Instant::now()))?
    {
        let value = serde_json::from_str(&line.text).context("no JSON")?;
        let one = Said { at: line.at, value };
        done += usize::from(one.is(event));
        said.push(one);
    }
    Ok(said)
}

/// How often an action had this outcome.
fn count(said: &[Said], action: &str, outcome: &str) -> usize {
    let is = |one: &&Said| {
        one.is("reap") && one.text("action") == action && one.text("outcome") == outcome
    };
    said.iter().filter(is).count()
}

/// What the summary counts of this.
fn summed(ended: &Ended, what: &str) -> usize {
    let lines = ended.stderr.lines();
    lines
        .filter_map(|line| line.trim().split_once("  "))
        .find(|(_, text)| *text == what)
        .map_or(0, |(count, _)| count.parse().expect("a number"))
}

fn run(namespace: &Namespace, interface: &str, more: &[&str]) -> Result<Twheel> {
    let mut args = vec!["--iface", interface, "--json"];
    args.extend(more);
    Twheel::start(namespace, &args)
}

fn read_error(socket: &mut TcpStream) -> Option<ErrorKind> {
    socket.read(&mut [0]).err().map(|error| error.kind())
}

/// What a read gives at once; `Ok(0)` is the end.
fn peek(socket: &TcpStream) -> std::io::Result<usize> {
    socket.set_nonblocking(true)?;
    let read = (&*socket).read(&mut [0; 64]);
    socket.set_nonblocking(false)?;
    read
}

fn is_open(socket: &TcpStream) -> bool {
    peek(socket).is_err_and(|error| error.kind() == ErrorKind::WouldBlock)
}

/// A router, and hosts that reach each other through it.
struct Lab {
    listener: Vec<TcpListener>,
    hosts: Vec<Namespace>,
    router: Namespace,
}

const HOST: &str = "eth";
/// The router's interfaces.
const LEGS: [&str; 3] = ["leg0", "leg1", "leg2"];

impl Lab {
    fn address(family: Family, link: usize, host: u8) -> IpAddr {
        let text = match family {
            Family::V4 => format!("10.78.{link}.{host}"),
            Family::V6 => format!("fd78:{link}::{host}"),
        };
        text.parse().expect("an address")
    }

    fn new(hosts: usize) -> Result<Self> {
        let router = Namespace::new("router")?;
        router.enter(|| {
            for family in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
                fs::write(format!("/proc/sys/net/{family}"), "1")?;
            }
            Ok(())
        })?;
        let mut lab = Self {
            listener: Vec::new(),
            hosts: Vec::new(),
            router,
        };
        for (link, leg) in LEGS.iter().enumerate().take(hosts) {
            let host = Namespace::new("host")?;
            host.ip(&format!(
                "link add {HOST} type veth peer name {leg} netns {}",
                lab.router.name()
            ))?;
            host.ip(&format!("link set {HOST} up"))?;
            lab.router.ip(&format!("link set {leg} up"))?;
            for (family, length) in [(Family::V4, 24), (Family::V6, 64)] {
                let [gateway, address] = [1, 2].map(|it| Self::address(family, link, it));
                lab.router.add_address(gateway, length, leg)?;
                host.add_address(address, length, HOST)?;
                host.ip(&format!("route add default via {gateway}"))?;
            }
            lab.hosts.push(host);
        }
        // The first one is the server.
        for family in FAMILIES {
            let address = SocketAddr::new(Self::address(family, 0, 2), PORT);
            let listen = || TcpListener::bind(address).context("cannot listen");
            lab.listener.push(lab.hosts[0].enter(listen)?);
        }
        Ok(lab)
    }

    fn server(&self) -> &Namespace {
        &self.hosts[0]
    }

    fn connect(&self, host: usize, family: Family) -> Result<Connection> {
        Connection::open(
            &self.hosts[host],
            &self.listener[usize::from(family == Family::V6)],
        )
    }

    fn connect_some(&self, host: usize, count: usize) -> Result<Vec<Connection>> {
        (0..count)
            .map(|number| {
                let mut connection = self.connect(host, Family::alternate(number))?;
                connection.talk()?;
                Ok(connection)
            })
            .collect()
    }
}

/// A thread that has connections talk, in both directions, until it is told to stop.
struct Busy {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<Vec<Connection>>>,
}

impl Busy {
    fn start(mut connections: Vec<Connection>, every: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = thread::spawn(move || {
            while !told.load(Ordering::Relaxed) {
                for connection in &mut connections {
                    connection.talk()?;
                }
                thread::sleep(every);
            }
            Ok(connections)
        });
        Self { stop, thread }
    }

    /// They are all open, or this fails.
    fn stop(self) -> Result<Vec<Connection>> {
        self.stop.store(true, Ordering::Relaxed);
        let connections = self.thread.join().expect("no panic")?;
        ensure!(
            connections.iter().all(|it| is_open(&it.server)),
            "a busy connection was closed"
        );
        Ok(connections)
    }
}

/// So many descriptors this process may have.
fn allow_descriptors(count: u64) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the place is valid for writes, and that of a `rlimit`.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_cur.max(count);
    limit.rlim_max = limit.rlim_max.max(count);
    // SAFETY: as above, for reads.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

const IDLE: usize = 1000;

/// Opens idle connections from a host that then goes away, without a word to the server. Returns the server's ends.
fn abandoned(lab: &mut Lab, count: usize) -> Result<Vec<TcpStream>> {
    let connections = lab.connect_some(2, count)?;
    // What its end says as its sockets are closed finds no way.
    lab.router.ip(&format!("link del {}", LEGS[2]))?;
    let (servers, clients): (Vec<_>, Vec<_>) = connections
        .into_iter()
        .map(|it| (it.server, it.client))
        .unzip();
    drop(clients);
    drop(lab.hosts.pop());
    Ok(servers)
}

#[test]
fn sockets_whose_peers_are_gone_are_closed_and_no_others() -> Result<()> {
    require_root();
    allow_descriptors(8192);
    let (timeout, tick) = (millis(3000), millis(100));
    let mut lab = Lab::new(3)?;
    let twheel = run(
        lab.server(),
        HOST,
        &[
            "--timeout",
            "3s",
            "--tick",
            "100ms",
            "--reap",
            "socket",
            "--reap-max-share",
            "100",
        ],
    )?;
    let busy = Busy::start(lab.connect_some(1, 100)?, timeout / 20);
    let idle = abandoned(&mut lab, IDLE)?;
    let silent = Instant::now();
    let said = actions(&twheel, IDLE, timeout + tick + millis(1000))?;
    let took = silent.elapsed();
    for socket in &idle {
        let error = peek(socket).err().map(|error| error.kind());
        assert_eq!(error, Some(ErrorKind::ConnectionAborted));
    }
    assert_eq!(count(&said, "socket", "done"), IDLE);
    // The last action, reported and read, after the last packet.
    assert!(took <= timeout + tick + millis(1000), "{took:?}");
    println!("{IDLE} sockets closed {took:?} after the last packet of any, timeout {timeout:?}");
    assert_eq!(busy.stop()?.len(), 100);
    // Who listens still does.
    for family in FAMILIES {
        lab.connect(1, family)?.talk()?;
    }
    let ended = twheel.stop()?;
    assert!(
        ended.stderr.contains("1000  socket: done"),
        "{}",
        ended.stderr
    );
    Ok(())
}

#[test]
fn too_large_a_share_pauses_the_reaper_until_sighup() -> Result<()> {
    require_root();
    allow_descriptors(8192);
    let mut lab = Lab::new(3)?;
    let twheel = run(
        lab.server(),
        HOST,
        &["--timeout", "2s", "--reap", "socket", "--metrics", "19436"],
    )?;
    let busy = Busy::start(lab.connect_some(1, 100)?, millis(100));
    let idle = abandoned(&mut lab, 200)?;
    let said = actions(&twheel, 200, millis(3500))?;
    let done = count(&said, "socket", "done");
    // A fifth of 300; what is on its way from the wheels to the reaper is not counted among the living.
    assert!((20..=60).contains(&done), "{done} of 300");
    println!("of 300 flows {done} were reaped, then it paused");
    assert_eq!(done + count(&said, "socket", "paused"), 200);
    let stderr = twheel.await_stderr("nothing is reaped any more")?;
    assert_eq!(stderr.matches("nothing is reaped any more").count(), 1);
    assert_eq!(idle.iter().filter(|it| !is_open(it)).count(), done);
    let metrics = |namespace: &Namespace| {
        namespace.enter(|| {
            let mut stream = TcpStream::connect("127.0.0.1:19436")?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
    };
    let text = metrics(lab.server())?;
    assert!(text.contains("\ntwheel_reaper_paused 1\n"), "{text}");
    let counted = format!("\ntwheel_reaped_total{{action=\"socket\",outcome=\"done\"}} {done}\n");
    assert!(text.contains(&counted), "{text}");

    hang_up(&twheel)?;
    twheel.await_stderr("reaping resumed")?;
    assert!(metrics(lab.server())?.contains("\ntwheel_reaper_paused 0\n"));
    let connection = lab.connect(1, Family::V4)?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "socket", "done"), 1, "{said:?}");
    assert!(!is_open(&connection.server));
    busy.stop()?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

fn hang_up(twheel: &Twheel) -> Result<()> {
    Ok(kill(
        Pid::from_raw(twheel.pid().try_into()?),
        Signal::SIGHUP,
    )?)
}

/// Has the router track connections, and give those that leave by its first leg its own address.
fn masquerade(router: &Namespace) -> Result<Conntrack> {
    router.enter(|| {
        Ok(fs::write(
            "/proc/sys/net/netfilter/nf_conntrack_timestamp",
            "1",
        )?)
    })?;
    let conntrack = Conntrack::open(router)?;
    router.nft(&format!(
        "table inet lab {{
            chain post {{ type nat hook postrouting priority srcnat; oifname {0} masquerade; }}
            chain forward {{ type filter hook forward priority filter; ct state invalid drop; }}
        }}",
        LEGS[0]
    ))?;
    Ok(conntrack)
}

/// The clients' ends of the connections that conntrack knows.
fn known(conntrack: &Conntrack) -> Result<HashSet<SocketAddr>> {
    Ok(conntrack.dump()?.iter().map(|entry| entry.src).collect())
}

#[test]
fn conntrack_entries_behind_nat_are_deleted_by_either_tuple() -> Result<()> {
    require_root();
    // Legs: the LAN's, where flows have the addresses before NAT, and the WAN's.
    for leg in [LEGS[1], LEGS[0]] {
        let lab = Lab::new(2)?;
        let conntrack = masquerade(&lab.router)?;
        let twheel = run(
            &lab.router,
            leg,
            &[
                "--timeout",
                "1s",
                "--reap",
                "conntrack",
                "--reap-max-share",
                "100",
            ],
        )?;
        let busy = lab.connect_some(1, 20)?;
        let busy_names: HashSet<_> = busy
            .iter()
            .map(|it| it.client.local_addr())
            .collect::<Result<_, _>>()?;
        let busy = Busy::start(busy, millis(100));
        let idle = lab.connect_some(1, 20)?;
        let translated =
            |it: &Connection| Ok::<_, std::io::Error>(it.client.local_addr()? != it.name);
        assert!(translated(&idle[0])? && translated(&idle[1])?, "no NAT");
        assert_eq!(known(&conntrack)?.len(), 40);
        let said = actions(&twheel, 20, millis(3000))?;
        assert_eq!(count(&said, "conntrack", "done"), 20, "{leg}: {said:?}");
        assert_eq!(known(&conntrack)?, busy_names, "{leg}");
        busy.stop()?;
        // Sockets are not conntrack's.
        assert!(idle.iter().all(|it| is_open(&it.server)));
        twheel.stop()?;
    }
    Ok(())
}

/// Both ends see it at their next read.
fn is_reset(connection: &mut Connection) -> Result<()> {
    for (end, socket) in [
        ("client", &mut connection.client),
        ("server", &mut connection.server),
    ] {
        let error = read_error(socket);
        ensure!(
            error == Some(ErrorKind::ConnectionReset),
            "{end}: {error:?}"
        );
    }
    Ok(())
}

/// Connections of each kind: nothing was ever said, one side has spoken, both have.
fn spoken(lab: &Lab) -> Result<Vec<Connection>> {
    let mut connections = Vec::new();
    for family in FAMILIES {
        for kind in 0..3 {
            let mut connection = lab.connect(1, family)?;
            if kind > 0 {
                connection.talk()?;
            }
            if kind > 1 {
                for size in [1, 100_000, 7] {
                    connection.server.write_all(&vec![7; size])?;
                    connection.client.read_exact(&mut vec![0; size])?;
                    connection.talk()?;
                }
            }
            connections.push(connection);
        }
    }
    Ok(connections)
}

#[test]
fn both_ends_of_an_idle_connection_are_reset() -> Result<()> {
    require_root();
    let args = [
        "--timeout",
        "1s",
        "--reap",
        "reset",
        "--reap-max-share",
        "100",
    ];
    let lab = Lab::new(2)?;
    // In the middle, and where one end is.
    for (at, interface) in [
        (&lab.router, LEGS[0]),
        (&lab.router, LEGS[1]),
        (lab.server(), HOST),
        (&lab.hosts[1], HOST),
    ] {
        let twheel = run(at, interface, &args)?;
        let mut connections = spoken(&lab)?;
        let busy = Busy::start(lab.connect_some(1, 4)?, millis(100));
        let said = actions(&twheel, 6, millis(3000))?;
        assert_eq!(count(&said, "reset", "done"), 6, "{interface}: {said:?}");
        for connection in &mut connections {
            is_reset(connection).with_context(|| format!("{} {interface}", at.name()))?;
        }
        busy.stop()?;
        twheel.stop()?;
    }
    Ok(())
}

#[test]
fn resets_find_their_way_through_nat_before_the_entry_goes() -> Result<()> {
    require_root();
    for leg in [LEGS[1], LEGS[0]] {
        let lab = Lab::new(2)?;
        let conntrack = masquerade(&lab.router)?;
        // Named in the other order.
        let twheel = run(
            &lab.router,
            leg,
            &[
                "--timeout",
                "1s",
                "--reap",
                "conntrack,reset",
                "--reap-max-share",
                "100",
            ],
        )?;
        let mut connections = spoken(&lab)?;
        let said = actions(&twheel, 12, millis(3000))?;
        assert_eq!(count(&said, "reset", "done"), 6, "{leg}: {said:?}");
        assert_eq!(count(&said, "conntrack", "done"), 6, "{leg}: {said:?}");
        for connection in &mut connections {
            is_reset(connection).with_context(|| leg.to_owned())?;
        }
        assert_eq!(known(&conntrack)?.len(), 0);
        twheel.stop()?;
    }
    Ok(())
}

// ---- a flow that comes back

/// Connections at once, and how often each is tried, in all.
const RACERS: usize = 500;
const TRIES: usize = 10_000;

/// A connection whose next byte is timed to come as its flow expires.
struct Racer {
    connection: Connection,
    /// When the latest byte was sent.
    at: Instant,
    /// Bytes that were sent, and that the server's side has read.
    sent: usize,
    read: usize,
    /// There was a RST before the byte could be sent.
    told: bool,
    closed: bool,
}

impl Racer {
    fn new(pair: &Pair, number: usize) -> Result<Self> {
        let connection = pair.connect(Family::alternate(number))?;
        connection.client.set_nonblocking(true)?;
        connection.server.set_nonblocking(true)?;
        Ok(Self {
            connection,
            at: Instant::now(),
            sent: 0,
            read: 0,
            told: false,
            closed: false,
        })
    }

    /// Sends a byte, unless a RST is here already: what it said is then no more to come.
    fn send(&mut self) {
        self.at = Instant::now();
        self.told = (&self.connection.client).write(b"!").is_err();
        self.sent += usize::from(!self.told);
    }

    /// Reads all that is there, and whether it was closed.
    fn look(&mut self) -> Result<()> {
        let mut bytes = [0; 64];
        loop {
            match (&self.connection.server).read(&mut bytes) {
                Ok(0) => bail!("an end that nobody sent"),
                Ok(count) => self.read += count,
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == ErrorKind::ConnectionAborted => {
                    self.closed = true;
                    return Ok(());
                }
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// What became of the tries.
#[derive(Debug, Default)]
struct Tally {
    tries: usize,
    /// Closed, and the byte did not get there: it came too late.
    closed: usize,
    /// The byte got there, and the connection lives.
    alive: usize,
    /// The byte got there, and the connection was closed nevertheless.
    lost: usize,
}

/// Each connection sends a byte about when its flow expires. A try is lost if the server's application has read that
/// byte and the connection was closed nevertheless, before it was idle for another timeout. A byte that finds the
/// socket closed is answered with a RST, as any that comes too late: that is no loss. (docs/reap.md has how small the
/// gap is in which one could be lost.)
fn race(pair: &Pair, timeout: Duration, early: Duration, late: Duration) -> Result<Tally> {
    /// Long after a byte has arrived, and long before its flow could expire again.
    const LOOK: Duration = Duration::from_millis(120);
    let mut tally = Tally::default();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut jitter = || {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let width = (early + late).as_micros() as u64;
        timeout - early + Duration::from_micros(random % width)
    };
    let mut racers = (0..RACERS)
        .map(|number| Racer::new(pair, number))
        .collect::<Result<Vec<_>>>()?;
    // When, which, and whether it is to send, or to be looked at.
    let mut plan = BinaryHeap::new();
    let begin = Instant::now() + millis(10);
    for number in 0..RACERS {
        plan.push(Reverse((
            begin + Duration::from_micros(600) * number as u32,
            number,
            true,
        )));
    }
    let mut first = vec![true; RACERS];
    while let Some(Reverse((due, number, sends))) = plan.pop() {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        let racer = &mut racers[number];
        if sends {
            racer.send();
            plan.push(Reverse((due + LOOK, number, false)));
            continue;
        }
        racer.look()?;
        if racer.at.elapsed() > timeout - millis(50) {
            // This thread was held up for so long that the flow may have expired once more.
            first[number] = true;
        }
        if !std::mem::take(&mut first[number]) {
            tally.tries += 1;
            match (racer.closed, !racer.told && racer.read == racer.sent) {
                (true, true) => tally.lost += 1,
                (true, false) => tally.closed += 1,
                (false, true) => tally.alive += 1,
                (false, false) => bail!(
                    "{} is open and its byte is not there",
                    racer.connection.name
                ),
            }
        }
        if tally.tries == TRIES {
            break;
        }
        if racer.closed {
            *racer = Racer::new(pair, number)?;
            first[number] = true;
            plan.push(Reverse((Instant::now(), number, true)));
        } else {
            plan.push(Reverse((due - LOOK + jitter(), number, true)));
        }
    }
    Ok(tally)
}

fn comes_back(actions: &str, more: &[&str], allowed: usize) -> Result<()> {
    allow_descriptors(8192);
    let pair = Pair::new()?;
    let mut args = vec![
        "--timeout",
        "300ms",
        "--tick",
        "10ms",
        "--egress",
        "off",
        "--reap-max-share",
        "100",
        "--reap",
        actions,
    ];
    args.extend(more);
    let twheel = run(&pair.server, SERVER, &args)?;
    let tally = race(&pair, millis(300), millis(4), millis(24))?;
    let ended = twheel.stop()?;
    let done = summed(&ended, "socket: done");
    let back = summed(&ended, "socket: not done: the flow came back");
    println!("--reap {actions}: {tally:?}; sockets closed {done}, flows back before that {back}");
    assert_eq!(tally.tries, TRIES);
    assert!(tally.lost <= allowed, "{tally:?}");
    // The gap was hit.
    assert!(back > 10, "{back} {tally:?}");
    assert!(tally.closed.min(tally.alive) > TRIES / 10, "{tally:?}");
    Ok(())
}

#[test]
fn a_flow_that_comes_back_before_its_socket_is_closed_survives() -> Result<()> {
    require_root();
    comes_back("socket", &[], 0)
}

#[test]
fn a_flow_that_comes_back_before_it_is_refused_survives() -> Result<()> {
    require_root();
    comes_back("socket,enforce", &["--i-know-this-drops-traffic"], 0)
}

// ---- very many

const MANY: u32 = 100_000;

/// A program's `VmHWM`, bytes.
fn most_memory(twheel: &Twheel) -> Result<u64> {
    let status = fs::read_to_string(format!("/proc/{}/status", twheel.pid()))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
    let kibibytes: u64 = line
        .and_then(|it| it.trim().strip_suffix("kB")?.trim().parse().ok())
        .context("no VmHWM")?;
    Ok(kibibytes << 10)
}

/// The tick of [`very_many`], milliseconds. A flow may be late by up to one, so a long one hides what the reaper adds.
const TICK: u64 = 100;

/// Very many flows expire in a few ticks; the most that one was late, and the most memory.
fn very_many(more: &[&str]) -> Result<(u64, u64, Ended)> {
    const TIMEOUT: u64 = 5_000;
    let pair = Pair::new()?;
    // Where they go somebody listens, who has no such connections: the kernel's lookup falls back to that socket.
    pair.server.ip("addr add 192.0.2.1/32 dev lo")?;
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind("192.0.2.1:80")?))?;
    let tick = format!("{TICK}ms");
    let mut args = vec!["--timeout", "5s", "--tick", &tick, "--mode", "generic"];
    args.extend(more);
    let twheel = run(&pair.server, SERVER, &args)?;
    let begun = Instant::now();
    pair.server.begin_flows(SERVER, MANY)?;
    let filled = begun.elapsed();
    assert!(filled < millis(TIMEOUT), "too slow a machine: {filled:?}");
    let (mut seen, mut latest, mut reaped) = (HashSet::new(), 0, 0);
    let all = MANY as usize;
    let end = Instant::now() + Duration::from_secs(60);
    while seen.len() < all || (!more.is_empty() && reaped < all) {
        let left = end.saturating_duration_since(Instant::now());
        let line = twheel.line(left)?;
        let Some(line) = line else {
            bail!("{} expired, {reaped} reaped", seen.len());
        };
        let value: Value = serde_json::from_str(&line.text)?;
        let said = Said { at: line.at, value };
        if said.is("reap") {
            assert_eq!(said.text("outcome"), "nothing");
            reaped += 1;
            continue;
        }
        assert!(seen.insert(said.src()), "twice: {}", line.text);
        let idle = said.value["idle_ms"].as_u64().context("no idle_ms")?;
        latest = latest.max(idle.checked_sub(TIMEOUT).context("early")?);
    }
    println!(
        "{more:?}: filled in {filled:?}, {:?} until all was read; the latest {latest} ms",
        begun.elapsed()
    );
    let memory = most_memory(&twheel)?;
    Connection::open(&pair.server, &listener)?.talk()?;
    Ok((latest, memory, twheel.stop()?))
}

#[test]
fn very_many_expiries_at_once_neither_get_lost_nor_wait_for_the_reaper() -> Result<()> {
    require_root();
    let (late, memory, _) = very_many(&[])?;
    let (late_reaping, memory_reaping, ended) =
        very_many(&["--reap", "socket", "--reap-max-share", "100"])?;
    println!(
        "lateness {late} ms, with the reaper {late_reaping} ms; memory {} KiB and {} KiB",
        memory >> 10,
        memory_reaping >> 10
    );
    assert!(
        ended.stderr.contains("100000 flows ended, 0 live"),
        "{}",
        ended.stderr
    );
    assert!(
        ended.stderr.contains("100000  socket: nothing to do"),
        "{}",
        ended.stderr
    );
    // Beyond the tick to whose end they wait. A busy machine adds some hundreds; to wait for the reaper, two seconds.
    let [beyond, beyond_reaping] = [late, late_reaping].map(|late| late.saturating_sub(TICK));
    assert!(beyond <= 500, "{late} ms late");
    assert!(
        beyond_reaping <= beyond + 400,
        "{late_reaping} ms late, {late} without the reaper"
    );
    assert!(
        memory_reaping < memory + (40 << 20),
        "{memory_reaping}, without the reaper {memory}"
    );
    Ok(())
}

// ---- options

#[test]
fn a_dry_run_says_what_and_why_and_does_nothing() -> Result<()> {
    require_root();
    let file = PolicyFile::new(
        "dry",
        &format!("[[rule]]\nname = 'web'\ndport = {PORT}\nreap = ['socket', 'reset']\n"),
    )?;
    let pair = Pair::new()?;
    let twheel = run(
        &pair.server,
        SERVER,
        &["--timeout", "500ms", "--dry-run", "--policy", file.path()],
    )?;
    let connection = pair.connect(Family::V4)?;
    let said = actions(&twheel, 2, millis(3000))?;
    let reaps: Vec<_> = said.iter().filter(|it| it.is("reap")).collect();
    assert_eq!(reaps.len(), 2);
    for (reap, action) in reaps.iter().zip(["reset", "socket"]) {
        assert_eq!(reap.src(), connection.name);
        for (key, value) in [
            ("action", action),
            ("outcome", "would"),
            ("rule", "web"),
            ("reason", "idle"),
            ("state", "established"),
        ] {
            assert_eq!(reap.text(key), value, "{reap:?}");
        }
        assert!(reap.value["error"].is_null() && reap.value["idle_ms"].as_u64() >= Some(500));
    }
    assert!(is_open(&connection.server) && is_open(&connection.client));
    twheel.stop()?;
    Ok(())
}

#[test]
fn what_is_protected_is_left_alone() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let protect = format!("src == {}", Family::V4.client());
    let twheel = run(
        &pair.server,
        SERVER,
        &[
            "--timeout",
            "500ms",
            "--reap",
            "socket",
            "--protect",
            &protect,
            "--protect",
            "dport == 22",
        ],
    )?;
    let mut connections = FAMILIES
        .into_iter()
        .map(|family| pair.connect(family))
        .collect::<Result<Vec<_>>>()?;
    let said = actions(&twheel, 2, millis(3000))?;
    assert_eq!(
        (
            count(&said, "socket", "protected"),
            count(&said, "socket", "done")
        ),
        (1, 1),
        "{said:?}"
    );
    connections[0].talk()?;
    assert_eq!(
        read_error(&mut connections[1].server),
        Some(ErrorKind::ConnectionAborted)
    );
    twheel.stop()?;
    Ok(())
}

#[test]
fn actions_keep_their_rate_and_ctrl_c_does_not_wait_for_them() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = run(
        &pair.server,
        SERVER,
        &[
            "--timeout",
            "500ms",
            "--reap",
            "socket",
            "--reap-max-share",
            "100",
            "--reap-rate",
            "20",
        ],
    )?;
    let connections = (0..100)
        .map(|number| pair.connect(Family::alternate(number)))
        .collect::<Result<Vec<_>>>()?;
    let said = actions(&twheel, 60, millis(6000))?;
    let times: Vec<_> = said
        .iter()
        .filter(|it| it.is("reap"))
        .map(|it| it.at)
        .collect();
    assert_eq!(times.len(), 60);
    // One each 50 ms; what is missed is made up for, if it is no more than two.
    for (number, time) in times.iter().enumerate() {
        let least = millis(50) * (number as u32).saturating_sub(2);
        assert!(
            *time - times[0] + millis(20) >= least,
            "{number} after {:?}",
            *time - times[0]
        );
    }
    assert!(
        times[59] - times[0] < millis(3600),
        "{:?}",
        times[59] - times[0]
    );
    println!("60 actions in {:?}", times[59] - times[0]);

    let begun = Instant::now();
    let ended = twheel.stop()?;
    assert!(begun.elapsed() < millis(1000), "{:?}", begun.elapsed());
    let done = summed(&ended, "socket: done");
    let rest = summed(
        &ended,
        "socket: not done: the queue was full, or the run ended first",
    );
    assert_eq!(done + rest, 100, "{}", ended.stderr);
    assert!((60..65).contains(&done), "{}", ended.stderr);
    assert_eq!(
        connections.iter().filter(|it| is_open(&it.server)).count(),
        rest
    );
    Ok(())
}

#[test]
fn what_came_back_to_a_full_table_is_not_taken_for_gone() -> Result<()> {
    require_root();
    const IDLE: usize = 10;
    const ROOM: usize = 40;
    let pair = Pair::new()?;
    let room = ROOM.to_string();
    let twheel = run(
        &pair.server,
        SERVER,
        &[
            "--timeout",
            "2s",
            "--tick",
            "50ms",
            "--max-flows",
            &room,
            "--reap",
            "socket",
            "--reap-max-share",
            "100",
            "--reap-rate",
            "1",
        ],
    )?;
    let connect = |count: usize| -> Result<Vec<Connection>> {
        (0..count)
            .map(|number| pair.connect(Family::alternate(number)))
            .collect()
    };
    let mut idle = connect(IDLE)?;
    // The first action is done; the rest wait for their turn, each a second.
    let said = actions(&twheel, 1, millis(6000))?;
    assert_eq!(count(&said, "socket", "done"), 1);
    // Others take all the room, and keep it.
    let mut others = connect(ROOM + 10)?;
    others.iter_mut().try_for_each(Connection::talk)?;
    let busy = twheel_tests::netns::Busy::start(others, millis(200));
    let alive: Vec<_> = idle
        .iter_mut()
        .map(|connection| connection.talk().is_ok())
        .collect();
    let alive_then = alive.iter().filter(|it| **it).count();
    assert!(alive_then >= IDLE - 2, "{alive:?}");
    let said = actions(&twheel, IDLE - 1, millis(15_000))?;
    let kept = count(&said, "socket", "unknown") + count(&said, "socket", "back");
    assert!(kept >= alive_then, "{kept} of {alive_then}");
    assert!(
        count(&said, "socket", "unknown") > 0,
        "the table was not full"
    );
    for (connection, alive) in idle.iter_mut().zip(alive) {
        assert!(
            !alive || connection.talk().is_ok(),
            "one that talked was closed"
        );
    }
    busy.stop()?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

#[test]
fn what_the_policy_asks_for_no_more_is_not_done() -> Result<()> {
    require_root();
    // One a second, so that most are waiting when the policy comes.
    const CONNECTIONS: usize = 20;
    let pair = Pair::new()?;
    let asks = PolicyFile::new("asks", "reap = [\"socket\"]\n")?;
    let asks_not = PolicyFile::new("asks-not", "reap = []\n")?;
    let args = [
        "--timeout",
        "500ms",
        "--reap-max-share",
        "100",
        "--reap-rate",
        "1",
        "--policy",
        asks.path(),
    ];
    let twheel = run(&pair.server, SERVER, &args)?;
    let connections = (0..CONNECTIONS)
        .map(|number| pair.connect(Family::alternate(number)))
        .collect::<Result<Vec<_>>>()?;
    let mut said = actions(&twheel, 1, millis(6000))?;
    assert_eq!(count(&said, "socket", "done"), 1);
    // What expires under the other policy is not to be reaped in the first place.
    let expired = |said: &[Said]| said.iter().filter(|it| it.is("expired")).count();
    let rest = CONNECTIONS - expired(&said);
    said.extend(events(&twheel, "expired", rest, PATIENCE)?);
    assert_eq!(expired(&said), CONNECTIONS, "not all have expired");
    let load = ["policy", "load", asks_not.path(), "--iface", SERVER];
    assert_eq!(pair.server.twheel_once(&load)?.code(), Some(0));
    let early = said.iter().filter(|it| it.is("reap")).count();
    said.extend(actions(&twheel, CONNECTIONS - early, PATIENCE)?);
    let mut outcomes = said.iter().filter(|it| it.is("reap"));
    let revoked = |it: &Said| it.text("outcome") == "revoked";
    let done = outcomes.by_ref().take_while(|it| !revoked(it)).count();
    assert!(done < CONNECTIONS / 2, "{done} were done meanwhile");
    assert!(outcomes.all(revoked), "{said:?}");
    let open = connections.iter().filter(|it| is_open(&it.server)).count();
    assert_eq!(open, count(&said, "socket", "revoked"), "{said:?}");
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

#[test]
fn rules_say_what_is_done_to_their_flows() -> Result<()> {
    require_root();
    let file = PolicyFile::new(
        "rules",
        &format!(
            "[[rule]]\nname = 'kept'\nsrc = '{}'\nreap = []\n[[rule]]\nname = 'reset'\ndport = {PORT}\nreap = ['reset']\n",
            Family::V4.client()
        ),
    )?;
    let pair = Pair::new()?;
    let twheel = run(
        &pair.server,
        SERVER,
        &[
            "--timeout",
            "500ms",
            "--reap",
            "socket",
            "--policy",
            file.path(),
        ],
    )?;
    let mut connections = FAMILIES
        .into_iter()
        .map(|family| pair.connect(family))
        .collect::<Result<Vec<_>>>()?;
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind((Family::V6.server(), PORT + 2))?))?;
    let mut other = Connection::open(&pair.client, &listener)?;
    let said = actions(&twheel, 3, millis(1500))?;
    assert_eq!(said.iter().filter(|it| it.is("expired")).count(), 3);
    assert_eq!(
        (
            count(&said, "reset", "done"),
            count(&said, "socket", "done")
        ),
        (1, 1),
        "{said:?}"
    );
    assert_eq!(said.iter().filter(|it| it.is("reap")).count(), 2);
    connections[0].talk()?;
    is_reset(&mut connections[1])?;
    assert_eq!(
        read_error(&mut other.server),
        Some(ErrorKind::ConnectionAborted)
    );
    twheel.stop()?;
    Ok(())
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_attached() -> Result<()> {
    require_root();
    let host = Namespace::new("host")?;
    for (args, why) in [
        (
            &["--reap", "enforce"][..],
            "to confirm, add --i-know-this-drops-traffic",
        ),
        (
            &["--reap", "socket,enforce=reset"],
            "to confirm, add --i-know-this-drops-traffic",
        ),
        (
            &["--reap", "socket", "--pickup", "strict"],
            "--reap with --pickup strict",
        ),
        (
            &["--reap", "socket", "--reap-netns", "there-is-none"],
            "--reap-netns there-is-none: no network namespace",
        ),
        (&["--reap", "sockets"], "no action is called `sockets`"),
        (&["--reap", "socket", "--protect", "prot == 1"], "prot"),
        (&["--reap", "socket", "--protect", ""], "give a filter"),
    ] {
        let mut all = vec!["run", "--iface", "lo"];
        all.extend(args);
        let ended = host.twheel_once(&all)?;
        assert_eq!(ended.code(), Some(2), "{args:?}: {}", ended.stderr);
        assert!(ended.stderr.contains(why), "{args:?}: {}", ended.stderr);
        host.check_clean("lo")?;
    }
    Ok(())
}

#[test]
fn a_policy_enforces_only_where_that_was_confirmed() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let file = PolicyFile::new(
        "enforce",
        &format!("[[rule]]\nname = 'web'\ndport = {PORT}\nreap = ['enforce=reset']\n"),
    )?;
    let load = ["policy", "load", file.path(), "--iface", SERVER];
    let twheel = run(&pair.server, SERVER, &["--timeout", "500ms"])?;
    let ended = pair.server.twheel_once(&load)?;
    assert_eq!(ended.code(), Some(2), "{}", ended.stderr);
    assert!(
        ended.stderr.contains("--i-know-this-drops-traffic"),
        "{}",
        ended.stderr
    );
    twheel.stop()?;
    let twheel = run(
        &pair.server,
        SERVER,
        &[
            "--timeout",
            "500ms",
            "--mode",
            "generic",
            "--i-know-this-drops-traffic",
        ],
    )?;
    assert_eq!(pair.server.twheel_once(&load)?.code(), Some(0));
    let mut connection = pair.connect(Family::V4)?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "enforce=reset", "done"), 1, "{said:?}");
    connection.expect_reset()?;
    // A connection of the same name begins anew.
    let name = connection.client.local_addr()?;
    drop(connection);
    let listener = pair
        .server
        .enter(|| Ok(TcpListener::bind((Family::V4.server(), PORT + 2))?))?;
    drop(listener);
    let again = pair.client.enter(|| {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        runtime.block_on(async {
            let socket = tokio::net::TcpSocket::new_v4()?;
            socket.set_reuseaddr(true)?;
            socket.bind(name)?;
            let connecting = socket.connect((Family::V4.server(), PORT).into());
            Ok(tokio::time::timeout(PATIENCE, connecting)
                .await??
                .into_std()?)
        })
    });
    let again: TcpStream = again.context("the same name is refused")?;
    assert_eq!(again.local_addr()?, name);
    twheel.stop()?;
    Ok(())
}

#[test]
fn sockets_and_entries_of_other_namespaces_are_found() -> Result<()> {
    require_root();
    let lab = Lab::new(2)?;
    let servers = lab.server().name();
    let twheel = run(
        &lab.router,
        LEGS[0],
        &[
            "--timeout",
            "500ms",
            "--reap",
            "socket",
            "--reap-netns",
            servers,
        ],
    )?;
    let mut connection = lab.connect(1, Family::V6)?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "socket", "done"), 1, "{said:?}");
    assert_eq!(
        read_error(&mut connection.server),
        Some(ErrorKind::ConnectionAborted)
    );
    twheel.stop()?;
    Ok(())
}

#[test]
fn sockets_of_ipv6_that_serve_ipv4_are_closed() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), PORT + 2);
    let listener = pair.server.enter(|| Ok(TcpListener::bind(any)?))?;
    let twheel = run(
        &pair.server,
        SERVER,
        &["--timeout", "500ms", "--reap", "socket"],
    )?;
    let address = SocketAddr::new(Family::V4.server(), PORT + 2);
    let connect = || {
        let client = pair.client.enter(|| Ok(TcpStream::connect(address)?))?;
        anyhow::Ok((client, listener.accept()?.0))
    };
    let (_client, mut server) = connect()?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "socket", "done"), 1, "{said:?}");
    assert_eq!(read_error(&mut server), Some(ErrorKind::ConnectionAborted));
    connect()?;
    twheel.stop()?;
    Ok(())
}

#[test]
fn what_fails_is_counted_with_its_reason() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let twheel = run(
        &pair.server,
        SERVER,
        &["--timeout", "500ms", "--reap", "reset,socket"],
    )?;
    let mut connection = pair.connect(Family::V4)?;
    pair.server
        .ip(&format!("route del 10.77.0.0/24 dev {SERVER}"))?;
    let said = actions(&twheel, 2, millis(3000))?;
    assert_eq!(count(&said, "reset", "failed"), 1, "{said:?}");
    let failed = said
        .iter()
        .find(|it| it.text("outcome") == "failed")
        .context("none")?;
    let error = failed.text("error");
    assert!(
        error.starts_with("cannot send a RST to 10.77.0.1:") && error.contains("unreachable"),
        "{error}"
    );
    // The other end is told all the same.
    assert_eq!(
        read_error(&mut connection.server),
        Some(ErrorKind::ConnectionReset)
    );
    let ended = twheel.stop()?;
    assert!(
        ended.stderr.contains("1  reset: failed"),
        "{}",
        ended.stderr
    );

    // By a policy, which is not asked of its --pickup: each action fails, and says so.
    let file = PolicyFile::new("strict", "reap = ['socket']\n")?;
    let twheel = run(
        &pair.server,
        SERVER,
        &[
            "--timeout",
            "500ms",
            "--pickup",
            "strict",
            "--policy",
            file.path(),
        ],
    )?;
    let connection = pair.connect(Family::V6)?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "socket", "failed"), 1, "{said:?}");
    assert!(
        said.iter()
            .any(|it| it.text("error").contains("--pickup strict")),
        "{said:?}"
    );
    assert!(is_open(&connection.server));
    twheel.stop()?;
    Ok(())
}
