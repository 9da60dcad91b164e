//! The flow table: a hash table of records of one cache line each, open to all CPUs without a lock.
//!
//! A flow's *home* is the record that its hash names; it stands there or in one of the [`WINDOW`] − 1
//! records behind it, in the first that was free when it came. Each record keeps, beside its flow, a
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
//!    Else it writes the key, then a new generation into `word`, which was dead until then: so a word that
//!    is alive is always that of the key beside it. Then it announces the flow with its bit in the
//!    home's `hops`, by an atomic OR that returns the bits before. All CPUs that enter the same key meet in
//!    that one word, so for any two of them one is second, and sees the first: it finds the key among the
//!    bits that were before its own and withdraws.
//! 3. *live* (`tag` is the key's ports). Packets find it. They store stamps, and change what was seen
//!    by compare-and-swap of `word`.
//! 4. *dead* (`word` says so). The CPU on whose wheel the flow stands swaps `word` from what it had
//!    decided on; a flow that was touched or changed since lives on. Nothing comes back from here.
//! 5. The same CPU takes the bit from the home's `hops`, then `tag` becomes 0.
//!
//! The generation is the record's own and counts its flows, so a compare-and-swap by somebody who
//! still means an earlier flow fails.
//!
//! The memory is behind [`Records`], so that the programs in the kernel, the tests and a model checker
//! run this same code.

use crate::{
    bits,
    flow::{FlowKey, Word},
    numbers::Positions,
    state::{Seen, SideWay},
    wheel::Link,
};

/// Records in which a flow may stand.
pub const WINDOW: u32 = 32;

/// The part of a `tag` that is the key's: ports, and as much of the protocol's number as tells those apart that
/// are tracked.
const PORTS: u64 = (1 << 37) - 1;
/// A record is claimed and has no flow yet. (Bit of `tag`.)
pub const BUSY: u64 = 1 << 37;
const DISTANCE: u32 = 38;
const CPU: u32 = 43;
const CPUS: u64 = 0xfff;
const RULE: u32 = 55;

/// A flow and its place in the table: one cache line.
///
/// `hops` belongs to the place. `next` belongs to the CPU on whose wheel the flow
/// stands, and `positions` to whoever brings a segment: one that is lost is made good by the next. The rest is as the module says.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Record {
    /// The key's addresses.
    pub addresses: [u64; 4],
    /// 0; or the key's ports and protocol, [`BUSY`], the distance from home, the CPU and the rule.
    pub tag: u64,
    /// Time, generation, and what was seen.
    pub word: Word,
    /// Where the flows stand whose home this is.
    pub hops: u32,
    /// To the next flow of the slot.
    pub next: Link,
    /// How far each side has sent.
    pub positions: Positions,
}

/// What no packet of a known flow needs of it. Belongs to the CPU on whose wheel the flow stands, but for `inbox`, which
/// belongs to whoever has posted the flow.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct Node {
    /// To the flow before this one in its slot, or to the slot itself.
    pub prev: Link,
    /// Low 32 bits of the clock at the flow's first packet.
    pub created: u32,
    /// To the next flow of the inbox that this one is in.
    pub inbox: Link,
    /// See [`Known::doubt`](crate::state::Known::doubt).
    pub doubt: u32,
    /// The [`SideWay`] of one of its sides.
    pub way: u32,
}

/// Records of a [`Block`].
pub const BLOCK: usize = 16;

/// Records and their nodes, as they are one value of the map: who has a flow has both by one lookup, and mostly on one page,
/// so that the processor looks up one address of two. 21 cache lines.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug, Default)]
pub struct Block {
    /// The records.
    pub records: [Record; BLOCK],
    /// What belongs to each of them.
    pub nodes: [Node; BLOCK],
}

/// What makes the home of a key unpredictable, and the size of the table.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hash {
    /// Secret, random.
    pub keys: [u64; 11],
    /// Records that are homes; at least [`WINDOW`] − 1 more stand behind them.
    pub homes: u64,
}

impl Hash {
    /// For a table of this capacity: five records for two flows. At that load one insertion in three
    /// million finds its window full, under steady churn of as many flows as that.
    pub fn new(keys: [u64; 11], max_flows: u32) -> Self {
        let homes = (u64::from(max_flows) * 5).div_ceil(2).max(64);
        Self { keys, homes }
    }

    /// Blocks of the table.
    pub const fn blocks(&self) -> u64 {
        (self.homes + WINDOW as u64 - 1).div_ceil(BLOCK as u64)
    }

    /// Records of the table: whole blocks.
    pub const fn records(&self) -> u64 {
        self.blocks() * BLOCK as u64
    }

    /// The home of a key.
    ///
    /// Multilinear hashing in pairs (Lemire & Kaser, *Strongly universal string hashing is fast*, 2014):
    /// whoever does not know the keys cannot build collisions, whatever the addresses and ports. But it
    /// is linear, and with one secret in fifty it lays consecutive addresses or ports side by side. So
    /// its 32 bits are scrambled by a permutation, which gives none of the first away.
    #[inline(always)]
    pub fn home(&self, key: &FlowKey) -> u32 {
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
        (u64::from(hash).wrapping_mul(self.homes) >> 32) as u32
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

    /// Loads `tag`.
    fn tag(&self, at: Self::At) -> u64;
    /// Swaps `tag` from 0.
    fn claim(&self, at: Self::At, tag: u64) -> bool;
    /// Swaps `tag`.
    fn set_tag(&self, at: Self::At, tag: u64);
    /// Stores `tag` of a record that was announced or renounced: that has put in order what came before, and nothing later
    /// depends on who sees it when.
    fn publish(&self, at: Self::At, tag: u64);

    /// Loads `word`.
    fn word(&self, at: Self::At) -> Word;
    /// Swaps `word`.
    fn set_word(&self, at: Self::At, word: Word);
    /// Swaps `word` if it is `old`; what it was.
    fn change(&self, at: Self::At, old: Word, new: Word) -> Word;

    /// Loads `hops`.
    fn hops(&self, at: Self::At) -> u32;
    /// Sets bits of `hops`; what it was.
    fn announce(&self, at: Self::At, bits: u32) -> u32;
    /// Clears bits of `hops`.
    fn renounce(&self, at: Self::At, bits: u32);

    /// Whether the addresses are the key's; loads.
    fn has_addresses(&self, at: Self::At, key: &FlowKey) -> bool;
    /// Stores the key's addresses and what else is the flow's at its beginning.
    fn fill(&self, at: Self::At, key: &FlowKey, begins: &Begins);

    /// Calls `turn` with 0, 1, … until it says `true`, at most `turns` times.
    fn repeat(&self, turns: u32, turn: impl FnMut(u32) -> bool);
}

/// The record that a live flow of this key stands in.
///
/// May miss a flow that another CPU is entering or has just entered, and find one that is dead.
#[inline(always)]
pub fn find<R: Records>(records: &R, home: u32, key: &FlowKey) -> Option<R::At> {
    let at = records.at(home)?;
    if is_live(records, at, key) {
        return Some(at);
    }
    let mut hops = records.hops(at) & !1;
    for _ in 1..WINDOW {
        if hops == 0 {
            return None;
        }
        let at = records.at(home + lowest(hops))?;
        if is_live(records, at, key) {
            return Some(at);
        }
        hops &= hops - 1;
    }
    None
}

/// Whether the record holds a live flow of this key.
///
/// A record that changes hands meanwhile may be taken for the wrong flow. A packet then makes a stranger
/// younger; before it changes more than that, it asks [`is_of`] at a time when that cannot be.
#[inline(always)]
fn is_live<R: Records>(records: &R, at: R::At, key: &FlowKey) -> bool {
    records.tag(at) & (PORTS | BUSY) == key.ports() & PORTS && records.has_addresses(at, key)
}

/// Whether the record is that of this key, be its flow live or about to be.
#[inline(always)]
fn is_of<R: Records>(records: &R, at: R::At, key: &FlowKey) -> bool {
    records.tag(at) & PORTS == key.ports() & PORTS && records.has_addresses(at, key)
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
}

/// Enters a flow.
#[inline(always)]
pub fn insert<R: Records>(
    records: &R,
    home: u32,
    key: &FlowKey,
    begins: &Begins,
) -> Inserted<R::At> {
    let (seen, now) = (begins.seen, begins.now);
    let tag = key.ports() & PORTS
        | (u64::from(begins.cpu) & CPUS) << CPU
        | u64::from(begins.rule) << RULE;
    let Some(place) = records.at(home) else {
        return Inserted::Full;
    };
    // Mostly the home itself is free, and it is at hand.
    let mut claimed = None;
    if records.tag(place) == 0 && records.claim(place, tag | BUSY) {
        claimed = Some(0);
    } else {
        records.repeat(WINDOW - 1, |number| {
            let distance = (number + 1) & (WINDOW - 1);
            let Some(at) = records.at(home + distance) else {
                return true;
            };
            if records.tag(at) == 0 && records.claim(at, tag | BUSY) {
                claimed = Some(distance);
            }
            claimed.is_some()
        });
    }
    let Some(distance) = claimed else {
        return Inserted::Full;
    };
    // Looked up again rather than carried out of the loop.
    let Some(at) = records.at(home + distance) else {
        return Inserted::Full;
    };
    // Before anybody can see the key here. A bit that another CPU saw before it set its own may have been
    // that of this record's last flow; it would take this one for the first, and this one it.
    if let Some(first) = present(records, home, records.hops(place), key) {
        records.set_tag(at, 0);
        return first;
    }
    let generation = records.word(at).generation().wrapping_add(1);
    records.fill(at, key, begins);
    records.set_word(at, Word::new(now, generation, seen));
    // Its own bit is not among them: it was taken out before the record was free.
    let before = records.announce(place, 1 << distance);
    if let Some(first) = present(records, home, before, key) {
        records.set_word(at, Word::new(now, generation, Seen::DEAD));
        records.renounce(place, 1 << distance);
        records.set_tag(at, 0);
        return first;
    }
    records.publish(at, tag | u64::from(distance) << DISTANCE);
    Inserted::New(at, home + distance)
}

/// The flow of a key, entered but not yet live perhaps, if it is at one of these distances from its home.
#[inline(always)]
fn present<R: Records>(
    records: &R,
    home: u32,
    mut hops: u32,
    key: &FlowKey,
) -> Option<Inserted<R::At>> {
    let mut found = None;
    if hops != 0 {
        records.repeat(WINDOW, |_| {
            if hops == 0 {
                return true;
            }
            let index = home + lowest(hops);
            hops &= hops - 1;
            let Some(at) = records.at(index) else {
                return true;
            };
            // Dead does not count: it will not come back.
            let same = is_of(records, at, key) && is_alive(records, at);
            if same {
                found = Some(index);
            }
            same
        });
    }
    // Looked up again rather than carried out of the loop.
    records.at(found?).map(Inserted::Exists)
}

/// Whether the word is that of a flow that lives, later than all that was loaded before.
#[inline(always)]
fn is_alive<R: Records>(records: &R, at: R::At) -> bool {
    let word = records.word(at);
    !word.is_dead() && !records.change(at, word, word).is_dead()
}

/// Swaps the word of the flow of a key, which was found there; what it is now, or `Err` with what it is if it is not
/// `old`, and `None` says that the record is now another flow's.
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
        Ok(_) if is_of(records, at, key) => {
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

/// Frees the record of a flow that is dead, for the CPU that has killed it.
#[inline(always)]
pub fn remove<R: Records>(records: &R, at: R::At, index: u32) {
    let distance = distance(records.tag(at));
    if let Some(home) = records.at(index.wrapping_sub(distance)) {
        records.renounce(home, 1 << distance);
    }
    records.publish(at, 0);
}

/// A record as a reader sees it that writes nothing. All of these are loads.
pub trait Reads {
    /// Loads `word`.
    fn word(&self) -> Word;
    /// Loads `tag`.
    fn tag(&self) -> u64;
    /// Loads the addresses, each word whole.
    fn addresses(&self) -> [u64; 4];
    /// Loads `created`.
    fn created(&self) -> u32;
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
}

/// The record changed while it was read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Changed;

/// Reads the flow of a record that others write to, if it holds one.
///
/// The key changes, and `created` with it, only while the word is dead; a further life begins with a new
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
    let (addresses, created) = (record.addresses(), record.created());
    record.fence();
    let after = record.word();
    if after.generation() != word.generation() || after.is_dead() || word.seen().is_starting() {
        return Err(Changed);
    }
    Ok(Some(Snapshot {
        key: key(addresses, tag),
        cpu: cpu(tag),
        rule: rule(tag),
        word,
        created,
    }))
}

/// How far behind its home a flow stands.
#[inline(always)]
pub fn distance(tag: u64) -> u32 {
    (tag >> DISTANCE) as u32 & (WINDOW - 1)
}

/// The CPU on whose wheel a flow stands.
#[inline(always)]
pub fn cpu(tag: u64) -> u32 {
    (tag >> CPU) as u32 & CPUS as u32
}

/// The rule that a flow has met; 0 for none.
#[inline(always)]
pub fn rule(tag: u64) -> u16 {
    (tag >> RULE) as u16
}

/// Whether a record holds a live flow.
#[inline(always)]
pub fn holds_flow(tag: u64) -> bool {
    tag != 0 && tag & BUSY == 0
}

/// The tag of the same flow, as one of no rule. A live flow's tag is written by its wheel's CPU; others swap it.
#[inline(always)]
pub fn without_rule(tag: u64) -> u64 {
    tag & ((1 << RULE) - 1)
}

/// The tag of the same flow, as one of this rule.
#[inline(always)]
pub fn with_rule(tag: u64, rule: u16) -> u64 {
    without_rule(tag) | u64::from(rule) << RULE
}

/// The key of a record, from `tag` and the addresses.
#[inline(always)]
pub fn key(addresses: [u64; 4], tag: u64) -> FlowKey {
    // ICMPv6 is 58; its low five bits are 26.
    let icmp6 = tag & 0x1f_0000_0000 == 26 << 32;
    let proto = if icmp6 { 0x20_0000_0000 } else { 0 };
    FlowKey::from_parts(addresses, tag & PORTS | proto)
}

/// The number of the lowest bit that is set; `word` is not 0.
#[inline(always)]
fn lowest(word: u32) -> u32 {
    bits::lowest(u64::from(word)) & (WINDOW - 1)
}
