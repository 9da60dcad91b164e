//! Loads twheel's data plane, steps its wheels and reports the flows that end.
//!
//! | question | file |
//! |---|---|
//! | what is loaded, adopted, pinned | `data_plane.rs`, `pins.rs` |
//! | how it gets onto an interface | `attach.rs` |
//! | who turns the wheels | `stepper.rs` |
//! | units and durations | `clock.rs` |
//! | what may be asked for | `settings.rs` |
//! | timeouts per service | `policy/` |
//! | exit codes | `failure.rs` |
//! | the commands | `cli/` |
//! | how an ended flow is written | `output/` |
//! | numbers for Prometheus, and the page | `metrics/`, `web/` |

pub mod attach;
pub mod cli;
pub mod clock;
pub mod data_plane;
pub mod delete;
pub mod failure;
pub mod flows;
pub mod host;
pub mod metrics;
pub mod output;
pub mod pins;
pub mod plan;
pub mod policy;
pub mod settings;
pub mod stepper;
pub mod timeouts;
