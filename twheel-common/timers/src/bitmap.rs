//! A bitmap of the slots that are not empty.

use alloc::{boxed::Box, vec, vec::Vec};

/// A bitmap of any size, with a bitmap of its nonzero words above it, and so on up to a single
/// word. The first set bit from a position on is found in at most two passes over these bitmaps, of
/// which there are 4 for 2^24 slots.
#[derive(Clone, Debug)]
pub struct Bitmap {
    /// The bitmap of the slots first.
    levels: Vec<Box<[u64]>>,
}

impl Bitmap {
    /// A bitmap for this many slots, all empty.
    pub fn new(slots: u32) -> Self {
        let mut levels = Vec::new();
        let mut bits = slots.max(1);
        loop {
            let words = bits.div_ceil(64);
            levels.push(vec![0; words as usize].into());
            if words == 1 {
                return Self { levels };
            }
            bits = words;
        }
    }

    /// Whether no bit is set.
    pub fn is_empty(&self) -> bool {
        self.levels.last().is_none_or(|top| top[0] == 0)
    }

    /// Sets a bit.
    pub fn set(&mut self, mut bit: u32) {
        for level in &mut self.levels {
            let word = &mut level[(bit >> 6) as usize];
            let known = *word != 0;
            *word |= 1 << (bit & 63);
            if known {
                break;
            }
            bit >>= 6;
        }
    }

    /// Clears a bit.
    pub fn clear(&mut self, mut bit: u32) {
        for level in &mut self.levels {
            let word = &mut level[(bit >> 6) as usize];
            *word &= !(1 << (bit & 63));
            if *word != 0 {
                break;
            }
            bit >>= 6;
        }
    }

    /// The first set bit from `from` on.
    pub fn first_from(&self, from: u32) -> Option<u32> {
        let mut from = from;
        for (height, level) in self.levels.iter().enumerate() {
            let word = *level.get((from >> 6) as usize)?;
            let here = word & (u64::MAX << (from & 63));
            if here != 0 {
                let bit = from & !63 | here.trailing_zeros();
                let below = self.levels[..height].iter().rev();
                return Some(below.fold(bit, |bit, level| {
                    bit << 6 | level[bit as usize].trailing_zeros()
                }));
            }
            from = (from >> 6) + 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::Bitmap;
    use alloc::vec::Vec;

    #[test]
    fn finds_what_a_search_finds() {
        for slots in [1, 63, 64, 65, 4096, 4097, 300_000] {
            let mut bitmap = Bitmap::new(slots);
            let mut set: Vec<u32> = [0, 1, 62, 63, 64, 65, 4095, 4096, 299_999]
                .into_iter()
                .filter(|bit| *bit < slots)
                .collect();
            set.iter().for_each(|bit| bitmap.set(*bit));
            loop {
                assert_eq!(bitmap.is_empty(), set.is_empty());
                for from in set
                    .iter()
                    .flat_map(|bit| [bit.saturating_sub(1), *bit, bit + 1])
                {
                    let first = set.iter().copied().find(|bit| *bit >= from);
                    assert_eq!(bitmap.first_from(from), first, "{slots} from {from}");
                }
                match set.pop() {
                    Some(bit) => bitmap.clear(bit),
                    None => break,
                }
            }
        }
    }
}
