//! Sockets of the host are closed.

use std::{
    io::{ErrorKind, Read, Write},
    net::{Ipv6Addr, SocketAddr, TcpListener, TcpStream},
    time::Instant,
};

use anyhow::Result;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use twheel_tests::{
    netns::{Namespace, require_root},
    pair::{Family, PORT, Pair, SERVER},
    running::Twheel,
};

use crate::{
    Busy, FAMILIES, HOST, IDLE, LEGS, Lab, actions, allow_descriptors, count, is_open, millis,
    peek, read_error, run,
};

/// Opens idle connections from a host that then disappears without telling the server. Returns the
/// server's ends.
fn abandoned(lab: &mut Lab, count: usize) -> Result<Vec<TcpStream>> {
    let connections = lab.connect_some(2, count)?;
    // When its sockets are closed, its segments reach nobody.
    lab.router.ip(&format!("link del {}", LEGS[2]))?;
    let (servers, clients): (Vec<_>, Vec<_>) = connections
        .into_iter()
        .map(|it| (it.server, it.client))
        .unzip();
    drop(clients);
    drop(lab.hosts.pop());
    Ok(servers)
}

#[test]
fn sockets_whose_peers_are_gone_are_closed_and_no_others() -> Result<()> {
    require_root();
    allow_descriptors(8192);
    let (timeout, tick) = (millis(3000), millis(100));
    let mut lab = Lab::new(3)?;
    let twheel = run(
        lab.server(),
        HOST,
        &[
            "--timeout",
            "3s",
            "--tick",
            "100ms",
            "--reap",
            "socket",
            "--reap-max-share",
            "100",
        ],
    )?;
    let busy = Busy::start(lab.connect_some(1, 100)?, timeout / 20);
    let idle = abandoned(&mut lab, IDLE)?;
    let silent = Instant::now();
    let said = actions(&twheel, IDLE, timeout + tick + millis(1000))?;
    let took = silent.elapsed();
    for socket in &idle {
        let error = peek(socket).err().map(|error| error.kind());
        assert_eq!(error, Some(ErrorKind::ConnectionAborted));
    }
    assert_eq!(count(&said, "socket", "done"), IDLE);
    // The last action was reported and read this long after the last packet.
    assert!(took <= timeout + tick + millis(1000), "{took:?}");
    println!("{IDLE} sockets closed {took:?} after the last packet of any, timeout {timeout:?}");
    assert_eq!(busy.stop()?.len(), 100);
    // Listening sockets still listen.
    for family in FAMILIES {
        lab.connect(1, family)?.talk()?;
    }
    let ended = twheel.stop()?;
    assert!(
        ended.stderr.contains("1000  socket: done"),
        "{}",
        ended.stderr
    );
    Ok(())
}

#[test]
fn too_large_a_share_pauses_the_reaper_until_sighup() -> Result<()> {
    require_root();
    allow_descriptors(8192);
    let mut lab = Lab::new(3)?;
    let twheel = run(
        lab.server(),
        HOST,
        &["--timeout", "2s", "--reap", "socket", "--metrics", "19436"],
    )?;
    let busy = Busy::start(lab.connect_some(1, 100)?, millis(100));
    let idle = abandoned(&mut lab, 200)?;
    let said = actions(&twheel, 200, millis(3500))?;
    let done = count(&said, "socket", "done");
    // A fifth of 300. Flows that are on their way from the wheels to the reaper do not count as
    // live.
    assert!((20..=60).contains(&done), "{done} of 300 flows were reaped");
    println!("of 300 flows {done} were reaped, then it paused");
    assert_eq!(done + count(&said, "socket", "paused"), 200);
    let stderr = twheel.await_stderr("reaping paused")?;
    assert_eq!(stderr.matches("reaping paused").count(), 1);
    assert_eq!(idle.iter().filter(|it| !is_open(it)).count(), done);
    let metrics = |namespace: &Namespace| {
        namespace.enter(|| {
            let mut stream = TcpStream::connect("127.0.0.1:19436")?;
            stream.write_all(b"GET /metrics HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
            let mut text = String::new();
            stream.read_to_string(&mut text)?;
            Ok(text)
        })
    };
    let text = metrics(lab.server())?;
    assert!(text.contains("\ntwheel_reaper_paused 1\n"), "{text}");
    let counted = format!("\ntwheel_reaped_total{{action=\"socket\",outcome=\"done\"}} {done}\n");
    assert!(text.contains(&counted), "{text}");

    hang_up(&twheel)?;
    twheel.await_stderr("reaping resumed")?;
    assert!(metrics(lab.server())?.contains("\ntwheel_reaper_paused 0\n"));
    let connection = lab.connect(1, Family::V4)?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "socket", "done"), 1, "{said:?}");
    assert!(!is_open(&connection.server));
    busy.stop()?;
    assert_eq!(twheel.stop()?.code(), Some(0));
    Ok(())
}

fn hang_up(twheel: &Twheel) -> Result<()> {
    Ok(kill(
        Pid::from_raw(twheel.pid().try_into()?),
        Signal::SIGHUP,
    )?)
}

#[test]
fn sockets_and_entries_of_other_namespaces_are_found() -> Result<()> {
    require_root();
    let lab = Lab::new(2)?;
    let servers = lab.server().name();
    let twheel = run(
        &lab.router,
        LEGS[0],
        &[
            "--timeout",
            "500ms",
            "--reap",
            "socket",
            "--reap-netns",
            servers,
        ],
    )?;
    let mut connection = lab.connect(1, Family::V6)?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "socket", "done"), 1, "{said:?}");
    assert_eq!(
        read_error(&mut connection.server),
        Some(ErrorKind::ConnectionAborted)
    );
    twheel.stop()?;
    Ok(())
}

#[test]
fn sockets_of_ipv6_that_serve_ipv4_are_closed() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let any = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), PORT + 2);
    let listener = pair.server.enter(|| Ok(TcpListener::bind(any)?))?;
    let twheel = run(
        &pair.server,
        SERVER,
        &["--timeout", "500ms", "--reap", "socket"],
    )?;
    let address = SocketAddr::new(Family::V4.server(), PORT + 2);
    let connect = || {
        let client = pair.client.enter(|| Ok(TcpStream::connect(address)?))?;
        anyhow::Ok((client, listener.accept()?.0))
    };
    let (_client, mut server) = connect()?;
    let said = actions(&twheel, 1, millis(3000))?;
    assert_eq!(count(&said, "socket", "done"), 1, "{said:?}");
    assert_eq!(read_error(&mut server), Some(ErrorKind::ConnectionAborted));
    connect()?;
    twheel.stop()?;
    Ok(())
}
