//! 50,000 connections of an echo server, whose timeouts ten programs hand over, restart and stop at
//! random. At the end those that are left begin anew with one of 1 s; in the long run
//! (`TWHEEL_LONG`) they go on, for up to 5 min.
//!
//! A process may have fewer descriptors than these connections have ends. So each program is a
//! thread with descriptors of its own.

use std::{
    io::{Read, Write},
    os::fd::{AsFd, BorrowedFd},
    path::Path,
    sync::{Barrier, Mutex},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use twheel_client::{
    Outcome,
    channel::{Channel, Packet},
    protocol::{Event, Op, Request, life},
};
use twheel_tests::{
    directory::Directory,
    is_long,
    netns::require_root,
    offload::{Held, Random, Seen, connect_apart, most_descriptors},
    pair::{Connection, Pair, SERVER},
    running::Twheel,
};

const PROGRAMS: usize = 10;
const CONNECTIONS: usize = 50_000;
/// For how long they act at random, at most.
const WALK: Duration = Duration::from_secs(20);
/// For how long they do so if that is enough for what the test asks for.
const SHORT_WALK: Duration = Duration::from_secs(10);
/// More timers expire, and more are stopped.
const EXPIRED: u64 = 20_000;
const STOPPED: u64 = 10_000;
/// A tick of 100 ms, and 50 ms.
const LATE: Duration = Duration::from_millis(150);
fn millis(number: u32) -> Duration {
    Duration::from_millis(number.into())
}

/// A registration: its tag, its id, and its timer.
struct Registered {
    tag: u64,
    id: u64,
    timer: Held,
}

struct Program {
    channel: Channel,
    connections: Vec<Connection>,
    held: Vec<Option<Registered>>,
    serial: u64,
    random: Random,
    seen: Seen,
}

impl Program {
    fn new(path: &Path, connections: Vec<Connection>, seed: u64) -> Result<Self> {
        Ok(Self {
            channel: Channel::connect(path).context("cannot connect to twheel")?,
            held: connections.iter().map(|_| None).collect(),
            connections,
            serial: 0,
            random: Random(seed),
            seen: Seen::default(),
        })
    }

    /// Acts on some connections at random.
    fn act(&mut self) -> Result<()> {
        let mut asked: Vec<(usize, Request)> = Vec::new();
        for _ in 0..100 {
            let at = self.random.below(self.connections.len() as u64) as usize;
            if asked.iter().any(|(other, _)| *other == at) {
                continue;
            }
            let request = match (&self.held[at], self.random.below(8)) {
                (None, 0..4) => self.start(at),
                (Some(held), 0) => {
                    let mut request = Request::new(Op::Stop);
                    request.id = held.id;
                    request
                }
                (Some(held), 1) => {
                    let mut request = Request::new(Op::Restart);
                    request.id = held.id;
                    if self.random.below(2) == 0 {
                        request.timeout = self.random.timeout().as_millis() as u32;
                    }
                    request
                }
                _ => {
                    self.talk(at)?;
                    continue;
                }
            };
            asked.push((at, request));
        }
        self.ask(&asked)
    }

    fn start(&mut self, at: usize) -> Request {
        self.serial += 1;
        let mut request = Request::new(Op::Start);
        request.life = life::DATA_IN | life::DATA_OUT;
        request.timeout = self.random.timeout().as_millis() as u32;
        request.tag = at as u64 | self.serial << 32;
        request
    }

    /// The client says something, and has it sent back.
    fn talk(&mut self, at: usize) -> Result<()> {
        let before = Instant::now();
        let Connection { client, server, .. } = &mut self.connections[at];
        let mut byte = *b"!";
        client.write_all(&byte)?;
        server.read_exact(&mut byte)?;
        server.write_all(&byte)?;
        client.read_exact(&mut byte)?;
        if let Some(held) = &mut self.held[at] {
            held.timer.lives((before, Instant::now()));
        }
        self.seen.talked += 1;
        Ok(())
    }

    /// Sends requests and waits for their answers.
    fn ask(&mut self, asked: &[(usize, Request)]) -> Result<()> {
        if asked.is_empty() {
            return Ok(());
        }
        let requests: Vec<_> = asked.iter().map(|(_, request)| *request).collect();
        let starts = asked
            .iter()
            .filter(|(_, request)| request.op == Op::Start as u8);
        let sockets: Vec<BorrowedFd<'_>> = starts
            .map(|(at, _)| self.connections[*at].server.as_fd())
            .collect();
        let before = Instant::now();
        self.channel.send(1, &requests, &sockets)?;
        let replies = loop {
            match self.channel.receive()?.context("twheel has ended")? {
                Packet::Replies(_, replies) => break replies,
                // It came before what was asked for had an effect.
                Packet::Events(events) => self.take(&events)?,
            }
        };
        let when = (before, Instant::now());
        ensure!(replies.len() == asked.len(), "{} answers", replies.len());
        for ((at, request), reply) in asked.iter().zip(replies) {
            let held = &mut self.held[*at];
            let op = Op::from_raw(request.op).context("an operation")?;
            match (op, reply.error as i32, held) {
                (Op::Start, 0, held) => {
                    *held = Some(Registered {
                        tag: request.tag,
                        id: reply.id,
                        timer: Held::new(millis(request.timeout), when),
                    });
                    self.seen.started += 1;
                }
                (Op::Restart, 0, Some(held)) => {
                    let timeout = (request.timeout != 0).then(|| millis(request.timeout));
                    held.timer.restart(timeout, when);
                    self.seen.restarted += 1;
                }
                (Op::Stop, 0, held @ Some(_)) => {
                    *held = None;
                    self.seen.stopped += 1;
                }
                // It had expired, which was told before.
                (Op::Restart | Op::Stop, libc::ENOENT, None) => {}
                (op, error, held) => {
                    let is_held = held.is_some();
                    bail!("{op:?} of {at}: error {error}, held: {is_held}");
                }
            }
        }
        Ok(())
    }

    /// Takes what comes until then.
    fn wait(&mut self, until: Instant) -> Result<()> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            let timeout = PollTimeout::try_from(left)?;
            let mut awaited = [PollFd::new(self.channel.as_fd(), PollFlags::POLLIN)];
            if poll(&mut awaited, timeout)? == 0 {
                return Ok(());
            }
            match self.channel.receive()?.context("twheel has ended")? {
                Packet::Events(events) => self.take(&events)?,
                Packet::Replies(..) => bail!("an answer to nothing"),
            }
        }
    }

    fn take(&mut self, events: &[Event]) -> Result<()> {
        let now = Instant::now();
        for event in events {
            let at = event.tag as u32 as usize;
            let held = self.held.get_mut(at).and_then(Option::take);
            let held = held.filter(|held| held.tag == event.tag && held.id == event.id);
            let held = held.with_context(|| format!("{event:?} of no registration"))?;
            ensure!(event.what == Outcome::Expired as u32, "{event:?}");
            let late = held
                .timer
                .expired(now, LATE)
                .with_context(|| format!("{event:?}"))?;
            self.seen.latest = self.seen.latest.max(late);
            self.seen.expired += 1;
        }
        Ok(())
    }

    /// For how long it acts at random, as far as it knows by now. On a busy machine, 10 s are too few
    /// for it to do its share.
    fn walk(&self) -> Duration {
        let has_done = self.seen.has_done(EXPIRED, STOPPED, PROGRAMS as u64);
        match has_done && !is_long() {
            true => SHORT_WALK,
            false => WALK,
        }
    }

    fn run(mut self) -> Result<Seen> {
        let begun = Instant::now();
        while begun.elapsed() < self.walk() {
            self.act()?;
            self.wait(Instant::now() + Duration::from_millis(20))?;
        }
        if !is_long() {
            self.shorten()?;
        }
        // Whatever is held now expires, and nothing else.
        let timeouts = self.held.iter().flatten().map(|held| held.timer.timeout);
        let longest = timeouts.max().unwrap_or_default();
        self.wait(Instant::now() + longest + Duration::from_secs(2))?;
        let left = self.held.iter().flatten().count();
        ensure!(left == 0, "{left} have not expired");
        Ok(self.seen)
    }

    /// Restarts what is held, with a short timeout.
    fn shorten(&mut self) -> Result<()> {
        let all: Vec<_> = (0..self.held.len())
            .filter(|at| self.held[*at].is_some())
            .collect();
        for some in all.chunks(200) {
            let restart = |at: &usize| {
                let mut request = Request::new(Op::Restart);
                request.id = self.held[*at].as_ref().map_or(0, |held| held.id);
                request.timeout = 1_000;
                (*at, request)
            };
            let asked: Vec<_> = some.iter().map(restart).collect();
            self.ask(&asked)?;
        }
        Ok(())
    }
}

#[test]
fn each_of_many_expires_exactly_once_and_on_time() -> Result<()> {
    require_root();
    most_descriptors()?;
    let (pair, directory) = (Pair::new()?, Directory::new("offload-many")?);
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
    let twheel = Twheel::start_muted(
        &pair.server,
        &[&table[..], &["--offload", offload]].concat(),
    )?;
    let (turn, all_opened) = (Mutex::new(()), Barrier::new(PROGRAMS));
    let program = |seed: usize| {
        let connections = connect_apart(&pair, CONNECTIONS / PROGRAMS, &turn);
        all_opened.wait();
        Program::new(&path, connections?, seed as u64 + 1)?.run()
    };
    let sum = thread::scope(|scope| -> Result<Seen> {
        let threads: Vec<_> = (0..PROGRAMS)
            .map(|seed| scope.spawn(move || program(seed)))
            .collect();
        let mut sum = Seen::default();
        for thread in threads {
            sum.add(&thread.join().expect("a thread panicked")?);
        }
        Ok(sum)
    })?;
    println!("{sum:?}");
    assert_eq!(sum.started, sum.stopped + sum.expired);
    assert!(sum.expired > EXPIRED && sum.stopped > STOPPED, "{sum:?}");
    assert!(sum.latest <= LATE, "late by {:?}", sum.latest);
    twheel.stop().map(drop)
}
