//! Timeouts that programs hand over for their connections: `twheel run --offload`.

use std::{
    collections::HashMap,
    io,
    net::{TcpListener, TcpStream, UdpSocket},
    os::fd::{AsFd, BorrowedFd},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sys::socket::{setsockopt, sockopt};
use twheel_client::{
    Action, Offload, Options, Outcome,
    channel::{Channel, Packet},
    protocol::{Event, Op, Reply, Request, TAGGED, life},
};
use twheel_tests::{
    directory::Directory,
    netns::{PATIENCE, require_root},
    pair::{Connection, Family, Pair, SERVER},
    running::Twheel,
};

const DATA: u8 = life::DATA_IN | life::DATA_OUT;
/// A tick, and what two processes may take to run.
const LATE: Duration = Duration::from_millis(100 + 50);

fn millis(number: u64) -> Duration {
    Duration::from_millis(number)
}

/// A pair with a twheel on the server, and a directory with the twheel's socket.
struct Lab {
    pair: Pair,
    directory: Directory,
}

impl Lab {
    fn new(name: &str) -> Result<Self> {
        require_root();
        Ok(Self {
            pair: Pair::new()?,
            directory: Directory::new(name)?,
        })
    }

    fn path(&self) -> std::path::PathBuf {
        self.directory.0.join("offload")
    }

    fn twheel(&self, more: &[&str]) -> Result<Twheel> {
        let path = self.path();
        let path = path.to_str().context("a path")?;
        let args = ["--iface", SERVER, "--tick", "100ms", "--offload", path];
        Twheel::start(&self.pair.server, &[&args[..], more].concat())
    }

    fn channel(&self) -> Result<Channel> {
        Channel::connect(&self.path()).context("cannot connect to twheel")
    }

    fn connect(&self, number: usize) -> Result<Connection> {
        let mut connection = self.pair.connect(Family::alternate(number))?;
        connection.talk()?;
        Ok(connection)
    }
}

fn start(timeout: u32, life: u8, tag: u64) -> Request {
    let mut request = Request::new(Op::Start);
    (request.timeout, request.life, request.tag) = (timeout, life, tag);
    request
}

/// Sends requests and waits for their answers. Events that come before them are lost.
fn ask(channel: &Channel, requests: &[Request], sockets: &[BorrowedFd<'_>]) -> Result<Vec<Reply>> {
    channel.send(7, requests, sockets)?;
    loop {
        match channel.receive()?.context("twheel has ended")? {
            Packet::Replies(number, replies) => {
                ensure!(
                    number == 7 && replies.len() == requests.len(),
                    "{replies:?}"
                );
                return Ok(replies);
            }
            Packet::Events(_) => {}
        }
    }
}

/// Starts a timer.
fn started(channel: &Channel, request: Request, socket: &impl AsFd) -> Result<Reply> {
    let [reply] = ask(channel, &[request], &[socket.as_fd()])?[..] else {
        anyhow::bail!("not one reply");
    };
    ensure!(
        reply.error == 0,
        "{:?}",
        io::Error::from_raw_os_error(reply.error as i32)
    );
    Ok(reply)
}

/// The next events.
fn events(channel: &Channel) -> Result<Vec<Event>> {
    match channel.receive()?.context("twheel has ended")? {
        Packet::Events(events) => Ok(events),
        packet => anyhow::bail!("{packet:?}"),
    }
}

#[test]
fn a_connection_expires_when_its_own_timeout_has_passed() -> Result<()> {
    let lab = Lab::new("offload")?;
    let twheel = lab.twheel(&[])?;
    let channel = lab.channel()?;
    let mut connection = lab.connect(0)?;
    let reply = started(&channel, start(600, DATA, 42), &connection.server)?;
    // Longer than the timeout, but never idle for so long.
    let mut last = Instant::now();
    for _ in 0..10 {
        thread::sleep(millis(100));
        last = Instant::now();
        connection.talk()?;
    }
    let talked = Instant::now();
    let [event] = events(&channel)?[..] else {
        anyhow::bail!("not one event");
    };
    let (least, most) = (talked.elapsed(), last.elapsed());
    ensure!(least >= millis(600), "early: {least:?}");
    ensure!(most <= millis(600) + LATE, "late: {most:?}");
    assert_eq!((event.what, event.tag), (Outcome::Expired as u32, 42));
    assert_eq!((event.id, event.cookie), (reply.id, reply.cookie));
    ensure!(event.idle >= 600, "{event:?}");
    // The flow goes on by its rule, and can be registered again.
    connection.talk()?;
    started(&channel, start(60_000, DATA, 43), &connection.server)?;
    drop(channel);
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    lab.pair.server.check_clean(SERVER)
}

#[test]
fn only_what_counts_keeps_a_connection_alive() -> Result<()> {
    let lab = Lab::new("life")?;
    let twheel = lab.twheel(&[])?;
    let channel = lab.channel()?;
    let mut connections = Vec::new();
    // The client talks, and the server only acknowledges.
    for (tag, counts) in [life::DATA_IN, life::DATA_OUT, life::ANY, DATA]
        .into_iter()
        .enumerate()
    {
        let connection = lab.connect(tag)?;
        started(&channel, start(500, counts, tag as u64), &connection.server)?;
        connections.push(connection);
    }
    let end = Instant::now() + millis(900);
    while Instant::now() < end {
        connections.iter_mut().try_for_each(Connection::talk)?;
        thread::sleep(millis(20));
    }
    let tags = |events: Vec<Event>| events.iter().map(|it| it.tag).collect::<Vec<_>>();
    assert_eq!(
        tags(events(&channel)?),
        [1],
        "no data has come from the server"
    );
    let mut rest = Vec::new();
    while rest.len() < 3 {
        rest.extend(tags(events(&channel)?));
    }
    rest.sort_unstable();
    assert_eq!(rest, [0, 2, 3]);
    twheel.stop().map(drop)
}

/// The packet that tells twheel the sequence numbers counts, as those after it.
#[test]
fn the_first_data_of_an_entered_connection_counts() -> Result<()> {
    let lab = Lab::new("entered")?;
    let mut connections = [lab.connect(0)?, lab.connect(1)?];
    let twheel = lab.twheel(&[])?;
    let channel = lab.channel()?;
    let counts = [life::DATA_IN, DATA];
    for (tag, connection) in connections.iter().enumerate() {
        let start = start(700, counts[tag], tag as u64);
        started(&channel, start, &connection.server)?;
    }
    thread::sleep(millis(400));
    let before = Instant::now();
    connections.iter_mut().try_for_each(Connection::talk)?;
    let (after, mut rest) = (Instant::now(), 2);
    while rest > 0 {
        rest -= events(&channel)?.len();
        let (least, most) = (after.elapsed(), before.elapsed());
        ensure!(least >= millis(700), "early: {least:?}");
        ensure!(most <= millis(700) + LATE, "late: {most:?}");
    }
    twheel.stop()?;
    lab.pair.server.check_clean(SERVER)
}

#[test]
fn a_timer_is_restarted_and_stopped() -> Result<()> {
    let lab = Lab::new("again")?;
    let twheel = lab.twheel(&[])?;
    let channel = lab.channel()?;
    let connections = [lab.connect(0)?, lab.connect(1)?, lab.connect(2)?];
    let mut ids = Vec::new();
    for (tag, connection) in connections.iter().enumerate() {
        ids.push(started(&channel, start(500, DATA, tag as u64), &connection.server)?.id);
    }
    thread::sleep(millis(300));
    let about = |op, id, timeout| {
        let mut request = Request::new(op);
        (request.id, request.timeout) = (id, timeout);
        request
    };
    let restarted = Instant::now();
    let requests = [
        about(Op::Restart, ids[0], 0),
        about(Op::Restart, ids[1], 1_000),
        about(Op::Stop, ids[2], 0),
    ];
    let replies = ask(&channel, &requests, &[])?;
    assert!(replies.iter().all(|reply| reply.error == 0), "{replies:?}");
    let mut ended = HashMap::new();
    while ended.len() < 2 {
        for event in events(&channel)? {
            ended.insert(event.tag, restarted.elapsed());
        }
    }
    for (tag, timeout) in [(0, 500), (1, 1_000)] {
        let took = ended[&tag];
        ensure!(
            took >= millis(timeout) && took <= millis(timeout) + LATE,
            "{tag}: {took:?}"
        );
    }
    // Nothing is left of the one that was stopped.
    thread::sleep(millis(300));
    let again = ask(
        &channel,
        &[about(Op::Stop, ids[2], 0), about(Op::Restart, ids[0], 0)],
        &[],
    )?;
    assert!(
        again.iter().all(|reply| reply.error == libc::ENOENT as u32),
        "{again:?}"
    );
    twheel.stop().map(drop)
}

#[test]
fn a_timer_that_is_named_by_its_tag_is_not_taken_for_the_next() -> Result<()> {
    let lab = Lab::new("tagged")?;
    let twheel = lab.twheel(&[])?;
    let channel = lab.channel()?;
    let connection = lab.connect(0)?;
    let about = |op, id, tag| {
        let mut request = Request::new(op);
        (request.id, request.tag, request.timeout) = (id, tag, 500);
        request.flags = TAGGED;
        request
    };
    let first = started(&channel, start(60_000, DATA, 1), &connection.server)?;
    let stop = about(Op::Stop, first.id, 1);
    assert_eq!(ask(&channel, &[stop], &[])?[0].error, 0);
    let second = started(&channel, start(60_000, DATA, 2), &connection.server)?;
    assert_eq!(first.id, second.id);
    for op in [Op::Stop, Op::Restart] {
        let late = about(op, second.id, 1);
        assert_eq!(ask(&channel, &[late], &[])?[0].error as i32, libc::ENOENT);
    }
    let restart = about(Op::Restart, second.id, 2);
    assert_eq!(ask(&channel, &[restart], &[])?[0].error, 0);
    let told = events(&channel)?;
    assert_eq!((told[0].tag, told[0].what), (2, Outcome::Expired as u32));
    twheel.stop().map(drop)
}

#[test]
fn the_end_of_a_connection_is_told() -> Result<()> {
    let lab = Lab::new("closed")?;
    let twheel = lab.twheel(&[])?;
    let channel = lab.channel()?;
    let connection = lab.connect(0)?;
    started(&channel, start(60_000, DATA, 5), &connection.server)?;
    connection.reset()?;
    let begun = Instant::now();
    let [event] = events(&channel)?[..] else {
        anyhow::bail!("not one event");
    };
    assert_eq!((event.what, event.tag), (Outcome::Closed as u32, 5));
    // A reset flow stays for its state's timeout.
    ensure!(
        begun.elapsed() < Duration::from_secs(15),
        "{:?}",
        begun.elapsed()
    );
    twheel.stop().map(drop)
}

#[test]
fn what_cannot_be_registered_is_refused() -> Result<()> {
    let lab = Lab::new("refused")?;
    let twheel = lab.twheel(&["--offload-limit", "2"])?;
    let channel = lab.channel()?;
    let connection = lab.connect(0)?;
    let good = start(60_000, DATA, 1);
    let error = |request: Request, socket: BorrowedFd<'_>| -> Result<i32> {
        Ok(ask(&channel, &[request], &[socket])?[0].error as i32)
    };
    let server = connection.server.as_fd();
    for (what, change) in [
        (
            "no timeout",
            (|it: &mut Request| it.timeout = 0) as fn(&mut Request),
        ),
        ("a timeout that is too long", |it| it.timeout = u32::MAX),
        ("nothing counts", |it| it.life = 0),
        ("an unknown bit of life", |it| it.life = 8),
        ("an unknown action", |it| it.action = 3),
    ] {
        let mut bad = good;
        change(&mut bad);
        assert_eq!(error(bad, server)?, libc::EINVAL, "{what}");
    }
    let unknown = Request { op: 9, ..good };
    assert_eq!(error(unknown, server)?, libc::EOPNOTSUPP);
    assert_eq!(ask(&channel, &[good], &[])?[0].error as i32, libc::EBADF);
    let (unconnected, udp) = lab.pair.server.enter(|| {
        Ok((
            TcpListener::bind("127.0.0.1:0")?,
            UdpSocket::bind("127.0.0.1:0")?,
        ))
    })?;
    assert_eq!(error(good, unconnected.as_fd())?, libc::ENOTCONN);
    assert_eq!(error(good, udp.as_fd())?, libc::EPROTOTYPE);
    let null = std::fs::File::open("/dev/null")?;
    assert_eq!(error(good, null.as_fd())?, libc::ENOTSOCK);
    // The other end is in another network namespace.
    assert_eq!(error(good, connection.client.as_fd())?, libc::EXDEV);
    let first = started(&channel, good, &connection.server)?;
    assert_eq!(error(good, server)?, libc::EEXIST);

    // Another program can neither stop nor restart it, nor learn of it.
    let other = lab.channel()?;
    for op in [Op::Stop, Op::Restart] {
        let mut request = Request::new(op);
        request.id = first.id;
        assert_eq!(ask(&other, &[request], &[])?[0].error as i32, libc::ENOENT);
    }
    let mut forged = Request::new(Op::Reclaim);
    (forged.id, forged.cookie, forged.token) = (first.id, first.cookie, first.token ^ 1);
    (forged.timeout, forged.life) = (1_000, DATA);
    assert_eq!(ask(&other, &[forged], &[])?[0].error as i32, libc::EPERM);
    forged.token ^= 1;
    assert_eq!(ask(&other, &[forged], &[])?[0].error as i32, libc::EEXIST);

    // What a user may hold counts for all its programs.
    let second = lab.connect(1)?;
    let third = lab.connect(2)?;
    started(&other, good, &second.server)?;
    assert_eq!(error(good, third.server.as_fd())?, libc::EDQUOT);
    drop(other);
    let until = Instant::now() + PATIENCE;
    while error(good, third.server.as_fd())? != 0 {
        ensure!(
            Instant::now() < until,
            "what a program had is not given back"
        );
        thread::sleep(millis(20));
    }
    twheel.stop().map(drop)
}

/// The `--keep` of a run that is killed, and one that follows.
#[test]
fn registrations_outlive_a_twheel_that_is_killed() -> Result<()> {
    let lab = Lab::new("killed")?;
    let twheel = lab.twheel(&["--keep"])?;
    let offload = Offload::at(lab.path())?;
    let connections = [lab.connect(0)?, lab.connect(1)?];
    let mut timers = Vec::new();
    for connection in &connections {
        timers.push(offload.start(&connection.server, millis(3_000)).wait()?);
    }
    let begun = Instant::now();
    ensure!(
        timers.iter().all(|it| it.is_offloaded()),
        "they are not offloaded"
    );
    twheel.kill()?;
    let twheel = lab.twheel(&["--keep"])?;
    let until = Instant::now() + millis(1_500);
    while !timers.iter().all(|it| it.is_offloaded()) {
        ensure!(Instant::now() < until, "they are not reclaimed");
        thread::sleep(millis(10));
    }
    for timer in &timers {
        let ended = timer.wait()?;
        assert_eq!(ended.outcome, Outcome::Expired);
        ensure!(ended.idle >= millis(3_000), "{ended:?}");
    }
    let took = begun.elapsed();
    ensure!(took <= millis(3_000) + LATE + millis(50), "late: {took:?}");
    let ended = twheel.stop()?;
    assert_eq!(ended.code(), Some(0), "{}", ended.stderr);
    let detached = lab
        .pair
        .server
        .twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(detached.code(), Some(0), "{}", detached.stderr);
    lab.pair.server.check_clean(SERVER)
}

#[test]
fn without_twheel_the_program_keeps_its_timers() -> Result<()> {
    let lab = Lab::new("without")?;
    let offload = Offload::at(lab.path())?;
    let mut connection = lab.connect(0)?;
    let timer = offload.start(&connection.server, millis(400)).wait()?;
    ensure!(!timer.is_offloaded(), "there is no twheel");
    for _ in 0..6 {
        thread::sleep(millis(100));
        connection.talk()?;
    }
    let talked = Instant::now();
    let ended = timer.wait()?;
    let took = talked.elapsed();
    assert_eq!(ended.outcome, Outcome::Expired);
    ensure!(
        took >= millis(395) && took <= millis(400) + LATE,
        "{took:?}"
    );

    // A twheel that comes takes over.
    let timer = offload.start(&connection.server, millis(2_000)).wait()?;
    let twheel = lab.twheel(&[])?;
    let until = Instant::now() + millis(1_800);
    while !timer.is_offloaded() {
        ensure!(Instant::now() < until, "twheel does not take over");
        thread::sleep(millis(10));
    }
    assert_eq!(timer.wait()?.outcome, Outcome::Expired);
    // A connection that twheel does not see is not taken for idle.
    let (one, _other) = lab.pair.server.enter(|| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let one = TcpStream::connect(listener.local_addr()?)?;
        Ok((one, listener.accept()?.0))
    })?;
    let timer = offload.start(&one, millis(300)).wait()?;
    let begun = Instant::now();
    while begun.elapsed() < millis(1_000) {
        io::Write::write_all(&mut &one, b"!")?;
        thread::sleep(millis(20));
    }
    let wrote = Instant::now();
    assert_eq!(timer.wait()?.outcome, Outcome::Expired);
    ensure!(wrote.elapsed() >= millis(270), "{:?}", wrote.elapsed());
    twheel.stop().map(drop)
}

/// The key of its flow has a zone, and its socket does not say which.
#[test]
fn a_connection_in_a_zone_is_not_taken_for_idle() -> Result<()> {
    let lab = Lab::new("zone")?;
    let twheel = lab.twheel(&["--zone", &format!("{SERVER}=7")])?;
    let channel = lab.channel()?;
    let mut connections = [lab.connect(0)?, lab.connect(1)?];
    // As the sockets of a VRF are: without the interface the kernel does not find it.
    setsockopt(
        &connections[1].server,
        sockopt::BindToDevice,
        &SERVER.into(),
    )?;
    for (tag, connection) in connections.iter().enumerate() {
        let request = start(600, DATA, tag as u64);
        let mut stop = Request::new(Op::Stop);
        stop.id = started(&channel, request, &connection.server)?.id;
        // Stopped and started at once: the flow that was entered is still there.
        let replies = ask(&channel, &[stop, request], &[connection.server.as_fd()])?;
        ensure!(replies.iter().all(|it| it.error == 0), "{replies:?}");
    }
    let until = Instant::now() + millis(900);
    while Instant::now() < until {
        connections.iter_mut().try_for_each(Connection::talk)?;
        thread::sleep(millis(20));
    }
    let mut told = Vec::new();
    while told.len() < 2 {
        told.extend(events(&channel)?.iter().map(|it| (it.tag, it.what)));
    }
    told.sort_unstable();
    let unseen = Outcome::Unseen as u32;
    assert_eq!(told, [(0, unseen), (1, unseen)]);
    // With the client library, the program keeps the timers.
    let offload = Offload::at(lab.path())?;
    let timer = offload.start(&connections[1].server, millis(600)).wait()?;
    ensure!(timer.is_offloaded(), "it is not offloaded");
    let until = Instant::now() + millis(900);
    let mut talked = Instant::now();
    while Instant::now() < until {
        talked = Instant::now();
        connections[1].talk()?;
        thread::sleep(millis(20));
    }
    ensure!(!timer.is_offloaded(), "it is offloaded");
    assert_eq!(timer.wait()?.outcome, Outcome::Expired);
    ensure!(talked.elapsed() >= millis(590), "{:?}", talked.elapsed());
    twheel.stop()?;
    lab.pair.server.check_clean(SERVER)
}

#[test]
fn an_idle_connection_is_shut_down_or_destroyed() -> Result<()> {
    let lab = Lab::new("actions")?;
    let twheel = lab.twheel(&[])?;
    let offload = Offload::at(lab.path())?;
    for (number, action) in [Action::Shutdown, Action::Destroy].into_iter().enumerate() {
        let connection = lab.connect(number)?;
        let options = Options {
            action,
            ..Options::new(millis(300))
        };
        let timer = offload.start_with(&connection.server, options).wait()?;
        ensure!(timer.is_offloaded(), "{action:?}");
        assert_eq!(timer.wait()?.outcome, Outcome::Expired);
        let read = io::Read::read(&mut &connection.client, &mut [0]);
        match action {
            Action::Destroy => {
                let error = read.expect_err("an end in order");
                assert_eq!(error.kind(), io::ErrorKind::ConnectionReset);
            }
            _ => assert_eq!(read?, 0),
        }
    }
    twheel.stop().map(drop)
}
