//! The flow table: the protocol of `twheel_common::table` over a BPF array. Everything else reaches
//! flows through this module alone, so that another table can take its place.
//!
//! A reference into the table ([`At`]) stays valid memory for as long as the program runs, but once the
//! flow is removed the record may be given to another flow at once. Hence the rules of
//! `twheel_common::table`: a late stamp makes a stranger at most younger, and everything else that CPUs
//! share changes by compare-and-swap against a generation that no stranger has.

use core::ffi::c_void;

use aya_ebpf::helpers::generated::bpf_loop;
use twheel_common::{
    flow::{Direction, FlowKey, Word},
    numbers::{self, Positions},
    packet::Segment,
    state::{Seen, SideWay, Timeouts},
    table::{self, BLOCK, Begins, Block, Inserted, Node, Record, Records, cpu},
    wheel::Link,
};

use crate::{
    atomic, clock, config,
    maps::{ACCOUNTS, FLOWS, HASH, TIMEOUTS, TRACKED},
    rto,
    verifier::{bit, given},
};

/// Which half of a word in memory is the low one.
const LOW: usize = if cfg!(target_endian = "big") { 1 } else { 0 };

/// A record of the table: its block, and its index.
#[derive(Clone, Copy)]
pub struct At(*mut Block, u32);

/// Where to look for a key.
#[inline(always)]
pub fn home(key: &FlowKey) -> u32 {
    HASH.load().home(key)
}

/// The flow of a key.
#[inline(always)]
pub fn find(home: u32, key: &FlowKey) -> Option<At> {
    table::find(&Table, home, key)
}

/// The record of an index, whatever it holds.
#[inline(always)]
pub fn at(index: u32) -> Option<At> {
    Table.at(index)
}

/// Calls `turn` with 0, 1, … until it says `true`, at most `turns` times.
#[inline(always)]
pub fn repeat(turns: u32, turn: impl FnMut(u32) -> bool) {
    Table.repeat(turns, turn);
}

/// Counts a flow in, if there is room for it; [`uncount`] gives the room back.
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

/// What [`table_enter`] says: there is no room;
pub const FULL: u64 = 0;
/// or this and the flow's index, where it was entered;
const NEW: u64 = 1 << 32;
/// or this and the flow's index, if another CPU has entered it meanwhile.
const EXISTS: u64 = 2 << 32;

/// Enters the flow of its first segment that was counted in, for this CPU's wheel: [`FULL`], or what [`is_new`] and [`entered`]
/// understand. The rule, and in the high half the way of one side.
#[unsafe(no_mangle)]
#[inline(never)]
pub extern "C" fn table_enter(
    segment: *const Segment,
    home: u32,
    now: u64,
    seen: u32,
    rule_way: u64,
) -> u64 {
    let Some(segment) = given(segment) else {
        return FULL;
    };
    let begins = Begins {
        seen: Seen(seen),
        now,
        cpu: clock::cpu(),
        rule: rule_way as u16,
        positions: numbers::first(segment),
        way: SideWay((rule_way >> 32) as u32),
    };
    match table::insert(&Table, home, &segment.key, &begins) {
        Inserted::New(flow, _) => NEW | u64::from(flow.index()),
        Inserted::Exists(flow) => EXISTS | u64::from(flow.index()),
        Inserted::Full => FULL,
    }
}

/// Whether a flow was entered that was not there.
#[inline(always)]
pub fn is_new(entered: u64) -> bool {
    entered != FULL && entered < EXISTS
}

/// The flow that was entered, or that was there.
#[inline(always)]
pub fn entered(entered: u64) -> Option<At> {
    match entered {
        FULL => None,
        entered => at(entered as u32),
    }
}

/// How long a flow of this rule may be idle of which this was seen, units.
#[inline(always)]
pub fn timeout(rule: u16, seen: Seen) -> u32 {
    let Some(timeouts) = TIMEOUTS.get_ptr(rule.into()) else {
        return u32::MAX >> 2;
    };
    let number = Timeouts::number(seen) & 15;
    // SAFETY: a place in a map, of 16 aligned numbers. Volatile, because userspace changes them.
    let of = |number| unsafe { timeouts.cast::<u32>().add(number).read_volatile() };
    let timeout = of(number);
    if rto::is_on() && seen.is_stalled() {
        let most = of(Timeouts::RETRANS);
        return if most < timeout { most } else { timeout };
    }
    timeout
}

impl At {
    /// Time, generation, and what was seen.
    #[inline(always)]
    pub fn word(self) -> Word {
        Table.word(self)
    }

    /// Notes a packet at `now`, which is younger than the stamp that was read.
    #[inline(always)]
    pub fn touch(self, now: u64) {
        // SAFETY: a record is valid memory while the program runs; see the module for what it means if the
        // flow is removed meanwhile. Volatile, because other CPUs store there too.
        unsafe {
            let word = (&raw mut (*self.record()).word).cast::<u32>();
            word.add(LOW).write_volatile(now as u32);
        }
    }

    /// Ends that the flow is [starting](Seen::is_starting), now that `created` is right.
    #[inline(always)]
    pub fn started(self) {
        // SAFETY: as above.
        unsafe {
            let word = (&raw mut (*self.record()).word).cast::<u32>();
            atomic::and(word.add(1 - LOW), Word::STARTED);
        }
    }

    /// Swaps the word of the flow of a key; `Err` if it is not `old`, and `None` if the record is now
    /// another flow's.
    #[inline(always)]
    pub fn change(self, key: &FlowKey, old: Word, new: Word) -> Option<Result<Word, Word>> {
        table::change(&Table, self, key, old, new)
    }

    /// Ends the flow, if it is as it was when this was decided on. Only for the CPU on whose wheel it
    /// stands, which must then [`remove`](Self::remove) it.
    #[inline(always)]
    pub fn kill(self, decided_on: Word) -> bool {
        table::kill(&Table, self, decided_on)
    }

    /// Ends that the flow is [posted](Seen::is_posted): it has been taken out of the inbox.
    #[inline(always)]
    pub fn delivered(self) {
        // SAFETY: as above.
        unsafe {
            let word = (&raw mut (*self.record()).word).cast::<u32>();
            atomic::and(word.add(1 - LOW), Word::DELIVERED);
        }
    }

    /// How long the flow may be idle, units.
    #[inline(always)]
    pub fn timeout(self, seen: Seen) -> u32 {
        timeout(self.rule(), seen)
    }

    /// The rule that the flow has met.
    #[inline(always)]
    pub fn rule(self) -> u16 {
        table::rule(Table.tag(self))
    }

    /// Whether the rule is one that the policy has no more.
    #[inline(always)]
    pub fn has_lost_its_rule(self) -> bool {
        let Some(timeouts) = TIMEOUTS.get_ptr(self.rule().into()) else {
            return false;
        };
        // SAFETY: as in `timeout`.
        unsafe { timeouts.cast::<u32>().add(Timeouts::GONE).read_volatile() != 0 }
    }

    /// Makes the flow one of another rule, if the record is still its own.
    #[inline(always)]
    pub fn set_rule(self, rule: u16) {
        let tag = Table.tag(self);
        let place = self.record();
        // SAFETY: as in `touch`.
        unsafe {
            atomic::compare_exchange(&raw mut (*place).tag, tag, table::with_rule(tag, rule))
        };
    }

    /// Makes the flow one of no rule. For the CPU on whose wheel it stands.
    #[inline(always)]
    pub fn clear_rule(self) {
        let tag = Table.tag(self);
        Table.publish(self, table::without_rule(tag));
    }

    /// The CPU on whose wheel the flow stands.
    #[inline(always)]
    pub fn cpu(self) -> u32 {
        cpu(Table.tag(self))
    }

    /// Where the record stands.
    #[inline(always)]
    pub fn index(self) -> u32 {
        self.1
    }

    /// How far each side has sent.
    #[inline(always)]
    pub fn positions(self) -> Positions {
        // SAFETY: as in `touch`.
        unsafe {
            let place = (&raw const (*self.record()).positions).cast::<u32>();
            [place.read_volatile(), place.add(1).read_volatile()]
        }
    }

    /// Notes how far one side has sent.
    #[inline(always)]
    pub fn set_position(self, direction: Direction, position: u32) {
        // SAFETY: as in `touch`.
        unsafe {
            let place = (&raw mut (*self.record()).positions).cast::<u32>();
            match direction {
                Direction::FromLow => place.write_volatile(position),
                Direction::FromHigh => place.add(1).write_volatile(position),
            }
        }
    }

    /// Notes how far both have.
    #[inline(always)]
    pub fn set_positions(self, [low, high]: Positions) {
        self.set_position(Direction::FromLow, low);
        self.set_position(Direction::FromHigh, high);
    }

    /// Counts a packet, if packets are counted. (One that comes while the flow ends may be its successor's.)
    #[inline(always)]
    pub fn count(self, direction: Direction, bytes: u32) {
        let Some(account) = self.account_place() else {
            return;
        };
        // SAFETY: within the value, aligned to 8; all access is atomic.
        unsafe {
            let side = account.add(2 * bit(direction as u64) as usize);
            atomic::add(side, 1);
            atomic::add(side.add(1), bytes.into());
        }
    }

    /// Writes what was counted: packets and bytes of the low side, and of the high one.
    ///
    /// # Safety
    ///
    /// `place` is valid for four writes, and nobody else's.
    #[inline(always)]
    pub unsafe fn report_account(self, place: *mut u64) {
        let account = self.account_place();
        for number in 0..4 {
            // SAFETY: as above, and the caller's promise.
            unsafe {
                let counted = match account {
                    Some(account) => account.add(number).read_volatile(),
                    None => 0,
                };
                place.add(number).write_volatile(counted);
            }
        }
    }

    /// Begins to count anew.
    #[inline(always)]
    pub fn forget_account(self) {
        if let Some(account) = self.account_place() {
            for number in 0..4 {
                // SAFETY: as above.
                unsafe { atomic::swap(account.add(number), 0) };
            }
        }
    }

    /// Packets and bytes of the low side, and of the high one.
    #[inline(always)]
    fn account_place(self) -> Option<*mut u64> {
        if config!(accounting) == 0 {
            return None;
        }
        ACCOUNTS.get_ptr_mut(self.1).map(|account| account.cast())
    }

    /// Frees the record of a flow that this CPU has killed, and that is yet to be [counted out](uncount).
    #[inline(always)]
    pub fn remove(self) {
        table::remove(&Table, self, self.1);
    }

    #[inline(always)]
    fn number(self) -> usize {
        self.1 as usize & (BLOCK - 1)
    }

    #[inline(always)]
    fn record(self) -> *mut Record {
        // SAFETY: a block has so many records, and begins with them.
        unsafe { self.0.cast::<Record>().add(self.number()) }
    }

    #[inline(always)]
    fn node(self) -> *mut Node {
        // SAFETY: a block has so many nodes, which follow the records.
        unsafe { (&raw mut (*self.0).nodes).cast::<Node>().add(self.number()) }
    }

    /// The flow's key.
    #[inline(always)]
    pub fn key(self) -> FlowKey {
        // SAFETY: as in `touch`.
        let addresses = unsafe { (&raw const (*self.record()).addresses).read_volatile() };
        table::key(addresses, Table.tag(self))
    }

    /// Whether the record holds a flow that stands on this CPU's wheel.
    #[inline(always)]
    pub fn is_ours(self) -> bool {
        let tag = Table.tag(self);
        table::holds_flow(tag) && cpu(tag) == clock::cpu() & 0xfff
    }

    /// Low 32 bits of the clock at the flow's first packet.
    #[inline(always)]
    pub fn created(self) -> u32 {
        // SAFETY: as in `touch`.
        unsafe { (&raw const (*self.node()).created).read_volatile() }
    }

    /// Sets [`created`](Self::created).
    #[inline(always)]
    pub fn set_created(self, created: u32) {
        // SAFETY: as in `touch`.
        unsafe { (&raw mut (*self.node()).created).write_volatile(created) }
    }

    /// The number that is [in doubt](twheel_common::state::Known::doubt).
    #[inline(always)]
    pub fn doubt(self) -> u32 {
        // SAFETY: as in `touch`.
        unsafe { (&raw const (*self.node()).doubt).read_volatile() }
    }

    /// Sets [`doubt`](Self::doubt).
    #[inline(always)]
    pub fn set_doubt(self, doubt: u32) {
        // SAFETY: as in `touch`.
        unsafe { (&raw mut (*self.node()).doubt).write_volatile(doubt) }
    }

    /// By which way one of its sides sends.
    #[inline(always)]
    pub fn way(self) -> SideWay {
        // SAFETY: as in `touch`.
        SideWay(unsafe { (&raw const (*self.node()).way).read_volatile() })
    }

    /// Sets [`way`](Self::way).
    #[inline(always)]
    pub fn set_way(self, way: SideWay) {
        // SAFETY: as in `touch`.
        unsafe { (&raw mut (*self.node()).way).write_volatile(way.0) }
    }

    /// Loads what a visit of a flow that stands first in a list needs of other lines than its record: of its home, and of
    /// the flow behind it.
    #[inline(always)]
    pub fn fetch(self) {
        if let Some(home) = Table.at(self.1.wrapping_sub(table::distance(Table.tag(self)))) {
            Table.hops(home);
        }
        if let Some(next) = self.next().as_flow().and_then(at) {
            Table.word(next);
            next.prev();
        }
    }

    /// What follows in the inbox.
    #[inline(always)]
    pub fn inbox(self) -> Link {
        // SAFETY: as in `touch`.
        unsafe { (&raw const (*self.node()).inbox).read_volatile() }
    }

    /// Sets [`inbox`](Self::inbox). For whoever has posted the flow.
    #[inline(always)]
    pub fn set_inbox(self, link: Link) {
        // SAFETY: as in `touch`.
        unsafe { (&raw mut (*self.node()).inbox).write_volatile(link) }
    }

    /// What follows in the slot. For the CPU on whose wheel the flow stands, as all links are.
    #[inline(always)]
    pub fn next(self) -> Link {
        // SAFETY: as in `touch`.
        unsafe { (&raw const (*self.record()).next).read_volatile() }
    }

    /// Sets [`next`](Self::next).
    #[inline(always)]
    pub fn set_next(self, link: Link) {
        // SAFETY: as in `touch`.
        unsafe { (&raw mut (*self.record()).next).write_volatile(link) }
    }

    /// What comes before in the slot.
    #[inline(always)]
    pub fn prev(self) -> Link {
        // SAFETY: as in `touch`.
        unsafe { (&raw const (*self.node()).prev).read_volatile() }
    }

    /// Sets [`prev`](Self::prev).
    #[inline(always)]
    pub fn set_prev(self, link: Link) {
        // SAFETY: as in `touch`.
        unsafe { (&raw mut (*self.node()).prev).write_volatile(link) }
    }
}

/// The array of records.
struct Table;

/// Every access is to a record: valid memory, aligned to its size, while the program runs. Loads and
/// stores are volatile, because other CPUs store there too.
impl Records for Table {
    type At = At;

    #[inline(always)]
    fn at(&self, index: u32) -> Option<At> {
        FLOWS
            .get_ptr_mut(index / BLOCK as u32)
            .map(|block| At(block, index))
    }

    #[inline(always)]
    fn tag(&self, at: At) -> u64 {
        // SAFETY: see above.
        unsafe { (&raw const (*at.record()).tag).read_volatile() }
    }

    #[inline(always)]
    fn claim(&self, at: At, tag: u64) -> bool {
        // SAFETY: see above.
        unsafe { atomic::compare_exchange(&raw mut (*at.record()).tag, 0, tag) == 0 }
    }

    #[inline(always)]
    fn set_tag(&self, at: At, tag: u64) {
        // SAFETY: see above.
        unsafe { atomic::swap(&raw mut (*at.record()).tag, tag) };
    }

    #[inline(always)]
    fn publish(&self, at: At, tag: u64) {
        // SAFETY: see above.
        unsafe { (&raw mut (*at.record()).tag).write_volatile(tag) };
    }

    #[inline(always)]
    fn word(&self, at: At) -> Word {
        // SAFETY: see above.
        unsafe { (&raw const (*at.record()).word).read_volatile() }
    }

    #[inline(always)]
    fn set_word(&self, at: At, word: Word) {
        // SAFETY: see above; a `Word` is a `u64`.
        unsafe { atomic::swap((&raw mut (*at.record()).word).cast(), word.0) };
    }

    #[inline(always)]
    fn change(&self, at: At, old: Word, new: Word) -> Word {
        // SAFETY: as above.
        Word(unsafe {
            atomic::compare_exchange((&raw mut (*at.record()).word).cast(), old.0, new.0)
        })
    }

    #[inline(always)]
    fn hops(&self, at: At) -> u32 {
        // SAFETY: see above.
        unsafe { (&raw const (*at.record()).hops).read_volatile() }
    }

    #[inline(always)]
    fn announce(&self, at: At, bits: u32) -> u32 {
        // SAFETY: see above.
        unsafe { atomic::or(&raw mut (*at.record()).hops, bits) }
    }

    #[inline(always)]
    fn renounce(&self, at: At, bits: u32) {
        // SAFETY: see above.
        unsafe { atomic::and(&raw mut (*at.record()).hops, !bits) };
    }

    #[inline(always)]
    fn has_addresses(&self, at: At, key: &FlowKey) -> bool {
        let [a, b, c, d] = key.addresses();
        // SAFETY: see above.
        unsafe {
            let addresses = (&raw const (*at.record()).addresses).cast::<u64>();
            addresses.read_volatile() == a
                && addresses.add(1).read_volatile() == b
                && addresses.add(2).read_volatile() == c
                && addresses.add(3).read_volatile() == d
        }
    }

    #[inline(always)]
    fn fill(&self, at: At, key: &FlowKey, begins: &Begins) {
        let [a, b, c, d] = key.addresses();
        // SAFETY: see above.
        unsafe {
            let addresses = (&raw mut (*at.record()).addresses).cast::<u64>();
            addresses.write_volatile(a);
            addresses.add(1).write_volatile(b);
            addresses.add(2).write_volatile(c);
            addresses.add(3).write_volatile(d);
        }
        at.set_positions(begins.positions);
        at.set_created(begins.now as u32);
        at.set_doubt(0);
        at.set_way(begins.way);
        at.forget_account();
        rto::forget(at);
    }

    #[inline(always)]
    fn repeat(&self, turns: u32, mut turn: impl FnMut(u32) -> bool) {
        unsafe extern "C" fn call<F: FnMut(u32) -> bool>(index: u64, turn: *mut c_void) -> i64 {
            // SAFETY: `repeat` passes an `F` that nobody else refers to meanwhile.
            let turn = unsafe { &mut *turn.cast::<F>() };
            let stop = turn(index as u32).into();
            bit(stop) as i64
        }
        fn of<F: FnMut(u32) -> bool>(_: &F) -> unsafe extern "C" fn(u64, *mut c_void) -> i64 {
            call::<F>
        }
        let callback = of(&turn) as *mut c_void;
        // SAFETY: the callback has the signature that the helper calls, and `turn` outlives the loop.
        // (`bpf_loop`, so that the verifier goes through a turn once.)
        unsafe { bpf_loop(turns, callback, (&raw mut turn).cast(), 0) };
    }
}
