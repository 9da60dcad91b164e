//! What noticing idle connections costs a server, in several ways, in one run.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io::Write,
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process,
    rc::Rc,
    sync::{
        Arc, Barrier, Condvar, Mutex,
        atomic::{
            AtomicBool, AtomicU64, AtomicUsize,
            Ordering::{Relaxed, SeqCst},
        },
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use nix::sched::{CloneFlags, unshare};
use tokio::{
    io::AsyncReadExt,
    runtime::Runtime,
    task::{LocalSet, spawn_local},
    time::{sleep, timeout},
};
use tokio_util::time::{DelayQueue, delay_queue};
use twheel::{
    cost::{CostReading, Meter},
    pins::Instance,
    stepper::pin_to,
};
use twheel_client::{Offload, Options, Timer};
use twheel_tests::{
    directory::Directory,
    pair::{Family, Pair, SERVER},
    running::Twheel,
};
use twheel_timers::{Intrusive, Node};

use super::{
    calls::{self, Calls},
    shown, thread_time,
};
use crate::{report::Report, size};

/// Threads of a server, and of its clients. Each has descriptors of its own, of which a process may
/// have fewer than there are connections.
const THREADS: usize = 8;
pub const CONNECTIONS: usize = size(50_000, 400);
const EACH: usize = CONNECTIONS / THREADS;
/// Reads a second that are asked for.
const RATE: usize = size(200_000, 2_000);
/// Bytes of a read.
const BYTES: usize = 16;
/// Reads that a packet is for: messages of a header and fields, and requests that are read at once.
/// The latter take all CPU time before they are as many as asked for.
pub const READS: [usize; 2] = [4, 1];
const TIMEOUT: Duration = Duration::from_secs(size(60, 2));
/// The timers of connections that are seldom looked at start evenly over a timeout.
const STARTS: u32 = size(100, 10);
pub const WINDOW: Duration = Duration::from_millis(50);
/// For what was sent to be read, and all threads to sleep: the kernel accounts for a thread's time when
/// it does.
const DRAINS: Duration = Duration::from_millis(15);
const ROUNDS: usize = size(250, 1);
const PORT: u16 = 7800;

/// How often the lazy wheel is stepped.
const TURN: Duration = Duration::from_millis(100);

/// How idle connections are noticed: a server for each way, so that none changes what it does.
pub const WAYS: [&str; 5] = [
    "not at all",
    "tokio's timeout a read",
    "DelayQueue, reset a read",
    "lazy wheel",
    "offloaded",
];
pub const NONE: usize = 0;
pub const TIMEOUTS: usize = 1;
pub const QUEUE: usize = 2;
pub const LAZY: usize = 3;
pub const OFFLOADED: usize = 4;

/// What the threads share.
struct Shared {
    /// The server that is sent to, if there is one.
    turn: Mutex<Turn>,
    changed: Condvar,
    /// Reads that a packet is for.
    size: AtomicUsize,
    reads: AtomicU64,
    calls: Calls,
    expired: AtomicU64,
    /// Idle connections are noticed from now on.
    begins: AtomicBool,
    ends: AtomicBool,
    ready: Barrier,
}

/// Whose turn it is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Turn {
    Nobody,
    Of(usize),
    Ended,
}

impl Shared {
    fn set(&self, turn: Turn) {
        *self.turn.lock().expect("a thread panicked") = turn;
        self.changed.notify_all();
    }

    fn turn(&self) -> Turn {
        *self.turn.lock().expect("a thread panicked")
    }

    /// Waits until it is its turn, or all ends.
    fn await_turn(&self, way: usize) -> Turn {
        let turn = self.turn.lock().expect("a thread panicked");
        let others = |turn: &mut Turn| *turn != Turn::Of(way) && *turn != Turn::Ended;
        let turn = self.changed.wait_while(turn, others);
        *turn.expect("a thread panicked")
    }
}

/// What the connections of a thread share.
struct Timers {
    way: usize,
    queue: RefCell<DelayQueue<u32>>,
    keys: Vec<Cell<Option<delay_queue::Key>>>,
    /// The latest read of each connection, for the lazy wheel.
    latest: Vec<Cell<Instant>>,
}

pub fn bench(report: &mut Report) -> Result<()> {
    report.say(&format!(
        "\nServers with {CONNECTIONS} connections each, timeout {} s. In turn each is sent to for {} ms, and reads {BYTES} bytes \
         of a\nconnection at a time: {ROUNDS} times while no server notices idle connections, and as often while they do. \
         Nanoseconds a read, of\nCPU time (schedstat): of the server's threads; of threads that keep timers for it, those of the \
         client library and of twheel\n(mean); and of twheel's programs. More: than the first server in the same round, and \
         than before. Calls:\nwhat the server's calls of its timers take, timed for each {}th connection; what it does for \
         timers between reads is not among\nthem. Medians with their standard errors.\n",
        TIMEOUT.as_secs(),
        WINDOW.as_millis(),
        calls::EVERY
    ));
    let directory = Directory::new("bench-offload")?;
    let hosts = (0..WAYS.len()).map(|way| Host::new(directory.0.join(way.to_string())));
    let hosts = hosts.collect::<Result<Vec<_>>>()?;
    let shared = Arc::new(Shared {
        turn: Mutex::new(Turn::Nobody),
        changed: Condvar::new(),
        size: AtomicUsize::new(READS[0]),
        reads: AtomicU64::new(0),
        calls: Calls::default(),
        expired: AtomicU64::new(0),
        begins: AtomicBool::new(false),
        ends: AtomicBool::new(false),
        ready: Barrier::new(2 * THREADS * WAYS.len() + 1),
    });
    // tokio makes descriptors for signals once, with the first runtime: all threads are to have them.
    drop(runtime()?);
    let rounds = thread::scope(|scope| {
        let mut threads = Vec::new();
        for number in 0..THREADS * WAYS.len() {
            let way = number % WAYS.len();
            let address = SocketAddr::new(Family::V4.server(), PORT + (number / WAYS.len()) as u16);
            let Host { pair, path, .. } = &hosts[way];
            let listener = pair.server.enter(|| Ok(TcpListener::bind(address)?))?;
            let shared = &shared;
            let named = |name| thread::Builder::new().name(name);
            threads.push(
                named(name(way)).spawn_scoped(scope, move || serve(shared, way, listener, path))?,
            );
            threads.push(
                named("bench-client".to_owned()).spawn_scoped(scope, move || {
                    let drive = || drive(shared, way, address);
                    pair.client.enter(drive)
                })?,
            );
        }
        let rounds = measure(&shared, &hosts);
        shared.ends.store(true, SeqCst);
        shared.set(Turn::Ended);
        for thread in threads {
            thread.join().expect("a thread panicked")?;
        }
        rounds
    })?;
    for host in hosts {
        host.twheel.stop()?;
    }
    ensure!(
        shared.expired.load(Relaxed) == 0,
        "a busy connection was idle"
    );
    shown::show(report, &rounds);
    Ok(())
}

/// A server's namespace, and a twheel that watches it.
struct Host {
    pair: Pair,
    /// Where twheel serves programs.
    path: PathBuf,
    twheel: Twheel,
}

impl Host {
    fn new(path: PathBuf) -> Result<Self> {
        let pair = Pair::new()?;
        let offload = path.to_str().context("a path")?;
        let args = ["--iface", SERVER, "--offload", offload];
        Ok(Self {
            twheel: Twheel::start_muted(&pair.server, &args)?,
            pair,
            path,
        })
    }
}

/// Of the threads of a way's server.
fn name(way: usize) -> String {
    format!("bench-server{way}")
}

/// What one turn of a way took.
#[derive(Clone, Copy, Default)]
pub struct Sample {
    pub reads: f64,
    /// Nanoseconds of the server's threads.
    pub server: f64,
    /// Reads whose calls of timers were timed.
    pub timed: f64,
    /// Nanoseconds of these calls.
    pub calls: f64,
    /// Likewise of the client library's threads and of the thread of twheel that keeps the timers.
    pub threads: f64,
    /// Likewise of twheel's programs.
    pub programs: f64,
}

/// For each of [`READS`].
pub type Round = [[Sample; WAYS.len()]; READS.len()];

/// Rounds before and after idle connections are noticed.
fn measure(shared: &Shared, hosts: &[Host]) -> Result<[Vec<Round>; 2]> {
    let pins = |host: &Host| host.pair.server.enter(|| Instance::with(SERVER));
    let pins = hosts.iter().map(pins).collect::<Result<Vec<_>>>()?;
    let _counts = Meter::start()?;
    shared.ready.wait();
    let taken = |way: usize| -> Result<_> {
        let (own, nanoseconds) = (process::id(), |time: Duration| time.as_nanos() as f64);
        let threads = match way {
            OFFLOADED => {
                let twheel = hosts[way].twheel.pid();
                thread_time(own, "twheel-client")? + thread_time(twheel, "twheel-offload")?
            }
            _ => Duration::ZERO,
        };
        let programs = CostReading::new(&pins[way])?;
        let [timed, calls] = shared.calls.taken();
        Ok(Sample {
            reads: shared.reads.load(SeqCst) as f64,
            server: nanoseconds(thread_time(own, &name(way))?),
            timed,
            calls,
            threads: nanoseconds(threads),
            programs: nanoseconds(programs.programs().map(|(.., time)| time).sum()),
        })
    };
    let mut rounds = [Vec::new(), Vec::new()];
    let mut number = 0;
    let mut begun = Instant::now();
    while rounds[1].len() < ROUNDS {
        let mut found = Round::default();
        number += 1;
        for (found, reads) in found.iter_mut().zip(READS) {
            shared.size.store(reads, SeqCst);
            // The order changes from round to round.
            for turn in 0..WAYS.len() {
                let way = (turn + number) % WAYS.len();
                let before = taken(way)?;
                shared.set(Turn::Of(way));
                thread::sleep(WINDOW);
                shared.set(Turn::Nobody);
                thread::sleep(DRAINS);
                let after = taken(way)?;
                let reads = after.reads - before.reads;
                found[way] = Sample {
                    reads,
                    server: (after.server - before.server) / reads,
                    timed: after.timed - before.timed,
                    calls: (after.calls - before.calls) / (after.timed - before.timed).max(1.0),
                    threads: (after.threads - before.threads) / reads,
                    programs: (after.programs - before.programs) / reads,
                };
            }
        }
        if rounds[0].len() < ROUNDS {
            rounds[0].push(found);
            if rounds[0].len() == ROUNDS {
                shared.begins.store(true, SeqCst);
                begun = Instant::now();
            }
        } else if begun.elapsed() > TIMEOUT + Duration::from_secs(1) {
            // Rounds do not count while timers are started.
            rounds[1].push(found);
        }
    }
    Ok(rounds)
}

/// Connects, and sends to all connections in turn, when it is its server's turn.
fn drive(shared: &Shared, way: usize, address: SocketAddr) -> Result<()> {
    unshare(CloneFlags::CLONE_FILES)?;
    let connections = (0..EACH).map(|_| TcpStream::connect(address));
    let connections = connections.collect::<std::io::Result<Vec<_>>>();
    shared.ready.wait();
    let mut connections = connections.context("cannot connect")?;
    pin_to(0)?;
    let tick = Duration::from_millis(5);
    let each = RATE / THREADS / 200;
    let packet = [b'!'; BYTES * READS[0]];
    let (mut next, mut owed) = (0, 0);
    while shared.await_turn(way) != Turn::Ended {
        let mut due = Instant::now();
        while shared.turn() == Turn::Of(way) {
            let reads = shared.size.load(Relaxed);
            owed += each;
            while owed >= reads {
                connections[next].write_all(&packet[..BYTES * reads])?;
                (next, owed) = ((next + 1) % EACH, owed - reads);
            }
            due += tick;
            match due.checked_duration_since(Instant::now()) {
                Some(left) => thread::sleep(left),
                // It does not make up for what was too much.
                None => due = Instant::now(),
            }
        }
    }
    Ok(())
}

/// Accepts its connections, and reads from them.
fn serve(shared: &Arc<Shared>, way: usize, listener: TcpListener, path: &Path) -> Result<()> {
    unshare(CloneFlags::CLONE_FILES)?;
    let accepted = (0..EACH).map(|_| -> Result<_> {
        let (socket, _) = listener.accept()?;
        socket.set_nonblocking(true)?;
        Ok(socket)
    });
    let sockets = accepted.collect::<Result<Vec<_>>>();
    let offload = (way == OFFLOADED).then(|| Offload::at(path)).transpose();
    shared.ready.wait();
    let (sockets, offload) = (sockets?, offload?);
    pin_to(1)?;
    let runtime = runtime()?;
    let timers = Rc::new(Timers {
        way,
        queue: RefCell::default(),
        keys: (0..EACH).map(|_| Cell::new(None)).collect(),
        latest: (0..EACH).map(|_| Cell::new(Instant::now())).collect(),
    });
    let copies = sockets.iter().map(TcpStream::try_clone);
    let copies = copies.collect::<std::io::Result<Vec<_>>>()?;
    LocalSet::new().block_on(&runtime, async {
        for (at, socket) in sockets.into_iter().enumerate() {
            let socket = tokio::net::TcpStream::from_std(socket)?;
            spawn_local(read(shared.clone(), timers.clone(), socket, at));
        }
        while !shared.begins.load(Relaxed) {
            sleep(TURN).await;
            if shared.ends.load(Relaxed) {
                return Ok(());
            }
        }
        match (way, offload) {
            (QUEUE, _) => drop(spawn_local(expire(shared.clone(), timers))),
            (LAZY, _) => drop(spawn_local(step(shared.clone(), timers))),
            (_, Some(offload)) => return hand_over(shared, &offload, &copies).await,
            _ => {}
        }
        while !shared.ends.load(Relaxed) {
            sleep(TURN).await;
        }
        Ok(())
    })
}

fn runtime() -> Result<Runtime> {
    let mut builder = tokio::runtime::Builder::new_current_thread();
    builder.enable_all();
    builder.build().context("cannot start tokio")
}

/// Reads from a connection until it ends.
async fn read(
    shared: Arc<Shared>,
    timers: Rc<Timers>,
    mut socket: tokio::net::TcpStream,
    at: usize,
) {
    let is_timed = at.is_multiple_of(calls::EVERY);
    let mut bytes = [0; BYTES];
    loop {
        let way = match shared.begins.load(Relaxed) {
            true => timers.way,
            false => NONE,
        };
        let mut calls = calls::Read::default();
        let next = socket.read(&mut bytes);
        let read = match way {
            TIMEOUTS if is_timed => calls.within(TIMEOUT, next).await,
            TIMEOUTS => timeout(TIMEOUT, next).await.ok(),
            _ => Some(next.await),
        };
        let Some(read) = read else {
            shared.expired.fetch_add(1, Relaxed);
            continue;
        };
        if !matches!(read, Ok(1..)) {
            return;
        }
        let note = || match way {
            QUEUE => timers.reset(at),
            LAZY => timers.latest[at].set(Instant::now()),
            _ => {}
        };
        if is_timed {
            calls.time(note);
            shared.calls.add(calls);
        } else {
            note();
        }
        shared.reads.fetch_add(1, Relaxed);
    }
}

impl Timers {
    /// The connection had a read.
    fn reset(&self, at: usize) {
        let mut queue = self.queue.borrow_mut();
        match self.keys[at].get() {
            Some(key) => queue.reset(&key, TIMEOUT),
            None => self.keys[at].set(Some(queue.insert(at as u32, TIMEOUT))),
        }
    }
}

/// Takes what expires of the queue.
async fn expire(shared: Arc<Shared>, timers: Rc<Timers>) {
    loop {
        let expired = poll_fn(|context| timers.queue.borrow_mut().poll_expired(context)).await;
        match expired {
            Some(expired) => {
                timers.keys[*expired.get_ref() as usize].set(None);
                shared.expired.fetch_add(1, Relaxed);
            }
            None => sleep(TURN).await,
        }
    }
}

/// The connections whose timers start in one of [`STARTS`] turns.
fn some(turn: u32) -> std::ops::Range<usize> {
    let until = |turn: u32| EACH * turn as usize / STARTS as usize;
    until(turn)..until(turn + 1)
}

/// Starts the lazy wheel's timers, and steps it.
async fn step(shared: Arc<Shared>, timers: Rc<Timers>) -> Result<()> {
    let epoch = Instant::now();
    let tick = || epoch.elapsed().as_millis() as u64;
    let (mut wheel, mut nodes) = (Intrusive::new(3, 1024)?, Vec::new());
    nodes.resize_with(EACH, Node::new);
    let timeout = TIMEOUT.as_millis() as u64;
    for turn in 0.. {
        if turn < STARTS {
            for at in some(turn) {
                timers.latest[at].set(Instant::now());
                wheel.start(&mut nodes, at as u32, tick(), timeout);
            }
        }
        while let Some(at) = wheel.expire(&mut nodes, tick()) {
            let idle = timers.latest[at as usize].get().elapsed().as_millis() as u64;
            match timeout.checked_sub(idle) {
                Some(left) => {
                    wheel.start(&mut nodes, at, tick(), left + 1);
                }
                None => {
                    shared.expired.fetch_add(1, Relaxed);
                }
            }
        }
        sleep(TIMEOUT / STARTS).await;
    }
    Ok(())
}

/// Hands the timeouts over.
async fn hand_over(shared: &Shared, offload: &Offload, sockets: &[TcpStream]) -> Result<()> {
    let mut handed = Vec::new();
    for turn in 0..STARTS {
        for at in some(turn) {
            handed.push(offload.watch(&sockets[at], Options::new(TIMEOUT), at as u64)?);
        }
        sleep(TIMEOUT / STARTS).await;
    }
    let is_offloaded = |timer: &Timer| offload.is_offloaded(*timer) == Some(true);
    ensure!(handed.iter().all(is_offloaded), "not all are handed over");
    while !shared.ends.load(Relaxed) {
        while offload.next().is_some() {
            shared.expired.fetch_add(1, Relaxed);
        }
        sleep(TURN).await;
    }
    Ok(())
}
