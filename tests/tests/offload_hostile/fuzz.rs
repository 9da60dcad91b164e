//! Mutated packets and descriptors of several programs, beside one that means no harm.

use std::{
    fs::File,
    io::Write,
    os::fd::{AsFd, AsRawFd, RawFd},
    path::Path,
    sync::atomic::{AtomicBool, AtomicU64, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use twheel_client::{
    Outcome,
    protocol::{self, Action, BATCH, Kind, MAX_PACKET, Op, Reply, Request, SOCKETS},
};
use twheel_tests::{
    offload::{Held, Random, Seen},
    pair::{Connection, Family, Pair},
};

use crate::{
    DATA, Lab, about, millis,
    raw::{Raw, nobodys},
    rights::{self, NOBODY, Other, Who},
    start,
};

/// Programs that send mutated packets: the first is root's, the others this user's.
const HOSTILE: u64 = 3;
const HARMFUL: Who = Who {
    uid: crate::NOBODY - 1,
    ..NOBODY
};
/// Connections of each, and of the program that means no harm.
const CONNECTIONS: usize = 40;
/// What an event may come late by, on a machine whose CPUs all have more to do than they can.
const MOST: Duration = Duration::from_secs(1);
/// KiB by which twheel may have grown when all have left.
const GROWTH: usize = 16 << 10;

/// What the hostile ones have sent.
#[derive(Default)]
struct Sent {
    packets: AtomicU64,
    descriptors: AtomicU64,
    replies: AtomicU64,
    registered: AtomicU64,
    events: AtomicU64,
    comings: AtomicU64,
    /// Connections that were made anew, since twheel had the kernel abort the former ones.
    reopened: AtomicU64,
}

impl Sent {
    /// Whether the hostile ones have come so far that what they do could harm, in so many seconds.
    fn is_enough(&self, seconds: u64) -> bool {
        let count = |it: &AtomicU64| it.load(Ordering::Relaxed);
        count(&self.registered) > 100 * seconds && count(&self.reopened) > seconds
    }
}

/// A hostile program's connection with twheel.
enum Come {
    Root(Raw),
    Other(Other),
}

impl Come {
    fn raw(&self) -> &Raw {
        match self {
            Self::Root(raw) => raw,
            Self::Other(other) => &other.raw,
        }
    }
}

/// A program that sends mutated packets.
struct Hostile<'a> {
    come: Option<Come>,
    /// `None`: root.
    who: Option<Who>,
    pair: &'a Pair,
    path: &'a Path,
    random: Random,
    connections: Vec<Connection>,
    null: File,
    /// Answers, to be used and misused.
    known: Vec<Reply>,
    sent: &'a Sent,
}

impl Hostile<'_> {
    fn one_of<T: Copy>(&mut self, some: &[T]) -> T {
        some[self.random.below(some.len() as u64) as usize]
    }

    fn number(&mut self) -> u64 {
        self.random.below(u64::from(u32::MAX)) << self.random.below(33)
    }

    /// A request that may be right.
    fn request(&mut self) -> Request {
        let op = self.one_of(&[Op::Start, Op::Start, Op::Restart, Op::Stop, Op::Reclaim]);
        // Most programs are gone when a long one is over.
        let most = self.one_of(&[10, 300]);
        let mut request = start(1 + self.random.below(most) as u32, DATA, 7);
        request.op = op as u8;
        request.life = 1 + self.random.below(7) as u8;
        request.action = self.one_of(&[Action::Notify, Action::Shutdown, Action::Destroy]) as u8;
        if let Some(at) = (self.known.len() as u64).checked_sub(1) {
            let reply = self.known[self.random.below(at + 1) as usize];
            (request.id, request.cookie, request.token) = (reply.id, reply.cookie, reply.token);
        }
        if self.random.below(8) == 0 {
            request.id = self.number();
        }
        if self.random.below(4) == 0 {
            let (local, remote) = nobodys(self.random.below(2_000) as u32);
            request.name(local, remote);
        }
        request
    }

    fn packet(&mut self) -> Vec<u8> {
        let most = self.one_of(&[1, 2, 20, BATCH as u64]);
        let count = 1 + self.random.below(most);
        let requests: Vec<_> = (0..count).map(|_| self.request()).collect();
        let mut packet = protocol::write(Kind::Requests, self.number(), &requests);
        while self.random.below(2) == 0 {
            let at = self.random.below(packet.len() as u64) as usize;
            match self.random.below(6) {
                0 => packet[at] ^= 1 << self.random.below(8),
                1 => packet[at] = self.one_of(&[0, 1, 2, 4, 0x7f, 0x80, 0xff]),
                // The header, and the first request.
                2 => {
                    let at = self.random.below(packet.len().min(96) as u64) as usize;
                    packet[at] = self.random.below(256) as u8;
                }
                3 => packet.truncate(at.max(1)),
                4 => packet.resize(packet.len() + 1 + self.random.below(200) as usize, 0),
                _ => {
                    let some = self.random.below(99) as usize;
                    let end = (at + some).min(packet.len());
                    packet.extend_from_within(at..end);
                }
            }
        }
        if self.random.below(500) == 0 {
            packet.resize(MAX_PACKET + self.random.below(50_000) as usize, 1);
        }
        packet
    }

    fn descriptors(&mut self) -> Vec<RawFd> {
        let most = self.one_of(&[0, 1, 1, 3, 20, SOCKETS as u64]);
        let count = self.random.below(most + 1);
        let some = (0..count).map(|_| {
            let at = self.random.below(self.connections.len() as u64 + 4) as usize;
            match self.connections.get(at) {
                Some(connection) if at.is_multiple_of(7) => connection.client.as_raw_fd(),
                Some(connection) => connection.server.as_raw_fd(),
                None => self.null.as_raw_fd(),
            }
        });
        some.collect()
    }

    /// Reads what has come.
    fn read(&mut self) -> Result<()> {
        while let Some(come) = &self.come {
            let raw = come.raw();
            if !raw.is_ready(Duration::ZERO)? {
                return Ok(());
            }
            let Some(packet) = raw.receive()? else {
                bail!("twheel has ended the connection");
            };
            match protocol::kind(&packet) {
                Some(2) => {
                    let (_, replies) = protocol::read::<Reply>(&packet, Kind::Replies)
                        .map_err(std::io::Error::from_raw_os_error)?;
                    self.sent.replies.fetch_add(1, Ordering::Relaxed);
                    let good = replies.iter().filter(|it| it.error == 0 && it.token != 0);
                    self.known.extend(good.copied());
                    let good = replies.iter().filter(|it| it.error == 0).count() as u64;
                    self.sent.registered.fetch_add(good, Ordering::Relaxed);
                    let most = self.known.len().saturating_sub(100);
                    self.known.drain(..most);
                }
                Some(3) => {
                    self.sent.events.fetch_add(1, Ordering::Relaxed);
                }
                kind => bail!("a packet of kind {kind:?}"),
            }
        }
        Ok(())
    }

    fn act(&mut self) -> Result<()> {
        if self.come.is_none() {
            self.come = Some(match self.who {
                None => Come::Root(Raw::connect(self.path)?),
                Some(who) => Come::Other(Other::connect(self.path, who)?),
            });
            self.sent.comings.fetch_add(1, Ordering::Relaxed);
        }
        let (packet, passed) = (self.packet(), self.descriptors());
        if let Some(come) = &self.come
            && come.raw().try_send(&packet, &passed).is_ok()
        {
            self.sent.packets.fetch_add(1, Ordering::Relaxed);
            let passed = passed.len() as u64;
            self.sent.descriptors.fetch_add(passed, Ordering::Relaxed);
        }
        // Some go away, and some do not read for a while.
        if self.random.below(300) == 0 {
            self.come = None;
        }
        if self.random.below(3) > 0 {
            self.read()?;
        }
        if self.random.below(20) == 0 {
            let at = self.random.below(self.connections.len() as u64) as usize;
            if (&self.connections[at].client).write_all(b"!").is_err() {
                self.connections[at] = self.pair.connect(Family::alternate(at))?;
                self.sent.reopened.fetch_add(1, Ordering::Relaxed);
            }
        }
        Ok(())
    }
}

/// The program that means no harm. It checks each answer.
struct Good<'a> {
    raw: &'a Raw,
    connections: &'a [Connection],
    held: Vec<Option<(u64, u64, Held)>>,
    serial: u64,
    random: Random,
    seen: Seen,
}

impl Good<'_> {
    fn act(&mut self) -> Result<()> {
        let at = self.random.below(self.connections.len() as u64) as usize;
        let timeout = millis(100 + self.random.below(900));
        let (mut request, passed) = match (&self.held[at], self.random.below(3)) {
            (None, _) => {
                self.serial += 1;
                let tag = at as u64 | self.serial << 16;
                (
                    start(0, DATA, tag),
                    vec![self.connections[at].server.as_fd()],
                )
            }
            (Some((id, ..)), 0) => (about(Op::Stop, *id), Vec::new()),
            (Some((id, ..)), 1) => (about(Op::Restart, *id), Vec::new()),
            (Some(_), _) => {
                let before = Instant::now();
                (&self.connections[at].client).write_all(b"!")?;
                if let Some((.., held)) = &mut self.held[at] {
                    held.lives((before, Instant::now()));
                }
                self.seen.talked += 1;
                return Ok(());
            }
        };
        request.timeout = timeout.as_millis() as u32;
        let before = Instant::now();
        let reply = self.raw.ask(&[request], &passed)?[0];
        let when = (before, Instant::now());
        // Events that came before the answer.
        self.take(Instant::now())?;
        let held = &mut self.held[at];
        match (
            Op::from_raw(request.op).context("an operation")?,
            reply.error as i32,
        ) {
            (Op::Start, 0) => {
                *held = Some((reply.id, request.tag, Held::new(timeout, when)));
                self.seen.started += 1;
            }
            (Op::Restart, 0) => {
                let (.., held) = held.as_mut().context("a restart of nothing")?;
                held.restart(Some(timeout), when);
                self.seen.restarted += 1;
            }
            (Op::Stop, 0) => {
                held.take().context("a stop of nothing")?;
                self.seen.stopped += 1;
            }
            // It had expired, as was told before.
            (Op::Stop | Op::Restart, libc::ENOENT) if held.is_none() => {}
            (op, error) => bail!("{op:?}: error {error}"),
        }
        Ok(())
    }

    /// Takes the events that come until then.
    fn take(&mut self, until: Instant) -> Result<()> {
        loop {
            let left = until.saturating_duration_since(Instant::now());
            for event in self.raw.events_within(left)? {
                let at = (event.tag & 0xffff) as usize;
                let held = self.held.get_mut(at).and_then(Option::take);
                let held = held.filter(|(id, tag, _)| (*id, *tag) == (event.id, event.tag));
                let (.., held) = held.with_context(|| format!("{event:?} of no registration"))?;
                ensure!(event.what == Outcome::Expired as u32, "{event:?}");
                let late = held.expired(Instant::now(), MOST)?;
                self.seen.latest = self.seen.latest.max(late);
                self.seen.expired += 1;
            }
            if Instant::now() >= until {
                return Ok(());
            }
        }
    }

    fn run(&mut self, duration: Duration) -> Result<()> {
        let end = Instant::now() + duration;
        while Instant::now() < end {
            self.act()?;
            let wait = millis(self.random.below(5));
            self.take(Instant::now() + wait)?;
        }
        self.take(Instant::now() + millis(1_000) + MOST)?;
        let left = self.held.iter().flatten().count();
        ensure!(left == 0, "{left} have not expired");
        Ok(())
    }
}

#[test]
fn mutated_packets_harm_no_other_program() -> Result<()> {
    let seconds = std::env::var("TWHEEL_STRESS_SECONDS");
    let default = if twheel_tests::is_long() { 600 } else { 4 };
    let seconds = seconds.map_or(Ok(default), |seconds| seconds.parse())?;
    let seed = std::env::var("TWHEEL_SEED").map_or(Ok(1), |seed| seed.parse::<u64>())?;
    let lab = Lab::new("fuzz", &["--max-flows", "16384"])?;
    rights::open_to_all(&lab)?;
    let connect = || {
        (0..CONNECTIONS)
            .map(|number| lab.connect(number))
            .collect::<Result<Vec<_>>>()
    };
    let pools = (0..=HOSTILE)
        .map(|_| connect())
        .collect::<Result<Vec<_>>>()?;
    let mut pools = pools.into_iter();
    let good = &pools.next().context("no connections")?;
    let (before, grown) = (lab.at_rest()?, lab.memory()?);
    let (sent, stops, path) = (Sent::default(), AtomicBool::new(false), lab.path());
    let other = Other::connect(&path, NOBODY)?;
    let mut program = Good {
        raw: &other.raw,
        held: good.iter().map(|_| None).collect(),
        connections: good,
        serial: 0,
        random: Random(seed),
        seen: Seen::default(),
    };
    thread::scope(|scope| -> Result<()> {
        let threads: Vec<_> = (1..)
            .zip(pools)
            .map(|(number, connections)| {
                let mut program = Hostile {
                    come: None,
                    who: (number > 1).then_some(HARMFUL),
                    pair: &lab.pair,
                    path: &path,
                    random: Random(seed << 8 | number),
                    connections,
                    null: File::open("/dev/null")?,
                    known: Vec::new(),
                    sent: &sent,
                };
                let stops = &stops;
                Ok(scope.spawn(move || -> Result<()> {
                    while !stops.load(Ordering::Relaxed) {
                        program.act()?;
                    }
                    Ok(())
                }))
            })
            .collect::<Result<_>>()?;
        let mut run = || -> Result<()> {
            // On a busy machine it takes longer until all has happened.
            for _ in 0..10 {
                program.run(Duration::from_secs(seconds))?;
                if sent.is_enough(seconds) {
                    break;
                }
            }
            Ok(())
        };
        let done = run();
        stops.store(true, Ordering::Relaxed);
        for thread in threads {
            thread.join().expect("a thread panicked")?;
        }
        done
    })?;
    let seen = &program.seen;
    let count = |it: &AtomicU64| it.load(Ordering::Relaxed);
    println!(
        "{} packets with {} descriptors, {} answers, {} requests done, {} packets of events, {} comings, {} connections \
         aborted; seed {seed}",
        count(&sent.packets),
        count(&sent.descriptors),
        count(&sent.replies),
        count(&sent.registered),
        count(&sent.events),
        count(&sent.comings),
        count(&sent.reopened)
    );
    println!("{seen:?}");
    ensure!(seen.started == seen.stopped + seen.expired, "{seen:?}");
    ensure!(seen.latest <= MOST, "late by {:?}", seen.latest);
    ensure!(
        seen.expired > 3 * seconds && sent.is_enough(seconds),
        "too few"
    );
    drop(other);
    lab.serves()?;
    lab.settle()?;
    let (after, memory) = (lab.standing()?, lab.memory()?);
    println!("{before:?}, {grown} KiB; then {after:?}, {memory} KiB");
    ensure!(before == after, "{before:?} became {after:?}");
    ensure!(memory <= grown + GROWTH, "{grown} KiB became {memory}");
    lab.end()
}
