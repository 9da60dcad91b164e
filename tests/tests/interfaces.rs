//! `twheel` on each kind of interface, compared with `nf_conntrack` on the same host: both must
//! know the same connections in the same states, and each must end as it should.
//! `cargo xtask vm-test` runs all of these; a host's kernel may lack some kinds.
#![allow(missing_docs)]

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    io::{ErrorKind, Read},
    net::{SocketAddr, TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_common::state::State;
use twheel_tests::{
    ctnetlink::Conntrack,
    devices::{DEV, Joined, Kind},
    netns::{Namespace, PATIENCE, require_root},
    pair::{Busy, Connection, Family, PORT},
    running::Twheel,
    skipped,
};

/// Options of the runs on each kind of interface: their hooks.
const HOOKS: &[&[&str]] = &[&["--hook", "xdp"], &["--hook", "tcx"]];
/// Whether `twheel` accepts interfaces whose packets have no Ethernet header. If not, only
/// conntrack watches them.
const TAKES_RAW: bool = true;

const TIMEOUT: Duration = Duration::from_secs(4);
const TIMEOUTS: &str = "4s,time_wait=3s,close=3s";
const POLL: Duration = Duration::from_millis(20);

/// A connection: the endpoint that opened it, and the other.
type Name = (SocketAddr, SocketAddr);

/// What a connection does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Habit {
    Idle,
    Busy,
    Closed,
    Reset,
}
use Habit::*;

impl Habit {
    /// The state of its flow after that.
    fn state(self) -> State {
        match self {
            Idle | Busy => State::Established,
            Closed => State::TimeWait,
            Reset => State::Close,
        }
    }

    /// The reason for which its flow ends.
    fn reason(self) -> &'static str {
        match self {
            Idle | Busy => "idle",
            Closed => "closed",
            Reset => "reset",
        }
    }
}

/// Starts conntrack in a namespace that has had no packet yet: it is idle until a rule uses it.
fn start_conntrack(host: &Namespace) -> Result<()> {
    host.nft("table inet lab { chain input { type filter hook input priority filter; ct state established accept; }; }")?;
    host.enter(|| {
        let stamp = "/proc/sys/net/netfilter/nf_conntrack_timestamp";
        fs::write(stamp, "1").with_context(|| format!("cannot set {stamp}"))
    })
}

/// The states of connections to the tests' servers, as conntrack knows them.
fn theirs(conntrack: &Conntrack) -> Result<BTreeMap<Name, String>> {
    let entries = conntrack.dump()?.into_iter();
    let entries = entries.filter(|entry| entry.proto == "tcp" && entry.dst.port() == PORT);
    let named = |state: State| state.name().to_owned();
    Ok(entries
        .filter_map(|entry| Some(((entry.src, entry.dst), named(entry.state?))))
        .collect())
}

/// The same, as `twheel flows` prints them.
fn ours(host: &Namespace) -> Result<BTreeMap<Name, String>> {
    let ended = host.twheel_once(&["flows", "--json"])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    let lines = ended.lines.iter().map(|line| {
        let flow = serde_json::from_str(&line.text)?;
        Ok((name(&flow)?, text(&flow, "state")?.to_owned()))
    });
    lines.collect()
}

fn text<'a>(value: &'a Value, key: &str) -> Result<&'a str> {
    let text = value[key].as_str();
    text.with_context(|| format!("no {key} in {value}"))
}

fn name(value: &Value) -> Result<Name> {
    let end = |address: &str, port: &str| -> Result<SocketAddr> {
        let port = value[port].as_u64().context("no port")?;
        Ok(SocketAddr::new(
            text(value, address)?.parse()?,
            port.try_into()?,
        ))
    };
    Ok((end("src", "sport")?, end("dst", "dport")?))
}

/// Opens a connection from either host to the other.
fn open(joined: &Joined, family: Family, by_client: bool) -> Result<(Name, Connection)> {
    let from = if by_client {
        joined.client()
    } else {
        &joined.server
    };
    let connection = Connection::open(from, joined.listener(family, by_client)?)?;
    let name = (
        connection.client.local_addr()?,
        connection.client.peer_addr()?,
    );
    Ok((name, connection))
}

/// Connections of all habits, watched until they end.
struct Lives {
    begun: Instant,
    expected: BTreeMap<Name, Habit>,
    /// The ends on the watched host, and the other ends.
    idle: Vec<[TcpStream; 2]>,
    busy: Busy,
}

impl Lives {
    fn begin(joined: &Joined) -> Result<Self> {
        let begun = Instant::now();
        let mut expected = BTreeMap::new();
        let (mut idle, mut busy) = (Vec::new(), Vec::new());
        for habit in [Busy, Idle, Closed, Reset] {
            for &family in joined.kind.families {
                for by_client in [true, false] {
                    // This host would have to bind a connection of its own to a device.
                    if joined.kind.binds && !by_client {
                        continue;
                    }
                    let (name, mut connection) = open(joined, family, by_client)?;
                    expected.insert(name, habit);
                    connection.talk()?;
                    match habit {
                        Busy => busy.push(connection),
                        Closed => connection.close()?,
                        Reset => connection.reset()?,
                        Idle if by_client => idle.push([connection.server, connection.client]),
                        Idle => idle.push([connection.client, connection.server]),
                    }
                }
            }
        }
        Ok(Self {
            begun,
            expected,
            idle,
            busy: Busy::start(busy, TIMEOUT / 10),
        })
    }

    /// Waits until both trackers know the connections in the expected states.
    fn check(&self, joined: &Joined, twheel: bool) -> Result<()> {
        let conntrack = Conntrack::open(&joined.server)?;
        let expected: BTreeMap<_, _> = self
            .expected
            .iter()
            .map(|(name, habit)| (*name, habit.state().name().to_owned()))
            .collect();
        let end = Instant::now() + TIMEOUT / 2;
        loop {
            let theirs = theirs(&conntrack)?;
            let ours = match twheel {
                true => ours(&joined.server)?,
                false => theirs.clone(),
            };
            if ours == expected && theirs == expected {
                return Ok(());
            }
            let differ = || {
                let all = [&expected, &ours, &theirs];
                let names: BTreeSet<_> = all.iter().flat_map(|it| it.keys()).collect();
                let states = names
                    .into_iter()
                    .map(|name| (name, all.map(|it| it.get(name))));
                let mut states: Vec<_> = states.collect();
                states.retain(|(_, [is, ours, theirs])| is != ours || is != theirs);
                states
            };
            ensure!(
                Instant::now() < end,
                "{}, {:?} after the first connection: expected states, twheel's, conntrack's: {:#?}",
                joined.kind.name,
                self.begun.elapsed(),
                differ()
            );
            thread::sleep(POLL);
        }
    }

    fn names(&self, is: impl Fn(Habit) -> bool) -> BTreeSet<Name> {
        let names = self.expected.iter().filter(|(_, habit)| is(**habit));
        names.map(|(name, _)| *name).collect()
    }

    /// Waits until all but the busy connections have ended as expected.
    fn await_ends(&self, joined: &Joined, twheel: &Twheel) -> Result<()> {
        let outcome = if joined.kind.binds { "nothing" } else { "done" };
        let mut ended = BTreeSet::new();
        let mut reaped = BTreeSet::new();
        // The busy ones stay open for longer than their timeout.
        let least = Instant::now() + 2 * TIMEOUT;
        let most = least + PATIENCE;
        while Instant::now() < least
            || ended != self.names(|habit| habit != Busy)
            || reaped != self.names(|habit| habit == Idle)
        {
            ensure!(
                Instant::now() < most,
                "{}: of {:#?}\nonly {ended:#?}\nhave ended, and only {reaped:#?}\nwere reaped",
                joined.kind.name,
                self.expected
            );
            let Some(line) = twheel.line(POLL)? else {
                continue;
            };
            let event: Value = serde_json::from_str(&line.text)?;
            let name = name(&event)?;
            let habit = self.expected.get(&name);
            let habit = *habit.with_context(|| format!("not of a known connection: {event}"))?;
            let is_new = match text(&event, "event")? {
                "reap" => {
                    let is_right = text(&event, "outcome")? == outcome && habit == Idle;
                    is_right && reaped.insert(name)
                }
                _ => {
                    let is_right = text(&event, "reason")? == habit.reason()
                        && text(&event, "state")? == habit.state().name();
                    is_right && habit != Busy && ended.insert(name)
                }
            };
            ensure!(is_new, "{}: {habit:?}, but {event}", joined.kind.name);
        }
        Ok(())
    }

    /// The sockets of idle connections were closed on the watched host, and no others.
    fn check_sockets(mut self, joined: &Joined) -> Result<()> {
        let told = [ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset];
        for ends in &mut self.idle {
            for (socket, told) in ends.iter_mut().zip(told) {
                socket.set_read_timeout(Some(POLL))?;
                let error = socket.read(&mut [0]).err().map(|it| it.kind());
                let told: &[_] = match (joined.kind.binds, joined.kind.name) {
                    (true, _) => &[ErrorKind::WouldBlock],
                    // Both ends are on the watched host.
                    (_, "lo") => &[ErrorKind::ConnectionAborted, ErrorKind::ConnectionReset],
                    _ => &[told],
                };
                ensure!(
                    error.is_some_and(|it| told.contains(&it)),
                    "an idle connection's socket has error {error:?}, not {told:?}"
                );
            }
        }
        let mut rest = self.busy.stop()?;
        ensure!(
            rest.longest_gap < TIMEOUT,
            "this machine is too slow to test on: a busy connection was silent for {:?}",
            rest.longest_gap
        );
        rest.connections.iter_mut().try_for_each(Connection::talk)
    }
}

/// Compares what `twheel` and conntrack report of connections over an interface.
fn watch(joined: &Joined, hook: &[&str]) -> Result<()> {
    if !(joined.kind.ethernet || TAKES_RAW) {
        let lives = Lives::begin(joined)?;
        lives.check(joined, false)?;
        lives.busy.stop()?;
        return Ok(());
    }
    let mut args = vec!["--timeout", TIMEOUTS, "--max-flows", "4096", "--json"];
    args.extend(["--reap", "socket", "--reap-max-share", "100"]);
    args.extend(joined.kind.watched.iter().flat_map(|it| ["--iface", it]));
    args.extend(hook);
    if joined.kind.name == "vlan_trunk" && !hook.contains(&"tcx") {
        // The interface removes the tags of incoming frames, so XDP does not see them.
        args.extend(["--vlan", "ignore"]);
    }
    let twheel = Twheel::start(&joined.server, &args)?;
    let lives = Lives::begin(joined)?;
    lives.check(joined, true)?;
    lives.await_ends(joined, &twheel)?;
    lives.check_sockets(joined)?;
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    for interface in joined.kind.watched {
        joined.server.check_clean(interface)?;
    }
    Ok(())
}

/// The test of a kind of interface.
fn run(name: &'static str) -> Result<()> {
    require_root();
    let kind = Kind::named(name)?;
    let mut labs = Vec::new();
    for hook in HOOKS {
        match Joined::new(&kind, start_conntrack)? {
            Ok(joined) => labs.push((joined, hook)),
            Err(why) => {
                skipped(format_args!("{name}: {why}"));
                return Ok(());
            }
        }
    }
    thread::scope(|scope| {
        let watched: Vec<_> = labs
            .iter()
            .map(|(joined, hook)| scope.spawn(move || watch(joined, hook)))
            .collect();
        watched.into_iter().zip(HOOKS).try_for_each(|(it, hook)| {
            let ended = it.join().unwrap_or_else(|it| std::panic::resume_unwind(it));
            ended.with_context(|| format!("{name} {hook:?}"))
        })
    })
}

macro_rules! devices {
    ($($name:ident)*) => {
        /// One test for each kind of interface.
        mod device {
            $(
                #[test]
                fn $name() -> anyhow::Result<()> {
                    super::run(stringify!($name))
                }
            )*
        }
    };
}

devices! {
    veth tap lo vlan vlan_trunk qinq bond bond_members team bridge bridge_port macvlan macvlan_parent ipvlan
    vxlan geneve gretap ip6gretap vrf_member
    tun ppp wireguard ipip sit gre ip6gre ip6tnl vti xfrm
}

/// The flows that a `twheel run` on an interface tracks while connections are opened.
fn tracked<T>(
    host: &Namespace,
    interface: &str,
    open: impl FnOnce() -> Result<T>,
) -> Result<BTreeMap<Name, String>> {
    let twheel = Twheel::start(host, &["--iface", interface, "--json"])?;
    let _opened = open()?;
    let flows = ours(host)?;
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    Ok(flows)
}

/// Checks that twheel sees no connection on this interface, through which packets of the
/// connections over another one pass in another form.
fn sees_nothing(name: &'static str, interface: &str) -> Result<()> {
    require_root();
    let joined = match Joined::new(&Kind::named(name)?, |_| Ok(()))? {
        Ok(joined) => joined,
        Err(why) => {
            skipped(format_args!("{name}: {why}"));
            return Ok(());
        }
    };
    let family = joined.kind.families[0];
    let open = || {
        let mut opened = open(&joined, family, true)?;
        opened.1.talk()?;
        Ok(opened)
    };
    assert_eq!(tracked(&joined.server, interface, open)?, BTreeMap::new());
    // This is due to the interface, not to the connections.
    if joined.kind.ethernet || TAKES_RAW {
        let flows = tracked(&joined.server, joined.kind.watched[0], open)?;
        assert_eq!(flows.len(), 1, "{flows:?}");
    }
    Ok(())
}

/// Interfaces below or beside others.
mod nothing_seen {
    use anyhow::Result;
    use twheel_tests::devices::UNDER;

    use super::sees_nothing;

    #[test]
    fn below_vxlan() -> Result<()> {
        sees_nothing("vxlan", UNDER)
    }

    #[test]
    fn below_gre() -> Result<()> {
        sees_nothing("gre", UNDER)
    }

    #[test]
    fn below_wireguard() -> Result<()> {
        sees_nothing("wireguard", UNDER)
    }

    #[test]
    fn on_a_vrf_device() -> Result<()> {
        sees_nothing("vrf_member", "red")
    }
}

#[test]
fn ports_of_a_bridge_see_what_it_forwards_and_the_bridge_does_not() -> Result<()> {
    require_root();
    let [client, bridge, server] =
        ["client", "bridge", "server"].map(|role| Namespace::new(role).expect("a namespace"));
    bridge.ip("link add br0 type bridge")?;
    bridge.ip("link set br0 up")?;
    let ends = [
        (&client, Family::V4.client(), "port0"),
        (&server, Family::V4.server(), "port1"),
    ];
    for (host, address, port) in ends {
        host.ip(&format!(
            "link add eth0 type veth peer name {port} netns {}",
            bridge.name()
        ))?;
        bridge.ip(&format!("link set {port} master br0 up"))?;
        host.add_address(address, 24, "eth0")?;
        host.ip("link set eth0 up")?;
    }
    let address = (Family::V4.server(), PORT);
    let listener = server.enter(|| Ok(TcpListener::bind(address)?))?;
    for (interface, seen) in [("br0", 0), ("port0", 1), ("port1", 1)] {
        let open = || Connection::open(&client, &listener);
        let flows = tracked(&bridge, interface, open)?;
        assert_eq!(flows.len(), seen, "{interface}: {flows:?}");
        assert!(flows.values().all(|it| it == "established"), "{flows:?}");
    }
    Ok(())
}

#[test]
fn what_goes_out_by_a_dummy_is_seen() -> Result<()> {
    require_root();
    let host = Namespace::new("dummy")?;
    start_conntrack(&host)?;
    if host.ip("link add dev0 type dummy").is_err() {
        skipped("dummy: the kernel has no such interface");
        return Ok(());
    }
    host.ip("link set dev0 up")?;
    host.add_address(Family::V4.server(), 24, DEV)?;
    host.add_address(Family::V6.server(), 64, DEV)?;
    let args = ["--iface", DEV, "--json", "--timeout", "3s"];
    let twheel = Twheel::start(&host, &args)?;
    // These connections get no answer: one SYN each.
    for family in [Family::V4, Family::V6] {
        let to = SocketAddr::new(family.silent(), PORT);
        let wait = Duration::from_millis(100);
        let error = host.enter(|| Ok(TcpStream::connect_timeout(&to, wait)))?;
        ensure!(
            error.is_err_and(|it| it.kind() == ErrorKind::TimedOut),
            "answered"
        );
    }
    let flows = ours(&host)?;
    assert_eq!(flows.len(), 2, "{flows:?}");
    assert_eq!(flows, theirs(&Conntrack::open(&host)?)?);
    assert!(flows.values().all(|it| it == "syn_sent"), "{flows:?}");
    for _ in 0..2 {
        let line = twheel.line(PATIENCE)?.context("no flow has ended")?;
        let flow = line.expiry()?;
        assert_eq!((&*flow.reason, &*flow.state), ("idle", "syn_sent"));
        assert!(flows.contains_key(&(flow.src, flow.dst)), "{flow:?}");
    }
    Ok(())
}
