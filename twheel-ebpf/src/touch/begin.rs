//! A packet of no known flow: enters its flow, and evicts another if the table is full.

use twheel_common::{
    counter::Counter, point::Point, policy::Hook, record::RULES, seen::Seen, segment::Segment,
    way::SideWay,
};

use crate::{
    clock, config,
    count::count,
    emit, enforce, offload,
    policy::{self, Arrival},
    record, table, updates,
    verifier::given,
    wheel::{arm, room},
};

use super::{
    apply::TAKEN,
    change,
    note::{note, note_point},
    touched::Touched,
};

/// Handles a segment of no known flow: enters its flow, and evicts another if the table is full.
///
/// The steps are called one after the other from here, and none from within another: the verifier
/// adds up the stacks of callers and callees.
#[inline(always)]
pub fn begin(segment: &Segment, at: table::Place, now: u64, arrival: Arrival) -> Touched {
    if !config!(enforce).is_on() && !Seen::is_first(segment.flags, config::view()) {
        count(Counter::NoFlow);
        return Touched::NoFlow;
    }
    let hook = arrival.hook as u32;
    let interface = u64::from(arrival.way.0) << 32 | u64::from(arrival.interface);
    let mut begun = 0;
    for _ in 0..3 {
        begun = touch_unknown(segment, now, interface, hook);
        if Touched::from_raw(begun >> 32) == Touched::Created {
            let (seen, mut rule) = admitted(begun);
            if let Hook::Egress = arrival.hook {
                rule |= table::OUTGOING_RULE as u32;
            }
            let begins = Beginning {
                seen,
                rule,
                way: SideWay::new(arrival.way, segment.direction),
                idle: 0,
            };
            begun = start(segment, at, now, begins);
        }
        let room = match Touched::from_raw(begun >> 32) {
            Touched::TableFull => room::wheel_find_room(segment, now),
            Touched::WindowFull => room::wheel_make_room_at(at.home, now),
            _ => 0,
        };
        if room == 0 {
            break;
        }
    }
    let touched = Touched::from_raw(begun >> 32);
    match touched {
        Touched::TableFull => count(Counter::TableFull),
        Touched::WindowFull => count(Counter::WindowFull),
        Touched::Created => {
            if let Some(flow) = record::hot(begun as u32) {
                note_point(flow, segment, now, arrival, TAKEN);
                let before = flow.positions();
                note(flow, segment, before, now);
            }
            if config!(begins) != 0 {
                emit::begun(begun as u32, now);
            }
        }
        // Another CPU has entered the flow meanwhile.
        Touched::Known => {
            if let Some(flow) = record::hot(begun as u32) {
                let before = flow.positions();
                // Another CPU has just entered it, so the segment is a later packet of the flow.
                let changed = change::touch_change(flow.index(), segment, now, arrival.way.0);
                note_point(flow, segment, now, arrival, changed);
                note(flow, segment, before, now);
            }
            count(Counter::Touched);
        }
        _ => {}
    }
    touched
}

/// Decides on a segment of no flow in the table. `interface_way`: the interface that it was seen
/// on, and in the high half the way by which it came. Returns [`Touched`] in the high half. If that
/// is [`Touched::Created`], the flow is counted in, and the low half holds its initial state and
/// rule: [`admitted`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_unknown(
    segment: *const Segment,
    now: u64,
    interface_way: u64,
    hook: u32,
) -> u64 {
    let Some(segment) = given(segment) else {
        return (Touched::NoFlow as u64) << 32;
    };
    if config!(enforce).is_on() {
        match enforce::enforce_of_none(segment, now, hook) {
            enforce::PASS => {}
            enforce::ANSWER => return (Touched::Answered as u64) << 32,
            _ => return (Touched::Refused as u64) << 32,
        }
    }
    let Some(seen) = Seen::first(segment.direction, segment.flags, config::view()) else {
        count(Counter::NoFlow);
        return (Touched::NoFlow as u64) << 32;
    };
    if !table::has_room() {
        return (Touched::TableFull as u64) << 32;
    }
    let rule = policy::policy_rule(segment, seen.0, interface_way as u32, hook);
    let low = (rule & RULES) << SEEN_BITS | seen.0 & SEEN;
    (Touched::Created as u64) << 32 | u64::from(low)
}

/// State bits, in what [`touch_unknown`] returns; the rule stands above them.
const SEEN_BITS: u32 = 20;
const SEEN: u32 = (1 << SEEN_BITS) - 1;

/// The state bits and the rule of the flow that [`touch_unknown`] has counted in.
#[inline(always)]
fn admitted(unknown: u64) -> (Seen, u32) {
    let low = unknown as u32;
    (Seen(low & SEEN), low >> SEEN_BITS & RULES)
}

/// What a flow begins with.
#[derive(Clone, Copy)]
struct Beginning {
    /// Its state bits.
    seen: Seen,
    /// The rule that matches it, perhaps with [`table::OUTGOING_RULE`].
    rule: u32,
    /// The way by which one of its sides sends.
    way: SideWay,
    /// For how long it has been idle, in units.
    idle: u32,
}

/// Enters a flow that was counted in, and starts its timer. Returns what [`touch_started`] does.
#[inline(always)]
fn start(segment: &Segment, place: table::Place, now: u64, begins: Beginning) -> u64 {
    let since = now - u64::from(begins.idle);
    let rule_way = u64::from(begins.way.0) << 32 | u64::from(begins.rule);
    clock::see(now);
    let entered = table::enter(segment, place, since, begins.seen, rule_way);
    touch_started(entered, now, since)
}

/// Starts the timer of a flow that [`table::enter`] has entered; if it has not, counts the flow
/// out. Returns [`Touched`] in the high half, and the index of the flow in the low half.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_started(entered: u64, now: u64, since: u64) -> u64 {
    let Some(flow) = table::entered(entered) else {
        table::uncount(1);
        return (Touched::WindowFull as u64) << 32;
    };
    if !table::is_new(entered) {
        table::uncount(1);
        return (Touched::Known as u64) << 32 | u64::from(flow.index());
    }
    let timeout = flow.timeout(flow.word().seen());
    let due = updates::first(now, since + u64::from(timeout));
    arm::wheel_start(flow.index(), now, due);
    count(Counter::Created);
    (Touched::Created as u64) << 32 | u64::from(flow.index())
}

/// Enters a flow that userspace knows and no packet has begun, with these state bits and idle for
/// so long (units). `rule_origin`: its rule, and in the high half
/// [`Enter::origin`](twheel_common::step::Enter::origin). Of the segment only the key is used.
/// Returns [`Touched`].
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn touch_enter(
    segment: *const Segment,
    now: u64,
    seen: u32,
    rule_origin: u64,
    idle: u32,
) -> u64 {
    let Some(segment) = given(segment) else {
        return Touched::NoFlow as u64;
    };
    if !table::has_room() {
        return Touched::TableFull as u64;
    }
    let place = table::place(&segment.key);
    let (seen, origin) = (Seen(seen), (rule_origin >> 32) as u32);
    let outgoing = (origin >> 16 & 1) * table::OUTGOING_RULE as u32;
    let begins = Beginning {
        seen,
        rule: rule_origin as u32 & RULES | outgoing,
        way: SideWay::ANY,
        idle: offload::entered(now, idle),
    };
    let begun = start(segment, place, now, begins);
    if Touched::from_raw(begun >> 32) == Touched::Created {
        if config!(watched) != 0
            && let Some(flow) = record::at(begun as u32)
        {
            flow.set_point(seen.initiator(), Point(origin as u16), now);
        }
        if config!(begins) != 0 {
            emit::begun(begun as u32, now);
        }
    }
    begun >> 32
}
