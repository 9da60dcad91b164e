//! The inbox of a wheel, and the call that ends the sleep of whoever drives it.
//!
//! A wheel belongs to one CPU. Another CPU that brings a flow's deadline forward *posts* the flow: it puts it into the
//! inbox of the wheel's CPU, a list without a lock, and *calls* the driver (the stepper) if that means to sleep past the
//! deadline.
//!
//! # Protocol
//!
//! - Whoever posts a flow owns its link ([`Seen::is_posted`](crate::state::Seen::is_posted)). It marks the link as
//!   [`Link::PENDING`], exchanges the head of the list for the flow, and stores what was the head in the link.
//! - Then it loads the tick at which the driver means to come back (`wake`). If that is later than the deadline, it
//!   exchanges `called` for `true`, and if that was `false`, it calls.
//! - The driver, when it comes, exchanges `called` for `false`, and then takes the list by an exchange of the head. Before
//!   it goes, it stores `wake`, and then takes the list once more.
//!
//! Only the driver's CPU writes `wake`.
//!
//! **Nobody is missed.** Of the poster's exchange of the head and the driver's last one, one comes first. If the poster's
//! does, the driver has the flow. If the driver's does, the poster loads the `wake` that was stored before it, or a
//! later one, and calls if it must. If `called` was `true` by then, somebody else calls or has called, and the driver
//! has not come since: when it comes it clears `called`, behind the poster's exchange of that word, and so finds the flow.
//!
//! **A call always has room**: between two of them the driver has come, so there is at most one a CPU that nobody has
//! answered.

use crate::wheel::Link;

/// The inbox of a wheel, and what else its CPU shares with those that post. An exchange is atomic and fully ordered:
/// whatever comes before it in the program is seen before whatever comes after it.
pub trait Inbox {
    /// Exchanges the head of the list.
    fn swap_head(&self, head: Link) -> Link;
    /// Exchanges `called`.
    fn swap_called(&self, called: bool) -> bool;
    /// Loads the tick at which the driver means to come back. Needs no order.
    fn wake(&self) -> u64;
    /// Stores it. For the driver's CPU.
    fn set_wake(&self, tick: u64);
    /// Stores the link of a flow that this caller has posted. Needs no order.
    fn set_link(&self, flow: u32, link: Link);
    /// Calls the driver. Returns `false` if the queue of calls is full.
    fn call(&self) -> bool;
}

/// Posts a flow that is due at `tick`.
#[inline(always)]
pub fn post(inbox: &impl Inbox, flow: u32, tick: u64) {
    inbox.set_link(flow, Link::PENDING);
    let before = inbox.swap_head(Link::flow(flow));
    inbox.set_link(flow, before);
    hurry(inbox, tick);
}

/// Calls the driver if it would sleep past a tick. For a flow in the inbox, or on this CPU's own wheel.
#[inline(always)]
pub fn hurry(inbox: &impl Inbox, tick: u64) {
    if inbox.wake() > tick {
        call(inbox);
    }
}

/// Calls the driver, unless it was called since its last turn. Returns whether a call is under way.
#[inline(always)]
pub fn call(inbox: &impl Inbox) -> bool {
    if inbox.swap_called(true) || inbox.call() {
        return true;
    }
    // The next poster tries again.
    inbox.swap_called(false);
    false
}

/// Starts the driver's turn: clears `called` and returns what is in the inbox.
#[inline(always)]
pub fn come(inbox: &impl Inbox) -> Link {
    inbox.swap_called(false);
    take(inbox)
}

/// Takes what is in the inbox.
#[inline(always)]
pub fn take(inbox: &impl Inbox) -> Link {
    inbox.swap_head(Link::NONE)
}

/// Stores when the driver comes back, and returns what is in the inbox: if anything is, it must not sleep yet.
#[inline(always)]
pub fn sleep(inbox: &impl Inbox, tick: u64) -> Link {
    inbox.set_wake(tick);
    take(inbox)
}
