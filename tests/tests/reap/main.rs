//! Actions on expired flows: with real sockets, real conntrack, real resets.
#![allow(missing_docs)]

mod comes_back;
mod many;
mod nat;
mod options;
mod sockets;
mod zones;

use std::{
    fs,
    io::{ErrorKind, Read},
    net::{IpAddr, SocketAddr, TcpListener, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    netns::Namespace,
    pair::{Connection, Family, PORT, Pair, SERVER},
    running::{Ended, Twheel},
};

const FAMILIES: [Family; 2] = [Family::V4, Family::V6];

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// A parsed line of output, and when it came.
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

/// Reads the output until this many actions were reported, or until the time is over.
fn actions(twheel: &Twheel, count: usize, within: Duration) -> Result<Vec<Said>> {
    events(twheel, "reap", count, within)
}

/// The same for other events.
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

/// How many times an action had this outcome.
fn count(said: &[Said], action: &str, outcome: &str) -> usize {
    let is = |one: &&Said| {
        one.is("reap") && one.text("action") == action && one.text("outcome") == outcome
    };
    said.iter().filter(is).count()
}

/// The count in the summary for this text.
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

/// Starts a run on the server of a pair of hosts. `options` are separated by spaces; `more` may have
/// spaces in them.
fn run_on(pair: &Pair, options: &str, more: &[&str]) -> Result<Twheel> {
    let options: Vec<_> = options.split(' ').chain(more.iter().copied()).collect();
    run(&pair.server, SERVER, &options)
}

fn read_error(socket: &mut TcpStream) -> Option<ErrorKind> {
    socket.read(&mut [0]).err().map(|error| error.kind())
}

/// The result of a read that does not wait; `Ok(0)` is the end.
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

/// A thread that makes connections talk, in both directions, until it is told to stop.
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

    /// Stops it. Fails unless all connections are open.
    fn stop(self) -> Result<Vec<Connection>> {
        self.stop.store(true, Ordering::Relaxed);
        let connections = self.thread.join().expect("the thread panicked")?;
        ensure!(
            connections.iter().all(|it| is_open(&it.server)),
            "a busy connection was closed"
        );
        Ok(connections)
    }
}

/// Raises the number of descriptors that this process may have.
fn allow_descriptors(count: u64) {
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: the pointer is valid for writes of a `rlimit`.
    unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) };
    limit.rlim_cur = limit.rlim_cur.max(count);
    limit.rlim_max = limit.rlim_max.max(count);
    // SAFETY: as above, for reads.
    let result = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(result, 0, "{}", std::io::Error::last_os_error());
}

const IDLE: usize = 1000;

/// Checks that both ends get a RST at their next read.
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
