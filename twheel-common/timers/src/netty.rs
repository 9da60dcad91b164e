//! Netty's HashedWheelTimer.

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU8, AtomicU64, Ordering},
        mpsc,
    },
    vec::Vec,
};

use crate::{
    error::Error,
    hashed::Hashed,
    scheme::{Expired, LAST_TICK, Scheme},
    slab::Key,
    timers::Timers,
};

/// Most starts that a tick takes from their queue, so that a flood of starts cannot hold up the
/// tick. The same number as in `transferTimeoutsToBuckets`.
///
/// ```
/// use twheel_timers::{Netty, TRANSFERS_PER_TICK};
///
/// let (front, mut wheel) = Netty::pair(64, 1_000_000)?;
/// for id in 0..=TRANSFERS_PER_TICK {
///     front.insert(0, 5, id)?;
/// }
/// // One is left for the next tick, so that this call does not go further.
/// assert!(!wheel.advance(10, usize::MAX));
/// assert_eq!(wheel.elapsed(), 1);
/// # Ok::<(), twheel_timers::Error>(())
/// ```
pub const TRANSFERS_PER_TICK: usize = 100_000;

/// Most timers: as many as the wheel can hold.
const MOST: u64 = 1 << 28;

// Phase of a timer (`HashedWheelTimeout.ST_*`).
const ARMED: u8 = 0;
const CANCELLED: u8 = 1;
const EXPIRED: u8 = 2;

/// Bit in the count of pending timers: no more timers may be started.
const STOPPED: u64 = 1 << 63;

/// The part of a timer that both sides share.
#[derive(Debug, Default)]
struct State {
    /// The side that changes it from [`ARMED`] decides whether the timer fires.
    phase: AtomicU8,
    /// Set once the timer is in the wheel.
    timer: OnceLock<Key>,
}

impl State {
    fn leave(&self, phase: u8) -> bool {
        let order = (Ordering::AcqRel, Ordering::Acquire);
        self.phase
            .compare_exchange(ARMED, phase, order.0, order.1)
            .is_ok()
    }
}

/// A value on its way to the wheel, or in it.
#[derive(Debug)]
struct Started<T> {
    state: Arc<State>,
    deadline: u64,
    value: T,
}

/// Scheme 6 as in Netty: the side that starts timers, for any number of threads. Starting and
/// cancelling never wait: they use queues, and only the wheel touches the slots.
///
/// ```
/// use std::thread;
/// use twheel_timers::Netty;
///
/// let (front, mut wheel) = Netty::pair(512, 10_000)?;
/// thread::scope(|scope| {
///     for id in 0..4 {
///         let front = front.clone();
///         scope.spawn(move || front.insert(0, 10, id));
///     }
/// });
/// let late = front.insert(0, 20, 9)?;
/// while !wheel.advance(10, 1_000) {}
/// assert_eq!(std::iter::from_fn(|| wheel.pop_expired()).count(), 4);
/// assert!(late.cancel());
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct Netty<T> {
    starts: mpsc::Sender<Started<T>>,
    cancels: mpsc::Sender<Arc<State>>,
    pending: Arc<AtomicU64>,
    max_pending: u64,
}

impl<T> Clone for Netty<T> {
    fn clone(&self) -> Self {
        Self {
            starts: self.starts.clone(),
            cancels: self.cancels.clone(),
            pending: self.pending.clone(),
            max_pending: self.max_pending,
        }
    }
}

/// A timer that was started: `HashedWheelTimeout`.
///
/// ```
/// use twheel_timers::{Netty, Timeout};
///
/// let (front, _wheel) = Netty::pair(512, 10_000)?;
/// let timeout: Timeout = front.insert(0, 10, "a")?;
/// assert!(timeout.cancel() && timeout.is_cancelled());
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct Timeout {
    state: Arc<State>,
    cancels: mpsc::Sender<Arc<State>>,
}

impl Timeout {
    /// Cancels the timer. Returns whether it was armed; then it does not fire. If a timer is
    /// cancelled and expires at the same time, exactly one of the two succeeds.
    ///
    /// ```
    /// # use twheel_timers::Netty;
    /// # let (front, _wheel) = Netty::pair(512, 10_000)?;
    /// let timeout = front.insert(0, 10, "a")?;
    /// assert!(timeout.cancel());
    /// assert!(!timeout.cancel());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn cancel(&self) -> bool {
        let cancelled = self.state.leave(CANCELLED);
        if cancelled {
            // If the wheel was dropped, there is nothing to remove.
            let _ = self.cancels.send(self.state.clone());
        }
        cancelled
    }

    /// Whether it was cancelled.
    ///
    /// ```
    /// # use twheel_timers::Netty;
    /// # let (front, _wheel) = Netty::pair(512, 10_000)?;
    /// assert!(!front.insert(0, 10, "a")?.is_cancelled());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn is_cancelled(&self) -> bool {
        self.state.phase.load(Ordering::Acquire) == CANCELLED
    }

    /// Whether it was handed out.
    ///
    /// ```
    /// # use twheel_timers::Netty;
    /// # let (front, mut wheel) = Netty::pair(512, 10_000)?;
    /// let timeout = front.insert(0, 10, "a")?;
    /// wheel.advance(10, 1_000);
    /// wheel.pop_expired();
    /// assert!(timeout.is_expired());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn is_expired(&self) -> bool {
        self.state.phase.load(Ordering::Acquire) == EXPIRED
    }
}

impl<T> Netty<T> {
    /// Both sides of a wheel with this many slots, rounded up to a power of two, and with at most
    /// `max_pending` timers that were neither handed out nor removed.
    ///
    /// # Errors
    ///
    /// No slots, or more than 2^24; no timers, or more than 2^28.
    ///
    /// ```
    /// use twheel_timers::Netty;
    ///
    /// let (front, wheel) = Netty::<u32>::pair(512, 10_000)?;
    /// assert!(Netty::<u32>::pair(0, 10_000).is_err());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn pair(slots: u32, max_pending: u64) -> Result<(Self, NettyWheel<T>), Error> {
        Error::check("the cap on pending timers", max_pending, 1, MOST)?;
        let wheel = Timers::new(Hashed::new(slots)?);
        let (starts, started) = mpsc::channel();
        let (cancels, cancelled) = mpsc::channel();
        let pending = Arc::new(AtomicU64::new(0));
        let wheel = NettyWheel {
            wheel,
            started,
            cancelled,
            pending: pending.clone(),
            target: None,
        };
        let front = Self {
            starts,
            cancels,
            pending,
            max_pending,
        };
        Ok((front, wheel))
    }

    /// Starts a timer that is due at tick `now + delay`; a sum beyond the last tick counts as the
    /// last tick.
    ///
    /// # Errors
    ///
    /// Too many timers, or the wheel was stopped.
    ///
    /// ```
    /// # use twheel_timers::Netty;
    /// let (front, wheel) = Netty::pair(512, 1)?;
    /// front.insert(0, 10, "a")?;
    /// assert_eq!(front.insert(0, 10, "b").unwrap_err().most, 1);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn insert(&self, now: u64, delay: u64, value: T) -> Result<Timeout, Error> {
        let one_more = |count| (count < self.max_pending).then_some(count + 1);
        self.pending
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, one_more)
            .map_err(|count| Error {
                what: "the number of pending timers",
                value: (count & !STOPPED) + 1,
                least: 0,
                most: if count & STOPPED == 0 {
                    self.max_pending
                } else {
                    0
                },
            })?;
        let state = Arc::new(State::default());
        let started = Started {
            state: state.clone(),
            deadline: now.saturating_add(delay).min(LAST_TICK),
            value,
        };
        // This fails if the wheel was dropped without being stopped; then no timer fires.
        let _ = self.starts.send(started);
        Ok(Timeout {
            state,
            cancels: self.cancels.clone(),
        })
    }

    /// Number of timers that were neither handed out nor removed.
    ///
    /// ```
    /// # use twheel_timers::Netty;
    /// # let (front, _wheel) = Netty::pair(512, 10_000)?;
    /// front.insert(0, 10, "a")?;
    /// assert_eq!(front.pending(), 1);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn pending(&self) -> u64 {
        self.pending.load(Ordering::Acquire) & !STOPPED
    }
}

/// The side that turns the wheel: `HashedWheelTimer.Worker`, driven by its caller.
///
/// ```
/// use twheel_timers::{Netty, NettyWheel};
///
/// let (front, mut wheel): (_, NettyWheel<&str>) = Netty::pair(512, 10_000)?;
/// front.insert(0, 10, "a")?;
/// wheel.advance(10, 1_000);
/// assert_eq!(wheel.pop_expired().map(|timer| timer.value), Some("a"));
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct NettyWheel<T> {
    wheel: Timers<Started<T>, Hashed>,
    started: mpsc::Receiver<Started<T>>,
    cancelled: mpsc::Receiver<Arc<State>>,
    pending: Arc<AtomicU64>,
    /// The tick that starts were transferred for, until the wheel has reached it.
    target: Option<u64>,
}

impl<T> NettyWheel<T> {
    /// Takes the cancelled timers and then up to [`TRANSFERS_PER_TICK`] started ones from the
    /// queues, and advances to `now`, or by only one tick if more starts are waiting. Returns
    /// whether everything is done; if not, call it again. `budget` is as for
    /// [`Scheme::advance`].
    ///
    /// A timer that has waited in the queue beyond its deadline is due at the next tick.
    ///
    /// ```
    /// # use twheel_timers::Netty;
    /// # let (front, mut wheel) = Netty::pair(512, 10_000)?;
    /// front.insert(0, 10, "a")?;
    /// assert!(wheel.advance(9, 1_000));
    /// assert_eq!(wheel.pop_expired(), None);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn advance(&mut self, now: u64, budget: usize) -> bool {
        let target = match self.target {
            Some(target) => target,
            None => {
                self.remove_cancelled();
                let flooded = self.transfer(TRANSFERS_PER_TICK);
                let next = self.wheel.elapsed().saturating_add(1);
                if flooded { now.min(next) } else { now }
            }
        };
        let done = self.wheel.advance(target, budget);
        self.target = (!done).then_some(target);
        done && target == now
    }

    /// The tick that the wheel has reached.
    ///
    /// ```
    /// # use twheel_timers::Netty;
    /// # let (_front, mut wheel) = Netty::<u32>::pair(512, 10_000)?;
    /// wheel.advance(9, 1_000);
    /// assert_eq!(wheel.elapsed(), 9);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn elapsed(&self) -> u64 {
        self.wheel.elapsed()
    }

    /// Hands out a timer that is due and was not cancelled.
    ///
    /// ```
    /// # use twheel_timers::Netty;
    /// # let (front, mut wheel) = Netty::pair(512, 10_000)?;
    /// front.insert(0, 10, "a")?;
    /// front.insert(0, 10, "b")?.cancel();
    /// wheel.advance(10, 1_000);
    /// assert_eq!(wheel.pop_expired().map(|timer| timer.value), Some("a"));
    /// assert_eq!(wheel.pop_expired(), None);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn pop_expired(&mut self) -> Option<Expired<T>> {
        loop {
            let Expired {
                key,
                value,
                deadline,
            } = self.wheel.pop_expired()?;
            self.forget();
            if value.state.leave(EXPIRED) {
                return Some(Expired {
                    key,
                    value: value.value,
                    deadline,
                });
            }
        }
    }

    /// Stops the wheel: no more timers can be started. Returns the values that were neither handed
    /// out nor cancelled.
    ///
    /// ```
    /// # use twheel_timers::Netty;
    /// # let (front, mut wheel) = Netty::pair(512, 10_000)?;
    /// front.insert(0, 10, "a")?;
    /// assert_eq!(wheel.stop(), ["a"]);
    /// assert!(front.insert(0, 10, "b").is_err());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn stop(mut self) -> Vec<T> {
        self.pending.fetch_or(STOPPED, Ordering::AcqRel);
        // A timer that is counted but not yet in the queue will be there in a moment.
        let counted = |it: &Self| it.pending.load(Ordering::Acquire) & !STOPPED;
        while counted(&self) > self.wheel.len() as u64 {
            let Ok(started) = self.started.recv() else {
                break;
            };
            self.admit(started);
        }
        let left = self.wheel.drain().into_iter();
        // Cancelling comes too late from now on.
        left.filter(|started| started.state.leave(EXPIRED))
            .map(|started| started.value)
            .collect()
    }

    fn forget(&self) {
        self.pending.fetch_sub(1, Ordering::AcqRel);
    }

    fn remove_cancelled(&mut self) {
        while let Ok(state) = self.cancelled.try_recv() {
            // A cancelled timer that is not in the wheel yet is dropped when it arrives.
            let timer = state.timer.get();
            if timer.is_some_and(|timer| self.wheel.remove(*timer).is_some()) {
                self.forget();
            }
        }
    }

    /// Returns whether the limit was reached.
    fn transfer(&mut self, limit: usize) -> bool {
        for _ in 0..limit {
            let Ok(started) = self.started.try_recv() else {
                return false;
            };
            self.admit(started);
        }
        true
    }

    fn admit(&mut self, started: Started<T>) {
        if started.state.phase.load(Ordering::Acquire) != ARMED {
            self.forget();
            return;
        }
        let state = started.state.clone();
        match self.wheel.insert(started.deadline, 0, started) {
            Ok(timer) => drop(state.timer.set(timer)),
            // The slab takes at least as many timers as the cap allows.
            Err(_) => self.forget(),
        }
    }
}
