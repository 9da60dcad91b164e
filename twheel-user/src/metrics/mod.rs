//! What an instance serves while it runs: numbers for Prometheus, and the page.
//!
//! The running twheel counts, as they happen, the ends of flows. Numbers for Prometheus are read on
//! request, and cost the same for any number of flows. What the page shows is read by a thread of
//! its own, a part of the flow table at a time, so that a request for it reads nothing.
//!
//! | question | file |
//! |---|---|
//! | who may ask, and what is answered | `server.rs` |
//! | the numbers for Prometheus | `numbers.rs`, `exemplars.rs` |
//! | when the page's data is read, and the rates | `sample.rs` |
//! | how the flow table is read in parts: states, what is due when | `pass.rs` |
//! | sources and services with the most flows | `talkers.rs` |
//! | bytes of interfaces | `links.rs` |
//! | what the programs cost | `programs.rs` |
//! | timeouts that programs hand over | `offload.rs` |
//! | the wheels as they are drawn | `rings.rs` |
//! | the last hour | `history.rs` |
//! | the latest ends, and the search among them | `ends.rs` |
//! | the page's data as JSON | `status.rs` |
//! | the page itself | `../web` |

mod ends;
mod exemplars;
mod history;
mod links;
mod numbers;
mod offload;
mod pass;
mod programs;
mod rings;
mod sample;
mod server;
mod status;
mod talkers;

pub use self::{
    numbers::{Batch, Metrics},
    server::{Listener, Server, parse_address},
};
