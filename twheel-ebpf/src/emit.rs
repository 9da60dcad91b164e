//! Events to userspace.

use aya_ebpf::{bindings::BPF_RB_NO_WAKEUP, helpers::bpf_get_smp_processor_id};
use twheel_common::{
    counter::Counter,
    event::{Event, Reason},
    flow::{FlowKey, Seen, idle},
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

/// What there is to say of a flow that has ended.
pub struct Ended {
    /// As in [`twheel_common::flow::Flow`].
    pub created: u64,
    /// As in [`twheel_common::flow::Flow`].
    pub last_seen: u32,
    /// What was seen of it.
    pub seen: Seen,
    /// Why it has ended.
    pub reason: Reason,
}

/// Puts the end of a flow into the ring; `false` if the ring is full.
#[inline(always)]
pub fn ended(key: &FlowKey, ended: &Ended, now: u64, reader: Reader) -> bool {
    let Some(mut entry) = EVENTS.reserve::<Event>(0) else {
        return false;
    };
    let event = entry.as_mut_ptr();
    // SAFETY: the ring gave room for an `Event`, aligned to 8, to nobody else; every field is set.
    unsafe {
        key.store(&raw mut (*event).key);
        (&raw mut (*event).at).write(now);
        (&raw mut (*event).age).write(now.saturating_sub(ended.created));
        (&raw mut (*event).idle).write(idle(now, ended.last_seen));
        (&raw mut (*event).seen).write(ended.seen.0);
        (&raw mut (*event).reason).write(ended.reason as u32);
        (&raw mut (*event).cpu).write(bpf_get_smp_processor_id());
    }
    entry.submit(match reader {
        Reader::Stepping => u64::from(BPF_RB_NO_WAKEUP),
        Reader::Asleep => 0,
    });
    true
}

/// The same from the packet path, which cannot wait: a loss is counted.
#[inline(always)]
pub fn ended_in_packet_path(key: &FlowKey, flow: &Ended, now: u64) {
    if !ended(key, flow, now, Reader::Asleep) {
        count(Counter::EventsLost);
    }
}
