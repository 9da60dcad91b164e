//! A server with a twheel, processes of connections, and what `twheel idle` prints of them.

use std::{
    collections::HashMap,
    fs,
    io::{Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::{fd::AsRawFd, unix::process::CommandExt as _},
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::{
        epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
        prctl,
        resource::{Resource, getrlimit, setrlimit},
        signal::{SigHandler, Signal, signal},
    },
    unistd::{Gid, Uid, setgid, setuid},
};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    netns::{Namespace, PATIENCE, require_root},
    pair::{Family, Pair, SERVER},
    process::Process,
    running::Twheel,
    schema,
};

/// Tells this program to be a service.
pub const SERVICE: &str = "TWHEEL_TEST_SERVICE";
pub const PORT: u16 = 8080;
/// The user without rights.
pub const NOBODY: u32 = 65534;
/// A socket is found within a second; the rest is for a busy machine.
pub const LATE: Duration = Duration::from_millis(1_000 + 1_500);

pub fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// A pair with a twheel on the server, and a directory with the twheel's socket and the logs.
pub struct Lab {
    pub pair: Pair,
    pub directory: Directory,
}

impl Lab {
    pub fn new(name: &str) -> Result<Self> {
        require_root();
        Ok(Self {
            pair: Pair::new()?,
            directory: Directory::new(&format!("idle-{name}"))?,
        })
    }

    pub fn socket(&self) -> String {
        self.directory.file("offload")
    }

    pub fn twheel(&self, more: &[&str]) -> Result<Twheel> {
        let socket = self.socket();
        let args = ["--iface", SERVER, "--tick", "100ms", "--offload", &socket];
        Twheel::start(&self.pair.server, &[&args[..], more].concat())
    }

    pub fn command(&self, args: &[&str]) -> Result<Command> {
        let socket = self.socket();
        let args = [&["idle", "--offload", &socket][..], args].concat();
        self.pair.server.twheel(&args)
    }

    /// `twheel idle --json`, once it has looked for sockets.
    pub fn idle(&self, args: &[&str]) -> Result<Process> {
        self.idle_by(self.command(&[args, &["--json"]].concat())?)
    }

    pub fn idle_by(&self, mut command: Command) -> Result<Process> {
        // What runs in the background of a script ignores it, and so would what it starts.
        // SAFETY: a system call, which may be made between fork and exec.
        unsafe {
            command.pre_exec(|| {
                signal(Signal::SIGINT, SigHandler::SigDfl)?;
                Ok(())
            });
        }
        let number = fs::read_dir(&self.directory.0)?.count();
        Process::start(command, self.directory.0.join(format!("log-{number}")))
    }

    /// A process in a namespace that listens at a port of all addresses, and sends back what it
    /// receives. `sink`: it sends nothing; `twice`: it has two descriptors of each connection;
    /// `nobody`: it is of that user.
    pub fn serve(&self, namespace: &Namespace, port: u16, what: &str) -> Result<Process> {
        let mut command = namespace.command(std::env::current_exe()?)?;
        command.args(["--exact", "service", "--ignored", "--nocapture"]);
        command.env(SERVICE, format!("{what} {port}"));
        let mut service = self.idle_by(command)?;
        service.await_text("ready")?;
        Ok(service)
    }

    pub fn connect(&self, number: usize, port: u16) -> Result<TcpStream> {
        let address = SocketAddr::new(Family::alternate(number).server(), port);
        let connect = || TcpStream::connect(address).context("cannot connect");
        let stream = self.pair.client.enter(connect)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        Ok(stream)
    }
}

/// Sends a byte and waits for it to come back.
pub fn talk(mut stream: &TcpStream) -> Result<()> {
    stream.write_all(b"!")?;
    Ok(stream.read_exact(&mut [0])?)
}

/// What `twheel idle --json` has printed: for each connection, by the peer's endpoint.
pub fn reports(idle: &Process) -> Result<HashMap<SocketAddr, Vec<Value>>> {
    let mut found: HashMap<_, Vec<_>> = HashMap::new();
    for line in idle.log().lines().filter(|line| line.starts_with('{')) {
        schema::check(line)?;
        let value: Value = serde_json::from_str(line)?;
        let remote = value["remote"].as_str().context("no remote")?.parse()?;
        found.entry(remote).or_default().push(value);
    }
    Ok(found)
}

pub fn reports_of(idle: &Process, stream: &TcpStream) -> Result<usize> {
    let found = reports(idle)?;
    Ok(found.get(&stream.local_addr()?).map_or(0, Vec::len))
}

/// Waits until a connection was reported so often.
pub fn await_reports(idle: &mut Process, stream: &TcpStream, count: usize) -> Result<()> {
    let end = Instant::now() + PATIENCE;
    while reports_of(idle, stream)? < count {
        idle.check()?;
        ensure!(Instant::now() < end, "not reported: {}", idle.log());
        thread::sleep(millis(10));
    }
    Ok(())
}

pub fn pid_of(process: &Process) -> String {
    process.pid().to_string()
}

/// A cgroup of version 2, below that of this process; removed when dropped.
pub struct Cgroup(pub PathBuf);

impl Cgroup {
    pub fn new(name: &str) -> Result<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo")?;
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "));
        let mount = mount.and_then(|line| line.split(' ').nth(4));
        let mount = mount.context("this machine has no cgroups of version 2: mount them")?;
        let own = fs::read_to_string("/proc/self/cgroup")?;
        let own = own.lines().find_map(|line| line.strip_prefix("0::/"));
        let own = Path::new(mount).join(own.context("no cgroup of version 2")?);
        let path = own.join(format!("twheel-test-{}-{name}", std::process::id()));
        Self::at(path)
    }

    pub fn at(path: PathBuf) -> Result<Self> {
        fs::create_dir(&path).context("cannot create a cgroup")?;
        Ok(Self(path))
    }

    pub fn add(&self, process: &Process) -> Result<()> {
        Ok(fs::write(self.0.join("cgroup.procs"), pid_of(process))?)
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        // A process that was killed leaves it a moment later.
        let end = Instant::now() + PATIENCE;
        while fs::remove_dir(&self.0).is_err() && self.0.exists() && Instant::now() < end {
            thread::sleep(millis(10));
        }
    }
}

/// Lets this process have as many descriptors as it may.
pub fn most_descriptors() -> Result<()> {
    let (_, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok(setrlimit(Resource::RLIMIT_NOFILE, hard, hard)?)
}

/// The process whose connections the others watch.
pub fn serve() -> Result<()> {
    let Ok(what) = std::env::var(SERVICE) else {
        return Ok(());
    };
    let (what, port) = what.split_once(' ').context("no port")?;
    most_descriptors()?;
    if what == "nobody" {
        setgid(Gid::from_raw(NOBODY))?;
        setuid(Uid::from_raw(NOBODY))?;
        // As of a process that was started by this user.
        prctl::set_dumpable(true)?;
    }
    let listener = TcpListener::bind(format!("[::]:{port}"))?;
    let poller = Epoll::new(EpollCreateFlags::empty())?;
    poller.add(&listener, EpollEvent::new(EpollFlags::EPOLLIN, 0))?;
    println!("ready");
    let mut open = HashMap::new();
    loop {
        let mut ready = [EpollEvent::empty(); 64];
        let count = poller.wait(&mut ready, EpollTimeout::NONE)?;
        for event in &ready[..count] {
            if event.data() == 0 {
                let (stream, _) = listener.accept()?;
                let key = stream.as_raw_fd() as u64;
                poller.add(&stream, EpollEvent::new(EpollFlags::EPOLLIN, key))?;
                let copy = (what == "twice").then(|| stream.try_clone()).transpose()?;
                open.insert(key, (stream, copy));
                continue;
            }
            let Some((stream, _)) = open.get_mut(&event.data()) else {
                continue;
            };
            let mut bytes = [0; 4096];
            let end = match stream.read(&mut bytes) {
                Ok(0) => "end of file".to_owned(),
                Err(error) => format!("{:?}", error.kind()),
                Ok(_) if what == "sink" => continue,
                Ok(count) => match stream.write_all(&bytes[..count]) {
                    Ok(()) => continue,
                    Err(error) => format!("{:?}", error.kind()),
                },
            };
            println!("{end}");
            open.remove(&event.data());
        }
    }
}
