//! 50,000 connections whose timeouts ten programs hand over, while twheel and other programs are
//! killed.

use std::{
    io::{Read, Write},
    net::TcpStream,
    os::fd::{AsFd, BorrowedFd},
    process::{self, Stdio},
    sync::{
        Barrier, Mutex,
        atomic::{AtomicBool, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use twheel_client::{
    Done, Offload, Options, Outcome, Timer,
    channel::{Channel, Packet},
    protocol::{Op, Reply, Request, life},
};
use twheel_tests::{
    directory::Directory,
    is_long,
    netns::{PATIENCE, require_root},
    offload::{Held, Random, Seen, When, connect_apart, most_descriptors, seed},
    pair::{Connection, Pair, SERVER},
    running::Twheel,
};

const PROGRAMS: usize = 10;
const CONNECTIONS: usize = 50_000;
/// What a program does in a round of 20 ms.
const ACTS: usize = 100;
/// More timers expire, and more are stopped.
const EXPIRED: u64 = 20_000;
const STOPPED: u64 = 10_000;
/// Connections of the programs that are killed.
const OTHERS: usize = 20;
/// A tick of 100 ms, 50 ms, and what a start of twheel takes of both CPUs.
const LATE: Duration = Duration::from_millis(150 + 150);

/// How often twheel is killed, and a program.
fn kills() -> usize {
    if is_long() { 50 } else { 20 }
}

/// Takes what has come.
fn drain(mut socket: &TcpStream) -> Result<()> {
    socket.set_nonblocking(true)?;
    while matches!(socket.read(&mut [0; 64]), Ok(1..)) {}
    Ok(socket.set_nonblocking(false)?)
}

struct Program {
    offload: Offload,
    connections: Vec<Connection>,
    held: Vec<Option<(Timer, Held)>>,
    random: Random,
    seen: Seen,
    /// How many timers twheel has kept when that was looked at, and how many were held.
    offloaded: [u64; 2],
}

impl Program {
    fn act(&mut self) -> Result<()> {
        for _ in 0..ACTS {
            let at = self.random.below(self.connections.len() as u64) as usize;
            let choice = self.random.below(8);
            let before = Instant::now();
            let when = |before| -> When { (before, Instant::now()) };
            match (&mut self.held[at], choice) {
                (held @ None, 0..4) => {
                    let options = Options::new(self.random.timeout());
                    let socket = &self.connections[at].server;
                    let timer = self.offload.watch(socket, options, at as u64)?;
                    *held = Some((timer, Held::new(options.timeout, when(before))));
                    self.seen.started += 1;
                }
                // Else its end is in the queue.
                (held @ Some(_), 0) => {
                    let timer = held.as_ref().map(|(timer, _)| *timer);
                    if timer.is_some_and(|timer| self.offload.stop(timer)) {
                        *held = None;
                        self.seen.stopped += 1;
                    }
                }
                (Some((timer, held)), 1) => {
                    let timeout = self.random.timeout();
                    let timeout = (self.random.below(2) == 0).then_some(timeout);
                    if self.offload.restart(*timer, timeout) {
                        held.restart(timeout, when(before));
                        self.seen.restarted += 1;
                    }
                }
                (held, _) => {
                    let connection = &mut self.connections[at];
                    connection.client.write_all(b"!")?;
                    // What is not read fills the receiver's buffer, and then no packet comes.
                    drain(&connection.server)?;
                    if let Some((timer, held)) = held {
                        held.lives(when(before));
                        let is_offloaded = self.offload.is_offloaded(*timer) == Some(true);
                        self.offloaded[0] += u64::from(is_offloaded);
                        self.offloaded[1] += 1;
                    }
                    self.seen.talked += 1;
                }
            }
        }
        Ok(())
    }

    /// Takes what has ended until then.
    fn wait(&mut self, until: Instant) -> Result<()> {
        loop {
            while let Some(done) = self.offload.next() {
                self.take(&done)?;
            }
            if Instant::now() >= until {
                return Ok(());
            }
            thread::sleep(Duration::from_millis(5));
        }
    }

    fn take(&mut self, done: &Done) -> Result<()> {
        let now = Instant::now();
        let held = self.held[done.tag as usize].take();
        let held = held.filter(|(timer, _)| timer.0 == done.timer);
        let (_, held) = held.with_context(|| format!("{done:?} of no timer"))?;
        match done.ended {
            Ok(ended) if ended.outcome == Outcome::Expired => {}
            _ => bail!("{done:?}"),
        }
        let late = held
            .expired(now, LATE)
            .with_context(|| format!("{done:?}"))?;
        ensure!(late <= LATE, "late by {late:?}: {done:?}, {held:?}");
        self.seen.latest = self.seen.latest.max(late);
        self.seen.expired += 1;
        Ok(())
    }

    /// A round.
    fn walk(&mut self) -> Result<()> {
        self.act()?;
        self.wait(Instant::now() + Duration::from_millis(20))
    }

    /// Acts for as long as twheel is killed.
    fn run(mut self, is_killed: &AtomicBool) -> Result<(Seen, [u64; 2])> {
        while is_killed.load(Relaxed) {
            self.walk()?;
        }
        // What twheel keeps while nobody kills it does not count.
        let offloaded = self.offloaded;
        // On a busy machine it takes longer to do as much as the test asks for.
        let end = Instant::now() + PATIENCE;
        while !self.seen.has_done(EXPIRED, STOPPED, PROGRAMS as u64) && Instant::now() < end {
            self.walk()?;
        }
        // Whatever is held now expires, and nothing else.
        for (timer, held) in self.held.iter_mut().flatten() {
            let before = Instant::now();
            let timeout = Some(Duration::from_secs(1));
            if self.offload.restart(*timer, timeout) {
                held.restart(timeout, (before, Instant::now()));
            }
        }
        self.wait(Instant::now() + Duration::from_secs(3))?;
        let left = self.held.iter().flatten().count();
        ensure!(left == 0, "{left} have not expired");
        Ok((self.seen, offloaded))
    }
}

/// Sends requests, and waits for their answers.
fn ask(channel: &Channel, requests: &[Request], sockets: &[BorrowedFd<'_>]) -> Result<Vec<Reply>> {
    channel.send(1, requests, sockets)?;
    match channel.receive()?.context("twheel has ended")? {
        Packet::Replies(_, replies) => Ok(replies),
        packet => bail!("{packet:?}"),
    }
}

/// How many of these connections others have registered.
fn taken(channel: &Channel, connections: &[Connection]) -> Result<usize> {
    let mut start = Request::new(Op::Start);
    (start.timeout, start.life) = (300_000, life::ANY);
    let sockets: Vec<_> = connections.iter().map(|it| it.server.as_fd()).collect();
    let replies = ask(channel, &vec![start; connections.len()], &sockets)?;
    let (ours, others): (Vec<_>, Vec<_>) = replies.iter().partition(|reply| reply.error == 0);
    let is_taken = |reply: &&Reply| reply.error == libc::EEXIST as u32;
    ensure!(others.iter().all(is_taken), "{others:?}");
    let stop = |reply: &&Reply| {
        let mut stop = Request::new(Op::Stop);
        stop.id = reply.id;
        stop
    };
    if !ours.is_empty() {
        let stops: Vec<_> = ours.iter().map(stop).collect();
        let stopped = ask(channel, &stops, &[])?;
        ensure!(stopped.iter().all(|reply| reply.error == 0), "{stopped:?}");
    }
    Ok(others.len())
}

/// Starts a program that registers these connections, and kills it. Nothing of it is left.
fn kill_a_program(pair: &Pair, path: &str, connections: &[Connection]) -> Result<()> {
    let channel = Channel::connect(path.as_ref())?;
    let own = process::id().to_string();
    for _ in 0..10 {
        let args = ["idle", "--pid", &own, "--timeout", "5m", "--offload", path];
        let mut command = pair.server.twheel(&args)?;
        let mut program = command
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        // Asked earlier, this could be what it finds to be registered.
        thread::sleep(Duration::from_millis(400));
        let had = taken(&channel, connections);
        program.kill()?;
        program.wait()?;
        let had = had?;
        let end = Instant::now() + PATIENCE;
        while taken(&channel, connections)? > 0 {
            ensure!(Instant::now() < end, "registrations outlive their program");
            thread::sleep(Duration::from_millis(10));
        }
        if had == connections.len() {
            return Ok(());
        }
    }
    bail!("no program registers the connections");
}

#[test]
fn each_of_many_expires_once_while_twheel_and_programs_are_killed() -> Result<()> {
    require_root();
    most_descriptors()?;
    let (pair, directory) = (Pair::new()?, Directory::new("offload-killed")?);
    let path = directory.0.join("offload");
    let offload = path.to_str().context("a path")?;
    let table = [
        "--iface",
        SERVER,
        "--max-flows",
        "131072",
        "--tick",
        "100ms",
    ];
    let args = [&table[..], &["--keep", "--offload", offload]].concat();
    let twheel = Twheel::start_muted(&pair.server, &args)?;
    let others = pair.connect_some(OTHERS)?;
    let (turn, all_opened) = (Mutex::new(()), Barrier::new(PROGRAMS + 1));
    let (seed, is_killed) = (seed()?, AtomicBool::new(true));
    let program = |number: usize| {
        let connections = connect_apart(&pair, CONNECTIONS / PROGRAMS, &turn);
        all_opened.wait();
        let connections = connections?;
        let program = Program {
            offload: Offload::at(&path)?,
            held: connections.iter().map(|_| None).collect(),
            connections,
            random: Random(seed.wrapping_add(number as u64)),
            seen: Seen::default(),
            offloaded: [0; 2],
        };
        program.run(&is_killed)
    };
    let (twheel, sum, offloaded) = thread::scope(|scope| -> Result<_> {
        let threads: Vec<_> = (0..PROGRAMS)
            .map(|number| scope.spawn(move || program(number)))
            .collect();
        all_opened.wait();
        let begun = Instant::now();
        let killed = || -> Result<Twheel> {
            let mut twheel = twheel;
            for _ in 0..kills() {
                kill_a_program(&pair, offload, &others)?;
                twheel.kill()?;
                twheel = Twheel::start_muted(&pair.server, &args)?;
            }
            Ok(twheel)
        };
        let killed = killed();
        is_killed.store(false, Relaxed);
        println!("{} kills in {:?}", kills(), begun.elapsed());
        let (mut sum, mut offloaded) = (Seen::default(), [0; 2]);
        for thread in threads {
            let (seen, kept) = thread.join().expect("a thread panicked")?;
            sum.add(&seen);
            offloaded = [offloaded[0] + kept[0], offloaded[1] + kept[1]];
        }
        Ok((killed?, sum, offloaded))
    })?;
    println!("{sum:?}, offloaded {offloaded:?}");
    assert_eq!(sum.started, sum.stopped + sum.expired);
    assert!(sum.expired > EXPIRED && sum.stopped > STOPPED, "{sum:?}");
    // twheel keeps them again soon after each start.
    assert!(offloaded[0] * 2 > offloaded[1], "{offloaded:?}");
    twheel.stop()?;
    let detached = pair.server.twheel_once(&["detach", "--iface", SERVER])?;
    assert_eq!(detached.code(), Some(0), "{}", detached.stderr);
    pair.server.check_clean(SERVER)
}
