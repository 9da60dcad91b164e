//! Loads twheel's data plane, steps its wheels and reports the flows that end.
//!
//! | question | file |
//! |---|---|
//! | what is loaded, adopted, pinned | `data_plane.rs`, `pins.rs` |
//! | how it gets onto an interface | `hooks.rs`, `attach.rs`, `order.rs`, `tcx.rs`, `clsact.rs`, `tc.rs` |
//! | what programs know of interfaces, and whose counters are whose | `watched.rs` |
//! | names of what flows bear by number | `names.rs` |
//! | interfaces of other network namespaces | `netns.rs`, `stub.rs` |
//! | who turns the wheels | `stepper.rs` |
//! | units and durations | `clock.rs` |
//! | what may be asked for | `settings.rs` |
//! | timeouts per service | `policy/` |
//! | what a host lacks | `doctor.rs`, `host.rs`, `interfaces.rs` |
//! | bars on terminals | `progress.rs` |
//! | exit codes | `failure.rs` |
//! | what a reader sees of an instance | `inspect.rs`, `flows.rs`, `wheels.rs` |
//! | which flows are meant | `filter/` |
//! | what has ended, on disk | `history.rs` |
//! | what is done to what has expired | `reap/` |
//! | the commands | `cli/` |
//! | how an ended flow is written | `output/` |
//! | numbers for Prometheus, and the page | `metrics/`, `web/` |

/// A line on standard error. Where nobody can read it any more it is lost: `eprintln!` would panic, and a run end half way.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => {{
        // One write a line: standard error has no buffer, and others may write there, too.
        let line = format!("{}\n", format_args!($($arg)*));
        let _ = ::std::io::Write::write_all(&mut ::std::io::stderr(), line.as_bytes());
    }};
}

pub mod action;
pub mod attach;
pub mod bpf;
pub mod call;
pub mod cli;
pub mod clock;
pub mod clsact;
pub mod cpu;
pub mod daemon;
pub mod data_plane;
pub mod delete;
pub mod doctor;
pub mod failure;
pub mod filter;
pub mod flows;
pub mod history;
pub mod hooks;
pub mod host;
pub mod inspect;
pub mod interfaces;
pub mod maps;
pub mod metrics;
pub mod model;
pub mod names;
pub mod netlink;
pub mod netns;
pub mod notices;
pub mod order;
pub mod output;
pub mod patterns;
pub mod pins;
pub mod plan;
pub mod policy;
pub mod privilege;
pub mod progress;
pub mod reap;
pub mod ring;
pub mod settings;
pub mod share;
pub mod stepper;
pub mod stepping;
pub mod stub;
pub mod tc;
pub mod tcx;
pub mod timeouts;
mod verifier;
pub mod watched;
pub mod wheels;
pub mod zones;
