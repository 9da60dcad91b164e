//! Other ways to track flows, each in a program of its own, with the same packets as `bench`:
//! `ORDER` names their flows. The figure of a program that did not do its work would be worthless,
//! so they return `XDP_PASS`, or `XDP_ABORTED` if a packet did not take the path that the bench is
//! to measure.
// The macros of aya generate public functions without documentation.
#![allow(missing_docs)]
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

// Not through the library, whose maps would come with it.
#[path = "../frame.rs"]
mod frame;
mod packets;
mod path;
mod sweep;
mod timer;
mod trackers;

#[cfg(not(target_arch = "bpf"))]
fn main() {}

/// As in `lib.rs`.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}

/// As in `main.rs`.
#[cfg(target_arch = "bpf")]
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 13] = *b"Dual MIT/GPL\0";
