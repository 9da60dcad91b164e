//! Makes room for a new flow in a full table, or in the window of its home: which flow of this CPU's wheel goes.

use twheel_common::{
    counter::Counter,
    event::Reason,
    flow::{Visit, idle, visit},
    segment::Segment,
    table::WINDOW,
    wheel::Link,
};

use crate::{
    clock, config,
    count::count,
    quota, record,
    verifier::{given, repeat},
};

use super::{
    end::{End, end},
    lists::{Lists, pending},
    own::this_cpu,
    visit::{For, Handled, handle},
};

/// Flows looked at, at most, to make room for a new one.
const LOOKS: u32 = 8;

/// Removes one flow of this CPU that can go, if one of the first [`LOOKS`] can; else one of a source that holds more
/// than its quota, if that of the segment does not. 1 if there is room now.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_find_room(segment: *const Segment, now: u64) -> u64 {
    let (Some(segment), Some(wheel)) = (given(segment), this_cpu()) else {
        return 0;
    };
    let has_quota = config!(quota) != 0;
    let over_quota = has_quota && quota::quota_is_over(segment, now) != 0;
    for number in 0..LOOKS {
        let last = number + 1 == LOOKS;
        // Each looks at another list, first that of the latest flow.
        let list = wheel.latest().wrapping_add(number);
        match wheel_make_room(list, last.into(), over_quota.into(), now) {
            KEPT => {}
            REMOVED => return 1,
            _ => break,
        }
    }
    if !has_quota || over_quota {
        return 0;
    }
    quota::tell(now);
    wheel_take_from_over_quota(now)
}

/// Visits one flow to make room for another: the one nearest its deadline, as far as slots tell, so one of those
/// that have been handed out or of the next slot, the first of a list. A flow that is not established goes, unless it has
/// whole rounds left and this is not the `last` try. For a source that holds more than its quota (`over_quota`) only one
/// of such a source goes.
///
/// [`KEPT`], [`REMOVED`] or [`NOTHING`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_make_room(list: u32, last: u32, over_quota: u32, now: u64) -> u64 {
    let Some(wheel) = this_cpu() else {
        return NOTHING;
    };
    let mut first = match Lists::of(pending()) {
        Some(waiting) => waiting.first(list),
        None => Link::NONE,
    };
    if first == Link::NONE {
        let Some(slot) = wheel.first(config::geometry()) else {
            return NOTHING;
        };
        if let Some(lists) = Lists::of(slot.index) {
            first = lists.first(list);
        }
    }
    let purpose = For::Room {
        last: last != 0,
        over_quota: over_quota != 0,
    };
    match handle(wheel, first, now, now, purpose) {
        Handled::Rearmed | Handled::Reported => KEPT,
        Handled::Removed => REMOVED,
        Handled::RingFull | Handled::Nothing(_) => NOTHING,
    }
}

/// What became of a flow that was looked at for its room: it stays, and another may go;
pub const KEPT: u64 = 0;
/// it is gone;
pub const REMOVED: u64 = 1;
/// there was none.
pub const NOTHING: u64 = 2;

/// Makes room for a flow of a home whose window is full: of the flows there that stand on this CPU's wheel
/// and are due or not established, the one nearest its deadline goes. 1 if one went.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_make_room_at(home: u32, now: u64) -> u64 {
    let nearest = nearest_at(home, now);
    (nearest < NONE && end_at(nearest as u32, now)).into()
}

/// No record.
const NONE: u64 = u64::MAX;

/// The record of that flow, or [`NONE`]. (Two functions, for the stack.)
#[inline(always)]
fn nearest_at(home: u32, now: u64) -> u64 {
    let (mut nearest, mut left) = (NONE, NONE);
    repeat(WINDOW, |distance| {
        let index = home + distance;
        let wait = wheel_wait_of(index, now);
        if wait < left {
            left = wait;
            nearest = u64::from(index);
        }
        false
    });
    nearest
}

/// Units until a flow of this CPU's wheel is due, if it can go: it is due or not established. Else [`NONE`].
///
/// A function that the verifier goes through by itself: some kernels (6.19, 7.0) fail on it within a loop.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_wait_of(index: u32, now: u64) -> u64 {
    let Some(flow) = record::at(index) else {
        return NONE;
    };
    let word = flow.word();
    if word.is_dead() || !flow.is_ours() {
        return NONE;
    }
    let idle = idle(now, word.stamp());
    let timeout = flow.timeout(word.seen());
    if idle >= timeout {
        0
    } else if word.seen().is_established(config!(one_way) != 0) {
        NONE
    } else {
        (timeout - idle).into()
    }
}

/// Ends a flow of this CPU's wheel that can go. Says whether it went.
#[inline(always)]
fn end_at(index: u32, now: u64) -> bool {
    let Some(flow) = record::at(index) else {
        return false;
    };
    let word = flow.word();
    let (reason, counter) = match visit(now, word, flow.timeout(word.seen()), clock::doubt) {
        Visit::Expire => (Reason::of_expiry(word.seen()), Counter::Expired),
        Visit::Rearm(_) => (Reason::Evicted, Counter::Evicted),
    };
    let gone = matches!(end(flow, word, reason, now), End::Done);
    if gone {
        count(counter);
    }
    gone
}

/// Makes room for a flow of a source that holds no more than its quota: of those that userspace has named, the first
/// goes that is still of a source that holds more. 1 if one went.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_take_from_over_quota(now: u64) -> u64 {
    let mut victim = None;
    repeat(TRIES, |_| {
        let Some(index) = quota::next_victim() else {
            return true;
        };
        let Some(flow) = record::at(index) else {
            return true;
        };
        let word = flow.word();
        // One that is on its way to this CPU does not end before it is there, which may take a while.
        let can_end = !word.is_dead() && !word.seen().is_posted();
        if can_end && flow.is_ours() && quota::quota_may_take(index, now) != 0 {
            victim = Some(index);
        }
        victim.is_some()
    });
    let Some(flow) = victim.and_then(record::at) else {
        return 0;
    };
    let gone = matches!(end(flow, flow.word(), Reason::Evicted, now), End::Done);
    if gone {
        count(Counter::Evicted);
        count(Counter::OverShare);
    }
    gone.into()
}

/// Flows looked at, at most, of those that userspace has named: others may stand in their places by now.
const TRIES: u32 = 32;
