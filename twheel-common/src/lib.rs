//! The logic of twheel: parse packets, track the state of flows, and find their timers' slots on
//! the timing wheel.
//!
//! All code here is pure: it does no I/O, reads no clock (`now` is an argument) and allocates
//! nothing. The eBPF programs are a thin layer that puts maps under this code; the host tests run
//! the same code.
//!
//! Time is counted in *units* of the clock that the data plane reads: jiffies in production, under
//! virtual time whatever the test chooses. A *tick* of the wheel is a whole number of units.
//!
//! The modules, in a good order to read them:
//!
//! | topic | modules |
//! |---|---|
//! | Packets: the flow they belong to and what they say of it | [`key`], [`segment`], [`packet`] |
//! | The state of a flow, and how packets change it | [`seen`], [`numbers`], [`way`], [`state`] |
//! | The part of a flow that CPUs share | [`flow`] |
//! | What follows from a packet, and from a timer visit | [`decision`], [`mod@visit`], [`tracked`] |
//! | The flow table | [`hash`], [`record`], [`table`], [`snapshot`], [`pool`] |
//! | The timing wheel, and which CPU looks at a flow when | [`wheel`], [`inbox`], [`jiffies`] |
//! | Policy and reaping | [`rule`], [`rule_set`], [`policy`], [`enforce`], [`quota`] |
//! | Retransmission timers: does the other side still answer? | [`rto`] |
//! | Timeouts that programs hand over for their connections | [`offload`] |
//! | Which interface counts a packet that several interfaces see | [`point`] |
//! | Events, counters and settings: what the data plane and userspace exchange | [`event`], [`update`], [`counter`], [`config`], [`step`], [`probe`], `pod` |
//! | Tools | [`bits`], [`mod@named`] |
#![cfg_attr(not(test), no_std)]
#![cfg_attr(target_arch = "bpf", feature(asm_experimental_arch))]

pub mod bits;
pub mod config;
pub mod counter;
pub mod decision;
pub mod enforce;
pub mod event;
pub mod flow;
pub mod hash;
pub mod inbox;
pub mod jiffies;
pub mod key;
pub mod named;
pub mod numbers;
pub mod offload;
pub mod packet;
#[cfg(feature = "user")]
mod pod;
pub mod point;
pub mod policy;
pub mod pool;
pub mod probe;
pub mod quota;
pub mod record;
pub mod rto;
pub mod rule;
pub mod rule_set;
pub mod seen;
pub mod segment;
pub mod snapshot;
pub mod state;
pub mod step;
pub mod table;
pub mod tracked;
pub mod update;
pub mod visit;
pub mod way;
pub mod wheel;
