//! The data plane of twheel, as modules; `main.rs` has the entry points that production loads,
//! `bench` those of the benches, which call the very same code.
//!
//! The logic is in `twheel-common`. Here are the maps under it, and what only a program in the
//! kernel can do.
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

pub mod answer;
pub mod atomic;
pub mod clock;
pub mod count;
pub mod emit;
pub mod enforce;
pub mod extension;
pub mod frame;
pub mod inbox;
pub mod maps;
pub mod point;
pub mod policy;
pub mod rto;
pub mod share;
pub mod step;
pub mod table;
pub mod touch;
pub mod verifier;
pub mod wheel;

/// The verifier admits no program that can reach this: there is nothing to unwind to.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
