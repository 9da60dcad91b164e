//! The inbox of a wheel, and the call that wakes its stepper.
//!
//! A wheel belongs to one CPU. If another CPU brings a flow's deadline forward, it *queues* the
//! flow (in the code: *posts* it): it puts the flow into the inbox of the wheel's CPU, a list
//! without a lock, and *calls* the stepper if the stepper means to sleep past the deadline.
//!
//! # Protocol
//!
//! - The CPU that queues a flow owns the flow's next pointer for the inbox
//!   ([`Seen::is_posted`](crate::state::Seen::is_posted)). It sets the pointer to
//!   [`Link::PENDING`], exchanges the head of the list for the flow, and stores the earlier head in
//!   the pointer.
//! - Then it loads the tick at which the stepper means to come back (`wake`). If that is later than
//!   the deadline, it exchanges `called` for `true`; if `called` was `false`, it calls.
//! - When the stepper comes, it exchanges `called` for `false`, and then takes the list by an
//!   exchange of the head. Before it sleeps, it stores `wake`, and then takes the list once more.
//!
//! Only the stepper's CPU writes `wake`.
//!
//! **No flow is missed.** Consider the queuing CPU's exchange of the head and the stepper's last
//! one. If the queuing CPU's comes first, the stepper has the flow. If the stepper's comes first,
//! the queuing CPU loads the `wake` that was stored before it, or a later one, and calls if it
//! must. If `called` was `true` by then, another CPU calls or has called, and the stepper has not
//! come since: when it comes it clears `called`, after the queuing CPU's exchange of `called`, and
//! so finds the flow.
//!
//! **The queue of calls never overflows**: between two calls the stepper has come, so there is at
//! most one unanswered call for each CPU.

use crate::wheel::Link;

/// The inbox of a wheel, and what else its CPU shares with the CPUs that queue flows. An exchange
/// is atomic and fully ordered: all accesses before it in program order are visible before all
/// accesses after it.
pub trait Inbox {
    /// Exchanges the head of the list.
    fn swap_head(&self, head: Link) -> Link;
    /// Exchanges `called`.
    fn swap_called(&self, called: bool) -> bool;
    /// Loads the tick at which the stepper means to come back. Needs no order.
    fn wake(&self) -> u64;
    /// Stores it. Only the stepper's CPU may.
    fn set_wake(&self, tick: u64);
    /// Stores the next pointer of a flow that this caller has queued. Needs no order.
    fn set_link(&self, flow: u32, link: Link);
    /// Calls the stepper. Returns `false` if the queue of calls is full.
    fn call(&self) -> bool;
}

/// Queues a flow that is due at `tick`.
#[inline(always)]
pub fn post(inbox: &impl Inbox, flow: u32, tick: u64) {
    inbox.set_link(flow, Link::PENDING);
    let before = inbox.swap_head(Link::flow(flow));
    inbox.set_link(flow, before);
    hurry(inbox, tick);
}

/// Calls the stepper if it would sleep past a tick. For a flow in the inbox, or on this CPU's own
/// wheel.
#[inline(always)]
pub fn hurry(inbox: &impl Inbox, tick: u64) {
    if inbox.wake() > tick {
        call(inbox);
    }
}

/// Calls the stepper, unless it was called since it last came. Returns whether a call is under way.
#[inline(always)]
pub fn call(inbox: &impl Inbox) -> bool {
    if inbox.swap_called(true) || inbox.call() {
        return true;
    }
    // The next CPU that queues a flow tries again.
    inbox.swap_called(false);
    false
}

/// Called when the stepper comes: clears `called` and returns the list in the inbox.
#[inline(always)]
pub fn come(inbox: &impl Inbox) -> Link {
    inbox.swap_called(false);
    take(inbox)
}

/// Takes the list in the inbox.
#[inline(always)]
pub fn take(inbox: &impl Inbox) -> Link {
    inbox.swap_head(Link::NONE)
}

/// Stores when the stepper comes back, and returns the list in the inbox: if it is not empty, the
/// stepper must not sleep yet.
#[inline(always)]
pub fn sleep(inbox: &impl Inbox, tick: u64) -> Link {
    inbox.set_wake(tick);
    take(inbox)
}
