//! Events to userspace.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::BPF_RB_NO_WAKEUP, helpers::generated::bpf_ringbuf_output,
    maps::ring_buf::RingBufEntry,
};
use twheel_common::{
    event::{BATCH, Event, Pace, RtoExpired, Staged},
    flow::{Account, FlowKey, Word, age, idle},
    point::Point,
    state::Seen,
};

use crate::{
    clock, config,
    maps::{EVENTS, STAGED},
    rto,
    table::{self, At},
};

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
    /// Why it has ended: [`Reason`](twheel_common::event::Reason).
    pub reason: u32,
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

/// Room for an event of the stepper's, with as many as can come before it in its record: a record costs more than what is
/// in it. `None` if there is none in the ring for those that are staged. Of the same use as [`reserve`]: no flow ends
/// without its event, which stays here until it is in the ring.
#[inline(always)]
pub fn stage() -> Option<Stage> {
    let staged = STAGED.get_ptr_mut(0)?;
    // SAFETY: the value is this CPU's own, and only the stepper uses it.
    let mut count = unsafe { (&raw const (*staged).count).read_volatile() };
    if count >= BATCH as u64 {
        emit_flush();
        // SAFETY: as above.
        count = unsafe { (&raw const (*staged).count).read_volatile() };
    }
    if count >= BATCH as u64 {
        return None;
    }
    Some(Stage(staged, count))
}

/// How many events are staged.
#[inline(always)]
pub fn staged() -> u32 {
    match STAGED.get_ptr(0) {
        // SAFETY: as in `stage`.
        Some(staged) => unsafe { (&raw const (*staged).count).read_volatile() as u32 },
        None => 0,
    }
}

/// Puts what is staged into the ring, if there is room for all of it, and counts the flows out. Its reader is not woken: it drives the step, and
/// drains the ring after it.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn emit_flush() -> u32 {
    let Some(staged) = STAGED.get_ptr_mut(0) else {
        return 0;
    };
    // SAFETY: as in `stage`.
    let count = unsafe { (&raw const (*staged).count).read_volatile() };
    if count == 0 || count > BATCH as u64 {
        return 0;
    }
    // SAFETY: the first of the events, of which so many are there; see `stage`.
    unsafe {
        let put = bpf_ringbuf_output(
            (&raw const EVENTS).cast_mut().cast::<c_void>(),
            (&raw mut (*staged).events).cast::<c_void>(),
            count * size_of::<Event>() as u64,
            u64::from(BPF_RB_NO_WAKEUP),
        );
        if put == 0 {
            (&raw mut (*staged).count).write_volatile(0);
            table::uncount(count as u32);
        }
    }
    0
}

/// A place for an event among those that are staged.
pub struct Stage(*mut Staged, u64);

impl Stage {
    /// Fills in the end of a flow; `None`: of one that is not in the table.
    #[inline(always)]
    pub fn submit(self, flow: Option<At>, key: &FlowKey, ended: &Ended, now: u64) {
        // SAFETY: see `stage`, which has compared the number.
        unsafe {
            let events = (&raw mut (*self.0).events).cast::<Event>();
            fill(events.add(self.1 as usize), flow, key, ended, now);
            (&raw mut (*self.0).count).write_volatile(self.1 + 1);
        }
    }
}

/// Fills in the end of a flow and submits it; `None`: of one that is not in the table.
#[inline(always)]
pub fn submit(
    mut entry: RingBufEntry<Event>,
    flow: Option<At>,
    key: &FlowKey,
    ended: &Ended,
    now: u64,
    reader: Reader,
) {
    // SAFETY: the ring gave room for an `Event`, aligned to 8, to nobody else.
    unsafe { fill(entry.as_mut_ptr(), flow, key, ended, now) };
    entry.submit(match reader {
        Reader::Stepping => u64::from(BPF_RB_NO_WAKEUP),
        Reader::Asleep => 0,
    });
}

/// Where packets of the flow's initiator are counted.
#[inline(always)]
pub fn initiator(flow: At, seen: Seen) -> Point {
    match config!(watched) {
        0 => Point::NONE,
        _ => flow.point(seen.initiator()).0,
    }
}

/// Sets every field.
///
/// # Safety
///
/// `event` is valid for writes, aligned, and nobody else's.
#[inline(always)]
unsafe fn fill(event: *mut Event, flow: Option<At>, key: &FlowKey, ended: &Ended, now: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        key.store(&raw mut (*event).key);
        (&raw mut (*event).at).write(now);
        (&raw mut (*event).age).write(age(now, ended.created));
        (&raw mut (*event).idle).write(idle(now, ended.word.stamp()));
        (&raw mut (*event).seen).write(ended.word.seen().0);
        (&raw mut (*event).reason).write(ended.reason);
        (&raw mut (*event).cpu).write(clock::cpu() as u16);
        (&raw mut (*event).rule).write(ended.rule);
        let place = &raw mut (*event).point;
        let is_outgoing = &raw mut (*event).is_outgoing;
        let (account, pace) = (&raw mut (*event).account, &raw mut (*event).pace);
        let positions = &raw mut (*event).positions;
        match flow {
            Some(flow) => {
                flow.report_account(account.cast());
                rto::report(flow.hot(), 0, pace.cast());
                rto::report(flow.hot(), 1, pace.cast::<Pace>().add(1));
                positions.write(flow.positions());
                place.write(initiator(flow, ended.word.seen()));
                is_outgoing.write(flow.is_outgoing().into());
            }
            None => {
                account.write(Account::default());
                pace.write([Pace::default(); 2]);
                positions.write([0; 2]);
                place.write(Point::NONE);
                is_outgoing.write(0);
            }
        }
    }
}
