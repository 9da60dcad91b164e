//! Compares the host's parser with etherparse, on libFuzzer's inputs: `cargo xtask fuzz`.
#![no_main]

use libfuzzer_sys::fuzz_target;
use twheel_fuzz::{input, opinion::compare};

fuzz_target!(|bytes: &[u8]| {
    let Some((wanted, frame)) = input(bytes) else {
        return;
    };
    if let Err(disagreement) = compare(frame, wanted) {
        panic!("{disagreement}");
    }
});
