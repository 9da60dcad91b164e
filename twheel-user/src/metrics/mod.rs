//! What an instance tells of itself while it runs: numbers for Prometheus, and what the page shows.
//!
//! The loader notes what it alone can know as it happens; the kernel's counters are read when somebody asks, the flow
//! table only for the page. So an instance that nobody asks is not woken by any of this, and asking for numbers costs the
//! same however many flows there are.

mod numbers;
mod server;
mod status;

pub use self::{
    numbers::{Batch, Metrics},
    server::{Listener, Server, parse_address},
};
