//! The flow table: a hash table of records of half a cache line each, which all CPUs use without a
//! lock.
//!
//! A record has what a packet of a known flow needs. The rest of the flow, including its key, is in
//! [`Details`] at an index of their own, which the record stores. In place of the key the record
//! has a *fingerprint* of it.
//!
//! Two records share a [`Line`]. A flow's *home* is the line that its hash names. The flow is
//! stored there or in one of the records after it, up to [`WINDOW`]: in a record that was free when
//! the flow was entered. Each line keeps, besides its flows, a bitmap for the flows whose home it
//! is (`hops`): bit *d* says that the record *d* further on holds such a flow (Herlihy, Shavit &
//! Tzafrir, *Hopscotch Hashing*, DISC 2008, but records never move, because other structures point
//! at them). So a packet reads the home and, if its flow is not there, only the record where it is.
//! A packet of no known flow mostly reads only the home.
//!
//! # Protocol
//!
//! A record goes through these states; in brackets the field that shows it:
//!
//! 1. *free* (`tag` = 0). Any CPU claims it by swapping `tag` from 0.
//! 2. *busy* (`tag` has [`BUSY`]). Only the claiming CPU writes. If the key is in the table by now,
//!    it releases the record. Else it writes the key and the rest of the details, and then a new
//!    generation into `word`, which was dead until then: so a word that is alive always belongs to
//!    the details that the record names. Then it announces the flow: it sets its bit in the home's
//!    `hops` by an atomic OR that returns the bits before. All CPUs that enter the same key meet in
//!    that one word. So of any two of them one is second and sees the first: it finds the key among
//!    the bits that were set before its own, and withdraws.
//! 3. *live* (`tag` is the key's fingerprint and the distance from home). Packets find it. They
//!    store stamps, and change the state bits by compare-and-swap of `word`.
//! 4. *dead* (`word` says so). The CPU on whose wheel the flow is swaps `word` from the value that
//!    it decided on; if the flow was touched or changed since, it lives on. A dead flow never comes
//!    back.
//! 5. The same CPU clears the bit in the home's `hops`. Then `tag` becomes 0, and the details may
//!    be given to another flow.
//!
//! The generation belongs to the record and counts its flows, so a compare-and-swap by a CPU that
//! still means an earlier flow fails.
//!
//! # Fingerprints
//!
//! Packets of a known flow do not read the key. If two flows of one home have the same fingerprint,
//! the CPU that enters the second marks both as [`TWIN`]s before the second can be found; for twins
//! a packet does compare the key. So a packet of a flow in the table never finds another flow. A
//! packet of a flow that is not in the table may find a flow with the same fingerprint. If the
//! packet says nothing new, it only makes that flow younger. Else the key is compared before
//! anything is changed, and the packet turns out to belong to no flow of the table.
//!
//! The memory is behind the trait [`Records`], so that the programs in the kernel, the tests and a
//! model checker run the same code.

use crate::{
    bits, flow::Word, key::FlowKey, numbers::Positions, record::DISTANCE, seen::Seen, way::SideWay,
};

pub use crate::{
    hash::{Hash, Place},
    record::{
        BUSY, Details, Extras, LINE, Line, OUTGOING, TAGGED, TWIN, WINDOW, cpu, distance,
        holds_flow, is_of, key, rule, with_rule, without_rule,
    },
    snapshot::{Changed, Reads, Snapshot, read},
};

/// The memory of a table.
///
/// What is called a load or a store here needs no order and is not torn. Every other access is
/// atomic and fully ordered: all accesses before it in program order are visible before all
/// accesses after it.
pub trait Records {
    /// A reference to a record.
    type At: Copy;

    /// The record of an index; `None` beyond the table.
    fn at(&self, index: u32) -> Option<Self::At>;
    /// The record `distance` (0 or 1) after `first`, which is the first of its line.
    fn beside(&self, first: Self::At, distance: u32) -> Self::At;

    /// Loads `tag`.
    fn tag(&self, at: Self::At) -> u64;
    /// Swaps `tag` from 0. Returns whether that succeeded.
    fn claim(&self, at: Self::At, tag: u64) -> bool;
    /// Swaps `tag` from one value to another.
    fn swap_tag(&self, at: Self::At, old: u64, new: u64);
    /// Sets bits of `tag`. Returns the value before.
    fn set_in_tag(&self, at: Self::At, bits: u64) -> u64;
    /// Clears bits of `tag`.
    fn clear_in_tag(&self, at: Self::At, bits: u64);
    /// Stores 0 in `tag` of a record that nobody else can find. For a record that was announced,
    /// `renounce` has ordered all earlier accesses, and nothing later depends on when others see
    /// the store.
    fn free(&self, at: Self::At);

    /// Loads `word`.
    fn word(&self, at: Self::At) -> Word;
    /// Stores `word`; atomic and ordered.
    fn set_word(&self, at: Self::At, word: Word);
    /// Swaps `word` if it is `old`. Returns the value before.
    fn change(&self, at: Self::At, old: Word, new: Word) -> Word;

    /// Loads `hops` of the record's line.
    fn hops(&self, at: Self::At) -> u64;
    /// Sets bits of `hops`. Returns the value before.
    fn announce(&self, at: Self::At, bits: u64) -> u64;
    /// Clears bits of `hops`.
    fn renounce(&self, at: Self::At, bits: u64);

    /// Whether the details that the record names have this key; loads.
    fn has_key(&self, at: Self::At, key: &FlowKey) -> bool;
    /// The same for a [`TWIN`], when a packet looks at it or a flow is entered. The data plane has
    /// this in a global function, which the verifier checks once.
    #[inline(always)]
    fn is_of(&self, at: Self::At, key: &FlowKey) -> bool {
        self.has_key(at, key)
    }
    /// Stores the index of the details, and in the details the key and the rest of the flow's first
    /// values.
    fn fill(&self, at: Self::At, key: &FlowKey, begins: &Begins);

    /// Calls [`present`].
    #[inline(always)]
    fn present(&self, place: Place, hops: u64, key: &FlowKey) -> Present
    where
        Self: Sized,
    {
        present(self, place, hops, key)
    }

    /// Calls `turn` with 0, 1, … until it returns `true`, at most `turns` times.
    fn repeat(&self, turns: u32, turn: impl FnMut(u32) -> bool);
}

/// Finds the record of the live flow of this key.
///
/// May miss a flow that another CPU is entering or has just entered. May return a dead flow, and,
/// if no flow of this key is in the table, a flow of another key.
#[inline(always)]
pub fn find<R: Records>(records: &R, place: Place, key: &FlowKey) -> Option<R::At> {
    let home = records.at(place.home)?;
    // Whether it is the first or the second record of the line is as good as random: the processor
    // would predict a branch wrong half the time.
    let differs = (records.tag(home) ^ place.fingerprint) & !TWIN;
    let distance = (differs.wrapping_add(u64::MAX >> 1) >> 63) as u32;
    let at = records.beside(home, distance);
    if is_live(records, at, tag(place.fingerprint, distance), key) {
        return Some(at);
    }
    let mut hops = records.hops(home) & (!1 << distance);
    for _ in LINE..WINDOW {
        if hops == 0 {
            return None;
        }
        let distance = bits::lowest(hops);
        let at = records.at(place.home + distance)?;
        if is_live(records, at, tag(place.fingerprint, distance), key) {
            return Some(at);
        }
        hops &= hops - 1;
    }
    None
}

/// The tag of a live flow that is not a [`TWIN`].
#[inline(always)]
fn tag(fingerprint: u64, distance: u32) -> u64 {
    fingerprint | u64::from(distance) << DISTANCE
}

/// Whether the record holds a live flow with this tag. If the key's flow is in the table, it is
/// that one.
///
/// If another flow takes over the record at this moment, the result may be the wrong flow. A packet
/// then makes that flow younger; before it changes more, the key is compared at a time when this
/// cannot happen.
#[inline(always)]
fn is_live<R: Records>(records: &R, at: R::At, wanted: u64, key: &FlowKey) -> bool {
    let held = records.tag(at);
    (held ^ wanted) & !TWIN == 0 && (held & TWIN == 0 || records.is_of(at, key))
}

/// Result of [`insert`].
pub enum Inserted<At> {
    /// The flow is in this record, which has this index.
    New(At, u32),
    /// The flow was there already: another CPU was faster.
    Exists(At),
    /// No record of the flow's window is free.
    Full,
}

/// The first values of a flow.
#[derive(Clone, Copy, Debug)]
pub struct Begins {
    /// What its first packet says.
    pub seen: Seen,
    /// The time.
    pub now: u64,
    /// The CPU on whose wheel it is.
    pub cpu: u32,
    /// The rule that it meets.
    pub rule: u16,
    /// The next sequence number of each side.
    pub positions: Positions,
    /// The way by which one of its sides sends.
    pub way: SideWay,
    /// [`OUTGOING`] or 0.
    pub outgoing: u32,
    /// Index of free details, which belong to this CPU.
    pub details: u32,
}

/// Claims a free record for a flow of this place. Returns the record's distance from the flow's
/// home.
///
/// If both records of the home are taken, it claims one in the first empty line after it, so as to
/// take the home of as few other flows as possible. If no line is empty, it claims the first free
/// record.
#[inline(always)]
pub fn claim<R: Records>(records: &R, place: Place) -> Option<u32> {
    if let Some(distance) = claim_in(records, place, 0, false) {
        return Some(distance);
    }
    let mut claimed = None;
    records.repeat(2 * WINDOW / LINE, |turn| {
        let line = turn & (WINDOW / LINE - 1);
        claimed = claim_in(records, place, line * LINE, turn < WINDOW / LINE);
        claimed.is_some()
    });
    claimed
}

/// Claims a record of the line at this distance from the home; if `is_to_be_empty`, only in an
/// empty line.
#[inline(always)]
fn claim_in<R: Records>(
    records: &R,
    place: Place,
    distance: u32,
    is_to_be_empty: bool,
) -> Option<u32> {
    let first = records.at(place.home + distance)?;
    let second = records.beside(first, 1);
    let tags = [records.tag(first), records.tag(second)];
    if is_to_be_empty && (tags[0] | tags[1]) != 0 {
        return None;
    }
    let busy = |distance| tag(place.fingerprint, distance) | BUSY;
    if tags[0] == 0 && records.claim(first, busy(distance)) {
        return Some(distance);
    }
    if tags[1] == 0 && records.claim(second, busy(distance + 1)) {
        return Some(distance + 1);
    }
    None
}

/// Enters a flow. The details stay the caller's unless the flow is [new](Inserted::New).
#[inline(always)]
pub fn insert<R: Records>(
    records: &R,
    place: Place,
    key: &FlowKey,
    begins: &Begins,
) -> Inserted<R::At> {
    let Some(distance) = claim(records, place) else {
        return Inserted::Full;
    };
    let reserved = match reserve(records, place, distance, key) {
        Ok(reserved) => reserved,
        Err(inserted) => return inserted,
    };
    match write(records, place, distance, key, begins) {
        Some(before) => settle(records, place, reserved, key, before),
        None => Inserted::Full,
    }
}

/// A record that was claimed for a flow, after the first look.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reserved {
    /// Its distance from the flow's home.
    pub distance: u32,
    /// Whether flows of other keys have the same fingerprint.
    pub has_twins: bool,
}

/// The first look for the key, before any CPU can see the key in the claimed record. It is needed
/// because a bit that another CPU saw before setting its own may have been that of this record's
/// last flow: each of the two CPUs would then take the other's flow for the first.
///
/// Returns `Err` with the result of the insertion if the flow is not to be entered.
#[inline(always)]
pub fn reserve<R: Records>(
    records: &R,
    place: Place,
    distance: u32,
    key: &FlowKey,
) -> Result<Reserved, Inserted<R::At>> {
    let Some(home) = records.at(place.home) else {
        return Err(Inserted::Full);
    };
    let present = look(records, place, records.hops(home), key);
    if present.index == Present::NOBODY {
        return Ok(Reserved {
            distance,
            has_twins: present.has_twins,
        });
    }
    release(records, place.home + distance);
    Err(exists(records, present.index))
}

/// Releases a record that was claimed.
#[inline(always)]
pub fn release<R: Records>(records: &R, index: u32) {
    if let Some(at) = records.at(index) {
        records.free(at);
    }
}

/// Writes the flow into the record and announces it. Returns the bits that were announced before.
#[inline(always)]
pub fn write<R: Records>(
    records: &R,
    place: Place,
    distance: u32,
    key: &FlowKey,
    begins: &Begins,
) -> Option<u64> {
    let at = records.at(place.home + distance)?;
    let generation = records.word(at).generation().wrapping_add(1);
    records.fill(at, key, begins);
    records.set_word(at, Word::new(begins.now, generation, begins.seen));
    // The flow's own bit is not among them: it was cleared before the record became free.
    let home = records.at(place.home)?;
    Some(records.announce(home, 1 << distance))
}

/// The second look for the key, among the flows that were announced `before`. After it the flow is
/// live, or withdrawn.
#[inline(always)]
pub fn settle<R: Records>(
    records: &R,
    place: Place,
    reserved: Reserved,
    key: &FlowKey,
    before: u64,
) -> Inserted<R::At> {
    let Reserved {
        distance,
        has_twins,
    } = reserved;
    let index = place.home + distance;
    let present = look(records, place, before, key);
    let Some(at) = records.at(index) else {
        return Inserted::Full;
    };
    if present.index != Present::NOBODY {
        records.set_word(at, records.word(at).dead());
        if let Some(home) = records.at(place.home) {
            records.renounce(home, 1 << distance);
        }
        records.free(at);
        return exists(records, present.index);
    }
    if has_twins || present.has_twins {
        records.set_in_tag(at, TWIN);
    }
    // Not by a store: the CPU that enters a twin may have set a bit meanwhile.
    records.clear_in_tag(at, BUSY);
    Inserted::New(at, index)
}

#[inline(always)]
fn exists<R: Records>(records: &R, index: u32) -> Inserted<R::At> {
    match records.at(index) {
        Some(at) => Inserted::Exists(at),
        None => Inserted::Full,
    }
}

/// [`present`], but by the tags alone if none of them can be the key's, and if no more flows than
/// usual are outside their home.
#[inline(always)]
fn look<R: Records>(records: &R, place: Place, hops: u64, key: &FlowKey) -> Present {
    const USUAL: u32 = 6;
    let Some(home) = records.at(place.home) else {
        return Present::NOTHING;
    };
    let second = records.tag(records.beside(home, 1));
    let mut is_known = hops & 1 != 0 && has_fingerprint(records.tag(home), place, 0)
        || hops & 2 != 0 && has_fingerprint(second, place, 1);
    let mut left = hops & !3;
    for _ in 0..USUAL {
        if left == 0 {
            break;
        }
        let distance = bits::lowest(left);
        let Some(at) = records.at(place.home + distance) else {
            break;
        };
        is_known |= has_fingerprint(records.tag(at), place, distance);
        left &= left - 1;
    }
    if is_known || left != 0 {
        return records.present(place, hops, key);
    }
    Present::NOTHING
}

/// Whether this is the tag of a flow of the place at this distance, live or still being entered.
#[inline(always)]
pub fn has_fingerprint(held: u64, place: Place, distance: u32) -> bool {
    (held ^ tag(place.fingerprint, distance)) & !(TWIN | BUSY) == 0
}

/// Result of [`present`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Present {
    /// The record of the key's flow, or [`Present::NOBODY`].
    pub index: u32,
    /// Whether flows of other keys have the same fingerprint.
    pub has_twins: bool,
}

impl Present {
    /// Index that means no record. (An `Option` leaves a register uninitialized, which the verifier
    /// rejects.)
    pub const NOBODY: u32 = u32::MAX;

    /// Nothing was found.
    const NOTHING: Self = Self {
        index: Self::NOBODY,
        has_twins: false,
    };
}

/// Finds the flow of a key, live or still being entered, if it is at one of these distances from
/// its home. Marks flows of other keys with the same fingerprint as twins.
#[inline(always)]
pub fn present<R: Records>(records: &R, place: Place, hops: u64, key: &FlowKey) -> Present {
    let mut left = hops;
    let mut present = Present::NOTHING;
    records.repeat(WINDOW, |_| {
        if left == 0 {
            return true;
        }
        let distance = bits::lowest(left);
        let index = place.home + distance;
        left &= left - 1;
        let Some(at) = records.at(index) else {
            return true;
        };
        if !has_fingerprint(records.tag(at), place, distance) {
            return false;
        }
        let is_same = records.is_of(at, key);
        // A dead flow does not count: it does not come back.
        if !is_alive(records, at) {
            return false;
        }
        if is_same {
            present.index = index;
        } else {
            present.has_twins = true;
            mark(records, at);
        }
        is_same
    });
    present
}

/// Marks a record as that of a [`TWIN`]. If another flow has taken it over meanwhile, its key is
/// compared needlessly.
#[inline(always)]
fn mark<R: Records>(records: &R, at: R::At) {
    if records.set_in_tag(at, TWIN) == 0 {
        // The record has become free, and no CPU has claimed it since.
        records.swap_tag(at, TWIN, 0);
    }
}

/// Whether the word is that of a live flow, read after all that was loaded before.
#[inline(always)]
fn is_alive<R: Records>(records: &R, at: R::At) -> bool {
    let word = records.word(at);
    !word.is_dead() && !records.change(at, word, word).is_dead()
}

/// Swaps the word of the flow of a key, in the record where it was found. Returns the new word;
/// `Err` with the present one if it is not `old`; `None` if the record belongs to another flow.
///
/// The key is compared after a swap that changes nothing, and so after the word was read. That is
/// enough because a CPU that gives the record to another flow first makes the word dead, and stores
/// the next word only after the key.
///
/// A flow that is still being entered is not queued, whatever `new` says: it may yet be withdrawn.
#[inline(always)]
pub fn change<R: Records>(
    records: &R,
    at: R::At,
    key: &FlowKey,
    old: Word,
    new: Word,
) -> Option<Result<Word, Word>> {
    let swap = |new| match records.change(at, old, new) {
        held if held == old => Ok(new),
        held => Err(held),
    };
    match swap(old) {
        Ok(_) if records.has_key(at, key) => {
            let posts = !old.seen().is_posted() && records.tag(at) & BUSY == 0;
            let seen = new.seen();
            let new = if old.seen().is_posted() || posts {
                new
            } else {
                Word::new(new.0, new.generation(), seen.delivered())
            };
            Some(swap(new))
        }
        Ok(_) => None,
        changed => Some(changed),
    }
}

/// Ends a flow if it is still as it was when this was decided. Only the CPU on whose wheel the flow
/// is may call this; it must then [`remove`] the flow.
///
/// A connection that is [starting](Seen::is_starting) is not ended: the CPU that began it still
/// writes to the record. Nor is a flow that is [queued](Seen::is_posted): its next pointer in the
/// inbox is in use.
#[inline(always)]
pub fn kill<R: Records>(records: &R, at: R::At, decided_on: Word) -> bool {
    !decided_on.seen().is_starting()
        && !decided_on.seen().is_posted()
        && records.change(at, decided_on, decided_on.dead()) == decided_on
}

/// Frees the record of a dead flow. For the CPU that has ended it; the details belong to that CPU
/// from then on.
#[inline(always)]
pub fn remove<R: Records>(records: &R, at: R::At, index: u32) {
    let distance = distance(records.tag(at));
    if let Some(home) = records.at(index.wrapping_sub(distance)) {
        records.renounce(home, 1 << distance);
    }
    records.free(at);
}
