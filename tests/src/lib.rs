//! Support for the tests that need root: labs of network namespaces, and the loaded data plane
//! under virtual time.
//!
//! In reading order:
//!
//! | question | modules |
//! |---|---|
//! | What is a host of a lab, and how are hosts joined? | [`netns`], [`pair`], [`gateway`] |
//! | What does a running twheel print, and how does it end? | [`running`], [`schema`], [`directory`] |
//! | What does another program print, and how does it end? | [`process`] |
//! | How is a program held at a system call? | [`stops`] |
//! | What answers a fleet's queries? | [`engine`] |
//! | Who sends events, and where do they go? | [`sending`], [`broker`], [`clickhouse_server`] |
//! | How are a broker and its store started? | `tansu` |
//! | What is attached to an interface? | [`tc`], [`attached`], [`others`] |
//! | What do the units of systemd allow? | [`mod@unit`] |
//! | Which kinds of interface are there? | [`devices`], `relay` |
//! | What is sent, and through what? | [`wire`], [`forge`], [`path`], [`recorded`] |
//! | What is a fleet, and what receives its events? | [`fleet`] |
//! | How does Ctrl-C end a lab? | [`signals`] |
//! | How do programs act that hand over timeouts? | [`offload`] |
//! | What does the kernel report? | [`ctnetlink`], [`tcp_info`], [`tracefs`] |
//! | What do the programs do, without an interface or a clock? | [`plane`], [`order`], [`lru`] |

use std::io::Write;

pub mod attached;
pub mod broker;
pub mod clickhouse_server;
pub mod ctnetlink;
pub mod devices;
pub mod directory;
pub mod engine;
pub mod fleet;
pub mod forge;
pub mod gateway;
pub mod lru;
pub mod netns;
pub mod offload;
pub mod order;
pub mod others;
pub mod pair;
pub mod path;
pub mod plane;
pub mod process;
pub mod recorded;
mod relay;
pub mod running;
pub mod schema;
pub mod sending;
pub mod signals;
pub mod stops;
mod tansu;
pub mod tc;
pub mod tcp_info;
pub mod tracefs;
pub mod unit;
pub mod wire;

/// Reports what a test leaves out here and why, on the real standard output, which no test harness
/// captures: `cargo xtask test` lists it, and counts the test as skipped.
pub fn skipped(what: impl std::fmt::Display) {
    let thread = std::thread::current();
    let _ = match thread.name() {
        None | Some("main") => writeln!(std::io::stdout(), "skipped: {what}"),
        // With a single thread, libtest has already begun a line.
        Some(test) => writeln!(std::io::stdout(), "\ntest {test} ... skipped: {what}"),
    };
}

/// Whether tests should run longer, with more of everything: `cargo xtask test --long`, which sets
/// `TWHEEL_LONG`.
pub fn is_long() -> bool {
    std::env::var_os("TWHEEL_LONG").is_some()
}
