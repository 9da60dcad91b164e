//! The flow table: a hash table of records of half a cache line each, open to all CPUs without a lock.
//!
//! A record has what a packet of a known flow needs; the rest of the flow, its key too, is in [`Details`] at an index
//! of their own, which the record names. In place of the key the record has a *fingerprint* of it.
//!
//! Two records share a [`Line`]. A flow's *home* is the line that its hash names; it stands there or in one of the records
//! behind it, in the first of [`WINDOW`] that was free when it came. Each line keeps, beside its flows, a
//! bitmap of its own as a home (`hops`): bit *d* says that the record *d* behind holds a flow whose home
//! this is (Herlihy, Shavit & Tzafrir, *Hopscotch Hashing*, DISC 2008, without the moving: a record
//! is pointed at). So a packet reads the home and, where its flow does not stand there, just the
//! record where it does; and a packet of no flow mostly reads the home alone.
//!
//! # Protocol
//!
//! A record goes through these states; in brackets what says so:
//!
//! 1. *free* (`tag` = 0). Any CPU claims it by swapping `tag` from 0.
//! 2. *busy* (`tag` has [`BUSY`]). The claimer alone writes. If the key is in the table by now, it lets go.
//!    Else it writes the key and the rest of the details, then a new generation into `word`, which was dead until then:
//!    so a word that is alive is always that of the details that the record names. Then it announces the flow with its bit
//!    in the home's `hops`, by an atomic OR that returns the bits before. All CPUs that enter the same key meet in
//!    that one word, so for any two of them one is second, and sees the first: it finds the key among the
//!    bits that were before its own and withdraws.
//! 3. *live* (`tag` is the key's fingerprint and the distance from home). Packets find it. They store stamps, and change
//!    what was seen by compare-and-swap of `word`.
//! 4. *dead* (`word` says so). The CPU on whose wheel the flow stands swaps `word` from what it had
//!    decided on; a flow that was touched or changed since lives on. Nothing comes back from here.
//! 5. The same CPU takes the bit from the home's `hops`, then `tag` becomes 0, and the details can be another flow's.
//!
//! The generation is the record's own and counts its flows, so a compare-and-swap by somebody who
//! still means an earlier flow fails.
//!
//! # Fingerprints
//!
//! Packets of a known flow do not read the key. Of two flows of one home with the same fingerprint, whoever is second
//! marks both as [`TWIN`]s before it can be found: of those a packet does compare the key. So a packet of a flow in the table
//! never finds another. A packet of a flow that is not in the table may find one with the same fingerprint: if it says
//! nothing new it makes that flow younger, and else the key is compared before anything is changed, and the packet is
//! found to be of none.
//!
//! The memory is behind [`Records`], so that the programs in the kernel, the tests and a model checker
//! run this same code.

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
/// What is called a load or a store here needs no order and is not torn. Every other access is atomic
/// and fully ordered: whatever comes before it in the program is seen before whatever comes after it.
pub trait Records {
    /// A record.
    type At: Copy;

    /// The record of an index; `None` beyond the table.
    fn at(&self, index: u32) -> Option<Self::At>;
    /// The record that is so many behind the first of a line, of which this is that one. (0 or 1.)
    fn beside(&self, first: Self::At, distance: u32) -> Self::At;

    /// Loads `tag`.
    fn tag(&self, at: Self::At) -> u64;
    /// Swaps `tag` from 0.
    fn claim(&self, at: Self::At, tag: u64) -> bool;
    /// Swaps `tag` from one value to another.
    fn swap_tag(&self, at: Self::At, old: u64, new: u64);
    /// Sets bits of `tag`; what it was.
    fn set_in_tag(&self, at: Self::At, bits: u64) -> u64;
    /// Clears bits of `tag`.
    fn clear_in_tag(&self, at: Self::At, bits: u64);
    /// Stores 0 in `tag` of a record that was renounced: that has put in order what came before, and nothing later
    /// depends on who sees it when.
    fn free(&self, at: Self::At);

    /// Loads `word`.
    fn word(&self, at: Self::At) -> Word;
    /// Stores `word`; atomic and ordered.
    fn set_word(&self, at: Self::At, word: Word);
    /// Swaps `word` if it is `old`; what it was.
    fn change(&self, at: Self::At, old: Word, new: Word) -> Word;

    /// Loads `hops` of the record's line.
    fn hops(&self, at: Self::At) -> u64;
    /// Sets bits of it; what it was.
    fn announce(&self, at: Self::At, bits: u64) -> u64;
    /// Clears bits of it.
    fn renounce(&self, at: Self::At, bits: u64);

    /// Whether the details that the record names have this key; loads.
    fn has_key(&self, at: Self::At, key: &FlowKey) -> bool;
    /// The same of a [`TWIN`] that a packet looks at, or who enters a flow. The data plane has it in a function that the verifier goes through by
    /// itself.
    #[inline(always)]
    fn is_of(&self, at: Self::At, key: &FlowKey) -> bool {
        self.has_key(at, key)
    }
    /// Stores the index of the details, and in them the key and what else is the flow's at its beginning.
    fn fill(&self, at: Self::At, key: &FlowKey, begins: &Begins);

    /// [`present`].
    #[inline(always)]
    fn present(&self, place: Place, hops: u64, key: &FlowKey) -> Present
    where
        Self: Sized,
    {
        present(self, place, hops, key)
    }

    /// Calls `turn` with 0, 1, … until it says `true`, at most `turns` times.
    fn repeat(&self, turns: u32, turn: impl FnMut(u32) -> bool);
}

/// The record that a live flow of this key stands in.
///
/// May miss a flow that another CPU is entering or has just entered, and find one that is dead; and one of another key,
/// if none of this key is in the table.
#[inline(always)]
pub fn find<R: Records>(records: &R, place: Place, key: &FlowKey) -> Option<R::At> {
    let home = records.at(place.home)?;
    // In the first record of the line, or in the second? That is as good as random: a branch would be wrong half the time.
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

/// The tag of a live flow that is no [`TWIN`].
#[inline(always)]
fn tag(fingerprint: u64, distance: u32) -> u64 {
    fingerprint | u64::from(distance) << DISTANCE
}

/// Whether the record holds a live flow with this tag, which is of the key if it is of a flow in the table.
///
/// A record that changes hands meanwhile may be taken for the wrong flow. A packet then makes a stranger
/// younger; before it changes more than that, it asks for the key at a time when that cannot be.
#[inline(always)]
fn is_live<R: Records>(records: &R, at: R::At, wanted: u64, key: &FlowKey) -> bool {
    let held = records.tag(at);
    (held ^ wanted) & !TWIN == 0 && (held & TWIN == 0 || records.is_of(at, key))
}

/// What [`insert`] came to.
pub enum Inserted<At> {
    /// The flow stands in this record, of this index.
    New(At, u32),
    /// It was there: another CPU was faster.
    Exists(At),
    /// No record of its window is free.
    Full,
}

/// How a flow begins.
#[derive(Clone, Copy, Debug)]
pub struct Begins {
    /// What its first packet says.
    pub seen: Seen,
    /// When.
    pub now: u64,
    /// On which CPU.
    pub cpu: u32,
    /// The rule it meets.
    pub rule: u16,
    /// How far its sides have come.
    pub positions: Positions,
    /// By which way one of its sides sends.
    pub way: SideWay,
    /// [`OUTGOING`] or 0.
    pub outgoing: u32,
    /// Details that are this CPU's to give.
    pub details: u32,
}

/// Claims a free record for a flow of this place; how far behind its home.
///
/// Where its home is full, it goes into the first line behind it that is empty, so that it takes the home of as few others
/// as can be; then into the first that has room.
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

/// Claims a record of the line that is so far behind a home; if it is to be empty, only then.
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

/// Enters a flow. Its details stay the caller's unless it is [new](Inserted::New).
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
    /// How far it is behind its home.
    pub distance: u32,
    /// Whether there are flows of other keys with the same fingerprint.
    pub has_twins: bool,
}

/// The first look, before anybody can see the key in the record that was claimed for it. A bit that another CPU saw before
/// it set its own may have been that of this record's last flow; it would take this one for the first, and this one it.
///
/// Or what the insertion comes to, if the flow does not stand there after all.
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

/// Lets go of a record that was claimed.
#[inline(always)]
pub fn release<R: Records>(records: &R, index: u32) {
    if let Some(at) = records.at(index) {
        records.free(at);
    }
}

/// Writes the flow into the record, and announces it. What was announced before.
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
    // Its own bit is not among them: it was taken out before the record was free.
    let home = records.at(place.home)?;
    Some(records.announce(home, 1 << distance))
}

/// The second look, at what was announced `before`: the flow is live from here on, or withdrawn.
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
    // Not by a store: whoever is entering a twin may have marked this one.
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

/// [`present`]; by the tags alone where none of them is the key's, and no more flows than usual stand behind their home.
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

/// Whether a tag is that of a flow of the place at this distance, whether it is entered yet or not.
#[inline(always)]
fn has_fingerprint(held: u64, place: Place, distance: u32) -> bool {
    (held ^ tag(place.fingerprint, distance)) & !(TWIN | BUSY) == 0
}

/// What [`present`] has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Present {
    /// The record of the flow of the key, or [`Present::NOBODY`].
    pub index: u32,
    /// Whether there are flows of other keys with its fingerprint.
    pub has_twins: bool,
}

impl Present {
    /// The index of no record. (An `Option` leaves a register without a value, and the verifier minds.)
    pub const NOBODY: u32 = u32::MAX;

    /// Nothing was found.
    const NOTHING: Self = Self {
        index: Self::NOBODY,
        has_twins: false,
    };
}

/// The flow of a key, entered but not yet live perhaps, if it is at one of these distances from its home. Marks those of
/// other keys with the same fingerprint.
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
        // Dead does not count: it will not come back.
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

/// Marks a record as one of a [`TWIN`]. Whoever stands there by now has its key compared for nothing.
#[inline(always)]
fn mark<R: Records>(records: &R, at: R::At) {
    if records.set_in_tag(at, TWIN) == 0 {
        // It is free by now. Nobody has claimed it since.
        records.swap_tag(at, TWIN, 0);
    }
}

/// Whether the word is that of a flow that lives, later than all that was loaded before.
#[inline(always)]
fn is_alive<R: Records>(records: &R, at: R::At) -> bool {
    let word = records.word(at);
    !word.is_dead() && !records.change(at, word, word).is_dead()
}

/// Swaps the word of the flow of a key, which was found there; what it is now, or `Err` with what it is if it is not
/// `old`, and `None` says that the record is another flow's.
///
/// The key is compared after a swap that changes nothing, so after the word was read; and whoever gives
/// the record to another flow lets the word die before, and sets the next one after the key.
///
/// A flow that is just being entered is not posted, whatever `new` says: it may yet be withdrawn.
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

/// Ends a flow, if it is as it was when this was decided on. Only the CPU on whose wheel it stands may
/// ask for this; it must then [`remove`] the flow.
///
/// A life that is [starting](Seen::is_starting) does not end: whoever began it still writes to the record. Nor does one
/// that is [posted](Seen::is_posted): its link to the inbox is in use.
#[inline(always)]
pub fn kill<R: Records>(records: &R, at: R::At, decided_on: Word) -> bool {
    !decided_on.seen().is_starting()
        && !decided_on.seen().is_posted()
        && records.change(at, decided_on, decided_on.dead()) == decided_on
}

/// Frees the record of a flow that is dead, for the CPU that has killed it, whose details are its own from then on.
#[inline(always)]
pub fn remove<R: Records>(records: &R, at: R::At, index: u32) {
    let distance = distance(records.tag(at));
    if let Some(home) = records.at(index.wrapping_sub(distance)) {
        records.renounce(home, 1 << distance);
    }
    records.free(at);
}
