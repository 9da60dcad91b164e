//! Events to userspace.

use aya_ebpf::{bindings::BPF_RB_NO_WAKEUP, helpers::bpf_get_smp_processor_id};
use twheel_common::{
    counter::Counter,
    event::{Event, Reason},
    flow::{Flow, FlowKey, Seen, idle},
};

use crate::{count::count, maps::EVENTS};

/// Who waits for an event.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    /// Userspace drives the step and drains the ring after it.
    Stepping,
    /// Userspace sleeps.
    Asleep,
}

/// Puts the end of a flow into the ring; `false` if the ring is full.
#[inline(always)]
pub fn ended(
    key: &FlowKey,
    flow: &Flow,
    seen: Seen,
    reason: Reason,
    now: u64,
    reader: Reader,
) -> bool {
    let Some(mut entry) = EVENTS.reserve::<Event>(0) else {
        return false;
    };
    entry.write(Event {
        key: *key,
        at: now,
        age: now.saturating_sub(flow.created),
        idle: idle(now, flow.last_seen),
        seen: seen.0,
        reason: reason as u32,
        // SAFETY: the helper takes no argument.
        cpu: unsafe { bpf_get_smp_processor_id() },
    });
    entry.submit(match reader {
        Reader::Stepping => u64::from(BPF_RB_NO_WAKEUP),
        Reader::Asleep => 0,
    });
    true
}

/// The same from the packet path, which cannot wait: a loss is counted.
#[inline(always)]
pub fn ended_in_packet_path(key: &FlowKey, flow: &Flow, seen: Seen, reason: Reason, now: u64) {
    if !ended(key, flow, seen, reason, now, Reader::Asleep) {
        count(Counter::EventsLost);
    }
}
