//! Programs that hand over their timeouts: the C library, and the examples in C, Python and Rust,
//! with a twheel and without.

use std::{
    io::{self, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    os::fd::AsFd,
    path::{Path, PathBuf},
    process::Command,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::{
        signal::{Signal, kill},
        socket::{setsockopt, sockopt::Linger},
    },
    unistd::Pid,
};
use twheel_client::{
    channel::{Channel, Packet},
    protocol::{ENDPOINTS, Op, Request, life},
};
use twheel_tests::{
    directory::Directory,
    netns::{PATIENCE, require_root, tool},
    pair::{Family, Pair, SERVER},
    process::Process,
    running::Twheel,
};

const PORT: u16 = 7000;
/// What an expiry, and the processes that run until it is seen, may take.
const LATE: Duration = Duration::from_millis(1_000);

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// A pair, perhaps with a twheel on the server, and a directory with its socket and the programs.
struct Lab {
    pair: Pair,
    directory: Directory,
    twheel: Option<Twheel>,
}

impl Lab {
    fn new(name: &str, offloaded: bool) -> Result<Self> {
        require_root();
        let mut lab = Self {
            pair: Pair::new()?,
            directory: Directory::new(&format!("programs-{name}-{offloaded}"))?,
            twheel: None,
        };
        if offloaded {
            let args = ["--iface", SERVER, "--tick", "100ms", "--offload"];
            let path = lab.socket();
            let twheel = Twheel::start(&lab.pair.server, &[&args[..], &[&path]].concat())?;
            lab.twheel = Some(twheel);
        }
        Ok(lab)
    }

    fn socket(&self) -> String {
        self.directory.file("offload")
    }

    /// Compiles a program in C with the library.
    fn compile(&self, source: &Path) -> Result<PathBuf> {
        let program = self.directory.0.join("program");
        let output = Command::new("cc")
            .args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-std=c11"])
            .arg("-o")
            .arg(&program)
            .arg(source)
            .arg("-I")
            .arg(tree("twheel-user/client/c/include"))
            .arg(beside("libtwheel_client_c.a")?)
            .args(["-lpthread", "-ldl", "-lm"])
            .output()
            .context("cannot run `cc`: install gcc")?;
        let errors = String::from_utf8_lossy(&output.stderr);
        ensure!(output.status.success(), "cc: {errors}");
        Ok(program)
    }

    /// Starts a program on the server.
    fn run(&self, program: &Path, args: &[&str]) -> Result<Process> {
        let mut command = self.pair.server.command(program)?;
        command.args(args).env("TWHEEL_OFFLOAD", self.socket());
        Process::start(command, self.directory.0.join("log"))
    }

    /// Opens a connection to a program that listens, once it does.
    fn connect(&self, number: usize) -> Result<TcpStream> {
        let address = SocketAddr::new(Family::alternate(number).server(), PORT);
        let end = Instant::now() + PATIENCE;
        loop {
            match self.pair.client.enter(|| Ok(TcpStream::connect(address)))? {
                Ok(stream) => {
                    stream.set_nodelay(true)?;
                    stream.set_read_timeout(Some(PATIENCE))?;
                    return Ok(stream);
                }
                Err(error) => ensure!(Instant::now() < end, "{error}"),
            }
            thread::sleep(millis(20));
        }
    }

    /// Whether twheel has a timer of the program's end of a connection.
    fn is_offloaded(&self, stream: &TcpStream) -> Result<bool> {
        let channel = Channel::connect(Path::new(&self.socket()))?;
        let mut request = Request::new(Op::Start);
        (request.timeout, request.life, request.flags) = (60_000, life::ANY, ENDPOINTS);
        let (local, remote) = (stream.peer_addr()?, stream.local_addr()?);
        let address = |end: SocketAddr| match end.ip() {
            std::net::IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
            std::net::IpAddr::V6(address) => address.octets(),
        };
        (request.local, request.local_port) = (address(local), local.port());
        (request.remote, request.remote_port) = (address(remote), remote.port());
        channel.send(1, &[request], &[])?;
        match channel.receive()?.context("twheel has ended")? {
            Packet::Replies(_, replies) => Ok(replies[0].error as i32 == libc::EEXIST),
            events @ Packet::Events(_) => anyhow::bail!("{events:?}"),
        }
    }

    fn end(self) -> Result<()> {
        self.twheel.map_or(Ok(()), |twheel| twheel.stop().map(drop))
    }
}

/// A file of the tree.
fn tree(path: &str) -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/..")).join(path)
}

/// What cargo has built beside this program: the library, as a dependency of these tests, or an
/// example, as `../examples/NAME`.
fn beside(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe().context("cannot tell where this program is")?;
    let path = own.parent().context("no directory")?.join(name);
    ensure!(
        path.is_file(),
        "no {}: build it with `cargo test --no-run -p twheel-client -p twheel-client-c`",
        path.display()
    );
    Ok(path)
}

/// Sends something, and waits until it has come back.
fn echo(mut stream: &TcpStream) -> Result<()> {
    stream.write_all(b"hello")?;
    let mut back = [0; 5];
    stream.read_exact(&mut back)?;
    ensure!(&back == b"hello", "{back:?}");
    Ok(())
}

/// Asks for a page, and reads it.
fn get(mut stream: &TcpStream) -> Result<()> {
    stream.write_all(b"GET / HTTP/1.1\r\nHost: lab\r\n\r\n")?;
    let mut page = Vec::new();
    while !page.ends_with(b"\r\n\r\nhello\n") {
        let mut byte = [0];
        ensure!(stream.read(&mut byte)? == 1, "the end");
        page.extend(byte);
    }
    Ok(())
}

/// Idle connections are closed after the timeout, not earlier; one that is busy stays.
fn check_server(
    lab: &Lab,
    server: &mut Process,
    timeout: Duration,
    talk: fn(&TcpStream) -> Result<()>,
    silent: &[&[u8]],
) -> Result<()> {
    let mut idle = vec![lab.connect(0)?, lab.connect(1)?];
    idle.iter().try_for_each(talk)?;
    for (number, bytes) in silent.iter().enumerate() {
        let mut stream = lab.connect(number)?;
        stream.write_all(bytes)?;
        idle.push(stream);
    }
    let last = Instant::now();
    let busy = lab.connect(0)?;
    // One that is reset harms nobody.
    let reset = lab.connect(0)?;
    talk(&reset)?;
    let (l_onoff, l_linger) = (1, 0);
    setsockopt(&reset.as_fd(), Linger, &libc::linger { l_onoff, l_linger })?;
    drop(reset);
    talk(&busy)?;
    if lab.twheel.is_some() {
        let end = Instant::now() + PATIENCE;
        // If this test asked first, twheel would refuse the server's timer.
        thread::sleep(millis(500));
        for stream in idle.iter().chain([&busy]) {
            while !lab.is_offloaded(stream)? {
                ensure!(Instant::now() < end, "not offloaded");
                thread::sleep(millis(10));
            }
        }
    }
    while last.elapsed() < timeout - millis(100) {
        thread::sleep(millis(200).min(timeout - last.elapsed()));
        talk(&busy)?;
    }
    for stream in &idle {
        stream.set_nonblocking(true)?;
        let read = (&mut &*stream).read(&mut [0]);
        let is_open = read.is_err_and(|it| it.kind() == io::ErrorKind::WouldBlock);
        ensure!(is_open || last.elapsed() >= timeout, "early");
        stream.set_nonblocking(false)?;
    }
    for stream in &idle {
        let end = (&mut &*stream).read(&mut [0]);
        ensure!(matches!(end, Ok(0)), "{end:?}");
    }
    let took = last.elapsed();
    ensure!(took >= timeout && took < timeout + LATE, "{took:?}");
    while last.elapsed() < timeout + millis(2_000) {
        talk(&busy)?;
        thread::sleep(millis(200));
    }
    let lines = server.log().matches("was idle for").count();
    ensure!(lines == idle.len(), "{}", server.log());
    talk(&lab.connect(1)?)?;
    server.check()
}

fn c_server(offloaded: bool) -> Result<()> {
    let lab = Lab::new("server-c", offloaded)?;
    let program = lab.compile(&tree("twheel-user/client/c/examples/server.c"))?;
    let mut server = lab.run(&program, &[&PORT.to_string()])?;
    check_server(&lab, &mut server, millis(5_000), echo, &[b""])?;
    lab.end()
}

#[test]
fn the_server_in_c_closes_idle_connections() -> Result<()> {
    c_server(true)
}

#[test]
fn the_server_in_c_needs_no_twheel() -> Result<()> {
    c_server(false)
}

fn python_server(offloaded: bool) -> Result<()> {
    let lab = Lab::new("server-py", offloaded)?;
    let script = tree("twheel-user/client/c/examples/server.py");
    let library = beside("libtwheel_client_c.so")?;
    let [script, library] = [&script, &library].map(|it| it.to_str().expect("UTF-8"));
    let args = [script, library, &PORT.to_string()];
    let mut server = lab.run(&tool("python3")?, &args)?;
    check_server(&lab, &mut server, millis(5_000), echo, &[b""])?;
    lab.end()
}

#[test]
fn the_server_in_python_closes_idle_connections() -> Result<()> {
    python_server(true)
}

#[test]
fn the_server_in_python_needs_no_twheel() -> Result<()> {
    python_server(false)
}

fn http_server(offloaded: bool) -> Result<()> {
    let lab = Lab::new("http", offloaded)?;
    let program = beside("../examples/http")?;
    let mut server = lab.run(&program, &[&format!("[::]:{PORT}")])?;
    // One without a request, and one with half of one.
    check_server(&lab, &mut server, millis(10_000), get, &[b"", b"GET / HT"])?;
    lab.end()
}

#[test]
fn the_server_of_http_closes_idle_connections() -> Result<()> {
    http_server(true)
}

#[test]
fn the_server_of_http_needs_no_twheel() -> Result<()> {
    http_server(false)
}

/// Runs `timers.c`, and returns what it says of who keeps its timers.
fn timers(lab: &Lab) -> Result<String> {
    let program = lab.compile(&tree("tests/tests/offload_programs/timers.c"))?;
    let address = SocketAddr::new(Family::V4.client(), PORT);
    let listener = lab.pair.client.enter(|| Ok(TcpListener::bind(address)?))?;
    let args = [&address.ip().to_string(), &address.port().to_string()];
    let mut process = lab.run(&program, &args.map(String::as_str))?;
    let mut peers = Vec::new();
    for _ in 0..3 {
        peers.push(listener.accept()?.0);
    }
    let status = process.ended(PATIENCE)?;
    ensure!(status.success(), "{}", process.log());
    let mut ends = Vec::new();
    for mut peer in peers {
        peer.set_read_timeout(Some(PATIENCE))?;
        let end = io::copy(&mut peer, &mut io::sink());
        ends.push(end.err().map(|error| error.kind()));
    }
    // One was shut down, one destroyed, one closed.
    assert_eq!(ends, [None, Some(io::ErrorKind::ConnectionReset), None]);
    Ok(process.log())
}

#[test]
fn timers_of_a_program_in_c_expire_go_on_and_stop() -> Result<()> {
    for (offloaded, kept) in [(true, "kept by twheel"), (false, "kept here")] {
        let lab = Lab::new("timers", offloaded)?;
        let log = timers(&lab)?;
        assert_eq!(log.lines().collect::<Vec<_>>(), [kept, "done"]);
        lab.end()?;
    }
    Ok(())
}

#[test]
fn a_twheel_that_does_not_answer_holds_up_no_program() -> Result<()> {
    let lab = Lab::new("stopped", true)?;
    let twheel = lab.twheel.as_ref().context("no twheel")?;
    let pid = Pid::from_raw(twheel.pid() as i32);
    kill(pid, Signal::SIGSTOP)?;
    let log = timers(&lab);
    let refused = lab.pair.server.twheel_once(&[
        "idle",
        "--pid",
        &std::process::id().to_string(),
        "--timeout",
        "1s",
        "--offload",
        &lab.socket(),
    ]);
    kill(pid, Signal::SIGCONT)?;
    let log = log?;
    assert_eq!(log.lines().collect::<Vec<_>>(), ["kept here", "done"]);
    let refused = refused?;
    assert_eq!(refused.code(), Some(1));
    ensure!(
        refused.stderr.contains("does not answer"),
        "{}",
        refused.stderr
    );
    lab.end()
}
