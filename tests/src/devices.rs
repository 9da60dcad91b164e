//! The kinds of network interface, and two hosts joined by an interface of a kind.

use std::{
    any::Any,
    env, fs,
    io::{ErrorKind, Write},
    net::{IpAddr, TcpListener, TcpStream},
    os::fd::OwnedFd,
    path::PathBuf,
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    netns::{Namespace, PATIENCE, program},
    pair::{Family, PORT},
    relay::{Relay, ppp, tap, tun},
};

/// The name of the interface that is made, for most kinds.
pub const DEV: &str = "dev0";
/// The interface that it is made on: one end of a veth pair.
pub const UNDER: &str = "under0";
/// A second veth pair, for kinds that need two.
const UNDER_TOO: &str = "under1";
/// A port of the server on which nothing listens.
const REFUSED: u16 = PORT + 1;
/// What `ip` prints if the kernel lacks support.
const MISSING: [&str; 3] = [
    "Unknown device type",
    "not supported",
    "Function not implemented",
];

const BOTH: &[Family] = &[Family::V4, Family::V6];

/// A kind of interface, and how it is made.
///
/// Its commands are those of `ip`, in order, for each host. `{me}` and `{peer}` are the IPv4
/// addresses of the veth pair, `{me6}` and `{peer6}` the IPv6 ones. `{out}` and `{in}` are two
/// numbers, which are swapped on the other host.
#[derive(Clone)]
pub struct Kind {
    /// Its name.
    pub name: &'static str,
    /// Whether its packets have an Ethernet header.
    pub ethernet: bool,
    /// The address families that it carries.
    pub families: &'static [Family],
    /// The interfaces to watch.
    pub watched: &'static [&'static str],
    /// Whether listening sockets must be bound to a device.
    pub binds: bool,
    /// The interface that has the addresses.
    addressed: &'static str,
    /// The commands for both hosts.
    commands: Vec<String>,
    /// The commands for the server, if the interface is made only there.
    server: Vec<String>,
    special: Option<Special>,
}

/// What `ip` alone cannot do.
#[derive(Clone, Copy)]
enum Special {
    /// Set the keys.
    Wireguard,
    /// Start a daemon.
    Team,
    /// A relay between two descriptors.
    Relay(fn(&Namespace, &str) -> Result<Vec<OwnedFd>>),
    /// Both ends are on one host.
    OneHost,
}

impl Kind {
    fn new(name: &'static str, commands: &[&str]) -> Self {
        Self {
            name,
            ethernet: true,
            families: BOTH,
            watched: &[DEV],
            binds: false,
            addressed: DEV,
            commands: commands.iter().map(|it| (*it).to_owned()).collect(),
            server: Vec::new(),
            special: None,
        }
    }

    /// A kind without an Ethernet header.
    fn raw(name: &'static str, commands: &[&str]) -> Self {
        Self {
            ethernet: false,
            ..Self::new(name, commands)
        }
    }

    fn special(self, special: Special) -> Self {
        Self {
            special: Some(special),
            ..self
        }
    }

    fn carries(self, families: &'static [Family]) -> Self {
        Self { families, ..self }
    }

    fn watched(self, watched: &'static [&'static str]) -> Self {
        Self { watched, ..self }
    }

    fn addressed(self, addressed: &'static str) -> Self {
        Self { addressed, ..self }
    }

    /// The kind of this name.
    pub fn named(name: &'static str) -> Result<Self> {
        let on_under = |name| Self::new(name, &[]).addressed(UNDER).watched(&[UNDER]);
        let vlan = ["link add link under0 name dev0 type vlan id 10"];
        let bond = |mode: &str| {
            [
                &format!("link add dev0 type bond mode {mode} miimon 100"),
                "link set under0 down",
                "link set under0 master dev0",
                "link set under1 down",
                "link set under1 master dev0",
            ]
            .map(str::to_owned)
        };
        let bridge = ["link add dev0 type bridge", "link set under0 master dev0"];
        let tunnel = |kind| format!("link add dev0 type {kind} local {{me}} remote {{peer}}");
        let tunnel6 = |kind| format!("link add dev0 type {kind} local {{me6}} remote {{peer6}}");
        Ok(match name {
            "veth" => on_under(name),
            "tap" => Self::new(name, &[]).special(Special::Relay(tap)),
            "lo" => Self {
                addressed: "lo",
                ..Self::new(name, &[]).watched(&["lo"])
            }
            .special(Special::OneHost),
            "vlan" => Self::new(name, &vlan),
            "vlan_trunk" => Self::new(name, &vlan).watched(&[UNDER]),
            "qinq" => Self::new(
                name,
                &[
                    "link add link under0 name outer0 type vlan protocol 802.1ad id 20",
                    "link set outer0 up",
                    "link add link outer0 name dev0 type vlan id 10",
                ],
            ),
            "bond" => Self {
                commands: bond("active-backup").to_vec(),
                ..Self::new(name, &[])
            },
            "bond_members" => Self {
                commands: bond("balance-rr").to_vec(),
                ..Self::new(name, &[]).watched(&[UNDER, UNDER_TOO])
            },
            "team" => Self::new(name, &["link add dev0 type team", "link set under0 down"])
                .special(Special::Team),
            "bridge" => Self::new(name, &bridge),
            "bridge_port" => Self::new(name, &bridge).watched(&[UNDER]),
            "macvlan" => Self::new(
                name,
                &["link add link under0 name dev0 type macvlan mode bridge"],
            ),
            "macvlan_parent" => Self::new(
                name,
                &["link add link under0 name dev0 type macvlan mode bridge"],
            )
            .watched(&[UNDER]),
            "ipvlan" => Self::new(
                name,
                &["link add link under0 name dev0 type ipvlan mode l2"],
            ),
            "vxlan" => Self::new(
                name,
                &["link add dev0 type vxlan id 42 dev under0 remote {peer} dstport 4789"],
            ),
            "geneve" => Self::new(name, &["link add dev0 type geneve id 42 remote {peer}"]),
            "gretap" => Self::new(name, &[&tunnel("gretap")]),
            "ip6gretap" => Self::new(name, &[&tunnel6("ip6gretap")]),
            "vrf_member" => Self {
                server: [
                    "link add red type vrf table 10",
                    "link set red up",
                    "link set under0 master red",
                ]
                .map(str::to_owned)
                .to_vec(),
                binds: true,
                ..on_under(name)
            },
            "tun" => Self::raw(name, &[]).special(Special::Relay(tun)),
            "ppp" => Self::raw(name, &[]).special(Special::Relay(ppp)),
            "wireguard" => {
                Self::raw(name, &["link add dev0 type wireguard"]).special(Special::Wireguard)
            }
            "ipip" => Self::raw(name, &[&tunnel("ipip")]).carries(&[Family::V4]),
            "sit" => Self::raw(name, &[&tunnel("sit")]).carries(&[Family::V6]),
            "gre" => Self::raw(name, &[&tunnel("gre")]),
            "ip6gre" => Self::raw(name, &[&tunnel6("ip6gre")]),
            "ip6tnl" => Self::raw(name, &[&tunnel6("ip6tnl mode any")]),
            "vti" => Self {
                commands: ipsec(&tunnel("vti key 42"), "", "mark 42"),
                ..Self::raw(name, &[])
            },
            "xfrm" => Self {
                commands: ipsec(
                    "link add dev0 type xfrm dev under0 if_id 42",
                    "if_id 42",
                    "if_id 42",
                ),
                ..Self::raw(name, &[])
            },
            _ => bail!("no kind of interface is called {name}"),
        })
    }
}

/// The commands for an interface whose packets IPsec carries, with what ties IPsec's states and
/// policies to it.
fn ipsec(link: &str, state: &str, policy: &str) -> Vec<String> {
    const KEY: &str = "0x000102030405060708090a0b0c0d0e0f10111213";
    let mut commands = vec![link.to_owned()];
    for (from, to, spi, direction) in [
        ("{me}", "{peer}", "{out}", "out"),
        ("{peer}", "{me}", "{in}", "in"),
    ] {
        commands.push(format!(
            "xfrm state add src {from} dst {to} proto esp spi {spi} reqid 1 mode tunnel \
             flag af-unspec aead rfc4106(gcm(aes)) {KEY} 128 {state}"
        ));
        commands.extend(["0.0.0.0/0", "::/0"].map(|all| {
            format!(
                "xfrm policy add src {all} dst {all} dir {direction} {policy} \
                 tmpl src {from} dst {to} proto esp reqid 1 mode tunnel"
            )
        }));
    }
    commands
}

/// Two hosts joined by an interface: a client, and the server on which it is watched.
pub struct Joined {
    // Dropped before the namespaces.
    kept: Vec<Box<dyn Any + Send + Sync>>,
    listeners: Vec<[TcpListener; 2]>,
    client: Option<Namespace>,
    /// The host on which the interface is watched.
    pub server: Namespace,
    /// The kind of the interface.
    pub kind: Kind,
}

impl Joined {
    /// Makes the hosts and the interface; when this returns, they can reach each other. `prepare`
    /// is called with the server before any packet is sent. The inner error says what this machine
    /// lacks.
    pub fn new(
        kind: &Kind,
        prepare: impl FnOnce(&Namespace) -> Result<()>,
    ) -> Result<Result<Self, String>> {
        let server = Namespace::new("server")?;
        prepare(&server)?;
        let client = match kind.special {
            Some(Special::OneHost) => None,
            _ => Some(Namespace::new("client")?),
        };
        let mut joined = Self {
            kept: Vec::new(),
            listeners: Vec::new(),
            client,
            server,
            kind: kind.clone(),
        };
        if let Err(error) = joined.build() {
            let text = format!("{error:#}");
            if MISSING.iter().any(|it| text.contains(it)) {
                return Ok(Err("the kernel has no such interface".to_owned()));
            }
            return match error.downcast_ref() {
                Some(NoProgram(name)) => Ok(Err(format!("there is no `{name}`"))),
                None => Err(error),
            };
        }
        for &family in kind.families {
            let hosts = [joined.client(), &joined.server];
            let listeners = [(hosts[0], family.client()), (hosts[1], family.server())].map(
                |(host, address)| {
                    host.enter(|| TcpListener::bind((address, PORT)).context("cannot listen"))
                },
            );
            let [client, server] = listeners;
            joined.listeners.push([client?, server?]);
            joined.await_reachable(family.server())?;
        }
        Ok(Ok(joined))
    }

    /// The other host; for `lo` this is the same host.
    pub fn client(&self) -> &Namespace {
        self.client.as_ref().unwrap_or(&self.server)
    }

    /// The client's or the server's listener.
    pub fn listener(&self, family: Family, server: bool) -> Result<&TcpListener> {
        let index = self.kind.families.iter().position(|it| *it == family);
        let index = index.with_context(|| format!("it does not carry {family:?}"))?;
        Ok(&self.listeners[index][usize::from(server)])
    }

    fn build(&mut self) -> Result<()> {
        let kind = self.kind.clone();
        let hosts = [self.client(), &self.server];
        if self.client.is_some() {
            cable(hosts, UNDER)?;
        }
        if kind.commands.iter().any(|it| it.contains(UNDER_TOO)) {
            cable(hosts, UNDER_TOO)?;
        }
        for (number, host) in [1, 2].into_iter().zip(hosts) {
            if self.client.is_some() {
                for (network, length) in [("192.0.2.", 24), ("2001:db8::", 64)] {
                    let address: IpAddr = format!("{network}{number}").parse()?;
                    host.add_address(address, length, UNDER)?;
                }
            }
            let other = 3 - number;
            let only = if number == 2 { &kind.server[..] } else { &[] };
            for command in kind.commands.iter().chain(only) {
                let command = [
                    ("{me}", format!("192.0.2.{number}")),
                    ("{peer}", format!("192.0.2.{other}")),
                    ("{me6}", format!("2001:db8::{number}")),
                    ("{peer6}", format!("2001:db8::{other}")),
                    ("{out}", format!("{number}000")),
                    ("{in}", format!("{other}000")),
                ]
                .iter()
                .fold(command.clone(), |all, (name, text)| all.replace(name, text));
                host.ip(&command)?;
            }
        }
        for host in hosts {
            // A host answers ARP for its addresses on any interface, and the interface under a
            // macvlan receives what the macvlan receives. So packets would come in through that
            // interface.
            host.enter(|| {
                let path = "/proc/sys/net/ipv4/conf/all/arp_ignore";
                fs::write(path, "1").with_context(|| format!("cannot write {path}"))
            })?;
        }
        let mut kept: Vec<Box<dyn Any + Send + Sync>> = Vec::new();
        match kind.special {
            Some(Special::Relay(open)) => {
                let [client, server] = hosts.map(|host| open(host, DEV));
                kept.push(Box::new(Relay::start(client?, server?)));
            }
            Some(Special::Wireguard) => wireguard(hosts)?,
            Some(Special::Team) => {
                for host in hosts {
                    kept.push(Box::new(Daemon::team(host)?));
                }
            }
            Some(Special::OneHost) | None => {}
        }
        if kind.binds {
            // Sockets outside a VRF accept what comes in through one, and may have its addresses.
            self.server.enter(|| {
                for name in [
                    "ipv4/tcp_l3mdev_accept",
                    "ipv4/ip_nonlocal_bind",
                    "ipv6/ip_nonlocal_bind",
                ] {
                    let path = format!("/proc/sys/net/{name}");
                    fs::write(&path, "1").with_context(|| format!("cannot write {path}"))?;
                }
                Ok(())
            })?;
        }
        for (host, server) in hosts.into_iter().zip([false, true]) {
            host.ip(&format!("link set {} up", kind.addressed))?;
            for family in BOTH {
                let (address, length) = match (family, server) {
                    (Family::V4, false) => (family.client(), 24),
                    (Family::V6, false) => (family.client(), 64),
                    (Family::V4, true) => (family.server(), 24),
                    (Family::V6, true) => (family.server(), 64),
                };
                host.add_address(address, length, kind.addressed)?;
            }
        }
        self.kept = kept;
        Ok(())
    }

    /// Waits until a port on which nothing listens refuses a connection.
    fn await_reachable(&self, address: IpAddr) -> Result<()> {
        let address = (address, REFUSED).into();
        let end = Instant::now() + PATIENCE;
        loop {
            let connected = self.client().enter(|| {
                Ok(TcpStream::connect_timeout(
                    &address,
                    Duration::from_millis(500),
                ))
            })?;
            match connected {
                Err(error) if error.kind() == ErrorKind::ConnectionRefused => {
                    return Ok(());
                }
                _ if Instant::now() < end => thread::sleep(Duration::from_millis(20)),
                other => bail!("no way over {}: {other:?}", self.kind.name),
            }
        }
    }
}

/// Joins two hosts by a veth pair with the same name at both ends.
fn cable(hosts: [&Namespace; 2], name: &str) -> Result<()> {
    let [client, server] = hosts;
    client.ip(&format!(
        "link add {name} type veth peer name {name} netns {}",
        server.name()
    ))?;
    for host in hosts {
        host.ip(&format!("link set {name} up"))?;
    }
    Ok(())
}

/// Key pairs of the client and of the server.
const KEYS: [[&str; 2]; 2] = [
    [
        "AAEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAUE=",
        "pOCSkrZRwni5dyxWn1+puxPZBrRqtoyd+dwrRAn4ogk=",
    ],
    [
        "AAICAgICAgICAgICAgICAgICAgICAgICAgICAgICAkI=",
        "zo060cy2M+x7cMF4FKXHbs0CloUFDTRHRboFhw5YfVk=",
    ],
];

/// Configures the key and the peer of each host's interface.
fn wireguard(hosts: [&Namespace; 2]) -> Result<()> {
    for (number, host) in hosts.into_iter().enumerate() {
        let other = 1 - number;
        let mut wg = host.command(program("wg"))?;
        wg.args(["setconf", DEV, "/proc/self/fd/0"]);
        let mut wg = spawn(wg.stdin(Stdio::piped()), "wg")?;
        let mut stdin = wg.stdin.take().context("no stdin")?;
        write!(
            stdin,
            "[Interface]\nPrivateKey = {}\nListenPort = 51820\n\
             [Peer]\nPublicKey = {}\nAllowedIPs = 0.0.0.0/0, ::/0\nEndpoint = 192.0.2.{}:51820\n",
            KEYS[number][0],
            KEYS[other][1],
            other + 1
        )?;
        drop(stdin);
        ensure!(wg.wait()?.success(), "`wg` refuses its configuration");
    }
    Ok(())
}

/// A program that is not installed.
#[derive(Debug)]
struct NoProgram(&'static str);

impl std::fmt::Display for NoProgram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "there is no `{}`", self.0)
    }
}

impl std::error::Error for NoProgram {}

fn spawn(command: &mut Command, name: &'static str) -> Result<Child> {
    command.spawn().map_err(|error| match error.kind() {
        ErrorKind::NotFound => NoProgram(name).into(),
        _ => anyhow::Error::new(error).context(format!("cannot run `{name}`")),
    })
}

/// A process that is ended when this is dropped.
struct Daemon {
    child: Child,
    /// Its pid file.
    file: PathBuf,
}

impl Daemon {
    /// Starts the daemon that makes a team work.
    fn team(host: &Namespace) -> Result<Self> {
        let file = env::temp_dir().join(format!("{}.pid", host.name()));
        let ports = format!(r#""ports":{{"{UNDER}":{{}}}}"#);
        let config = format!(r#"{{"device":"{DEV}","runner":{{"name":"roundrobin"}},{ports}}}"#);
        let mut team = host.command(program("teamd"))?;
        team.args(["--take-over", "--config", &config, "--pid-file"]);
        team.arg(&file).stdout(Stdio::null()).stderr(Stdio::null());
        let child = spawn(&mut team, "teamd")?;
        Ok(Self { child, file })
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.file);
    }
}
