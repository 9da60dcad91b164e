//! Retransmission timers, updated by packets and visits: `twheel_common::rto` on a map. The
//! functions return when a flow must be visited for one of its timers; they do not move the flow on
//! the wheel themselves.

use aya_ebpf::bindings::BPF_RB_NO_WAKEUP;
use twheel_common::{
    counter::Counter,
    event::Birth,
    flow::Word,
    flow::age,
    key::Direction,
    numbers::{self, Positions},
    rto::{Side, Timer, Timing},
    segment::Segment,
};

use crate::{
    clock, config,
    count::count,
    emit,
    record::{self, At, Hot},
    table,
    timers::{self, Timers},
    verifier::{bit, given},
};

/// The number of one side.
#[inline(always)]
fn next_of([low, high]: Positions, direction: u64) -> u32 {
    let both = u64::from(low) | u64::from(high) << 32;
    (both >> (32 * bit(direction))) as u32
}

/// A time span from now on (microseconds) in units, rounded up; one unit more, because the present
/// one may be nearly over or just begun.
#[inline(always)]
fn units(micros: u32) -> u64 {
    let unit = config!(rto.unit);
    u64::from(micros.checked_div(unit).unwrap_or(micros)) + 2
}

/// The longest time that a started timer may be overlooked, in units: two of the shortest timers.
#[inline(always)]
pub fn soon() -> u64 {
    units(config!(rto.min)) * 2
}

/// When a timer expires that was started while the flow was armed for a later time; [`IDLE`] if
/// none was.
#[inline(always)]
pub fn started_meanwhile(flow: Hot, now: u64) -> u64 {
    let Some(timers) = Timers::at(flow) else {
        return IDLE;
    };
    timers.fence();
    rto_next(flow.index(), now)
}

/// Result of [`rto_see`]: a timer has started, and the flow is visited in time for it.
pub const STARTED: u64 = 1;

/// Flag beside the result of [`rto_see`]: the flow was stalled, and [goes on](rto_go_on).
pub const GOES_ON: u64 = 1 << 63;

/// Handles a packet of the flow. `before`: the next sequence numbers of both sides before the
/// packet, the low side's in the low half. Returns 0; or [`STARTED`] if a timer has started or
/// expired; or, if the wheel would visit the flow too late for that timer, the time at which the
/// flow must be [visited](crate::forward). [`GOES_ON`] may stand beside each.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn rto_see(index: u32, segment: *const Segment, before: u64, now: u64) -> u64 {
    let (Some(flow), Some(segment)) = (record::hot(index), given(segment)) else {
        return 0;
    };
    let Some(timers) = Timers::at(flow) else {
        return 0;
    };
    let before = [before as u32, (before >> 32) as u32];
    let direction = bit(segment.direction as u64);
    let (sender, rest) = (timers.side(direction), timers.rare(direction));
    let (other, others) = (timers.side(direction ^ 1), timers.rare(direction ^ 1));
    let highest = sender.highest(rest, next_of(before, direction));
    let timing = Timing {
        limits: config::limits(),
        now: clock::micros,
    };
    let is_gap = segment.seq.wrapping_sub(highest) as i32 > 0;
    let changed = (!is_gap || numbers::may_skip(before, segment))
        && sender.sent(rest, highest, segment, timing);
    let sent = other.highest(others, next_of(before, direction ^ 1));
    let advanced = other.acknowledged(others, sent, segment, clock::micros);
    if !changed && !advanced {
        return 0;
    }
    let word = flow.word();
    // An acknowledgment shows that the other side is there.
    let goes_on = if advanced && word.seen().is_stalled() {
        GOES_ON
    } else {
        0
    };
    let changed = changed && has_timers(word);
    if changed {
        let highest = sender.highest(rest, next_of(flow.positions(), direction));
        let due = match sender.timer(highest, config::limits(), clock::micros()) {
            Timer::Stopped => return goes_on,
            Timer::Runs(left) => now + units(left),
            Timer::Expired => now,
        };
        timers.fence();
        if timers.visit().wrapping_sub(due as u32) as i32 > 0 {
            return due.max(STARTED + 1) | goes_on;
        }
        return STARTED | goes_on;
    }
    goes_on
}

/// Notes that a flow is no longer stalled.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn rto_go_on(index: u32, segment: *const Segment) -> u64 {
    if let (Some(flow), Some(segment)) = (record::hot(index), given(segment)) {
        table::mark(flow, &segment.key, |seen| seen.stalled(false));
    }
    0
}

/// Whether the flow's timers are meaningful: both sides were seen, and the handshake is complete.
#[inline(always)]
fn has_timers(word: Word) -> bool {
    word.seen().is_synchronized() && word.seen().is_replied()
}

/// The timers of a flow that has any, and its sides' next sequence numbers.
#[inline(always)]
fn running(index: u32) -> Option<(Timers, Positions)> {
    if !config::rto_is_on() {
        return None;
    }
    let flow = record::hot(index)?;
    let timers = Timers::at(flow)?;
    has_timers(flow.word()).then(|| (timers, flow.positions()))
}

/// When the first timer of a flow expires (units), at the earliest now; [`IDLE`] if none runs.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn rto_next(index: u32, now: u64) -> u64 {
    let Some((timers, positions)) = running(index) else {
        return IDLE;
    };
    let micros = clock::micros();
    let mut due = IDLE;
    for direction in 0..2 {
        let (side, rare) = (timers.side(direction), timers.rare(direction));
        let highest = side.highest(rare, next_of(positions, direction));
        let at = match side.timer(highest, config::limits(), micros) {
            Timer::Stopped => continue,
            Timer::Runs(left) => now + units(left),
            Timer::Expired => now,
        };
        if at < due {
            due = at;
        }
    }
    due
}

/// Time of the next expiry: no timer runs.
pub const IDLE: u64 = STALLS - 1;
/// Flag beside the time of the next expiry: a timer has expired.
pub const REPORTED: u64 = 1 << 63;
/// Flag beside the time of the next expiry: so many timers in a row have expired that the flow is
/// to be noted as stalled.
pub const STALLS: u64 = 1 << 62;
/// Result of [`rto_visit`]: the ring has no room.
pub const RING_FULL: u64 = u64::MAX - 1;

/// Checks the timers of a flow: reports those that have expired, and starts them anew. Returns when
/// the next one expires (units), or [`IDLE`]; with [`REPORTED`] if one has expired, and [`STALLS`]
/// if enough have expired in a row. Returns [`RING_FULL`] if an expiry could not be reported. Only
/// for the stepper.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn rto_visit(index: u32, now: u64, micros: u32) -> u64 {
    let (Some(flow), Some((timers, positions))) = (record::at(index), running(index)) else {
        return IDLE;
    };
    let (mut due, mut said, mut expiries) = (IDLE, 0, 0);
    for direction in 0..2 {
        let (side, rare) = (timers.side(direction), timers.rare(direction));
        let highest = side.highest(rare, next_of(positions, direction));
        let left = match side.timer(highest, config::limits(), micros) {
            Timer::Stopped => continue,
            Timer::Runs(left) => left,
            Timer::Expired => {
                if !report_expiry(flow, direction, side, highest, now) {
                    return RING_FULL;
                }
                said = REPORTED;
                side.back_off(rare, micros);
                if side.expiries() > expiries {
                    expiries = side.expiries();
                }
                match side.timer(highest, config::limits(), micros) {
                    Timer::Runs(left) => left,
                    _ => 0,
                }
            }
        };
        let at = now + units(left);
        if at < due {
            due = at;
        }
    }
    if expiries >= config!(rto.max_retrans) && !flow.word().seen().is_stalled() {
        said |= STALLS;
    }
    due | said
}

/// Notes that a flow is stalled.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn rto_stall(index: u32) -> u64 {
    if let Some(flow) = record::at(index)
        && table::mark(flow.hot(), &flow.key(), |seen| seen.stalled(true)).is_some()
    {
        count(Counter::Stalled);
    }
    0
}

/// Reports an expired timer. Returns whether the ring had room for it.
#[inline(always)]
fn report_expiry(flow: At, direction: u64, side: &Side, highest: u32, now: u64) -> bool {
    let Some(mut entry) = emit::reserve_rto() else {
        return false;
    };
    let event = entry.as_mut_ptr();
    // SAFETY: the ring gave this memory to this code alone; every field is set.
    unsafe {
        flow.key().store(&raw mut (*event).key);
        let word = flow.word();
        (&raw mut (*event).number).write(emit::next_number());
        (&raw mut (*event).at).write(now);
        (&raw mut (*event).age).write(age(now, flow.created()));
        (&raw mut (*event).reserved).write(0);
        (&raw mut (*event).direction).write(if direction == 0 {
            Direction::FromLow as u16
        } else {
            Direction::FromHigh as u16
        });
        (&raw mut (*event).birth).write(Birth::new(flow.is_outgoing(), word));
        (&raw mut (*event).seen).write(word.seen().0);
        (&raw mut (*event).rule).write(flow.rule());
        (&raw mut (*event).point).write(flow.initiator_point(word.seen()));
        (&raw mut (*event).outstanding).write(side.outstanding(highest));
        (&raw mut (*event).expiries).write(side.expiries() + 1);
        timers::report(flow.hot(), direction, &raw mut (*event).pace);
    }
    entry.submit(u64::from(BPF_RB_NO_WAKEUP));
    count(Counter::RtoExpired);
    true
}
