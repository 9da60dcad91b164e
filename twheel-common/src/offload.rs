//! Timeouts of their own that programs hand over for their connections, beside those of rules.
//!
//! The data plane keeps such a flow in the table for at least its own timeout, and lets it be known
//! when data came that counts as life of it. Whether the timeout has passed is found out lazily, as
//! everywhere here: packets leave times, and whoever looks at the flow when it may be due compares
//! them. That is the running twheel, with a wheel of the registrations.
//!
//! A packet has stored its time in the flow's line before: the stamp. So one that had such data sets
//! [`FRESH`] there, and is done. Only when another packet, without such data, is about to store its
//! own time, the former one is [settled](settle): it goes to the record's [`Offload`].

use crate::{
    flow::{Word, idle},
    key::Direction,
};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What the record of a registered flow has beside it: 16 bytes. It has no meaning unless the
/// record is [marked](OFFLOADED).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Offload {
    /// Low 32 bits of the clock when there was data that counts, or when the timer was started, if
    /// that came later. Of data it may be an earlier time, if the flow is [fresh](FRESH).
    pub heard: u32,
    /// 0, so that both can be compared and exchanged as one word.
    pub reserved: u32,
    /// Units for which the flow stays in the table at least, while it is established; and [`UNSEEN`].
    pub stay: u32,
    /// The registration's place in the running twheel. The data plane does not read it.
    pub place: u32,
}

/// Bit of [`Offload::stay`]: no packet of the flow had been seen when it was registered. The data
/// plane does not heed it.
pub const UNSEEN: u32 = 1 << 31;

/// Bit of a line's [`details`](crate::table::Line::details): the flow is registered. Userspace
/// sets it and the two that follow, by an atomic operation on the mapped table; a record that gets
/// another flow loses them.
pub const OFFLOADED: u32 = 1 << 31;
/// Likewise: data from the key's low endpoint counts as life. The next bit says so of the high one.
pub const COUNTS: u32 = 1 << 29;
/// Likewise: the latest packet had data that counts. Its time is the flow's stamp.
pub const FRESH: u32 = 1 << 28;
/// Likewise: a packet [settles](settle) the time of the latest data.
pub const SETTLING: u32 = 1 << 27;
/// All of these bits.
pub const MARKS: u32 = OFFLOADED | (3 * COUNTS) | FRESH | SETTLING;

/// Whether data in a direction counts, by a flow's [`MARKS`].
#[inline(always)]
pub fn counts(marks: u32, direction: Direction) -> bool {
    marks >> direction as u32 & COUNTS != 0
}

/// A flow whose packets leave their times, on the CPUs on which they come. All that is done to its
/// [`MARKS`] is fully ordered.
pub trait Heard {
    /// Low 32 bits of the clock at the latest packet.
    fn stamp(&self) -> u32;
    /// Makes [`Offload::heard`] this time, unless it is later.
    fn raise(&self, to: u32);
    /// Sets [`SETTLING`]. Returns the marks before.
    fn begin_settling(&self) -> u32;
    /// Clears [`FRESH`].
    fn clear_fresh(&self);
    /// Clears [`SETTLING`].
    fn end_settling(&self);
}

/// Keeps the time of the latest data, for a packet without such that is about to store its own. The
/// flow was fresh, and its stamp older than that packet.
///
/// Data that comes on another CPU meanwhile stores its time, and then sets [`FRESH`]. If it did so
/// before that is cleared here, its time is seen after that. Else the flow is fresh. Until all is
/// kept, whoever looks takes the stamp for the time of data: it is no older.
#[inline(always)]
pub fn settle(flow: &impl Heard) {
    let marks = flow.begin_settling();
    if marks & SETTLING != 0 {
        // Another packet does it. The time of this one may be taken for that of data.
        return;
    }
    if marks & FRESH != 0 {
        let before = flow.stamp();
        flow.raise(before);
        flow.clear_fresh();
        let after = flow.stamp();
        if after != before {
            flow.raise(after);
        }
    }
    flow.end_settling();
}

/// The later of two times, of the low 32 bits of the clock.
#[inline(always)]
pub fn later(one: u32, other: u32) -> u32 {
    if other.wrapping_sub(one) as i32 > 0 {
        other
    } else {
        one
    }
}

/// What counts as life of a connection; bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Life(pub u8);

impl Life {
    /// Data from the key's low endpoint.
    pub const LOW: Self = Self(1);
    /// Data from its high endpoint.
    pub const HIGH: Self = Self(2);
    /// Any packet, with or without data.
    pub const ANY: Self = Self(7);

    /// Data from this side.
    pub fn data(direction: Direction) -> Self {
        match direction {
            Direction::FromLow => Self::LOW,
            Direction::FromHigh => Self::HIGH,
        }
    }

    /// Whether all of these bits are among those.
    pub fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// The [`MARKS`] of a flow that is registered with this.
    pub fn marks(self) -> u32 {
        // Of any packet the stamp is the time.
        let sides = if self.has(Self::ANY) { 0 } else { self.0 };
        OFFLOADED | (COUNTS * u32::from(sides))
    }

    /// A flow's word with the latest time that counts as its stamp. `now`: the clock.
    pub fn latest(self, marks: u32, word: Word, heard: u32, now: u64) -> Word {
        let counts = self.has(Self::ANY) || marks & (FRESH | SETTLING) != 0;
        let stamp = match counts && idle(now, word.stamp()) < idle(now, heard) {
            true => word.stamp(),
            false => heard,
        };
        Word::new(stamp.into(), word.generation(), word.seen())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::seen::Seen;

    #[test]
    fn only_what_counts_as_life_is_the_latest() {
        let word = Word::new(90, 3, Seen(5));
        let stamp = |life: Life, marks, heard| {
            let of = life.latest(marks, word, heard, 100);
            assert_eq!((of.generation(), of.seen()), (3, Seen(5)));
            of.stamp()
        };
        assert_eq!(stamp(Life::LOW, Life::LOW.marks(), 70), 70);
        assert_eq!(stamp(Life::LOW, Life::LOW.marks() | FRESH, 70), 90);
        assert_eq!(stamp(Life::LOW, Life::LOW.marks() | SETTLING, 70), 90);
        assert_eq!(stamp(Life::ANY, Life::ANY.marks(), 70), 90);
        // The timer was restarted after the latest packet.
        assert_eq!(stamp(Life::ANY, Life::ANY.marks(), 95), 95);
        assert_eq!(stamp(Life::HIGH, Life::HIGH.marks() | FRESH, 95), 95);
    }

    #[test]
    fn times_wrap_and_may_lie_ahead() {
        let now = (1 << 32) + 5;
        let stamp = |stamp: u32, heard| {
            let word = Word::new(stamp.into(), 0, Seen(0));
            Life(3).latest(FRESH, word, heard, now).stamp()
        };
        assert_eq!(stamp(u32::MAX, 0xffff_fff0), u32::MAX);
        assert_eq!(stamp(0xffff_fff0, u32::MAX), u32::MAX);
        // Written by a CPU whose clock went on after ours was read.
        assert_eq!(stamp(7, 4), 7);
        assert_eq!(later(u32::MAX, 3), 3);
        assert_eq!(later(3, u32::MAX), 3);
    }

    #[test]
    fn marks_name_the_sides_that_count() {
        let [low, high] = [Direction::FromLow, Direction::FromHigh];
        let of = |life: Life| [low, high].map(|side| counts(life.marks(), side));
        assert_eq!(of(Life::data(low)), [true, false]);
        assert_eq!(of(Life::data(high)), [false, true]);
        assert_eq!(of(Life(3)), [true, true]);
        assert_eq!(of(Life::ANY), [false, false]);
        for life in [Life::LOW, Life::HIGH, Life(3), Life::ANY] {
            assert_eq!(life.marks() & (OFFLOADED | FRESH | SETTLING), OFFLOADED);
            assert_eq!(life.marks() & !MARKS, 0);
        }
    }
}
