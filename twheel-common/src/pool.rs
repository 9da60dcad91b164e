//! Which [`Details`](crate::table::Details) are free: a shelf on each CPU, and a depot that all share (Bonwick & Adams,
//! *Magazines and Vmem*, USENIX 2001).
//!
//! The CPU that enters a flow ends it, too, so nearly always details are taken from this CPU's shelf and given back to it,
//! without anything atomic. Chains of [`CHAIN`] go to the depot and come from there: a stack whose head has a version, so
//! that a head that is the same again after others have come and gone is not taken for one that has not changed.

use crate::wheel::Link;

/// Details of a chain: those that go to the depot at once.
pub const CHAIN: u32 = 64;

/// Details that lie on a CPU's shelf at most.
pub const SHELF: u32 = 3 * CHAIN;

/// Free details of one CPU.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Shelf {
    /// The latest that were given back.
    pub free: Link,
    /// How many those are, or so.
    pub count: u32,
    /// A chain more.
    pub spare: Link,
    /// The first of those that nobody has had,
    pub fresh: u32,
    /// and what comes behind the last.
    pub fresh_end: u32,
}

/// The memory of a pool. What is called a load or a store here needs no order.
pub trait Pool {
    /// Loads what follows free details in their chain.
    fn next(&self, details: u32) -> Link;
    /// Stores it.
    fn set_next(&self, details: u32, next: Link);
    /// Loads what follows a chain in the depot, of its first details.
    fn below(&self, details: u32) -> Link;
    /// Stores it.
    fn set_below(&self, details: u32, below: Link);
    /// Loads the head of the depot; atomic and fully ordered.
    fn depot(&self) -> u64;
    /// Swaps it if it is `old`; what it was. Likewise.
    fn change_depot(&self, old: u64, new: u64) -> u64;
    /// The first of [`CHAIN`] details that nobody has had, if there are any.
    fn fresh(&self) -> Option<u32>;
    /// Calls `turn` until it says `true`, at most `turns` times.
    fn repeat(&self, turns: u32, turn: impl FnMut(u32) -> bool);
}

/// Attempts to take from the depot. Who fails so often meets all other CPUs there, and goes another way.
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

/// The details that are taken next, most likely.
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
    // Else this chain becomes longer.
    if shelf.count >= CHAIN && store(pool, shelf) {
        shelf.spare = shelf.free;
        shelf.free = Link::NONE;
        shelf.count = 0;
    }
    pool.set_next(details, shelf.free);
    shelf.free = Link::flow(details);
    shelf.count += 1;
}

/// Brings the spare chain to the depot, if there is one. Says whether there is none by now.
#[inline(always)]
fn store(pool: &impl Pool, shelf: &mut Shelf) -> bool {
    let Some(first) = shelf.spare.as_flow() else {
        return true;
    };
    // One attempt: the next details that are given back are the next.
    let head = pool.depot();
    pool.set_below(first, Link::from_raw(head as u32));
    let is_stored = pool.change_depot(head, next_head(head, Link::flow(first))) == head;
    if is_stored {
        shelf.spare = Link::NONE;
    }
    is_stored
}

/// Another head of the depot, of another version.
#[inline(always)]
fn next_head(head: u64, first: Link) -> u64 {
    ((head >> 32).wrapping_add(1) << 32) | u64::from(first.raw())
}
