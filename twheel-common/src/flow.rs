//! What a flow is beside its key: the word that CPUs share of it, what it has sent, and when it is due.

pub use crate::key::{Direction, FlowKey, VLAN_BITS, ZONES, proto_code};
use crate::seen::Seen;

/// What one side of a flow has sent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets.
    pub packets: u64,
    /// Their bytes, from the IP header on: conntrack's count.
    pub bytes: u64,
}

/// What both have: the key's low endpoint first.
pub type Account = [Traffic; 2];

/// What CPUs share of a flow, in one word, so that whoever decides on it decides on all of it: from the
/// lowest bit 32 of the clock at the latest packet (the *stamp*), 12 of the generation, 20 of [`Seen`].
///
/// It changes by compare-and-swap; only a younger stamp is stored without, into its half of the word.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word(pub u64);

impl Word {
    /// A word.
    #[inline(always)]
    pub fn new(now: u64, generation: u16, seen: Seen) -> Self {
        Self(now & 0xffff_ffff | u64::from(generation & 0xfff) << 32 | u64::from(seen.0) << 44)
    }

    /// Low 32 bits of the clock at the latest packet.
    #[inline(always)]
    pub fn stamp(self) -> u32 {
        self.0 as u32
    }

    /// Counts the flows that a place in the table has had, and the lives of a flow, wrapping.
    #[inline(always)]
    pub fn generation(self) -> u16 {
        (self.0 >> 32) as u16 & 0xfff
    }

    /// What was seen.
    #[inline(always)]
    pub fn seen(self) -> Seen {
        Seen((self.0 >> 44) as u32)
    }

    /// The bits of the word's high half that end [`Seen::is_starting`] when they alone are kept.
    pub const STARTED: u32 = !(Seen::STARTING << 12);

    /// The same for [`Seen::is_posted`].
    pub const DELIVERED: u32 = !(Seen::POSTED << 12);

    /// Whether a packet at `now` is younger than the stamp.
    #[inline(always)]
    pub fn is_older_than(self, now: u64) -> bool {
        (now as u32).wrapping_sub(self.stamp()) as i32 > 0
    }

    /// The same life with a packet at `now`, of which this has now been seen.
    #[inline(always)]
    pub fn with(self, now: u64, seen: Seen) -> Self {
        let stamp = if self.is_older_than(now) { now } else { self.0 };
        Self::new(stamp, self.generation(), seen)
    }

    /// The same packet and life, of which this has now been seen.
    #[inline(always)]
    pub fn with_seen(self, seen: Seen) -> Self {
        Self::new(self.0, self.generation(), seen)
    }

    /// Whether both say the same of a flow; that it is [posted](Seen::is_posted) says nothing of it.
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

/// Units for which a flow has been idle. Stamps are the low 32 bits of the clock and wrap; a stamp
/// that seems to lie ahead was written by another CPU after `now` was read, and is young.
#[inline(always)]
pub fn idle(now: u64, last_seen: u32) -> u32 {
    let idle = (now as u32).wrapping_sub(last_seen);
    if idle as i32 >= 0 { idle } else { 0 }
}

/// What a visit of the wheel finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit {
    /// The flow's deadline has passed.
    Expire,
    /// It has not: look again at this time (units).
    Rearm(u64),
}

/// Decides what becomes of a flow that the wheel visits. Never early: `Expire` only where the flow
/// was idle for its whole timeout (units). `doubt`: by how many units its last packet may have come later than its stamp says.
#[inline(always)]
pub fn visit(now: u64, word: Word, timeout: u32, doubt: impl FnOnce(u32) -> u32) -> Visit {
    let idle = idle(now, word.stamp());
    let mut least = timeout;
    if idle >= least {
        // Asked by few visits.
        least = least.saturating_add(doubt(word.stamp()));
    }
    if idle >= least {
        return Visit::Expire;
    }
    Visit::Rearm(now + u64::from(least - idle))
}

/// Units since a flow was created, of which the low 32 bits are kept. One that seems to be created a little
/// later than now was begun by another CPU after `now` was read, and is young.
#[inline(always)]
pub fn age(now: u64, created: u32) -> u32 {
    let age = (now as u32).wrapping_sub(created);
    if age < u32::MAX << 16 { age } else { 0 }
}

/// The oldest that a flow gets, units; who is older is kept at that. (Half of what 32 bits can tell:
/// a visit that comes late still finds it.)
pub const MAX_AGE: u32 = 1 << 31;
