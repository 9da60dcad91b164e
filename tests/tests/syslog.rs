//! Events as rsyslog reads them.

use std::{
    collections::BTreeSet,
    fs,
    io::Read,
    net::{TcpListener, TcpStream, UdpSocket},
    os::unix::net::{UnixDatagram, UnixListener},
    path::Path,
    process::{Child, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::Value;
use twheel_tests::{
    directory::Directory,
    is_long,
    netns::{Namespace, PATIENCE, program, require_root},
    pair::{Pair, SERVER},
    process::Process,
    running::{Twheel, wait_within},
};

const ALL: &str = "begin,update,end,rto,reap,run";

/// rsyslogd, with inputs for TCP, UDP and a Unix socket. It writes a line for each message.
struct Rsyslogd {
    child: Child,
    tcp: u16,
    udp: u16,
}

/// Its Unix socket, in the directory of a test.
const SOCKET: &str = "log.sock";
/// What it writes, in the directory of a test.
const WRITTEN: &str = "messages";

/// Whether it is installed; if not, that is said.
fn is_installed() -> bool {
    let is_installed = Path::new("/usr/sbin/rsyslogd").exists();
    if !is_installed {
        twheel_tests::skipped("rsyslogd is not installed");
    }
    is_installed
}

impl Rsyslogd {
    /// Starts it, and waits until it listens.
    fn start(host: &Namespace, directory: &Directory) -> Result<Self> {
        let (tcp, udp) = host.enter(|| {
            let tcp = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            Ok((tcp, UdpSocket::bind("127.0.0.1:0")?.local_addr()?.port()))
        })?;
        Self::start_at(host, directory, tcp, udp)
    }

    fn start_at(host: &Namespace, directory: &Directory, tcp: u16, udp: u16) -> Result<Self> {
        let config = directory.file("rsyslog.conf");
        let text = format!(
            "global(workDirectory=\"{}\")\n\
             module(load=\"imtcp\")\nmodule(load=\"imudp\")\n\
             module(load=\"imuxsock\" SysSock.Use=\"off\")\n\
             template(name=\"fields\" type=\"string\" string=\"%syslogfacility-text%.%syslogseverity-text% \
             %timereported:::date-rfc3339% %hostname% %app-name% %procid% %msgid% %structured-data% %msg%\\n\")\n\
             ruleset(name=\"all\") {{\n action(type=\"omfile\" file=\"{}\" template=\"fields\")\n}}\n\
             input(type=\"imtcp\" address=\"127.0.0.1\" port=\"{tcp}\" ruleset=\"all\")\n\
             input(type=\"imudp\" address=\"127.0.0.1\" port=\"{udp}\" rcvbufSize=\"4m\" ruleset=\"all\")\n\
             input(type=\"imuxsock\" socket=\"{}\" useSpecialParser=\"off\" ignoreTimestamp=\"off\" ruleset=\"all\")\n",
            directory.path(),
            directory.file(WRITTEN),
            directory.file(SOCKET),
        );
        fs::write(&config, text)?;
        let mut command = host.command(program("rsyslogd"))?;
        command.args(["-n", "-f", &config, "-i", &directory.file("rsyslogd.pid")]);
        command.stdin(Stdio::null());
        let mut daemon = Self {
            child: command.spawn().context("cannot start rsyslogd")?,
            tcp,
            udp,
        };
        let end = Instant::now() + PATIENCE;
        while !daemon.listens(host, directory)? {
            ensure!(Instant::now() < end, "rsyslogd does not listen");
            let ended = daemon.child.try_wait()?;
            ensure!(ended.is_none(), "rsyslogd has ended: {ended:?}");
            thread::sleep(Duration::from_millis(20));
        }
        Ok(daemon)
    }

    fn listens(&self, host: &Namespace, directory: &Directory) -> Result<bool> {
        host.enter(|| {
            Ok(TcpStream::connect(("127.0.0.1", self.tcp)).is_ok()
                && UdpSocket::bind(("127.0.0.1", self.udp)).is_err()
                && UnixDatagram::unbound()?
                    .connect(directory.0.join(SOCKET))
                    .is_ok())
        })
    }

    /// Ends it, so that it writes what it has read.
    fn stop(mut self) -> Result<()> {
        kill(Pid::from_raw(self.child.id() as i32), Signal::SIGTERM)?;
        let ended = wait_within(&mut self.child, PATIENCE)?;
        ensure!(ended.is_some(), "rsyslogd does not end");
        Ok(())
    }
}

impl Drop for Rsyslogd {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until rsyslogd has written what `is_all` accepts, or for so long that it will not.
fn await_written(directory: &Directory, is_all: impl Fn(&str) -> bool) -> String {
    let end = Instant::now() + PATIENCE;
    loop {
        let written = fs::read_to_string(directory.file(WRITTEN)).unwrap_or_default();
        if is_all(&written) || Instant::now() > end {
            return written;
        }
        thread::sleep(Duration::from_millis(50));
    }
}

/// What the history has.
fn past(pair: &Pair, history: &Directory) -> Result<Vec<String>> {
    let args = ["expired", "--json", "--events", ALL, "--iface", SERVER];
    let ended = pair
        .server
        .twheel_once(&[&args[..], &["--history", history.path()]].concat())?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    Ok(ended.lines.into_iter().map(|line| line.text).collect())
}

/// The arguments of an export.
fn export(history: &Directory, to: &str, options: &[&str]) -> Vec<String> {
    let state = history.file("state");
    let args = ["export", "syslog", "--iface", SERVER, "--to", to];
    let args = [&args[..], &["--state", &state, "--history", history.path()]].concat();
    let args = [&args[..], options].concat();
    args.into_iter().map(str::to_owned).collect()
}

fn run_export(pair: &Pair, args: &[String]) -> Result<()> {
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let ended = pair.server.twheel_once(&args)?;
    ensure!(
        ended.code() == Some(0) && ended.stderr.is_empty(),
        "{ended:?}"
    );
    Ok(())
}

/// What rsyslogd is to write of an event: its fields, and the line itself.
fn wanted(line: &str) -> Result<String> {
    let event: Value = serde_json::from_str(line)?;
    let text = |key: &str| {
        event[key]
            .as_str()
            .with_context(|| format!("no {key}: {line}"))
    };
    let severity = match text("event")? {
        "begin" | "update" => "info",
        _ => "notice",
    };
    Ok(format!(
        "daemon.{severity} {} {} twheel - {} - {line}",
        text("time")?,
        text("host")?,
        text("event")?
    ))
}

/// Makes a history with events of most kinds, and with as many flows as this.
fn history(pair: &Pair, history: &Directory, flows: u32) -> Result<Vec<String>> {
    let mut args = vec!["--iface", SERVER, "--timeout", "700ms", "--json"];
    args.extend(["--events", ALL, "--accounting", "--rto", "on"]);
    args.extend(["--active-timeout", "200ms", "--history", history.path()]);
    let twheel = Twheel::start(&pair.server, &args)?;
    pair.server.begin_flows(SERVER, flows)?;
    let mut connection = pair.connect_some(1)?.remove(0);
    for _ in 0..3 {
        connection.talk()?;
        thread::sleep(Duration::from_millis(250));
    }
    let end = Instant::now() + PATIENCE;
    while pair.server.counter("expired")? <= u64::from(flows) {
        ensure!(Instant::now() < end, "flows do not end");
        thread::sleep(Duration::from_millis(100));
    }
    let ended = twheel.stop()?;
    ensure!(ended.code() == Some(0), "{ended:?}");
    past(pair, history)
}

#[test]
fn rsyslog_reads_what_the_events_say() -> Result<()> {
    require_root();
    if !is_installed() {
        return Ok(());
    }
    let pair = Pair::new()?;
    let made = Directory::new("syslog")?;
    let told = history(&pair, &made, 2_000)?;
    for kind in ["begin", "update", "end", "run"] {
        let name = format!("\"event\":\"{kind}\"");
        ensure!(told.iter().any(|line| line.contains(&name)), "no {kind}");
    }
    let wanted = told.iter().map(|line| wanted(line));
    let wanted = wanted.collect::<Result<Vec<_>>>()?;
    for transport in ["tcp", "udp", "unix"] {
        let daemon = Rsyslogd::start(&pair.server, &made)?;
        let to = match transport {
            "tcp" => format!("tcp:127.0.0.1:{}", daemon.tcp),
            "udp" => format!("udp:127.0.0.1:{}", daemon.udp),
            _ => format!("unix:{}", made.file(SOCKET)),
        };
        run_export(&pair, &export(&made, &to, &["--once"]))?;
        let written = await_written(&made, |it| it.lines().count() >= wanted.len());
        daemon.stop()?;
        let written: Vec<_> = written.lines().collect();
        let differs = written
            .iter()
            .zip(&wanted)
            .find(|(read, sent)| read != sent);
        assert!(
            written == wanted,
            "{transport}: {} of {}: {differs:#?}",
            written.len(),
            wanted.len()
        );
        fs::remove_file(made.file(WRITTEN))?;
        // There is none as long as everything might have to be sent again.
        let _ = fs::remove_file(made.file("state"));
    }
    Ok(())
}

/// The event in a line that rsyslogd has written.
fn event(written: &str) -> Option<&str> {
    written.splitn(8, ' ').nth(7)
}

#[test]
fn whoever_is_killed_each_event_arrives_over_tcp() -> Result<()> {
    require_root();
    if !is_installed() {
        return Ok(());
    }
    let kills: u32 = if is_long() { 60 } else { 8 };
    // More bytes than are sent again after a connection has ended.
    let flows = 2_500;
    let pair = Pair::new()?;
    let made = Directory::new("syslog-kills")?;
    let mut args = vec!["--iface", SERVER, "--timeout", "300ms", "--json"];
    args.extend(["--events", "begin,end", "--history", made.path()]);
    let twheel = Twheel::start(&pair.server, &args)?;
    let mut daemon = Rsyslogd::start(&pair.server, &made)?;
    let (tcp, udp) = (daemon.tcp, daemon.udp);
    let args = export(&made, &format!("tcp:127.0.0.1:{tcp}"), &[]);
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let start = || {
        let mut export = pair.server.twheel(&args)?;
        anyhow::Ok(export.stdin(Stdio::null()).stderr(Stdio::null()).spawn()?)
    };
    for round in 0..kills {
        let mut exporter = start()?;
        pair.server
            .begin_these(SERVER, flows * round..flows * (round + 1))?;
        if round % 3 == 2 {
            daemon.stop()?;
            daemon = Rsyslogd::start_at(&pair.server, &made, tcp, udp)?;
        }
        thread::sleep(Duration::from_millis(u64::from(50 + 97 * (round % 7))));
        exporter.kill()?;
        exporter.wait()?;
    }
    let end = Instant::now() + PATIENCE;
    pair.server.await_expired((flows * kills).into(), end)?;
    let told = loop {
        let told = past(&pair, &made)?;
        let ends = told.iter().filter(|it| it.contains("\"event\":\"end\""));
        if ends.count() == (flows * kills) as usize {
            break told;
        }
        ensure!(Instant::now() < end, "{} events", told.len());
        thread::sleep(Duration::from_millis(100));
    };
    let mut exporter = start()?;
    let wanted: BTreeSet<_> = told.iter().map(String::as_str).collect();
    let written = await_written(&made, |written| {
        // Each event takes a line.
        let may_be_all = written.lines().count() >= wanted.len();
        may_be_all && wanted.is_subset(&written.lines().filter_map(event).collect())
    });
    exporter.kill()?;
    exporter.wait()?;
    daemon.stop()?;
    twheel.kill()?;
    let read: BTreeSet<_> = written.lines().filter_map(event).collect();
    let differs: Vec<_> = read.symmetric_difference(&wanted).take(5).collect();
    assert!(
        differs.is_empty(),
        "{} of {}: {differs:#?}",
        read.len(),
        wanted.len()
    );
    let kept = fs::read_to_string(made.file("state"))?;
    println!(
        "{} messages for {} events; {kept}",
        written.lines().count(),
        wanted.len()
    );
    Ok(())
}

#[test]
fn a_daemon_with_a_stream_socket_reads_lines() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let made = Directory::new("syslog-stream")?;
    let told = history(&pair, &made, 50)?;
    let listener = UnixListener::bind(made.file(SOCKET))?;
    let reader = thread::spawn(move || -> Result<String> {
        let mut read = String::new();
        listener.accept()?.0.read_to_string(&mut read)?;
        Ok(read)
    });
    let to = format!("unix:{}", made.file(SOCKET));
    run_export(&pair, &export(&made, &to, &["--once", "--events", "end"]))?;
    let read = reader.join().expect("a panic")?;
    let ends = told.iter().filter(|it| it.contains("\"event\":\"end\""));
    let lines = read.lines().map(|line| {
        ensure!(line.starts_with("<29>1 "), "{line}");
        line.splitn(8, ' ').nth(7).context("no message")
    });
    assert!(lines.collect::<Result<Vec<_>>>()?.iter().eq(ends), "{read}");
    Ok(())
}

#[test]
fn what_cannot_be_reached_is_said_and_tried_again() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let made = Directory::new("syslog-away")?;
    let told = history(&pair, &made, 20)?;
    let bad = export(&made, "/dev/log", &[]);
    let bad: Vec<_> = bad.iter().map(String::as_str).collect();
    let ended = pair.server.twheel_once(&bad)?;
    assert_eq!(ended.code(), Some(2), "{ended:?}");
    assert!(ended.stderr.contains("give unix:PATH"), "{ended:?}");

    let to = format!("unix:{}", made.file(SOCKET));
    let args = export(&made, &to, &["--once"]);
    let args: Vec<_> = args.iter().map(String::as_str).collect();
    let exporter = pair.server.twheel(&args)?;
    let mut exporter = Process::start(exporter, made.0.join("said"))?;
    exporter.await_text("trying again until it is there")?;
    let socket = UnixDatagram::bind(made.file(SOCKET))?;
    socket.set_read_timeout(Some(PATIENCE))?;
    let mut buffer = vec![0; 1 << 16];
    for line in &told {
        // It waits while the socket is full.
        let length = socket.recv(&mut buffer).with_context(|| line.clone())?;
        let message = std::str::from_utf8(&buffer[..length])?;
        assert!(message.ends_with(line), "{message} {line}");
    }
    assert_eq!(exporter.ended(PATIENCE)?.code(), Some(0));
    let said = exporter.log();
    assert_eq!(said.lines().count(), 1, "{said}");
    assert!(said.contains("trying again until it is there"), "{said}");
    Ok(())
}
