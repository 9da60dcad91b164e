//! Which values the clock has had. This tells whether a packet may have come later than its stamp
//! says.
//!
//! One CPU counts jiffies. If the host of a virtual machine holds up that CPU, jiffies stand still;
//! packets on other CPUs get the old value as their stamp, and then jiffies jump. So every CPU that
//! stamps a packet also notes the value, in one bit. If the value after a stamp was noted too,
//! jiffies did not jump there.

/// Values per word: one bit each, and in the word's upper half the number that tells which values.
const BITS: u32 = 32;
/// Number of words: values of the last 2^16 units can be looked up.
pub const WORDS: u32 = 1 << 11;
/// Most units for which jiffies stand still while packets come. A CPU whose fifth tick finds them
/// unchanged counts them itself (`MAX_STALLED_JIFFIES` in `kernel/time/tick-sched.c`, since 5.18),
/// and the first of those ticks may come a unit after the last change.
pub const MAX_STALL: u32 = 6;

/// The index of a value's word.
#[inline(always)]
pub fn place(value: u32) -> u32 {
    value / BITS % WORDS
}

/// The word after a value was seen; `None` if it does not change.
#[inline(always)]
pub fn see(word: u64, value: u32) -> Option<u64> {
    if is_seen(word, value) {
        return None;
    }
    let (tag, bit) = split(value);
    let others = if (word >> BITS) == tag {
        word
    } else {
        tag << BITS
    };
    Some(others | bit)
}

/// Whether a value was seen, given the word at its index.
#[inline(always)]
pub fn is_seen(word: u64, value: u32) -> bool {
    let (tag, bit) = split(value);
    word >> BITS == tag && word & bit != 0
}

/// The number that tells which values are in a value's word, and the value's bit.
#[inline(always)]
fn split(value: u32) -> (u64, u64) {
    (u64::from(value / BITS), 1 << (value % BITS))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_seen_is_told_until_its_word_is_anothers() {
        let mut words = vec![0; WORDS as usize];
        let mut see = |value: u32| {
            let word = &mut words[place(value) as usize];
            if let Some(new) = super::see(*word, value) {
                *word = new;
            }
            let word = *word;
            assert_eq!(super::see(word, value), None, "once is enough");
            assert!(is_seen(word, value));
            word
        };
        for value in [5, 31, 32, (1 << 31) + 640, u32::MAX, 0] {
            see(value);
        }
        assert!(!is_seen(words[place(4) as usize], 4));
        for value in [5, 31, 32, (1 << 31) + 640, u32::MAX] {
            assert!(is_seen(words[place(value) as usize], value), "{value}");
        }
        // The same place, 2^16 units later.
        let later = 5 + WORDS * BITS;
        assert_eq!(place(later), place(5));
        let mut word = words[place(5) as usize];
        assert!(!is_seen(word, later), "not yet");
        word = super::see(word, later).unwrap();
        assert!(is_seen(word, later));
        assert!(!is_seen(word, 5) && !is_seen(word, later + 1), "{word:x}");
    }
}
