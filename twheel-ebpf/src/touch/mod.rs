//! Touch: what every packet does to its flow.
//!
//! A packet stores the time, if it has changed, and does nothing else: it takes no lock, walks no
//! list and moves no timer. What the packet changed of the flow's deadline is found out at the
//! flow's next timer visit.

pub mod apply;
pub mod begin;
pub mod change;
pub mod note;
pub mod touched;

use twheel_common::{
    counter::Counter,
    flow::Word,
    segment::{Segment, tcp},
};

use crate::{
    clock, config,
    count::{count, count_at},
    offload, point,
    policy::Arrival,
    record::Hot,
    table, timers,
    verifier::bit,
};

use self::{
    apply::{Packet, keep},
    begin::begin,
    change::{touch_change, touch_rule},
    note::{note, note_point},
};

pub use self::touched::Touched;

/// Touches the flow of a segment, or begins one. What a packet of a known flow needs is inlined;
/// the rest is in global functions, which the verifier checks once.
#[inline(always)]
pub fn touch(segment: &Segment, now: u64, arrival: Arrival) -> Touched {
    let at = table::place(&segment.key);
    table::expect_account(at);
    timers::expect(at.home);
    if segment.flags & tcp::SYN != 0 {
        table::expect_details();
    }
    if let Some(flow) = table::find(at, &segment.key) {
        let before = flow.positions();
        let word = flow.word();
        if config!(watched) != 0 && is_seen_again(flow, word, segment, now, arrival) {
            count(Counter::SeenAgain);
            return Touched::Known;
        }
        if update(flow, word, segment, now, arrival) {
            note(flow, segment, before, now);
            let counter = match arrival.is_forwarded {
                false => Counter::Touched,
                true => Counter::SeenAgain,
            };
            match config!(watched) {
                0 => count(counter),
                _ => count_at(arrival.sight.point().interface(), counter),
            }
            return Touched::Known;
        }
    }
    begin(segment, at, now, arrival)
}

/// Whether the packet was counted before, at another interface on its way. Then it only keeps the
/// flow alive. Checked only where it makes a difference: for packets that may change a state, and
/// where packets are counted.
#[inline(always)]
fn is_seen_again(flow: Hot, word: Word, segment: &Segment, now: u64, arrival: Arrival) -> bool {
    let is_kept = word.seen().is_kept_by(segment.direction, segment.flags);
    let is_counted = config!(accounting) != 0 || config::rto_is_on();
    if is_kept && !is_counted {
        return false;
    }
    let mut flags = 0;
    if is_kept {
        flags |= point::NOTES;
    }
    if arrival.sight.may_be_known() {
        flags |= point::MAY_BE_KNOWN;
    }
    if point::point_see(
        flow.index(),
        segment,
        now,
        arrival.sight.point().0.into(),
        flags,
    ) == 0
    {
        return false;
    }
    if word.is_older_than(now) {
        offload::touch_again(flow, word, now);
        clock::see(now);
    }
    true
}

/// Notes what a packet says of the flow in its record. Returns whether the flow is the packet's.
#[inline(always)]
fn update(flow: Hot, word: Word, segment: &Segment, now: u64, arrival: Arrival) -> bool {
    if !word.seen().is_kept_by(segment.direction, segment.flags) {
        let changed = touch_change(flow.index(), segment, now, arrival.way.0);
        note_point(flow, segment, now, arrival, changed);
        let (hook, interface) = (arrival.hook as u64, arrival.interface.into());
        return bit(touch_rule(flow.index(), segment, changed, interface, hook)) == 0;
    }
    let way = arrival.way;
    keep(flow, word, Packet { segment, now, way });
    true
}
