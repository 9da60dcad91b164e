//! Flows whose programs have handed over their timeouts: `twheel_common::offload` on a map.

use twheel_common::{
    flow::Word,
    key::Direction,
    numbers::{advance, is_next},
    offload::{
        Heard, MARKS, OFFLOADED, Offload, UNSEEN, counts, counts_data, is_of_data, later, of_data,
        of_other, replace,
    },
    seen::Seen,
    segment::Segment,
};

use crate::{
    atomic, config,
    maps::OFFLOADS,
    record::{self, Hot},
    rule,
    verifier::given,
};

/// Lets it be known that a side of a flow has sent data, if that counts as life of it. The time of
/// the packet, `now`, was stored before.
#[inline(always)]
pub fn hear(flow: Hot, direction: Direction, now: u64) {
    if config!(offload) != 0 && counts(flow.marks(), direction) {
        let word = flow.word();
        if !is_of_data(word.stamp()) || word.is_older_than(now) {
            flow.touch(of_data(now));
        }
    }
}

/// Notes a packet at `now` that changes no state. `word`: the flow's, whose stamp is older.
#[inline(always)]
pub fn touch(flow: Hot, word: Word, segment: &Segment, now: u64) {
    let marks = marks(flow);
    if !counts_data(marks) {
        return flow.touch(now);
    }
    // Nearly every packet with data. The code of every packet is kept short, hence no more is asked.
    let is_heard = counts(marks, segment.direction)
        && !word.seen().is_told_by(segment.direction, config::view())
        && is_next(flow.positions(), segment);
    match is_heard {
        true => flow.touch(of_data(now)),
        false => drop(offload_touch(flow.index(), segment, now, word.0)),
    }
}

/// Likewise, of a flow of which data counts, if the packet has not just the data that is next.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn offload_touch(index: u32, segment: *const Segment, now: u64, word: u64) -> u64 {
    let (Some(flow), Some(segment)) = (record::hot(index), given(segment)) else {
        return 0;
    };
    let (word, direction) = (Word(word), segment.direction);
    // Otherwise data that counts is heard later.
    let is_heard = counts(flow.marks(), direction)
        && !word.seen().is_told_by(direction, config::view())
        && advance(flow.positions(), word.seen(), segment).is_some();
    match is_heard {
        true => flow.touch(of_data(now)),
        false => replace(&flow, word.stamp(), now),
    }
    0
}

/// The same of a packet that was seen before, at another interface.
#[inline(always)]
pub fn touch_again(flow: Hot, word: Word, now: u64) {
    match counts_data(marks(flow)) {
        false => flow.touch(now),
        true => drop(offload_replace(flow.index(), word.stamp(), now)),
    }
}

/// For how long a flow that is entered at `now` has been idle, so that its stamp is not of data: a unit
/// more or less.
#[inline(always)]
pub fn entered(now: u64, idle: u32) -> u32 {
    match config!(offload) {
        0 => idle,
        _ => idle ^ ((now as u32 ^ idle) & 1),
    }
}

/// Keeps the time of the latest data: the word that a flow has is perhaps exchanged.
#[inline(always)]
pub fn keep(flow: Hot, word: Word) {
    if counts_data(marks(flow)) && is_of_data(word.stamp()) {
        offload_raise(flow.index(), word.stamp());
    }
}

/// The word that a flow gets with a new state, instead of `after`. If what is new is data, that is
/// [heard](hear) later.
#[inline(always)]
pub fn replaced(flow: Hot, before: Word, after: Word) -> Word {
    if !counts_data(marks(flow)) || before.stamp() == after.stamp() {
        return after;
    }
    let stamp = of_other(after.stamp().into());
    Word::new(stamp, after.generation(), after.seen())
}

#[inline(always)]
fn marks(flow: Hot) -> u32 {
    match config!(offload) {
        0 => 0,
        _ => flow.marks(),
    }
}

/// [`offload_stay`], if timeouts are handed over at all.
#[inline(always)]
pub fn stay(index: u32) -> u32 {
    match config!(offload) {
        0 => 0,
        _ => offload_stay(index) as u32,
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn offload_replace(index: u32, held: u32, now: u64) -> u64 {
    if let Some(flow) = record::hot(index) {
        replace(&flow, held, now);
    }
    0
}

/// Most attempts to raise a time: others raise it, too, and each at most once a unit.
const ATTEMPTS: u32 = 8;

impl Heard for Hot {
    #[inline(always)]
    fn raise(&self, to: u32) {
        offload_raise(self.index(), to);
    }

    #[inline(always)]
    fn exchange(&self, held: u32, stamp: u32) {
        // SAFETY: the record's line; the other half of the word stays.
        unsafe { atomic::compare_exchange_32(self.stamp_place(), held, stamp) };
    }
}

impl Hot {
    /// Its [`MARKS`].
    #[inline(always)]
    pub fn marks(self) -> u32 {
        // SAFETY: the record's line. Volatile, because others change it.
        unsafe { self.details_place().read_volatile() & MARKS }
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn offload_raise(index: u32, to: u32) -> u64 {
    let Some(offload) = record::hot(index).and_then(|flow| OFFLOADS.get_ptr_mut(flow.details()))
    else {
        return 0;
    };
    // SAFETY: a value of the map.
    let place = unsafe { &raw mut (*offload).heard };
    // SAFETY: as above. Volatile, because others store there.
    let mut held = unsafe { place.read_volatile() };
    for _ in 0..ATTEMPTS {
        if later(held, to) != to {
            break;
        }
        // SAFETY: as above.
        let found = unsafe { atomic::compare_exchange_32(place, held, to) };
        if found == held {
            break;
        }
        held = found;
    }
    0
}

/// For how long a flow with these state bits may be idle (units): by its rule, and by the timeout that
/// was handed over.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn offload_timeout(index: u32, seen: u32) -> u64 {
    let (Some(flow), seen) = (record::at(index), Seen(seen)) else {
        return 0;
    };
    longer(flow.rule(), seen, offload_stay(index) as u32).into()
}

/// The timeout of a rule, or `stay`, if that is longer. A flow that is about to end has no other
/// timeout than its rule's.
#[inline(always)]
pub fn longer(rule: u16, seen: Seen, stay: u32) -> u32 {
    let timeout = rule::timeout(rule, seen);
    match config!(offload) != 0 && seen.is_established(config!(one_way) != 0) {
        true => timeout.max(stay),
        false => timeout,
    }
}

/// For how long an established flow may be idle by the timeout that was handed over (units); 0: by
/// its rule alone.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn offload_stay(index: u32) -> u64 {
    let Some(flow) = record::hot(index) else {
        return 0;
    };
    if flow.marks() & OFFLOADED == 0 {
        return 0;
    }
    let Some(offload) = OFFLOADS.get_ptr(flow.details()) else {
        return 0;
    };
    let offload: *const Offload = offload;
    // SAFETY: a value of the map. Volatile, because userspace stores there.
    let stay = unsafe { (&raw const (*offload).stay).read_volatile() };
    (stay & !UNSEEN).into()
}
