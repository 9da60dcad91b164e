//! The seven timer schemes of Varghese & Lauck, *Hashed and Hierarchical Timing Wheels* (SOSP 1987,
//! ToN 1997), and what well-known systems have made of them, for use in host programs.
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
//! Each is the `S` of [`Timers<T, S>`](Timers), which does what all have in common, and all are used
//! through the trait [`Scheme`]. On top of them stand [`ById`] (an id is armed at most once),
//! [`Expiring`] (a fixed timeout, with listeners), [`Netty`] (starts and stops from any thread) and,
//! with feature `tokio`, `TimerService`.
//!
//! There is no clock in here: `now` is an argument, a number of ticks. What all promise: a timer is
//! handed out by the first bookkeeping of a tick that does not lie before its deadline. So it never
//! fires early; where every tick is driven, it fires at the very tick of its deadline; and seen from
//! a clock that is finer than a tick it is late by less than one tick. A deadline already past is
//! that of the next tick. A driver that is late gets what it missed in the order of the ticks.
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

/// The last tick there is: deadlines and clocks beyond it count as this. Far enough from the end of
/// 64 bits that no sum of a tick and a wheel's range overflows.
pub const LAST_TICK: u64 = 1 << 62;

/// Bad input: a value outside of what is allowed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be {value}: it must lie between {least} and {most}")]
pub struct Error {
    /// What the value is, with its unit.
    pub what: &'static str,
    /// What was given.
    pub value: u64,
    /// The least that is allowed.
    pub least: u64,
    /// The most that is allowed.
    pub most: u64,
}

impl Error {
    /// Refuses a value that does not lie between two others.
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
    /// What it was known by. Stale from now on.
    pub timer: Handle,
    /// What it was started with.
    pub value: T,
    /// The tick at which it was due.
    pub deadline: u64,
}

/// The model of Varghese & Lauck: the client calls the first operations, the clock the
/// last two.
///
/// `T` is what the client knows a timer by, and gets back.
pub trait Scheme<T> {
    /// START_TIMER: arms a timer that is due at tick `now + interval`, or at the next tick if that
    /// is past.
    ///
    /// # Errors
    ///
    /// An interval (in ticks) that is longer than the scheme can tell apart, and more timers than
    /// there can be.
    fn start_timer(&mut self, now: u64, interval: u64, value: T) -> Result<Handle, Error>;

    /// START_TIMER of one that is armed: moves its deadline. Says whether it was armed; one that was
    /// handed out is not, one that is due and was not yet handed out is.
    ///
    /// # Errors
    ///
    /// As of [`start_timer`](Self::start_timer); the deadline is as before.
    fn restart_timer(&mut self, timer: Handle, now: u64, interval: u64) -> Result<bool, Error>;

    /// STOP_TIMER: disarms it, and returns what it was started with if it was armed.
    fn stop_timer(&mut self, timer: Handle) -> Option<T>;

    /// PER_TICK_BOOKKEEPING: finds what is due at the ticks up to `now`, tick by tick, after at most
    /// `budget` looks at timers or slots; a budget of 0 is as good as 1. Says whether it came to an
    /// end: if not, call it again.
    fn per_tick_bookkeeping(&mut self, now: u64, budget: usize) -> bool;

    /// EXPIRY_PROCESSING: hands out one timer that the bookkeeping has found, in the order of
    /// deadlines. What it is to do is then up to the caller, who may start and stop any timers.
    fn expiry_processing(&mut self) -> Option<Expired<T>>;

    /// The tick at which the bookkeeping has something to do next, or none if nothing is armed.
    /// Never later than the earliest deadline; nothing is missed by sleeping until then.
    fn next_tick(&self) -> Option<u64>;

    /// The tick that the bookkeeping has come to.
    fn elapsed(&self) -> u64;

    /// The deadline of a timer, if it is armed.
    fn deadline(&self, timer: Handle) -> Option<u64>;

    /// Timers that are armed, those included that are due and were not yet handed out.
    fn len(&self) -> usize;

    /// Whether no timer is armed.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Disarms all, and returns what they were started with, in no particular order.
    fn stop_all(&mut self) -> Vec<T>;
}

/// A scheme that is chosen when the program runs.
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
/// A tick of zero, and one that is longer than the timeout; values and ranges in nanoseconds.
pub fn ticks(timeout: Duration, tick: Duration) -> Result<u64, Error> {
    let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    // Of a timeout of zero there is no tick that would do: the range says 1 to 1 then.
    let most = nanos(timeout).max(1);
    let tick = Error::check("the tick in nanoseconds", nanos(tick), 1, most)?;
    Ok(most.div_ceil(tick))
}
