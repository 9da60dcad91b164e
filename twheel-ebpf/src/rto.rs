//! Retransmission timers: `twheel_common::rto` over a map, and on the wheel on which the flow stands.

use aya_ebpf::bindings::BPF_RB_NO_WAKEUP;
use twheel_common::{
    counter::Counter,
    event::Pace,
    flow::{Direction, FlowKey, Word},
    numbers::{self, Positions},
    packet::Segment,
    rto::{Limits, Rare, Side, Timer, Timers},
    state::Seen,
};

use crate::{
    atomic, clock, config,
    count::count,
    emit, inbox,
    maps::RTOS,
    table::{self, At, Hot},
    verifier::{bit, given},
    wheel,
};

/// Whether there are timers.
#[inline(always)]
pub fn is_on() -> bool {
    config!(rto.on) != 0
}

#[inline(always)]
fn limits() -> Limits {
    Limits {
        min: config!(rto.min),
        max: config!(rto.max),
    }
}

#[inline(always)]
fn timers(flow: Hot) -> Option<*mut Timers> {
    if !is_on() {
        return None;
    }
    RTOS.get_ptr_mut(flow.index())
}

/// Begins to load the timers of the record of this index, in which a flow is looked for: memory then has them when they
/// are asked for.
#[inline(always)]
pub fn expect(index: u32) {
    if is_on()
        && let Some(timers) = RTOS.get_ptr(index)
    {
        let timers: *const Timers = timers;
        // SAFETY: a value of the map; what it says is not asked.
        unsafe { (&raw const (*timers).visit).read_volatile() };
    }
}

/// The side that sends in this direction.
#[inline(always)]
fn side(timers: *mut Timers, direction: u64) -> *mut Side {
    // SAFETY: a value has two.
    unsafe {
        (&raw mut (*timers).sides)
            .cast::<Side>()
            .add(bit(direction) as usize)
    }
}

/// The rest of it.
#[inline(always)]
fn rare(timers: *mut Timers, direction: u64) -> *mut Rare {
    // SAFETY: as above.
    unsafe {
        (&raw mut (*timers).rare)
            .cast::<Rare>()
            .add(bit(direction) as usize)
    }
}

/// One of two.
#[inline(always)]
fn of([low, high]: Positions, direction: u64) -> u32 {
    let both = u64::from(low) | u64::from(high) << 32;
    (both >> (32 * bit(direction))) as u32
}

/// A time from now on (microseconds), in units, rounded up; one more, since the present one is nearly over, or
/// just begun.
#[inline(always)]
fn units(micros: u32) -> u64 {
    let unit = config!(rto.unit);
    u64::from(micros.checked_div(unit).unwrap_or(micros)) + 2
}

/// Of a flow that begins: nothing is known.
#[inline(always)]
pub fn forget(flow: Hot) {
    let Some(timers) = timers(flow) else { return };
    let words = side(timers, 0).cast::<u64>();
    for word in 0..size_of::<[Side; 2]>() / 8 {
        // SAFETY: within the value. Volatile, or the compiler makes it a call.
        unsafe { words.add(word).write_volatile(0) };
    }
}

/// Orders what was written before it before what is read after it. Who starts a timer writes it and then looks when the
/// flow is visited; who visits writes when that is next and then looks at the timers again: one of the two sees the other.
#[inline(always)]
fn fence(timers: *mut Timers) {
    // SAFETY: a place in a map, aligned to 4, that is for nothing else.
    unsafe { atomic::or(&raw mut (*timers).reserved, 0) };
}

/// No longer than this is a timer overlooked, units: two of the shortest.
#[inline(always)]
pub fn soon() -> u64 {
    units(config!(rto.min)) * 2
}

/// When a timer expires that was started while the flow was armed for later; [`IDLE`] if none was.
#[inline(always)]
pub fn started_meanwhile(flow: Hot, now: u64) -> u64 {
    let Some(timers) = timers(flow) else {
        return IDLE;
    };
    fence(timers);
    rto_next(flow.index(), now)
}

/// When the wheel visits the flow next.
#[inline(always)]
pub fn set_visit(flow: Hot, due: u64) {
    if let Some(timers) = timers(flow) {
        // SAFETY: a value of the map.
        unsafe { (&raw mut (*timers).visit).write_volatile(due as u32) };
    }
}

/// A deadline, or when the wheel meant to visit the flow, whichever comes first: that is no later than a timer expires.
#[inline(always)]
pub fn no_later(flow: Hot, now: u64, due: u64) -> u64 {
    let Some(timers) = timers(flow) else {
        return due;
    };
    // SAFETY: a value of the map.
    let visit = unsafe { (&raw const (*timers).visit).read_volatile() };
    let wait = visit.wrapping_sub(now as u32);
    if wait as i32 > 0 && now + u64::from(wait) < due {
        now + u64::from(wait)
    } else {
        due
    }
}

/// Writes what there is to report of one of a flow's sides.
///
/// # Safety
///
/// `place` is valid for writes, and nobody else's.
#[inline(always)]
pub unsafe fn report(flow: Hot, direction: u64, place: *mut Pace) {
    let pace = match timers(flow) {
        // SAFETY: a value of the map; what is torn is an estimate.
        Some(timers) => unsafe { (*side(timers, direction)).pace(limits()) },
        None => Pace::default(),
    };
    // SAFETY: the caller's promise.
    unsafe {
        (&raw mut (*place).srtt).write_volatile(pace.srtt);
        (&raw mut (*place).rto).write_volatile(pace.rto);
        (&raw mut (*place).retransmissions).write_volatile(pace.retransmissions);
    }
}

/// What [`rto_see`] says where a timer has started, and the flow is visited in time.
pub const STARTED: u64 = 1;

/// Beside that: the flow was stalled, and [goes on](rto_go_on).
pub const GOES_ON: u64 = 1 << 63;

/// A packet of the flow; `before` is how far its sides had come, the low one in the low half. 0; or [`STARTED`] where a
/// timer has started or expired; or when the flow is to be [visited](rto_hasten) for that, where the wheel means to later.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn rto_see(index: u32, segment: *const Segment, before: u64, now: u64) -> u64 {
    let (Some(flow), Some(segment)) = (table::hot(index), given(segment)) else {
        return 0;
    };
    let Some(timers) = timers(flow) else { return 0 };
    let before = [before as u32, (before >> 32) as u32];
    let direction = bit(segment.direction as u64);
    // SAFETY: values of the map, and no two the same. Other CPUs write there: see the module in `twheel-common`.
    let (sender, rest, other, others) = unsafe {
        (
            &mut *side(timers, direction),
            &mut *rare(timers, direction),
            &mut *side(timers, direction ^ 1),
            &*rare(timers, direction ^ 1),
        )
    };
    let highest = sender.highest(rest, of(before, direction));
    let is_gap = segment.seq.wrapping_sub(highest) as i32 > 0;
    let changed = (!is_gap || numbers::may_skip(before, segment))
        && sender.sent(rest, highest, segment, limits(), clock::micros);
    let sent = other.highest(others, of(before, direction ^ 1));
    let advanced = other.acknowledged(others, sent, segment, clock::micros);
    if !changed && !advanced {
        return 0;
    }
    let word = flow.word();
    // Somebody is there.
    let goes_on = if advanced && word.seen().is_stalled() {
        GOES_ON
    } else {
        0
    };
    let changed = changed && has_timers(word);
    if changed {
        let highest = sender.highest(rest, of(flow.positions(), direction));
        let due = match sender.timer(highest, limits(), clock::micros()) {
            Timer::Stopped => return goes_on,
            Timer::Runs(left) => now + units(left),
            Timer::Expired => now,
        };
        fence(timers);
        // SAFETY: as above.
        let visit = unsafe { (&raw const (*timers).visit).read_volatile() };
        if visit.wrapping_sub(due as u32) as i32 > 0 {
            return due.max(STARTED + 1) | goes_on;
        }
        return STARTED | goes_on;
    }
    goes_on
}

/// Notes that a flow is not stalled any more.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn rto_go_on(index: u32, segment: *const Segment) -> u64 {
    if let (Some(flow), Some(segment)) = (table::hot(index), given(segment)) {
        mark(flow, &segment.key, |seen| seen.stalled(false));
    }
    0
}

/// Whether the timers of a flow say anything: both sides are seen, and past the handshake.
#[inline(always)]
fn has_timers(word: Word) -> bool {
    word.seen().is_synchronized() && word.seen().is_replied()
}

/// Changes what was seen of a flow, whatever stamps come at the same time. What it was and what it is, if that could be
/// done.
#[inline(always)]
fn mark(flow: Hot, key: &FlowKey, change: impl Fn(Seen) -> Seen) -> Option<(Seen, Seen)> {
    let mut marked = None;
    table::repeat(4, |_| {
        let word = flow.word();
        if word.is_dead() {
            return true;
        }
        let seen = change(word.seen());
        match flow.change(key, word, word.with_seen(seen)) {
            Some(Ok(changed)) => {
                marked = Some((word.seen(), changed.seen()));
                true
            }
            Some(Err(_)) => false,
            None => true,
        }
    });
    marked
}

/// Has the flow visited earlier than the wheel means to.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn rto_hasten(index: u32, segment: *const Segment, due: u64) -> u64 {
    if let (Some(flow), Some(segment)) = (table::at(index), given(segment)) {
        come_forward(flow, segment, due);
    }
    0
}

#[inline(always)]
fn come_forward(flow: At, segment: &Segment, due: u64) {
    if flow.is_ours() {
        wheel::wheel_hasten(flow.index(), due);
        return;
    }
    match mark(flow.hot(), &segment.key, Seen::posted) {
        Some((before, _)) if before.is_posted() => inbox::hurry(flow, due),
        Some((_, after)) if after.is_posted() => inbox::post(flow, due),
        // A flow that is just being entered is not posted: the next timer that starts tries again.
        _ => return count(Counter::Raced),
    }
    // So that the next packet does not do it again.
    set_visit(flow.hot(), due);
}

/// The timers of a flow that has any, and how far its sides have come.
#[inline(always)]
fn running(index: u32) -> Option<(*mut Timers, Positions)> {
    if !is_on() {
        return None;
    }
    let flow = table::hot(index)?;
    let timers = timers(flow)?;
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
        // SAFETY: as in `rto_see`.
        let (side, rare) = unsafe { (&*side(timers, direction), &*rare(timers, direction)) };
        let highest = side.highest(rare, of(positions, direction));
        let at = match side.timer(highest, limits(), micros) {
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

/// No timer runs.
pub const IDLE: u64 = STALLS - 1;
/// Beside when the next timer expires: one has.
pub const REPORTED: u64 = 1 << 63;
/// And so many in a row that the flow is to be noted as stalled.
pub const STALLS: u64 = 1 << 62;
/// What [`rto_visit`] says if there is no room in the ring.
pub const RING_FULL: u64 = u64::MAX - 1;

/// Looks at the timers of a flow: reports those that have expired, and starts them anew. Says when the next expires
/// (units), or [`IDLE`], with [`REPORTED`] if one has, and [`STALLS`] if so many have; or [`RING_FULL`]. For the stepper alone.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn rto_visit(index: u32, now: u64, micros: u32) -> u64 {
    let (Some(flow), Some((timers, positions))) = (table::at(index), running(index)) else {
        return IDLE;
    };
    let (mut due, mut said, mut expiries) = (IDLE, 0, 0);
    for direction in 0..2 {
        // SAFETY: as in `rto_see`.
        let (side, rare) = unsafe { (&mut *side(timers, direction), &*rare(timers, direction)) };
        let highest = side.highest(rare, of(positions, direction));
        let left = match side.timer(highest, limits(), micros) {
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
                match side.timer(highest, limits(), micros) {
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
    if let Some(flow) = table::at(index)
        && mark(flow.hot(), &flow.key(), |seen| seen.stalled(true)).is_some()
    {
        count(Counter::Stalled);
    }
    0
}

/// Says whether there was room for it.
#[inline(always)]
fn report_expiry(flow: At, direction: u64, side: &Side, highest: u32, now: u64) -> bool {
    let Some(mut entry) = emit::reserve_rto() else {
        return false;
    };
    let event = entry.as_mut_ptr();
    // SAFETY: the ring gave room for it, to nobody else; every field is set.
    unsafe {
        flow.key().store(&raw mut (*event).key);
        (&raw mut (*event).at).write(now);
        (&raw mut (*event).direction).write(if direction == 0 {
            Direction::FromLow as u16
        } else {
            Direction::FromHigh as u16
        });
        (&raw mut (*event).is_outgoing).write(flow.is_outgoing().into());
        (&raw mut (*event).seen).write(flow.word().seen().0);
        (&raw mut (*event).rule).write(flow.rule());
        (&raw mut (*event).point).write(emit::initiator(flow, flow.word().seen()));
        (&raw mut (*event).outstanding).write(side.outstanding(highest));
        (&raw mut (*event).expiries).write(side.expiries() + 1);
        report(flow.hot(), direction, &raw mut (*event).pace);
    }
    entry.submit(u64::from(BPF_RB_NO_WAKEUP));
    count(Counter::RtoExpired);
    true
}
