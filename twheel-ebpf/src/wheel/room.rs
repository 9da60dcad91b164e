//! Makes room for a new flow in a full table, or in the full window of its home: chooses a flow of
//! this CPU's wheel to evict.

use twheel_common::{
    counter::Counter, event::Reason, flow::Word, segment::Segment, table::WINDOW, visit::visit,
    wheel::Link,
};

use crate::{
    clock, config,
    count::count,
    quota,
    record::{self, At},
    verifier::{given, repeat},
};

use super::{
    end::{End, end},
    lists::{Lists, pending},
    own::this_cpu,
    visit::{For, Handled, counter_of, handle},
};

/// Most flows inspected to make room for a new one.
const LOOKS: u32 = 8;

/// Removes a flow of this CPU: one of the first [`LOOKS`] flows, if one of them may be evicted;
/// else, unless the segment's source is over quota itself, a flow of an over-quota source. 1 if
/// there is room now.
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
        // Each look inspects another list, beginning with the list of the latest flow.
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

/// Visits one flow to make room for another: the one nearest its deadline, as far as slots tell, so
/// the first of a list of the flows that have been handed out, or of the next slot. A flow that is
/// not established is evicted, unless it has whole rounds left and this is not the `last` try. For
/// an over-quota source (`over_quota`) only a flow of an over-quota source is evicted.
///
/// Returns [`KEPT`], [`REMOVED`] or [`NOTHING`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_make_room(list: u32, last: u32, over_quota: u32, now: u64) -> u64 {
    let Some(wheel) = this_cpu() else {
        return NOTHING;
    };
    let mut first = match Lists::at(pending()) {
        Some(waiting) => waiting.first(list),
        None => Link::NONE,
    };
    if first == Link::NONE {
        let Some(slot) = wheel.first(config::geometry()) else {
            return NOTHING;
        };
        if let Some(lists) = Lists::at(slot.index) {
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

/// Result of visiting a flow to make room: it stays, and another may be tried.
pub const KEPT: u64 = 0;
/// Result of visiting a flow to make room: it was removed.
pub const REMOVED: u64 = 1;
/// Result of visiting a flow to make room: there was none, or the ring is full.
pub const NOTHING: u64 = 2;

/// Makes room for a flow of a home whose window is full: of the flows in it that stand on this
/// CPU's wheel and are due or not established, ends the one nearest its deadline. 1 if one ended.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_make_room_at(home: u32, now: u64) -> u64 {
    let nearest = nearest_at(home, now);
    (nearest < NONE && end_at(nearest as u32, now)).into()
}

/// No record.
const NONE: u64 = u64::MAX;

/// The record of the flow nearest its deadline, or [`NONE`]. (A function apart from [`end_at`], for
/// the stack.)
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

/// Units until a flow of this CPU's wheel is due, if it may be ended: if it is due or not
/// established. Else [`NONE`].
///
/// A function that the verifier checks by itself: some kernels (6.19, 7.0) fail to verify it within
/// a loop.
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
    let seen = word.seen();
    let visit = visit(now, word, flow.timeout(seen), clock::doubt);
    match visit.wait(now, seen.is_established(config!(one_way) != 0)) {
        Some(wait) => wait,
        None => NONE,
    }
}

/// Ends a flow of this CPU's wheel, as expired or evicted. Returns whether it ended.
#[inline(always)]
fn end_at(index: u32, now: u64) -> bool {
    let Some(flow) = record::at(index) else {
        return false;
    };
    let word = flow.word();
    let seen = word.seen();
    let is_established = seen.is_established(config!(one_way) != 0);
    let visit = visit(now, word, flow.timeout(seen), clock::doubt);
    let Some(reason) = visit.for_room(is_established, |_| true).end else {
        return false;
    };
    end_now(flow, word, reason, now)
}

/// Ends a flow for another, and counts it. Returns whether it ended.
#[inline(always)]
fn end_now(flow: At, word: Word, reason: Reason, now: u64) -> bool {
    let gone = matches!(end(flow, word, reason, now), End::Done);
    if gone {
        count(counter_of(reason));
    }
    gone
}

/// Makes room for a flow of a source that is not over quota: evicts the first of the flows named by
/// userspace whose source is still over quota. 1 if one ended.
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
        // A flow that is queued for this CPU does not end before it has been taken out of the
        // inbox, which may take a while.
        let can_end = !word.is_dead() && !word.seen().is_posted();
        if can_end && flow.is_ours() && quota::quota_may_take(index, now) != 0 {
            victim = Some(index);
        }
        victim.is_some()
    });
    let Some(flow) = victim.and_then(record::at) else {
        return 0;
    };
    let gone = end_now(flow, flow.word(), Reason::Evicted, now);
    if gone {
        count(Counter::OverQuota);
    }
    gone.into()
}

/// Most flows named by userspace that are inspected: their records may hold other flows by now.
const TRIES: u32 = 32;
