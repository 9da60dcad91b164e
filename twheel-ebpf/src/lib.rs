//! The data plane of twheel, as modules. `main.rs` has the entry points that production loads,
//! `bench` those of the benches, which call the same code.
//!
//! The logic is in `twheel-common`. This crate adds the maps that hold its data, and what only a
//! program in the kernel can do. A reading order:
//!
//! | question | modules |
//! |---|---|
//! | What has the running twheel configured, and where is everything kept? | [`mod@config`], [`maps`] |
//! | Which CPU is this, what time is it, and what does the verifier know? | [`clock`], [`atomic`], [`verifier`] |
//! | How are a packet's bytes read, and what is counted? | [`frame`], [`extension`], [`count`] |
//! | Where is a flow's record, and what does it say? | [`record`], [`timers`], [`rule`] |
//! | How is a flow found, entered and removed? | [`memory`], [`table`] |
//! | What does a packet do to its flow? | [`touch`], then its `apply`, `change`, `begin` and `note` |
//! | Which rule matches a flow, and is its packet refused? | [`policy`], [`enforce`], [`answer`] |
//! | Where are packets counted that pass several interfaces? | [`point`] |
//! | How do retransmission timers work? | [`rto`] |
//! | What is kept of a flow whose program has handed over its timeout? | [`offload`] |
//! | When does the wheel visit a flow, and what becomes of the flow? | [`wheel`]: `own`, `lists`, `arm`, `visit`, `end` |
//! | Which flow is evicted if the table is full? | [`wheel::room`], [`quota`] |
//! | How does a CPU make another CPU visit a flow earlier? | [`forward`], [`inbox`], [`wakes`] |
//! | Which events are reported to userspace, and when of a live flow? | [`emit`], [`updates`] |
//! | What does userspace run? | [`step`], [`sweep`] |
#![no_std]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

pub mod answer;
pub mod atomic;
pub mod clock;
pub mod config;
pub mod count;
pub mod emit;
pub mod enforce;
pub mod extension;
pub mod forward;
pub mod frame;
pub mod inbox;
pub mod maps;
pub mod memory;
pub mod offload;
pub mod point;
pub mod policy;
pub mod quota;
pub mod record;
pub mod rto;
pub mod rule;
pub mod step;
pub mod sweep;
pub mod table;
pub mod timers;
pub mod touch;
pub mod updates;
pub mod verifier;
pub mod wakes;
pub mod wheel;

/// The verifier admits no program that can reach this, so there is nothing to unwind to.
#[cfg(target_arch = "bpf")]
#[panic_handler]
fn panic(_info: &core::panic::PanicInfo) -> ! {
    loop {}
}
