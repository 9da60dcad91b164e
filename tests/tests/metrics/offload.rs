//! The numbers of timeouts that programs hand over.

use std::{
    io::Write as _,
    net::{TcpListener, TcpStream},
    os::fd::{AsFd as _, BorrowedFd},
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};
use twheel_client::{
    channel::{Channel, Packet},
    protocol::{Op, Request, life},
};
use twheel_tests::{
    directory::Directory,
    netns::{PATIENCE, require_root},
    pair::{Family, Pair, SERVER},
};

use crate::{Watched, millis};

/// Has a timer started, and returns the error number of the answer.
fn start(channel: &Channel, timeout: u32, sockets: &[BorrowedFd<'_>]) -> Result<i32> {
    let mut request = Request::new(Op::Start);
    (request.timeout, request.life) = (timeout, life::DATA_IN | life::DATA_OUT);
    channel.send(1, &[request], sockets)?;
    loop {
        if let Packet::Replies(_, replies) = channel.receive()?.context("twheel has ended")? {
            return Ok(replies[0].error as i32);
        }
    }
}

/// Waits until these numbers of programs, registrations, and ends told as `expired`, `closed` and
/// `unseen` are served.
fn await_numbers(watched: &Watched<'_>, held: [u32; 2], told: [u32; 3]) -> Result<()> {
    let until = Instant::now() + PATIENCE;
    loop {
        let numbers = watched.scrape()?;
        let held_now = ["programs", "registrations"]
            .map(|it| numbers.value(&format!("twheel_offload_{it}"), &[]));
        let told_now = ["expired", "closed", "unseen"]
            .map(|it| numbers.value("twheel_offload_ended_total", &[("outcome", it)]));
        if held_now == held.map(f64::from) && told_now == told.map(f64::from) {
            return Ok(());
        }
        ensure!(Instant::now() < until, "{held_now:?}, {told_now:?}");
        thread::sleep(millis(20));
    }
}

#[test]
fn registrations_programs_ends_and_refusals_are_counted() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("programs")?;
    let path = directory.0.join("offload");
    let offload = path.to_str().context("a path")?;
    let args = ["--tick", "100ms", "--offload", offload];
    let watched = Watched::start(&pair.server, &args)?;
    await_numbers(&watched, [0, 0], [0, 0, 0])?;
    let (channel, other) = (Channel::connect(&path)?, Channel::connect(&path)?);
    let [reset, stays, expires] = [0, 1, 2].map(|number| {
        let mut connection = pair.connect(Family::alternate(number))?;
        connection.talk()?;
        Ok::<_, anyhow::Error>(connection)
    });
    let (reset, stays, expires) = (reset?, stays?, expires?);
    for (connection, timeout) in [(&reset, 60_000), (&stays, 60_000), (&expires, 1_000)] {
        assert_eq!(start(&channel, timeout, &[connection.server.as_fd()])?, 0);
    }
    await_numbers(&watched, [2, 3], [0, 0, 0])?;
    // Its packets pass no interface that is watched: when it seems idle, its socket was not.
    let (mut unseen, _peer) = pair.server.enter(|| {
        let listener = TcpListener::bind("127.0.0.1:0")?;
        let one = TcpStream::connect(listener.local_addr()?)?;
        Ok((one, listener.accept()?.0))
    })?;
    assert_eq!(start(&channel, 1_000, &[unseen.as_fd()])?, 0);
    reset.reset()?;
    for _ in 0..9 {
        thread::sleep(millis(100));
        unseen.write_all(b"!")?;
    }
    await_numbers(&watched, [2, 1], [1, 1, 1])?;

    let sockets = [stays.server.as_fd()];
    assert_eq!(start(&channel, 0, &sockets)?, libc::EINVAL);
    assert_eq!(start(&other, 0, &sockets)?, libc::EINVAL);
    assert_eq!(start(&other, 1, &[])?, libc::EBADF);
    let numbers = watched.scrape()?;
    for (error, count) in [("EINVAL", 2.0), ("EBADF", 1.0)] {
        let labels = [("error", error)];
        let counted = numbers.value("twheel_offload_refused_total", &labels);
        assert_eq!(counted, count, "{error}");
    }
    // What a program has ends with it, and is not told.
    drop(channel);
    await_numbers(&watched, [1, 0], [1, 1, 1])?;
    watched.twheel.stop()?;
    pair.server.check_clean(SERVER)
}
