//! Timers of a program's connections.

use std::{
    future::Future,
    io,
    os::fd::{AsFd, BorrowedFd},
    path::PathBuf,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    thread::{self, Thread},
    time::{Duration, Instant},
};

use nix::sys::signal::{SigSet, SigmaskHow};

use crate::{
    channel::default_path,
    protocol::{Action, Outcome, life},
    slot::{Done, Tag},
    socket::Socket,
    worker::{Shared, connect, work},
};

/// The longest timeout that a timer may have, of twheel's and of this process's.
pub const LONGEST: Duration = Duration::from_secs(10 * 86_400);

/// What a timer is to do.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// For how long a connection may be idle.
    pub timeout: Duration,
    /// What counts as life: bits of [`life`].
    pub life: u8,
    /// What is done then, beside telling.
    pub action: Action,
}

impl Options {
    /// A timeout after which the program is told, unless there was data, whoever sent it.
    pub fn new(timeout: Duration) -> Self {
        Self {
            timeout,
            life: life::DATA_IN | life::DATA_OUT,
            action: Action::Notify,
        }
    }
}

/// How a timer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// [`Outcome::Expired`] or [`Outcome::Closed`].
    pub outcome: Outcome,
    /// For how long the connection had been idle, if it expired.
    pub idle: Duration,
}

impl Ended {
    pub(crate) const CLOSED: Self = Self {
        outcome: Outcome::Closed,
        idle: Duration::ZERO,
    };
}

/// Keeps timers of connections: by twheel where it runs, else in this process. It has a thread,
/// which ends with the last handle.
#[derive(Clone)]
pub struct Offload(Arc<Handle>);

struct Handle(Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.state().ends = true;
        self.0.wake();
    }
}

impl Offload {
    /// With the twheel that listens at the path in `TWHEEL_OFFLOAD`, or at
    /// [`DEFAULT_PATH`](crate::channel::DEFAULT_PATH).
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn new() -> io::Result<Self> {
        Self::at(default_path())
    }

    /// With the twheel that listens at this path, once it does.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn at(path: impl Into<PathBuf>) -> io::Result<Self> {
        let shared = Arc::new(Shared::new(path.into())?);
        // Now, so that twheel keeps the first timers, too.
        let (connected, for_thread) = (connect(&shared), shared.clone());
        let thread = thread::Builder::new().name("twheel-client".to_owned());
        // The thread has this thread's mask from its beginning: signals are the program's.
        let before = SigSet::all().thread_swap_mask(SigmaskHow::SIG_SETMASK)?;
        let spawned = thread.spawn(move || work(&for_thread, connected));
        before.thread_set_mask()?;
        spawned?;
        Ok(Self(Arc::new(Handle(shared))))
    }

    /// Starts a timer: it expires when the connection has been without data for this long.
    ///
    /// The socket stays the caller's. twheel has one timer of a socket: others of it the library
    /// keeps.
    pub fn start(&self, socket: &impl AsFd, timeout: Duration) -> Starting {
        self.start_with(socket, Options::new(timeout))
    }

    /// The same, with all options.
    pub fn start_with(&self, socket: &impl AsFd, options: Options) -> Starting {
        let started = check(&options).and_then(|()| Socket::new(socket.as_fd()));
        Starting(Some(started.map(|socket| {
            let shared = &self.0.0;
            let now = Instant::now();
            let tag = shared.state().start(socket, options, None, now);
            shared.wake();
            Idle {
                offload: self.clone(),
                tag,
            }
        })))
    }
}

/// Timers whose ends are queued, for programs with many connections: one place to wait for all.
impl Offload {
    /// Starts a timer. Its end, which may be a refusal, is queued with this tag.
    ///
    /// # Errors
    ///
    /// An option is not valid, or the socket is not a connected TCP socket.
    pub fn watch(&self, socket: &impl AsFd, options: Options, tag: u64) -> io::Result<Timer> {
        check(&options)?;
        let socket = Socket::new(socket.as_fd())?;
        let shared = &self.0.0;
        let now = Instant::now();
        let timer = shared.state().start(socket, options, Some(tag), now);
        shared.wake();
        Ok(Timer(timer))
    }

    /// Begins a queued timer's timeout anew; `timeout`: another one from now on, at least 1 ms and
    /// at most [`LONGEST`]. Whether it has not ended.
    pub fn restart(&self, timer: Timer, timeout: Option<Duration>) -> bool {
        let timeout = timeout.map(possible);
        let restarted = self.0.0.state().restart(timer.0, timeout, Instant::now());
        self.0.0.wake();
        restarted
    }

    /// Stops a queued timer. Whether it had not ended; its end may be in the queue, then.
    pub fn stop(&self, timer: Timer) -> bool {
        let stopped = self.0.0.state().stop(timer.0);
        self.0.0.wake();
        stopped
    }

    /// Whether twheel keeps a queued timer, not this process; `None`: it is over.
    pub fn is_offloaded(&self, timer: Timer) -> Option<bool> {
        self.0.0.state().is_offloaded(timer.0)
    }

    /// Takes the oldest end in the queue; `None`: there is none now.
    pub fn next(&self) -> Option<Done> {
        self.0.0.next()
    }

    /// A descriptor that is readable while ends wait in the queue.
    pub fn ready(&self) -> BorrowedFd<'_> {
        self.0.0.ready.as_fd()
    }
}

/// A timer whose end is queued.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Timer(pub u64);

/// The timeout that a timer can have.
fn possible(timeout: Duration) -> Duration {
    timeout.clamp(Duration::from_millis(1), LONGEST)
}

fn check(options: &Options) -> io::Result<()> {
    let is_valid = !options.timeout.is_zero()
        && options.timeout <= LONGEST
        && options.life != 0
        && options.life & !life::ALL == 0;
    match is_valid {
        true => Ok(()),
        false => Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "a timeout is from 1 ms to 10 days long, and something must count as life",
        )),
    }
}

/// A timer that is being started.
#[must_use = "a timer that is dropped is stopped"]
pub struct Starting(Option<io::Result<Idle>>);

impl Starting {
    /// Waits until it is started.
    ///
    /// # Errors
    ///
    /// The socket is not a connected TCP socket, or an option is not valid.
    pub fn wait(self) -> io::Result<Idle> {
        block_on(self)
    }
}

impl Future for Starting {
    type Output = io::Result<Idle>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Some(Ok(idle)) = &self.0 else {
            let refused = self.0.take();
            return Poll::Ready(refused.unwrap_or_else(|| Err(io::ErrorKind::Other.into())));
        };
        let started = idle.shared().state().started(idle.tag, context.waker());
        match started {
            None => Poll::Pending,
            Some(Err(error)) => Poll::Ready(Err(io::Error::from_raw_os_error(error))),
            Some(Ok(())) => Poll::Ready(self.0.take().expect("it was there")),
        }
    }
}

/// A timer. It is stopped when this is dropped.
pub struct Idle {
    offload: Offload,
    tag: Tag,
}

impl Idle {
    fn shared(&self) -> &Shared {
        &self.offload.0.0
    }

    /// Waits until the connection has been idle, or has ended. It may be awaited again and again:
    /// the answer stays the same.
    pub fn expired(&self) -> Expired<'_> {
        Expired(self)
    }

    /// The same, by blocking this thread.
    ///
    /// # Errors
    ///
    /// twheel refuses the connection.
    pub fn wait(&self) -> io::Result<Ended> {
        block_on(self.expired())
    }

    /// Begins the timeout anew; `timeout`: another one from now on, at least 1 ms and at most
    /// [`LONGEST`]. Returns whether the timer has not ended.
    pub fn restart(&self, timeout: Option<Duration>) -> bool {
        let restarted =
            self.shared()
                .state()
                .restart(self.tag, timeout.map(possible), Instant::now());
        self.shared().wake();
        restarted
    }

    /// Whether twheel keeps the timer, not this process.
    pub fn is_offloaded(&self) -> bool {
        self.shared().state().is_offloaded(self.tag) == Some(true)
    }
}

impl Drop for Idle {
    fn drop(&mut self) {
        self.shared().state().stop(self.tag);
        self.shared().wake();
    }
}

/// Waits for a timer's end.
#[must_use = "futures do nothing unless they are awaited"]
pub struct Expired<'a>(&'a Idle);

impl Future for Expired<'_> {
    type Output = io::Result<Ended>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        let Self(idle) = *self;
        match idle.shared().state().ended(idle.tag, context.waker()) {
            None => Poll::Pending,
            Some(ended) => Poll::Ready(ended.map_err(io::Error::from_raw_os_error)),
        }
    }
}

/// Wakes a thread.
struct Unpark(Thread);

impl Wake for Unpark {
    fn wake(self: Arc<Self>) {
        self.0.unpark();
    }
}

/// Runs a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    let waker = Waker::from(Arc::new(Unpark(thread::current())));
    let mut context = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}
