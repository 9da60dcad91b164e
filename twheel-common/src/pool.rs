//! The free [`Details`](crate::table::Details): a shelf for each CPU, and a depot that all CPUs
//! share (Bonwick & Adams, *Magazines and Vmem*, USENIX 2001).
//!
//! The CPU that enters a flow also ends it. So details are nearly always taken from this CPU's
//! shelf and given back to it, without atomic operations. They go to the depot and come from it in
//! chains of [`CHAIN`]. The depot is a stack whose head has a version: a head that has the same
//! index again, after other CPUs have taken and stored chains, is not mistaken for an unchanged
//! one.

use crate::wheel::Link;
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Number of details in a chain, the unit in which they go to the depot.
pub const CHAIN: u32 = 64;

/// Most details on a CPU's shelf.
pub const SHELF: u32 = 3 * CHAIN;

/// The free details of one CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Shelf {
    /// The chain of details that were given back last.
    pub free: Link,
    /// Their number, approximately.
    pub count: u32,
    /// One more chain.
    pub spare: Link,
    /// The first of the details that were never used,
    pub fresh: u32,
    /// and the index after the last of them.
    pub fresh_end: u32,
}

/// The memory of a pool. What is called a load or a store here needs no order.
pub trait Pool {
    /// Loads the details that follow these in their chain.
    fn next(&self, details: u32) -> Link;
    /// Stores them.
    fn set_next(&self, details: u32, next: Link);
    /// Loads the chain that follows in the depot; `details` is the first of the chain.
    fn below(&self, details: u32) -> Link;
    /// Stores it.
    fn set_below(&self, details: u32, below: Link);
    /// Loads the head of the depot; atomic and fully ordered.
    fn depot(&self) -> u64;
    /// Swaps the head of the depot if it is `old`. Returns the value before. Atomic and fully
    /// ordered.
    fn change_depot(&self, old: u64, new: u64) -> u64;
    /// The first of [`CHAIN`] details that were never used, if there are any.
    fn fresh(&self) -> Option<u32>;
    /// Calls `turn` until it returns `true`, at most `turns` times.
    fn repeat(&self, turns: u32, turn: impl FnMut(u32) -> bool);
}

/// Attempts to take from the depot. A CPU that fails so often is competing with all others there,
/// and takes unused details instead.
const ATTEMPTS: u32 = 8;

/// Takes free details.
#[inline(always)]
pub fn take(pool: &impl Pool, shelf: &mut Shelf) -> Option<u32> {
    if shelf.free == Link::NONE {
        shelf.free = core::mem::take(&mut shelf.spare);
        shelf.count = CHAIN;
    }
    if shelf.free == Link::NONE && shelf.fresh == shelf.fresh_end {
        refill(pool, shelf);
    }
    if let Some(details) = shelf.free.as_flow() {
        shelf.free = pool.next(details);
        shelf.count = shelf.count.saturating_sub(1);
        return Some(details);
    }
    if shelf.fresh == shelf.fresh_end {
        return None;
    }
    let details = shelf.fresh;
    shelf.fresh += 1;
    Some(details)
}

/// The details that are most likely taken next.
#[inline(always)]
pub fn next(shelf: &Shelf) -> u32 {
    match shelf.free.as_flow() {
        Some(details) => details,
        None => shelf.fresh,
    }
}

#[inline(always)]
fn refill(pool: &impl Pool, shelf: &mut Shelf) {
    let mut chain = Link::NONE;
    pool.repeat(ATTEMPTS, |_| {
        let head = pool.depot();
        let first = Link::from_raw(head as u32);
        let Some(details) = first.as_flow() else {
            return true;
        };
        let below = pool.below(details);
        let is_ours = pool.change_depot(head, next_head(head, below)) == head;
        if is_ours {
            chain = first;
        }
        is_ours
    });
    if chain != Link::NONE {
        shelf.free = chain;
        shelf.count = CHAIN;
    } else if let Some(first) = pool.fresh() {
        shelf.fresh = first;
        shelf.fresh_end = first + CHAIN;
    }
}

/// Gives details back.
#[inline(always)]
pub fn give(pool: &impl Pool, shelf: &mut Shelf, details: u32) {
    // If the spare chain cannot be stored, this chain becomes longer.
    if shelf.count >= CHAIN && store(pool, shelf) {
        shelf.spare = shelf.free;
        shelf.free = Link::NONE;
        shelf.count = 0;
    }
    pool.set_next(details, shelf.free);
    shelf.free = Link::flow(details);
    shelf.count += 1;
}

/// Moves the spare chain to the depot, if there is one. Returns whether the shelf is without one
/// now.
#[inline(always)]
fn store(pool: &impl Pool, shelf: &mut Shelf) -> bool {
    let Some(first) = shelf.spare.as_flow() else {
        return true;
    };
    // One attempt is enough: the next time that details are given back, it is tried again.
    let head = pool.depot();
    pool.set_below(first, Link::from_raw(head as u32));
    let is_stored = pool.change_depot(head, next_head(head, Link::flow(first))) == head;
    if is_stored {
        shelf.spare = Link::NONE;
    }
    is_stored
}

/// The new head of the depot, with the next version.
#[inline(always)]
fn next_head(head: u64, first: Link) -> u64 {
    ((head >> 32).wrapping_add(1) << 32) | u64::from(first.raw())
}
