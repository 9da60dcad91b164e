//! Events to userspace.

use aya_ebpf::{bindings::BPF_RB_NO_WAKEUP, maps::ring_buf::RingBufEntry};
use twheel_common::{
    event::{Event, Reason},
    flow::{Account, FlowKey, Word, age, idle},
};

use crate::{clock, maps::EVENTS};

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
    /// As in [`twheel_common::table::Record`].
    pub created: u32,
    /// The flow's last.
    pub word: Word,
    /// The rule it has met.
    pub rule: u16,
    /// Why it has ended.
    pub reason: Reason,
    /// What was sent.
    pub account: Account,
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
        (&raw mut (*event).age).write(age(now, ended.created));
        (&raw mut (*event).idle).write(idle(now, ended.word.stamp()));
        (&raw mut (*event).seen).write(ended.word.seen().0.into());
        (&raw mut (*event).reason).write(ended.reason as u32);
        (&raw mut (*event).cpu).write(clock::cpu());
        (&raw mut (*event).rule).write(ended.rule.into());
        // One by one, as the key.
        let account = (&raw mut (*event).account).cast::<u64>();
        let [low, high] = ended.account;
        account.write_volatile(low.packets);
        account.add(1).write_volatile(low.bytes);
        account.add(2).write_volatile(high.packets);
        account.add(3).write_volatile(high.bytes);
    }
    entry.submit(match reader {
        Reader::Stepping => u64::from(BPF_RB_NO_WAKEUP),
        Reader::Asleep => 0,
    });
}
