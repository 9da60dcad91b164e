//! Loads twheel's data plane, steps its wheels and reports the flows that end.
//!
//! In the order in which one would read it:
//!
//! | question | module |
//! |---|---|
//! | **what is asked for** | |
//! | the commands and their arguments | [`cli`] |
//! | what the data plane may be told, in its units | [`settings`], [`timeouts`], [`clock`] |
//! | which interfaces, of which zones | [`patterns`], [`zones`] |
//! | which flows | [`filter`] |
//! | timeouts and actions per service | [`policy`] |
//! | exit codes, and bars on terminals | [`failure`], [`progress`] |
//! | **the running twheel** | |
//! | from start to end | [`daemon`] |
//! | what this process may do | [`privilege`] |
//! | what is loaded, adopted, pinned | [`data_plane`], [`pins`], [`maps`] |
//! | what programs are told of interfaces, and whose counters are whose | [`watched`] |
//! | **getting onto an interface** | |
//! | what interfaces are, and how the kernel tells of changes | [`interfaces`], [`notices`], [`netlink`] |
//! | by which hook, and how it gets there | [`hooks`], [`attach`], [`order`] |
//! | TCX, and clsact by traffic control | [`tcx`], [`clsact`], [`tc`] |
//! | interfaces of other network namespaces | [`netns`], [`stub`] |
//! | **an expiry** | |
//! | who turns the wheels, and how | [`stepper`], [`stepping`], [`call`], [`cpu`] |
//! | where ended flows come out | [`ring`] |
//! | what they are in the words of readers, and by name | [`model`], [`names`] |
//! | what has ended, on disk | [`history`] |
//! | what is done to flows that have expired | [`action`], [`reap`] |
//! | numbers for Prometheus, and the page | [`metrics`], `web/` |
//! | how a flow is written | [`output`] |
//! | which sources are over their quota | [`quota`] |
//! | **beside the running twheel** | |
//! | what a reader sees of an instance | [`inspect`], [`flows`], [`wheels`] |
//! | deleting flows | [`delete`] |
//! | what a configuration will cost | [`plan`] |
//! | what a host lacks, and what the verifier says | [`doctor`], [`host`], `verifier` |
//! | `bpf(2)` where aya has no function | [`bpf`] |

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
pub mod quota;
pub mod reap;
pub mod ring;
pub mod settings;
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
