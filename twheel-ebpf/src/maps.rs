//! Every map of the data plane, and its configuration. Sizes that depend on the configuration are
//! set by the loader. Pinned maps outlive the loader and are adopted by the next one.

use aya_ebpf::{
    Global,
    bindings::BPF_F_MMAPABLE,
    macros::map,
    maps::{Array, PerCpuArray, RingBuf},
};
use twheel_common::{
    config::{CLOCK_JIFFIES, Config, Meta},
    counter::Counters,
    flow::Timeouts,
    table::{Hash, Record},
    wheel::{Geometry, Link, Wheel},
};

/// Set by the loader; read-only to the verifier.
#[unsafe(no_mangle)]
pub static CONFIG: Global<Config> = Global::new(Config {
    timeouts: Timeouts {
        idle: 15_000,
        close: 2_500,
    },
    tick: 25,
    geometry: Geometry::hierarchical(3, 10),
    clock: CLOCK_JIFFIES,
    max_flows: 131_072,
});

/// Set by the loader, like [`CONFIG`]; apart from it, because every packet reads all of this.
#[unsafe(no_mangle)]
pub static HASH: Global<Hash> = Global::new(Hash {
    keys: [0; 11],
    homes: 64,
});

/// The flow table: see `table`. Mappable: its records then begin where cache lines do, and userspace
/// reads it without a system call.
#[map]
pub static FLOWS: Array<Record> = Array::pinned(95, BPF_F_MMAPABLE);

/// Flows in the table, and such as are just entering it. A map of its own: all CPUs write there.
#[map]
pub static TRACKED: Array<u64> = Array::pinned(1, 0);

/// A wheel per CPU, touched by that CPU alone, with bottom halves off.
#[map]
pub static WHEEL: PerCpuArray<Wheel> = PerCpuArray::pinned(1, 0);

/// Heads of the lists of flows, one for each slot of the wheel, and behind them one for the flows
/// that have been handed out and await their visit. Same rule as [`WHEEL`].
#[map]
pub static SLOTS: PerCpuArray<Link> = PerCpuArray::pinned((3 << 10) + 1, 0);

/// Flows that have ended: `twheel_common::event::Event`.
#[map]
pub static EVENTS: RingBuf = RingBuf::pinned(1 << 20, 0);

/// CPUs (`u64`) whose stepper sleeps past a new deadline. A ring of its own, so that no amount of
/// events keeps a stepper asleep.
#[map]
pub static WAKES: RingBuf = RingBuf::pinned(1 << 12, 0);

/// Counters per CPU.
#[map]
pub static COUNTERS: PerCpuArray<Counters> = PerCpuArray::pinned(1, 0);

/// What the pinned maps were made for; written by the loader, for the next one.
#[map]
pub static META: Array<Meta> = Array::pinned(1, 0);

/// Virtual time, units; read only where the configuration says so.
#[map]
pub static CLOCK: Array<u64> = Array::pinned(1, 0);
