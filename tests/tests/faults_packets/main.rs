//! Hostile packets at the loaded programs: what becomes of each is what the host's parser says, or what its name
//! says; and each counts once.
#![allow(missing_docs)]

mod frames;
mod mutated;
mod named;
mod recorded;
mod watch;

use std::io::Write;

/// To the terminal, also where `cargo test` keeps to itself what a test prints.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
