//! The flow table: finds, enters and removes flows, by the protocol of `twheel_common::table` on
//! the maps.

use twheel_common::{
    flow::Word,
    key::FlowKey,
    numbers,
    pool::{self, Pool},
    record::RULES,
    seen::Seen,
    segment::Segment,
    table::{self, Begins, Inserted, OUTGOING, Reserved, WINDOW},
    way::SideWay,
};

pub use twheel_common::table::Place;

use crate::{
    atomic, clock, config,
    config::HASH,
    maps::{SHELF, TRACKED},
    memory::{NOBODY, Table},
    record::{self, At, Hot},
    verifier::{given, masked, repeat},
};

/// Where to look for a key.
#[inline(always)]
pub fn place(key: &FlowKey) -> Place {
    HASH.load().place(key)
}

/// The flow with this key.
#[inline(always)]
pub fn find(place: Place, key: &FlowKey) -> Option<Hot> {
    table::find(&Table, place, key)
}

/// Counts a flow in, if the table has capacity for it; [`uncount`] takes it back.
#[inline(always)]
pub fn has_room() -> bool {
    let Some(tracked) = TRACKED.get_ptr_mut(0) else {
        return false;
    };
    // SAFETY: a place in a map, aligned to 8; all access is atomic.
    let before = unsafe { atomic::add(tracked, 1) };
    if before < u64::from(config!(max_flows)) {
        return true;
    }
    uncount(1);
    false
}

/// Counts flows out.
#[inline(always)]
pub fn uncount(flows: u32) {
    if let Some(tracked) = TRACKED.get_ptr_mut(0) {
        // SAFETY: as above.
        unsafe { atomic::add(tracked, u64::from(flows).wrapping_neg()) };
    }
}

/// Result of [`enter`]: the table has no capacity.
pub const FULL: u64 = 0;
/// Result of [`enter`], with the flow's index: the flow was entered.
const NEW: u64 = 1 << 32;
/// Result of [`enter`], with the flow's index: another CPU has entered the flow meanwhile.
const EXISTS: u64 = 2 << 32;

/// Flag beside the rule of a flow that is entered: its first packet went out.
pub const OUTGOING_RULE: u64 = 1 << 16;

/// Enters a flow that was counted in, by its first segment, for this CPU's wheel. `rule_way`: the
/// rule, perhaps with [`OUTGOING_RULE`], and in the high half the way of one side. Returns
/// [`FULL`], or a number for [`is_new`] and [`entered`].
///
/// (The steps are functions called one after the other: the verifier adds up the stacks of callers
/// and callees.)
#[inline(always)]
pub fn enter(segment: &Segment, place: Place, now: u64, seen: Seen, rule_way: u64) -> u64 {
    let reserved = table_reserve(&segment.key, place.home, place.fingerprint);
    if reserved & RESERVED == 0 {
        return reserved;
    }
    let distance = reserved >> 32 & (u64::from(WINDOW) - 1);
    let seen_index = u64::from(place.home + distance as u32) << 32 | u64::from(seen.0);
    let before = table_write(segment, seen_index, now, rule_way, reserved);
    table_settle(
        &segment.key,
        place.home,
        place.fingerprint,
        before,
        reserved,
    )
}

/// Result of [`table_reserve`]: a record and details are reserved. The low half is the index of the
/// details. The high half has, from its lowest bit, how far the record is behind its home (6 bits),
/// and [`TWINS`].
const RESERVED: u64 = 1 << 63;
/// Flag beside [`RESERVED`]: there are flows of other keys with the same fingerprint.
const TWINS: u64 = 1 << 62;

/// [`table::claim`], [`table::reserve`], and taking details.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_reserve(key: *const FlowKey, home: u32, fingerprint: u64) -> u64 {
    let distance = masked::<0xff>(table_claim(home, fingerprint)) as u32;
    let Some(key) = given(key) else {
        return FULL;
    };
    if distance >= WINDOW {
        return FULL;
    }
    let place = Place { home, fingerprint };
    let twins = match table::reserve(&Table, place, distance, key) {
        Ok(reserved) if reserved.has_twins => TWINS,
        Ok(_) => 0,
        Err(Inserted::Exists(flow)) => return EXISTS | u64::from(flow.index()),
        Err(_) => return FULL,
    };
    let details = table_take() as u32;
    if details == NOBODY {
        table::release(&Table, home + distance);
        return FULL;
    }
    RESERVED | twins | u64::from(distance) << 32 | u64::from(details)
}

/// [`table::write`], for what was reserved. `seen_index`: the state bits, and the record's index in
/// the high half.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_write(
    segment: *const Segment,
    seen_index: u64,
    now: u64,
    rule_way: u64,
    reserved: u64,
) -> u64 {
    let Some(segment) = given(segment) else {
        return 0;
    };
    let begins = Begins {
        seen: Seen(seen_index as u32),
        now,
        cpu: clock::cpu(),
        rule: rule_way as u16 & RULES as u16,
        outgoing: match rule_way & OUTGOING_RULE {
            0 => 0,
            _ => OUTGOING,
        },
        positions: numbers::first(segment),
        way: SideWay((rule_way >> 32) as u32),
        details: reserved as u32,
    };
    let distance = (reserved >> 32) as u32 & (WINDOW - 1);
    let place = Place {
        home: ((seen_index >> 32) as u32).wrapping_sub(distance),
        fingerprint: 0,
    };
    table::write(&Table, place, distance, &segment.key, &begins).unwrap_or(0)
}

/// [`table::settle`], for what was reserved; gives the details back if they are not needed.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_settle(
    key: *const FlowKey,
    home: u32,
    fingerprint: u64,
    before: u64,
    reserved: u64,
) -> u64 {
    let Some(key) = given(key) else {
        return FULL;
    };
    let place = Place { home, fingerprint };
    let claimed = Reserved {
        distance: (reserved >> 32) as u32 & (WINDOW - 1),
        has_twins: reserved & TWINS != 0,
    };
    let entered = match table::settle(&Table, place, claimed, key, before) {
        Inserted::New(flow, _) => return NEW | u64::from(flow.index()),
        Inserted::Exists(flow) => EXISTS | u64::from(flow.index()),
        Inserted::Full => FULL,
    };
    table_give(reserved as u32);
    entered
}

/// Claims a record for a flow. Returns how far it is behind its home, or [`WINDOW`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_claim(home: u32, fingerprint: u64) -> u64 {
    let place = Place { home, fingerprint };
    table::claim(&Table, place).unwrap_or(WINDOW).into()
}

/// Takes free details for a flow of this CPU. Returns their index, or [`NOBODY`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_take() -> u64 {
    let Some(shelf) = SHELF.get_ptr_mut(0) else {
        return NOBODY.into();
    };
    // SAFETY: the shelf is this CPU's own, with bottom halves off.
    let taken = pool::take(&Table, unsafe { &mut *shelf });
    taken.unwrap_or(NOBODY).into()
}

/// Begins to load the details that the next flow will take, so that they are in the cache when it
/// comes.
#[inline(always)]
pub fn expect_details() {
    if let Some(shelf) = SHELF.get_ptr_mut(0) {
        // SAFETY: the shelf is this CPU's own, with bottom halves off.
        Pool::next(&Table, pool::next(unsafe { &*shelf }));
    }
}

/// Gives details back.
#[inline(always)]
pub fn give(details: u32) {
    table_give(details);
}

/// Calls [`pool::give`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_give(details: u32) -> u64 {
    if let Some(shelf) = SHELF.get_ptr_mut(0) {
        // SAFETY: as above.
        pool::give(&Table, unsafe { &mut *shelf }, details);
    }
    0
}

/// Whether [`enter`] has entered a new flow.
#[inline(always)]
pub fn is_new(entered: u64) -> bool {
    entered != FULL && entered < EXISTS
}

/// The flow that [`enter`] has entered or found.
#[inline(always)]
pub fn entered(entered: u64) -> Option<At> {
    match entered {
        FULL => None,
        entered => record::at(entered as u32),
    }
}

/// Begins to load the account of the flow whose record is at its home, as most are, so that the
/// account is in the cache when it is needed.
#[inline(always)]
pub fn expect_account(place: Place) {
    if let Some(account) = record::account_place(place.home) {
        // SAFETY: within the value, aligned to 8; the value read is not used.
        unsafe { account.read_volatile() };
    }
}

/// Exchanges the word of the flow with this key. `Err` if the word is not `old`, and `None` if the
/// record holds another flow.
#[inline(always)]
pub fn change(flow: Hot, key: &FlowKey, old: Word, new: Word) -> Option<Result<Word, Word>> {
    table::change(&Table, flow, key, old, new)
}

/// Changes the state bits of a flow, whatever stamps other CPUs store at the same time. Returns the
/// bits before and after, if the change could be made.
#[inline(always)]
pub fn mark(flow: Hot, key: &FlowKey, mark: impl Fn(Seen) -> Seen) -> Option<(Seen, Seen)> {
    let mut marked = None;
    repeat(4, |_| {
        let word = flow.word();
        if word.is_dead() {
            return true;
        }
        let seen = mark(word.seen());
        match change(flow, key, word, word.with_seen(seen)) {
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

/// Ends a flow, if it is as it was when this was decided. Only for the CPU on whose wheel it
/// stands, which must then [`remove`] it.
#[inline(always)]
pub fn kill(flow: At, decided_on: Word) -> bool {
    table::kill(&Table, flow.hot(), decided_on)
}

/// Frees the record of a flow that this CPU has killed. The caller must still [count it
/// out](uncount).
#[inline(always)]
pub fn remove(flow: At) {
    give(free(flow));
}

/// As [`remove`], but the caller must still [give](give) its details back: their index is returned.
#[inline(always)]
pub fn free(flow: At) -> u32 {
    let number = flow.number();
    table::remove(&Table, flow.hot(), flow.index());
    number
}
