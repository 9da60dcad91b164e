//! Over-quota sources, as userspace has counted them. Consulted only if the table is full.
//!
//! A flow belongs to its initiator. A flow that was picked up may have been begun by either end, so
//! it belongs to both: otherwise a source that lost a flow would get it back with the next packet,
//! as a flow that belongs to no source.

use aya_ebpf::bindings::{BPF_RB_AVAIL_DATA, BPF_RB_FORCE_WAKEUP};
use twheel_common::{
    key::{Direction, FlowKey},
    quota::{CALL, OverQuota, VICTIMS as MOST, source},
    seen::Seen,
    segment::Segment,
};

use crate::{
    atomic, config,
    maps::{FULL, OVER_QUOTA, VICTIMS, WAKES},
    record,
    verifier::given,
};

/// 1 if the source of the flow that a segment begins is over quota.
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

/// 1 if the source of this flow in the table is over quota.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn quota_is_flow_over(index: u32, now: u64) -> u64 {
    match record::at(index) {
        Some(flow) => find(&flow.key(), flow.word().seen(), now).is_some().into(),
        None => 0,
    }
}

/// 1 if the source of this flow is over quota and still has excess flows, of which it then has one
/// less.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn quota_may_take(index: u32, now: u64) -> u64 {
    let Some(flow) = record::at(index) else {
        return 0;
    };
    let Some(over) = find(&flow.key(), flow.word().seen(), now) else {
        return 0;
    };
    // SAFETY: a value that the map gave is valid memory while the program runs, aligned to 8. The
    // map may give it to another source meanwhile, which then keeps a flow too many or loses one
    // too many.
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
    let found = over_quota(initiator, now);
    if found.is_none() && seen.is_pickup() {
        return over_quota(other, now);
    }
    found
}

#[inline(always)]
fn over_quota(address: [u64; 2], now: u64) -> Option<*mut OverQuota> {
    let over = OVER_QUOTA.get_ptr_mut(source(address))?;
    // SAFETY: as in `quota_may_take`.
    let until = unsafe { (&raw const (*over).until).read_volatile() };
    (now < until).then_some(over)
}

/// The next of this CPU's flows that userspace has named for eviction.
#[inline(always)]
pub fn next_victim() -> Option<u32> {
    let victims = VICTIMS.get_ptr_mut(0)?;
    // SAFETY: the value is this CPU's own, and the place is within its array. Userspace may write a
    // new list at the same time; the caller checks each flow that it reads from either list.
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

/// The most unread bytes in the ring with which the running twheel is still told that the table is
/// full.
const UNREAD: u64 = 128;

/// Tells userspace, once a second, that the table is full and no flow can be evicted.
#[inline(always)]
pub fn tell(now: u64) {
    let Some(told) = FULL.get_ptr_mut(0) else {
        return;
    };
    let second = i64::from(config!(two_seconds) / 2);
    // SAFETY: a place in a map, aligned to 8. Two CPUs that get here at once tell userspace twice.
    let before = unsafe { told.read_volatile() };
    if (now.wrapping_sub(before) as i64) < second {
        return;
    }
    // The rest of the ring is reserved for waking steppers.
    if WAKES.query(u64::from(BPF_RB_AVAIL_DATA)) > UNREAD {
        return;
    }
    let told_now = WAKES.output::<u64>(CALL, u64::from(BPF_RB_FORCE_WAKEUP));
    if told_now.is_ok() {
        // SAFETY: as above.
        unsafe { told.write_volatile(now) };
    }
}
