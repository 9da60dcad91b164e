//! The maps as the memory of `twheel_common`'s table, and of its pool of details.

use twheel_common::{
    flow::Word,
    key::FlowKey,
    pool::{CHAIN, Pool},
    table::{self, Begins, Details, Extras, Place, Present, Records},
    wheel::Link,
};

use crate::{
    atomic, config,
    maps::{DEPOT, DETAILS, EXTRAS},
    record::{self, At, Hot},
    timers,
    verifier::{given, repeat},
};

/// The array of records.
pub struct Table;

/// Every access is to a record: valid memory, aligned to its size, while the program runs. Loads and
/// stores are volatile, because other CPUs store there too.
impl Records for Table {
    type At = Hot;

    #[inline(always)]
    fn at(&self, index: u32) -> Option<Hot> {
        record::hot(index)
    }

    #[inline(always)]
    fn beside(&self, first: Hot, distance: u32) -> Hot {
        first.beside(distance)
    }

    #[inline(always)]
    fn tag(&self, at: Hot) -> u64 {
        at.tag()
    }

    #[inline(always)]
    fn claim(&self, at: Hot, tag: u64) -> bool {
        // SAFETY: see above.
        unsafe { atomic::compare_exchange(at.tag_place(), 0, tag) == 0 }
    }

    #[inline(always)]
    fn swap_tag(&self, at: Hot, old: u64, new: u64) {
        // SAFETY: see above.
        unsafe { atomic::compare_exchange(at.tag_place(), old, new) };
    }

    #[inline(always)]
    fn set_in_tag(&self, at: Hot, bits: u64) -> u64 {
        // SAFETY: see above.
        unsafe { atomic::or_64(at.tag_place(), bits) }
    }

    #[inline(always)]
    fn clear_in_tag(&self, at: Hot, bits: u64) {
        // SAFETY: see above.
        unsafe { atomic::and_64(at.tag_place(), !bits) };
    }

    #[inline(always)]
    fn free(&self, at: Hot) {
        // SAFETY: see above.
        unsafe { at.tag_place().write_volatile(0) };
    }

    #[inline(always)]
    fn word(&self, at: Hot) -> Word {
        at.word()
    }

    #[inline(always)]
    fn set_word(&self, at: Hot, word: Word) {
        // SAFETY: see above.
        unsafe { atomic::swap(at.word_place(), word.0) };
    }

    #[inline(always)]
    fn change(&self, at: Hot, old: Word, new: Word) -> Word {
        // SAFETY: see above.
        Word(unsafe { atomic::compare_exchange(at.word_place(), old.0, new.0) })
    }

    #[inline(always)]
    fn hops(&self, at: Hot) -> u64 {
        at.hops()
    }

    #[inline(always)]
    fn announce(&self, at: Hot, bits: u64) -> u64 {
        // SAFETY: see above.
        unsafe { atomic::or_64(at.hops_place(), bits) }
    }

    #[inline(always)]
    fn renounce(&self, at: Hot, bits: u64) {
        // SAFETY: see above.
        unsafe { atomic::and_64(at.hops_place(), !bits) };
    }

    #[inline(always)]
    fn has_key(&self, at: Hot, key: &FlowKey) -> bool {
        record::has_key(at.details(), key)
    }

    #[inline(always)]
    fn is_of(&self, at: Hot, key: &FlowKey) -> bool {
        table_has_key(at.details(), key) != 0
    }

    #[inline(always)]
    fn fill(&self, at: Hot, key: &FlowKey, begins: &Begins) {
        let number = begins.details;
        let Some(details) = DETAILS.get_ptr_mut(number) else {
            return;
        };
        let [a, b, c, d] = key.addresses();
        // SAFETY: a value of the map; see above.
        unsafe {
            at.details_place().write_volatile(number);
            let addresses = (&raw mut (*details).addresses).cast::<u64>();
            addresses.write_volatile(a);
            addresses.add(1).write_volatile(b);
            addresses.add(2).write_volatile(c);
            addresses.add(3).write_volatile(d);
            (&raw mut (*details).ports).write_volatile(key.ports() as u32);
            let owner = Details::owner_of(key, begins.cpu, begins.rule) | begins.outgoing;
            (&raw mut (*details).owner).write_volatile(owner);
            (&raw mut (*details).record).write_volatile(at.index());
        }
        let flow = At::new(at, details);
        at.set_positions(begins.positions);
        flow.set_created(begins.now as u32);
        flow.set_doubt(0);
        flow.set_way(begins.way);
        fill_extras(number, key);
        flow.clear_account();
        timers::reset(at);
    }

    #[inline(always)]
    fn present(&self, place: Place, hops: u64, key: &FlowKey) -> Present {
        let found = table_present(place.home, place.fingerprint, hops, key);
        Present {
            index: found as u32,
            has_twins: found >> 32 != 0,
        }
    }

    #[inline(always)]
    fn repeat(&self, turns: u32, turn: impl FnMut(u32) -> bool) {
        repeat(turns, turn);
    }
}

impl Pool for Table {
    #[inline(always)]
    fn next(&self, details: u32) -> Link {
        record::next_of(details)
    }

    #[inline(always)]
    fn set_next(&self, details: u32, next: Link) {
        if let Some(details) = DETAILS.get_ptr_mut(details) {
            // SAFETY: a value of the map; volatile, because other CPUs store there too.
            unsafe { (&raw mut (*details).next).write_volatile(next) };
        }
    }

    #[inline(always)]
    fn below(&self, details: u32) -> Link {
        match DETAILS.get_ptr(details) {
            // SAFETY: as above.
            Some(details) => unsafe { (&raw const (*details).prev).read_volatile() },
            None => Link::NONE,
        }
    }

    #[inline(always)]
    fn set_below(&self, details: u32, below: Link) {
        if let Some(details) = DETAILS.get_ptr_mut(details) {
            // SAFETY: as above.
            unsafe { (&raw mut (*details).prev).write_volatile(below) };
        }
    }

    #[inline(always)]
    fn depot(&self) -> u64 {
        match DEPOT.get_ptr_mut(0) {
            // SAFETY: a place in a map, aligned to 8; all access is atomic.
            Some(head) => unsafe { atomic::add(head, 0) },
            None => 0,
        }
    }

    #[inline(always)]
    fn change_depot(&self, old: u64, new: u64) -> u64 {
        match DEPOT.get_ptr_mut(0) {
            // SAFETY: as above.
            Some(head) => unsafe { atomic::compare_exchange(head, old, new) },
            None => !old,
        }
    }

    #[inline(always)]
    fn repeat(&self, turns: u32, turn: impl FnMut(u32) -> bool) {
        repeat(turns, turn);
    }

    #[inline(always)]
    fn fresh(&self) -> Option<u32> {
        let next = DEPOT.get_ptr_mut(1)?;
        // SAFETY: as above.
        let first = unsafe { atomic::add(next, u64::from(CHAIN)) };
        if first + u64::from(CHAIN) <= u64::from(config!(details)) {
            return Some(first as u32);
        }
        // SAFETY: as above.
        unsafe { atomic::add(next, u64::from(CHAIN).wrapping_neg()) };
        None
    }
}

/// 1 if the details have this key. Packets of a known flow check this only for twins.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_has_key(details: u32, key: *const FlowKey) -> u64 {
    match given(key) {
        Some(key) => record::has_key(details, key).into(),
        None => 0,
    }
}

/// No record, or no details.
pub const NOBODY: u32 = Present::NOBODY;

/// [`table::present`]: the record, or [`NOBODY`]; with 1 in the high half if there are twins.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_present(home: u32, fingerprint: u64, hops: u64, key: *const FlowKey) -> u64 {
    let Some(key) = given(key) else {
        return NOBODY.into();
    };
    let place = Place { home, fingerprint };
    let present = table::present(&Table, place, hops, key);
    u64::from(present.has_twins) << 32 | u64::from(present.index)
}

/// Writes the extras of a new flow, if anything reads them.
#[inline(always)]
fn fill_extras(details: u32, key: &FlowKey) {
    let is_tagged = config!(vlans) != 0 && key.packed_vlans() != 0;
    if config!(watched) == 0 && !is_tagged {
        return;
    }
    let Some(extras) = EXTRAS.get_ptr_mut(details) else {
        return;
    };
    let extras: *mut Extras = extras;
    // SAFETY: as above; `points` and `counted` are one aligned word.
    unsafe {
        (&raw mut (*extras).vlans).write_volatile(key.packed_vlans());
        (&raw mut (*extras).points).cast::<u64>().write_volatile(0);
    }
}
