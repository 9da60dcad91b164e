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
    point::Point,
    pool::{self, CHAIN, Pool},
    state::{Seen, SideWay, Timeouts},
    table::{
        self, Begins, Details, Extras, Inserted, LINE, Line, OUTGOING, Present, Records, TAGGED,
        WINDOW,
    },
    wheel::Link,
};

pub use twheel_common::table::Place;

use crate::{
    atomic, clock, config,
    maps::{ACCOUNTS, DEPOT, DETAILS, EXTRAS, FLOWS, HASH, SHELF, TIMEOUTS, TRACKED},
    rto,
    verifier::{bit, given, masked},
};

/// Which half of a word in memory is the low one.
const LOW: usize = if cfg!(target_endian = "big") { 1 } else { 0 };

/// A record of the table: its line, and its index. What a packet of a known flow needs.
#[derive(Clone, Copy)]
pub struct Hot(*mut Line, u32);

/// A record, and the details that it names.
#[derive(Clone, Copy)]
pub struct At {
    hot: Hot,
    details: *mut Details,
}

impl core::ops::Deref for At {
    type Target = Hot;

    #[inline(always)]
    fn deref(&self) -> &Hot {
        &self.hot
    }
}

/// Where to look for a key.
#[inline(always)]
pub fn place(key: &FlowKey) -> Place {
    HASH.load().place(key)
}

/// The flow of a key.
#[inline(always)]
pub fn find(place: Place, key: &FlowKey) -> Option<Hot> {
    table::find(&Table, place, key)
}

/// The record of an index, whatever it holds.
#[inline(always)]
pub fn hot(index: u32) -> Option<Hot> {
    Table.at(index)
}

/// The same, and the details that it names.
#[inline(always)]
pub fn at(index: u32) -> Option<At> {
    let hot = hot(index)?;
    let details = DETAILS.get_ptr_mut(hot.details())?;
    Some(At { hot, details })
}

/// The flow of these details.
#[inline(always)]
pub fn of(number: u32) -> Option<At> {
    let details = DETAILS.get_ptr_mut(number)?;
    // SAFETY: a value of the map. Volatile, because other CPUs store there too.
    let index = unsafe { (&raw const (*details).record).read_volatile() };
    Some(At {
        hot: hot(index)?,
        details,
    })
}

/// Calls `turn` with 0, 1, … until it says `true`, at most `turns` times.
#[inline(always)]
pub fn repeat(turns: u32, turn: impl FnMut(u32) -> bool) {
    Records::repeat(&Table, turns, turn);
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

/// Beside the rule of a flow that is entered: its first packet went out.
pub const OUTGOING_RULE: u64 = 1 << 16;

/// Enters the flow of its first segment that was counted in, for this CPU's wheel: [`FULL`], or what [`is_new`] and [`entered`]
/// understand. The rule, perhaps with [`OUTGOING_RULE`], and in the high half the way of one side.
///
/// (The steps are functions one beside the other: the verifier adds up what callers and callees have on the stack.)
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

/// Of [`table_reserve`]: a record is reserved, and details; the index of those is in the low half, in the high one from its
/// lowest bit how far the record is behind its home (6 bits), and [`TWINS`].
const RESERVED: u64 = 1 << 63;
/// There are flows of other keys with the same fingerprint.
const TWINS: u64 = 1 << 62;

/// [`table::claim`] and [`table::reserve`], and details.
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
        Ok(true) => TWINS,
        Ok(false) => 0,
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

/// [`table::write`]: what was announced before. What was seen, and the record's index in the high half.
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
        rule: rule_way as u16 & 0x1ff,
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

/// [`table::settle`], with what was announced before; gives the details back if they are not needed.
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
    let distance = (reserved >> 32) as u32 & (WINDOW - 1);
    let place = Place { home, fingerprint };
    let has_twins = reserved & TWINS != 0;
    let entered = match table::settle(&Table, place, distance, key, before, has_twins) {
        Inserted::New(flow, _) => return NEW | u64::from(flow.index()),
        Inserted::Exists(flow) => EXISTS | u64::from(flow.index()),
        Inserted::Full => FULL,
    };
    table_give(reserved as u32);
    entered
}

/// Claims a record for a flow; how far behind its home, or [`WINDOW`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_claim(home: u32, fingerprint: u64) -> u64 {
    let place = Place { home, fingerprint };
    table::claim(&Table, place).unwrap_or(WINDOW).into()
}

/// 1 if the details are of this key. Packets of a known flow ask this of twins alone.
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_has_key(details: u32, key: *const FlowKey) -> u64 {
    match given(key) {
        Some(key) => has_key(details, key).into(),
        None => 0,
    }
}

/// Whether the details of this index are of a key.
#[inline(always)]
fn has_key(number: u32, key: &FlowKey) -> bool {
    let [a, b, c, d] = key.addresses();
    let Some(details) = DETAILS.get_ptr(number) else {
        return false;
    };
    // SAFETY: a value of the map. Loads are volatile, because other CPUs store there too.
    unsafe {
        let addresses = (&raw const (*details).addresses).cast::<u64>();
        let ports = (&raw const (*details).ports).read_volatile();
        let owner = (&raw const (*details).owner).read_volatile();
        addresses.read_volatile() == a
            && addresses.add(1).read_volatile() == b
            && addresses.add(2).read_volatile() == c
            && addresses.add(3).read_volatile() == d
            && ports == key.ports() as u32
            && table::is_of(owner, key)
            && (owner & TAGGED == 0 || vlans(number) == key.packed_vlans())
    }
}

/// No record, or no details.
const NOBODY: u32 = Present::NOBODY;

/// [`table::present`]: the record, or [`NOBODY`]; 1 in the high half if there are twins.
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

/// Takes free details for a flow of this CPU; their index, or [`NOBODY`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_take() -> u64 {
    let Some(shelf) = SHELF.get_ptr_mut(0) else {
        return NOBODY.into();
    };
    // SAFETY: this CPU's, with bottom halves off.
    let taken = pool::take(&Table, unsafe { &mut *shelf });
    taken.unwrap_or(NOBODY).into()
}

/// Begins to load the details that the next flow takes: memory then has them when it comes.
#[inline(always)]
pub fn expect_details() {
    if let Some(shelf) = SHELF.get_ptr_mut(0) {
        // SAFETY: this CPU's, with bottom halves off.
        Pool::next(&Table, pool::next(unsafe { &*shelf }));
    }
}

/// Gives details back.
#[inline(always)]
pub fn give(details: u32) {
    table_give(details);
}

/// [`give`].
#[unsafe(no_mangle)]
#[inline(never)]
extern "C" fn table_give(details: u32) -> u64 {
    if let Some(shelf) = SHELF.get_ptr_mut(0) {
        // SAFETY: as above.
        pool::give(&Table, unsafe { &mut *shelf }, details);
    }
    0
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

impl Hot {
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
            self.word_place()
                .cast::<u32>()
                .add(LOW)
                .write_volatile(now as u32)
        };
    }

    /// Ends that the flow is [starting](Seen::is_starting), now that `created` is right.
    #[inline(always)]
    pub fn started(self) {
        // SAFETY: as above.
        unsafe { atomic::and(self.word_place().cast::<u32>().add(1 - LOW), Word::STARTED) };
    }

    /// Ends that the flow is [posted](Seen::is_posted): it has been taken out of the inbox.
    #[inline(always)]
    pub fn delivered(self) {
        // SAFETY: as above.
        unsafe {
            atomic::and(
                self.word_place().cast::<u32>().add(1 - LOW),
                Word::DELIVERED,
            )
        };
    }

    /// Swaps the word of the flow of a key; `Err` if it is not `old`, and `None` if the record is
    /// another flow's.
    #[inline(always)]
    pub fn change(self, key: &FlowKey, old: Word, new: Word) -> Option<Result<Word, Word>> {
        table::change(&Table, self, key, old, new)
    }

    /// Ends the flow, if it is as it was when this was decided on. Only for the CPU on whose wheel it
    /// stands, which must then [`remove`](At::remove) it.
    #[inline(always)]
    pub fn kill(self, decided_on: Word) -> bool {
        table::kill(&Table, self, decided_on)
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
            let place = self.positions_place();
            [place.read_volatile(), place.add(1).read_volatile()]
        }
    }

    /// Notes how far one side has sent.
    #[inline(always)]
    pub fn set_position(self, direction: Direction, position: u32) {
        // SAFETY: as in `touch`.
        unsafe {
            let place = self.positions_place();
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
    pub fn count(self, direction: Direction, packets: u16, bytes: u32) {
        let Some(account) = account_place(self.index()) else {
            return;
        };
        // SAFETY: within the value, aligned to 8; all access is atomic.
        unsafe {
            let side = account.add(2 * bit(direction as u64) as usize);
            atomic::add(side, packets.into());
            atomic::add(side.add(1), bytes.into());
        }
    }

    /// The index of the details that the record names.
    #[inline(always)]
    pub fn details(self) -> u32 {
        // SAFETY: as in `touch`.
        unsafe { self.details_place().read_volatile() }
    }

    #[inline(always)]
    fn slot(self) -> usize {
        bit(self.1.into()) as usize
    }

    #[inline(always)]
    fn tag_place(self) -> *mut u64 {
        // SAFETY: a line has as many of each.
        unsafe { (&raw mut (*self.0).tags).cast::<u64>().add(self.slot()) }
    }

    #[inline(always)]
    fn word_place(self) -> *mut u64 {
        // SAFETY: as above; a `Word` is a `u64`.
        unsafe { (&raw mut (*self.0).words).cast::<u64>().add(self.slot()) }
    }

    #[inline(always)]
    fn positions_place(self) -> *mut u32 {
        // SAFETY: as above.
        unsafe {
            (&raw mut (*self.0).positions)
                .cast::<u32>()
                .add(2 * self.slot())
        }
    }

    #[inline(always)]
    fn details_place(self) -> *mut u32 {
        // SAFETY: as above.
        unsafe { (&raw mut (*self.0).details).cast::<u32>().add(self.slot()) }
    }
}

/// [`Extras::vlans`], which means something where the owner is [`TAGGED`].
#[inline(always)]
fn vlans(details: u32) -> u32 {
    match EXTRAS.get_ptr(details) {
        // SAFETY: a value of the map; volatile, because other CPUs store there too.
        Some(extras) => unsafe { (&raw const (*extras).vlans).read_volatile() },
        None => 0,
    }
}

/// Writes what the extras have of a new flow, where that is read.
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

/// Packets and bytes of the low side, and of the high one.
#[inline(always)]
fn account_place(index: u32) -> Option<*mut u64> {
    if config!(accounting) == 0 {
        return None;
    }
    ACCOUNTS.get_ptr_mut(index).map(|account| account.cast())
}

/// Begins to load the account of the flow that stands at home there, which most flows do: memory then has it when it is
/// asked for.
#[inline(always)]
pub fn expect_account(place: Place) {
    if let Some(account) = account_place(place.home) {
        // SAFETY: within the value, aligned to 8; what it says is not asked.
        unsafe { account.read_volatile() };
    }
}

impl At {
    /// Without the details.
    #[inline(always)]
    pub fn hot(self) -> Hot {
        self.hot
    }

    /// The index of the details.
    #[inline(always)]
    pub fn number(self) -> u32 {
        self.hot.details()
    }

    /// Whether the flow is of this key.
    #[inline(always)]
    pub fn has_key(self, key: &FlowKey) -> bool {
        Table.has_key(self.hot, key)
    }

    /// How long the flow may be idle, units.
    #[inline(always)]
    pub fn timeout(self, seen: Seen) -> u32 {
        timeout(self.rule(), seen)
    }

    /// The rule that the flow has met.
    #[inline(always)]
    pub fn rule(self) -> u16 {
        table::rule(self.owner())
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

    /// Makes the flow one of another rule, and of this first packet, if the details are still of one with its ports.
    #[inline(always)]
    pub fn begin_anew(self, rule: u16, outgoing: u32) {
        // SAFETY: as in `touch`; `ports` and `owner` are one aligned word.
        unsafe {
            let place = (&raw mut (*self.details).ports).cast::<u64>();
            let held = place.read_volatile();
            let at = 32 * (1 - LOW as u32);
            let owner = table::with_rule((held >> at) as u32, rule) & !OUTGOING | outgoing;
            let new = held & !(u64::from(u32::MAX) << at) | u64::from(owner) << at;
            atomic::compare_exchange(place, held, new);
        }
    }

    /// Makes the flow one of no rule. For the CPU on whose wheel it stands.
    #[inline(always)]
    pub fn clear_rule(self) {
        // SAFETY: as in `touch`.
        unsafe {
            (&raw mut (*self.details).owner).write_volatile(table::without_rule(self.owner()))
        };
    }

    /// The CPU on whose wheel the flow stands.
    #[inline(always)]
    pub fn cpu(self) -> u32 {
        table::cpu(self.owner())
    }

    #[inline(always)]
    fn owner(self) -> u32 {
        // SAFETY: as in `touch`.
        unsafe { (&raw const (*self.details).owner).read_volatile() }
    }

    /// Writes what was counted: packets and bytes of the low side, and of the high one.
    ///
    /// # Safety
    ///
    /// `place` is valid for four writes, and nobody else's.
    #[inline(always)]
    pub unsafe fn report_account(self, place: *mut u64) {
        let account = account_place(self.index());
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
        if let Some(account) = account_place(self.index()) {
            for number in 0..4 {
                // SAFETY: as above.
                unsafe { atomic::swap(account.add(number), 0) };
            }
        }
    }

    /// Frees the record of a flow that this CPU has killed, and that is yet to be [counted out](uncount).
    #[inline(always)]
    pub fn remove(self) {
        give(self.free());
    }

    /// The same; its details are yet to be [given](give) back.
    #[inline(always)]
    pub fn free(self) -> u32 {
        let number = self.number();
        table::remove(&Table, self.hot, self.index());
        number
    }

    /// The flow's key.
    #[inline(always)]
    pub fn key(self) -> FlowKey {
        // SAFETY: as in `touch`.
        unsafe {
            let addresses = (&raw const (*self.details).addresses).read_volatile();
            let ports = (&raw const (*self.details).ports).read_volatile();
            let owner = self.owner();
            let vlans = match owner & TAGGED {
                0 => 0,
                _ => vlans(self.number()),
            };
            table::key(addresses, ports, owner, vlans)
        }
    }

    /// Whether the first packet of the flow went out.
    #[inline(always)]
    pub fn is_outgoing(self) -> bool {
        self.owner() & OUTGOING != 0
    }

    /// Where packets of a side are counted, and low bits of the clock when one was.
    #[inline(always)]
    pub fn point(self, direction: Direction) -> (Point, u16) {
        let Some(extras) = EXTRAS.get_ptr(self.number()) else {
            return (Point::NONE, 0);
        };
        let side = bit(direction as u64) as usize;
        // SAFETY: as in `touch`; there are two of each.
        unsafe {
            let point = (&raw const (*extras).points).cast::<u16>().add(side);
            let counted = (&raw const (*extras).counted).cast::<u16>().add(side);
            (Point(point.read_volatile()), counted.read_volatile())
        }
    }

    /// Notes that a packet of a side is counted there.
    #[inline(always)]
    pub fn set_point(self, direction: Direction, point: Point, now: u64) {
        let Some(extras) = EXTRAS.get_ptr_mut(self.number()) else {
            return;
        };
        let extras: *mut Extras = extras;
        let side = bit(direction as u64) as usize;
        // SAFETY: as above.
        unsafe {
            let counted = (&raw mut (*extras).counted).cast::<u16>().add(side);
            counted.write_volatile(now as u16);
            let place = (&raw mut (*extras).points).cast::<u16>().add(side);
            if place.read_volatile() != point.0 {
                place.write_volatile(point.0);
            }
        }
    }

    /// Whether the record holds a flow that stands on this CPU's wheel.
    #[inline(always)]
    pub fn is_ours(self) -> bool {
        table::holds_flow(Table.tag(self.hot)) && self.cpu() == clock::cpu() & 0xfff
    }

    /// Loads what the visits of a flow that stands first in a list, and of those behind it, wait for: of this one its home,
    /// of the next its record, of the one behind that its details. Each says where that of the next turn is, so nothing here
    /// waits for anything else that is loaded here.
    #[inline(always)]
    pub fn fetch(self) {
        let distance = table::distance(Table.tag(self.hot));
        if let Some(home) = Table.at(self.index().wrapping_sub(distance)) {
            Table.hops(home);
        }
        if let Some(next) = self.next().as_flow().and_then(of) {
            next.word();
            if let Some(behind) = next.next().as_flow() {
                Pool::next(&Table, behind);
            }
        }
    }

    /// What follows in the inbox.
    #[inline(always)]
    pub fn inbox(self) -> Link {
        match EXTRAS.get_ptr(self.number()) {
            // SAFETY: as in `touch`.
            Some(extras) => unsafe { (&raw const (*extras).inbox).read_volatile() },
            None => Link::NONE,
        }
    }

    /// Sets [`inbox`](Self::inbox). For whoever has posted the flow.
    #[inline(always)]
    pub fn set_inbox(self, link: Link) {
        let Some(extras) = EXTRAS.get_ptr_mut(self.number()) else {
            return;
        };
        let extras: *mut Extras = extras;
        // SAFETY: as in `touch`.
        unsafe { (&raw mut (*extras).inbox).write_volatile(link) }
    }
}

/// Loads and stores of one of the details.
macro_rules! field {
    ($(#[doc = $get:literal])+ $name:ident, $(#[doc = $set:literal])+ $set_name:ident, $type:ty) => {
        $(#[doc = $get])+
        #[inline(always)]
        pub fn $name(self) -> $type {
            // SAFETY: details are valid memory while the program runs. Volatile, because other CPUs store there too.
            unsafe { (&raw const (*self.details).$name).read_volatile() }
        }

        $(#[doc = $set])+
        #[inline(always)]
        pub fn $set_name(self, value: $type) {
            // SAFETY: as above.
            unsafe { (&raw mut (*self.details).$name).write_volatile(value) }
        }
    };
}

impl At {
    field!(
        /// Low 32 bits of the clock at the flow's first packet.
        created,
        /// Sets [`created`](Self::created).
        set_created,
        u32
    );
    field!(
        /// The number that is [in doubt](twheel_common::state::Known::doubt).
        doubt,
        /// Sets [`doubt`](Self::doubt).
        set_doubt,
        u32
    );
    field!(
        /// What follows in the slot. For the CPU on whose wheel the flow stands, as all links are.
        next,
        /// Sets [`next`](Self::next).
        set_next,
        Link
    );
    field!(
        /// What comes before in the slot.
        prev,
        /// Sets [`prev`](Self::prev).
        set_prev,
        Link
    );

    /// By which way one of its sides sends.
    #[inline(always)]
    pub fn way(self) -> SideWay {
        // SAFETY: as in `touch`.
        SideWay(unsafe { (&raw const (*self.details).way).read_volatile() })
    }

    /// Sets [`way`](Self::way).
    #[inline(always)]
    pub fn set_way(self, way: SideWay) {
        // SAFETY: as in `touch`.
        unsafe { (&raw mut (*self.details).way).write_volatile(way.0) }
    }
}

/// The array of records.
struct Table;

/// Every access is to a record: valid memory, aligned to its size, while the program runs. Loads and
/// stores are volatile, because other CPUs store there too.
impl Records for Table {
    type At = Hot;

    #[inline(always)]
    fn at(&self, index: u32) -> Option<Hot> {
        FLOWS.get_ptr_mut(index / LINE).map(|line| Hot(line, index))
    }

    #[inline(always)]
    fn beside(&self, first: Hot, distance: u32) -> Hot {
        Hot(first.0, first.1 | distance)
    }

    #[inline(always)]
    fn tag(&self, at: Hot) -> u64 {
        // SAFETY: see above.
        unsafe { at.tag_place().read_volatile() }
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
        // SAFETY: see above.
        Word(unsafe { at.word_place().read_volatile() })
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
        // SAFETY: see above.
        unsafe { (&raw const (*at.0).hops).read_volatile() }
    }

    #[inline(always)]
    fn announce(&self, at: Hot, bits: u64) -> u64 {
        // SAFETY: see above.
        unsafe { atomic::or_64(&raw mut (*at.0).hops, bits) }
    }

    #[inline(always)]
    fn renounce(&self, at: Hot, bits: u64) {
        // SAFETY: see above.
        unsafe { atomic::and_64(&raw mut (*at.0).hops, !bits) };
    }

    #[inline(always)]
    fn has_key(&self, at: Hot, key: &FlowKey) -> bool {
        has_key(at.details(), key)
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
        let flow = At { hot: at, details };
        at.set_positions(begins.positions);
        flow.set_created(begins.now as u32);
        flow.set_doubt(0);
        flow.set_way(begins.way);
        fill_extras(number, key);
        flow.forget_account();
        rto::forget(flow.hot());
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

impl Pool for Table {
    #[inline(always)]
    fn next(&self, details: u32) -> Link {
        match DETAILS.get_ptr(details) {
            // SAFETY: a value of the map; volatile, because other CPUs store there too.
            Some(details) => unsafe { (&raw const (*details).next).read_volatile() },
            None => Link::NONE,
        }
    }

    #[inline(always)]
    fn set_next(&self, details: u32, next: Link) {
        if let Some(details) = DETAILS.get_ptr_mut(details) {
            // SAFETY: as above.
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
        Records::repeat(self, turns, turn);
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
