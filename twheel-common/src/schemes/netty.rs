//! Netty's HashedWheelTimer.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicU8, AtomicU64, Ordering},
    mpsc,
};

use super::{Error, Expired, Handle, Hashed, LAST_TICK, Scheme, Timers};

/// Starts that a tick takes from their queue at most, so that a flood of them cannot starve it.
/// `transferTimeoutsToBuckets` has the same number.
pub const TRANSFERS_PER_TICK: usize = 100_000;

// What has become of a timer (`HashedWheelTimeout.ST_*`).
const ARMED: u8 = 0;
const CANCELLED: u8 = 1;
const EXPIRED: u8 = 2;

/// Set in the count of pending timers when there are to be no more.
const STOPPED: u64 = 1 << 63;

/// One timer, as both sides see it.
#[derive(Debug, Default)]
struct State {
    /// Whoever changes it from [`ARMED`] decides whether it fires.
    phase: AtomicU8,
    /// Known once it stands in the wheel.
    timer: OnceLock<Handle>,
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

/// Scheme 6 as Netty has it: the side that starts timers, for any number of threads. Starting and
/// cancelling wait for nobody: they go through queues, and slots are touched by the wheel alone.
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
#[derive(Clone, Debug)]
pub struct Timeout {
    state: Arc<State>,
    cancels: mpsc::Sender<Arc<State>>,
}

impl Timeout {
    /// Says whether it was armed: then it does not fire. Of a cancel and an expiry at the same time
    /// exactly one has its way.
    pub fn cancel(&self) -> bool {
        let cancelled = self.state.leave(CANCELLED);
        if cancelled {
            // A wheel that is gone has nothing to remove.
            let _ = self.cancels.send(self.state.clone());
        }
        cancelled
    }

    /// Whether it was cancelled.
    pub fn is_cancelled(&self) -> bool {
        self.state.phase.load(Ordering::Acquire) == CANCELLED
    }

    /// Whether it was handed out.
    pub fn is_expired(&self) -> bool {
        self.state.phase.load(Ordering::Acquire) == EXPIRED
    }
}

impl<T> Netty<T> {
    /// Both sides of a wheel with so many slots, rounded up to a power of two, and with so many
    /// timers at most that were neither handed out nor removed.
    ///
    /// # Errors
    ///
    /// No slots, or more than 2^24; no timers, or more than 2^32 - 1.
    pub fn pair(slots: u32, max_pending: u64) -> Result<(Self, NettyWheel<T>), Error> {
        Error::check("the cap on pending timers", max_pending, 1, u32::MAX.into())?;
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

    /// Starts a timer that is due at tick `now + delay`; a sum beyond the last tick counts as that.
    ///
    /// # Errors
    ///
    /// More timers than the cap; any after the wheel was stopped.
    pub fn start(&self, now: u64, delay: u64, value: T) -> Result<Timeout, Error> {
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
        // It fails when the wheel was dropped without being stopped: then nothing fires.
        let _ = self.starts.send(started);
        Ok(Timeout {
            state,
            cancels: self.cancels.clone(),
        })
    }

    /// Timers that were neither handed out nor removed.
    pub fn pending(&self) -> u64 {
        self.pending.load(Ordering::Acquire) & !STOPPED
    }
}

/// The side that turns: `HashedWheelTimer.Worker`, driven by its caller.
#[derive(Debug)]
pub struct NettyWheel<T> {
    wheel: Timers<Started<T>, Hashed>,
    started: mpsc::Receiver<Started<T>>,
    cancelled: mpsc::Receiver<Arc<State>>,
    pending: Arc<AtomicU64>,
    /// The tick that starts were taken for, while the wheel has not come to it.
    target: Option<u64>,
}

impl<T> NettyWheel<T> {
    /// Takes what was cancelled and then what was started from the queues, the latter up to
    /// [`TRANSFERS_PER_TICK`], and moves on to `now`, or by one tick while more are waiting. Says
    /// whether all is done: if not, call it again. `budget` as of [`Scheme::per_tick_bookkeeping`].
    ///
    /// What has waited beyond its deadline is due at the next tick.
    pub fn tick(&mut self, now: u64, budget: usize) -> bool {
        let target = match self.target {
            Some(target) => target,
            None => {
                self.remove_cancelled();
                let flooded = self.transfer(TRANSFERS_PER_TICK);
                let next = self.wheel.elapsed().saturating_add(1);
                if flooded { now.min(next) } else { now }
            }
        };
        let done = self.wheel.per_tick_bookkeeping(target, budget);
        self.target = (!done).then_some(target);
        done && target == now
    }

    /// The tick that it has come to.
    pub fn elapsed(&self) -> u64 {
        self.wheel.elapsed()
    }

    /// Hands out a timer that is due and was not cancelled.
    pub fn expired(&mut self) -> Option<Expired<T>> {
        loop {
            let Expired {
                timer,
                value,
                deadline,
            } = self.wheel.expiry_processing()?;
            self.forget();
            if value.state.leave(EXPIRED) {
                return Some(Expired {
                    timer,
                    value: value.value,
                    deadline,
                });
            }
        }
    }

    /// Ends it: there can be no more starts. Returns what was neither handed out nor cancelled.
    pub fn stop(mut self) -> Vec<T> {
        self.pending.fetch_or(STOPPED, Ordering::AcqRel);
        // What has been counted will be in the queue in a moment, if it is not yet.
        let counted = |it: &Self| it.pending.load(Ordering::Acquire) & !STOPPED;
        while counted(&self) > self.wheel.len() as u64 {
            let Ok(started) = self.started.recv() else {
                break;
            };
            self.admit(started);
        }
        let left = self.wheel.stop_all().into_iter();
        // A cancel from now on comes too late.
        left.filter(|started| started.state.leave(EXPIRED))
            .map(|started| started.value)
            .collect()
    }

    fn forget(&self) {
        self.pending.fetch_sub(1, Ordering::AcqRel);
    }

    fn remove_cancelled(&mut self) {
        while let Ok(state) = self.cancelled.try_recv() {
            // One that is not in the wheel yet is left out when it comes.
            let timer = state.timer.get();
            if timer.is_some_and(|timer| self.wheel.stop_timer(*timer).is_some()) {
                self.forget();
            }
        }
    }

    /// Says whether the limit was reached.
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
        match self.wheel.start_timer(started.deadline, 0, started) {
            Ok(timer) => drop(state.timer.set(timer)),
            // The cap is not above what the slab takes.
            Err(_) => self.forget(),
        }
    }
}
