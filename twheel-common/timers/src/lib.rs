//! Timers for any number of connections, requests, cache entries: start, stop and re-arm in O(1),
//! with no clock and no thread of their own.
//!
//! The seven timer schemes of Varghese and Lauck, *Hashed and Hierarchical Timing Wheels* (SOSP
//! 1987, ToN 1997), the variants of well-known systems, and a [`DelayQueue`] on tokio's clock.
//!
//! ```
//! use twheel_timers::{Hierarchical, Scheme, Timers};
//!
//! let mut timers = Timers::new(Hierarchical::new(3, 1024)?);
//! let now = 0;
//! timers.insert(now, 5, "heartbeat")?;
//! let reply = timers.insert(now, 7, "reply")?;
//! assert_eq!(timers.remove(reply), Some("reply"));
//!
//! let mut fired = Vec::new();
//! for now in 1..=10 {
//!     while let Some(timer) = timers.expire(now) {
//!         fired.push((now, timer.value));
//!     }
//! }
//! assert_eq!(fired, [(5, "heartbeat")]);
//! # Ok::<(), twheel_timers::Error>(())
//! ```
//!
//! # Which timer structure?
//!
#![doc = include_str!("../docs/guide.md")]
//!
//! # Plots
//!
//! From left to right the number of timers, upwards nanoseconds, both logarithmic; medians of three
//! rounds of one run, uniform intervals.
//!
#![doc = include_str!("../docs/start.svg")]
//!
#![doc = include_str!("../docs/stop.svg")]
//!
#![doc = include_str!("../docs/re-arm.svg")]
//!
#![doc = include_str!("../docs/expiry.svg")]
//!
//!
//! # Schemes
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
//! [`Intrusive`] is scheme 7 with timers that are parts of your own objects.
//!
//! Each other type is the `S` of [`Timers<T, S>`](Timers), which has the common part; all are used
//! through the trait [`Scheme`], which says which method is which operation of the paper. They are
//! the base of [`ById`] (an id is armed at most once), [`Expiring`] (a fixed timeout, with
//! listeners), [`Netty`] (starts and stops from any thread) and, with feature `tokio`,
//! [`DelayQueue`] and [`TimerService`].
//!
//! # Time
//!
//! There is no clock here: `now` is an argument, a number of ticks. All schemes promise that a
//! timer is handed out by the first [`advance`](Scheme::advance) to a tick that is not before its
//! deadline. So a timer never fires early; if every tick is driven, it fires at exactly the tick of
//! its deadline; and on a clock finer than a tick it is late by less than one tick. A deadline in
//! the past counts as the next tick. A driver that is late gets the timers that it missed in the
//! order of their ticks.
//!
//! # Features
//!
//! - `std` (default): [`ById`], [`Expiring`] and [`Netty`]. Without it the crate needs `core` and
//!   `alloc` alone.
//! - `tokio`: [`DelayQueue`] and [`TimerService`]; implies `std`.
//!
//! # Modules
//!
//! All items are at the root. In the sources: `scheme` (the trait), `timers` and `entry`; the
//! structures `unordered`, `ordered`, `heap`, `simple`, `hashed_ordered`, `hashed`, `hierarchical`
//! and `growing`; `intrusive`; what they are made of: `arena`, `slab`, `blocks`, `linked`, `bitmap`,
//! `ring`, `levels`; on top of them `by_id`, `expiring`, `netty`, `delay_queue`, `service`, `clock`;
//! and `error`.
#![cfg_attr(not(any(test, feature = "std")), no_std)]
#![cfg_attr(docsrs, feature(doc_cfg))]
// Links to what a feature leaves out.
#![cfg_attr(not(feature = "tokio"), allow(rustdoc::broken_intra_doc_links))]

extern crate alloc;

mod arena;
mod bitmap;
mod blocks;
#[cfg(feature = "std")]
mod by_id;
#[cfg(feature = "tokio")]
mod clock;
#[cfg(feature = "tokio")]
pub mod delay_queue;
mod entry;
mod error;
#[cfg(feature = "std")]
mod expiring;
mod growing;
mod hashed;
mod hashed_ordered;
mod heap;
mod hierarchical;
mod intrusive;
mod levels;
mod linked;
#[cfg(feature = "std")]
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

#[cfg(feature = "std")]
pub use by_id::ById;
#[cfg(feature = "tokio")]
pub use delay_queue::DelayQueue;
pub use entry::Entry;
pub use error::Error;
#[cfg(feature = "std")]
pub use expiring::{Expiring, ListenerId};
pub use growing::Growing;
pub use hashed::Hashed;
pub use hashed_ordered::HashedOrdered;
pub use heap::Heap;
pub use hierarchical::Hierarchical;
pub use intrusive::{Intrusive, Node, Nodes};
#[cfg(feature = "std")]
pub use netty::{Netty, NettyWheel, TRANSFERS_PER_TICK, Timeout};
pub use ordered::{End, Ordered};
pub use scheme::{Expired, LAST_TICK, Scheme, ticks};
#[cfg(feature = "tokio")]
pub use service::{Expirations, TimerService};
pub use simple::Simple;
pub use slab::Key;
pub use timers::{Structure, Timers};
pub use unordered::Unordered;

/// The examples of the README, one of which needs tokio. `tests/readme.rs` has the other one.
#[cfg(all(doctest, feature = "tokio"))]
#[doc = include_str!("../README.md")]
struct Readme;
