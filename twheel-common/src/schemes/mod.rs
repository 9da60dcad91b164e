//! The seven timer schemes of Varghese & Lauck, *Hashed and Hierarchical Timing Wheels* (SOSP 1987,
//! ToN 1997), and the variants of well-known systems, for use in host programs.
//!
//! n = armed timers, M = slots, m = levels:
//!
//! | scheme | type              | start            | stop     | tick             |
//! |--------|-------------------|------------------|----------|------------------|
//! | 1      | [`Unordered`]     | O(1)             | O(1)     | O(n)             |
//! | 2      | [`Ordered`]       | O(n)             | O(1)     | O(1)             |
//! | 3      | [`Heap`]          | O(log n)         | O(log n) | O(1)             |
//! | 4      | [`Simple`]        | O(1)             | O(1)     | O(1)             |
//! | 5      | [`HashedOrdered`] | O(1), worst O(n) | O(1)     | O(1)             |
//! | 6      | [`Hashed`]        | O(1)             | O(1)     | O(n/M)           |
//! | 7      | [`Hierarchical`]  | O(m)             | O(1)     | O(1) in the mean |
//! | 7      | [`Growing`]       | O(m)             | O(1)     | O(1) in the mean |
//!
//! Each type is the `S` of [`Timers<T, S>`](Timers), which has the common part; all are used
//! through the trait [`Scheme`]. They are the base of [`ById`] (an id is armed at most once),
//! [`Expiring`] (a fixed timeout, with listeners), [`Netty`] (starts and stops from any thread)
//! and, with feature `tokio`, `TimerService`.
//!
//! There is no clock here: `now` is an argument, a number of ticks. All schemes promise that a
//! timer is handed out by the first bookkeeping of a tick that is not before its deadline. So a
//! timer never fires early; if every tick is driven, it fires at exactly the tick of its deadline;
//! and on a clock finer than a tick it is late by less than one tick. A deadline in the past counts
//! as the next tick. A driver that is late gets the timers that it missed in the order of their
//! ticks.
//!
//! ```
//! use twheel_common::schemes::{Hierarchical, Scheme, Timers};
//!
//! let mut timers = Timers::new(Hierarchical::new(3, 1024)?);
//! let (now, budget) = (0, 1_000);
//! timers.start_timer(now, 5, "heartbeat")?;
//! let reply = timers.start_timer(now, 7, "reply")?;
//! assert_eq!(timers.stop_timer(reply), Some("reply"));
//!
//! let mut fired = Vec::new();
//! for tick in 1..=10 {
//!     while !timers.per_tick_bookkeeping(tick, budget) {}
//!     while let Some(timer) = timers.expiry_processing() {
//!         fired.push((tick, timer.value));
//!     }
//! }
//! assert_eq!(fired, [(5, "heartbeat")]);
//! # Ok::<(), twheel_common::schemes::Error>(())
//! ```

mod bitmap;
mod by_id;
mod expiring;
mod growing;
mod hashed;
mod hashed_ordered;
mod heap;
mod hierarchical;
mod netty;
mod ordered;
mod ring;
#[cfg(feature = "tokio")]
mod service;
mod simple;
mod slab;
mod timers;
mod unordered;

use std::time::Duration;

pub use by_id::ById;
pub use expiring::{Expiring, ListenerId};
pub use growing::Growing;
pub use hashed::Hashed;
pub use hashed_ordered::HashedOrdered;
pub use heap::Heap;
pub use hierarchical::Hierarchical;
pub use netty::{Netty, NettyWheel, TRANSFERS_PER_TICK, Timeout};
pub use ordered::{End, Ordered};
#[cfg(feature = "tokio")]
pub use service::{Expirations, TimerService};
pub use simple::Simple;
pub use slab::Handle;
pub use timers::Timers;
pub use unordered::Unordered;

/// The last tick: later deadlines and clocks count as this. It is so far from the end of 64 bits
/// that no sum of a tick and a wheel's range overflows.
pub const LAST_TICK: u64 = 1 << 62;

/// Bad input: a value outside the allowed range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be {value}: it must lie between {least} and {most}")]
pub struct Error {
    /// What the value is, with its unit.
    pub what: &'static str,
    /// The value that was given.
    pub value: u64,
    /// The least allowed value.
    pub least: u64,
    /// The greatest allowed value.
    pub most: u64,
}

impl Error {
    /// Refuses a value that is not between two others.
    fn check(what: &'static str, value: u64, least: u64, most: u64) -> Result<u64, Self> {
        if (least..=most).contains(&value) {
            Ok(value)
        } else {
            Err(Self {
                what,
                value,
                least,
                most,
            })
        }
    }
}

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
