//! A router, hosts that reach each other through it, and what twheel and conntrack report of their
//! flows.

use std::{
    collections::BTreeMap,
    fs,
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use twheel_tests::{
    ctnetlink::Conntrack,
    netns::{Namespace, PATIENCE},
    pair::{Connection, Family, PORT},
    running::Twheel,
};

/// The name of a host's interface.
pub const HOST: &str = "eth";
pub const FAMILIES: [Family; 2] = [Family::V4, Family::V6];
/// The options of a run, beside its interfaces.
pub const OPTIONS: [&str; 6] = [
    "--accounting",
    "--proto",
    "tcp,udp",
    "--json",
    "--timeout",
    "1h",
];

/// A router, and hosts that reach each other through it; each host has a server.
pub struct Lab {
    pub router: Namespace,
    pub hosts: Vec<Namespace>,
    listeners: Vec<[TcpListener; 2]>,
    pub conntrack: Conntrack,
}

/// The router's interface to a host.
pub fn leg(number: usize) -> String {
    format!("leg{number}")
}

pub fn address(family: Family, link: usize, host: u8) -> IpAddr {
    let text = match family {
        Family::V4 => format!("10.79.{link}.{host}"),
        Family::V6 => format!("fd79:{link}::{host}"),
    };
    text.parse().expect("an address")
}

/// Makes conntrack count packets in a namespace, and checks that it tracks.
pub fn track(namespace: &Namespace) -> Result<Conntrack> {
    namespace.enter(|| {
        for setting in ["acct", "timestamp"] {
            fs::write(
                format!("/proc/sys/net/netfilter/nf_conntrack_{setting}"),
                "1",
            )?;
        }
        for family in ["ipv4/ip_forward", "ipv6/conf/all/forwarding"] {
            fs::write(format!("/proc/sys/net/{family}"), "1")?;
        }
        for interfaces in ["all", "default"] {
            fs::write(
                format!("/proc/sys/net/ipv4/conf/{interfaces}/rp_filter"),
                "0",
            )?;
        }
        Ok(())
    })?;
    namespace.nft(
        "table inet lab {
            chain input { type filter hook input priority filter; ct state invalid counter; }
            chain output { type filter hook output priority filter; ct state invalid counter; }
            chain forward { type filter hook forward priority filter; ct state invalid counter; }
        }",
    )?;
    Conntrack::open(namespace)
}

impl Lab {
    pub fn new(hosts: usize) -> Result<Self> {
        let router = Namespace::new("router")?;
        let mut lab = Self {
            conntrack: track(&router)?,
            router,
            hosts: Vec::new(),
            listeners: Vec::new(),
        };
        for link in 0..hosts {
            let host = Namespace::new("host")?;
            join(&host, &lab.router, HOST, &leg(link))?;
            for (family, length) in [(Family::V4, 24), (Family::V6, 64)] {
                let [gateway, own] = [1, 2].map(|it| address(family, link, it));
                lab.router.add_address(gateway, length, &leg(link))?;
                host.add_address(own, length, HOST)?;
                host.ip(&format!("route add default via {gateway}"))?;
            }
            lab.listeners.push(listen(&host, link, 2)?);
            lab.hosts.push(host);
        }
        Ok(lab)
    }

    /// Starts a run on these interfaces of the router.
    pub fn watch(&self, interfaces: &[&str], options: &[&str]) -> Result<Twheel> {
        watch(&self.router, interfaces, options)
    }

    /// Opens connections between each two hosts, both ways and in both families. All talk; one is
    /// closed and one is reset.
    pub fn talk(&self) -> Result<Vec<Connection>> {
        let mut open = Vec::new();
        for from in 0..self.hosts.len() {
            for to in (0..self.hosts.len()).filter(|to| *to != from) {
                for listener in &self.listeners[to] {
                    open.extend(connections(&self.hosts[from], listener)?);
                }
            }
        }
        Ok(open)
    }
}

/// Joins two hosts.
pub fn join(one: &Namespace, other: &Namespace, name: &str, there: &str) -> Result<()> {
    one.ip(&format!(
        "link add {name} type veth peer name {there} netns {}",
        other.name()
    ))?;
    for (host, interface) in [(one, name), (other, there)] {
        host.ip(&format!("link set {interface} up"))?;
    }
    Ok(())
}

/// Listens on an address of a link, in both families.
pub fn listen(host: &Namespace, link: usize, number: u8) -> Result<[TcpListener; 2]> {
    let listen = |family| {
        let at = SocketAddr::new(address(family, link, number), PORT);
        host.enter(|| TcpListener::bind(at).context("cannot listen"))
    };
    Ok([listen(Family::V4)?, listen(Family::V6)?])
}

pub fn watch(namespace: &Namespace, interfaces: &[&str], options: &[&str]) -> Result<Twheel> {
    let mut args = options.to_vec();
    args.extend(OPTIONS);
    for interface in interfaces {
        args.extend(["--iface", interface]);
    }
    Twheel::start(namespace, &args)
}

/// Opens four connections: two stay open, one is closed and one is reset. The segments are small,
/// so none is split or joined on the way.
pub fn connections(from: &Namespace, listener: &TcpListener) -> Result<Vec<Connection>> {
    let mut open = Vec::new();
    for fate in 0..4 {
        let mut connection = Connection::open(from, listener)?;
        for _ in 0..=fate {
            connection.talk()?;
        }
        match fate {
            2 => connection.close()?,
            3 => connection.reset()?,
            _ => open.push(connection),
        }
    }
    Ok(open)
}

/// A flow's state, if it is TCP, and the packets and bytes of both sides.
pub type Known = BTreeMap<(String, SocketAddr, SocketAddr), (String, [[u64; 2]; 2])>;

pub fn of_twheel(namespace: &Namespace, interface: &str) -> Result<(Known, Vec<Value>)> {
    let ended = namespace.twheel_once(&["flows", "--json", "--iface", interface])?;
    ensure!(ended.code() == Some(0), "{}", ended.stderr);
    let flows: Vec<Value> = ended
        .lines
        .iter()
        .map(|line| serde_json::from_str(&line.text).context("no JSON"))
        .collect::<Result<_>>()?;
    let known = flows
        .iter()
        .map(|flow| {
            let end = |address: &str, port: &str| -> Result<SocketAddr> {
                let ip = flow[address].as_str().context("no address")?.parse()?;
                Ok(SocketAddr::new(
                    ip,
                    flow[port].as_u64().context("no port")? as u16,
                ))
            };
            let number = |name: &str| flow[name].as_u64().with_context(|| format!("no {name}"));
            let side = |who: &str| -> Result<[u64; 2]> {
                Ok([
                    number(&format!("{who}_packets"))?,
                    number(&format!("{who}_bytes"))?,
                ])
            };
            let proto = flow["proto"].as_str().context("no protocol")?;
            let state = match proto {
                "tcp" => flow["state"].as_str().context("no state")?,
                _ => "",
            };
            let key = (proto.to_owned(), end("src", "sport")?, end("dst", "dport")?);
            Ok((key, (state.to_owned(), [side("orig")?, side("reply")?])))
        })
        .collect::<Result<_>>()?;
    Ok((known, flows))
}

pub fn of_conntrack(conntrack: &Conntrack) -> Result<Known> {
    let entries = conntrack.dump()?.into_iter();
    entries
        .filter(|it| ["tcp", "udp"].contains(&it.proto))
        .map(|it| {
            let state = it.state.map_or("", |state| state.name());
            let counts = it.counts.context("conntrack does not count")?;
            let key = (it.proto.to_owned(), it.src, it.dst);
            Ok((key, (state.to_owned(), counts)))
        })
        .collect()
}

/// Waits until twheel and conntrack report the same flows, and conntrack at least the given number
/// of flows for which `are_seen` holds.
pub fn agree(
    (namespace, interface): (&Namespace, &str),
    conntrack: &Conntrack,
    are_seen: impl Fn(SocketAddr, SocketAddr) -> bool,
    least: usize,
) -> Result<Vec<Value>> {
    let until = Instant::now() + PATIENCE;
    loop {
        let (ours, flows) = of_twheel(namespace, interface)?;
        let theirs: Known = of_conntrack(conntrack)?
            .into_iter()
            .filter(|((_, src, dst), _)| are_seen(*src, *dst))
            .collect();
        if ours == theirs && theirs.len() >= least {
            return Ok(flows);
        }
        if Instant::now() > until {
            let differs: Vec<_> = theirs
                .iter()
                .filter(|(key, value)| ours.get(key) != Some(value))
                .map(|(key, value)| format!("{key:?}: {:?}, conntrack {value:?}", ours.get(key)))
                .collect();
            let more = ours.keys().filter(|key| !theirs.contains_key(key)).count();
            anyhow::bail!(
                "{} of {} flows differ, twheel has {more} more: {differs:#?}",
                differs.len(),
                theirs.len()
            );
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// Exchanges datagrams both ways.
pub fn datagrams(from: &Namespace, to: &Namespace, at: SocketAddr, count: usize) -> Result<()> {
    let any = SocketAddr::new(
        match at {
            SocketAddr::V4(_) => "0.0.0.0".parse()?,
            SocketAddr::V6(_) => "::".parse()?,
        },
        0,
    );
    let client = from.enter(|| Ok(UdpSocket::bind(any)?))?;
    let server = to.enter(|| Ok(UdpSocket::bind(at)?))?;
    for socket in [&client, &server] {
        socket.set_read_timeout(Some(PATIENCE))?;
    }
    client.connect(at)?;
    let mut buffer = [0; 100];
    for number in 0..count {
        client.send(&vec![1; 10 + number])?;
        let (_, peer) = server.recv_from(&mut buffer)?;
        server.send_to(&[2; 7], peer)?;
        client.recv(&mut buffer)?;
    }
    Ok(())
}

pub fn nothing_is_ignored(namespace: &Namespace) -> Result<()> {
    for counter in ["ignored", "same_way", "moved"] {
        ensure!(namespace.counter(counter)? == 0, "{counter}");
    }
    Ok(())
}
