//! conntrack and a running twheel track the same packets.

use std::{
    collections::BTreeMap,
    fs,
    io::{Read, Write},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    os::fd::{AsRawFd, OwnedFd},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect,
        setsockopt, socket, sockopt,
    },
};
use twheel::{flows::Flows, pins::Instance};
use twheel_common::{
    flow::Direction,
    state::State::{self, *},
};
use twheel_holdup::Watch;
use twheel_tests::{
    ctnetlink::Conntrack,
    netns::Namespace,
    pair::{Family, Pair, SERVER},
    running::Twheel,
};

/// Timeouts in seconds, by conntrack's names. States that may be confused have different timeouts.
const TIMEOUTS: [(&str, u64); 10] = [
    ("syn_sent", 3),
    ("syn_recv", 2),
    ("established", 8),
    ("fin_wait", 4),
    ("close_wait", 5),
    ("last_ack", 3),
    ("time_wait", 6),
    ("close", 1),
    ("unacknowledged", 7),
    // So long that it never applies.
    ("max_retrans", 60),
];
pub const TICK: Duration = Duration::from_millis(100);
/// Time for an event to reach this test, and for its threads to run.
pub const SCHEDULING: Duration = Duration::from_millis(150);
/// Longer hold-ups of the CPUs excuse no more than this: the timeouts to be told apart differ by
/// whole seconds.
pub const HELD_UP: Duration = Duration::from_millis(150);
/// Time between two checks while the test waits.
const POLL: Duration = Duration::from_millis(5);
/// Longer than any step takes.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Ports of the server: one that accepts connections, one for crafted segments, one that never
/// answers, one to which the client never completes a handshake, and one that refuses.
const LISTENING: u16 = 9000;
pub const CRAFTED: u16 = 9999;
pub const SILENT: u16 = 9998;
pub const UNFINISHED: u16 = 9997;
pub const REFUSED: u16 = 9996;
/// The mark of crafted segments.
const MARK: u32 = 1;

/// How a flow of a connection is to end.
pub struct Life {
    /// The reason and the state that twheel reports.
    pub ours: Option<(&'static str, State)>,
    /// The state that conntrack reports.
    pub theirs: Option<State>,
    /// By how many seconds twheel's flow intentionally ends later.
    pub later: f64,
    /// The two trackers do not agree on when it began.
    pub started_apart: bool,
    /// One side was never seen.
    pub unreplied: bool,
}

impl Life {
    /// Both trackers end it in the same state at the same time.
    pub fn same(reason: &'static str, state: State) -> Self {
        Self {
            ours: Some((reason, state)),
            theirs: Some(state),
            later: 0.0,
            started_apart: false,
            unreplied: false,
        }
    }

    /// Only twheel knows it.
    pub fn ours(reason: &'static str, state: State) -> Self {
        Self {
            theirs: None,
            ..Self::same(reason, state)
        }
    }

    pub fn theirs(self, state: State) -> Self {
        Self {
            theirs: Some(state),
            ..self
        }
    }

    pub fn later(self, seconds: f64) -> Self {
        Self {
            later: seconds,
            ..self
        }
    }

    pub fn unreplied(self) -> Self {
        Self {
            unreplied: true,
            ..self
        }
    }

    pub fn started_apart(self) -> Self {
        Self {
            started_apart: true,
            ..self
        }
    }
}

/// A connection, by its client's endpoint and its server's.
pub type Name = (SocketAddr, SocketAddr);

/// A client's socket and the server's.
type Ends = (TcpStream, TcpStream);

/// Both trackers on the server of a pair of hosts.
pub struct Lab {
    pub twheel: Twheel,
    flows: Flows,
    pub conntrack: Conntrack,
    /// Raw sockets for the crafted segments of the client and of the server.
    pub raw: [OwnedFd; 2],
    pub next_port: u16,
    pub expected: BTreeMap<Name, (&'static str, Vec<Life>)>,
    /// Sockets that stay open to the end.
    pub open: Vec<TcpStream>,
    pub listeners: [TcpListener; 3],
    pub pair: Pair,
    pub watch: Watch,
}

/// Sets a sysctl of the namespace that this thread is in.
pub fn set(name: &str, value: u64) -> Result<()> {
    let path = format!("/proc/sys/net/{name}");
    fs::write(&path, value.to_string()).with_context(|| format!("cannot set {path}"))
}

/// Starts conntrack, which is idle until a rule uses it.
pub fn start_conntrack(pair: &Pair) -> Result<Conntrack> {
    pair.server.enter(|| {
        for (name, seconds) in TIMEOUTS {
            set(
                &format!("netfilter/nf_conntrack_tcp_timeout_{name}"),
                seconds,
            )?;
        }
        set("netfilter/nf_conntrack_timestamp", 1)?;
        set("netfilter/nf_conntrack_tcp_loose", 1)?;
        // A SYN/ACK is sent again once, after a second, and not when its flow is about to end.
        set("ipv4/tcp_synack_retries", 1)
    })?;
    let conntrack = Conntrack::open(&pair.server)?;
    // Reading the table must be quick, since what is compared ends within seconds.
    let before = Instant::now();
    conntrack.dump()?;
    let took = before.elapsed();
    ensure!(
        took < SCHEDULING / 2,
        "conntrack's table takes {took:?} to list: set net.netfilter.nf_conntrack_buckets to 262144 or less"
    );
    pair.server.nft(&format!(
        "table inet lab {{
                chain input {{
                    type filter hook input priority filter;
                    ct state established accept;
                }}
                chain before_conntrack {{
                    type filter hook output priority raw;
                    tcp sport {CRAFTED} meta mark != {MARK} drop;
                    tcp sport {SILENT} drop;
                }}
            }}"
    ))?;
    pair.client.nft(&format!(
        "table inet lab {{
                chain output {{
                    type filter hook output priority raw;
                    tcp dport {CRAFTED} meta mark != {MARK} drop;
                    tcp dport {UNFINISHED} tcp flags & syn == 0 drop;
                }}
            }}"
    ))?;
    Ok(conntrack)
}

impl Lab {
    pub fn start() -> Result<Self> {
        let pair = Pair::new()?;
        let listen = |family: Family, port| {
            let address = SocketAddr::new(family.server(), port);
            pair.server
                .enter(|| TcpListener::bind(address).context("cannot listen"))
        };
        let listeners = [
            listen(Family::V4, LISTENING)?,
            listen(Family::V6, LISTENING)?,
            listen(Family::V4, UNFINISHED)?,
        ];
        // A connection that is open before either tracker starts.
        let early = connected(&pair.client, &listeners[0], Family::V4, 0)?;
        let conntrack = start_conntrack(&pair)?;
        let raw = |namespace: &Namespace| -> Result<OwnedFd> {
            namespace.enter(|| {
                let fd = socket(
                    AddressFamily::Inet,
                    SockType::Raw,
                    SockFlag::SOCK_CLOEXEC,
                    SockProtocol::Raw,
                )?;
                setsockopt(&fd, sockopt::Mark, &MARK)?;
                Ok(fd)
            })
        };
        let raw = [raw(&pair.client)?, raw(&pair.server)?];
        let twheel = Twheel::start(
            &pair.server,
            &[
                "--iface",
                SERVER,
                "--mode",
                "native",
                "--egress",
                "on",
                "--timeout",
                "inherit",
                "--max-flows",
                "4096",
                "--json",
            ],
        )?;
        let mut lab = Self {
            flows: pair
                .server
                .enter(|| Flows::pinned(&Instance::with(SERVER)?))?,
            twheel,
            conntrack,
            raw,
            next_port: 20_000,
            expected: BTreeMap::new(),
            open: Vec::new(),
            listeners,
            pair,
            watch: Watch::start(),
        };
        lab.pick_up(early)?;
        Ok(lab)
    }

    /// Checks a connection that was open before either tracker started.
    fn pick_up(&mut self, (mut client, mut server): Ends) -> Result<()> {
        let name = name_of(&client)?;
        self.check_both(name, None, None)?;
        client.write_all(b"?")?;
        server.read_exact(&mut [0])?;
        server.write_all(b"!")?;
        client.read_exact(&mut [0])?;
        self.check(name, Established)?;
        self.expect("picked up", name, [Life::same("idle", Established)]);
        self.keep((client, server));
        Ok(())
    }

    pub fn expect(&mut self, what: &'static str, name: Name, lives: impl Into<Vec<Life>>) {
        let twice = self.expected.insert(name, (what, lives.into()));
        assert!(twice.is_none(), "two are named {name:?}");
    }

    pub fn keep(&mut self, (client, server): Ends) {
        self.open.extend([client, server]);
    }

    /// Waits until both trackers report this state of a connection.
    pub fn check(&self, name: Name, state: State) -> Result<()> {
        self.check_both(name, Some(state), Some(state))
    }

    /// Waits until the trackers report these states.
    pub fn check_both(&self, name: Name, ours: Option<State>, theirs: Option<State>) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(1);
        loop {
            let found = self.states()?;
            let found = found.each_ref().map(|states| states.get(&name).copied());
            if found == [ours, theirs] {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "twheel and conntrack report {found:?} for {name:?}, not {:?}",
                [ours, theirs]
            );
            thread::sleep(POLL);
        }
    }

    /// The states of all connections in twheel and in conntrack.
    pub fn states(&self) -> Result<[BTreeMap<Name, State>; 2]> {
        let ours = self.flows.iter().map(|flow| {
            let [low, high] =
                [Direction::FromLow, Direction::FromHigh].map(|from| flow.key.sender(from));
            (name(low, high), flow.word.seen().state())
        });
        let theirs = self.conntrack.dump()?.into_iter();
        let theirs = theirs.filter_map(|entry| Some((name(entry.src, entry.dst), entry.state?)));
        Ok([ours.collect(), theirs.collect()])
    }

    /// A real connection that is open in both trackers.
    pub fn connect(&self, family: Family) -> Result<Ends> {
        self.connect_from(family, 0)
    }

    pub fn connect_from(&self, family: Family, port: u16) -> Result<Ends> {
        let listener = &self.listeners[usize::from(family == Family::V6)];
        let ends = connected(&self.pair.client, listener, family, port)?;
        self.check(name_of(&ends.0)?, Established)?;
        Ok(ends)
    }
}

/// A client's socket that has begun to connect, from a port of its own (0) or a given one: it has
/// sent a SYN.
pub fn begin(client: &Namespace, family: Family, port: u16, to: SocketAddr) -> Result<OwnedFd> {
    client.enter(|| {
        let domain = match family {
            Family::V4 => AddressFamily::Inet,
            Family::V6 => AddressFamily::Inet6,
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(domain, SockType::Stream, flags, None)?;
        // The port may have been in use shortly before.
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
        // The kernel does not choose the port, because it may choose one twice, and a connection is
        // known by its ports.
        static NEXT: AtomicU16 = AtomicU16::new(10_000);
        let port = match port {
            0 => NEXT.fetch_add(1, Ordering::Relaxed),
            port => port,
        };
        let from = SocketAddr::new(family.client(), port);
        bind(fd.as_raw_fd(), &SockaddrStorage::from(from))?;
        match connect(fd.as_raw_fd(), &SockaddrStorage::from(to)) {
            Ok(()) | Err(Errno::EINPROGRESS) => Ok(fd),
            Err(error) => Err(error).context("cannot connect"),
        }
    })
}

/// An open connection, from a port of its own (0) or a given one.
pub fn connected(
    client: &Namespace,
    listener: &TcpListener,
    family: Family,
    port: u16,
) -> Result<Ends> {
    let client = TcpStream::from(begin(client, family, port, listener.local_addr()?)?);
    let (server, peer) = listener.accept().context("cannot accept")?;
    ensure!(peer == client.local_addr()?, "accepted another connection");
    for end in [&client, &server] {
        end.set_nonblocking(false)?;
        end.set_nodelay(true)?;
        end.set_read_timeout(Some(PATIENCE))?;
    }
    Ok((client, server))
}

/// The name of the connection between two endpoints; either may have begun it.
pub fn name(a: SocketAddr, b: SocketAddr) -> Name {
    let clients = [Family::V4.client(), Family::V6.client()];
    if clients.contains(&a.ip()) {
        (a, b)
    } else {
        (b, a)
    }
}

pub fn name_of(client: &TcpStream) -> Result<Name> {
    Ok((client.local_addr()?, client.peer_addr()?))
}

/// Sends a FIN, and waits until the other end receives it.
pub fn half_close(from: &TcpStream, to: &mut TcpStream) -> Result<()> {
    from.shutdown(Shutdown::Write)?;
    ensure!(to.read(&mut [0])? == 0, "the other end received no FIN");
    Ok(())
}

/// Sends a RST.
pub fn reset(end: TcpStream) -> Result<()> {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    setsockopt(&end, sockopt::Linger, &linger)?;
    Ok(())
}
