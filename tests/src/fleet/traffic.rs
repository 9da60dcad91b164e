//! Traffic of a fleet: each host offers the services and uses those of the next hosts.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
    os::fd::AsRawFd,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpSocket, TcpStream, UdpSocket},
    time::{sleep, timeout},
};

use super::hosts::{Host, SILENT};

/// How the connections of a service end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Habit {
    /// Both sides close.
    Closes,
    /// The client aborts, with a RST.
    Resets,
    /// The client goes away silently, and the server never closes.
    Leaks,
    /// Datagrams: a question and an answer.
    Answers,
    /// Nobody answers the SYN.
    Nobody,
}

/// A service that each host offers.
#[derive(Clone, Copy, Debug)]
pub struct Service {
    /// Its name.
    pub name: &'static str,
    /// Its port.
    pub port: u16,
    /// How its connections end.
    pub habit: Habit,
}

/// The services.
pub const SERVICES: [Service; 5] = [
    Service {
        name: "web",
        port: 80,
        habit: Habit::Closes,
    },
    Service {
        name: "cache",
        port: 6379,
        habit: Habit::Resets,
    },
    Service {
        name: "orders",
        port: 8443,
        habit: Habit::Leaks,
    },
    Service {
        name: "names",
        port: 53,
        habit: Habit::Answers,
    },
    Service {
        name: "old",
        port: 9,
        habit: Habit::Nobody,
    },
];

/// Most silent connections that a host keeps; those before are forgotten without a packet.
const KEPT: usize = 500;
/// Longer than an answer takes on a busy machine.
const ANSWER: Duration = Duration::from_secs(10);

/// How much traffic there is.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    /// From one connection of a host to its next one.
    pub pause: Duration,
    /// Connections that each host opens; without limit if `None`.
    pub connections: Option<u64>,
}

/// Running traffic. It ends when this is dropped.
pub struct Traffic {
    stop: Arc<AtomicBool>,
    /// Connections that were opened, of all hosts.
    pub opened: Arc<AtomicU64>,
    threads: Vec<JoinHandle<Result<()>>>,
}

impl Traffic {
    /// Starts a thread on each host, which offers the services and connects to other hosts.
    ///
    /// # Errors
    ///
    /// A host cannot be entered, or a service cannot listen.
    pub fn start(hosts: &[Host], load: Load) -> Result<Self> {
        let (stop, opened) = (Arc::<AtomicBool>::default(), Arc::<AtomicU64>::default());
        let mut traffic = Self {
            stop: stop.clone(),
            opened: opened.clone(),
            threads: Vec::new(),
        };
        // All listen before anybody connects.
        let mut listening = Vec::new();
        for host in hosts {
            listening.push(Listening::new(host)?);
        }
        for (at, listening) in listening.into_iter().enumerate() {
            let others = (1..hosts.len()).map(|step| &hosts[(at + step) % hosts.len()]);
            let client = Client {
                own: [hosts[at].v4.into(), hosts[at].v6.into()],
                others: others.map(|it| [it.v4.into(), it.v6.into()]).collect(),
                load,
                first: at,
                stop: stop.clone(),
                opened: opened.clone(),
            };
            let Listening { runtime, tcp, udp } = listening;
            let thread = hosts[at].namespace.spawn(move || {
                runtime.block_on(async {
                    for (listener, habit) in tcp {
                        tokio::spawn(serve(listener, habit));
                    }
                    for socket in udp {
                        tokio::spawn(answer(socket));
                    }
                    client.run().await
                })
            })?;
            traffic.threads.push(thread);
        }
        Ok(traffic)
    }

    /// Waits until all connections were opened that the load limits.
    ///
    /// # Errors
    ///
    /// A connection has failed.
    pub fn wait(mut self) -> Result<u64> {
        self.join()?;
        Ok(self.opened.load(Relaxed))
    }

    /// Ends the traffic. Silent connections are forgotten without a packet.
    ///
    /// # Errors
    ///
    /// A connection has failed.
    pub fn stop(mut self) -> Result<u64> {
        self.stop.store(true, Relaxed);
        self.join()?;
        Ok(self.opened.load(Relaxed))
    }

    /// # Errors
    ///
    /// A connection has failed.
    pub fn check(&mut self) -> Result<()> {
        match self.threads.iter().any(JoinHandle::is_finished) {
            true => self.join(),
            false => Ok(()),
        }
    }

    fn join(&mut self) -> Result<()> {
        for thread in self.threads.drain(..) {
            match thread.join() {
                Ok(ended) => ended?,
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        Ok(())
    }
}

impl Drop for Traffic {
    fn drop(&mut self) {
        self.stop.store(true, Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

/// The sockets of a host's services.
struct Listening {
    runtime: tokio::runtime::Runtime,
    tcp: Vec<(TcpListener, Habit)>,
    udp: Vec<UdpSocket>,
}

impl Listening {
    fn new(host: &Host) -> Result<Self> {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let (mut tcp, mut udp) = (Vec::new(), Vec::new());
        host.namespace.enter(|| {
            runtime.block_on(async {
                for service in SERVICES {
                    for own in [IpAddr::V4(host.v4), IpAddr::V6(host.v6)] {
                        let at = SocketAddr::new(own, service.port);
                        match service.habit {
                            Habit::Nobody => {}
                            Habit::Answers => udp.push(UdpSocket::bind(at).await?),
                            habit => tcp.push((TcpListener::bind(at).await?, habit)),
                        }
                    }
                }
                Ok(())
            })
        })?;
        Ok(Self { runtime, tcp, udp })
    }
}

/// Silent connections. When they are dropped or too many, the kernel forgets them without a packet.
#[derive(Default)]
struct Silent(VecDeque<TcpStream>);

impl Silent {
    fn keep(&mut self, stream: TcpStream) {
        self.0.push_back(stream);
        if self.0.len() > KEPT
            && let Some(oldest) = self.0.pop_front()
        {
            let _ = go_silently(oldest);
        }
    }
}

impl Drop for Silent {
    fn drop(&mut self) {
        for stream in self.0.drain(..) {
            let _ = go_silently(stream);
        }
    }
}

/// Closes a socket without telling its peer, as a host does that loses its power.
fn go_silently(stream: TcpStream) -> Result<()> {
    let on: libc::c_int = 1;
    // SAFETY: the option's value is an `int` of that size, and outlives the call.
    let result = unsafe {
        libc::setsockopt(
            stream.as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_REPAIR,
            (&raw const on).cast(),
            size_of::<libc::c_int>() as libc::socklen_t,
        )
    };
    ensure!(result == 0, "{}", std::io::Error::last_os_error());
    Ok(())
}

/// Answers each connection, and closes it after the client; never if the service leaks.
async fn serve(listener: TcpListener, habit: Habit) {
    let silent = Arc::new(std::sync::Mutex::new(Silent::default()));
    while let Ok((mut stream, _)) = listener.accept().await {
        let silent = silent.clone();
        tokio::spawn(async move {
            let mut question = [0; 64];
            let Ok(length) = stream.read(&mut question).await else {
                return;
            };
            if stream.write_all(&question[..length]).await.is_err() {
                return;
            }
            match habit {
                Habit::Leaks => silent
                    .lock()
                    .unwrap_or_else(|it| it.into_inner())
                    .keep(stream),
                // Ends with the client's FIN or RST.
                _ => drop(stream.read(&mut question).await),
            }
        });
    }
}

/// Answers each datagram.
async fn answer(socket: UdpSocket) {
    let mut question = [0; 64];
    while let Ok((length, from)) = socket.recv_from(&mut question).await {
        let _ = socket.send_to(&question[..length], from).await;
    }
}

/// What a host connects to.
struct Client {
    own: [IpAddr; 2],
    others: Vec<[IpAddr; 2]>,
    load: Load,
    first: usize,
    stop: Arc<AtomicBool>,
    opened: Arc<AtomicU64>,
}

impl Client {
    /// Opens connections, of each service in turn, to each host in turn, until it is to stop or the
    /// load's connections were opened.
    async fn run(self) -> Result<()> {
        let mut number = 0;
        while !self.stop.load(Relaxed) && self.load.connections.is_none_or(|most| number < most) {
            let at = self.first + number as usize;
            let service = SERVICES[at % SERVICES.len()];
            let round = at / SERVICES.len();
            let family = round % 2;
            let other = self.others[round % self.others.len()][family];
            let to = SocketAddr::new(other, service.port);
            self.open(to, service.habit, family)
                .await
                .with_context(|| format!("cannot use {} at {to}", service.name))?;
            self.opened.fetch_add(1, Relaxed);
            number += 1;
            sleep(self.load.pause).await;
        }
        Ok(())
    }

    async fn open(&self, to: SocketAddr, habit: Habit, family: usize) -> Result<()> {
        let own = SocketAddr::new(self.own[family], 0);
        match habit {
            Habit::Answers => {
                let socket = UdpSocket::bind(own).await?;
                socket.connect(to).await?;
                socket.send(b"?").await?;
                timeout(ANSWER, socket.recv(&mut [0; 64])).await??;
                Ok(())
            }
            Habit::Nobody => {
                let own = SocketAddr::new(self.own[0], 0);
                let socket = TcpSocket::new_v4()?;
                socket.bind(own)?;
                let to = SocketAddr::new(SILENT.into(), to.port());
                // Gives up before the SYN is sent again, one second after the first.
                let answer = timeout(Duration::from_millis(50), socket.connect(to)).await;
                ensure!(answer.is_err(), "somebody has answered: {answer:?}");
                Ok(())
            }
            _ => {
                let socket = match own {
                    SocketAddr::V4(_) => TcpSocket::new_v4()?,
                    SocketAddr::V6(_) => TcpSocket::new_v6()?,
                };
                socket.bind(own)?;
                let mut stream = timeout(ANSWER, socket.connect(to)).await??;
                stream.write_all(b"?").await?;
                timeout(ANSWER, stream.read_exact(&mut [0])).await??;
                match habit {
                    Habit::Leaks => go_silently(stream)?,
                    Habit::Resets => stream.set_zero_linger()?,
                    _ => {
                        stream.shutdown().await?;
                        timeout(ANSWER, stream.read(&mut [0; 8])).await??;
                    }
                }
                Ok(())
            }
        }
    }
}
