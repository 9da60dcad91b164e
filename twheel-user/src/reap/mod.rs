//! The reaper acts on expired flows: it closes sockets, deletes conntrack entries, resets both
//! ends, and has later packets refused.
//!
//! It runs on a thread of its own, behind a bounded queue, so that neither wheels nor output wait
//! for it. The outcome of each action is counted and reported. Before each action the flow is
//! looked up again; if it is back in the table, nothing is done to it.
//!
//! | question | file |
//! |---|---|
//! | what it may do | `mandate.rs` |
//! | which actions the policy asks for | `asked.rs` |
//! | its queue | `reaper.rs` |
//! | its thread, which checks whether an action is still right and takes it | `worker.rs` |
//! | limits of number and rate | `guard.rs` |
//! | whether a flow may have come back unseen | `refusals.rs` |
//! | which sockets and entries are a flow's, and where | `search.rs`, `scope.rs`, `sites.rs`, `namespace.rs` |
//! | whether a socket is in a cgroup that the rule names | `search.rs` |
//! | whether a socket may be that of another zone | `namesakes.rs` |
//! | the actions themselves | `reset.rs`, and `crate::conntrack`, `crate::sockets` |

mod asked;
mod guard;
mod mandate;
mod namesakes;
mod namespace;
mod reaper;
mod refusals;
mod reset;
mod scope;
mod search;
mod sites;
mod worker;

pub(crate) use self::scope::Scope;
pub use self::{
    asked::asked,
    mandate::{Mandate, ReaperState},
    namespace::NamespacePath,
    reaper::Reaper,
    sites::Sites,
};
