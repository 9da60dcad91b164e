//! Hostile packets at the loaded programs: the verdict for each is the one that the host's parser
//! gives, or the one that goes with its name; and each packet counts once.
#![allow(missing_docs)]

mod frames;
mod mutated;
mod named;
mod recorded;
mod watch;

use std::io::Write;

/// Prints to the terminal, even if `cargo test` captures the output of a test.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "{text}");
}
