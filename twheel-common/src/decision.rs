//! What a packet that may change its flow's state does to it. [`decide`] takes what the flow's
//! record says, the packet and the time, and returns what follows: the flow's new word, when the
//! wheel must visit the flow, what is to be told, and which of its sequence numbers change. What
//! these become is decided by [`numbers`](crate::numbers), from the record as it is once the word
//! is stored: other CPUs move them meanwhile.
//!
//! The data plane does what was decided in one place (`twheel-ebpf/src/touch/apply.rs`), with a
//! record that CPUs share. [`Tracked`](crate::tracked::Tracked) does it with a flow of its own.

use crate::{
    flow::Word,
    segment::{Segment, tcp},
    state::{Change, Known, Seen, View},
};

/// What a flow's record says when a packet comes, and what the way of the packet proves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// Time of the latest packet, generation and state bits.
    pub word: Word,
    /// The sequence numbers, and what the way of the packet proves of the packet.
    pub known: Known,
    /// The way of the packet [proves](crate::way::SideWay::is_disproved_by) that what was seen of
    /// its sender before was forged.
    pub is_disproved: bool,
    /// The flow is older than two seconds.
    pub lasts: bool,
    /// The way of one side is known.
    pub has_way: bool,
    /// The flow stands on the wheel of the CPU that decides.
    pub is_ours: bool,
}

/// What follows from a packet.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Decision {
    /// The flow's word from now on, if it has [`Effects::WORD`].
    pub word: Word,
    /// When the wheel must visit the flow (units), because its timeout is shorter now; else 0.
    pub due: u64,
    /// The number that is in doubt from now on, if it has [`Effects::DOUBT`].
    pub doubt: u32,
    /// What else follows.
    pub effects: Effects,
}

/// What follows from a packet, as bits.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Effects(u32);

impl Effects {
    /// The packet belongs to the flow, and keeps it alive. Without [`WORD`](Self::WORD) it changes
    /// no state.
    pub const TAKEN: Self = Self(1 << 0);
    /// The word changes.
    pub const WORD: Self = Self(1 << 1);
    /// The word keeps its stamp: the packet does not keep the flow alive.
    const STAMP: Self = Self(1 << 2);
    /// The connection is over, and another one with the same key begins.
    pub const BEGINS: Self = Self(1 << 3);
    /// The acknowledgment number is the other side's next sequence number.
    pub const OTHER: Self = Self(1 << 4);
    /// The next sequence numbers of both sides are taken from the segment.
    pub const BOTH: Self = Self(1 << 5);
    /// A number is in doubt.
    pub const DOUBT: Self = Self(1 << 6);
    /// The sender's next sequence number [follows](crate::numbers::advance) from the segment.
    pub const FOLLOWS: Self = Self(1 << 7);
    /// The way of the sender is noted.
    pub const WAY: Self = Self(1 << 8);
    /// The policy's rule is chosen anew: the flow is this host's, and seemed to be another one's.
    pub const RULE: Self = Self(1 << 9);
    /// The packet does not fit the flow. It changes nothing.
    pub const IGNORED: Self = Self(1 << 10);
    /// The packet did not come by its sender's way. It changes nothing.
    pub const SAME_WAY: Self = Self(1 << 11);
    /// The flow has ended, or is about to begin anew on another CPU. The packet changes nothing.
    pub const RACED: Self = Self(1 << 12);

    /// Whether all effects of `other` are among these.
    #[inline(always)]
    pub const fn has(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// These effects and those of `other`.
    #[inline(always)]
    pub const fn with(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// Decides what follows from a packet at `now`. `timeout`: how long the flow may be idle with these
/// state bits, in units.
#[inline(always)]
pub fn decide(
    record: &Record,
    segment: &Segment,
    now: u64,
    view: View,
    timeout: impl Fn(Seen) -> u32,
) -> Decision {
    let (before, seen) = (record.word, record.word.seen());
    let anew = match record.is_disproved {
        true => seen.anew(segment),
        false => None,
    };
    let change = match anew {
        Some(seen) => Change::NewGeneration(seen),
        None => match seen.next(segment, &record.known, view) {
            Change::AddIfItLasts(_) if !record.lasts => Change::Nothing,
            change => change,
        },
    };
    let mut decision = Decision::new(change, before, segment, now);
    if decision.effects.has(Effects::BEGINS) {
        if seen.is_starting() {
            // The CPU that began the last generation has not stored its beginning yet.
            return Decision::RACED;
        }
        if anew.is_some() {
            decision.effects = decision.effects.with(Effects::WAY.with(Effects::RULE));
        }
    }
    if !record.has_way && decision.effects.has(Effects::TAKEN) {
        decision.effects = decision.effects.with(Effects::WAY);
    }
    if !decision.effects.has(Effects::WORD) {
        return decision;
    }
    let after = decision.word.seen();
    let timeout_after = timeout(after);
    // A deadline that moves to a later time is found out at the next timer visit. An earlier one
    // must not wait for that.
    if timeout_after < timeout(seen) {
        decision.due = now + u64::from(timeout_after);
        if !record.is_ours {
            decision.word = decision.word.with_seen(after.posted());
        }
    }
    decision
}

impl Decision {
    /// The packet changes nothing, because the flow is not what it was.
    pub const RACED: Self = Self {
        word: Word(0),
        due: 0,
        doubt: 0,
        effects: Effects::RACED,
    };

    /// What follows from a change of a flow whose word is `before`. It says nothing of the wheel.
    #[inline(always)]
    pub fn new(change: Change, before: Word, segment: &Segment, now: u64) -> Self {
        const TAKEN: Effects = Effects::TAKEN;
        const CHANGED: Effects = TAKEN.with(Effects::WORD);
        let doubts = match segment.flags & tcp::SYN {
            0 => CHANGED.with(Effects::DOUBT),
            // A SYN without an answer does not keep a flow alive.
            _ => CHANGED.with(Effects::DOUBT).with(Effects::STAMP),
        };
        // A RST moves no number.
        let follows = match segment.flags & tcp::RST {
            0 => CHANGED.with(Effects::FOLLOWS),
            _ => CHANGED,
        };
        let (effects, seen, doubt) = match change {
            Change::Nothing => (TAKEN, before.seen(), 0),
            Change::Ignored => (Effects::IGNORED, before.seen(), 0),
            Change::SameWay => (Effects::SAME_WAY, before.seen(), 0),
            Change::Ended => (Effects::RACED, before.seen(), 0),
            Change::Add(seen) | Change::AddIfItLasts(seen) => (follows, seen, 0),
            Change::Answers(seen) => (follows.with(Effects::OTHER), seen, 0),
            Change::Places(seen) => {
                let both = Effects::BOTH.with(Effects::WAY);
                (CHANGED.with(both), seen, 0)
            }
            Change::Doubt(seen, number, false) => (doubts, seen, number),
            Change::Doubt(seen, number, true) => (doubts.with(Effects::OTHER), seen, number),
            Change::NewGeneration(seen) => {
                let begins = Effects::BEGINS.with(Effects::BOTH);
                (CHANGED.with(begins), seen.starting(), 0)
            }
        };
        let word = if effects.has(Effects::BEGINS) {
            Word::new(now, before.generation().wrapping_add(1), seen)
        } else if effects.has(Effects::STAMP) {
            before.with_seen(seen)
        } else {
            before.with(now, seen)
        };
        Self {
            word,
            due: 0,
            doubt,
            effects,
        }
    }
}
