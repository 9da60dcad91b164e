//! Timer visits: the wheel looks at one flow whose slot has come round, and re-arms or ends it.

use twheel_common::{
    bits::lowest,
    counter::Counter,
    event::Reason,
    flow::{MAX_AGE, age},
    visit::visit,
    wheel::{LISTS, Link, Slot},
};

use crate::{
    clock, config,
    count::count,
    quota,
    record::{self, At},
    rto, timers, updates,
};

use super::{
    arm::{wake_for, wheel_hasten},
    end::{End, end, wheel_expire},
    lists::{Lists, pending, push, unlink},
    own::Own,
};

/// What this CPU's wheel did with the flow at the head of the earliest slot.
pub enum Handled {
    /// Re-armed.
    Rearmed,
    /// Re-armed, and an expired retransmission timer was reported.
    Reported,
    /// Removed, and its end reported.
    Removed,
    /// Left in place: the ring is full.
    RingFull,
    /// No flow is due by the tick asked for. The next slot that holds flows, if there is one.
    Nothing(Option<Slot>),
}

/// Looks at a flow that was taken out of this CPU's inbox.
#[inline(always)]
pub fn deliver(flow: At, now: u64) {
    flow.delivered();
    // After that: a CPU that changes the flow from here on posts it again.
    wheel_look(flow.index(), now);
}

/// Moves a flow of this CPU's wheel to the slot of its present deadline. Returns 1 if it is due.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn wheel_look(index: u32, now: u64) -> u64 {
    let Some(flow) = record::at(index) else {
        return 0;
    };
    let word = flow.word();
    let visit = visit(now, word, flow.timeout(word.seen()), clock::doubt);
    match visit.end {
        None => {
            let due = first_of(flow, now, visit.due);
            wheel_hasten(index, due);
            if config::rto_is_on() {
                settle(flow, now, due);
            }
            0
        }
        Some(_) => {
            wheel_hasten(index, now);
            1
        }
    }
}

/// The flow's deadline, or its next update or the expiry of one of its retransmission timers if
/// that comes first.
#[inline(always)]
fn first_of(flow: At, now: u64, due: u64) -> u64 {
    let due = updates::no_later(flow, now, due);
    if config::rto_is_on() {
        let expires = rto::rto_next(flow.index(), now);
        if expires < due {
            return expires;
        }
    }
    due
}

/// Moves the flow earlier if another CPU has started a timer while the flow was armed for `due`.
#[inline(always)]
fn settle(flow: At, now: u64, due: u64) {
    let expires = rto::started_meanwhile(flow.hot(), now);
    // A difference that comes from rounding alone does not count.
    if expires < due.saturating_sub(2) {
        wheel_hasten(flow.index(), expires);
    }
}

/// Visits one flow for the stepper: one that has been handed out, or else one of the next slot that
/// comes round no later than `tick`. `round`: the lists with flows that this call has gathered and
/// not yet visited.
#[inline(always)]
pub fn step(wheel: Own, now: u64, tick: u64, micros: u32, round: &mut u32) -> Handled {
    let geometry = config::geometry();
    let Some(waiting) = Lists::at(pending()) else {
        return Handled::Nothing(None);
    };
    if *round == 0 {
        if waiting.are_empty() {
            match wheel.first(geometry) {
                Some(slot) if slot.starts <= tick => {
                    wheel_hand_out(slot.index);
                    wheel.take(geometry, slot);
                }
                next => {
                    wheel.advance(tick);
                    return Handled::Nothing(next);
                }
            }
        }
        *round = wheel_gather();
    }
    let list = lowest(u64::from(*round));
    *round &= round.wrapping_sub(1);
    // A flow is due at the first tick that does not lie before its deadline, whatever caused the
    // visit. So all schemes report it at the same tick.
    let due = tick.wrapping_mul(u64::from(config!(tick)));
    handle(wheel, waiting.get(list), now, due, For::Stepper { micros })
}

/// Hands out whole lists at once, because re-armed flows may return to the same slot.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_hand_out(slot: u32) -> u32 {
    let (Some(from), Some(to)) = (Lists::at(slot), Lists::at(pending())) else {
        return 0;
    };
    for list in 0..LISTS as u32 {
        let first = from.get(list);
        from.set(list, Link::NONE);
        to.set(list, first);
        if let Some(flow) = first.as_flow().and_then(record::with_details) {
            flow.set_prev(Link::list(pending(), list));
        }
    }
    0
}

/// Loads what the timer visits of the first flow of each list read, and what they change of the
/// flow behind it, so that the processor waits for all of it at once. Returns the lists that hold
/// flows.
///
/// A loop that does nothing else: in a visit, the processor would wait for these loads before each
/// atomic operation. The flow now at the front was behind another one in the last round.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn wheel_gather() -> u32 {
    let Some(waiting) = Lists::at(pending()) else {
        return 0;
    };
    let mut round = 0;
    for list in 0..LISTS as u32 {
        if let Some(flow) = waiting.get(list).as_flow().and_then(record::with_details) {
            round |= 1 << list;
            flow.fetch();
        }
    }
    round
}

/// What a timer visit is for.
#[derive(Clone, Copy)]
pub enum For {
    /// The stepper's call, with the time at which it began, in microseconds.
    Stepper {
        /// On the retransmission timers' clock.
        micros: u32,
    },
    /// A packet needs room for its flow.
    Room {
        /// No other flow will be tried after this one.
        last: bool,
        /// The packet's source is over quota, so it may only evict a flow of an over-quota source.
        over_quota: bool,
    },
}

/// Visits the flow at the head of a list. `decided`: the time by which it counts as due, in units.
#[inline(always)]
pub fn handle(wheel: Own, first: Link, now: u64, decided: u64, purpose: For) -> Handled {
    let for_room = !matches!(purpose, For::Stepper { .. });
    let Some(flow) = first.as_flow().and_then(record::with_details) else {
        return Handled::Nothing(None);
    };
    let index = flow.index();
    let word = flow.word();
    if word.is_dead() || !flow.is_ours() {
        // Only this CPU ends the flows of its wheel, and it unlinks them; so this should not
        // happen.
        count(Counter::Orphans);
        unlink(wheel, flow);
        return Handled::Rearmed;
    }
    let (mut reported, mut expires) = (false, rto::IDLE);
    if config::rto_is_on()
        && let For::Stepper { micros } = purpose
    {
        let said = rto::rto_visit(index, now, micros);
        if said == rto::RING_FULL {
            return Handled::RingFull;
        }
        if said & rto::STALLS != 0 {
            rto::rto_stall(index);
        }
        reported = said & rto::REPORTED != 0;
        expires = said & rto::IDLE;
    }
    // The flow may be stalled by now.
    let word = flow.word();
    let seen = word.seen();
    let mut visit = visit(decided, word, flow.timeout(seen), clock::doubt);
    if let For::Room { last, over_quota } = purpose {
        let is_established = seen.is_established(config!(one_way) != 0);
        visit = visit.for_room(is_established, |due| {
            (last || wheel.reaches(clock::tick().from(due)))
                && (!over_quota || quota::quota_is_flow_over(index, now) != 0)
        });
    }
    let visit = visit.no_later(expires);
    let mut due = visit.due;
    let reason = match visit.end {
        Some(reason) => reason,
        None => {
            if config!(active_timeout) != 0 {
                let next = match purpose {
                    For::Stepper { .. } => updates::update_visit(index, now, decided),
                    For::Room { .. } => updates::no_later(flow, now, due),
                };
                if next == updates::RING_FULL {
                    return Handled::RingFull;
                }
                reported |= next & updates::REPORTED != 0;
                due = due.min(next & !updates::REPORTED);
            }
            rearm(wheel, flow, now, due, for_room);
            if config::rto_is_on() && !for_room && due > now + rto::soon() {
                settle(flow, now, due);
            }
            return if reported {
                Handled::Reported
            } else {
                Handled::Rearmed
            };
        }
    };
    let end = if for_room {
        end(flow, word, reason, now)
    } else {
        End::from_raw(wheel_expire(index, word.0, reason as u32, now))
    };
    match end {
        End::Done => {
            // The stepper counts at the end of its call.
            if for_room {
                count(counter_of(reason));
            }
            Handled::Removed
        }
        End::Alive => {
            // Decided anew at the next tick, and not in this step: the step may be late, and what
            // keeps the flow alive may last.
            rearm(wheel, flow, now, now + 1, for_room);
            Handled::Rearmed
        }
        End::RingFull => Handled::RingFull,
    }
}

/// The counter of the flows that visits end for this reason.
#[inline(always)]
pub fn counter_of(reason: Reason) -> Counter {
    match reason {
        Reason::Evicted => Counter::Evicted,
        _ => Counter::Expired,
    }
}

/// Moves a flow to the slot of the time at which it is due.
#[inline(always)]
fn rearm(wheel: Own, flow: At, now: u64, due: u64, for_room: bool) {
    if age(now, flow.created()) > MAX_AGE {
        flow.set_created((now as u32).wrapping_sub(MAX_AGE));
    }
    unlink(wheel, flow);
    let due = if for_room {
        timers::no_later(flow.hot(), now, due)
    } else {
        due
    };
    let slot = wheel.again(clock::tick().from(due));
    push(wheel, flow, slot);
    timers::set_visit(flow.hot(), due);
    if for_room {
        // The stepper may sleep past the new slot: timeouts may have become shorter.
        wake_for(wheel, slot);
    }
}
