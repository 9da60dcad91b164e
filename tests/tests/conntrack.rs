//! The same connections under `twheel` and `nf_conntrack`, with the same timeouts, in the same namespace: their
//! states on the way and the times of their ends are compared. Where the two differ on purpose
//! (`docs/states.md`), the difference itself is asserted.
//!
//! Real connections where they can be brought into a state reliably; otherwise segments that are crafted at
//! both ends, of which the kernels' own TCP does not speak.
#![allow(missing_docs)]

use std::{
    collections::BTreeMap,
    fmt::Debug,
    fs,
    io::{Read, Write},
    net::{Shutdown, SocketAddr, SocketAddrV4, TcpListener, TcpStream, UdpSocket},
    os::fd::{AsRawFd, OwnedFd},
    sync::atomic::{AtomicU16, Ordering},
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::{Context, Result, bail, ensure};
use etherparse::PacketBuilder;
use nix::{
    errno::Errno,
    sys::socket::{
        AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, bind, connect,
        sendto, setsockopt, socket, sockopt,
    },
    time::{ClockId, clock_getres},
};
use twheel::{flows::Flows, pins::Instance};
use twheel_common::{
    flow::Direction,
    state::State::{self, *},
};
use twheel_holdup::Watch;
use twheel_tests::{
    ctnetlink::{Conntrack, Entry},
    netns::{Expiry, Family, Namespace, Pair, SERVER, Twheel, require_root},
    plane::{ACK, FIN, RST, SYN},
};

/// Seconds, by conntrack's names. No two that a connection may be mistaken about are the same.
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
    // So long that it never counts.
    ("max_retrans", 60),
];
const TICK: Duration = Duration::from_millis(100);
/// For an event to reach this test, or for its own threads to run.
const SCHEDULING: Duration = Duration::from_millis(150);
/// Longer hold-ups of the CPUs excuse nothing more: what is compared differs by whole seconds.
const HELD_UP: Duration = Duration::from_millis(150);
/// Between two looks at what comes by itself.
const POLL: Duration = Duration::from_millis(5);
/// Longer than any of this takes.
const PATIENCE: Duration = Duration::from_secs(20);

/// Ports of the server: one that takes connections, one of crafted segments, one that never answers, one to which the client never
/// completes a handshake, and one that refuses.
const LISTENING: u16 = 9000;
const CRAFTED: u16 = 9999;
const SILENT: u16 = 9998;
const UNFINISHED: u16 = 9997;
const REFUSED: u16 = 9996;
/// What crafted segments are marked with.
const MARK: u32 = 1;

/// How one life of a connection is to end.
struct Life {
    /// twheel's reason and state.
    ours: Option<(&'static str, State)>,
    /// Conntrack's state.
    theirs: Option<State>,
    /// By how many seconds ours ends later, on purpose.
    later: f64,
    /// They do not agree on when it began.
    started_apart: bool,
    /// One side was never seen.
    unreplied: bool,
}

impl Life {
    /// With both in the same state at the same time.
    fn same(reason: &'static str, state: State) -> Self {
        Self {
            ours: Some((reason, state)),
            theirs: Some(state),
            later: 0.0,
            started_apart: false,
            unreplied: false,
        }
    }

    /// Of which conntrack knows nothing.
    fn ours(reason: &'static str, state: State) -> Self {
        Self {
            theirs: None,
            ..Self::same(reason, state)
        }
    }

    fn theirs(self, state: State) -> Self {
        Self {
            theirs: Some(state),
            ..self
        }
    }

    fn later(self, seconds: f64) -> Self {
        Self {
            later: seconds,
            ..self
        }
    }

    fn unreplied(self) -> Self {
        Self {
            unreplied: true,
            ..self
        }
    }

    fn started_apart(self) -> Self {
        Self {
            started_apart: true,
            ..self
        }
    }
}

/// A connection, by its client's end and the server's.
type Name = (SocketAddr, SocketAddr);

/// A client's socket and the server's.
type Ends = (TcpStream, TcpStream);

/// Both watchers on the server of a pair of hosts.
struct Lab {
    twheel: Twheel,
    flows: Flows,
    conntrack: Conntrack,
    /// For the crafted segments of the client and of the server.
    raw: [OwnedFd; 2],
    next_port: u16,
    expected: BTreeMap<Name, (&'static str, Vec<Life>)>,
    /// What stays open to the end.
    open: Vec<TcpStream>,
    listeners: [TcpListener; 3],
    pair: Pair,
    watch: Watch,
}

/// Sets a sysctl of the namespace that this thread is in.
fn set(name: &str, value: u64) -> Result<()> {
    let path = format!("/proc/sys/net/{name}");
    fs::write(&path, value.to_string()).with_context(|| format!("cannot set {path}"))
}

/// Starts conntrack: it is idle until a rule asks for it.
fn start_conntrack(pair: &Pair) -> Result<Conntrack> {
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
    // What is looked at ends within seconds.
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
    fn start() -> Result<Self> {
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
        // What is up before anybody watches.
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
                .enter(|| Flows::pinned(&Instance::of(SERVER)?))?,
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

    /// A connection that was up before anybody watched.
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

    fn expect(&mut self, what: &'static str, name: Name, lives: impl Into<Vec<Life>>) {
        let twice = self.expected.insert(name, (what, lives.into()));
        assert!(twice.is_none(), "two are named {name:?}");
    }

    fn keep(&mut self, (client, server): Ends) {
        self.open.extend([client, server]);
    }

    /// Both watchers come to say this of a connection.
    fn check(&self, name: Name, state: State) -> Result<()> {
        self.check_both(name, Some(state), Some(state))
    }

    /// The two come to say this.
    fn check_both(&self, name: Name, ours: Option<State>, theirs: Option<State>) -> Result<()> {
        let end = Instant::now() + Duration::from_secs(1);
        loop {
            let found = self.states()?;
            let found = found.each_ref().map(|states| states.get(&name).copied());
            if found == [ours, theirs] {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "twheel and conntrack say {found:?} of {name:?}, not {:?}",
                [ours, theirs]
            );
            thread::sleep(POLL);
        }
    }

    /// What twheel and conntrack say of all connections.
    fn states(&self) -> Result<[BTreeMap<Name, State>; 2]> {
        let ours = self.flows.iter().map(|flow| {
            let [low, high] =
                [Direction::FromLow, Direction::FromHigh].map(|from| flow.key.sender(from));
            (name(low, high), flow.word.seen().state())
        });
        let theirs = self.conntrack.dump()?.into_iter();
        let theirs = theirs.filter_map(|entry| Some((name(entry.src, entry.dst), entry.state?)));
        Ok([ours.collect(), theirs.collect()])
    }

    /// A real connection that is up, and which both say is.
    fn connect(&self, family: Family) -> Result<Ends> {
        self.connect_from(family, 0)
    }

    fn connect_from(&self, family: Family, port: u16) -> Result<Ends> {
        let listener = &self.listeners[usize::from(family == Family::V6)];
        let ends = connected(&self.pair.client, listener, family, port)?;
        self.check(name_of(&ends.0)?, Established)?;
        Ok(ends)
    }

    fn craft(&mut self) -> Wire {
        self.next_port += 1;
        Wire {
            client_port: self.next_port,
            next: [Client, Server].map(Wire::first),
        }
    }

    /// A crafted connection that is up.
    fn craft_established(&mut self) -> Result<Wire> {
        let mut wire = self.craft();
        wire.send(self, Client, SYN)?;
        wire.check(self, SynSent)?;
        wire.send(self, Server, SYN | ACK)?;
        wire.check(self, SynRecv)?;
        wire.send(self, Client, ACK)?;
        wire.check(self, Established)?;
        Ok(wire)
    }
}

/// A client's socket that has begun to connect, from a port of its own (0) or a given one; it has sent a SYN.
fn begin(client: &Namespace, family: Family, port: u16, to: SocketAddr) -> Result<OwnedFd> {
    client.enter(|| {
        let domain = match family {
            Family::V4 => AddressFamily::Inet,
            Family::V6 => AddressFamily::Inet6,
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let fd = socket(domain, SockType::Stream, flags, None)?;
        // The port may have been in use a moment ago.
        setsockopt(&fd, sockopt::ReuseAddr, &true)?;
        // Not from any port by the kernel's choice, which may fall on one twice: a connection is known by its ports.
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

/// A connection that is up, from a port of its own (0) or a given one.
fn connected(
    client: &Namespace,
    listener: &TcpListener,
    family: Family,
    port: u16,
) -> Result<Ends> {
    let client = TcpStream::from(begin(client, family, port, listener.local_addr()?)?);
    let (server, peer) = listener.accept().context("cannot accept")?;
    ensure!(peer == client.local_addr()?, "accepted somebody else");
    for end in [&client, &server] {
        end.set_nonblocking(false)?;
        end.set_nodelay(true)?;
        end.set_read_timeout(Some(PATIENCE))?;
    }
    Ok((client, server))
}

/// The connection between two ends, of which either may have begun it.
fn name(a: SocketAddr, b: SocketAddr) -> Name {
    let clients = [Family::V4.client(), Family::V6.client()];
    if clients.contains(&a.ip()) {
        (a, b)
    } else {
        (b, a)
    }
}

fn name_of(client: &TcpStream) -> Result<Name> {
    Ok((client.local_addr()?, client.peer_addr()?))
}

/// Sends a FIN, and waits until the other end has it.
fn half_close(from: &TcpStream, to: &mut TcpStream) -> Result<()> {
    from.shutdown(Shutdown::Write)?;
    ensure!(to.read(&mut [0])? == 0, "no end of file");
    Ok(())
}

/// Sends a RST.
fn reset(end: TcpStream) -> Result<()> {
    let linger = libc::linger {
        l_onoff: 1,
        l_linger: 0,
    };
    setsockopt(&end, sockopt::Linger, &linger)?;
    Ok(())
}

/// An end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Client = 0,
    Server = 1,
}
use Side::*;

impl Side {
    fn other(self) -> Self {
        match self {
            Client => Server,
            Server => Client,
        }
    }
}

/// A connection whose segments are crafted.
struct Wire {
    client_port: u16,
    /// The next sequence number of each side.
    next: [u32; 2],
}

impl Wire {
    /// Where a side begins.
    fn first(side: Side) -> u32 {
        [1_000_000, 2_000_000][side as usize]
    }

    fn name(&self) -> Name {
        (
            SocketAddr::new(Family::V4.client(), self.client_port),
            SocketAddr::new(Family::V4.server(), CRAFTED),
        )
    }

    fn check(&self, lab: &Lab, state: State) -> Result<()> {
        lab.check(self.name(), state)
    }

    /// The next segment of a side, without data.
    fn send(&mut self, lab: &Lab, side: Side, flags: u8) -> Result<()> {
        self.send_data(lab, side, flags, 0)
    }

    fn send_data(&mut self, lab: &Lab, side: Side, flags: u8, length: u32) -> Result<()> {
        let seq = self.next[side as usize];
        self.send_at(lab, side, flags, seq, length)?;
        let longer = u32::from(flags & SYN != 0) + u32::from(flags & FIN != 0);
        self.next[side as usize] = seq.wrapping_add(length + longer);
        Ok(())
    }

    /// A segment that does not move its sender on.
    fn send_at(&self, lab: &Lab, side: Side, flags: u8, seq: u32, length: u32) -> Result<()> {
        let (client, server) = self.name();
        let (from, to) = match side {
            Client => (client, server),
            Server => (server, client),
        };
        let (SocketAddr::V4(from), SocketAddr::V4(to)) = (from, to) else {
            bail!("crafted segments are of IPv4");
        };
        let mut segment = PacketBuilder::ipv4(from.ip().octets(), to.ip().octets(), 64).tcp(
            from.port(),
            to.port(),
            seq,
            u16::MAX,
        );
        if flags & ACK != 0 {
            segment = segment.ack(self.next[side.other() as usize]);
        }
        if flags & SYN != 0 {
            segment = segment.syn();
        }
        if flags & FIN != 0 {
            segment = segment.fin();
        }
        if flags & RST != 0 {
            segment = segment.rst();
        }
        let mut packet = Vec::new();
        segment.write(&mut packet, &vec![0; length as usize])?;
        let to = SockaddrStorage::from(SocketAddrV4::new(*to.ip(), 0));
        let socket = lab.raw[side as usize].as_raw_fd();
        sendto(socket, &packet, &to, MsgFlags::empty()).context("cannot send a segment")?;
        Ok(())
    }
}

/// Real connections that end, each in its way, or do not.
fn real(lab: &mut Lab) -> Result<()> {
    for (what, family) in [("idle v4", Family::V4), ("idle v6", Family::V6)] {
        let ends = lab.connect(family)?;
        lab.expect(what, name_of(&ends.0)?, [Life::same("idle", Established)]);
        lab.keep(ends);
    }

    for (what, family, by) in [
        ("closed by the client", Family::V4, Client),
        ("closed by the client, v6", Family::V6, Client),
        ("closed by the server", Family::V4, Server),
    ] {
        let (mut client, mut server) = lab.connect(family)?;
        let name = name_of(&client)?;
        let (first, second) = match by {
            Client => (&mut client, &mut server),
            Server => (&mut server, &mut client),
        };
        half_close(first, second)?;
        lab.check(name, CloseWait)?;
        half_close(second, first)?;
        lab.check(name, TimeWait)?;
        lab.expect(what, name, [Life::same("closed", TimeWait)]);
    }

    for (what, family, by) in [
        ("half closed by the client", Family::V4, Client),
        ("half closed by the server", Family::V6, Server),
    ] {
        let (mut client, mut server) = lab.connect(family)?;
        let name = name_of(&client)?;
        match by {
            Client => half_close(&client, &mut server)?,
            Server => half_close(&server, &mut client)?,
        }
        lab.check(name, CloseWait)?;
        lab.expect(what, name, [Life::same("idle", CloseWait)]);
        lab.keep((client, server));
    }

    for (what, family, by) in [
        ("reset by the client", Family::V4, Client),
        ("reset by the server", Family::V6, Server),
    ] {
        let (client, server) = lab.connect(family)?;
        let name = name_of(&client)?;
        match by {
            Client => reset(client)?,
            Server => reset(server)?,
        }
        lab.check(name, Close)?;
        lab.expect(what, name, [Life::same("reset", Close)]);
    }

    let begin_to = |lab: &Lab, port: u16| -> Result<(OwnedFd, Name)> {
        let server = SocketAddr::new(Family::V4.server(), port);
        let fd = begin(&lab.pair.client, Family::V4, 0, server)?;
        let client = TcpStream::from(fd.try_clone()?).local_addr()?;
        Ok((fd, (client, server)))
    };
    let (_, name) = begin_to(lab, REFUSED)?;
    lab.check_both(name, None, None)?;
    lab.expect("refused", name, [Life::same("reset", Close)]);

    let (_, name) = begin_to(lab, SILENT)?;
    lab.check(name, SynSent)?;
    lab.expect("never answered", name, [Life::same("idle", SynSent)]);

    // The SYN/ACK is sent again after a second: to neither is that a sign of life.
    let (fd, name) = begin_to(lab, UNFINISHED)?;
    lab.check(name, SynRecv)?;
    lab.expect("never completed", name, [Life::same("idle", SynRecv)]);
    lab.open.push(fd.into());

    for (what, family, reset_first) in [
        ("a port used again after a close", Family::V4, false),
        ("a port used again after a reset", Family::V6, true),
    ] {
        let (mut client, mut server) = lab.connect(family)?;
        let name = name_of(&client)?;
        let state = if reset_first {
            reset(client)?;
            Close
        } else {
            // The server's end, not the client's, stays in TIME_WAIT.
            half_close(&server, &mut client)?;
            half_close(&client, &mut server)?;
            drop(client);
            TimeWait
        };
        lab.check(name, state)?;
        drop(server);
        let ends = lab.connect_from(family, name.0.port())?;
        let lives = [
            Life::same("superseded", state),
            Life::same("idle", Established),
        ];
        lab.expect(what, name, lives);
        lab.keep(ends);
    }
    used_again_at_speed(lab)
}

/// A port that is used again as soon as its connection is over, without a look between the lives.
fn used_again_at_speed(lab: &mut Lab) -> Result<()> {
    let listener = lab.listeners[0].try_clone()?;
    let (mut client, mut server) = lab.connect(Family::V4)?;
    let name = name_of(&client)?;
    let mut lives = Vec::new();
    for number in 0..100 {
        let state = if number % 2 == 0 {
            reset(client)?;
            // The RST is there.
            ensure!(server.read(&mut [0]).is_err(), "no RST");
            Close
        } else {
            half_close(&server, &mut client)?;
            half_close(&client, &mut server)?;
            drop(client);
            TimeWait
        };
        lives.push(Life::same("superseded", state));
        drop(server);
        (client, server) = connected(&lab.pair.client, &listener, Family::V4, name.0.port())?;
    }
    lives.push(Life::same("idle", Established));
    lab.expect("a port used again at speed", name, lives);
    lab.keep((client, server));
    Ok(())
}

/// Crafted connections on which both agree.
fn crafted(lab: &mut Lab) -> Result<()> {
    let mut wire = lab.craft_established()?;
    for (side, flags, state) in [
        (Client, FIN | ACK, FinWait),
        // Before it has seen the other's FIN.
        (Server, FIN | ACK, LastAck),
        (Client, ACK, TimeWait),
        (Server, ACK, TimeWait),
    ] {
        wire.send(lab, side, flags)?;
        wire.check(lab, state)?;
    }
    let lives = [Life::same("closed", TimeWait)];
    lab.expect("both close at once", wire.name(), lives);

    let mut wire = lab.craft();
    wire.send(lab, Client, SYN)?;
    wire.check(lab, SynSent)?;
    wire.send(lab, Server, SYN)?;
    wire.check(lab, SynSent2)?;
    // The SYN again, with an ACK.
    let first = wire.next[Client as usize] - 1;
    wire.send_at(lab, Client, SYN | ACK, first, 0)?;
    wire.check(lab, SynRecv)?;
    wire.send(lab, Server, ACK)?;
    // Enough for conntrack, since both have begun.
    lab.check_both(wire.name(), Some(SynRecv), Some(Established))?;
    wire.send(lab, Client, ACK)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established)];
    lab.expect("both open at once", wire.name(), lives);

    let mut wire = lab.craft_established()?;
    wire.send(lab, Client, FIN | ACK)?;
    wire.check(lab, FinWait)?;
    let lives = [Life::same("idle", FinWait)];
    lab.expect("a FIN never acknowledged", wire.name(), lives);

    let mut wire = lab.craft_established()?;
    wire.send(lab, Client, FIN | ACK)?;
    wire.send(lab, Server, ACK)?;
    wire.check(lab, CloseWait)?;
    wire.send(lab, Server, FIN | ACK)?;
    wire.check(lab, LastAck)?;
    let lives = [Life::same("closed", LastAck)];
    lab.expect("the last ACK missing", wire.name(), lives);

    let mut wire = lab.craft();
    wire.send_data(lab, Client, ACK, 10)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established).unreplied()];
    lab.expect("picked up, one side silent", wire.name(), lives);

    let mut wire = lab.craft_established()?;
    let far = wire.next[Server as usize].wrapping_add(1 << 30);
    wire.send_at(lab, Server, RST | ACK, far, 0)?;
    wire.send(lab, Client, ACK)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established)];
    lab.expect("a RST from nowhere", wire.name(), lives);

    // Nor by FINs of somebody who does not know where the two are.
    let mut wire = lab.craft_established()?;
    for side in [Client, Server] {
        let far = wire.next[side as usize].wrapping_add(1 << 29);
        wire.send_at(lab, side, FIN | ACK, far, 0)?;
        wire.check(lab, Established)?;
    }
    wire.send(lab, Client, ACK)?;
    let lives = [Life::same("idle", Established)];
    lab.expect("FINs from nowhere", wire.name(), lives);

    // What the other side waits for lies behind what came by: the answer of a host that has forgotten the connection.
    let mut wire = lab.craft_established()?;
    let waited_for = wire.next[Client as usize];
    wire.send_data(lab, Client, ACK, 1000)?;
    wire.send(lab, Server, ACK)?;
    wire.send_data(lab, Client, ACK, 1000)?;
    wire.send_at(lab, Client, RST, waited_for + 1000, 0)?;
    wire.check(lab, Close)?;
    let lives = [Life::same("reset", Close)];
    lab.expect("a RST that answers", wire.name(), lives);

    // A keep-alive probe to a peer that has rebooted: it answers with what the probe acknowledges.
    let wire = lab.craft_established()?;
    let [last, next] = [wire.next[Client as usize] - 1, wire.next[Server as usize]];
    wire.send_at(lab, Client, ACK, last, 0)?;
    wire.send_at(lab, Server, RST, next, 0)?;
    wire.check(lab, Close)?;
    let lives = [Life::same("reset", Close)];
    lab.expect("a probe of a peer that has rebooted", wire.name(), lives);

    // A client that has rebooted: its SYN is answered as what came before, and it answers that with a RST (RFC 9293, 3.5.1).
    let mut wire = lab.craft_established()?;
    let old = wire.next[Client as usize];
    wire.next[Client as usize] = 3_000_000;
    wire.send(lab, Client, SYN)?;
    wire.check(lab, Established)?;
    let next = wire.next[Server as usize];
    wire.next[Client as usize] = old;
    wire.send(lab, Server, ACK)?;
    wire.send_at(lab, Client, RST, old, 0)?;
    wire.check(lab, Close)?;
    wire.next = [3_000_001, next + 1_000_000];
    wire.send_at(lab, Client, SYN, 3_000_000, 0)?;
    wire.send(lab, Server, SYN | ACK)?;
    wire.check(lab, SynRecv)?;
    wire.send(lab, Client, ACK)?;
    wire.check(lab, Established)?;
    let lives = [
        Life::same("superseded", Close),
        Life::same("idle", Established),
    ];
    lab.expect("a client that has rebooted", wire.name(), lives);

    // Picked up from one side, and the other knows nothing of it.
    let mut wire = lab.craft();
    wire.send_data(lab, Client, ACK, 10)?;
    wire.check(lab, Established)?;
    wire.send(lab, Server, RST)?;
    lab.check_both(wire.name(), None, None)?;
    let lives = [Life::same("reset", Close)];
    lab.expect("picked up, and answered by a RST", wire.name(), lives);

    let mut wire = lab.craft();
    wire.send(lab, Client, FIN | ACK)?;
    wire.send(lab, Server, RST | ACK)?;
    thread::sleep(SCHEDULING);
    lab.check_both(wire.name(), None, None)?;
    Ok(())
}

/// What the two are known to see otherwise.
fn differences(lab: &mut Lab) -> Result<()> {
    // Not the end of the other direction.
    let mut wire = lab.craft_established()?;
    wire.send(lab, Client, FIN | ACK)?;
    wire.check(lab, FinWait)?;
    let fin = wire.next[Client as usize] - 1;
    wire.send_at(lab, Client, FIN | ACK, fin, 0)?;
    lab.check_both(wire.name(), Some(FinWait), Some(LastAck))?;
    let lives = [Life::same("idle", FinWait).theirs(LastAck).later(1.0)];
    lab.expect("a FIN sent again", wire.name(), lives);

    // Conntrack gives up on a peer that acknowledges nothing; we only watch for silence.
    let mut wire = lab.craft_established()?;
    wire.send_data(lab, Client, ACK, 10)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established).later(1.0)];
    lab.expect("data never acknowledged", wire.name(), lives);

    // A RST that is not exactly the next segment: conntrack shortens the timeout alone.
    let wire = lab.craft_established()?;
    let ahead = wire.next[Server as usize] + 100;
    wire.send_at(lab, Server, RST | ACK, ahead, 0)?;
    lab.check_both(wire.name(), Some(Close), Some(Established))?;
    let lives = [Life::same("reset", Close).theirs(Established)];
    lab.expect("a RST ahead", wire.name(), lives);

    // One that lies behind what was acknowledged.
    let mut wire = lab.craft_established()?;
    wire.send_data(lab, Server, ACK, 1000)?;
    wire.send(lab, Client, ACK)?;
    let behind = wire.next[Server as usize] - 500;
    wire.send_at(lab, Server, RST | ACK, behind, 0)?;
    wire.check(lab, Established)?;
    let lives = [Life::same("idle", Established)];
    lab.expect("a RST behind", wire.name(), lives);

    // The responder may begin anew after a reset: conntrack goes on with the old entry once it is answered.
    let mut wire = lab.craft_established()?;
    wire.send(lab, Client, RST | ACK)?;
    wire.check(lab, Close)?;
    wire.next = [3_000_000, 4_000_000];
    wire.send(lab, Server, SYN)?;
    wire.check(lab, Close)?;
    wire.send(lab, Client, SYN | ACK)?;
    lab.check_both(wire.name(), Some(SynRecv), Some(Close))?;
    let lives = [
        Life::ours("superseded", Close),
        Life::same("idle", SynRecv).theirs(Close).later(1.0),
    ];
    lab.expect(
        "a connection of the responder after a reset",
        wire.name(),
        lives,
    );

    // And so where the server had sent the RST, and the client begins again.
    let mut wire = lab.craft_established()?;
    wire.send(lab, Server, RST | ACK)?;
    wire.check(lab, Close)?;
    wire.next = [3_000_000, 4_000_000];
    wire.send(lab, Client, SYN)?;
    wire.check(lab, Close)?;
    wire.send(lab, Server, SYN | ACK)?;
    wire.check(lab, SynRecv)?;
    wire.send(lab, Client, ACK)?;
    wire.check(lab, Established)?;
    let lives = [
        Life::ours("superseded", Close),
        Life::same("idle", Established).started_apart(),
    ];
    lab.expect(
        "a port used again after the server's reset",
        wire.name(),
        lives,
    );

    // A SYN/ACK that answers nothing.
    let mut wire = lab.craft();
    wire.send(lab, Server, SYN | ACK)?;
    lab.check_both(wire.name(), None, None)?;
    Ok(())
}

/// What it takes some time to tell apart: which packets keep a connection alive.
fn keep_alive(lab: &mut Lab) -> Result<()> {
    let server = SocketAddr::new(Family::V4.server(), SILENT);
    let fd = begin(&lab.pair.client, Family::V4, 0, server)?;
    let syn_again = TcpStream::from(fd);
    let syn_name = (syn_again.local_addr()?, server);

    let mut closed = lab.craft_established()?;
    for (side, flags) in [
        (Client, FIN | ACK),
        (Server, ACK),
        (Server, FIN | ACK),
        (Client, ACK),
    ] {
        closed.send(lab, side, flags)?;
    }
    closed.check(lab, TimeWait)?;
    let mut stray = lab.craft_established()?;
    let mut beyond = lab.craft();
    for (side, flags) in HANDSHAKE {
        beyond.send(lab, *side, *flags)?;
    }
    let before = Instant::now();
    let probed = lab.craft_established()?;
    let mut reset = lab.craft_established()?;
    reset.send(lab, Client, RST | ACK)?;
    reset.check(lab, Close)?;

    thread::sleep(Duration::from_millis(500));
    reset.send(lab, Server, ACK)?;
    // The kernel has sent its SYN again after one second.
    thread::sleep(Duration::from_millis(700));
    closed.send(lab, Client, ACK)?;
    stray.send(lab, Client, SYN)?;
    let far = beyond.next[Client as usize] + (1 << 22);
    beyond.send_at(lab, Client, ACK, far, 10)?;
    let later = before.elapsed().as_secs_f64();
    // A keep-alive probe: the last octet again.
    let last = probed.next[Client as usize] - 1;
    probed.send_at(lab, Client, ACK, last, 0)?;

    // Conntrack gives one timeout for all of them.
    let lives = [Life::same("idle", SynSent)];
    lab.expect("a SYN sent again", syn_name, lives);
    let lives = [Life::same("closed", TimeWait)];
    lab.expect("an ACK after the last", closed.name(), lives);
    let lives = [Life::same("idle", Established)];
    lab.expect("a stray SYN", stray.name(), lives);
    let lives = [Life::same("idle", Established)];
    lab.expect("a keep-alive probe", probed.name(), lives);
    let lives = [Life::same("reset", Close)];
    lab.expect("an ACK after a reset", reset.name(), lives);
    // Conntrack tracks windows.
    let lives = [Life::same("idle", Established).later(later)];
    lab.expect("data beyond the window", beyond.name(), lives);
    Ok(())
}

impl Lab {
    /// Waits until both have forgotten all connections. When they did, by connection.
    fn ends(&self) -> Result<Ended> {
        let mut ends = Ended::new();
        let patience = Instant::now() + PATIENCE;
        let mut empty = false;
        loop {
            let expiries = self.twheel.expiries_until(Instant::now() + TICK)?;
            let (now, time) = (Instant::now(), SystemTime::now());
            for expiry in expiries {
                let stop = time - (now - expiry.at);
                let of = ends.entry(name(expiry.src, expiry.dst)).or_default();
                of.0.push(End { stop, expiry });
            }
            for entry in self.conntrack.destroyed()? {
                let of = ends.entry(name(entry.src, entry.dst)).or_default();
                of.1.push(entry);
            }
            // Once more after the last one.
            if empty {
                return Ok(ends);
            }
            let states = self.states()?;
            // For that state conntrack has two minutes and no setting.
            let is_left = |state: &State| *state != SynSent2;
            empty = !states.iter().flat_map(BTreeMap::values).any(is_left);
            ensure!(Instant::now() < patience, "left: {states:?}");
        }
    }

    /// Compares the ends of all connections with what they should be. Fails with all that is wrong.
    fn compare_ends(self) -> Result<()> {
        let mut ends = self.ends()?;
        let held_up = self.watch.stop();
        let mut wrong = Vec::new();
        for (name, (what, lives)) in self.expected {
            let (ours, theirs) = ends.remove(&name).unwrap_or_default();
            let (mut ours, mut theirs) = (ours.into_iter(), theirs.into_iter());
            for life in lives {
                let ours = life.ours.and_then(|_| ours.next());
                let theirs = life.theirs.and_then(|_| theirs.next());
                let marked = ours.as_ref().is_some_and(|it| it.expiry.picked_up);
                if marked != what.starts_with("picked up") {
                    wrong.push(format!("{what}: marked as picked up: {marked}"));
                }
                if let Err(error) = life.compare(ours.as_ref(), theirs.as_ref(), held_up) {
                    wrong.push(format!("{what}: {error:#}: {ours:?}, {theirs:?}"));
                }
            }
            for more in ours {
                wrong.push(format!("{what}: twheel also reports {more:?}"));
            }
            for more in theirs {
                wrong.push(format!("{what}: conntrack also reports {more:?}"));
            }
        }
        wrong.extend(ends.into_iter().map(|more| format!("unknown: {more:?}")));
        ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
        Ok(())
    }
}

/// The ends of each connection, ours and conntrack's.
type Ended = BTreeMap<Name, (Vec<End>, Vec<Entry>)>;

/// What twheel reports of an end.
#[derive(Debug)]
struct End {
    stop: SystemTime,
    expiry: Expiry,
}

impl End {
    /// By how many seconds ours ends later, and begins later.
    fn later_than(&self, theirs: &Entry) -> Result<[f64; 2]> {
        let stop = theirs.stop.context("conntrack does not say when")?;
        let start = self.stop - self.expiry.age;
        Ok([seconds(self.stop, stop), seconds(start, theirs.start)])
    }
}

/// Whether it is so late that it is on time, where the CPUs were held up for so long: either side, and this test, may have
/// been.
fn is_on_time(later: f64, held_up: Duration) -> bool {
    let held_up = 2 * held_up.min(HELD_UP);
    // Neither clock shows more than jiffies.
    let jiffy = clock_getres(ClockId::CLOCK_MONOTONIC_COARSE).map(Duration::from);
    let early = 2 * jiffy.unwrap_or_default() + held_up;
    let late = TICK + SCHEDULING + held_up;
    (-early.as_secs_f64()..=late.as_secs_f64()).contains(&later)
}

impl Life {
    fn compare(&self, ours: Option<&End>, theirs: Option<&Entry>, held_up: Duration) -> Result<()> {
        let found = ours.map(|it| (&*it.expiry.reason, &*it.expiry.state));
        let name = |state: State| {
            if self.unreplied {
                "unreplied"
            } else {
                state.name()
            }
        };
        let wanted = self.ours.map(|(reason, state)| (reason, name(state)));
        ensure!(found == wanted, "twheel reports {found:?}, not {wanted:?}");
        let found = theirs.and_then(|it| it.state);
        ensure!(
            found == self.theirs,
            "conntrack reports {found:?}, not {:?}",
            self.theirs
        );
        let (Some(ours), Some(theirs)) = (ours, theirs) else {
            return Ok(());
        };
        let [ends, begins] = ours.later_than(theirs)?;
        ensure!(
            is_on_time(ends - self.later, held_up),
            "ours ends {ends:.3} s later, not {}",
            self.later
        );
        ensure!(
            is_on_time(begins, held_up) || self.started_apart,
            "ours begins {begins:.3} s later"
        );
        Ok(())
    }
}

/// From one to the other, either may be the later.
fn seconds(a: SystemTime, b: SystemTime) -> f64 {
    match a.duration_since(b) {
        Ok(later) => later.as_secs_f64(),
        Err(error) => -error.duration().as_secs_f64(),
    }
}

#[test]
fn states_and_ends_are_those_of_conntrack() -> Result<()> {
    require_root();
    let mut lab = Lab::start()?;
    real(&mut lab)?;
    crafted(&mut lab)?;
    differences(&mut lab)?;
    keep_alive(&mut lab)?;
    lab.compare_ends()
}

/// A connection that is established.
const HANDSHAKE: &[(Side, u8)] = &[(Client, SYN), (Server, SYN | ACK), (Client, ACK)];

/// How a connection comes into each state, from the beginning or, without a SYN, when it is established.
const WAYS: [(State, &[(Side, u8)]); 9] = [
    (SynSent, &[(Client, SYN)]),
    (SynRecv, &[(Client, SYN), (Server, SYN | ACK)]),
    (Established, HANDSHAKE),
    (FinWait, &[(Client, FIN | ACK)]),
    (CloseWait, &[(Client, FIN | ACK), (Server, ACK)]),
    (
        LastAck,
        &[(Client, FIN | ACK), (Server, ACK), (Server, FIN | ACK)],
    ),
    (
        TimeWait,
        &[
            (Client, FIN | ACK),
            (Server, ACK),
            (Server, FIN | ACK),
            (Client, ACK),
        ],
    ),
    (Close, &[(Client, RST | ACK)]),
    (SynSent2, &[(Client, SYN), (Server, SYN)]),
];

/// Whose flow a segment keeps alive, where they differ.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Renews {
    Both,
    Ours,
    Theirs,
}

/// A segment that does something else to conntrack.
struct Difference {
    state: State,
    side: Side,
    flags: u8,
    /// The states it leads to, ours and conntrack's.
    to: [State; 2],
    /// By how many seconds ours ends later.
    later: f64,
    renews: Renews,
}

const fn differs(
    state: State,
    (side, flags): (Side, u8),
    to: [State; 2],
    later: f64,
    renews: Renews,
) -> Difference {
    Difference {
        state,
        side,
        flags,
        to,
        later,
        renews,
    }
}

#[rustfmt::skip]
const DIFFERENCES: [Difference; 8] = [
    // Conntrack gives one timeout for all the SYNs of a connection that is not yet answered.
    differs(SynSent, (Server, SYN), [SynSent2; 2], 0.0, Renews::Ours),
    // A FIN of the side that has sent one is no end of the other. (4 s and 5 s; 3 s.)
    differs(FinWait, (Client, FIN | ACK), [FinWait, LastAck], 1.0, Renews::Both),
    differs(CloseWait, (Client, FIN | ACK), [CloseWait, LastAck], 2.0, Renews::Both),
    // Nor does its ACK acknowledge it. (4 s, 5 s; 3 s, 6 s.)
    differs(FinWait, (Client, ACK), [FinWait, CloseWait], -1.0, Renews::Both),
    differs(LastAck, (Server, ACK), [LastAck, TimeWait], -3.0, Renews::Both),
    // A SYN begins nothing until it is answered. (6 s, 3 s; 1 s, 3 s.)
    differs(TimeWait, (Client, SYN), [TimeWait, SynSent], 3.0, Renews::Theirs),
    differs(TimeWait, (Server, SYN), [TimeWait, SynSent], 3.0, Renews::Theirs),
    differs(Close, (Client, SYN), [Close, SynSent], -2.0, Renews::Theirs),
];

fn difference(state: State, side: Side, flags: u8) -> Option<&'static Difference> {
    DIFFERENCES
        .iter()
        .find(|it| (it.state, it.side, it.flags) == (state, side, flags))
}

#[test]
fn every_segment_in_every_state_does_what_it_does_to_conntrack() -> Result<()> {
    require_root();
    let mut lab = Lab::start()?;
    let mut wires = Vec::new();
    for (state, way) in WAYS {
        for side in [Client, Server] {
            for flags in [SYN, SYN | ACK, FIN | ACK, ACK, RST | ACK] {
                let mut wire = lab.craft();
                let begun = way[0].1 == SYN;
                for (side, flags) in HANDSHAKE.iter().filter(|_| !begun).chain(way) {
                    wire.send(&lab, *side, *flags)?;
                }
                wires.push((state, side, flags, wire, Instant::now()));
            }
        }
    }
    thread::sleep(SCHEDULING);
    let [ours, theirs] = lab.states()?;
    for (state, _, _, wire, _) in &wires {
        let found = [&ours, &theirs].map(|states| states.get(&wire.name()));
        ensure!(found == [Some(state); 2], "{found:?}, not {state:?}");
    }
    // Long enough to tell whether the next segment keeps the flow alive.
    thread::sleep(Duration::from_millis(500));
    let mut renewed = Vec::new();
    for (state, side, flags, wire, before) in &wires {
        let next = wire.next[*side as usize];
        let seq = match state {
            // As it was, or might have been.
            SynSent | SynRecv | SynSent2 if *flags & SYN != 0 => Wire::first(*side),
            // Of another connection.
            _ if *flags & SYN != 0 => next + 1_000_000,
            _ => next,
        };
        wire.send_at(&lab, *side, *flags, seq, 0)?;
        renewed.push(before.elapsed().as_secs_f64());
    }
    thread::sleep(SCHEDULING);
    let [ours, theirs] = lab.states()?;
    let ends = lab.ends()?;
    let held_up = lab.watch.stop();
    let mut wrong = Vec::new();
    for ((state, side, flags, wire, _), renewed) in wires.into_iter().zip(renewed) {
        let known = difference(state, side, flags);
        let found = [&ours, &theirs].map(|it| it.get(&wire.name()).copied());
        let is_known = match known {
            Some(known) => found == known.to.map(Some),
            None => found[0] == found[1],
        };
        let mut differ = |what: &dyn Debug| {
            wrong.push(format!("{state:?}, {flags:#x} of the {side:?}: {what:?}"));
        };
        if !is_known {
            differ(&found);
        }
        // The last of their lives, where there is more than one.
        let (ours, theirs) = ends.get(&wire.name()).context("no end")?;
        match (ours.last(), theirs.last()) {
            (Some(ours), Some(theirs)) => {
                let [later, _] = ours.later_than(theirs)?;
                let meant = known.map_or(0.0, |known| match known.renews {
                    Renews::Both => known.later,
                    Renews::Ours => known.later + renewed,
                    Renews::Theirs => known.later - renewed,
                });
                if !is_on_time(later - meant, held_up) {
                    differ(&later);
                }
            }
            // See `Lab::ends`.
            (Some(_), None) if found[1] == Some(SynSent2) => {}
            _ => differ(&(ours, theirs)),
        }
    }
    ensure!(wrong.is_empty(), "{}", wrong.join("\n"));
    Ok(())
}

/// Seconds, by conntrack's names for what is not TCP.
const DATAGRAM_TIMEOUTS: [(&str, u64); 4] = [
    ("udp_timeout", 3),
    ("udp_timeout_stream", 5),
    ("icmp_timeout", 2),
    ("icmpv6_timeout", 2),
];

/// A UDP socket, or one for pings, which is to the kernel as good as one.
fn datagrams(host: &Namespace, address: SocketAddr, proto: SockProtocol) -> Result<UdpSocket> {
    host.enter(|| {
        let family = if address.is_ipv4() {
            AddressFamily::Inet
        } else {
            AddressFamily::Inet6
        };
        let fd = socket(family, SockType::Datagram, SockFlag::SOCK_CLOEXEC, proto)?;
        bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
        let socket = UdpSocket::from(fd);
        socket.set_read_timeout(Some(PATIENCE))?;
        Ok(socket)
    })
}

/// What each flow is to end as, by its protocol and its client's end.
type Datagrams = BTreeMap<(String, SocketAddr), (&'static str, State)>;

/// Sends a datagram and waits for it at the other end.
fn pass(from: &UdpSocket, to: &UdpSocket) -> Result<()> {
    from.send_to(b"?", to.local_addr()?)?;
    to.recv(&mut [0; 8])?;
    Ok(())
}

#[test]
fn datagrams_end_when_they_do_to_conntrack() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    // Who may ping.
    pair.client
        .enter(|| fs::write("/proc/sys/net/ipv4/ping_group_range", "0 0").context("no pings"))?;
    let watch = Watch::start();
    let conntrack = start_conntrack(&pair)?;
    pair.server.enter(|| {
        DATAGRAM_TIMEOUTS.iter().try_for_each(|(name, seconds)| {
            set(&format!("netfilter/nf_conntrack_{name}"), *seconds)
        })
    })?;
    let arguments = [
        "--iface",
        SERVER,
        "--egress",
        "on",
        "--timeout",
        "inherit",
        "--json",
    ];
    let twheel = Twheel::start(
        &pair.server,
        &[&arguments[..], &["--proto", "tcp,udp,icmp"]].concat(),
    )?;
    let mut expected = Datagrams::new();
    let mut expect = |proto: &str, of: &UdpSocket, what, state| -> Result<()> {
        let twice = expected.insert((proto.to_owned(), of.local_addr()?), (what, state));
        assert!(twice.is_none(), "two are {proto} of {of:?}");
        Ok(())
    };
    let mut lasting = Vec::new();
    let mut late = Vec::new();
    for family in [Family::V4, Family::V6] {
        let [client, server] = [family.client(), family.server()];
        let answers = datagrams(&pair.server, SocketAddr::new(server, 53), SockProtocol::Udp)?;
        let ask = || datagrams(&pair.client, SocketAddr::new(client, 0), SockProtocol::Udp);

        let asks = ask()?;
        pass(&asks, &answers)?;
        expect("udp", &asks, "never answered", Udp)?;

        let asks = ask()?;
        pass(&asks, &answers)?;
        pass(&answers, &asks)?;
        pass(&asks, &answers)?;
        expect("udp", &asks, "over before it was a stream", Udp)?;

        let asks = ask()?;
        pass(&asks, &answers)?;
        pass(&answers, &asks)?;
        expect("udp", &asks, "a stream", UdpStream)?;
        lasting.push((asks, answers.try_clone()?));

        let asks = ask()?;
        pass(&asks, &answers)?;
        expect("udp", &asks, "answered late", Udp)?;
        late.push((asks, answers));

        let (proto, name, echo) = match family {
            Family::V4 => (SockProtocol::Icmp, "icmp", 8),
            Family::V6 => (SockProtocol::IcmpV6, "icmpv6", 128),
        };
        let ping = datagrams(&pair.client, SocketAddr::new(client, 0), proto)?;
        ping.send_to(&[echo, 0, 0, 0, 0, 0, 0, 1], SocketAddr::new(server, 0))?;
        ping.recv(&mut [0; 8])?;
        expect(name, &ping, "a ping", Icmp)?;
    }
    // More than two seconds after their beginnings.
    thread::sleep(Duration::from_millis(2_300));
    for (asks, answers) in &lasting {
        pass(asks, answers)?;
    }
    for (asks, answers) in &late {
        pass(answers, asks)?;
    }
    let last = Instant::now() + Duration::from_secs(5) + TICK + 2 * SCHEDULING;
    let ours = twheel.expiries_until(last)?;
    // Whoever looks at an entry that is due makes conntrack remove it.
    conntrack.dump()?;
    let mut theirs: BTreeMap<_, _> = conntrack
        .destroyed()?
        .into_iter()
        .map(|entry| ((entry.proto.to_owned(), entry.src), entry))
        .collect();
    let held_up = watch.stop();
    for expiry in ours {
        let name = (expiry.proto.clone(), expiry.src);
        let Some((what, state)) = expected.remove(&name) else {
            // The neighbours of IPv6 speak ICMPv6, too, but no queries.
            bail!("unknown: {expiry:?}");
        };
        ensure!(
            (&*expiry.reason, &*expiry.state) == ("idle", state.name()),
            "{what}: {expiry:?}"
        );
        let entry = theirs.remove(&name);
        let entry = entry.with_context(|| format!("{what}: conntrack has no {name:?}"))?;
        ensure!(entry.dst == expiry.dst, "{what}: {entry:?}, {expiry:?}");
        let lived = seconds(entry.stop.context("no end")?, entry.start);
        let later = expiry.age.as_secs_f64() - lived;
        ensure!(
            is_on_time(later, held_up),
            "{what}: ours ends {later:.3} s later"
        );
    }
    ensure!(expected.is_empty(), "not reported: {expected:?}");
    ensure!(theirs.is_empty(), "conntrack alone reports {theirs:?}");
    Ok(())
}
