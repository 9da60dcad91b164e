//! Reports of live flows: when an `update` is due, and what has been counted since the last one.
//!
//! The wheel visits a flow at its deadline, or when its next update is due if that comes first. So
//! an update costs a visit, and a flow that is not due costs nothing. An update is due each *active
//! timeout* (the term of NetFlow and of RFC 5102, 5.11.3) after the flow's beginning or its last
//! update. A flow without a packet since then has nothing to report.

use crate::flow::{Account, age};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// The last update of the flow that has these details, or of one that had them before it.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Reported {
    /// Clock then, units.
    pub at: u64,
    /// What had been counted by then.
    pub account: Account,
}

/// The part of a flow's life that has not been reported yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval {
    /// Its length, in units.
    pub length: u32,
    /// It begins with an update, not with the flow.
    pub follows: bool,
}

impl Interval {
    /// Of a flow that was `created` (low 32 bits of the clock) and whose details were last reported
    /// at `reported` (units). An update from before the flow's beginning was another flow's. (One
    /// of the same unit, too: the first update comes at least a unit after the beginning.)
    #[inline(always)]
    pub fn new(now: u64, created: u32, reported: u64) -> Self {
        let age = age(now, created);
        let since = now.wrapping_sub(reported);
        if since < u64::from(age) {
            return Self {
                length: since as u32,
                follows: true,
            };
        }
        Self {
            length: age,
            follows: false,
        }
    }

    /// When the next update is due (units).
    #[inline(always)]
    pub fn due(self, now: u64, active_timeout: u32) -> u64 {
        now + u64::from(active_timeout.saturating_sub(self.length))
    }

    /// Whether an update is due at `decided` (units), which lies `now` or a little before it.
    #[inline(always)]
    pub fn is_over(self, now: u64, decided: u64, active_timeout: u32) -> bool {
        self.due(now, active_timeout) <= now
            && u64::from(self.length) >= u64::from(active_timeout) + now.saturating_sub(decided)
    }

    /// Whether the flow, idle for so long (units), had a packet in it, or in the unit of the update
    /// with which it begins: that packet may have come after it.
    #[inline(always)]
    pub fn has_packets(self, idle: u32) -> bool {
        idle <= self.length || !self.follows
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WRAP: u64 = 1 << 32;

    #[test]
    fn an_interval_begins_with_the_flow_or_its_last_update() {
        let interval = |now, created, reported| {
            let it = Interval::new(now, created, reported);
            (it.length, it.follows)
        };
        assert_eq!(interval(100, 40, 0), (60, false));
        assert_eq!(interval(100, 40, 70), (30, true));
        // Another flow's.
        assert_eq!(interval(100, 40, 40), (60, false));
        assert_eq!(interval(100, 40, 39), (60, false));
        assert_eq!(interval(100, 100, 100), (0, false));
        // Stamps wrap, the clock does not: an update a whole turn ago is another flow's.
        let now = 5 * WRAP + 10;
        assert_eq!(interval(now, 5, now - 3), (3, true));
        assert_eq!(interval(now, 5, now - 3 - WRAP), (5, false));
        assert_eq!(interval(now, u32::MAX, now - 4), (4, true));
        // A flow that another CPU has begun after `now` was read.
        assert_eq!(interval(100, 101, 99), (0, false));
    }

    #[test]
    fn an_update_is_due_no_earlier_than_its_tick() {
        let interval = Interval {
            length: 60,
            follows: true,
        };
        assert_eq!(interval.due(1000, 60), 1000);
        assert_eq!(interval.due(1000, 75), 1015);
        assert_eq!(interval.due(1000, 50), 1000);
        assert!(interval.is_over(1000, 1000, 60));
        assert!(!interval.is_over(1000, 999, 60));
        assert!(interval.is_over(1000, 999, 59));
        assert!(!interval.is_over(1000, 1000, 61));
    }

    #[test]
    fn only_a_flow_with_packets_is_reported() {
        let mut interval = Interval {
            length: 60,
            follows: true,
        };
        assert!(interval.has_packets(60) && !interval.has_packets(61));
        // The packet that began the flow.
        interval.follows = false;
        assert!(interval.has_packets(61));
    }
}
