//! Many sockets, and sockets that come and go.

use std::{
    net::{SocketAddr, TcpStream},
    os::{fd::AsRawFd, unix::process::CommandExt},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use nix::sys::{
    resource::{Resource, setrlimit},
    socket::{
        AddressFamily, SockFlag, SockType, SockaddrStorage, bind, connect, setsockopt, socket,
        sockopt::{Linger, ReuseAddr},
    },
};
use twheel_tests::{netns::PATIENCE, pair::Family};

use super::lab::{
    LATE, Lab, PORT, await_reports, millis, most_descriptors, pid_of, reports, reports_of,
};

const CONNECTIONS: usize = 3_000;

/// Also by a command that may have few descriptors itself.
#[test]
fn thousands_of_sockets_are_each_reported_once() -> Result<()> {
    most_descriptors()?;
    let lab = Lab::new("many")?;
    let twheel = lab.twheel(&[])?;
    let service = lab.serve(&lab.pair.server, PORT, "twice")?;
    let connect = |number| lab.connect(number, PORT);
    let streams: Vec<_> = (0..CONNECTIONS).map(connect).collect::<Result<_>>()?;
    let mut command = lab.command(&["--pid", &pid_of(&service), "--timeout", "3s", "--json"])?;
    let few = || Ok(setrlimit(Resource::RLIMIT_NOFILE, 300, 300)?);
    // SAFETY: between fork and exec the closure makes one system call and allocates nothing.
    unsafe { command.pre_exec(few) };
    let mut idle = lab.idle_by(command)?;
    let begun = Instant::now();
    // Others come and go meanwhile.
    let mut brief = Vec::new();
    while idle.log().lines().count() < CONNECTIONS {
        idle.check()?;
        ensure!(begun.elapsed() < PATIENCE, "{}", idle.log().lines().count());
        brief.push(connect(brief.len())?);
        if brief.len() > 50 {
            brief.clear();
        }
        thread::sleep(millis(5));
    }
    ensure!(begun.elapsed() >= millis(3_000), "early");
    drop(brief);
    thread::sleep(millis(4_000));
    idle.check()?;
    let found = reports(&idle)?;
    assert_eq!(found.len(), CONNECTIONS, "others were idle");
    for stream in &streams {
        assert_eq!(found[&stream.local_addr()?].len(), 1);
    }
    assert_eq!(idle.log().lines().count(), CONNECTIONS, "it has said more");
    twheel.stop().map(drop)
}

/// Opens a connection from a certain port, which is reset when it is closed.
fn connect_from(lab: &Lab, port: u16) -> Result<TcpStream> {
    lab.pair.client.enter(|| {
        let (from, to) = [(Family::V4.client(), port), (Family::V4.server(), PORT)]
            .map(|(address, port)| SockaddrStorage::from(SocketAddr::new(address, port)))
            .into();
        let made = socket(
            AddressFamily::Inet,
            SockType::Stream,
            SockFlag::SOCK_CLOEXEC,
            None,
        )?;
        setsockopt(&made, ReuseAddr, &true)?;
        let (l_onoff, l_linger) = (1, 0);
        setsockopt(&made, Linger, &libc::linger { l_onoff, l_linger })?;
        bind(made.as_raw_fd(), &from)?;
        connect(made.as_raw_fd(), &to).context("cannot connect")?;
        Ok(made.into())
    })
}

#[test]
fn another_connection_of_the_same_endpoints_is_another_one() -> Result<()> {
    let lab = Lab::new("reused")?;
    let twheel = lab.twheel(&[])?;
    let service = lab.serve(&lab.pair.server, PORT, "echo")?;
    let mut idle = lab.idle(&["--pid", &pid_of(&service), "--timeout", "2s"])?;
    let first = connect_from(&lab, 40_000)?;
    // It is registered.
    thread::sleep(millis(1_300));
    drop(first);
    let second = connect_from(&lab, 40_000)?;
    let begun = Instant::now();
    await_reports(&mut idle, &second, 1)?;
    let took = begun.elapsed();
    ensure!(
        took >= millis(2_000) && took < millis(2_000) + LATE,
        "{took:?}"
    );
    drop(second);
    // One that comes after a report is reported, too.
    let third = connect_from(&lab, 40_000)?;
    let begun = Instant::now();
    await_reports(&mut idle, &third, 2)?;
    let took = begun.elapsed();
    ensure!(
        took >= millis(2_000) && took < millis(2_000) + LATE,
        "{took:?}"
    );
    thread::sleep(millis(3_000));
    assert_eq!(reports_of(&idle, &third)?, 2);
    twheel.stop().map(drop)
}
