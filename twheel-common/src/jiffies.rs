//! Which values the clock has had: whether a packet that was noted at one of them may have come later than that.
//!
//! Jiffies are counted by one CPU. While the host of a virtual machine holds that one up, they stand still, packets on other
//! CPUs are noted by the old value, and then jiffies jump. Whoever notes a packet therefore notes the value in one bit. If
//! the value behind it was seen too, jiffies did not jump from there.

/// Values of a word: a bit each, and above them which values they are.
const BITS: u32 = 32;
/// Words: values of the last 2^16 units can be looked up.
pub const WORDS: u32 = 1 << 11;
/// Units for which jiffies stand still at most while packets come: a CPU whose fifth tick finds them unchanged counts them
/// itself (`MAX_STALLED_JIFFIES` in `kernel/time/tick-sched.c`, since 5.18), and its first one may come a unit after
/// the last change.
pub const MAX_STALL: u32 = 6;

/// The place of a value's word.
#[inline(always)]
pub fn place(value: u32) -> u32 {
    value / BITS % WORDS
}

/// A word once a value was seen; `None` if that changes nothing.
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

/// Whether a value was seen, as the word at its place says.
#[inline(always)]
pub fn is_seen(word: u64, value: u32) -> bool {
    let (tag, bit) = split(value);
    word >> BITS == tag && word & bit != 0
}

/// Which values a word is of, and the bit of this one.
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
