//! Events to userspace.

use aya_ebpf::{bindings::BPF_RB_NO_WAKEUP, maps::ring_buf::RingBufEntry};
use twheel_common::{
    event::{Event, Pace, Reason, RtoExpired},
    flow::{Account, FlowKey, Word, age, idle},
};

use crate::{clock, maps::EVENTS, rto, table::At};

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
}

/// Room for an event. Taken before the flow is, so that no flow ends without one; given back by
/// `submit` or `discard`, which the verifier sees to.
#[inline(always)]
pub fn reserve() -> Option<RingBufEntry<Event>> {
    EVENTS.reserve::<Event>(0)
}

/// The same for the expiry of a retransmission timer.
#[inline(always)]
pub fn reserve_rto() -> Option<RingBufEntry<RtoExpired>> {
    EVENTS.reserve::<RtoExpired>(0)
}

/// Fills in the end of a flow; `None`: of one that is not in the table.
#[inline(always)]
pub fn submit(
    mut entry: RingBufEntry<Event>,
    flow: Option<At>,
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
        let (account, pace) = (&raw mut (*event).account, &raw mut (*event).pace);
        let positions = &raw mut (*event).positions;
        match flow {
            Some(flow) => {
                flow.report_account(account.cast());
                rto::report(flow, 0, pace.cast());
                rto::report(flow, 1, pace.cast::<Pace>().add(1));
                positions.write(flow.positions());
            }
            None => {
                account.write(Account::default());
                pace.write([Pace::default(); 2]);
                positions.write([0; 2]);
            }
        }
    }
    entry.submit(match reader {
        Reader::Stepping => u64::from(BPF_RB_NO_WAKEUP),
        Reader::Asleep => 0,
    });
}
