//! What others do, each in a program of its own, over the same packets as `bench` has: `ORDER` says which flows
//! they are of, and a figure of a program that did not do what it is to do is worth nothing, so they return
//! `XDP_PASS`, or `XDP_ABORTED` where a packet was not what the bench says it is.
// The macros of aya generate public functions without documentation.
#![allow(missing_docs)]
#![cfg_attr(target_arch = "bpf", no_std, no_main)]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

// Not by way of the library: its maps would come with it.
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
