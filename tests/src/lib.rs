//! What the tests that need root stand on: labs of network namespaces, and the loaded data plane
//! under virtual time.

use std::io::Write;

// Hosts, and twheel on them.

pub mod netns;

pub mod pair;

pub mod running;

pub mod tc;

pub mod attached;

pub mod devices;

mod relay;

pub mod path;

pub mod directory;

// What is sent to them, and what others say of it.

pub mod wire;

pub mod forge;

pub mod recorded;

pub mod ctnetlink;

pub mod tcp_info;

pub mod tracefs;

pub mod others;

// The loaded data plane alone, under virtual time.

pub mod plane;

pub mod order;

pub mod lru;

/// Says what a test leaves out here, and why, past whoever catches its output: `cargo xtask test` lists it, and counts the
/// test as skipped.
pub fn skipped(what: impl std::fmt::Display) {
    let thread = std::thread::current();
    let _ = match thread.name() {
        None | Some("main") => writeln!(std::io::stdout(), "skipped: {what}"),
        // With one thread libtest has begun a line.
        Some(test) => writeln!(std::io::stdout(), "\ntest {test} ... skipped: {what}"),
    };
}

/// Whether tests of faults are to go on for longer, with more of everything: `cargo xtask test --soak`.
pub fn is_soak() -> bool {
    std::env::var_os("TWHEEL_SOAK").is_some()
}
