//! A driver on tokio's clock.

use std::{
    fmt,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, mpsc},
    time::{Instant, timeout_at},
};

use super::{
    error::Error,
    scheme::{Expired, LAST_TICK, Scheme},
    slab::Handle,
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
    begin: Instant,
    tick: Duration,
}

impl<T> Shared<T> {
    fn timers(&self) -> MutexGuard<'_, Timers<T>> {
        self.timers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ticks that have passed.
    fn now(&self) -> u64 {
        let ticks = self.begin.elapsed().as_nanos() / self.tick.as_nanos();
        u64::try_from(ticks).unwrap_or(LAST_TICK)
    }

    /// The absolute time of a tick, so that delays of the driver do not add up. `None` if it is out
    /// of the clock's range.
    fn instant(&self, tick: u64) -> Option<Instant> {
        let nanos = self.tick.as_nanos().checked_mul(tick.into())?;
        let after = Duration::from_nanos(u64::try_from(nanos).ok()?);
        self.begin.checked_add(after)
    }

    /// The present tick, and the ticks from it to the first that begins after `interval`: never
    /// early.
    fn interval(&self, interval: Duration) -> (u64, u64) {
        let tick = self.tick.as_nanos();
        let elapsed = self.begin.elapsed().as_nanos();
        let due = (elapsed + interval.as_nanos()).div_ceil(tick);
        let now = elapsed / tick;
        let ticks = |ticks: u128| u64::try_from(ticks).unwrap_or(LAST_TICK);
        (ticks(now), ticks(due - now))
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
/// only ticks that have work, as [`Hierarchical`](super::Hierarchical) does, there are no wake-ups
/// while idle.
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
            .field("tick", &self.shared.tick)
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
    pub fn spawn(
        scheme: impl Scheme<T> + Send + 'static,
        tick: Duration,
        capacity: u64,
    ) -> Result<(Self, Expirations<T>), Error> {
        let nanos = u64::try_from(tick.as_nanos()).unwrap_or(0);
        Error::check("the tick in nanoseconds", nanos, 1, u64::MAX)?;
        Error::check("the capacity in timers", capacity, 1, u64::MAX)?;
        let shared = Arc::new(Shared {
            timers: Mutex::new(Timers {
                scheme: Box::new(scheme),
                capacity,
            }),
            changed: Notify::new(),
            pending: AtomicU64::new(0),
            handles: AtomicU64::new(1),
            begin: Instant::now(),
            tick,
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
    pub fn start(&self, interval: Duration, value: T) -> Result<Handle, Error> {
        let shared = &*self.shared;
        let mut timers = shared.timers();
        // Under the lock, so nobody else can add timers.
        let pending = shared.pending.load(Ordering::Acquire);
        let what = "the number of pending timers";
        Error::check(what, pending + 1, 0, timers.capacity)?;
        let scheme = &mut timers.scheme;
        let (now, ticks) = shared.interval(interval);
        let before = scheme.next_tick();
        let timer = scheme.start_timer(now, ticks, value)?;
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
    pub fn restart(&self, timer: Handle, interval: Duration) -> Result<bool, Error> {
        let scheme = &mut self.shared.timers().scheme;
        let (now, ticks) = self.shared.interval(interval);
        let before = scheme.next_tick();
        let armed = scheme.restart_timer(timer, now, ticks)?;
        if scheme.next_tick() < before {
            self.shared.changed.notify_one();
        }
        Ok(armed)
    }

    /// Stops a timer. Returns its value if it was armed; a timer whose value was sent is not.
    pub fn stop(&self, timer: Handle) -> Option<T> {
        let value = self.shared.timers().scheme.stop_timer(timer)?;
        self.shared.pending.fetch_sub(1, Ordering::AcqRel);
        Some(value)
    }

    /// Ends the service, for all handles. Returns the values that were not sent; values that were
    /// sent can still be received.
    pub fn stop_all(&self) -> Vec<T> {
        let mut timers = self.shared.timers();
        timers.capacity = 0;
        let values = timers.scheme.stop_all();
        let count = values.len() as u64;
        self.shared.pending.fetch_sub(count, Ordering::AcqRel);
        self.shared.changed.notify_one();
        values
    }

    /// Number of armed timers, and of values that were not yet received.
    pub fn pending(&self) -> u64 {
        self.shared.pending.load(Ordering::Acquire)
    }
}

/// The receiver of expired timers, in the order of their deadlines.
pub struct Expirations<T> {
    receiver: mpsc::UnboundedReceiver<Expired<T>>,
    shared: Arc<Shared<T>>,
}

impl<T> Expirations<T> {
    /// The next expired timer; `None` after the service has ended. Cancel safe.
    pub async fn recv(&mut self) -> Option<Expired<T>> {
        let expired = self.receiver.recv().await?;
        self.shared.pending.fetch_sub(1, Ordering::AcqRel);
        Some(expired)
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
    let done = timers.scheme.per_tick_bookkeeping(shared.now(), BUDGET);
    while let Some(timer) = timers.scheme.expiry_processing() {
        expired.send(timer).ok()?;
    }
    let next = timers.scheme.next_tick();
    let abandoned = shared.handles.load(Ordering::Acquire) == 0;
    match next {
        _ if !done => Some(Then::Again),
        None if abandoned => None,
        next => Some(Then::SleepUntil(next.and_then(|next| shared.instant(next)))),
    }
}
