//! Two hosts joined by a veth pair, and connections between them.

use std::{
    collections::HashMap,
    io::{Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail, ensure};

use crate::netns::{Namespace, PATIENCE, ip};

/// The interface of [`Pair::client`].
pub const CLIENT: &str = "client0";
/// The interface of [`Pair::server`]: the one to watch.
pub const SERVER: &str = "server0";
/// The port on which [`Pair::server`] listens.
pub const PORT: u16 = 7777;
/// A link-layer address that no interface has.
const NOBODY: &str = "02:00:00:00:00:63";

/// IPv4 or IPv6.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    /// 10.77.0.0/24
    V4,
    /// fd77::/64
    V6,
}

impl Family {
    /// IPv4 for even numbers, IPv6 for odd ones.
    pub fn alternate(number: usize) -> Self {
        if number.is_multiple_of(2) {
            Self::V4
        } else {
            Self::V6
        }
    }

    fn host(self, number: u8) -> IpAddr {
        match self {
            Self::V4 => Ipv4Addr::new(10, 77, 0, number).into(),
            Self::V6 => Ipv6Addr::new(0xfd77, 0, 0, 0, 0, 0, 0, u16::from(number)).into(),
        }
    }

    /// The client's address.
    pub fn client(self) -> IpAddr {
        self.host(1)
    }

    /// The server's address.
    pub fn server(self) -> IpAddr {
        self.host(2)
    }

    /// An address that packets can be sent to and that never answers.
    pub fn silent(self) -> IpAddr {
        self.host(9)
    }
}

/// Two hosts joined by a veth pair, with a listening server.
pub struct Pair {
    // Dropped before the namespaces.
    listeners: [TcpListener; 2],
    /// Has the interface [`CLIENT`].
    pub client: Namespace,
    /// Has the interface [`SERVER`].
    pub server: Namespace,
}

impl Pair {
    /// Makes the hosts; when this returns, they can reach each other by IPv4 and IPv6.
    pub fn new() -> Result<Self> {
        let client = Namespace::new("client")?;
        let server = Namespace::new("server")?;
        ip(&format!(
            "link add {CLIENT} netns {} type veth peer name {SERVER} netns {}",
            client.name(),
            server.name()
        ))?;
        client.ip(&format!("link set {CLIENT} up"))?;
        server.ip(&format!("link set {SERVER} up"))?;
        for (family, length) in [(Family::V4, 24), (Family::V6, 64)] {
            for (host, interface, address) in [
                (&client, CLIENT, family.client()),
                (&server, SERVER, family.server()),
            ] {
                host.add_address(address, length, interface)?;
            }
            // The SYN is sent as if someone had answered ARP.
            client.ip(&format!(
                "neigh add {} lladdr {NOBODY} dev {CLIENT} nud permanent",
                family.silent()
            ))?;
        }
        let listen = |family: Family| {
            let address = SocketAddr::new(family.server(), PORT);
            server.enter(|| TcpListener::bind(address).context("cannot listen"))
        };
        let pair = Self {
            listeners: [listen(Family::V4)?, listen(Family::V6)?],
            client,
            server,
        };
        for family in [Family::V4, Family::V6] {
            pair.await_reachable(family)?;
        }
        Ok(pair)
    }

    /// Waits until a port on which nothing listens refuses a connection.
    fn await_reachable(&self, family: Family) -> Result<()> {
        let address = SocketAddr::new(family.server(), PORT + 1);
        let end = Instant::now() + PATIENCE;
        loop {
            let connected = self
                .client
                .enter(|| Ok(TcpStream::connect_timeout(&address, Duration::from_secs(1))))?;
            match connected {
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionRefused => {
                    return Ok(());
                }
                _ if Instant::now() < end => thread::sleep(Duration::from_millis(20)),
                other => bail!("the hosts do not reach each other: {other:?}"),
            }
        }
    }

    /// Opens a connection from the client to the server.
    pub fn connect(&self, family: Family) -> Result<Connection> {
        let listener = &self.listeners[usize::from(family == Family::V6)];
        Connection::open(&self.client, listener)
    }

    /// Opens several connections, of IPv4 and IPv6 in turn.
    pub fn connect_some(&self, count: usize) -> Result<Vec<Connection>> {
        (0..count)
            .map(|number| self.connect(Family::alternate(number)))
            .collect()
    }

    /// Sends a SYN to an address that never answers. Returns the client's endpoint.
    pub fn half_open(&self, family: Family) -> Result<SocketAddr> {
        self.client.enter(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(async {
                let socket = match family {
                    Family::V4 => tokio::net::TcpSocket::new_v4()?,
                    Family::V6 => tokio::net::TcpSocket::new_v6()?,
                };
                socket.bind(SocketAddr::new(family.client(), 0))?;
                let name = socket.local_addr()?;
                let connect = socket.connect(SocketAddr::new(family.silent(), PORT));
                // Gives up before the SYN is sent again, one second after the first.
                match tokio::time::timeout(Duration::from_millis(100), connect).await {
                    Err(_) => Ok(name),
                    Ok(result) => Err(anyhow!("somebody answered a SYN to nobody: {result:?}")),
                }
            })
        })
    }
}

/// Both ends of a connection.
pub struct Connection {
    /// The client's endpoint, which identifies the connection.
    pub name: SocketAddr,
    /// The end that opened it.
    pub client: TcpStream,
    /// The end that accepted it.
    pub server: TcpStream,
    /// A time before its first packet.
    pub before: Instant,
    /// A time after the last packet of its handshake.
    pub after: Instant,
}

impl Connection {
    /// Opens a connection from a namespace to a listener in any namespace.
    pub fn open(from: &Namespace, listener: &TcpListener) -> Result<Self> {
        Self::open_to(from, listener, listener.local_addr()?)
    }

    /// The same, to an address that is translated to the listener's on the way.
    pub fn open_to(from: &Namespace, listener: &TcpListener, address: SocketAddr) -> Result<Self> {
        let before = Instant::now();
        let client = from
            .enter(|| TcpStream::connect_timeout(&address, PATIENCE).context("cannot connect"))?;
        let after = Instant::now();
        let (server, peer) = listener.accept().context("cannot accept")?;
        for socket in [&client, &server] {
            socket.set_nodelay(true)?;
            socket.set_read_timeout(Some(PATIENCE))?;
        }
        Ok(Self {
            // As the server sees it, in case addresses are translated on the way.
            name: peer,
            client,
            server,
            before,
            after,
        })
    }

    /// Sends a byte and waits until it has arrived.
    pub fn talk(&mut self) -> Result<()> {
        self.client.write_all(b"!").context("cannot send")?;
        let mut byte = [0];
        self.server.read_exact(&mut byte).context("cannot receive")
    }

    /// Closes it in order: a FIN from the client, then one from the server.
    pub fn close(mut self) -> Result<()> {
        use std::net::Shutdown;
        self.client.shutdown(Shutdown::Write)?;
        let end = |socket: &mut TcpStream| -> Result<()> {
            ensure!(socket.read(&mut [0])? == 0, "data after the end");
            Ok(())
        };
        end(&mut self.server)?;
        self.server.shutdown(Shutdown::Write)?;
        end(&mut self.client)
    }

    /// Closes it with a RST.
    pub fn reset(mut self) -> Result<()> {
        let linger = libc::linger {
            l_onoff: 1,
            l_linger: 0,
        };
        // SAFETY: the option's value is a `linger` of that size, and outlives the call.
        let result = unsafe {
            libc::setsockopt(
                self.client.as_raw_fd(),
                libc::SOL_SOCKET,
                libc::SO_LINGER,
                (&raw const linger).cast(),
                size_of::<libc::linger>() as libc::socklen_t,
            )
        };
        ensure!(result == 0, "{}", std::io::Error::last_os_error());
        drop(self.client);
        await_reset(&mut self.server)
    }

    /// Sends a byte and expects a RST in answer.
    pub fn expect_reset(&mut self) -> Result<()> {
        self.client.write_all(b"!").context("cannot send")?;
        await_reset(&mut self.client)
    }

    /// Sends a byte and waits. Returns how many bytes are still unacknowledged then.
    pub fn unacknowledged(&mut self, wait: Duration) -> Result<u32> {
        self.client.write_all(b"!").context("cannot send")?;
        thread::sleep(wait);
        let mut queued: libc::c_int = 0;
        // SAFETY: the request (SIOCOUTQ) writes an `int`, which outlives the call.
        let result =
            unsafe { libc::ioctl(self.client.as_raw_fd(), libc::TIOCOUTQ, &raw mut queued) };
        ensure!(result == 0, "{}", std::io::Error::last_os_error());
        Ok(queued.unsigned_abs())
    }
}

fn await_reset(socket: &mut TcpStream) -> Result<()> {
    match socket.read(&mut [0]) {
        Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => Ok(()),
        other => bail!("no reset has come: {other:?}"),
    }
}

/// A thread that keeps connections busy.
pub struct Busy {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<Result<Rest>>>,
}

/// The connections that were busy.
pub struct Rest {
    /// They are open, and silent from now on.
    pub connections: Vec<Connection>,
    /// The longest time that one of them had to wait for its next packet.
    pub longest_gap: Duration,
}

impl Busy {
    /// Sends something over each connection, again and again.
    pub fn start(mut connections: Vec<Connection>, every: Duration) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let told = stop.clone();
        let thread = thread::spawn(move || {
            let mut longest_gap = Duration::ZERO;
            let mut last: HashMap<SocketAddr, Instant> =
                connections.iter().map(|it| (it.name, it.before)).collect();
            while !told.load(Ordering::Relaxed) {
                for connection in &mut connections {
                    let before = Instant::now();
                    connection.talk()?;
                    let last = last.insert(connection.name, before).unwrap_or(before);
                    longest_gap = longest_gap.max(last.elapsed());
                }
                thread::park_timeout(every);
            }
            Ok(Rest {
                connections,
                longest_gap,
            })
        });
        Self {
            stop,
            thread: Some(thread),
        }
    }

    /// Stops sending. Returns the connections, which are still open.
    pub fn stop(mut self) -> Result<Rest> {
        self.end().context("the thread was joined before")?
    }

    fn end(&mut self) -> Option<Result<Rest>> {
        let thread = self.thread.take()?;
        self.stop.store(true, Ordering::Relaxed);
        thread.thread().unpark();
        Some(
            thread
                .join()
                .unwrap_or_else(|_| Err(anyhow!("the thread has panicked"))),
        )
    }
}

impl Drop for Busy {
    fn drop(&mut self) {
        self.end();
    }
}
