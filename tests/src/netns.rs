//! Labs of network namespaces: two hosts joined by a cable, and twheel at the end of it.

use std::{
    collections::{BTreeMap, HashMap},
    fs::{self, File},
    io::{BufRead, BufReader, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    os::{
        fd::AsRawFd,
        unix::{
            fs::MetadataExt,
            process::{CommandExt, ExitStatusExt},
        },
    },
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc::{Receiver, RecvTimeoutError, channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use crate::tc;
use anyhow::{Context, Result, anyhow, bail, ensure};
use aya::programs::{SchedClassifier, TcAttachType, TestRun, TestRunOptions};
use nix::{
    sched::{CloneFlags, setns},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use twheel::pins::Instance;

use crate::plane::{ACK, PASS, frame};

/// Where twheel pins.
pub const PINS: &str = "/sys/fs/bpf/twheel";
/// The interface of [`Pair::client`].
pub const CLIENT: &str = "client0";
/// The interface of [`Pair::server`]: the one to watch.
pub const SERVER: &str = "server0";
/// The port on which [`Pair::server`] listens.
pub const PORT: u16 = 7777;
/// A link-layer address that nobody has.
const NOBODY: &str = "02:00:00:00:00:63";
/// Longer than anything here takes, on a machine that is busy with other things.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// What the kernel may take to detach what nothing holds any more.
const RELEASE: Duration = Duration::from_secs(5);

/// Panics unless the caller is root: a test that cannot run has failed.
pub fn require_root() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "these tests make network namespaces and load BPF programs: run them as root, or with \
         `cargo xtask test`"
    );
}

/// The program `twheel`: `TWHEEL_BIN`, or the one in the `release` directory beside this program's.
pub fn twheel_bin() -> Result<PathBuf> {
    if let Some(path) = std::env::var_os("TWHEEL_BIN") {
        return Ok(path.into());
    }
    std::env::current_exe()
        .context("cannot tell where this program is")?
        .ancestors()
        .map(|directory| directory.join("release/twheel"))
        .find(|path| path.is_file())
        .context("no program twheel: build it with `cargo build --release -p twheel-user`")
}

/// A program of the system's, also where a user's PATH lacks sbin.
pub fn program(name: &str) -> PathBuf {
    let sbin = Path::new("/usr/sbin").join(name);
    if sbin.exists() { sbin } else { name.into() }
}

fn ip(args: &str) -> Result<String> {
    let output = Command::new(program("ip"))
        .args(args.split_ascii_whitespace())
        .output()
        .context("cannot run `ip`: is iproute2 installed?")?;
    ensure!(
        output.status.success(),
        "`ip {args}` failed: {}",
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// A network namespace; it ends, with the pins that twheel made in it, when this is dropped.
pub struct Namespace {
    name: String,
    file: File,
}

impl Namespace {
    /// Makes one, with `lo` up.
    pub fn new(role: &str) -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("twl-{}-{role}{count}", std::process::id());
        ip(&format!("netns add {name}"))?;
        let namespace = match File::open(format!("/var/run/netns/{name}")) {
            Ok(file) => Self { name, file },
            Err(error) => {
                let _ = ip(&format!("netns del {name}"));
                return Err(error).context("cannot open the namespace");
            }
        };
        namespace.ip("link set lo up")?;
        // IPv6 works at once: nobody else can have an address here, so none is tried for a second first (RFC 4862,
        // section 5.4).
        namespace.enter(|| {
            for interfaces in ["all", "default"] {
                let accept = format!("/proc/sys/net/ipv6/conf/{interfaces}/accept_dad");
                fs::write(&accept, "0").with_context(|| format!("cannot write {accept}"))?;
            }
            Ok(())
        })?;
        Ok(namespace)
    }

    /// Gives an interface an address, which can be used at once. (Without `nodad`, one of IPv6 can be used when a thread of
    /// the kernel has looked at it, whatever `accept_dad` says.)
    pub fn add_address(&self, address: IpAddr, length: u8, interface: &str) -> Result<()> {
        let nodad = if address.is_ipv6() { " nodad" } else { "" };
        self.ip(&format!(
            "addr add {address}/{length} dev {interface}{nodad}"
        ))?;
        Ok(())
    }

    /// Its name, for `ip -n`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Runs `ip` on it.
    pub fn ip(&self, args: &str) -> Result<String> {
        ip(&format!("-n {} {args}", self.name))
    }

    /// Runs commands of `ip` on it, a line each, by one process.
    pub fn batch(&self, commands: &str) -> Result<()> {
        self.feed("ip", &["-batch", "-"], commands)
    }

    /// Makes a tun device, which is there for as long as the file is open; of another link type (`ARPHRD_*`), if that is asked
    /// for.
    pub fn tun(&self, name: &str, link_type: Option<u16>) -> Result<File> {
        // `TUNSETIFF`, `TUNSETLINK`, `include/uapi/linux/if_tun.h`.
        const SET_INTERFACE: libc::c_ulong = 0x4004_54ca;
        const SET_LINK: libc::c_ulong = 0x4004_54cd;
        self.enter(|| {
            let file = File::options()
                .read(true)
                .write(true)
                .open("/dev/net/tun")
                .context("cannot open /dev/net/tun")?;
            // SAFETY: all bytes of the request are valid where they are 0.
            let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
            for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
                *to = from as libc::c_char;
            }
            request.ifr_ifru.ifru_flags = (libc::IFF_TUN | libc::IFF_NO_PI) as libc::c_short;
            // SAFETY: the request is one of this call.
            let made = unsafe { libc::ioctl(file.as_raw_fd(), SET_INTERFACE, &raw mut request) };
            ensure!(made == 0, "{}", std::io::Error::last_os_error());
            if let Some(link_type) = link_type {
                let link_type = libc::c_int::from(link_type);
                // SAFETY: the call takes a number.
                let set = unsafe { libc::ioctl(file.as_raw_fd(), SET_LINK, link_type) };
                ensure!(set == 0, "{}", std::io::Error::last_os_error());
            }
            Ok(file)
        })
    }

    /// Runs a closure inside, on a thread of its own. Sockets it makes belong to the namespace,
    /// wherever they are used.
    pub fn enter<T: Send>(&self, inside: impl FnOnce() -> Result<T> + Send) -> Result<T> {
        thread::scope(|scope| {
            scope
                .spawn(|| {
                    setns(&self.file, CloneFlags::CLONE_NEWNET).context("cannot enter")?;
                    inside()
                })
                .join()
                .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        })
    }

    /// Rules for its packet filter, in nft's language.
    pub fn nft(&self, rules: &str) -> Result<()> {
        self.feed("nft", &["-f", "-"], rules)
    }

    /// Runs a program inside that reads this from its standard input.
    fn feed(&self, name: &str, args: &[&str], input: &str) -> Result<()> {
        let mut child = self
            .command(program(name))?
            .args(args)
            .stdin(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run `{name}`: is it installed?"))?;
        let mut stdin = child.stdin.take().context("no stdin")?;
        stdin.write_all(input.as_bytes())?;
        drop(stdin);
        ensure!(child.wait()?.success(), "`{name}` refuses {input}");
        Ok(())
    }

    /// A command that will run inside. It sees the file systems as they are: unlike `ip netns exec`,
    /// which mounts a new `/sys` and hides bpffs. It gets a SIGTERM should the thread that starts it
    /// end before it, and no Ctrl-C of the terminal's.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Result<Command> {
        let file = self.file.try_clone().context("cannot copy a descriptor")?;
        let mut command = Command::new(program);
        command.process_group(0);
        // SAFETY: between fork and exec the closure makes two system calls and allocates nothing.
        unsafe {
            command.pre_exec(move || {
                nix::sys::prctl::set_pdeathsig(Signal::SIGTERM)?;
                Ok(setns(&file, CloneFlags::CLONE_NEWNET)?)
            });
        }
        Ok(command)
    }

    /// `twheel` with arguments, to run inside.
    pub fn twheel(&self, args: &[&str]) -> Result<Command> {
        let mut command = self.command(twheel_bin()?)?;
        // Whoever wants a history says where.
        command.args(args).env("TWHEEL_HISTORY", "off");
        Ok(command)
    }

    /// Runs `twheel` to its end.
    pub fn twheel_once(&self, args: &[&str]) -> Result<Ended> {
        once(self.twheel(args)?)
    }

    /// A counter, as `twheel stats` has it.
    pub fn counter(&self, name: &str) -> Result<u64> {
        let ended = self.twheel_once(&["stats", "--json"])?;
        for line in &ended.lines {
            let value: serde_json::Value = serde_json::from_str(&line.text)?;
            if value["counter"] == name {
                return value["total"].as_u64().context("no total");
            }
        }
        anyhow::bail!("no {name}: {}", ended.stderr)
    }

    /// Begins so many flows with the `twheel run` on an interface: the packet of each, as [`frame`] numbers them, goes
    /// through its pinned program.
    pub fn begin_flows(&self, interface: &str, flows: u32) -> Result<()> {
        self.begin_these(interface, 0..flows)
    }

    /// The same, of these numbers.
    pub fn begin_these(&self, interface: &str, flows: std::ops::Range<u32>) -> Result<()> {
        let program = self.enter(|| Instance::of(interface)?.xdp("twheel_xdp"))?;
        for flow in flows {
            let result = program
                .test_run(TestRunOptions {
                    data_in: Some(&frame(flow, false, ACK)),
                    ..TestRunOptions::new()
                })
                .context("cannot begin a flow")?;
            ensure!(result.return_value == PASS, "a packet does not pass");
        }
        Ok(())
    }

    /// The instances pinned by a twheel of any version in this namespace.
    pub fn instances(&self) -> Result<Vec<PathBuf>> {
        let prefix = format!("{}-", self.inode()?);
        let mut found = Vec::new();
        for version in entries(Path::new(PINS)) {
            found.extend(entries(&version).into_iter().filter(|instance| {
                instance
                    .file_name()
                    .is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
            }));
        }
        Ok(found)
    }

    /// What the instances hold, sorted.
    pub fn pins(&self) -> Result<Vec<PathBuf>> {
        let mut pins: Vec<_> = self
            .instances()?
            .iter()
            .flat_map(|it| entries(it))
            .collect();
        pins.sort();
        Ok(pins)
    }

    /// The programs attached to an interface: `xdp`; `ingress` and `egress` by TCX.
    pub fn attached(&self, interface: &str) -> Result<Vec<&'static str>> {
        let mut attached = Vec::new();
        if self
            .ip(&format!("-d link show dev {interface}"))?
            .contains("xdp")
        {
            attached.push("xdp");
        }
        let query = |way| self.enter(move || Ok(SchedClassifier::query_tcx(interface, way)));
        if query(TcAttachType::Ingress)?.is_ok_and(|(_, programs)| !programs.is_empty()) {
            attached.push("ingress");
        }
        let queried = query(TcAttachType::Egress)?;
        let is_attached = match queried {
            Ok((_, programs)) => !programs.is_empty(),
            // A kernel without TCX.
            Err(_) if tc::has_qdisc(self, interface)? => tc::filters(self, interface)?
                .iter()
                .any(tc::Filter::is_ours),
            Err(_) => false,
        };
        if is_attached {
            attached.push("egress");
        }
        Ok(attached)
    }

    /// Waits until these programs are attached to an interface, and no others. Where a pin was the last to hold a link,
    /// a worker of the kernel's detaches it, a moment after the pin is gone: on a busy machine after whoever removed it.
    pub fn await_attached(&self, interface: &str, wanted: &[&str]) -> Result<()> {
        let end = Instant::now() + RELEASE;
        loop {
            let attached = self.attached(interface)?;
            if attached == wanted {
                return Ok(());
            }
            ensure!(
                Instant::now() < end,
                "attached: {attached:?}, not {wanted:?}"
            );
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Fails if twheel has left anything here.
    pub fn check_clean(&self, interface: &str) -> Result<()> {
        let instances = self.instances()?;
        ensure!(instances.is_empty(), "left pinned: {instances:?}");
        self.await_attached(interface, &[]).context("left attached")
    }

    /// Its inode, by which twheel names its instances.
    pub fn inode(&self) -> Result<u64> {
        Ok(self.file.metadata().context("cannot stat")?.ino())
    }
}

impl Drop for Namespace {
    fn drop(&mut self) {
        for instance in self.instances().unwrap_or_default() {
            remove_pins(&instance);
        }
        if let Err(error) = ip(&format!("netns del {}", self.name)) {
            eprintln!("{error:#}");
        }
    }
}

/// Removes an instance's directory, links first, and those above it that are empty then.
pub fn remove_pins(instance: &Path) {
    let mut pins = entries(instance);
    pins.sort_by_key(|pin| !pin.to_string_lossy().contains('@'));
    for pin in pins {
        if pin.is_dir() {
            // Of another network namespace.
            entries(&pin)
                .into_iter()
                .for_each(|pin| drop(fs::remove_file(pin)));
            let _ = fs::remove_dir(&pin);
        }
        let _ = fs::remove_file(pin);
    }
    for directory in instance.ancestors().take(3) {
        // The last one out; bpffs itself is busy.
        if fs::remove_dir(directory).is_err() {
            break;
        }
    }
}

fn entries(directory: &Path) -> Vec<PathBuf> {
    fs::read_dir(directory)
        .map(|entries| entries.flatten().map(|entry| entry.path()).collect())
        .unwrap_or_default()
}

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

    /// An address to which packets go out and from which none comes.
    pub fn silent(self) -> IpAddr {
        self.host(9)
    }
}

/// Two hosts joined by a veth pair, and a server that listens.
pub struct Pair {
    // Dropped before the namespaces.
    listeners: [TcpListener; 2],
    /// Has the interface [`CLIENT`].
    pub client: Namespace,
    /// Has the interface [`SERVER`].
    pub server: Namespace,
}

impl Pair {
    /// Makes the hosts; when this returns, they reach each other by IPv4 and IPv6.
    pub fn new() -> Result<Self> {
        let client = Namespace::new("client")?;
        let server = Namespace::new("server")?;
        ip(&format!(
            "link add {CLIENT} netns {} type veth peer name {SERVER} netns {}",
            client.name, server.name
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
            // The SYN goes out, as if somebody had answered ARP.
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

    /// Until a port on which nobody listens refuses a connection.
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

    /// Sends one SYN to an address that never answers. Returns the client's end.
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
                // Gives up before the SYN would be sent again, one second after the first.
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
    /// The client's end: how the connection is told from others.
    pub name: SocketAddr,
    /// The end that opened it.
    pub client: TcpStream,
    /// The end that accepted it.
    pub server: TcpStream,
    /// Before its first packet.
    pub before: Instant,
    /// After the last packet of its handshake.
    pub after: Instant,
}

impl Connection {
    /// Opens one from a namespace to a listener, wherever that is.
    pub fn open(from: &Namespace, listener: &TcpListener) -> Result<Self> {
        let address = listener.local_addr()?;
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
            // As the server's side sees it, where addresses are translated on the way.
            name: peer,
            client,
            server,
            before,
            after,
        })
    }

    /// Sends a byte, and waits until it is there.
    pub fn talk(&mut self) -> Result<()> {
        self.client.write_all(b"!").context("cannot send")?;
        let mut byte = [0];
        self.server.read_exact(&mut byte).context("cannot receive")
    }

    /// Closes it in good order: a FIN from the client, then one from the server.
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
        // SAFETY: the option's value is a `linger`, which is alive and of that size.
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

    /// Sends a byte, to which there is a reset.
    pub fn expect_reset(&mut self) -> Result<()> {
        self.client.write_all(b"!").context("cannot send")?;
        await_reset(&mut self.client)
    }

    /// Sends a byte, and waits; how many bytes are not acknowledged then.
    pub fn unacknowledged(&mut self, wait: Duration) -> Result<u32> {
        self.client.write_all(b"!").context("cannot send")?;
        thread::sleep(wait);
        let mut queued: libc::c_int = 0;
        // SAFETY: the request (SIOCOUTQ) writes an `int`, which is alive.
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

/// Connections that were busy.
pub struct Rest {
    /// They are open, and silent from now on.
    pub connections: Vec<Connection>,
    /// The longest that one of them had to wait for its next packet.
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

    /// Falls silent. Returns the connections, which are still open.
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

/// A line of standard output.
#[derive(Clone, Debug)]
pub struct Line {
    /// When it was read.
    pub at: Instant,
    /// Without the end of line.
    pub text: String,
}

/// A line of `twheel run --json`, read.
#[derive(Clone, Debug)]
pub struct Expiry {
    /// When it was read.
    pub at: Instant,
    /// Its protocol.
    pub proto: String,
    /// The initiator's end.
    pub src: SocketAddr,
    /// The responder's end.
    pub dst: SocketAddr,
    /// State at the end.
    pub state: String,
    /// Its beginning was not seen.
    pub picked_up: bool,
    /// Why it ended.
    pub reason: String,
    /// The rule that it had met.
    pub rule: Option<String>,
    /// From its first packet to its end.
    pub age: Duration,
    /// From its last packet to its end.
    pub idle: Duration,
}

impl Line {
    /// Reads JSON.
    pub fn expiry(&self) -> Result<Expiry> {
        let value: serde_json::Value = serde_json::from_str(&self.text)
            .with_context(|| format!("no JSON: {:?}", self.text))?;
        let text = |key: &str| {
            let text = value[key].as_str().map(str::to_owned);
            text.with_context(|| format!("no {key} in {}", self.text))
        };
        let number = |key: &str| {
            let number = value[key].as_u64();
            number.with_context(|| format!("no {key} in {}", self.text))
        };
        let end = |address: &str, port: &str| -> Result<SocketAddr> {
            let port = u16::try_from(number(port)?).context("a port out of range")?;
            Ok(SocketAddr::new(text(address)?.parse()?, port))
        };
        ensure!(text("event")? == "expired", "another event: {}", self.text);
        Ok(Expiry {
            at: self.at,
            proto: text("proto")?,
            src: end("src", "sport")?,
            dst: end("dst", "dport")?,
            state: text("state")?,
            picked_up: value["picked_up"].as_bool().context("no picked_up")?,
            reason: text("reason")?,
            rule: value["rule"].as_str().map(str::to_owned),
            age: Duration::from_millis(number("age_ms")?),
            idle: Duration::from_millis(number("idle_ms")?),
        })
    }
}

/// A `twheel run` under way; killed when this is dropped.
pub struct Twheel {
    child: Child,
    lines: Receiver<Line>,
    stderr: Arc<Mutex<String>>,
    readers: Vec<JoinHandle<()>>,
}

/// How a program ended.
#[derive(Debug)]
pub struct Ended {
    /// Its exit status.
    pub status: ExitStatus,
    /// What it wrote to standard error.
    pub stderr: String,
    /// What it wrote to standard output and nobody had read.
    pub lines: Vec<Line>,
}

impl Ended {
    /// The exit code, unless a signal ended it.
    pub fn code(&self) -> Option<i32> {
        self.status.code()
    }

    /// The signal that ended it.
    pub fn signal(&self) -> Option<i32> {
        self.status.signal()
    }
}

fn lock(text: &Mutex<String>) -> MutexGuard<'_, String> {
    text.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Twheel {
    /// Starts `twheel run` in a namespace and waits until it is attached: to all interfaces that it names, unless it waits for
    /// them as well; to one at least of those that match a pattern, or it waits for them.
    pub fn start(namespace: &Namespace, args: &[&str]) -> Result<Self> {
        Self::start_with(namespace, args, |_| {})
    }

    /// The same; the lines of its standard error are handed on as they come.
    pub fn start_with(
        namespace: &Namespace,
        args: &[&str],
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        Self::attached(namespace, args, Stdio::piped(), on_stderr)
    }

    /// The same; its output goes to /dev/null.
    pub fn start_muted(namespace: &Namespace, args: &[&str]) -> Result<Self> {
        Self::attached(namespace, args, Stdio::null(), |_| {})
    }

    fn attached(
        namespace: &Namespace,
        args: &[&str],
        stdout: Stdio,
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        let mut command = namespace.twheel(&["run"])?;
        command.args(args);
        let twheel = Self::attached_by(command, stdout, on_stderr)?;
        if !["--wait-iface", "--netns"]
            .iter()
            .any(|it| args.contains(it))
        {
            let given = args.windows(2).filter(|it| it[0] == "--iface");
            let names = given.flat_map(|it| it[1].split(','));
            let names = names.filter(|it| *it != "all");
            for name in names.filter(|it| !it.contains(['*', '?', '['])) {
                twheel.await_stderr(&format!("{name}: attached"))?;
            }
        }
        Ok(twheel)
    }

    /// The same of a command that comes to `twheel run` by way of others.
    pub fn start_command(
        command: Command,
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        Self::attached_by(command, Stdio::piped(), on_stderr)
    }

    fn attached_by(
        command: Command,
        stdout: Stdio,
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<Self> {
        let (twheel, attached) = Self::spawn(command, stdout, on_stderr)?;
        if attached.recv_timeout(PATIENCE).is_err() {
            let ended = twheel.kill()?;
            bail!("twheel did not start: {}", ended.stderr.trim());
        }
        Ok(twheel)
    }

    fn spawn(
        mut command: Command,
        stdout: Stdio,
        on_stderr: impl Fn(&str) + Send + 'static,
    ) -> Result<(Self, Receiver<()>)> {
        let mut child = command
            .stdin(Stdio::null())
            .stdout(stdout)
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {:?}", command.get_program()))?;
        let stdout = child.stdout.take().map(BufReader::new);
        let errors = BufReader::new(child.stderr.take().context("no stderr")?);
        let (to_lines, lines) = channel();
        let (to_attached, attached) = channel();
        let stderr = Arc::new(Mutex::new(String::new()));
        let collected = stderr.clone();
        let readers = vec![
            thread::spawn(move || {
                let lines = stdout.into_iter().flat_map(BufRead::lines);
                for text in lines.map_while(Result::ok) {
                    let at = Instant::now();
                    let _ = to_lines.send(Line { at, text });
                }
            }),
            thread::spawn(move || {
                for line in errors.lines().map_while(Result::ok) {
                    {
                        let mut collected = lock(&collected);
                        collected.push_str(&line);
                        collected.push('\n');
                    }
                    on_stderr(&line);
                    // Or it waits for interfaces that match a pattern, or for namespaces.
                    if line.contains(": attached") || line.contains(" matches: waiting for one") {
                        let _ = to_attached.send(());
                    }
                }
            }),
        ];
        let twheel = Self {
            child,
            lines,
            stderr,
            readers,
        };
        Ok((twheel, attached))
    }

    /// Its process.
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it holds: resident memory in KiB, threads, open files.
    pub fn held(&self) -> Result<[usize; 3]> {
        let process = PathBuf::from(format!("/proc/{}", self.pid()));
        let status = fs::read_to_string(process.join("status"))?;
        let field = |name: &str| -> Result<usize> {
            let value = status.lines().find_map(|line| line.strip_prefix(name));
            let value = value.and_then(|it| it.split_ascii_whitespace().next());
            Ok(value.context("no such field")?.parse()?)
        };
        let files = fs::read_dir(process.join("fd"))?.count();
        Ok([field("VmRSS:")?, field("Threads:")?, files])
    }

    /// How often each of its threads has given up a CPU, or lost it.
    pub fn switches(&self) -> Result<BTreeMap<String, u64>> {
        let mut switches = BTreeMap::new();
        for task in fs::read_dir(format!("/proc/{}/task", self.pid()))? {
            let status = fs::read_to_string(task?.path().join("status"))?;
            let field = |name: &str| {
                let value = status.lines().find_map(|line| line.strip_prefix(name));
                value.map(str::trim).with_context(|| format!("no {name}"))
            };
            let count = |name| -> Result<u64> { Ok(field(name)?.parse()?) };
            switches.insert(
                format!("{} {}", field("Pid:")?, field("Name:")?),
                count("voluntary_ctxt_switches:")? + count("nonvoluntary_ctxt_switches:")?,
            );
        }
        Ok(switches)
    }

    /// What it has written to standard error so far.
    pub fn stderr(&self) -> String {
        lock(&self.stderr).clone()
    }

    /// The next line of its output; `None` if none came in that time.
    ///
    /// # Errors
    ///
    /// It has ended.
    pub fn line(&self, within: Duration) -> Result<Option<Line>> {
        match self.lines.recv_timeout(within) {
            Ok(line) => Ok(Some(line)),
            Err(RecvTimeoutError::Timeout) => Ok(None),
            Err(RecvTimeoutError::Disconnected) => {
                bail!("twheel has ended: {}", self.stderr().trim())
            }
        }
    }

    /// All flows whose end it reports until then.
    pub fn expiries_until(&self, end: Instant) -> Result<Vec<Expiry>> {
        let mut expiries = Vec::new();
        while let Some(line) = self.line(end.saturating_duration_since(Instant::now()))? {
            expiries.push(line.expiry()?);
        }
        Ok(expiries)
    }

    /// Waits until its standard error has this text, which may come later than `attached`.
    pub fn await_stderr(&self, text: &str) -> Result<String> {
        let end = Instant::now() + PATIENCE;
        loop {
            let stderr = self.stderr();
            if stderr.contains(text) {
                return Ok(stderr);
            }
            ensure!(Instant::now() < end, "no {text:?} in {stderr:?}");
            thread::sleep(Duration::from_millis(10));
        }
    }

    /// Ends it as Ctrl-C does.
    pub fn stop(self) -> Result<Ended> {
        self.signal(Signal::SIGINT)?;
        self.wait()
    }

    /// Ends it with SIGKILL.
    pub fn kill(self) -> Result<Ended> {
        self.signal(Signal::SIGKILL)?;
        self.wait()
    }

    /// Waits for its end. One that does not end is killed, and that is an error.
    pub fn wait(mut self) -> Result<Ended> {
        let Some(status) = wait_within(&mut self.child, PATIENCE)? else {
            bail!("twheel does not end: {}", self.stderr().trim());
        };
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        Ok(Ended {
            status,
            stderr: self.stderr(),
            lines: self.lines.try_iter().collect(),
        })
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        // Not yet waited for, so the number is still its own.
        kill(Pid::from_raw(self.child.id() as i32), signal).context("cannot signal twheel")
    }
}

impl Drop for Twheel {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits for a program's end; one that does not come to it in that time is killed: `None`.
pub fn wait_within(child: &mut Child, within: Duration) -> Result<Option<ExitStatus>> {
    let end = Instant::now() + within;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(Some(status));
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Ok(None);
        }
        thread::sleep(Duration::from_millis(2));
    }
}

/// A file for a policy, removed when dropped.
pub struct PolicyFile(PathBuf);

impl PolicyFile {
    /// With this text, under a name that no other test has.
    pub fn new(name: &str, text: &str) -> Result<Self> {
        let file = format!("twheel-{}-{name}.toml", std::process::id());
        let file = Self(std::env::temp_dir().join(file));
        file.write(text)?;
        Ok(file)
    }

    /// With another.
    pub fn write(&self, text: &str) -> Result<()> {
        fs::write(&self.0, text).with_context(|| format!("cannot write {}", self.0.display()))
    }

    /// Where it is.
    pub fn path(&self) -> &str {
        self.0.to_str().expect("a name of our own")
    }
}

impl Drop for PolicyFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Runs a command to its end.
pub fn once(command: Command) -> Result<Ended> {
    Twheel::spawn(command, Stdio::piped(), |_| {})?.0.wait()
}
