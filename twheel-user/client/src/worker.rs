//! The thread behind a program's timers: sends and receives, and looks at the timers that are kept
//! in this process.

use std::{
    io,
    os::fd::AsFd,
    path::PathBuf,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{self, Receiver},
    },
    thread,
    time::{Duration, Instant},
};

use nix::{
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::eventfd::{EfdFlags, EventFd},
};

use crate::{
    channel::{Channel, Packet},
    offload::Options,
    slot::{Done, Waiting},
    socket::Socket,
    state::State,
};

/// How often a twheel is looked for that is not there.
const RETRY: Duration = Duration::from_millis(500);
/// How often a twheel is tried that serves as many programs as it may.
const SLOW: Duration = Duration::from_secs(10);
/// How long to wait if the kernel has no room for what is sent.
const FULL: Duration = Duration::from_millis(10);

/// What the thread shares with the handles.
pub struct Shared {
    path: PathBuf,
    state: Mutex<State>,
    wake: EventFd,
    /// Readable while ends wait in the queue.
    pub ready: EventFd,
}

impl Shared {
    /// For the twheel at this path.
    ///
    /// # Errors
    ///
    /// There is no descriptor left.
    pub fn new(path: PathBuf) -> io::Result<Self> {
        Ok(Self {
            path,
            state: Mutex::new(State::new(Instant::now())),
            wake: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
            ready: EventFd::from_flags(EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK)?,
        })
    }

    /// The timers.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes the oldest end in the queue.
    pub fn next(&self) -> Option<Done> {
        let mut state = self.state();
        let done = state.done.pop_front();
        if state.done.is_empty() {
            // Fails if it is not readable.
            let _ = self.ready.read();
        }
        done
    }

    /// Has the thread look at what was asked for.
    pub fn wake(&self) {
        // If the counter is full, the thread is awake anyway.
        let _ = self.wake.write(1);
    }
}

fn end(socket: Socket, options: Options) {
    socket.end(options.action);
}

/// Connects to twheel, if it is there.
///
/// # Errors
///
/// It is not there, or does not answer.
pub fn connect(shared: &Shared) -> io::Result<Channel> {
    let channel = Channel::connect(&shared.path)?;
    shared.state().connected(channel.welcome().table);
    Ok(channel)
}

/// Has another thread connect to twheel: it waits for the answer, and timers do not.
fn connect_apart(shared: &Arc<Shared>) -> io::Result<Receiver<io::Result<Channel>>> {
    let (shared, (sender, receiver)) = (shared.clone(), mpsc::channel());
    thread::Builder::new()
        .name("twheel-connect".to_owned())
        .spawn(move || {
            // Fails only if the last handle was dropped.
            let _ = sender.send(Channel::connect(&shared.path));
            shared.wake();
        })?;
    Ok(receiver)
}

/// When to try again to connect.
fn retry_after<T>(connected: &io::Result<T>) -> Instant {
    let is_full = |error: &io::Error| error.kind() == io::ErrorKind::QuotaExceeded;
    let after = match connected.as_ref().is_err_and(is_full) {
        true => SLOW,
        false => RETRY,
    };
    Instant::now() + after
}

/// Works until the last handle is dropped. `connected`: what [`connect`] has returned.
pub fn work(shared: &Arc<Shared>, connected: io::Result<Channel>) {
    let mut retry = retry_after(&connected);
    let (mut channel, mut connecting) = (connected.ok(), None::<Receiver<_>>);
    loop {
        if shared.state().ends {
            return;
        }
        match connecting.as_ref().and_then(|it| it.try_recv().ok()) {
            Some(connected) => {
                connecting = None;
                retry = retry_after(&connected);
                channel = connected.ok();
                if let Some(channel) = &channel {
                    shared.state().connected(channel.welcome().table);
                }
            }
            None if channel.is_none() && connecting.is_none() && Instant::now() >= retry => {
                let answer = connect_apart(shared);
                retry = retry_after(&answer);
                connecting = answer.ok();
            }
            None => {}
        }
        let mut blocked = false;
        if let Some(connected) = &channel {
            let carried = send(shared, connected)
                .and_then(|_| receive(shared, connected))
                // Answers make room for more.
                .and_then(|()| send(shared, connected));
            blocked = carried.as_ref().is_ok_and(|full| *full);
            if carried.is_err() {
                // What twheel has told before it ended.
                let _ = receive(shared, connected);
                channel = None;
                retry = Instant::now() + RETRY / 10;
                shared.state().disconnected(Instant::now());
            }
        }
        let now = Instant::now();
        let mut state = shared.state();
        // No connection is ended after its timer's handle was dropped.
        if state.ends {
            return;
        }
        state.expire(now, end);
        if !state.done.is_empty() {
            // If the counter is full, it is readable anyway.
            let _ = shared.ready.write(1);
        }
        drop(state);
        // Who connects wakes this thread.
        let retry = (channel.is_none() && connecting.is_none()).then_some(retry);
        wait(shared, channel.as_ref(), blocked, retry);
    }
}

/// Waits for something to do.
fn wait(shared: &Shared, channel: Option<&Channel>, blocked: bool, retry: Option<Instant>) {
    let due = shared.state().due();
    let until = due.into_iter().chain(retry).min();
    let timeout = until.map(|until| {
        // A millisecond more: it is to have passed.
        until.saturating_duration_since(Instant::now()) + Duration::from_millis(1)
    });
    let timeout = timeout.map_or(PollTimeout::NONE, |timeout| {
        PollTimeout::try_from(timeout.min(Duration::from_secs(60))).unwrap_or(PollTimeout::ZERO)
    });
    let mut awaits = PollFlags::POLLIN;
    awaits.set(PollFlags::POLLOUT, blocked);
    let mut descriptors = vec![PollFd::new(shared.wake.as_fd(), PollFlags::POLLIN)];
    descriptors.extend(channel.map(|channel| PollFd::new(channel.as_fd(), awaits)));
    // An interrupted call is as one that has nothing to tell.
    let _ = poll(&mut descriptors, timeout);
    let _ = shared.wake.read();
}

/// Sends what waits. Whether more waits, for which twheel has no room.
fn send(shared: &Shared, channel: &Channel) -> io::Result<bool> {
    loop {
        let now = Instant::now();
        let Some((number, packet)) = shared.state().packet(now) else {
            return Ok(false);
        };
        // A socket may have been closed since.
        let is_there = |waiting: &Waiting| waiting.socket.is_none_or(|it| it.get().is_some());
        let (there, gone): (Vec<_>, Vec<_>) = packet.into_iter().partition(is_there);
        gone.iter()
            .for_each(|waiting| shared.state().has_no_socket(waiting));
        if there.is_empty() {
            continue;
        }
        let requests: Vec<_> = there.iter().map(|waiting| waiting.request).collect();
        let of = there.iter().filter_map(|waiting| waiting.socket.as_ref());
        let sockets: Vec<_> = of.filter_map(Socket::get).collect();
        // Known before the answer can come.
        shared.state().sent(number, &there);
        let is_whole = sockets.len() == there.iter().filter(|it| it.socket.is_some()).count();
        let sent = match is_whole {
            true => channel.try_send(number, &requests, &sockets),
            false => Err(io::Error::from_raw_os_error(libc::EBADF)),
        };
        match sent {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                shared.state().put_back(number, there);
                return Ok(true);
            }
            // Too much of the user's is on its way for now, also of its other programs.
            Err(error)
                if matches!(
                    error.raw_os_error(),
                    Some(libc::ETOOMANYREFS | libc::ENOBUFS | libc::ENOMEM)
                ) =>
            {
                shared.state().put_back(number, there);
                thread::sleep(FULL);
                return Ok(true);
            }
            // One was closed just now.
            Err(error) if error.raw_os_error() == Some(libc::EBADF) => {
                shared.state().put_back(number, there);
            }
            sent => sent?,
        }
    }
}

/// Receives what has come.
fn receive(shared: &Shared, channel: &Channel) -> io::Result<()> {
    loop {
        match channel.try_receive() {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
            Ok(None) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(Some(Packet::Replies(number, replies))) => {
                shared.state().replied(number, &replies, Instant::now());
            }
            Ok(Some(Packet::Events(events))) => {
                let mut state = shared.state();
                if !state.ends {
                    state.told(&events, Instant::now(), end);
                }
            }
        }
    }
}
