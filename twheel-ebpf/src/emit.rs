//! Events to userspace.

use aya_ebpf::{
    bindings::BPF_RB_NO_WAKEUP, helpers::bpf_get_smp_processor_id, maps::ring_buf::RingBufEntry,
};
use twheel_common::{
    event::{Event, Reason},
    flow::{FlowKey, Seen, idle},
};

use crate::maps::EVENTS;

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

/// Room for an event. Taken before the flow is, so that no flow ends without one; given back by
/// `submit` or `discard`, which the verifier sees to.
#[inline(always)]
pub fn reserve() -> Option<RingBufEntry<Event>> {
    EVENTS.reserve::<Event>(0)
}

/// Fills in the end of a flow.
#[inline(always)]
pub fn submit(
    mut entry: RingBufEntry<Event>,
    key: &FlowKey,
    ended: &Ended,
    now: u64,
    reader: Reader,
) {
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
}
