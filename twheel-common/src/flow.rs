//! What a flow has beside its key: the word that CPUs share, its traffic, and its deadline.

pub use crate::key::{Direction, FlowKey, VLAN_BITS, ZONES, proto_code};
use crate::seen::Seen;
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// What one side of a flow has sent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Traffic {
    /// Packets.
    pub packets: u64,
    /// Their bytes, from the IP header on, as conntrack counts them.
    pub bytes: u64,
}

/// The traffic of both sides, that of the key's low endpoint first.
pub type Account = [Traffic; 2];

/// The part of a flow that CPUs share, in one word, so that a decision on it is always on all of
/// it. From the lowest bit: 32 bits of the clock at the latest packet (the *stamp*), 12 of the
/// generation, 20 of [`Seen`].
///
/// The word changes by compare-and-swap. The one exception is a younger stamp: it is stored into
/// its half of the word without one; or, if data of the flow [counts as
/// life](crate::offload::counts_data), is exchanged there alone. Such a stamp may be a unit ahead.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Word(pub u64);

impl Word {
    /// Packs the three parts.
    #[inline(always)]
    pub fn new(now: u64, generation: u16, seen: Seen) -> Self {
        Self(now & 0xffff_ffff | u64::from(generation & 0xfff) << 32 | u64::from(seen.0) << 44)
    }

    /// Low 32 bits of the clock at the latest packet.
    #[inline(always)]
    pub fn stamp(self) -> u32 {
        self.0 as u32
    }

    /// Counts the flows that a record has held, and the connections of one flow, wrapping.
    #[inline(always)]
    pub fn generation(self) -> u16 {
        (self.0 >> 32) as u16 & 0xfff
    }

    /// What was seen.
    #[inline(always)]
    pub fn seen(self) -> Seen {
        Seen((self.0 >> 44) as u32)
    }

    /// Mask for the word's high half that clears [`Seen::is_starting`] and keeps everything else.
    pub const STARTED: u32 = !(Seen::STARTING << 12);

    /// Likewise for [`Seen::is_posted`].
    pub const DELIVERED: u32 = !(Seen::POSTED << 12);

    /// Whether a packet at `now` is younger than the stamp.
    #[inline(always)]
    pub fn is_older_than(self, now: u64) -> bool {
        (now as u32).wrapping_sub(self.stamp()) as i32 > 0
    }

    /// The same generation after a packet at `now`; `seen` is what has been seen by then.
    #[inline(always)]
    pub fn with(self, now: u64, seen: Seen) -> Self {
        let stamp = if self.is_older_than(now) { now } else { self.0 };
        Self::new(stamp, self.generation(), seen)
    }

    /// The same stamp and generation, with `seen`.
    #[inline(always)]
    pub fn with_seen(self, seen: Seen) -> Self {
        Self::new(self.0, self.generation(), seen)
    }

    /// Whether both words say the same of a flow. Whether it is [queued](Seen::is_posted) does not
    /// count.
    #[inline(always)]
    pub fn is_same(self, other: Self) -> bool {
        (self.0 ^ other.0) & !(u64::from(Seen::POSTED) << 44) == 0
    }

    /// The same flow, ended.
    #[inline(always)]
    pub fn dead(self) -> Self {
        Self::new(self.0, self.generation(), Seen::DEAD)
    }

    /// Whether the flow has ended.
    #[inline(always)]
    pub fn is_dead(self) -> bool {
        self.seen() == Seen::DEAD
    }
}

/// Units for which a flow has been idle. Stamps are the low 32 bits of the clock and wrap. A stamp
/// that seems to lie ahead was written by another CPU after `now` was read: the flow is not idle.
#[inline(always)]
pub fn idle(now: u64, last_seen: u32) -> u32 {
    let idle = (now as u32).wrapping_sub(last_seen);
    if idle as i32 >= 0 { idle } else { 0 }
}

/// Units since a flow was created; `created` is the low 32 bits of the clock then. A flow that
/// seems to be created a little after `now` was begun by another CPU after `now` was read: its age
/// is 0.
#[inline(always)]
pub fn age(now: u64, created: u32) -> u32 {
    let age = (now as u32).wrapping_sub(created);
    if age < u32::MAX << 16 { age } else { 0 }
}

/// The greatest age of a flow, in units; the age of older flows is kept at it. (It is half of what
/// 32 bits can express, so that a late timer visit still recognizes it.)
pub const MAX_AGE: u32 = 1 << 31;
