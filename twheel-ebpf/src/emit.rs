//! Events to userspace.

use core::ffi::c_void;

use aya_ebpf::{
    bindings::BPF_RB_NO_WAKEUP, helpers::generated::bpf_ringbuf_output,
    maps::ring_buf::RingBufEntry,
};
use twheel_common::{
    counter::Counter,
    event::{BATCH, BEGUN, Birth, Event, Pace, RtoExpired, Staged},
    flow::{Account, Word, age, idle},
    key::FlowKey,
};

use crate::{
    atomic, clock, config,
    count::count,
    maps::{EVENTS, NUMBER, STAGED},
    record::{self, At},
    timers,
    updates::{self, Unreported},
    verifier::masked,
};

/// What is reported of a flow, besides its record.
pub struct Ended {
    /// As in [`Details`](twheel_common::record::Details).
    pub created: u32,
    /// The flow's last word.
    pub word: Word,
    /// The flow's rule.
    pub rule: u16,
    /// As in [`Event`].
    pub reason: u32,
}

/// The number of the next event, whether the ring has room for it or not.
#[inline(always)]
pub fn next_number() -> u64 {
    match NUMBER.get_ptr_mut(0) {
        // SAFETY: a place in a map, aligned to 8; all access is atomic.
        Some(number) => unsafe { atomic::add(number, 1) + 1 },
        None => 0,
    }
}

/// Counts an event as lost, for which the ring has no room.
#[inline(always)]
pub fn lose() {
    next_number();
    count(Counter::EventsLost);
}

/// Reserves an event. Callers do so before they end the flow, so that no flow ends without its
/// event. `submit` or `discard` gives it up; the verifier checks that.
#[inline(always)]
pub fn reserve() -> Option<RingBufEntry<Event>> {
    EVENTS.reserve::<Event>(0)
}

/// Reports the beginning of a flow. A packet cannot wait until the ring has room for that.
#[inline(always)]
pub fn begun(index: u32, now: u64) {
    if emit_begun(index, now) != 0 {
        lose();
    }
}

/// As [`begun`]; returns 1 if the ring has no room. (The caller counts that: the verifier adds up
/// the stacks of callers and callees.)
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn emit_begun(index: u32, now: u64) -> u64 {
    let Some(flow) = record::at(index) else {
        return 0;
    };
    let begun = Ended {
        created: flow.created(),
        word: flow.word(),
        rule: flow.rule(),
        reason: BEGUN,
    };
    match reserve() {
        Some(entry) => submit(entry, flow, &flow.key(), &begun, now),
        None => return 1,
    }
    0
}

/// As [`reserve`], for an expired retransmission timer.
#[inline(always)]
pub fn reserve_rto() -> Option<RingBufEntry<RtoExpired>> {
    EVENTS.reserve::<RtoExpired>(0)
}

/// Reserves an event for the stepper, whose events share one record of the ring: a record costs
/// more than its content. `None` if [`BATCH`] events are staged, which must first be
/// [flushed](emit_flush). As with [`reserve`], no flow ends without its event, which stays staged
/// until it is in the ring.
#[inline(always)]
pub fn stage() -> Option<Stage> {
    let staged = STAGED.get_ptr_mut(0)?;
    // SAFETY: the value is this CPU's own, and only the stepper uses it.
    let count = unsafe { (&raw const (*staged).count).read_volatile() };
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

/// A reserved event among those that are staged.
pub struct Stage(*mut Staged, u64);

/// Puts all staged events into the ring, if it has room for all of them. Returns how many of them
/// are the ends of flows. The ring's reader is not woken: it drives the step, and drains
/// the ring after it.
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
    // SAFETY: the first of the events, of which `count` are filled in; see `stage`.
    unsafe {
        let put = bpf_ringbuf_output(
            (&raw const EVENTS).cast_mut().cast::<c_void>(),
            (&raw mut (*staged).events).cast::<c_void>(),
            count * size_of::<Event>() as u64,
            u64::from(BPF_RB_NO_WAKEUP),
        );
        if put == 0 {
            let ends = (&raw const (*staged).ends).read_volatile();
            (&raw mut (*staged).count).write_volatile(0);
            (&raw mut (*staged).ends).write_volatile(0);
            return ends as u32;
        }
    }
    0
}

impl Stage {
    /// The event's memory, which no other code accesses.
    #[inline(always)]
    pub fn event(&self) -> *mut Event {
        const { assert!(BATCH.is_power_of_two()) };
        // Linux 6.1 no longer knows what a number was compared with that lay on the stack meanwhile.
        let number = masked::<{ BATCH as u64 - 1 }>(self.1);
        // SAFETY: `stage` has compared the number with `BATCH`.
        unsafe {
            (&raw mut (*self.0).events)
                .cast::<Event>()
                .add(number as usize)
        }
    }

    /// Counts the event as staged, once it is filled in.
    #[inline(always)]
    pub fn keep(self) {
        // SAFETY: see `stage`.
        unsafe { (&raw mut (*self.0).count).write_volatile(self.1 + 1) };
    }

    /// Fills in the end of a flow.
    #[inline(always)]
    pub fn submit(self, flow: At, key: &FlowKey, ended: &Ended, now: u64) {
        // SAFETY: the event is valid memory, aligned, and no other code accesses it.
        unsafe {
            fill_end(self.event(), key, ended, now);
            fill_flow(
                self.event(),
                flow,
                ended,
                updates::unreported(flow, ended.created, now),
            );
        }
        // SAFETY: see `stage`.
        unsafe {
            let ends = &raw mut (*self.0).ends;
            ends.write_volatile(ends.read_volatile() + 1);
        }
        self.keep();
    }

    /// Fills in an update of a flow. Returns what was counted.
    #[inline(always)]
    pub fn submit_update(
        self,
        flow: At,
        updated: &Ended,
        unreported: Unreported,
        now: u64,
    ) -> Account {
        // SAFETY: as in `submit`.
        let account = unsafe {
            fill_end(self.event(), &flow.key(), updated, now);
            fill_flow(self.event(), flow, updated, unreported);
            (&raw const (*self.event()).account).read_volatile()
        };
        self.keep();
        account
    }
}

/// Fills in the end of a flow and submits it.
#[inline(always)]
pub fn submit(mut entry: RingBufEntry<Event>, flow: At, key: &FlowKey, ended: &Ended, now: u64) {
    // SAFETY: the ring gave room for an `Event`, aligned to 8, to this code alone.
    unsafe {
        fill_end(entry.as_mut_ptr(), key, ended, now);
        let unreported = updates::unreported(flow, ended.created, now);
        fill_flow(entry.as_mut_ptr(), flow, ended, unreported);
    }
    entry.submit(0);
}

/// Sets the fields that describe the end of a flow. ([`fill_flow`] sets the rest.)
///
/// # Safety
///
/// `event` is valid for writes, aligned, and no other code accesses it.
#[inline(always)]
pub unsafe fn fill_end(event: *mut Event, key: &FlowKey, ended: &Ended, now: u64) {
    // SAFETY: the caller's promise.
    unsafe {
        key.store(&raw mut (*event).key);
        (&raw mut (*event).number).write(next_number());
        (&raw mut (*event).at).write(now);
        (&raw mut (*event).age).write(age(now, ended.created));
        (&raw mut (*event).idle).write(idle(now, ended.word.stamp()));
        (&raw mut (*event).seen).write(ended.word.seen().0);
        (&raw mut (*event).reason).write(ended.reason);
        (&raw mut (*event).cpu).write(clock::cpu() as u16);
        (&raw mut (*event).rule).write(ended.rule);
    }
}

/// Sets the fields that come from the flow's record: the rest.
///
/// # Safety
///
/// As for [`fill_end`].
#[inline(always)]
unsafe fn fill_flow(event: *mut Event, flow: At, ended: &Ended, unreported: Unreported) {
    let word = ended.word;
    let updates = u32::from(config!(active_timeout) != 0);
    // SAFETY: the caller's promise.
    unsafe {
        flow.report_account((&raw mut (*event).account).cast());
        let pace = (&raw mut (*event).pace).cast::<Pace>();
        timers::report(flow.hot(), 0, pace);
        timers::report(flow.hot(), 1, pace.add(1));
        (&raw mut (*event).positions).write(flow.positions());
        (&raw mut (*event).point).write(flow.initiator_point(word.seen()));
        (&raw mut (*event).birth).write(Birth::new(flow.is_outgoing(), word));
        let before = (&raw mut (*event).before).cast();
        let since = updates::report(unreported, before);
        (&raw mut (*event).since).write(since);
        (&raw mut (*event).updates).write(updates);
    }
}
