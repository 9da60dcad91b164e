//! Flows whose programs have handed over their timeouts: `twheel_common::offload` on a map.

use twheel_common::{
    flow::Word,
    key::Direction,
    numbers::{advance, is_apart},
    offload::{FRESH, Heard, MARKS, OFFLOADED, Offload, SETTLING, UNSEEN, counts, later, settle},
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
/// the packet was stored before.
#[inline(always)]
pub fn hear(flow: Hot, direction: Direction) {
    if config!(offload) != 0 && counts(flow.marks(), direction) {
        flow.set(FRESH);
    }
}

/// A packet that changes no state is about to store its time, which is younger than the stamp.
#[inline(always)]
pub fn expect(flow: Hot, segment: &Segment) {
    if config!(offload) != 0 && flow.marks() & FRESH != 0 {
        offload_expect(flow.index(), segment);
    }
}

/// Keeps the time of the latest data, if the flow has such and a packet at `now` may replace it.
#[inline(always)]
pub fn keep(flow: Hot, word: Word, now: u64) {
    if config!(offload) != 0 && flow.marks() & FRESH != 0 && word.is_older_than(now) {
        offload_settle(flow.index());
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

/// Keeps the time of the latest data, unless this packet has some, too, and the flow stays fresh.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn offload_expect(index: u32, segment: *const Segment) -> u64 {
    let (Some(flow), Some(segment)) = (record::hot(index), given(segment)) else {
        return 0;
    };
    let (positions, seen) = (flow.positions(), flow.word().seen());
    let is_heard = counts(flow.marks(), segment.direction)
        && !seen.is_told_by(segment.direction, config::view())
        && !is_apart(positions, segment)
        && advance(positions, seen, segment).is_some();
    if !is_heard {
        offload_settle(index);
    }
    0
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn offload_settle(index: u32) -> u64 {
    if let Some(flow) = record::hot(index) {
        settle(&flow);
    }
    0
}

/// Most attempts to raise a time: others raise it, too, and each at most once a unit.
const ATTEMPTS: u32 = 8;

impl Heard for Hot {
    #[inline(always)]
    fn stamp(&self) -> u32 {
        self.word().stamp()
    }

    #[inline(always)]
    fn raise(&self, to: u32) {
        offload_raise(self.index(), to);
    }

    #[inline(always)]
    fn begin_settling(&self) -> u32 {
        self.set(SETTLING)
    }

    #[inline(always)]
    fn clear_fresh(&self) {
        self.clear(FRESH);
    }

    #[inline(always)]
    fn end_settling(&self) {
        self.clear(SETTLING);
    }
}

impl Hot {
    /// Its [`MARKS`].
    #[inline(always)]
    pub fn marks(self) -> u32 {
        // SAFETY: the record's line. Volatile, because others change it.
        unsafe { self.details_place().read_volatile() & MARKS }
    }

    #[inline(always)]
    fn set(self, marks: u32) -> u32 {
        // SAFETY: the record's line; other bits stay.
        unsafe { atomic::or(self.details_place(), marks) }
    }

    #[inline(always)]
    fn clear(self, marks: u32) {
        // SAFETY: as in `set`.
        unsafe { atomic::and(self.details_place(), !marks) };
    }
}

#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn offload_raise(index: u32, to: u32) -> u64 {
    let Some(offload) = OFFLOADS.get_ptr_mut(index) else {
        return 0;
    };
    // The time, and 0.
    let place: *mut u64 = offload.cast();
    // SAFETY: the first eight bytes of a value of the map. Volatile, because others store there.
    let mut held = unsafe { place.read_volatile() };
    for _ in 0..ATTEMPTS {
        if later(held as u32, to) != to {
            break;
        }
        // SAFETY: as above; values of the map are aligned to 8.
        let found = unsafe { atomic::compare_exchange(place, held, to.into()) };
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
    let (Some(flow), Some(offload)) = (record::hot(index), OFFLOADS.get_ptr(index)) else {
        return 0;
    };
    if flow.marks() & OFFLOADED == 0 {
        return 0;
    }
    let offload: *const Offload = offload;
    // SAFETY: a value of the map. Volatile, because userspace stores there.
    let stay = unsafe { (&raw const (*offload).stay).read_volatile() };
    (stay & !UNSEEN).into()
}
