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
    bits,
    flow::{FlowKey, Word},
    numbers::Positions,
    point::Point,
    state::{Seen, SideWay},
    wheel::Link,
};

/// Records in which a flow may stand.
pub const WINDOW: u32 = 64;
/// Records of a line.
pub const LINE: u32 = 2;

/// The part of a `tag` that is the key's fingerprint; never 0.
const FINGERPRINT: u64 = (1 << DISTANCE) - 1;
const DISTANCE: u32 = 56;
/// A record is claimed and has no flow yet. (Bit of `tag`.)
pub const BUSY: u64 = 1 << 62;
/// Another flow of the same home has the same fingerprint, or had. (Bit of `tag`.)
pub const TWIN: u64 = 1 << 63;

/// Two records and their home: one cache line.
///
/// `positions` belongs to whoever brings a segment: one that is lost is made good by the next. The rest is as the module
/// says.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Line {
    /// Of each record 0; or the key's fingerprint, the distance from home, [`BUSY`] and [`TWIN`].
    pub tags: [u64; LINE as usize],
    /// Time, generation, and what was seen.
    pub words: [Word; LINE as usize],
    /// How far each side has sent.
    pub positions: [Positions; LINE as usize],
    /// Where the rest is: the index of its [`Details`].
    pub details: [u32; LINE as usize],
    /// Where the flows stand whose home this is.
    pub hops: u64,
}

/// What no packet of a known flow needs of it: one cache line. Belongs to the CPU on whose wheel the flow stands, once it
/// is in the table.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Details {
    /// The key's addresses.
    pub addresses: [u64; 4],
    /// And its ports.
    pub ports: u32,
    /// The protocol, the zone, the CPU, the rule, [`TAGGED`] and [`OUTGOING`].
    pub owner: u32,
    /// To the next flow of the slot; to the next free details, if these are free.
    pub next: Link,
    /// To the flow before this one in its slot, or to the slot itself.
    pub prev: Link,
    /// Index of the flow's record.
    pub record: u32,
    /// Low 32 bits of the clock at the flow's first packet.
    pub created: u32,
    /// See [`Known::doubt`](crate::state::Known::doubt).
    pub doubt: u32,
    /// The [`SideWay`] of one of its sides.
    pub way: u32,
}

/// What few flows need. By the same index as [`Details`].
#[repr(C, align(16))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras {
    /// To the next flow of the inbox that this one is in. Belongs to whoever has posted the flow.
    pub inbox: Link,
    /// [`FlowKey::packed_vlans`]. Belongs to the key; means nothing where [`Details::owner`] is not [`TAGGED`].
    pub vlans: u32,
    /// Where packets of the low and of the high side are counted; means nothing where there is one interface.
    pub points: [Point; 2],
    /// Low bits of the clock when packets were last counted there, units.
    pub counted: [u16; 2],
}

const _: () = assert!(size_of::<Extras>() == 16);

/// What makes the home of a key unpredictable, and the size of the table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hash {
    /// Secret, random.
    pub keys: [u64; 11],
    /// Lines that are homes; at least [`WINDOW`] / [`LINE`] − 1 more stand behind them.
    pub homes: u64,
}

/// Where a flow is looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The first record of its home.
    pub home: u32,
    /// Its fingerprint.
    pub fingerprint: u64,
}

impl Hash {
    /// For a table of this capacity: five records for three flows.
    pub fn new(keys: [u64; 11], max_flows: u32) -> Self {
        let homes = u64::from(max_flows).max(64);
        Self { keys, homes }
    }

    /// Lines of the table.
    pub const fn lines(&self) -> u64 {
        self.homes + (WINDOW / LINE) as u64 - 1
    }

    /// Records of the table.
    pub const fn records(&self) -> u64 {
        self.lines() * LINE as u64
    }

    /// The home of a key, and its fingerprint.
    ///
    /// Multilinear hashing in pairs (Lemire & Kaser, *Strongly universal string hashing is fast*, 2014):
    /// whoever does not know the keys cannot build collisions, whatever the addresses and ports. But it
    /// is linear, and with one secret in fifty it lays consecutive addresses or ports side by side. So
    /// its upper 32 bits are scrambled by a permutation, which gives none of the first away.
    #[inline(always)]
    pub fn place(&self, key: &FlowKey) -> Place {
        let [k, a, b, c, d, e, f, g, h, i, j] = self.keys;
        let words = key.addresses();
        let pair = |x: u64, k: u64, l: u64| {
            k.wrapping_add(x & 0xffff_ffff)
                .wrapping_mul(l.wrapping_add(x >> 32))
        };
        let sum = k
            .wrapping_add(pair(words[0], a, b))
            .wrapping_add(pair(words[1], c, d))
            .wrapping_add(pair(words[2], e, f))
            .wrapping_add(pair(words[3], g, h))
            .wrapping_add(pair(key.ports(), i, j));
        let mut hash = (sum >> 32) as u32;
        hash ^= hash >> 15;
        hash = hash.wrapping_mul(0x2c1b_3c6d);
        hash ^= hash >> 12;
        let line = (u64::from(hash).wrapping_mul(self.homes) >> 32) as u32;
        Place {
            home: line * LINE,
            fingerprint: sum >> (64 - DISTANCE) | 1,
        }
    }
}

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
    let has_twins = match reserve(records, place, distance, key) {
        Ok(has_twins) => has_twins,
        Err(inserted) => return inserted,
    };
    match write(records, place, distance, key, begins) {
        Some(before) => settle(records, place, distance, key, before, has_twins),
        None => Inserted::Full,
    }
}

/// The first look, before anybody can see the key in the record that was claimed for it. A bit that another CPU saw before
/// it set its own may have been that of this record's last flow; it would take this one for the first, and this one it.
///
/// Says whether there are flows of other keys with its fingerprint; or what the insertion comes to.
#[inline(always)]
pub fn reserve<R: Records>(
    records: &R,
    place: Place,
    distance: u32,
    key: &FlowKey,
) -> Result<bool, Inserted<R::At>> {
    let Some(home) = records.at(place.home) else {
        return Err(Inserted::Full);
    };
    let present = look(records, place, records.hops(home), key);
    if present.index == Present::NOBODY {
        return Ok(present.has_twins);
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
    distance: u32,
    key: &FlowKey,
    before: u64,
    has_twins: bool,
) -> Inserted<R::At> {
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

/// A record as a reader sees it that writes nothing. All of these are loads.
pub trait Reads {
    /// Loads `word`.
    fn word(&self) -> Word;
    /// Loads `tag`.
    fn tag(&self) -> u64;
    /// Loads the details that the record names, each field whole, and [`Extras`] of the same index; `None` if there are none
    /// of that index.
    fn details(&self) -> Option<(Details, Extras)>;
    /// Whatever was loaded before is older than what is loaded after.
    fn fence(&self);
}

/// A flow as it was at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Whose it is.
    pub key: FlowKey,
    /// The CPU on whose wheel it stands.
    pub cpu: u32,
    /// The rule it has met; 0 for none.
    pub rule: u16,
    /// Time, generation, and what was seen.
    pub word: Word,
    /// Low 32 bits of the clock at the flow's first packet.
    pub created: u32,
    /// Whether the first packet of the flow went out.
    pub is_outgoing: bool,
    /// Where packets of its initiator are counted; means nothing where there is one interface.
    pub point: Point,
}

/// The record changed while it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed;

/// Reads the flow of a record that others write to, if it holds one.
///
/// The details change, and `created` with them, only while the word is dead; a further life begins with a new
/// generation, and is starting until `created` is its own. So what was loaded between two looks at a
/// word that was alive, of the same generation and not starting, belongs to it.
pub fn read(record: &impl Reads) -> Result<Option<Snapshot>, Changed> {
    let word = record.word();
    record.fence();
    let tag = record.tag();
    if !holds_flow(tag) || word.is_dead() {
        return Ok(None);
    }
    record.fence();
    let details = record.details();
    record.fence();
    let after = record.word();
    if after.generation() != word.generation() || after.is_dead() || word.seen().is_starting() {
        return Err(Changed);
    }
    let (details, extras) = details.ok_or(Changed)?;
    Ok(Some(Snapshot {
        key: details.key(extras.vlans),
        cpu: details.cpu(),
        rule: details.rule(),
        word,
        created: details.created,
        is_outgoing: details.owner & OUTGOING != 0,
        point: Point::of_initiator(extras.points, word.seen()),
    }))
}

/// How far behind its home a flow stands.
#[inline(always)]
pub fn distance(tag: u64) -> u32 {
    (tag >> DISTANCE) as u32 & (WINDOW - 1)
}

/// Whether a record holds a live flow.
#[inline(always)]
pub fn holds_flow(tag: u64) -> bool {
    tag & FINGERPRINT != 0 && tag & BUSY == 0
}

/// The part of [`Details::owner`] that is the key's: protocol and zone.
const PROTO_ZONE: u32 = 0xff;
const CPU: u32 = 8;
const CPUS: u32 = 0xfff;
const RULE: u32 = 20;
const RULES: u32 = 0x1ff;
/// Of [`Details::owner`]: the flow is in a VLAN, which [`Extras::vlans`] has.
pub const TAGGED: u32 = 1 << 29;
/// Of [`Details::owner`]: the first packet of the flow went out.
pub const OUTGOING: u32 = 1 << 30;

impl Details {
    /// [`owner`](Self::owner) of a flow.
    #[inline(always)]
    pub fn owner_of(key: &FlowKey, cpu: u32, rule: u16) -> u32 {
        let tagged = match key.packed_vlans() {
            0 => 0,
            _ => TAGGED,
        };
        proto_zone(key) | (cpu & CPUS) << CPU | (u32::from(rule) & RULES) << RULE | tagged
    }

    /// The CPU on whose wheel a flow stands.
    #[inline(always)]
    pub fn cpu(&self) -> u32 {
        cpu(self.owner)
    }

    /// The rule that a flow has met; 0 for none.
    #[inline(always)]
    pub fn rule(&self) -> u16 {
        rule(self.owner)
    }

    /// Whose they are; in these VLANs, if it is in any.
    #[inline(always)]
    pub fn key(&self, vlans: u32) -> FlowKey {
        key(self.addresses, self.ports, self.owner, vlans)
    }
}

/// The CPU in [`Details::owner`].
#[inline(always)]
pub fn cpu(owner: u32) -> u32 {
    owner >> CPU & CPUS
}

/// The rule in it.
#[inline(always)]
pub fn rule(owner: u32) -> u16 {
    (owner >> RULE & RULES) as u16
}

/// The same flow's, as one of no rule.
#[inline(always)]
pub fn without_rule(owner: u32) -> u32 {
    owner & !(RULES << RULE)
}

/// The same flow's, as one of this rule.
#[inline(always)]
pub fn with_rule(owner: u32, rule: u16) -> u32 {
    without_rule(owner) | (u32::from(rule) & RULES) << RULE
}

/// Whether it is of the key's protocol and zone, and in a VLAN if the key is.
#[inline(always)]
pub fn is_of(owner: u32, key: &FlowKey) -> bool {
    owner & (PROTO_ZONE | TAGGED) == Details::owner_of(key, 0, 0)
}

#[inline(always)]
fn proto_zone(key: &FlowKey) -> u32 {
    (key.ports() >> 32) as u32 & PROTO_ZONE
}

/// The key of a flow, from its details, and from what [`Extras::vlans`] has.
#[inline(always)]
pub fn key(addresses: [u64; 4], ports: u32, owner: u32, vlans: u32) -> FlowKey {
    let key = FlowKey::from_parts(
        addresses,
        u64::from(ports) | u64::from(owner & PROTO_ZONE) << 32,
    );
    match owner & TAGGED {
        0 => key,
        _ => key.in_vlans(vlans),
    }
}
