//! What cannot be watched: wrong arguments, missing rights, connections that twheel refuses.

use std::{
    fs,
    io::{self, Read, Write},
    net::{SocketAddr, TcpStream},
    process::Command,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::{
    sys::signal::Signal,
    unistd::{Gid, Group},
};
use twheel_tests::{
    netns::{PATIENCE, program},
    running::{Ended, once, twheel_bin},
};

use super::lab::{
    LATE, Lab, NOBODY, PORT, await_reports, millis, pid_of, reports, reports_of, talk,
};

fn refused(ended: &Ended, code: i32, texts: &[&str]) {
    assert_eq!(ended.code(), Some(code), "{}", ended.stderr);
    for text in texts {
        assert!(ended.stderr.contains(text), "{text:?}: {}", ended.stderr);
    }
}

#[test]
fn wrong_arguments_are_refused() -> Result<()> {
    let lab = Lab::new("wrong")?;
    let refuse = |args: &[&str], code, texts: &[&str]| -> Result<()> {
        refused(&once(lab.command(args)?)?, code, texts);
        Ok(())
    };
    let service = lab.serve(&lab.pair.server, PORT, "echo")?;
    let pid = &pid_of(&service);
    // No twheel runs.
    let socket = lab.socket();
    let none = ["cannot connect to twheel at", &socket, "start `twheel run`"];
    refuse(&["--pid", pid, "--timeout", "1s"], 1, &none)?;
    let twheel = lab.twheel(&[])?;
    refuse(&["--timeout", "1s"], 2, &["--pid"])?;
    refuse(&["--pid", pid], 2, &["--timeout"])?;
    refuse(&["--pid", pid, "--timeout", "0s"], 2, &["at least 1ms"])?;
    refuse(&["--pid", pid, "--timeout", "11d"], 2, &["longer than"])?;
    refuse(&["--pid", pid, "--timeout", "60"], 2, &["unit"])?;
    refuse(&["--pid", "x", "--timeout", "1s"], 2, &["--pid"])?;
    let life = ["--life", "none"];
    refuse(
        &[&["--pid", pid, "--timeout", "1s"][..], &life].concat(),
        2,
        &["data-in"],
    )?;
    let mut ended = Command::new("true").spawn()?;
    ended.wait()?;
    let ended = &ended.id().to_string();
    // Also beside one that is running.
    refuse(
        &["--pid", pid, "--pid", ended, "--timeout", "1s"],
        1,
        &[ended, "pgrep"],
    )?;
    refuse(&["--pid", "0", "--timeout", "1s"], 1, &["pgrep"])?;
    let directory = lab.directory.path();
    refuse(
        &["--cgroup", directory, "--timeout", "1s"],
        1,
        &["cannot read", directory, "/sys/fs/cgroup"],
    )?;
    twheel.stop().map(drop)
}

/// Another user may have the sockets of its own processes, if it may speak with twheel.
#[test]
fn rights_are_those_of_a_debugger() -> Result<()> {
    let lab = Lab::new("rights")?;
    // The way to the program that was built may be closed to others.
    let own = lab.directory.file("twheel");
    fs::copy(twheel_bin()?, &own)?;
    let socket = lab.socket();
    let command = |pid: &str| -> Result<Command> {
        let mut command = lab.pair.server.command(program("setpriv"))?;
        let nobody = NOBODY.to_string();
        let user = ["--reuid", &nobody, "--regid", &nobody, "--clear-groups"];
        command
            .args(user)
            .args([&own, "idle", "--offload", &socket]);
        command.args(["--pid", pid, "--timeout", "500ms", "--json"]);
        Ok(command)
    };
    let service = lab.serve(&lab.pair.server, PORT, "echo")?;
    let theirs = lab.serve(&lab.pair.server, PORT + 1, "nobody")?;
    let (_one, stream) = (lab.connect(0, PORT)?, lab.connect(0, PORT + 1)?);

    let twheel = lab.twheel(&[])?;
    let texts = ["cannot connect", &socket, "as root", "--group"];
    refused(&once(command(&pid_of(&theirs))?)?, 3, &texts);
    twheel.stop()?;

    let group = Group::from_gid(Gid::from_raw(NOBODY))?.context("no group of nobody")?;
    let twheel = lab.twheel(&["--group", &group.name])?;
    let pid = pid_of(&service);
    let texts = [
        "cannot take the sockets of process",
        &pid,
        "run this as root",
    ];
    refused(&once(command(&pid)?)?, 3, &texts);
    let mut idle = lab.idle_by(command(&pid_of(&theirs))?)?;
    await_reports(&mut idle, &stream, 1)?;
    twheel.stop().map(drop)
}

#[test]
fn a_connection_that_twheel_does_not_see_is_watched_by_the_kernels_times() -> Result<()> {
    let lab = Lab::new("unseen")?;
    let twheel = lab.twheel(&[])?;
    // By `lo`, and busy; and one of the other host's.
    let service = lab.serve(&lab.pair.server, PORT, "echo")?;
    let other = lab.serve(&lab.pair.client, PORT, "echo")?;
    let local: SocketAddr = format!("127.0.0.1:{PORT}").parse()?;
    let open = || Ok(TcpStream::connect(local)?);
    let (mut stream, _elsewhere) = (
        lab.pair.server.enter(open)?,
        [lab.pair.client.enter(open)?, lab.pair.client.enter(open)?],
    );
    let seen = lab.connect(0, PORT)?;
    let (pid, elsewhere) = (pid_of(&service), pid_of(&other));
    let args = ["--pid", &pid, "--pid", &elsewhere, "--timeout", "600ms"];
    let mut idle = lab.idle(&args)?;
    let begun = Instant::now();
    while begun.elapsed() < millis(4_000) {
        stream.write_all(b"!")?;
        stream.read_exact(&mut [0])?;
        thread::sleep(millis(50));
    }
    let log = idle.log();
    let count = |text: &str| log.matches(text).count();
    let unseen = format!(
        "{local} -> {} of process {pid}: the running twheel cannot tell",
        stream.local_addr()?
    );
    assert_eq!(count(&unseen), 1, "{log}");
    assert_eq!(count("cannot tell"), 1, "{log}");
    assert_eq!(count("another network namespace"), 1, "{log}");
    assert_eq!(
        count(&format!("of process {elsewhere} is not watched")),
        1,
        "{log}"
    );
    assert_eq!(reports_of(&idle, &seen)?, 1);
    assert_eq!(reports(&idle)?.len(), 1, "{log}");
    let last = Instant::now();
    await_reports(&mut idle, &stream, 1)?;
    ensure!(last.elapsed() < millis(600) + LATE, "late");
    let report = &reports(&idle)?[&stream.local_addr()?][0];
    ensure!(
        report["idle_us"].as_u64().context("no idle_us")? >= 600_000,
        "{report}"
    );
    idle.check()?;
    twheel.stop().map(drop)
}

/// Its packets are acknowledged all the time, which is not what counts as its life.
#[test]
fn a_connection_that_twheel_does_not_see_is_ended() -> Result<()> {
    let lab = Lab::new("unseen-ended")?;
    let twheel = lab.twheel(&[])?;
    for (port, action, end) in [
        (PORT, "shutdown", "end of file"),
        (PORT + 1, "destroy", "ConnectionReset"),
    ] {
        let mut service = lab.serve(&lab.pair.server, port, "sink")?;
        let open = || Ok(TcpStream::connect(("127.0.0.1", port))?);
        let stream = lab.pair.server.enter(open)?;
        let args = [
            "--pid",
            &pid_of(&service),
            "--timeout",
            "1500ms",
            "--life",
            "data-out",
            "--action",
            action,
        ];
        let begun = Instant::now();
        let mut idle = lab.idle(&args)?;
        stream.set_read_timeout(Some(millis(50)))?;
        let talk = |mut stream: &TcpStream| {
            stream.write_all(b"!")?;
            stream.read(&mut [0])
        };
        while talk(&stream).is_err_and(|error| error.kind() == io::ErrorKind::WouldBlock) {
            ensure!(begun.elapsed() < PATIENCE, "{action}: {}", idle.log());
        }
        let took = begun.elapsed();
        ensure!(took >= millis(1_500), "{action}: early: {took:?}");
        ensure!(took < millis(1_500) + LATE, "{action}: late: {took:?}");
        service.await_text(end)?;
        await_reports(&mut idle, &stream, 1)?;
    }
    twheel.stop().map(drop)
}

#[test]
fn a_connection_that_is_refused_is_tried_again() -> Result<()> {
    let lab = Lab::new("again")?;
    let twheel = lab.twheel(&["--offload-limit", "2"])?;
    let service = lab.serve(&lab.pair.server, PORT, "echo")?;
    let pid = pid_of(&service);
    let first = lab.connect(0, PORT)?;
    let mut holder = lab.idle(&["--pid", &pid, "--timeout", "1h"])?;
    thread::sleep(millis(1_500));
    let mut idle = lab.idle(&["--pid", &pid, "--timeout", "1s"])?;
    idle.await_text("a timer of another program")?;
    // One of these has room.
    let more = [lab.connect(0, PORT)?, lab.connect(1, PORT)?];
    let end = Instant::now() + PATIENCE;
    while !holder.log().contains("--offload-limit") && !idle.log().contains("--offload-limit") {
        ensure!(Instant::now() < end, "{}", idle.log());
        thread::sleep(millis(20));
    }
    holder.signal(Signal::SIGINT)?;
    holder.ended(PATIENCE)?;
    for stream in more.iter().chain([&first]) {
        await_reports(&mut idle, stream, 1)?;
    }
    for stream in [&first, &more[0]] {
        talk(stream)?;
        await_reports(&mut idle, stream, 2)?;
    }
    for log in [holder.log(), idle.log()] {
        for what in ["a timer of another program", "--offload-limit"] {
            ensure!(log.matches(what).count() <= 1, "{log}");
        }
    }
    twheel.stop().map(drop)
}
