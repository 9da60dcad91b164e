//! The timing wheel: arithmetic and occupancy, without the lists.
//!
//! Varghese & Lauck, *Hashed and Hierarchical Timing Wheels*, scheme 7; schemes 4 and 6 are the
//! same with one level ([`WheelScheme`]). A wheel has `levels` levels of `2^bits` slots. A slot of level
//! `k` spans `2^(k·bits)` ticks. With the default geometry of 3 levels of 1,024 slots and a tick of
//! 100 ms:
//!
//! | level | a slot spans      | the level reaches       |
//! |-------|-------------------|-------------------------|
//! | 0     | 1 tick, 100 ms    | 1,024 ticks, 102 s      |
//! | 1     | 1,024 ticks, 102 s| 2^20 ticks, 29 hours    |
//! | 2     | 2^20 ticks, 29 h  | 2^30 ticks, 3.4 years   |
//!
//! `elapsed` is the tick up to which everything has been handed out. A timer due at tick `when` is
//! in the level of the highest digit (base `2^bits`) in which `when` and `elapsed` differ, in the
//! slot of that digit of `when`. An example with bits = 2 (4 slots), levels = 2, elapsed = 5 (`11`
//! in base 4):
//!
//! - due at 6 (`12`): the low digit differs: level 0, slot 2, handed out at tick 6.
//! - due at 9 (`21`): the high digit differs: level 1, slot 2, handed out at tick 8 (`20`), put
//!   back one level down: level 0, slot 1, handed out at tick 9.
//! - due at 17 (`101`): beyond the top level, which starts its next round: level 1, slot 0, handed
//!   out at 16.
//! - due at 40 (`220`): beyond the range of 12 ticks: treated as due at 17, the farthest tick that
//!   can be told apart, and put back from there.
//!
//! The code that takes a timer out of a slot asks the timer for its true deadline and puts it back
//! into the slot of that deadline. So the cascade of the hierarchical wheel and the lazy re-arming
//! of a flow whose packets have moved its deadline are the same operation.
//!
//! All timers of level `k` are due before the next boundary of level `k + 1`, and those of higher
//! levels after it. So the earliest slot is the first one of the lowest level that is not empty.
//! Each level keeps a bitmap of its slots and a word that summarises the bitmap, so finding that
//! slot is a constant amount of work, however far ahead it lies.
//!
//! A timer is handed out at the first tick that is not before its deadline: never early, and late
//! by less than a tick plus the delay of the stepper.

use crate::bits::lowest;
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Most levels of a wheel.
pub const MAX_LEVELS: usize = 4;
/// log2 of the slots of a level, at most: a bitmap of 64 words, and one word that summarises it.
pub const MAX_BITS: u32 = 12;
/// log2 of the slots of a level, at least.
pub const MIN_BITS: u32 = 1;

/// Lists per slot, a power of two. A flow is in the list that the lowest bits of its index name.
/// The next flow of a list is known only once the one before has been loaded; with several lists,
/// the visits of a slot can wait for several loads at once.
pub const LISTS: usize = 16;

/// Tick that never comes, for a slot that does not exist.
pub const NEVER: u64 = u64::MAX;

/// The paper's schemes that a [`Wheel`] implements. They differ in their number of levels, and in
/// what happens to a timer that is due beyond the wheel's range.
#[repr(u32)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum WheelScheme {
    /// Scheme 4: one level, and no timer is due beyond its range.
    Simple = 4,
    /// Scheme 6: one level. A timer that is due beyond its range is in the slot of its deadline,
    /// and is put back there in each round before its own.
    Hashed = 6,
    /// Scheme 7: several levels. A timer that is due beyond their range is in the farthest slot,
    /// and is put back from there.
    #[default]
    Hierarchical = 7,
}

impl WheelScheme {
    /// Stable name.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Simple => "simple",
            Self::Hashed => "hashed",
            Self::Hierarchical => "hierarchical",
        }
    }

    /// The scheme of a raw [`Geometry::scheme`]; `None` for any other number.
    pub fn from_raw(raw: u32) -> Option<Self> {
        [Self::Simple, Self::Hashed, Self::Hierarchical]
            .into_iter()
            .find(|scheme| *scheme as u32 == raw)
    }
}

/// Shape of a wheel: `levels` (1 to [`MAX_LEVELS`]) of `2^bits` slots ([`MIN_BITS`] to
/// [`MAX_BITS`]).
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Geometry {
    /// Number of levels.
    pub levels: u32,
    /// log2 of the slots of a level.
    pub bits: u32,
    /// Number of the [`WheelScheme`].
    pub scheme: u32,
}

impl Default for Geometry {
    fn default() -> Self {
        Self::hierarchical(3, 10)
    }
}

impl Geometry {
    /// A wheel of scheme 7.
    pub const fn hierarchical(levels: u32, bits: u32) -> Self {
        Self {
            levels,
            bits,
            scheme: WheelScheme::Hierarchical as u32,
        }
    }

    /// A wheel of scheme 6.
    pub const fn hashed(bits: u32) -> Self {
        Self {
            levels: 1,
            bits,
            scheme: WheelScheme::Hashed as u32,
        }
    }

    /// A wheel of scheme 4.
    pub const fn simple(bits: u32) -> Self {
        Self {
            levels: 1,
            bits,
            scheme: WheelScheme::Simple as u32,
        }
    }
}

impl Geometry {
    /// Name of its [`WheelScheme`].
    pub fn scheme_name(&self) -> &'static str {
        WheelScheme::from_raw(self.scheme).map_or("unknown", WheelScheme::name)
    }

    /// Slots of all levels.
    #[inline(always)]
    pub const fn slots(&self) -> u32 {
        self.levels << self.bits
    }

    /// How many ticks ahead of `elapsed` the wheel reaches, whatever `elapsed` is.
    #[inline(always)]
    pub const fn range(&self) -> u64 {
        // A round of the top level, less the slot in which `elapsed` may be already.
        ((1 << self.bits) - 1) << ((self.levels - 1) * self.bits)
    }

    #[inline(always)]
    const fn mask(&self) -> u64 {
        (1 << self.bits) - 1
    }
}

/// A slot, and the tick of its turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// Index over all levels: `level << bits | slot`.
    pub index: u32,
    /// The tick at which it is handed out.
    pub starts: u64,
}

/// A pointer of the wheel's lists: to nothing, to a flow by its index in the table, or to a list.
/// Used from one flow to the next, and from a list to its first flow. All zero is nothing.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Link(u32);

impl Link {
    /// A pointer to nothing.
    pub const NONE: Self = Self(0);
    const LIST: u32 = 1 << 31;
    /// Not yet written; the CPU that queues the flow is about to write it.
    pub const PENDING: Self = Self(u32::MAX);

    /// A pointer to a flow; indices are below 2^31 − 1.
    #[inline(always)]
    pub const fn flow(index: u32) -> Self {
        Self(index + 1)
    }

    /// The pointer as a number.
    #[inline(always)]
    pub const fn raw(self) -> u32 {
        self.0
    }

    /// The pointer of a number.
    #[inline(always)]
    pub const fn from_raw(raw: u32) -> Self {
        Self(raw)
    }

    /// A pointer to a list of a slot.
    #[inline(always)]
    pub const fn list(slot: u32, list: u32) -> Self {
        Self(Self::LIST | (slot * LISTS as u32) | list)
    }

    /// The flow's index if this points to a flow.
    #[inline(always)]
    pub const fn as_flow(self) -> Option<u32> {
        match self.0 {
            0 | Self::LIST.. => None,
            link => Some(link - 1),
        }
    }

    /// The indices of the slot and of the list if this points to a list.
    #[inline(always)]
    pub const fn as_list(self) -> Option<(u32, u32)> {
        const LISTS: u32 = self::LISTS as u32;
        match self.0 {
            Self::LIST.. => Some(((self.0 & !Self::LIST) / LISTS, self.0 & (LISTS - 1))),
            _ => None,
        }
    }
}

/// Pointers to the first flow of each of a slot's lists.
pub type Heads = [Link; LISTS];

/// Which slots of a level hold timers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
struct Occupancy {
    /// Bit `i`: `words[i]` is not zero.
    summary: u64,
    /// Bit `i` of word `w`: slot `64·w + i` is not empty.
    words: [u64; 1 << (MAX_BITS - 6)],
}

impl Occupancy {
    #[inline(always)]
    fn set(&mut self, slot: u32) {
        let word = (slot >> 6) as usize & 63;
        self.words[word] |= 1 << (slot & 63);
        self.summary |= 1 << word;
    }

    #[inline(always)]
    fn clear(&mut self, slot: u32) {
        let word = (slot >> 6) as usize & 63;
        self.words[word] &= !(1 << (slot & 63));
        if self.words[word] == 0 {
            self.summary &= !(1 << word);
        }
    }

    fn has(&self, slot: u32) -> bool {
        let word = (slot >> 6) as usize & 63;
        self.words[word] & 1 << (slot & 63) != 0
    }

    /// The first slot from `from` on that is not empty.
    #[inline(always)]
    fn first_from(&self, from: u32) -> Option<u32> {
        let word = (from >> 6) as usize;
        if word > 63 {
            return None;
        }
        let here = self.words[word & 63] & (u64::MAX << (from & 63));
        if here != 0 {
            return Some((word as u32) << 6 | lowest(here));
        }
        // Two shifts, because a shift by 64 is not defined.
        let later = self.summary & (u64::MAX << word << 1);
        if later == 0 {
            return None;
        }
        let word = lowest(later);
        Some(word << 6 | lowest(self.words[word as usize & 63]))
    }
}

/// A wheel without its lists: how far it has turned, and which slots hold timers. All zero is an
/// empty wheel that has not turned, so that a zeroed map needs no initialization.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Wheel {
    /// Every slot that starts at or before this tick has been handed out.
    pub elapsed: u64,
    /// The tick at which the stepper means to come back. 0 before it has come for the first time
    /// (it comes at once), [`NEVER`] if it waits to be called.
    pub wake: u64,
    /// The inbox: timers that other CPUs have queued and that have not been looked at yet.
    pub inbox: Link,
    /// The list, of any slot, that a timer was last put into.
    pub latest: u32,
    levels: [Occupancy; MAX_LEVELS],
}

impl Default for Wheel {
    fn default() -> Self {
        Self {
            elapsed: 0,
            wake: 0,
            inbox: Link::NONE,
            latest: 0,
            levels: [Occupancy {
                summary: 0,
                words: [0; 64],
            }; MAX_LEVELS],
        }
    }
}

impl Wheel {
    /// The slot of a timer due at tick `when`. A deadline in the past gets the next tick; for one
    /// beyond the range see [`WheelScheme`].
    #[inline(always)]
    pub fn slot(&self, geometry: Geometry, when: u64) -> Slot {
        let soonest = self.elapsed + 1;
        let farthest = self.elapsed + geometry.range();
        if geometry.scheme == WheelScheme::Hashed as u32 && when > farthest {
            // The first time that its slot comes round: 1 tick to a whole round ahead.
            let ahead = ((when - soonest) & geometry.mask()) + 1;
            return Slot {
                index: (when & geometry.mask()) as u32,
                starts: self.elapsed + ahead,
            };
        }
        let when = if when < soonest {
            soonest
        } else if when > farthest {
            farthest
        } else {
            when
        };
        let differs = self.elapsed ^ when;
        let mut level = 0;
        let mut shift = 0;
        while level + 1 < geometry.levels && differs >> shift > geometry.mask() {
            level += 1;
            shift += geometry.bits;
            // The geometry is checked where it is read; this check tells the verifier the bound.
            if level as usize >= MAX_LEVELS {
                break;
            }
        }
        Slot {
            index: level << geometry.bits | ((when >> shift) & geometry.mask()) as u32,
            starts: when >> shift << shift,
        }
    }

    /// The slot of a timer that has just been handed out and is now due at tick `when`. Like
    /// [`slot`](Self::slot), but in a hashed wheel a timer that has whole rounds left stays in its
    /// slot. (If it were put into the slot of its deadline, which packets move, it could be visited
    /// every tick.)
    #[inline(always)]
    pub fn again(&self, geometry: Geometry, when: u64) -> Slot {
        let round = geometry.mask() + 1;
        if geometry.scheme == WheelScheme::Hashed as u32 && when >= self.elapsed + round {
            return Slot {
                index: (self.elapsed & geometry.mask()) as u32,
                starts: self.elapsed + round,
            };
        }
        self.slot(geometry, when)
    }

    /// Notes that a slot holds timers.
    #[inline(always)]
    pub fn occupy(&mut self, geometry: Geometry, index: u32) {
        let level = (index >> geometry.bits) as usize & (MAX_LEVELS - 1);
        self.levels[level].set(index & geometry.mask() as u32);
    }

    /// The slot whose turn comes first.
    #[inline(always)]
    pub fn first(&self, geometry: Geometry) -> Option<Slot> {
        let mut level = 0;
        let mut shift = 0;
        while level < geometry.levels && (level as usize) < MAX_LEVELS {
            let occupancy = &self.levels[level as usize & (MAX_LEVELS - 1)];
            if occupancy.summary != 0 {
                let now = self.elapsed >> shift;
                let digit = (now & geometry.mask()) as u32;
                // First the slots after the hand. Then, in the top level only, those of the next
                // round.
                let (slot, turn) = match occupancy.first_from(digit + 1) {
                    Some(slot) => (slot, 0),
                    None => (occupancy.first_from(0)?, geometry.mask() + 1),
                };
                let starts = ((now & !geometry.mask()) + turn + u64::from(slot)) << shift;
                return Some(Slot {
                    index: level << geometry.bits | slot,
                    starts,
                });
            }
            level += 1;
            shift += geometry.bits;
        }
        None
    }

    /// The slots of a level that hold timers, in order; none for a level that the wheel does not
    /// have. For readers of a copy, which may have been taken while the wheel turned.
    pub fn occupied(&self, geometry: Geometry, level: u32) -> impl Iterator<Item = u32> {
        let slots = (level < geometry.levels).then_some(1u32 << geometry.bits);
        let level = self.levels.get(level as usize);
        (0..slots.unwrap_or(0)).filter(move |slot| level.is_some_and(|level| level.has(*slot)))
    }

    /// Notes that a slot is empty.
    #[inline(always)]
    pub fn vacate(&mut self, geometry: Geometry, index: u32) {
        let level = (index >> geometry.bits) as usize & (MAX_LEVELS - 1);
        self.levels[level].clear(index & geometry.mask() as u32);
    }

    /// Empties the slot whose turn it is, and moves the hand onto it. The caller takes the timers.
    #[inline(always)]
    pub fn take(&mut self, geometry: Geometry, slot: Slot) {
        self.vacate(geometry, slot.index);
        self.advance(slot.starts);
    }

    /// Moves the hand of an empty wheel to `tick` if its stepper sleeps. Slots are chosen as seen
    /// from the hand: with a hand that is hours behind, timers would be visited again and again
    /// until it has caught up.
    #[inline(always)]
    pub fn catch_up(&mut self, tick: u64) {
        let sleeps = self.wake == NEVER || self.wake == 0;
        if sleeps && self.levels.iter().all(|level| level.summary == 0) {
            self.advance(tick);
        }
    }

    /// Whether a timer that is due at tick `when` has no whole rounds left. Only in a hashed wheel
    /// can it have any.
    #[inline(always)]
    pub fn reaches(&self, geometry: Geometry, when: u64) -> bool {
        geometry.scheme != WheelScheme::Hashed as u32 || when <= self.elapsed + geometry.mask() + 1
    }

    /// Moves the hand to `tick`, over empty slots only: the caller has taken all earlier timers.
    #[inline(always)]
    pub fn advance(&mut self, tick: u64) {
        if tick > self.elapsed {
            self.elapsed = tick;
        }
    }

    /// The tick at which a slot has its turn, by its index over all levels: what
    /// [`first`](Self::first) says of the slot whose turn is first.
    pub fn turn(&self, geometry: Geometry, index: u32) -> u64 {
        let slot = u64::from(index) & geometry.mask();
        let shift = (index >> geometry.bits) * geometry.bits;
        let now = self.elapsed >> shift;
        // On the hand or behind it: in the next round.
        let turn = match slot > now & geometry.mask() {
            true => 0,
            false => geometry.mask() + 1,
        };
        ((now & !geometry.mask()) + turn + slot) << shift
    }
}
