//! The thread that serves programs: receives their requests, steps the wheel of registrations, and
//! tells what has ended.

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
    sync::{
        Arc, Mutex,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    eventfd::{EfdFlags, EventFd},
    resource::{Resource, getrlimit, setrlimit},
    socket::{SockFlag, accept4},
};
use twheel_client::protocol::{self, Kind, Welcome};
use twheel_common::config::Config;

use super::{
    asking::Asking,
    closing::{Closers, Inspected},
    ends::{Ended, Ends, Shared},
    listener::Listener,
    passed::SocketReader,
    program::Program,
    registry::{Registry, Shape},
    requests::{LONGEST, refusal, secret},
    rights::{self, Peer},
    table::{Mapping, Table as _},
    tally::{Counts, Tally},
    watched::Watched,
};
use crate::{call::Callable, clock::Clock, data_plane, pins::Pins};

/// Most programs at a time.
const PROGRAMS: usize = 1_024;
/// Most programs of a user: one cannot keep out all others.
const OF_A_USER: usize = PROGRAMS / 2;
/// Most programs that are welcomed before the others have their turn.
const WELCOMES: usize = 64;
/// How long to wait for descriptors, if there are none for another program.
const NO_DESCRIPTORS: Duration = Duration::from_secs(1);
/// Places that are looked at in a turn for registrations of programs that have ended.
const LEAVING: u32 = 8_192;
/// Most programs that have their turn before timers have theirs.
const READY: usize = 16;
/// How long a restarted twheel waits for programs to reclaim their registrations.
const GRACE: Duration = Duration::from_secs(10);
/// For how long the running twheel may be away before the data plane ends a registered flow that
/// is idle.
const AWAY: Duration = Duration::from_secs(60);

/// What registrations are made on.
#[derive(Clone, Copy)]
pub struct Plane {
    /// Its configuration.
    pub config: Config,
    /// Its clock.
    pub clock: Clock,
    /// Most registrations of a user; `None`: half of what the table holds.
    pub limit: Option<u32>,
    /// Most registrations of a program; `None`: as many as its user.
    pub program_limit: Option<u32>,
}

/// The thread. It ends when this is dropped.
pub struct Offloads {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

impl Offloads {
    /// Starts the thread.
    ///
    /// # Errors
    ///
    /// The table cannot be mapped, or the kernel lacks what is needed.
    pub fn start(listener: Listener, pins: &Pins, plane: &Plane) -> Result<Self> {
        // Each program takes a descriptor, and what it passes some more.
        if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
        }
        let shared = Arc::new(Shared {
            stops: AtomicBool::new(false),
            held: AtomicUsize::new(0),
            counts: Counts::default(),
            ended: Mutex::default(),
            inspected: Mutex::default(),
            received: Mutex::default(),
            answered: Mutex::default(),
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        });
        let mut thread = Thread::new(listener, pins, plane, shared.clone())?;
        let thread = thread::Builder::new()
            .name("twheel-offload".to_owned())
            .spawn(move || {
                let done = thread.run();
                // Nobody takes ends of flows from now on.
                thread.shared.held.store(0, Ordering::SeqCst);
                thread.shared.counts.programs.store(0, Ordering::Relaxed);
                if let Err(error) = done {
                    say!("twheel: no longer serving timeouts to programs: {error:#}");
                }
            });
        Ok(Self {
            thread: Some(thread.context("cannot start a thread")?),
            shared,
        })
    }

    /// For whoever learns of flows that ended.
    pub fn ends(&self) -> Ends {
        Ends(self.shared.clone())
    }

    /// What is counted.
    pub fn tally(&self) -> Tally {
        Tally(self.shared.clone())
    }
}

impl Drop for Offloads {
    fn drop(&mut self) {
        self.shared.stops.store(true, Ordering::SeqCst);
        let _ = self.shared.wake.write(1);
        if let Some(thread) = self.thread.take() {
            // It has said why, if it panicked.
            let _ = thread.join();
        }
    }
}

/// What epoll returns for the listener and for the wake descriptor; programs follow.
const LISTENER: u64 = 0;
const WAKE: u64 = 1;
pub(super) const FIRST: u64 = 2;

/// Its state.
pub(super) struct Thread {
    pub(super) listener: Listener,
    pub(super) epoll: Epoll,
    pub(super) shared: Arc<Shared>,
    pub(super) clock: Clock,
    /// Runs the programs that tell the time and enter flows.
    pub(super) sweep: Callable,
    pub(super) enter: Callable,
    pub(super) delete: Callable,
    /// What the kernel is to be asked.
    pub(super) asking: Asking,
    pub(super) registry: Registry<Mapping>,
    pub(super) programs: Vec<Option<Program>>,
    /// The users of those who have these places, or had them last.
    holders: Vec<u32>,
    pub(super) closers: Closers,
    /// `None`: the kernel lacks what is needed. Then descriptors tell what was passed.
    pub(super) reader: Option<SocketReader>,
    /// How many programs there have been.
    welcomed: u64,
    /// Packets whose sockets were looked at, oldest first.
    pub(super) inspected: VecDeque<Inspected>,
    /// Flows that have ended, oldest first.
    pub(super) ended: VecDeque<Ended>,
    /// The connection of a program whose rights could not be read yet.
    accepted: Option<OwnedFd>,
    /// Until when no program is welcomed, because there are no descriptors, or many to close.
    full_until: Option<Instant>,
    /// What each user holds, of [`Program::held`].
    pub(super) users: BTreeMap<u32, u32>,
    /// Most that a user may hold, and a program.
    pub(super) limit: u32,
    pub(super) program_limit: u32,
    /// Tells this table from others.
    pub(super) table: u64,
    pub(super) late: Duration,
    pub(super) secret: [u64; 2],
    /// Records that were registered with an earlier run, and until when they may be reclaimed.
    pub(super) left: Option<(Vec<u32>, Instant)>,
    pub(super) buffer: Vec<u8>,
}

impl Thread {
    fn new(listener: Listener, pins: &Pins, plane: &Plane, shared: Arc<Shared>) -> Result<Self> {
        let sweep = pins.callable("twheel_sweep")?;
        let meta = data_plane::meta(pins)?;
        let table = Mapping::new(pins, sweep.now()?)?;
        let marked = table.marked();
        let epoll = Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?;
        for (descriptor, data) in [
            (listener.socket.as_fd(), LISTENER),
            (shared.wake.as_fd(), WAKE),
        ] {
            epoll.add(descriptor, EpollEvent::new(EpollFlags::EPOLLIN, data))?;
        }
        let namespace = rights::namespace()
            .context("this kernel does not tell the network namespaces of sockets apart")?;
        let Plane {
            config,
            clock,
            limit,
            program_limit,
        } = *plane;
        let limit = limit.unwrap_or(meta.max_flows / 2);
        let (flows, hash) = table.flows();
        let watched = Watched {
            namespace,
            flows,
            hash,
        };
        let shape = Shape {
            records: table.records(),
            doubt: config.max_stall,
            margin: u32::try_from(clock.units_ceil(AWAY)).unwrap_or(u32::MAX),
            one_way: config.one_way != 0,
        };
        Ok(Self {
            listener,
            epoll,
            closers: Closers::new(shared.clone(), watched),
            reader: SocketReader::open()
                .inspect_err(|error| {
                    log::warn!("passed sockets are read one by one, which takes longer: {error:#}");
                })
                .ok(),
            welcomed: 0,
            inspected: VecDeque::new(),
            ended: VecDeque::new(),
            accepted: None,
            full_until: None,
            shared,
            clock,
            sweep,
            enter: pins.callable("twheel_enter")?,
            delete: pins.callable("twheel_delete")?,
            asking: Asking::default(),
            registry: Registry::new(table, shape),
            programs: Vec::new(),
            holders: Vec::new(),
            users: BTreeMap::new(),
            limit,
            program_limit: program_limit.map_or(limit, |its| its.min(limit)),
            table: meta.made,
            late: clock.duration(u64::from(LATE) + u64::from(config.max_stall)) + PAUSE,
            secret: secret(pins)?,
            left: (!marked.is_empty()).then(|| (marked, Instant::now() + GRACE)),
            buffer: Vec::new(),
        })
    }

    fn run(&mut self) -> Result<()> {
        let mut ready = [EpollEvent::empty(); READY];
        while !self.shared.stops.load(Ordering::SeqCst) {
            let patience = self.patience();
            let found = match self.epoll.wait(&mut ready, patience) {
                Err(nix::Error::EINTR) => 0,
                found => found?,
            };
            self.registry.table().set_now(self.sweep.now()?);
            for event in &ready[..found] {
                match event.data() {
                    LISTENER => self.accept(),
                    WAKE => {
                        self.take_ended();
                        self.take_received();
                        self.take_inspected();
                        self.take_answered();
                        self.resume();
                    }
                    data => self.ready((data - FIRST) as usize, event.events()),
                }
            }
            self.answer_some();
            self.end_some();
            self.registry.stop_some(LEAVING);
            self.listen_again();
            self.expire();
            self.asking.ask(&mut self.closers, self.clock);
            self.take_out();
            self.release_left();
            self.flush();
            let held = self.registry.len() + self.left.as_ref().map_or(0, |(left, _)| left.len());
            self.shared.held.store(held, Ordering::SeqCst);
        }
        Ok(())
    }

    /// How long to wait for something to do.
    fn patience(&self) -> EpollTimeout {
        let now = self.registry.table().now();
        let due = self.registry.next().map(|due| {
            let after = self.clock.duration(due.saturating_sub(now));
            // A unit more: the clock was read a moment ago.
            (after + self.clock.unit()).max(PAUSE)
        });
        let left = self.left.as_ref().map(|(_, until)| {
            until.saturating_duration_since(Instant::now()) + Duration::from_millis(1)
        });
        let full = self
            .full_until
            .map(|until| until.saturating_duration_since(Instant::now()) + self.clock.unit());
        let is_due = self.registry.next().is_some_and(|due| due <= now);
        let waits = !self.ended.is_empty() || !self.inspected.is_empty();
        if is_due || waits || self.registry.has_leaving() {
            return EpollTimeout::ZERO;
        }
        let again = self.registry.has_entered().then(|| self.clock.unit());
        match due.into_iter().chain(left).chain(full).chain(again).min() {
            Some(wait) => EpollTimeout::try_from(wait.min(Duration::from_secs(60)))
                .unwrap_or(EpollTimeout::ZERO),
            None => EpollTimeout::NONE,
        }
    }

    fn accept(&mut self) {
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        for _ in 0..WELCOMES {
            if let Some(uid) = self.closers.full() {
                log::warn!(
                    "no program can be welcomed now: closing connections of user {uid} takes long"
                );
                self.full_until = Some(Instant::now() + NO_DESCRIPTORS);
                return self.listen(false);
            }
            let accepted = match self.accepted.take() {
                Some(socket) => Ok(socket),
                None => accept4(self.listener.socket.as_raw_fd(), flags)
                    // SAFETY: the kernel has just opened it for this process.
                    .map(|descriptor| unsafe { OwnedFd::from_raw_fd(descriptor) }),
            };
            let socket = match accepted {
                Ok(socket) => socket,
                Err(nix::Error::EINTR | nix::Error::ECONNABORTED) => continue,
                Err(nix::Error::EAGAIN) => return,
                Err(error) => return self.wait_for_descriptors(error.into()),
            };
            let welcomed = match Peer::of(socket.as_fd()) {
                Err(error) if rights::is_for_now(&error) => {
                    self.accepted = Some(socket);
                    return self.wait_for_descriptors(error);
                }
                Err(error) => Err(error.into()),
                Ok(peer) => self.welcome(socket, peer),
            };
            if let Err(error) = welcomed {
                log::debug!("a program cannot be served: {error:#}");
            }
        }
    }

    fn wait_for_descriptors(&mut self, error: io::Error) {
        let advice = match error.raw_os_error() {
            Some(libc::EMFILE | libc::ENFILE) => ": raise the limit of open files",
            _ => "",
        };
        log::warn!("no program can be welcomed now: {error}{advice}");
        self.full_until = Some(Instant::now() + NO_DESCRIPTORS);
        self.listen(false);
    }

    /// Awaits programs, or no longer.
    fn listen(&self, on: bool) {
        let flags = if on {
            EpollFlags::EPOLLIN
        } else {
            EpollFlags::empty()
        };
        let mut event = EpollEvent::new(flags, LISTENER);
        // Fails only if the descriptor is not watched.
        let _ = self.epoll.modify(&self.listener.socket, &mut event);
    }

    fn listen_again(&mut self) {
        if self.full_until.is_some_and(|until| until <= Instant::now()) {
            self.full_until = None;
            self.listen(true);
            if self.accepted.is_some() {
                self.accept();
            }
        }
    }

    /// A place for a program of this user.
    fn place_for(&self, uid: u32) -> Option<usize> {
        // One that has ended holds a descriptor until it is closed.
        if self.closers.connections(uid) >= OF_A_USER {
            return None;
        }
        let holders = (0..PROGRAMS).map(|place| {
            let held = self.programs.get(place).is_some_and(Option::is_some);
            let is_held = held || self.registry.is_leaving(place as u16);
            is_held.then(|| self.holders[place])
        });
        free_place(holders, uid)
    }

    fn welcome(&mut self, socket: OwnedFd, peer: Peer) -> Result<()> {
        self.closers.forget();
        self.welcomed += 1;
        let place = self.place_for(peer.uid);
        let connection = self.closers.connection(peer.uid, socket);
        let mut program = Program::new(connection, peer, self.welcomed);
        let Some(place) = place else {
            let replies = [refusal(libc::EUSERS)];
            self.shared.counts.reply(&replies);
            program.reply(0, &replies);
            // Fails if the program has gone.
            let _ = program.flush();
            if !self.listener.is_strict {
                let connection = program.into_connection();
                self.closers.close_connection(peer.uid, connection);
            }
            return Ok(());
        };
        rights::accept_descriptors(program.as_fd(), true);
        program.send(protocol::write(
            Kind::Welcome,
            0,
            &[Welcome {
                table: self.table,
                late: self.late.as_micros() as u64,
                longest: LONGEST.as_millis() as u64,
                most: self.program_limit.into(),
            }],
        ));
        let event = EpollEvent::new(EpollFlags::EPOLLIN, place as u64 + FIRST);
        let watched = self.epoll.add(&program, event);
        if self.programs.len() <= place {
            self.programs.resize_with(place + 1, || None);
            self.holders.resize(place + 1, peer.uid);
        }
        self.holders[place] = peer.uid;
        self.programs[place] = Some(program);
        self.shared.counts.programs.fetch_add(1, Ordering::Relaxed);
        match watched {
            Ok(()) => self.flush_one(place),
            Err(_) => self.end(place),
        }
        Ok(watched?)
    }

    /// Ends a program's registrations.
    pub(super) fn end(&mut self, place: usize) {
        let Some(program) = self.programs.get_mut(place).and_then(Option::take) else {
            return;
        };
        self.shared.counts.programs.fetch_sub(1, Ordering::Relaxed);
        // Fails only if the descriptor is not watched.
        let _ = self.epoll.delete(&program);
        self.registry.leave(place as u16);
        let uid = program.peer.uid;
        // What the kernel is being asked of is its user's until it is answered.
        self.give_back_of(uid, program.held - program.asked);
        self.closers
            .close_connection(uid, program.into_connection());
    }

    /// Reads the clock. Timers begin when it was read last: with an older time they would be early.
    pub(super) fn read_clock(&self) {
        // If it cannot be read, the thread ends when it is read next.
        if let Ok(now) = self.sweep.now() {
            self.registry.table().set_now(now);
        }
    }

    pub(super) fn peer(&self, owner: u16) -> Option<Peer> {
        let program = self.programs.get(usize::from(owner))?;
        program.as_ref().map(|program| program.peer)
    }

    /// The program has one registration more.
    pub(super) fn take(&mut self, owner: u16) {
        if let Some(Some(program)) = self.programs.get_mut(usize::from(owner)) {
            program.held += 1;
            *self.users.entry(program.peer.uid).or_default() += 1;
        }
    }

    /// The program has so many registrations, and ends that it has not received, less.
    pub(super) fn give_back(&mut self, place: usize, number: u32) {
        if let Some(Some(program)) = self.programs.get_mut(place) {
            program.held -= number;
            let uid = program.peer.uid;
            self.give_back_of(uid, number);
        }
    }

    /// The same, of a user.
    pub(super) fn give_back_of(&mut self, uid: u32, number: u32) {
        if let Some(held) = self.users.get_mut(&uid) {
            *held -= number;
            if *held == 0 {
                self.users.remove(&uid);
            }
        }
    }

    /// Takes back the marks of registrations that nobody has reclaimed.
    fn release_left(&mut self) {
        if self
            .left
            .as_ref()
            .is_some_and(|(_, until)| *until <= Instant::now())
            && let Some((left, _)) = self.left.take()
        {
            left.into_iter()
                .for_each(|record| self.registry.release(record));
        }
    }

    fn flush(&mut self) {
        for place in 0..self.programs.len() {
            self.flush_one(place);
        }
    }

    pub(super) fn flush_one(&mut self, place: usize) {
        let Some(Some(program)) = self.programs.get_mut(place) else {
            return;
        };
        if !program.is_behind() {
            return;
        }
        let Ok(told) = program.flush() else {
            return self.end(place);
        };
        self.watch(place);
        self.give_back(place, told);
    }
}

/// The first place that nobody holds, unless this user holds as many as it may. `holders`: the users who
/// hold the places.
fn free_place(holders: impl Iterator<Item = Option<u32>>, uid: u32) -> Option<usize> {
    let (mut free, mut own) = (None, 0);
    for (place, holder) in holders.enumerate() {
        match holder {
            None => free = free.or(Some(place)),
            Some(holder) => own += usize::from(holder == uid),
        }
    }
    free.filter(|_| own < OF_A_USER)
}

/// Between looks at timers, so that there are not many of them.
const PAUSE: Duration = Duration::from_millis(10);

/// Units by which an expiry comes late: two that a timeout has more, one by which the stamp of data
/// may lie ahead, one until the thread looks, and one until it runs.
const LATE: u32 = 5;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_user_has_more_than_half_of_the_places() {
        let mut holders = vec![Some(7); OF_A_USER - 1];
        holders.resize(PROGRAMS, None);
        let place_for = |holders: &[Option<u32>], uid| free_place(holders.iter().copied(), uid);
        assert_eq!(place_for(&holders, 7), Some(OF_A_USER - 1));
        // Perhaps one that has ended, and whose registrations have not.
        holders[OF_A_USER - 1] = Some(7);
        assert_eq!(place_for(&holders, 7), None);
        assert_eq!(place_for(&holders, 8), Some(OF_A_USER));
        holders[3] = None;
        assert_eq!(place_for(&holders, 8), Some(3));
        holders.fill(Some(8));
        assert_eq!(place_for(&holders, 7), None);
    }
}
