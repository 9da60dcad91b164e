//! Recorded traffic is replayed with `tcpreplay` to a `twheel run --accounting`, and compared with
//! tshark's conversation statistics of the same files: the same flows, with as many packets each
//! way. If the two differ, the packets that make the difference are found one by one in tshark's
//! fields, and have a name (`docs/captures.md`).
#![allow(missing_docs)]

mod difference;
mod flows;
mod lab;
mod own;
mod summary;
mod tshark;

use std::{env, fmt, io::Write, path::Path};

use anyhow::{Result, ensure};
use twheel_tests::netns::require_root;

use self::{lab::Lab, own::check_own, summary::compare};

/// The folder with captures, which is searched recursively.
const FOLDER: &str = "TWHEEL_CAPTURES";
/// The longest frame that a veth takes: its MTU and the Ethernet header.
const LONGEST: usize = 65_535 + 14;

/// Prints to the terminal, even if `cargo test` captures the output of a test.
fn say(text: impl fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{text}");
}

#[test]
fn flows_and_packets_are_those_of_tshark() -> Result<()> {
    require_root();
    let mut lab = Lab::start()?;
    check_own(&mut lab)?;
    match env::var_os(FOLDER) {
        None => twheel_tests::skipped(format_args!(
            "recorded captures; give a folder of them with {FOLDER}=…"
        )),
        Some(folder) => {
            let summary = compare(&mut lab, Path::new(&folder))?;
            say(&summary);
            ensure!(summary.wrong.is_empty(), "{}", summary.wrong.join("\n"));
        }
    }
    lab.end()
}
