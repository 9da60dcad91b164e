//! What an instance serves while it runs: numbers for Prometheus, and the page.
//!
//! The running twheel records, as they happen, the numbers that only it knows. The kernel's
//! counters are read on request, and the flow table only for the page. So an instance is not woken
//! if nobody requests anything, and a request for numbers costs the same for any number of flows.

mod numbers;
mod server;
mod status;

pub use self::{
    numbers::{Batch, Metrics},
    server::{Listener, Server, parse_address},
};
