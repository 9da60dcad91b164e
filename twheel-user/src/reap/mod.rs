//! Ends what has expired: closes sockets, deletes conntrack entries, tells both ends, keeps out what comes later.
//!
//! On a thread of its own, behind a bounded queue: neither wheels nor output wait for it. What becomes of each action is
//! counted and reported. Before each one the flow is looked up again: if it is back, nothing is done to it.
//!
//! | question | file |
//! |---|---|
//! | what it may do | `mandate.rs` |
//! | what the policy asks for | `asked.rs` |
//! | its queue | `reaper.rs` |
//! | its thread: whether an action may still be done, and doing it | `worker.rs` |
//! | how much, how fast | `guard.rs` |
//! | whether a flow may be back unseen | `refusals.rs` |
//! | which sockets and entries are a flow's, in which network namespace | `scope.rs`, `sites.rs`, `namespace.rs` |
//! | the actions themselves | `sockets.rs`, `conntrack.rs`, `reset.rs` |

mod asked;
mod conntrack;
mod guard;
mod mandate;
mod namespace;
mod reaper;
mod refusals;
mod reset;
mod scope;
mod sites;
mod sockets;
mod worker;

pub use self::{
    asked::asked,
    mandate::{Mandate, ReaperState},
    namespace::NamespacePath,
    reaper::Reaper,
    sites::Sites,
};
