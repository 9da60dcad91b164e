//! A set of rules: one bit each.

use crate::bits;
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Most rules of a policy. Their numbers are 1 to this; 0 means no rule.
pub const MAX_RULES: usize = 255;

/// A set of rules: bit `n % 64` of word `n / 64` is rule `n`. Bit 0 is never set.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Rules([u64; 4]);

impl Rules {
    /// The empty set.
    pub const NONE: Self = Self([0; 4]);
    /// All possible rules, 1 to [`MAX_RULES`].
    pub const ALL: Self = Self([!1, !0, !0, !0]);

    /// The rules that are in both sets.
    #[inline(always)]
    pub fn and(self, other: Self) -> Self {
        let ([a, b, c, d], [e, f, g, h]) = (self.0, other.0);
        Self([a & e, b & f, c & g, d & h])
    }

    /// The rules that are in either set.
    #[inline(always)]
    pub fn or(self, other: Self) -> Self {
        let ([a, b, c, d], [e, f, g, h]) = (self.0, other.0);
        Self([a | e, b | f, c | g, d | h])
    }

    /// Whether the set is empty.
    #[inline(always)]
    pub fn is_empty(self) -> bool {
        let [a, b, c, d] = self.0;
        a | b | c | d == 0
    }

    /// The lowest number, 1 to [`MAX_RULES`]; 0 if the set is empty.
    #[inline(always)]
    pub fn first(self) -> u16 {
        let [a, b, c, d] = self.0;
        let (base, word) = if a != 0 {
            (0, a)
        } else if b != 0 {
            (64, b)
        } else if c != 0 {
            (128, c)
        } else if d != 0 {
            (192, d)
        } else {
            return 0;
        };
        base + bits::lowest(word) as u16
    }

    /// Adds a rule. Numbers that no rule can have are ignored.
    pub fn insert(&mut self, rule: u16) {
        if (1..=MAX_RULES).contains(&usize::from(rule)) {
            self.0[usize::from(rule >> 6) & 3] |= 1 << (rule & 63);
        }
    }

    /// Removes a rule.
    pub fn remove(&mut self, rule: u16) {
        if usize::from(rule) <= MAX_RULES {
            self.0[usize::from(rule >> 6) & 3] &= !(1 << (rule & 63));
        }
    }

    /// Whether the set has the rule of this number.
    pub fn contains(self, rule: u16) -> bool {
        usize::from(rule) <= MAX_RULES && self.0[usize::from(rule >> 6) & 3] >> (rule & 63) & 1 != 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn set(rules: &[u16]) -> Rules {
        let mut set = Rules::NONE;
        rules.iter().for_each(|&rule| set.insert(rule));
        set
    }

    #[test]
    fn every_rule_has_a_bit_of_its_own() {
        for rule in 1..=MAX_RULES as u16 {
            let one = set(&[rule]);
            assert_eq!(one.first(), rule);
            assert!(Rules::ALL.and(one) == one && !one.is_empty());
            for other in 0..=MAX_RULES as u16 + 1 {
                assert_eq!(one.contains(other), other == rule, "{rule} {other}");
                let lower = [rule, other]
                    .into_iter()
                    .filter(|&rule| (1..256).contains(&rule));
                assert_eq!(set(&[rule, other]).first(), lower.min().unwrap());
            }
        }
        let mut all = Rules::NONE;
        (0..=u16::MAX).for_each(|rule| all.insert(rule));
        assert_eq!(all, Rules::ALL);
        (0..=u16::MAX)
            .filter(|&rule| rule != 200)
            .for_each(|rule| all.remove(rule));
        assert_eq!(all, set(&[200]));
        assert_eq!(Rules::NONE.first(), 0);
        assert!(Rules::NONE.is_empty());
    }

    #[test]
    fn sets_meet_and_join() {
        let (a, b) = (set(&[1, 64, 128, 255]), set(&[2, 64, 192, 255]));
        assert_eq!(a.and(b), set(&[64, 255]));
        assert_eq!(a.or(b), set(&[1, 2, 64, 128, 192, 255]));
    }
}
