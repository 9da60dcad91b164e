//! Receives what programs have passed, looks at it and closes it; and asks the kernel of their sockets.
//! Each may take for as long as a program likes: a socket is locked while data is sent from memory that
//! comes late, and whoever lets go of the last copy of a descriptor waits for data to be sent
//! (`SO_LINGER`), or for a file system. So each user has two threads, one that looks and one that
//! closes, and the others' programs go on.

use std::{
    collections::HashMap,
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread,
    time::{Duration, Instant},
};

use twheel_client::protocol::{Request, SOCKETS};

use super::{
    asking::{self, Question},
    ends::{Shared, lock},
    program::{Connection, Program},
    rights::{self, Passed},
    watched::Watched,
};
use crate::{clock::Clock, cpu::run_soon};

/// For how long a thread waits that has nothing to do.
const IDLE: Duration = Duration::from_millis(200);

/// What came from a program in a packet.
pub(super) struct Packet {
    /// The program's place, …
    pub(super) place: usize,
    /// … and number: another may have its place.
    pub(super) program: u64,
    /// The packet's number.
    pub(super) number: u64,
    /// The clock when it was seen, units; `u64::MAX`: it is answered at once, with the time of then.
    pub(super) seen: u64,
    /// The requests; or an error number for all of it.
    pub(super) requests: Result<Vec<Request>, i32>,
}

/// A packet, and what the sockets that came with it are.
pub(super) struct Inspected {
    pub(super) packet: Packet,
    pub(super) sockets: Vec<Result<Passed, i32>>,
    pub(super) rest: Rest,
}

/// The first packet of a program is received. Its requests were answered before.
pub(super) struct Taken {
    /// The program's place and number.
    pub(super) place: usize,
    pub(super) program: u64,
    pub(super) rest: Option<Rest>,
}

/// What is yet to be closed.
pub(super) struct Rest {
    descriptors: Vec<OwnedFd>,
    uid: u32,
    /// How many of a user's files it was counted as.
    files: usize,
}

/// Once so many files of a user wait to be received or closed, its programs are asked for no more.
const ENOUGH: usize = 2 * SOCKETS;
/// If there are as many connections of a user, no more are accepted.
const CONNECTIONS: usize = 2_048;

/// The threads.
pub(super) struct Closers {
    users: HashMap<u32, User>,
    shared: Arc<Shared>,
    watched: Arc<Watched>,
}

#[derive(Default)]
struct User {
    open: Arc<Open>,
    /// Lets go of what was passed, and of connections.
    closes: Option<Worker>,
    /// Receives and looks at what was passed.
    looks: Option<Worker>,
}

/// What of a user's is not received or closed yet.
#[derive(Default)]
struct Open {
    files: AtomicUsize,
    /// The connections of its programs, until they are closed.
    connections: Arc<AtomicUsize>,
    /// The serving thread is to be woken when that is less.
    is_awaited: AtomicBool,
}

impl Open {
    /// So many files less are open.
    fn closed(&self, files: usize, shared: &Shared) {
        self.files.fetch_sub(files, Ordering::SeqCst);
        if self.is_awaited.swap(false, Ordering::SeqCst) {
            let _ = shared.wake.write(1);
        }
    }
}

impl User {
    /// Nothing of it is open, and its threads have ended.
    fn is_done(&self) -> bool {
        let works = [&self.closes, &self.looks];
        let has_ended = |it: &Worker| it.jobs.load(Ordering::SeqCst) >= GONE;
        let is_open = self.connections() + self.open.files.load(Ordering::SeqCst) > 0;
        works.into_iter().flatten().all(has_ended) && !is_open
    }

    fn connections(&self) -> usize {
        self.open.connections.load(Ordering::SeqCst)
    }
}

/// A thread, as long as it has something to do.
struct Worker {
    queue: Sender<Job>,
    /// How many it has not done; [`GONE`]: it has ended.
    jobs: Arc<AtomicUsize>,
    /// When it began its job, or got it if it had none.
    began: Arc<Mutex<Instant>>,
}

impl Worker {
    fn is_busy(&self) -> bool {
        (1..GONE).contains(&self.jobs.load(Ordering::SeqCst))
    }

    /// It may be busy for long.
    fn is_stuck(&self) -> bool {
        self.is_busy() && lock(&self.began).elapsed() > SHORT
    }
}

/// What a thread does, and what it then tells the serving thread, when it is no longer busy with it.
type Job = Box<dyn FnOnce() -> Tell + Send>;
type Tell = Box<dyn FnOnce()>;

/// For as long a thread may be busy that is not stuck.
const SHORT: Duration = Duration::from_millis(20);

const GONE: usize = 1 << (usize::BITS - 1);

impl Closers {
    /// Without any thread.
    pub(super) fn new(shared: Arc<Shared>, watched: Watched) -> Self {
        Self {
            users: HashMap::new(),
            shared,
            watched: Arc::new(watched),
        }
    }

    /// A connection of a program of this user.
    pub(super) fn connection(&mut self, uid: u32, socket: OwnedFd) -> Connection {
        let user = self.users.entry(uid).or_default();
        Connection::new(socket, user.open.connections.clone())
    }

    /// Has a connection closed, with what its program has passed and nobody has received.
    pub(super) fn close_connection(&mut self, uid: u32, connection: Arc<Connection>) {
        let shared = self.shared.clone();
        let (user, open) = self.open(uid, 1);
        let close = move || {
            // If the other thread receives from it, that one closes it afterwards.
            drop(connection);
            tell(move || open.closed(1, &shared))
        };
        give(&mut user.closes, "twheel-close", Box::new(close));
    }

    /// How many connections of a user's programs there are. Some may be ended and not closed yet.
    pub(super) fn connections(&self, uid: u32) -> usize {
        self.users.get(&uid).map_or(0, User::connections)
    }

    /// The user, if there is one, that has so many connections that no more are accepted.
    pub(super) fn full(&self) -> Option<u32> {
        let mut users = self.users.iter();
        let full = users.find(|(_, user)| user.connections() >= CONNECTIONS);
        full.map(|(uid, _)| *uid)
    }

    /// Has the first packet of a program received, whose requests and sockets were read, and so many
    /// files let go of. The serving thread is woken when it is [received](Shared::received).
    pub(super) fn let_go(&mut self, place: usize, program: &mut Program, files: usize) {
        program.is_receiving = true;
        let (uid, connection) = (program.peer.uid, program.connection());
        let program = program.number;
        let [shared, telling] = [(); 2].map(|()| self.shared.clone());
        let files = files.max(1);
        let (user, open) = self.open(uid, files);
        let told = move |rest| {
            lock(&telling.received).push(Taken {
                place,
                program,
                rest,
            });
            // If the counter is full, the thread is awake anyway.
            let _ = telling.wake.write(1);
        };
        let is = |it: &Option<Worker>, so: fn(&Worker) -> bool| it.as_ref().is_some_and(so);
        if is(&user.closes, Worker::is_busy) && !is(&user.looks, Worker::is_stuck) {
            // That may take long. The other thread receives the descriptors, which are closed later.
            let receive = move || {
                let mut descriptors = Vec::new();
                // What could not be received was let go of.
                let _ = connection.take(&mut descriptors);
                drop(connection);
                let rest = Rest {
                    descriptors,
                    uid,
                    files,
                };
                tell(move || told(Some(rest)))
            };
            return give(&mut user.looks, "twheel-look", Box::new(receive));
        }
        let let_go = move || {
            connection.let_go();
            drop(connection);
            tell(move || {
                open.closed(files, &shared);
                told(None);
            })
        };
        give(&mut user.closes, "twheel-close", Box::new(let_go));
    }

    /// Has the first packet of a program received, with at most so many files, and these looked at.
    /// The serving thread is woken when that is [done](Shared::inspected).
    pub(super) fn inspect(&mut self, program: &mut Program, mut packet: Packet, most: usize) {
        program.is_receiving = true;
        let (uid, connection) = (program.peer.uid, program.connection());
        let (shared, watched) = (self.shared.clone(), self.watched.clone());
        // Its requests wait, too.
        let requests = packet.requests.as_ref().map_or(0, Vec::len);
        let files = most.max(requests).max(1);
        let (user, open) = self.open(uid, files);
        let look = move || {
            let mut descriptors = Vec::new();
            if let Err(error) = connection.take(&mut descriptors) {
                packet.requests = Err(error);
            }
            drop(connection);
            let held = descriptors.len().max(requests).max(1);
            open.closed(files - held, &shared);
            let is_established = |ends| watched.is_established(ends);
            let look = |it: &OwnedFd| rights::passed(it.as_fd(), watched.namespace, is_established);
            let done = Inspected {
                sockets: descriptors.iter().map(look).collect(),
                packet,
                rest: Rest {
                    descriptors,
                    uid,
                    files: held,
                },
            };
            tell(move || {
                lock(&shared.inspected).push(done);
                let _ = shared.wake.write(1);
            })
        };
        give(&mut user.looks, "twheel-look", Box::new(look));
    }

    /// Has the kernel asked of registrations of a user's programs that are over. The serving thread
    /// is woken when that is [done](Shared::answered).
    pub(super) fn ask(&mut self, uid: u32, mut questions: Vec<Question>, clock: Clock) {
        let (shared, watched) = (self.shared.clone(), self.watched.clone());
        let ask = move || {
            asking::answer(&mut questions, clock, &watched);
            tell(move || {
                lock(&shared.answered).append(&mut questions);
                let _ = shared.wake.write(1);
            })
        };
        let user = self.users.entry(uid).or_default();
        give(&mut user.looks, "twheel-look", Box::new(ask));
    }

    /// Forgets users of whom nothing is left to do.
    pub(super) fn forget(&mut self) {
        self.users.retain(|_, user| !user.is_done());
    }

    /// Has those closed that came with a packet.
    pub(super) fn close_rest(&mut self, rest: Rest) {
        let user = self.users.entry(rest.uid).or_default();
        let (open, shared) = (user.open.clone(), self.shared.clone());
        let close = move || {
            drop(rest.descriptors);
            tell(move || open.closed(rest.files, &shared))
        };
        give(&mut user.closes, "twheel-close", Box::new(close));
    }

    /// Counts files of a user.
    fn open(&mut self, uid: u32, files: usize) -> (&mut User, Arc<Open>) {
        let user = self.users.entry(uid).or_default();
        user.open.files.fetch_add(files, Ordering::SeqCst);
        let open = user.open.clone();
        (user, open)
    }

    /// Whether a user's programs are to be asked for no more. If so, the serving thread is woken when
    /// that may have changed.
    pub(super) fn is_behind(&self, uid: u32) -> bool {
        let Some(User { open, .. }) = self.users.get(&uid) else {
            return false;
        };
        let is_behind = || open.files.load(Ordering::SeqCst) >= ENOUGH;
        if !is_behind() {
            return false;
        }
        open.is_awaited.store(true, Ordering::SeqCst);
        // Perhaps they were closed before that.
        is_behind()
    }
}

/// Gives a thread something to do, or starts another.
fn give(worker: &mut Option<Worker>, name: &str, job: Job) {
    if let Some(Worker { queue, jobs, began }) = worker {
        let before = jobs.fetch_add(1, Ordering::SeqCst);
        if before == 0 {
            *lock(began) = Instant::now();
        }
        if before < GONE {
            // Cannot fail: it does not end while it has something to do.
            let _ = queue.send(job);
            return;
        }
    }
    let (queue, queued) = channel();
    let (jobs, began) = (
        Arc::new(AtomicUsize::new(1)),
        Arc::new(Mutex::new(Instant::now())),
    );
    let its = (jobs.clone(), began.clone());
    let thread = thread::Builder::new().name(name.to_owned());
    match thread.spawn(move || work(&queued, &its.0, &its.1)) {
        Ok(_) => {
            let _ = queue.send(job);
            *worker = Some(Worker { queue, jobs, began });
        }
        Err(error) => {
            log::warn!("cannot start a thread: {error}");
            job()();
        }
    }
}

fn tell(what: impl FnOnce() + 'static) -> Tell {
    Box::new(what)
}

fn work(queued: &Receiver<Job>, jobs: &AtomicUsize, began: &Mutex<Instant>) {
    // Its program is not asked for more until its jobs are done, and may keep all CPUs busy meanwhile.
    if let Err(error) = run_soon() {
        log::debug!("a thread may be run late: {error}");
    }
    loop {
        match queued.recv_timeout(IDLE) {
            Ok(job) => {
                *lock(began) = Instant::now();
                let tell = job();
                jobs.fetch_sub(1, Ordering::SeqCst);
                tell();
            }
            Err(RecvTimeoutError::Disconnected) => return,
            Err(RecvTimeoutError::Timeout) => {
                let gone = jobs.compare_exchange(0, GONE, Ordering::SeqCst, Ordering::SeqCst);
                if gone.is_ok() {
                    return;
                }
            }
        }
    }
}
