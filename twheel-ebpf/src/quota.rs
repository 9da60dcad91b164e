//! Sources that hold more than their quota, as userspace has counted: only looked at where the table is full.
//!
//! A flow is its initiator's. One whose beginning was not seen may be either end's, and is both's: else who has lost
//! a flow would have it back, as nobody's, with the next packet.

use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP};
use twheel_common::{
    key::{Direction, FlowKey},
    quota::{CALL, OverQuota, VICTIMS as MOST, source},
    seen::Seen,
    segment::Segment,
};

use crate::{
    atomic, config,
    maps::{FULL, HOGS, VICTIMS, WAKES},
    record,
    verifier::given,
};

/// 1 if the flow that a segment begins is of a source that holds more than its quota.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn quota_is_over(segment: *const Segment, now: u64) -> u64 {
    let Some(segment) = given(segment) else {
        return 0;
    };
    match Seen::first(segment.direction, segment.flags, config::view()) {
        Some(seen) => find(&segment.key, seen, now).is_some().into(),
        None => 0,
    }
}

/// The same for a flow in the table.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn quota_is_flow_over(index: u32, now: u64) -> u64 {
    match record::at(index) {
        Some(flow) => find(&flow.key(), flow.word().seen(), now).is_some().into(),
        None => 0,
    }
}

/// The same, and whether the source still has more than its quota; it has one less then.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn quota_may_take(index: u32, now: u64) -> u64 {
    let Some(flow) = record::at(index) else {
        return 0;
    };
    let Some(over) = find(&flow.key(), flow.word().seen(), now) else {
        return 0;
    };
    // SAFETY: a value that the map gave is valid memory while the program runs, aligned to 8. It may be given to another
    // source meanwhile, which then keeps a flow more or has one less.
    unsafe {
        let excess = &raw mut (*over).excess;
        if excess.read_volatile() <= 0 {
            return 0;
        }
        atomic::add(excess.cast(), u64::MAX);
    }
    1
}

#[inline(always)]
fn find(key: &FlowKey, seen: Seen, now: u64) -> Option<*mut OverQuota> {
    let [a, b, c, d] = key.addresses();
    let (initiator, other) = match seen.initiator() {
        Direction::FromLow => ([a, b], [c, d]),
        Direction::FromHigh => ([c, d], [a, b]),
    };
    let found = of(initiator, now);
    if found.is_none() && seen.is_pickup() {
        return of(other, now);
    }
    found
}

#[inline(always)]
fn of(address: [u64; 2], now: u64) -> Option<*mut OverQuota> {
    let over = HOGS.get_ptr_mut(source(address))?;
    // SAFETY: as in `quota_may_take`.
    let until = unsafe { (&raw const (*over).until).read_volatile() };
    (now < until).then_some(over)
}

/// The next of this CPU's flows that userspace has named.
#[inline(always)]
pub fn next_victim() -> Option<u32> {
    let victims = VICTIMS.get_ptr_mut(0)?;
    // SAFETY: the value is this CPU's own, and the place within its array. Userspace may write a new list at the same time:
    // what is then read of either is looked at before it is believed.
    unsafe {
        let next = (&raw const (*victims).next).read_volatile();
        if next >= (&raw const (*victims).count).read_volatile() {
            return None;
        }
        (&raw mut (*victims).next).write_volatile(next + 1);
        let flows = (&raw const (*victims).flows).cast::<u32>();
        Some(flows.add(next as usize & (MOST - 1)).read_volatile())
    }
}

/// Bytes that the loader has not read, at most, for it to be told that the table is full.
const UNREAD: u64 = 128;

/// Tells userspace that the table is full of flows that nobody gives up: once a second.
#[inline(always)]
pub fn tell(now: u64) {
    let Some(told) = FULL.get_ptr_mut(0) else {
        return;
    };
    let second = i64::from(config!(two_seconds) / 2);
    // SAFETY: a place in a map, aligned to 8. Two CPUs at once tell it twice.
    let before = unsafe { told.read_volatile() };
    if (now.wrapping_sub(before) as i64) < second {
        return;
    }
    // The rest of the ring is for calls of steppers.
    if WAKES.query(u64::from(BPF_RB_AVAIL_DATA)) > UNREAD {
        return;
    }
    let told_now = WAKES.output::<u64>(CALL, u64::from(BPF_RB_FORCE_WAKEUP));
    if told_now.is_ok() {
        // SAFETY: as above.
        unsafe { told.write_volatile(now) };
    }
}
