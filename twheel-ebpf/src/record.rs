//! Handles to the records of flows: where records lie in the maps, and loads and stores of their
//! fields.
//!
//! A handle stays valid memory for as long as the program runs, but once the flow is removed, the
//! record may be given to another flow at once. Hence the rules of `twheel_common::table`: a late
//! stamp makes another flow at most younger, that of the record or of the details, and everything else
//! that CPUs share changes by compare-and-swap against a generation that no other flow has.

use twheel_common::{
    flow::Word,
    key::{Direction, FlowKey},
    numbers::Positions,
    offload::MARKS,
    point::Point,
    seen::Seen,
    table::{self, Details, Extras, LINE, Line, OUTGOING, TAGGED},
    way::SideWay,
    wheel::Link,
};

use crate::{
    atomic, clock, config,
    maps::{ACCOUNTS, DETAILS, EXTRAS, FLOWS},
    offload, rule, updates,
    verifier::bit,
};

/// Which half of a word in memory is the low one.
const LOW: usize = if cfg!(target_endian = "big") { 1 } else { 0 };

/// A record of the table: its line, and its index. This is all that a packet of a known flow needs.
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

/// The record of this index, whatever it holds.
#[inline(always)]
pub fn hot(index: u32) -> Option<Hot> {
    FLOWS.get_ptr_mut(index / LINE).map(|line| Hot(line, index))
}

/// The record of this index, and the details that it names.
#[inline(always)]
pub fn at(index: u32) -> Option<At> {
    let hot = hot(index)?;
    let details = DETAILS.get_ptr_mut(hot.details())?;
    Some(At { hot, details })
}

/// The flow that has these details.
#[inline(always)]
pub fn with_details(number: u32) -> Option<At> {
    let details = DETAILS.get_ptr_mut(number)?;
    // SAFETY: a value of the map. Volatile, because other CPUs store there too.
    let index = unsafe { (&raw const (*details).record).read_volatile() };
    Some(At {
        hot: hot(index)?,
        details,
    })
}

/// The next pointer of these details, in their slot or among the free details.
#[inline(always)]
pub(crate) fn next_of(number: u32) -> Link {
    match DETAILS.get_ptr(number) {
        // SAFETY: a value of the map; volatile, because other CPUs store there too.
        Some(details) => unsafe { (&raw const (*details).next).read_volatile() },
        None => Link::NONE,
    }
}

/// Whether the details of this index have this key.
#[inline(always)]
pub(crate) fn has_key(number: u32, key: &FlowKey) -> bool {
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

impl Hot {
    /// Time, generation and state bits.
    #[inline(always)]
    pub fn word(self) -> Word {
        // SAFETY: as in `touch`.
        Word(unsafe { self.word_place().read_volatile() })
    }

    /// Which flow the record holds, if any: [`table`] describes the bits.
    #[inline(always)]
    pub fn tag(self) -> u64 {
        // SAFETY: as in `touch`.
        unsafe { self.tag_place().read_volatile() }
    }

    /// Bitmap of the records that hold flows whose home is the record's line.
    #[inline(always)]
    pub fn hops(self) -> u64 {
        // SAFETY: as in `touch`.
        unsafe { self.hops_place().read_volatile() }
    }

    /// Notes a packet at `now`, which is younger than the stamp that was read, or as young.
    #[inline(always)]
    pub fn touch(self, now: u64) {
        // SAFETY: a record is valid memory while the program runs; the module's documentation says
        // what happens if the flow is removed meanwhile. Volatile, because other CPUs store there
        // too.
        unsafe { self.stamp_place().write_volatile(now as u32) };
    }

    /// Clears [starting](Seen::is_starting), now that `created` is right.
    #[inline(always)]
    pub fn started(self) {
        // SAFETY: as above.
        unsafe { atomic::and(self.word_place().cast::<u32>().add(1 - LOW), Word::STARTED) };
    }

    /// Clears [posted](Seen::is_posted): the flow has been taken out of the inbox.
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

    /// The index of the record.
    #[inline(always)]
    pub fn index(self) -> u32 {
        self.1
    }

    /// The next sequence number of each side.
    #[inline(always)]
    pub fn positions(self) -> Positions {
        // SAFETY: as in `touch`.
        unsafe {
            let place = self.positions_place();
            [place.read_volatile(), place.add(1).read_volatile()]
        }
    }

    /// Notes the next sequence number of one side.
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

    /// Notes the next sequence numbers of both sides.
    #[inline(always)]
    pub fn set_positions(self, [low, high]: Positions) {
        self.set_position(Direction::FromLow, low);
        self.set_position(Direction::FromHigh, high);
    }

    /// Counts a packet, if packets are counted. (One that comes while the flow ends may be counted
    /// for the next flow in the record.)
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
        unsafe { self.details_place().read_volatile() & !MARKS }
    }

    #[inline(always)]
    fn slot(self) -> usize {
        bit(self.1.into()) as usize
    }

    #[inline(always)]
    pub(crate) fn tag_place(self) -> *mut u64 {
        // SAFETY: a line has as many of each field.
        unsafe { (&raw mut (*self.0).tags).cast::<u64>().add(self.slot()) }
    }

    #[inline(always)]
    pub(crate) fn word_place(self) -> *mut u64 {
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
    pub(crate) fn stamp_place(self) -> *mut u32 {
        // SAFETY: the word's half.
        unsafe { self.word_place().cast::<u32>().add(LOW) }
    }

    #[inline(always)]
    pub(crate) fn details_place(self) -> *mut u32 {
        // SAFETY: as above.
        unsafe { (&raw mut (*self.0).details).cast::<u32>().add(self.slot()) }
    }

    #[inline(always)]
    pub(crate) fn hops_place(self) -> *mut u64 {
        // SAFETY: the record's line.
        unsafe { &raw mut (*self.0).hops }
    }

    /// The record that lies so many (0 or 1) behind this one, which is the first of its line.
    #[inline(always)]
    pub(crate) fn beside(self, distance: u32) -> Self {
        Self(self.0, self.1 | distance)
    }
}

/// [`Extras::vlans`], which is meaningful if the owner is [`TAGGED`].
#[inline(always)]
fn vlans(details: u32) -> u32 {
    match EXTRAS.get_ptr(details) {
        // SAFETY: a value of the map; volatile, because other CPUs store there too.
        Some(extras) => unsafe { (&raw const (*extras).vlans).read_volatile() },
        None => 0,
    }
}

/// The account of a record: packets and bytes of the low side, then of the high one.
#[inline(always)]
pub(crate) fn account_place(index: u32) -> Option<*mut u64> {
    if config!(accounting) == 0 {
        return None;
    }
    ACCOUNTS.get_ptr_mut(index).map(|account| account.cast())
}

impl At {
    /// A record, and the details that it names.
    #[inline(always)]
    pub(crate) fn new(hot: Hot, details: *mut Details) -> Self {
        Self { hot, details }
    }

    /// The record without the details.
    #[inline(always)]
    pub fn hot(self) -> Hot {
        self.hot
    }

    /// The index of the details.
    #[inline(always)]
    pub fn number(self) -> u32 {
        self.hot.details()
    }

    /// Whether the flow has this key.
    #[inline(always)]
    pub fn has_key(self, key: &FlowKey) -> bool {
        has_key(self.number(), key)
    }

    /// How long the flow may be idle, in units.
    #[inline(always)]
    pub fn timeout(self, seen: Seen) -> u32 {
        match config!(offload) {
            0 => rule::timeout(self.rule(), seen),
            _ => offload::offload_timeout(self.index(), seen.0) as u32,
        }
    }

    /// The flow's rule.
    #[inline(always)]
    pub fn rule(self) -> u16 {
        table::rule(self.owner())
    }

    /// Gives the flow another rule, and whether its first packet was `outgoing`, if the details
    /// still belong to a flow with its ports.
    #[inline(always)]
    pub fn begin_anew(self, rule: u16, outgoing: u32) {
        self.change_owner(|owner| table::with_rule(owner, rule) & !OUTGOING | outgoing);
    }

    /// Gives the flow another rule, unless another CPU does.
    #[inline(always)]
    pub fn set_rule(self, rule: u16) {
        self.change_owner(|owner| table::with_rule(owner, rule));
    }

    #[inline(always)]
    fn change_owner(self, change: impl Fn(u32) -> u32) {
        // SAFETY: as in `touch`; `ports` and `owner` are one aligned word.
        unsafe {
            let place = (&raw mut (*self.details).ports).cast::<u64>();
            let held = place.read_volatile();
            let at = 32 * (1 - LOW as u32);
            let owner = change((held >> at) as u32);
            let new = held & !(u64::from(u32::MAX) << at) | u64::from(owner) << at;
            atomic::compare_exchange(place, held, new);
        }
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

    /// Writes what was counted: packets and bytes of the low side, then of the high one.
    ///
    /// # Safety
    ///
    /// `place` is valid for four writes, and no other code accesses it.
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

    /// Clears what was counted.
    #[inline(always)]
    pub fn clear_account(self) {
        if let Some(account) = account_place(self.index()) {
            for number in 0..4 {
                // SAFETY: as above.
                unsafe { atomic::swap(account.add(number), 0) };
            }
        }
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

    /// The observation point of a side's packets, and low bits of the time when one was counted.
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

    /// Notes that a packet of a side is counted at this observation point.
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
        table::holds_flow(self.tag()) && self.cpu() == clock::cpu() & 0xfff
    }

    /// Loads what the timer visits of the flow at the head of a list, and of the flows behind it,
    /// will wait for: the home of this flow, the record of the next flow, and the details of the
    /// flow behind that. Each of these says where the next visit's load is, so no load here waits
    /// for another.
    #[inline(always)]
    pub fn fetch(self) {
        updates::fetch(self);
        let distance = table::distance(self.tag());
        if let Some(home) = hot(self.index().wrapping_sub(distance)) {
            home.hops();
        }
        if let Some(next) = self.next().as_flow().and_then(with_details) {
            next.word();
            if let Some(behind) = next.next().as_flow() {
                next_of(behind);
            }
        }
    }

    /// The next pointer in the inbox.
    #[inline(always)]
    pub fn inbox(self) -> Link {
        match EXTRAS.get_ptr(self.number()) {
            // SAFETY: as in `touch`.
            Some(extras) => unsafe { (&raw const (*extras).inbox).read_volatile() },
            None => Link::NONE,
        }
    }

    /// Sets [`inbox`](Self::inbox). Only for the CPU that has posted the flow.
    #[inline(always)]
    pub fn set_inbox(self, link: Link) {
        let Some(extras) = EXTRAS.get_ptr_mut(self.number()) else {
            return;
        };
        let extras: *mut Extras = extras;
        // SAFETY: as in `touch`.
        unsafe { (&raw mut (*extras).inbox).write_volatile(link) }
    }

    /// Where the flow is seen, as far as that is known.
    #[inline(always)]
    pub fn seen_at(self, seen: Seen) -> Point {
        match config!(watched) {
            0 => Point::NONE,
            _ => {
                let point = |direction| self.point(direction).0;
                Point::of_flow(
                    [point(Direction::FromLow), point(Direction::FromHigh)],
                    seen,
                )
            }
        }
    }

    /// The observation point of the initiator's packets, if there is one.
    #[inline(always)]
    pub fn initiator_point(self, seen: Seen) -> Point {
        match config!(watched) {
            0 => Point::NONE,
            _ => self.point(seen.initiator()).0,
        }
    }
}

/// Generates the load and the store of one field of the details.
macro_rules! field {
    ($(#[doc = $get:literal])+ $name:ident, $(#[doc = $set:literal])+ $set_name:ident, $type:ty) => {
        $(#[doc = $get])+
        #[inline(always)]
        pub fn $name(self) -> $type {
            // SAFETY: details are valid memory while the program runs. Volatile, because other CPUs
            // store there too.
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
        /// The next pointer in the slot. Only for the CPU on whose wheel the flow stands, as for
        /// all next pointers of the wheel.
        next,
        /// Sets [`next`](Self::next).
        set_next,
        Link
    );
    field!(
        /// The pointer to what comes before in the slot.
        prev,
        /// Sets [`prev`](Self::prev).
        set_prev,
        Link
    );

    /// The way by which one of the sides sends.
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
