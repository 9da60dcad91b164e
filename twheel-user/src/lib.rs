//! Loads twheel's data plane, steps its wheels and reports the flows that end.
//!
//! The modules, in the order in which to read them:
//!
//! | question | module |
//! |---|---|
//! | **options and input** | |
//! | the commands and their arguments, from the command line and from files; durations and sizes as users give them | [`cli`], [`given`] |
//! | settings of the data plane, in its units | [`settings`], [`timeouts`], [`clock`] |
//! | which interfaces, in which zones | [`patterns`], [`zones`] |
//! | which flows | [`filter`] |
//! | timeouts and actions per service | [`policy`] |
//! | TOML files, and where in them an error is | [`toml_file`] |
//! | exit codes, and progress bars | [`failure`], [`progress`] |
//! | **the running twheel** | |
//! | from start to end | [`daemon`] |
//! | the capabilities of this process | [`privilege`] |
//! | what is loaded, adopted, pinned | [`data_plane`], [`pins`], [`maps`] |
//! | the interfaces as the programs know them, and their counters | [`watched`], [`stack`] |
//! | **attaching to an interface** | |
//! | interfaces, and the kernel's notices of changes | [`interfaces`], [`notices`], [`netlink`] |
//! | which hook, and how to attach there | [`hooks`], [`attach`], [`order`] |
//! | TCX, and clsact by traffic control | [`tcx`], [`clsact`], [`tc`] |
//! | interfaces of other network namespaces | [`netns`], [`stub`] |
//! | **the end of a flow** | |
//! | the threads that step the wheels | [`stepper`], [`stepping`], [`call`], [`cpu`] |
//! | where ended flows are read | [`ring`] |
//! | flows as users see them, and names; who reports them | [`model`], [`names`], [`identity`] |
//! | the log of ended flows on disk | [`history`] |
//! | what leaves the host | [`export`] |
//! | a ClickHouse server, over HTTP | [`clickhouse`] |
//! | the events of many hosts in ClickHouse | [`fleet`] |
//! | actions on expired flows | [`action`], [`reap`] |
//! | entries of conntrack, and what they say of translations | [`conntrack`], [`nat`] |
//! | local sockets, and which process and service a flow's socket belongs to | [`sockets`], [`owner`] |
//! | a TCP connection, by a descriptor | `connection` |
//! | numbers for Prometheus, and the page | [`metrics`], `web/` |
//! | how a flow is printed | [`output`] |
//! | which sources are over their quota | [`quota`] |
//! | timeouts that programs hand over for their connections | [`offload`] |
//! | **commands beside the running twheel** | |
//! | what they read of an instance | [`inspect`], [`flows`], [`wheels`] |
//! | maps in this process's memory | `mapped` |
//! | deleting flows | [`delete`] |
//! | what the programs cost | [`cost`] |
//! | what a configuration will cost | [`plan`] |
//! | what a host lacks, and what the verifier says | [`doctor`], [`host`], `verifier` |
//! | `bpf(2)` where aya has no function | [`bpf`] |
//! | where the kernel has what a program names | [`btf`] |

/// Writes a line to standard error. If that fails, the line is lost: `eprintln!` would panic and
/// stop twheel half way.
#[macro_export]
macro_rules! say {
    ($($arg:tt)*) => {{
        // One write per line: standard error has no buffer, and other threads and processes may
        // write to it, too.
        let line = format!("{}\n", format_args!($($arg)*));
        let _ = ::std::io::Write::write_all(&mut ::std::io::stderr(), line.as_bytes());
    }};
}

pub mod action;
pub mod attach;
pub mod bpf;
pub mod btf;
pub mod call;
pub mod cli;
pub mod clickhouse;
pub mod clock;
pub mod clsact;
mod connection;
pub mod conntrack;
pub mod cost;
pub mod cpu;
pub mod daemon;
pub mod data_plane;
pub mod delete;
pub mod doctor;
pub mod export;
pub mod failure;
pub mod filter;
pub mod fleet;
pub mod flows;
pub mod given;
pub mod history;
pub mod hooks;
pub mod host;
pub mod identity;
pub mod inspect;
pub mod interfaces;
mod mapped;
pub mod maps;
pub mod metrics;
pub mod model;
pub mod names;
pub mod nat;
pub mod netlink;
pub mod netns;
pub mod notices;
pub mod offload;
pub mod order;
pub mod output;
pub mod owner;
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
pub mod sockets;
pub mod stack;
pub mod stepper;
pub mod stepping;
pub mod stub;
pub mod tc;
pub mod tcx;
pub mod timeouts;
pub mod toml_file;
mod verifier;
pub mod watched;
pub mod wheels;
pub mod zones;
