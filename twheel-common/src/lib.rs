//! The logic of twheel: what a packet says, what a flow is, where a timer stands on the wheel.
//!
//! Everything here is pure: no I/O, no clock (`now` is an argument), no allocation. The eBPF
//! programs are a thin layer that puts maps under this code; the host tests run the same code.
//!
//! Time is counted in the *units* of whatever clock the data plane reads (jiffies in production,
//! whatever a test says under virtual time); a *tick* of the wheel is a whole number of units.
//!
//! In the order in which one would read them:
//!
//! | question | modules |
//! |---|---|
//! | Of which flow is a packet, and what does it say? | [`key`], [`segment`], [`packet`] |
//! | What has been seen of a flow, and what does a packet change of that? | [`seen`], [`numbers`], [`way`], [`state`], [`tracked`] |
//! | What do CPUs share of a flow, and when is it due? | [`flow`] |
//! | Where does it stand in the table? | [`hash`], [`record`], [`table`], [`snapshot`], [`pool`] |
//! | Where does its timer stand, and who looks at it when? | [`wheel`], [`inbox`], [`jiffies`] |
//! | What does a user ask of flows? | [`rule`], [`rule_set`], [`policy`], [`enforce`], [`quota`] |
//! | Is anybody there: retransmission timers? | [`rto`] |
//! | Where is a packet counted that several interfaces see? | [`point`] |
//! | What does the data plane tell, and what is it told? | [`event`], [`counter`], [`config`], [`step`], [`probe`] |
//! | How do the timer schemes of the paper compare? | `schemes` |
//! | Tools | [`bits`], [`mod@named`] |
#![cfg_attr(not(any(test, feature = "std")), no_std)]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

pub mod bits;
pub mod config;
pub mod counter;
pub mod enforce;
pub mod event;
pub mod flow;
pub mod hash;
pub mod inbox;
pub mod jiffies;
pub mod key;
pub mod named;
pub mod numbers;
pub mod packet;
pub mod point;
pub mod policy;
pub mod pool;
pub mod probe;
pub mod quota;
pub mod record;
pub mod rto;
pub mod rule;
pub mod rule_set;
#[cfg(feature = "std")]
pub mod schemes;
pub mod seen;
pub mod segment;
pub mod snapshot;
pub mod state;
pub mod step;
pub mod table;
pub mod tracked;
pub mod way;
pub mod wheel;

/// `aya::Pod` for what crosses the kernel boundary.
#[cfg(feature = "user")]
mod pod {
    use crate::{config, counter, enforce, key, policy, pool, quota, rule, step, table, wheel};

    // SAFETY: `repr(C)`, integers and arrays of integers alone, and no padding: valid for any bytes.
    unsafe impl aya::Pod for table::Line {}
    // SAFETY: as above.
    unsafe impl aya::Pod for table::Details {}
    // SAFETY: as above.
    unsafe impl aya::Pod for table::Extras {}
    // SAFETY: as above.
    unsafe impl aya::Pod for pool::Shelf {}
    // SAFETY: as above.
    unsafe impl aya::Pod for table::Hash {}
    // SAFETY: as above.
    unsafe impl aya::Pod for rule::Rule {}
    // SAFETY: as above.
    unsafe impl aya::Pod for wheel::Link {}
    // SAFETY: as above.
    unsafe impl aya::Pod for step::Delete {}
    // SAFETY: as above.
    unsafe impl aya::Pod for step::Enter {}
    // SAFETY: as above.
    unsafe impl aya::Pod for step::Step {}
    // SAFETY: as above.
    unsafe impl aya::Pod for step::Sweep {}
    // SAFETY: as above.
    unsafe impl aya::Pod for policy::Active {}
    // SAFETY: as above.
    unsafe impl aya::Pod for config::Config {}
    // SAFETY: as above.
    unsafe impl aya::Pod for config::Meta {}
    // SAFETY: as above.
    unsafe impl aya::Pod for config::Watched {}
    // SAFETY: as above.
    unsafe impl aya::Pod for counter::Counters {}
    // SAFETY: as above.
    unsafe impl aya::Pod for enforce::Tomb {}
    // SAFETY: as above.
    unsafe impl aya::Pod for key::FlowKey {}
    // SAFETY: as above.
    unsafe impl aya::Pod for wheel::Wheel {}
    // SAFETY: as above.
    unsafe impl aya::Pod for policy::Header {}
    // SAFETY: as above.
    unsafe impl aya::Pod for policy::Rules {}
    // SAFETY: as above.
    unsafe impl aya::Pod for policy::Ends {}
    // SAFETY: as above.
    unsafe impl aya::Pod for policy::Prefix {}
    // SAFETY: as above.
    unsafe impl aya::Pod for quota::OverQuota {}
    // SAFETY: as above.
    unsafe impl aya::Pod for quota::Victims {}
}
