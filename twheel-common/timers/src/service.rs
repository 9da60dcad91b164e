//! A driver on tokio's clock.

use std::{
    boxed::Box,
    fmt,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
    vec::Vec,
};

use futures_core::Stream;
use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, timeout_at},
};

use crate::{
    clock::Clock,
    error::Error,
    scheme::{Expired, Scheme},
    slab::Key,
};

/// Budget of one call of the bookkeeping; other threads can use the timers between two calls.
const BUDGET: usize = 1024;

struct Timers<T> {
    scheme: Box<dyn Scheme<T> + Send>,
    /// Most pending timers; 0 once the service has ended.
    capacity: u64,
}

struct Shared<T> {
    timers: Mutex<Timers<T>>,
    /// Raised when the driver would sleep too long, or must end.
    changed: Notify,
    /// Armed timers, and values that were not yet received.
    pending: AtomicU64,
    /// Handles of the service; the receiver is not counted.
    handles: AtomicU64,
    clock: Clock,
}

impl<T> Shared<T> {
    fn timers(&self) -> MutexGuard<'_, Timers<T>> {
        self.timers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Timers on tokio's clock, in any scheme. Clones share the timers.
///
/// A task drives the scheme and sends expired timers through a channel. It never waits for the
/// receiver, so a slow consumer delays no other timer. Instead the number of timers is bounded,
/// from their start until their value was received: beyond the capacity, starts are refused. So a
/// slow consumer is felt by those who start timers, not by the memory or the wheel.
///
/// Ticks are absolute, `begin + k·tick`: the wheel does not drift, and a driver that was late
/// catches up in order. The driver sleeps until the tick that the scheme names. If the scheme names
/// only ticks that have work, as [`Hierarchical`](crate::Hierarchical) does, there are no wake-ups
/// while idle.
///
/// If one task both starts timers and takes what is due, [`DelayQueue`](crate::DelayQueue) is
/// simpler and needs no lock.
///
/// ```
/// use std::time::Duration;
/// use twheel_timers::{Hierarchical, TimerService, Timers};
///
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), twheel_timers::Error> {
/// let timers = Timers::new(Hierarchical::new(3, 1024)?);
/// let (service, mut expired) = TimerService::spawn(timers, Duration::from_millis(1), 100_000)?;
/// let worker = service.clone();
/// tokio::spawn(async move { worker.insert(Duration::from_secs(5), "from a task") });
/// assert_eq!(expired.recv().await.map(|timer| timer.value), Some("from a task"));
/// # Ok(())
/// # }
/// ```
pub struct TimerService<T> {
    shared: Arc<Shared<T>>,
}

impl<T> Clone for TimerService<T> {
    fn clone(&self) -> Self {
        self.shared.handles.fetch_add(1, Ordering::AcqRel);
        let shared = self.shared.clone();
        Self { shared }
    }
}

impl<T> Drop for TimerService<T> {
    fn drop(&mut self) {
        // The driver ends after the last handle.
        self.shared.handles.fetch_sub(1, Ordering::AcqRel);
        self.shared.changed.notify_one();
    }
}

impl<T> fmt::Debug for TimerService<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TimerService")
            .field("tick", &self.shared.clock.tick())
            .field("pending", &self.pending())
            .finish_non_exhaustive()
    }
}

impl<T: Send + 'static> TimerService<T> {
    /// Starts to drive a scheme that is at tick 0, in a task of the current tokio runtime. The task
    /// ends, and closes the channel, when it is stopped, when the receiver is dropped, or when all
    /// handles are dropped and all timers have fired.
    ///
    /// # Errors
    ///
    /// A tick of zero or of more than 2^64 nanoseconds, or a capacity of 0.
    ///
    /// # Panics
    ///
    /// Outside of a tokio runtime, like [`tokio::spawn`].
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::{Hierarchical, TimerService, Timers};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), twheel_timers::Error> {
    /// # let timers = Timers::new(Hierarchical::new(3, 1024)?);
    /// # let tick = Duration::from_millis(1);
    /// let (service, expired) = TimerService::<u32>::spawn(timers, tick, 10)?;
    /// assert_eq!(service.pending(), 0);
    /// # Ok(())
    /// # }
    /// ```
    pub fn spawn(
        scheme: impl Scheme<T> + Send + 'static,
        tick: Duration,
        capacity: u64,
    ) -> Result<(Self, Expirations<T>), Error> {
        let clock = Clock::new(tick)?;
        Error::check("the capacity in timers", capacity, 1, u64::MAX)?;
        let shared = Arc::new(Shared {
            timers: Mutex::new(Timers {
                scheme: Box::new(scheme),
                capacity,
            }),
            changed: Notify::new(),
            pending: AtomicU64::new(0),
            handles: AtomicU64::new(1),
            clock,
        });
        let (sender, receiver) = mpsc::unbounded_channel();
        tokio::spawn(drive(shared.clone(), sender));
        let expirations = Expirations {
            receiver,
            shared: shared.clone(),
        };
        Ok((Self { shared }, expirations))
    }
}

impl<T> TimerService<T> {
    /// Starts a timer: its value is sent at the first tick that begins after `interval`.
    ///
    /// # Errors
    ///
    /// The capacity is used up, the service was stopped, or the scheme refuses the interval.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::{Hierarchical, TimerService, Timers};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), twheel_timers::Error> {
    /// # let timers = Timers::new(Hierarchical::new(3, 1024)?);
    /// # let tick = Duration::from_millis(1);
    /// # let (service, mut expired) = TimerService::spawn(timers, tick, 10)?;
    /// service.insert(Duration::from_secs(5), "a")?;
    /// assert_eq!(expired.recv().await.map(|timer| timer.value), Some("a"));
    /// # Ok(())
    /// # }
    /// ```
    pub fn insert(&self, interval: Duration, value: T) -> Result<Key, Error> {
        let shared = &*self.shared;
        let mut timers = shared.timers();
        // Under the lock, so nobody else can add timers.
        let pending = shared.pending.load(Ordering::Acquire);
        let what = "the number of pending timers";
        Error::check(what, pending + 1, 0, timers.capacity)?;
        let scheme = &mut timers.scheme;
        let (now, ticks) = shared.clock.interval(interval);
        let before = scheme.next_tick();
        let timer = scheme.insert(now, ticks, value)?;
        shared.pending.fetch_add(1, Ordering::AcqRel);
        if before.is_none_or(|before| scheme.next_tick() < Some(before)) {
            shared.changed.notify_one();
        }
        Ok(timer)
    }

    /// Moves a timer. Returns whether it was armed.
    ///
    /// # Errors
    ///
    /// The scheme refuses the interval.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::{Hierarchical, TimerService, Timers};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), twheel_timers::Error> {
    /// # let timers = Timers::new(Hierarchical::new(3, 1024)?);
    /// # let tick = Duration::from_millis(1);
    /// # let (service, mut expired) = TimerService::spawn(timers, tick, 10)?;
    /// let key = service.insert(Duration::from_secs(5), "a")?;
    /// assert!(service.reset(key, Duration::from_secs(60))?);
    /// expired.recv().await;
    /// assert!(!service.reset(key, Duration::from_secs(60))?);
    /// # Ok(())
    /// # }
    /// ```
    pub fn reset(&self, key: Key, interval: Duration) -> Result<bool, Error> {
        let scheme = &mut self.shared.timers().scheme;
        let (now, ticks) = self.shared.clock.interval(interval);
        let before = scheme.next_tick();
        let armed = scheme.reset(key, now, ticks)?;
        if scheme.next_tick() < before {
            self.shared.changed.notify_one();
        }
        Ok(armed)
    }

    /// Stops a timer. Returns its value if it was armed; a timer whose value was sent is not.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::{Hierarchical, TimerService, Timers};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), twheel_timers::Error> {
    /// # let timers = Timers::new(Hierarchical::new(3, 1024)?);
    /// # let tick = Duration::from_millis(1);
    /// # let (service, mut expired) = TimerService::spawn(timers, tick, 10)?;
    /// let key = service.insert(Duration::from_secs(5), "a")?;
    /// assert_eq!(service.remove(key), Some("a"));
    /// assert_eq!(service.remove(key), None);
    /// # Ok(())
    /// # }
    /// ```
    pub fn remove(&self, key: Key) -> Option<T> {
        let value = self.shared.timers().scheme.remove(key)?;
        self.shared.pending.fetch_sub(1, Ordering::AcqRel);
        Some(value)
    }

    /// Ends the service, for all handles. Returns the values that were not sent; values that were
    /// sent can still be received.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::{Hierarchical, TimerService, Timers};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), twheel_timers::Error> {
    /// # let timers = Timers::new(Hierarchical::new(3, 1024)?);
    /// # let tick = Duration::from_millis(1);
    /// # let (service, mut expired) = TimerService::spawn(timers, tick, 10)?;
    /// service.insert(Duration::from_secs(5), "a")?;
    /// assert_eq!(service.shutdown(), ["a"]);
    /// assert!(expired.recv().await.is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub fn shutdown(&self) -> Vec<T> {
        let mut timers = self.shared.timers();
        timers.capacity = 0;
        let values = timers.scheme.drain();
        let count = values.len() as u64;
        self.shared.pending.fetch_sub(count, Ordering::AcqRel);
        self.shared.changed.notify_one();
        values
    }

    /// Number of armed timers, and of values that were not yet received.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::{Hierarchical, TimerService, Timers};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), twheel_timers::Error> {
    /// # let timers = Timers::new(Hierarchical::new(3, 1024)?);
    /// # let tick = Duration::from_millis(1);
    /// # let (service, mut expired) = TimerService::spawn(timers, tick, 10)?;
    /// service.insert(Duration::from_secs(5), "a")?;
    /// assert_eq!(service.pending(), 1);
    /// # Ok(())
    /// # }
    /// ```
    pub fn pending(&self) -> u64 {
        self.shared.pending.load(Ordering::Acquire)
    }
}

/// The receiver of expired timers, in the order of their deadlines. It is a [`Stream`], too, which
/// ends when the service has ended.
///
/// ```
/// # use std::time::Duration;
/// # use twheel_timers::{Hierarchical, TimerService, Timers};
/// # #[tokio::main(flavor = "current_thread", start_paused = true)]
/// # async fn main() -> Result<(), twheel_timers::Error> {
/// # let timers = Timers::new(Hierarchical::new(3, 1024)?);
/// # let tick = Duration::from_millis(1);
/// # let (service, expired) = TimerService::spawn(timers, tick, 10)?;
/// use futures_util::StreamExt;
///
/// for id in [3, 1, 2] {
///     service.insert(Duration::from_secs(id), id)?;
/// }
/// drop(service);
/// let ids: Vec<u64> = expired.map(|timer| timer.value).collect().await;
/// assert_eq!(ids, [1, 2, 3]);
/// # Ok(())
/// # }
/// ```
pub struct Expirations<T> {
    receiver: mpsc::UnboundedReceiver<Expired<T>>,
    shared: Arc<Shared<T>>,
}

impl<T> Expirations<T> {
    /// The next expired timer; `None` after the service has ended. Cancel safe.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::{Hierarchical, TimerService, Timers};
    /// # #[tokio::main(flavor = "current_thread", start_paused = true)]
    /// # async fn main() -> Result<(), twheel_timers::Error> {
    /// # let timers = Timers::new(Hierarchical::new(3, 1024)?);
    /// # let tick = Duration::from_millis(1);
    /// # let (service, mut expired) = TimerService::spawn(timers, tick, 10)?;
    /// service.insert(Duration::from_secs(5), "a")?;
    /// drop(service);
    /// assert_eq!(expired.recv().await.map(|timer| timer.value), Some("a"));
    /// assert!(expired.recv().await.is_none());
    /// # Ok(())
    /// # }
    /// ```
    pub async fn recv(&mut self) -> Option<Expired<T>> {
        let expired = self.receiver.recv().await?;
        self.shared.pending.fetch_sub(1, Ordering::AcqRel);
        Some(expired)
    }
}

impl<T> Stream for Expirations<T> {
    type Item = Expired<T>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Expired<T>>> {
        let polled = self.receiver.poll_recv(cx);
        if matches!(polled, Poll::Ready(Some(_))) {
            self.shared.pending.fetch_sub(1, Ordering::AcqRel);
        }
        polled
    }
}

impl<T> Drop for Expirations<T> {
    fn drop(&mut self) {
        self.receiver.close();
        self.shared.changed.notify_one();
    }
}

impl<T> fmt::Debug for Expirations<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Expirations").finish_non_exhaustive()
    }
}

/// What the driver does next.
enum Then {
    /// More is due.
    Again,
    SleepUntil(Option<Instant>),
}

async fn drive<T>(shared: Arc<Shared<T>>, expired: mpsc::UnboundedSender<Expired<T>>) {
    while let Some(then) = turn(&shared, &expired) {
        match then {
            Then::Again => tokio::task::yield_now().await,
            // Whichever comes first.
            Then::SleepUntil(Some(wake)) => drop(timeout_at(wake, shared.changed.notified()).await),
            Then::SleepUntil(None) => shared.changed.notified().await,
        }
    }
    shared.timers().capacity = 0;
}

/// Sends the timers that are due, within the budget. Returns `None` when the driver must end.
fn turn<T>(shared: &Shared<T>, expired: &mpsc::UnboundedSender<Expired<T>>) -> Option<Then> {
    let mut timers = shared.timers();
    if timers.capacity == 0 || expired.is_closed() {
        return None;
    }
    let done = timers.scheme.advance(shared.clock.now(), BUDGET);
    while let Some(timer) = timers.scheme.pop_expired() {
        expired.send(timer).ok()?;
    }
    let next = timers.scheme.next_tick();
    let abandoned = shared.handles.load(Ordering::Acquire) == 0;
    match next {
        _ if !done => Some(Then::Again),
        None if abandoned => None,
        next => Some(Then::SleepUntil(
            next.and_then(|next| shared.clock.instant(next)),
        )),
    }
}
