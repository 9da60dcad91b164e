//! The usual tracker in eBPF: an LRU hash whose entry every packet updates.

use aya_ebpf::{
    macros::{map, xdp},
    maps::{LruHashMap, PerCpuArray},
    programs::XdpContext,
};
use twheel_common::flow::FlowKey;

use crate::packets::{parsed, run};

/// The flows: when each was last seen, and what such trackers keep beside it. As long as an entry of `FLOOR`.
#[map]
pub static LRU: LruHashMap<FlowKey, [u64; 5]> = LruHashMap::with_max_entries(1, 0);

/// Insertions, so that whoever measures known flows sees that they were: the hash evicts as it likes.
#[map]
static INSERTS: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// A packet: look up and store the time; insert what is not there.
#[xdp]
pub fn peer_lru(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, now| {
        let Some(segment) = parsed(frame) else {
            return false;
        };
        match LRU.get_ptr_mut(segment.key) {
            Some(flow) => {
                // SAFETY: a pointer that the table gave is valid memory while the program runs.
                unsafe { flow.cast::<u64>().write_volatile(now) };
                true
            }
            None => {
                if let Some(inserts) = INSERTS.get_ptr_mut(0) {
                    // SAFETY: this CPU's own place in a map.
                    unsafe { *inserts += 1 };
                }
                LRU.insert(segment.key, [now, 0, 0, 0, 0], 0).is_ok()
            }
        }
    })
}

/// Takes flows out.
#[xdp]
pub fn peer_lru_delete(ctx: XdpContext) -> u32 {
    run(&ctx, |frame, _| match parsed(frame) {
        Some(segment) => LRU.remove(segment.key).is_ok(),
        None => false,
    })
}
