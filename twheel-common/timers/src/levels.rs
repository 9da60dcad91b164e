//! The arithmetic of scheme 7: in which level and slot a deadline is, and which slot comes first.

use alloc::{boxed::Box, vec};

/// Most levels.
pub const MAX_LEVELS: u32 = 8;
/// log2 of the slots of a level, at most: a bitmap of 64 words, and one word that summarises it.
pub const MAX_BITS: u32 = 12;
/// log2 of the ticks that the levels reach, at most: no sum with a tick overflows.
pub const MAX_RANGE: u32 = 62;

/// Levels of slots, and which slots are not empty. A slot's number is `level << bits | slot`.
///
/// All timers of level `k` are due before the next boundary of level `k + 1`, and those of higher
/// levels after it. So the earliest slot is the first one of the lowest level that is not empty.
#[derive(Debug)]
pub struct Levels {
    levels: u32,
    bits: u32,
    range: u64,
    /// The level of a deadline, by the number of leading zeros of what differs between the deadline
    /// and the present tick.
    level: [u8; 65],
    /// The words of all levels' bitmaps, one after the other.
    words: Box<[u64]>,
    /// For each level, which of its words are not zero.
    summaries: [u64; MAX_LEVELS as usize],
}

impl Levels {
    /// `levels` of `2^bits` slots, all empty.
    pub fn new(levels: u32, bits: u32) -> Self {
        let mut level = [0; 65];
        for (zeros, level) in level.iter_mut().enumerate() {
            let highest = 63u32.saturating_sub(zeros as u32);
            *level = (highest / bits).min(levels - 1) as u8;
        }
        Self {
            levels,
            bits,
            // A round of the top level, less the slot in which the hand may be already.
            range: ((1 << bits) - 1) << ((levels - 1) * bits),
            level,
            words: vec![0; (levels as usize) << words(bits)].into(),
            summaries: [0; MAX_LEVELS as usize],
        }
    }

    /// Number of slots of all levels.
    pub fn slots(&self) -> u32 {
        self.levels << self.bits
    }

    /// How many ticks ahead of the hand the levels reach, wherever it is.
    pub fn range(&self) -> u64 {
        self.range
    }

    #[inline(always)]
    fn mask(&self) -> u64 {
        (1 << self.bits) - 1
    }

    /// The slot of a timer that is due at tick `when`, later than `elapsed`. A deadline beyond the
    /// range gets the farthest slot.
    #[inline(always)]
    pub fn slot(&self, elapsed: u64, when: u64) -> u32 {
        let when = when.min(elapsed + self.range);
        let level = u32::from(self.level[(elapsed ^ when).leading_zeros() as usize]);
        level << self.bits | ((when >> (level * self.bits)) & self.mask()) as u32
    }

    /// The word of a slot, its level, and its bit there.
    #[inline(always)]
    fn locate(&self, slot: u32) -> (usize, usize, u32) {
        let level = (slot >> self.bits) as usize;
        let slot = slot & self.mask() as u32;
        let word = level << words(self.bits) | (slot >> 6) as usize;
        (word, level, slot)
    }

    /// Notes that a slot is not empty.
    #[inline(always)]
    pub fn occupy(&mut self, slot: u32) {
        let (word, level, slot) = self.locate(slot);
        self.words[word] |= 1 << (slot & 63);
        self.summaries[level] |= 1 << (slot >> 6);
    }

    /// The first slot of a level from `from` on that is not empty.
    #[inline(always)]
    fn first_from(&self, level: usize, from: u64) -> Option<u64> {
        if from > self.mask() {
            return None;
        }
        let words = &self.words[level << words(self.bits)..];
        let word = from >> 6;
        let here = words[word as usize] & (u64::MAX << (from & 63));
        if here != 0 {
            return Some(word << 6 | u64::from(here.trailing_zeros()));
        }
        // Two shifts, because a shift by 64 is not defined.
        let later = self.summaries[level] & (u64::MAX << word << 1);
        if later == 0 {
            return None;
        }
        let word = u64::from(later.trailing_zeros());
        Some(word << 6 | u64::from(words[word as usize].trailing_zeros()))
    }

    /// The slot whose turn comes first, and its tick.
    #[inline]
    pub fn first(&self, elapsed: u64) -> Option<(u32, u64)> {
        let level = (0..self.levels as usize).find(|level| self.summaries[*level] != 0)?;
        let shift = level as u32 * self.bits;
        let now = elapsed >> shift;
        // First the slots after the hand. Then, in the top level only, those of the next round.
        let (slot, turn) = match self.first_from(level, (now & self.mask()) + 1) {
            Some(slot) => (slot, 0),
            None => (self.first_from(level, 0)?, self.mask() + 1),
        };
        let starts = ((now & !self.mask()) + turn + slot) << shift;
        Some(((level as u32) << self.bits | slot as u32, starts))
    }

    /// Marks all slots as empty.
    pub fn clear(&mut self) {
        self.words.fill(0);
        self.summaries = [0; MAX_LEVELS as usize];
    }
}

impl Levels {
    /// Notes that a slot is empty.
    #[inline(always)]
    pub fn vacate(&mut self, slot: u32) {
        let (word, level, slot) = self.locate(slot);
        self.words[word] &= !(1 << (slot & 63));
        if self.words[word] == 0 {
            self.summaries[level] &= !(1 << (slot >> 6));
        }
    }
}

/// log2 of the words of a level's bitmap.
#[inline(always)]
const fn words(bits: u32) -> u32 {
    bits.saturating_sub(6)
}

#[cfg(test)]
mod tests {
    use super::Levels;

    #[test]
    fn the_example_of_the_documentation() {
        let levels = Levels::new(2, 2);
        assert_eq!(levels.range(), 12);
        // Level 0: 0 to 3; level 1: 4 to 7.
        for (when, slot) in [(6, 2), (9, 4 + 2), (17, 4), (40, 4)] {
            assert_eq!(levels.slot(5, when), slot, "{when}");
        }
    }

    #[test]
    fn the_first_slot_is_what_a_search_finds() {
        for (count, bits) in [(1, 1), (2, 2), (3, 4), (2, 6), (2, 7), (8, 2), (2, 12)] {
            let mut levels = Levels::new(count, bits);
            for elapsed in [0, 1, 5, (1 << bits) - 1, 1 << bits, (1 << 40) + 12_345] {
                let reach = levels.range();
                let whens = [1, 2, 3, 63, 64, 65, reach / 2, reach - 1, reach];
                for &when in whens.iter().filter(|when| (1..=reach).contains(*when)) {
                    let slot = levels.slot(elapsed, elapsed + when);
                    levels.occupy(slot);
                    let (first, tick) = levels.first(elapsed).unwrap();
                    // Not later than the deadline, and a slot before it at most.
                    let span = 1 << ((slot >> bits) * bits);
                    assert_eq!(first, slot);
                    assert!(tick > elapsed && tick <= elapsed + when);
                    assert!(tick + span > elapsed + when, "{when} from {elapsed}");
                    levels.vacate(slot);
                    assert_eq!(levels.first(elapsed), None);
                }
                levels.occupy(levels.slot(elapsed, elapsed + 1));
                levels.clear();
                assert_eq!(levels.first(elapsed), None);
            }
        }
    }
}
