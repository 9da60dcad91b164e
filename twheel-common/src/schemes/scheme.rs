//! What all schemes have in common.

use std::time::Duration;

use super::{error::Error, slab::Handle};

/// The last tick: later deadlines and clocks count as this. It is so far from the end of 64 bits
/// that no sum of a tick and a wheel's range overflows.
pub const LAST_TICK: u64 = 1 << 62;

/// A timer that is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expired<T> {
    /// The timer's handle. Stale from now on.
    pub timer: Handle,
    /// The value that it was started with.
    pub value: T,
    /// The tick at which it was due.
    pub deadline: u64,
}

/// The model of Varghese & Lauck: the client calls the first operations, the clock calls the last
/// two.
///
/// `T` is the value that the client gives to a timer, and gets back.
pub trait Scheme<T> {
    /// START_TIMER: arms a timer that is due at tick `now + interval`, or at the next tick if that
    /// is in the past.
    ///
    /// # Errors
    ///
    /// An interval (in ticks) longer than the scheme supports, or too many timers.
    fn start_timer(&mut self, now: u64, interval: u64, value: T) -> Result<Handle, Error>;

    /// START_TIMER of an armed timer: moves its deadline. Returns whether it was armed. A timer
    /// that was handed out is not; a timer that is due but was not yet handed out is.
    ///
    /// # Errors
    ///
    /// As for [`start_timer`](Self::start_timer); the deadline then stays as it was.
    fn restart_timer(&mut self, timer: Handle, now: u64, interval: u64) -> Result<bool, Error>;

    /// STOP_TIMER: disarms a timer. Returns its value if it was armed.
    fn stop_timer(&mut self, timer: Handle) -> Option<T>;

    /// PER_TICK_BOOKKEEPING: finds what is due at the ticks up to `now`, tick by tick. It looks at
    /// no more than `budget` timers or slots; a budget of 0 counts as 1. Returns whether it has
    /// finished; if not, call it again.
    fn per_tick_bookkeeping(&mut self, now: u64, budget: usize) -> bool;

    /// EXPIRY_PROCESSING: hands out one timer that the bookkeeping has found, in the order of
    /// deadlines. The caller then acts on it, and may start and stop any timers.
    fn expiry_processing(&mut self) -> Option<Expired<T>>;

    /// The tick at which the bookkeeping next has work; `None` if nothing is armed. It is never
    /// later than the earliest deadline, so sleeping until then misses nothing.
    fn next_tick(&self) -> Option<u64>;

    /// The tick that the bookkeeping has reached.
    fn elapsed(&self) -> u64;

    /// The deadline of a timer, if it is armed.
    fn deadline(&self, timer: Handle) -> Option<u64>;

    /// Number of armed timers, including those that are due but were not yet handed out.
    fn len(&self) -> usize;

    /// Whether no timer is armed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Disarms all timers. Returns their values, in no particular order.
    fn stop_all(&mut self) -> Vec<T>;
}

/// A scheme that is chosen at run time.
impl<T, S: Scheme<T> + ?Sized> Scheme<T> for Box<S> {
    fn start_timer(&mut self, now: u64, interval: u64, value: T) -> Result<Handle, Error> {
        (**self).start_timer(now, interval, value)
    }

    fn restart_timer(&mut self, timer: Handle, now: u64, interval: u64) -> Result<bool, Error> {
        (**self).restart_timer(timer, now, interval)
    }

    fn stop_timer(&mut self, timer: Handle) -> Option<T> {
        (**self).stop_timer(timer)
    }

    fn per_tick_bookkeeping(&mut self, now: u64, budget: usize) -> bool {
        (**self).per_tick_bookkeeping(now, budget)
    }

    fn expiry_processing(&mut self) -> Option<Expired<T>> {
        (**self).expiry_processing()
    }

    fn next_tick(&self) -> Option<u64> {
        (**self).next_tick()
    }

    fn elapsed(&self) -> u64 {
        (**self).elapsed()
    }

    fn deadline(&self, timer: Handle) -> Option<u64> {
        (**self).deadline(timer)
    }

    fn len(&self) -> usize {
        (**self).len()
    }

    fn stop_all(&mut self) -> Vec<T> {
        (**self).stop_all()
    }
}

/// Ticks of a timeout, rounded up, so that nothing fires early.
///
/// # Errors
///
/// A tick of zero, or a tick longer than the timeout. The values and ranges are in nanoseconds.
pub fn ticks(timeout: Duration, tick: Duration) -> Result<u64, Error> {
    let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    // For a timeout of zero no tick is valid; the error's range is then 1 to 1.
    let most = nanos(timeout).max(1);
    let tick = Error::check("the tick in nanoseconds", nanos(tick), 1, most)?;
    Ok(most.div_ceil(tick))
}
