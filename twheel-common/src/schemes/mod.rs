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
mod error;
mod expiring;
mod growing;
mod hashed;
mod hashed_ordered;
mod heap;
mod hierarchical;
mod netty;
mod ordered;
mod ring;
mod scheme;
#[cfg(feature = "tokio")]
mod service;
mod simple;
mod slab;
mod timers;
mod unordered;

pub use by_id::ById;
pub use error::Error;
pub use expiring::{Expiring, ListenerId};
pub use growing::Growing;
pub use hashed::Hashed;
pub use hashed_ordered::HashedOrdered;
pub use heap::Heap;
pub use hierarchical::Hierarchical;
pub use netty::{Netty, NettyWheel, TRANSFERS_PER_TICK, Timeout};
pub use ordered::{End, Ordered};
pub use scheme::{Expired, LAST_TICK, Scheme, ticks};
#[cfg(feature = "tokio")]
pub use service::{Expirations, TimerService};
pub use simple::Simple;
pub use slab::Handle;
pub use timers::Timers;
pub use unordered::Unordered;
