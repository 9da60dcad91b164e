//! Trackers in eBPF, each with another kind of kernel map.

use aya_ebpf::{
    bindings::BPF_F_NO_PREALLOC,
    macros::{map, xdp},
    maps::{HashMap, LruHashMap, PerCpuArray},
    programs::XdpContext,
};
use twheel_common::{flow::FlowKey, packet::Segment};

use crate::packets::{parsed, run};

/// The usual tracker: when each flow was last seen, and what such trackers store beside it. Entries
/// are as long as those of `FLOOR`.
#[map]
pub static LRU: LruHashMap<FlowKey, [u64; 5]> = LruHashMap::with_max_entries(1, 0);

/// The least that a tracker of IPv4 and TCP alone needs: two addresses, two ports, and when the
/// flow was last seen.
#[map]
pub static SMALL: HashMap<[u32; 3], u64> = HashMap::with_max_entries(1, 0);

/// As `LRU`. `tests/bench/src/peers.rs` replaces it with the kernel's resizable hash map, for which
/// aya has no type.
#[map]
pub static RESIZABLE: HashMap<FlowKey, [u64; 5]> = HashMap::with_max_entries(1, BPF_F_NO_PREALLOC);

/// Insertions. They show whether the packets of a measurement were of known flows: an LRU hash map
/// evicts as it likes.
#[map]
static INSERTS: PerCpuArray<u64> = PerCpuArray::with_max_entries(1, 0);

/// The whole key.
#[inline(always)]
fn whole(segment: &Segment) -> FlowKey {
    segment.key
}

/// The addresses and ports of a segment of IPv4.
#[inline(always)]
fn small(segment: &Segment) -> [u32; 3] {
    let [_, low, _, high] = segment.key.addresses();
    [
        (low >> 32) as u32,
        (high >> 32) as u32,
        segment.key.ports() as u32,
    ]
}

/// A value of five words.
#[inline(always)]
fn words(now: u64) -> [u64; 5] {
    [now, 0, 0, 0, 0]
}

/// A value of one word.
#[inline(always)]
fn word(now: u64) -> u64 {
    now
}

/// Defines a program in which each packet looks up its flow and stores the time, or inserts the
/// flow; and a program that deletes flows.
macro_rules! tracker {
    ($table:ident, $program:ident, $delete:ident, $key:ident, $value:ident) => {
        /// Handles a packet.
        #[xdp]
        pub fn $program(ctx: XdpContext) -> u32 {
            run(&ctx, |frame, now| {
                let Some(segment) = parsed(frame) else {
                    return false;
                };
                let key = $key(&segment);
                match $table.get_ptr_mut(key) {
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
                        $table.insert(key, $value(now), 0).is_ok()
                    }
                }
            })
        }

        /// Deletes flows.
        #[xdp]
        pub fn $delete(ctx: XdpContext) -> u32 {
            run(&ctx, |frame, _| match parsed(frame) {
                Some(segment) => $table.remove($key(&segment)).is_ok(),
                None => false,
            })
        }
    };
}

tracker!(LRU, peer_lru, peer_lru_delete, whole, words);
tracker!(SMALL, peer_small, peer_small_delete, small, word);
tracker!(
    RESIZABLE,
    peer_resizable,
    peer_resizable_delete,
    whole,
    words
);
