//! Timeouts that programs hand over for their connections (`docs/offload.md`).
//!
//! A thread of its own serves the programs and steps a wheel of their registrations. Starting,
//! restarting and stopping a timer runs no BPF program: it stores in the mapped table.
//!
//! | question | file |
//! |---|---|
//! | which connections are registered, and when one is idle | `registry.rs` |
//! | how the kernel's flow table is read and marked | `table.rs` |
//! | who may do what, and what a passed socket is | `rights.rs` |
//! | how passed sockets are read without being received | `passed.rs` |
//! | what it is compared with | `watched.rs` |
//! | a program's connection, and what waits to be sent | `program.rs` |
//! | how packets are received | `receiving.rs` |
//! | where programs are awaited | `listener.rs` |
//! | what becomes of flows that were entered for them | `entered.rs` |
//! | how what they have passed is received, looked at and closed | `closing.rs` |
//! | how the kernel is asked of sockets, and connections are ended | `asking.rs` |
//! | the thread | `server.rs` |
//! | what programs ask for | `requests.rs` |
//! | what is counted | `tally.rs` |
//! | how it learns of flows that ended, and what is done when a registration is over | `ends.rs`, `over.rs` |
//!
//! The messages are those of `twheel_client::protocol`.

mod asking;
mod closing;
mod ends;
mod entered;
mod listener;
mod over;
pub mod passed;
mod program;
mod receiving;
pub mod registry;
mod requests;
pub mod rights;
mod server;
pub mod table;
mod tally;
mod watched;

pub use self::{
    ends::Ends,
    listener::Listener,
    server::{Offloads, Plane},
    tally::Tally,
};
