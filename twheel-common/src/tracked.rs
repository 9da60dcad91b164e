//! A flow that only one CPU sees: what the state machine makes of a connection's packets, one after
//! the other.

use crate::{
    decision::{Effects, Record, decide},
    flow::Word,
    key::Direction,
    numbers::{self, advance, is_apart},
    segment::Segment,
    state::{Change, Known, Seen, View},
};

/// A flow that only one CPU sees: the result of a connection's packets, one after the other. (The
/// data plane does the same on words that CPUs share.)
#[derive(Clone, Copy, Debug)]
pub struct Tracked {
    /// What was seen.
    pub seen: Seen,
    /// What else is known.
    pub known: Known,
    /// It is older than two seconds.
    pub lasts: bool,
}

impl Tracked {
    /// Begins a flow with its first segment; `None` if the segment begins none.
    pub fn first(segment: &Segment, view: View) -> Option<Self> {
        let seen = Seen::first(segment.direction, segment.flags, view)?;
        let known = Known {
            positions: numbers::first(segment),
            doubt: 0,
            is_own_way: true,
            is_local: false,
        };
        Some(Self {
            seen,
            known,
            lasts: false,
        })
    }

    /// Processes a further segment.
    pub fn see(&mut self, segment: &Segment, view: View) -> Change {
        let change = self.seen.next(segment, &self.known, view);
        self.apply(segment, view, false);
        change
    }

    /// Processes a further segment from this host, when what was seen of the flow so far was
    /// [forged](crate::way::SideWay::is_disproved_by).
    pub fn see_disproved(&mut self, segment: &Segment, view: View) -> Change {
        let Some(seen) = self.seen.anew(segment) else {
            return self.see(segment, view);
        };
        self.apply(segment, view, true);
        Change::NewGeneration(seen)
    }

    /// Does what follows from a segment.
    fn apply(&mut self, segment: &Segment, view: View, is_disproved: bool) {
        let before = self.seen;
        let record = Record {
            word: Word::new(0, 0, before),
            known: self.known,
            is_disproved,
            lasts: self.lasts,
            has_way: true,
            is_ours: true,
        };
        let decision = decide(&record, segment, 0, view, |_| 0);
        let effects = decision.effects;
        if !effects.has(Effects::TAKEN) {
            return;
        }
        if effects.has(Effects::WORD) {
            self.seen = decision.word.seen();
        } else if before.is_told_by(segment.direction, view) {
            self.known.positions = numbers::first(segment);
        } else {
            self.follow(before, segment);
        }
        if effects.has(Effects::BEGINS) {
            self.seen = self.seen.started();
        }
        if effects.has(Effects::BOTH) {
            self.known.positions = numbers::first(segment);
        }
        if effects.has(Effects::OTHER) {
            self.set_position(segment.direction.reverse(), segment.ack);
        }
        if effects.has(Effects::DOUBT) {
            self.known.doubt = decision.doubt;
        }
        if effects.has(Effects::FOLLOWS) {
            self.follow(before, segment);
        }
    }

    fn follow(&mut self, before: Seen, segment: &Segment) {
        let positions = self.known.positions;
        if let Some(position) = advance(positions, before, segment) {
            self.set_position(segment.direction, position);
        }
        if is_apart(positions, segment) {
            let Known {
                doubt, is_own_way, ..
            } = self.known;
            let apart = numbers::apart(positions, doubt, before, segment, is_own_way);
            if let Some(position) = apart.other {
                self.set_position(segment.direction.reverse(), position);
            }
            if let Some(position) = apart.own {
                self.known.doubt = position;
            }
        }
    }

    fn set_position(&mut self, direction: Direction, position: u32) {
        let [low, high] = &mut self.known.positions;
        match direction {
            Direction::FromLow => *low = position,
            Direction::FromHigh => *high = position,
        }
    }
}
