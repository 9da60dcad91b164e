//! Timeouts of their own that programs hand over for their connections, beside those of rules.
//!
//! The data plane keeps such a flow in the table for at least its own timeout, and lets it be known
//! when data came that counts as life of it. Whether the timeout has passed is found out lazily, as
//! everywhere here: packets leave times, and whoever looks at the flow when it may be due compares
//! them. That is the running twheel, with a wheel of the registrations.
//!
//! The latest time is a flow's stamp already. Whether it is that of such data is said by its lowest
//! bit, so packets of such flows store [odd](of_data) and [even](of_other) times. One with such data
//! does no more than to store its own. One without [replaces](replace) the stamp: if that is of data,
//! it goes to the flow's [`Offload`] before.

use crate::{
    flow::{Word, idle},
    key::Direction,
};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What a registered flow has beside its [`Details`](crate::table::Details): 8 bytes, which are
/// compared and exchanged as one word. It has no meaning unless the flow is [marked](OFFLOADED).
#[repr(C, align(8))]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Offload {
    /// Low 32 bits of the clock when there was data that counts, or when the timer was started, if
    /// that came later. Of data it may be an earlier time, if the stamp is [of data](is_of_data).
    pub heard: u32,
    /// Units for which the flow stays in the table at least, while it is established; and [`UNSEEN`].
    pub stay: u32,
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
/// All of these bits.
pub const MARKS: u32 = OFFLOADED | SIDES;
const SIDES: u32 = 3 * COUNTS;

/// The stamp of a packet with data that counts: its time, or a unit later.
#[inline(always)]
pub fn of_data(now: u64) -> u64 {
    now | 1
}

/// The stamp of another packet of a flow of which data [counts](counts_data): its time, or a unit later.
#[inline(always)]
pub fn of_other(now: u64) -> u64 {
    now.wrapping_add(1) & !1
}

/// Whether a stamp is of data that counts, if data of the flow does.
#[inline(always)]
pub fn is_of_data(stamp: u32) -> bool {
    stamp & 1 != 0
}

/// Whether data in some direction counts, by a flow's [`MARKS`].
#[inline(always)]
pub fn counts_data(marks: u32) -> bool {
    marks & SIDES != 0
}

/// Whether data in a direction counts, by a flow's [`MARKS`].
#[inline(always)]
pub fn counts(marks: u32, direction: Direction) -> bool {
    marks >> direction as u32 & COUNTS != 0
}

/// A flow whose packets leave their times, on the CPUs on which they come.
pub trait Heard {
    /// Makes [`Offload::heard`] this time, unless it is later.
    fn raise(&self, to: u32);
    /// Makes the stamp another one if it is `held`. Whoever sees the new one sees what was
    /// [raised](Self::raise) before.
    fn exchange(&self, held: u32, stamp: u32);
}

/// A packet without data that counts comes at `now`. `held`: the stamp, which is older.
///
/// If another packet stores its time meanwhile, that stays: it is no older than this one, but for the
/// time that passes within a CPU.
#[inline(always)]
pub fn replace(flow: &impl Heard, held: u32, now: u64) {
    if is_of_data(held) {
        flow.raise(held);
    }
    flow.exchange(held, of_other(now) as u32);
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
    pub fn latest(self, word: Word, heard: u32, now: u64) -> Word {
        let counts = self.has(Self::ANY) || is_of_data(word.stamp());
        // The stamp of a flow that was entered is no packet's.
        let counts = counts && !word.seen().is_unplaced();
        let stamp = match counts && idle(now, word.stamp()) < idle(now, heard) {
            true => word.stamp(),
            false => heard,
        };
        Word::new(stamp.into(), word.generation(), word.seen())
    }
}

#[cfg(test)]
mod tests {
    use core::cell::Cell;

    use super::*;
    use crate::{seen::Seen, state::State};

    /// Of a flow of which packets have told the sequence numbers.
    fn told() -> Seen {
        Seen::of_socket(State::Established, Direction::FromLow, &[]).told()
    }

    #[test]
    fn only_what_counts_as_life_is_the_latest() {
        let stamp = |life: Life, stamp, heard| {
            let word = Word::new(stamp, 3, told());
            let of = life.latest(word, heard, 100);
            assert_eq!((of.generation(), of.seen()), (3, told()));
            of.stamp()
        };
        assert_eq!(stamp(Life::LOW, of_other(90), 70), 70);
        assert_eq!(stamp(Life::LOW, of_data(90), 70), 91);
        assert_eq!(stamp(Life::ANY, 90, 70), 90);
        // The timer was restarted after the latest packet.
        assert_eq!(stamp(Life::ANY, 90, 95), 95);
        assert_eq!(stamp(Life::HIGH, of_data(90), 95), 95);
    }

    #[test]
    fn stamps_are_no_earlier_than_their_packets() {
        for now in [4, 5, u64::from(u32::MAX), u64::MAX] {
            let [data, other] = [of_data(now), of_other(now)];
            assert!(is_of_data(data as u32) && !is_of_data(other as u32));
            assert!([data, other].iter().all(|it| it.wrapping_sub(now) <= 1));
        }
    }

    #[derive(Default)]
    struct Flow {
        heard: Cell<u32>,
        stamp: Cell<u32>,
    }

    impl Heard for Flow {
        fn raise(&self, to: u32) {
            self.heard.set(later(self.heard.get(), to));
        }

        fn exchange(&self, held: u32, stamp: u32) {
            if self.stamp.get() == held {
                self.stamp.set(stamp);
            }
        }
    }

    #[test]
    fn the_time_of_data_is_kept_when_another_packet_comes() {
        let flow = Flow::default();
        let comes = |now| {
            replace(&flow, flow.stamp.get(), now);
            (flow.heard.get(), flow.stamp.get())
        };
        // No data has come yet.
        assert_eq!(comes(20), (0, 20));
        flow.stamp.set(of_data(30) as u32);
        assert_eq!(comes(40), (31, 40));
        assert_eq!(comes(51), (31, 52));
        // Another packet stores its time just before.
        replace(&flow, 40, 60);
        assert_eq!(flow.stamp.get(), 52);
    }

    #[test]
    fn times_wrap_and_may_lie_ahead() {
        let now = (1 << 32) + 5;
        let stamp = |stamp: u32, heard| {
            let word = Word::new(stamp.into(), 0, told());
            Life(3).latest(word, heard, now).stamp()
        };
        assert_eq!(stamp(u32::MAX, 0xffff_fff0), u32::MAX);
        assert_eq!(stamp(0xffff_fff1, u32::MAX), u32::MAX);
        // Written by a CPU whose clock went on after ours was read.
        assert_eq!(stamp(7, 4), 7);
        assert_eq!(later(u32::MAX, 3), 3);
        assert_eq!(later(3, u32::MAX), 3);
    }

    #[test]
    fn marks_name_the_sides_that_count() {
        // The highest bits: lower ones are of numbers.
        assert_eq!([OFFLOADED, UNSEEN].map(u32::leading_zeros), [0, 0]);
        let [low, high] = [Direction::FromLow, Direction::FromHigh];
        let of = |life: Life| [low, high].map(|side| counts(life.marks(), side));
        assert_eq!(of(Life::data(low)), [true, false]);
        assert_eq!(of(Life::data(high)), [false, true]);
        assert_eq!(of(Life(3)), [true, true]);
        assert_eq!(of(Life::ANY), [false, false]);
        for life in [Life::LOW, Life::HIGH, Life(3), Life::ANY] {
            assert_eq!(life.marks() & OFFLOADED, OFFLOADED);
            assert_eq!(counts_data(life.marks()), life != Life::ANY);
            assert_eq!(life.marks() & !MARKS, 0);
        }
    }
}
