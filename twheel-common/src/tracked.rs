//! A flow that only one CPU sees: what the state machine makes of a connection's packets, one after
//! the other.

use crate::{
    key::Direction,
    numbers::{self, advance, is_apart},
    segment::{Segment, tcp},
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
        Some(Self { seen, known })
    }

    /// Processes a further segment.
    pub fn see(&mut self, segment: &Segment, view: View) -> Change {
        let change = self.seen.next(segment, &self.known, view);
        let before = self.seen;
        match change {
            Change::Ignored | Change::SameWay | Change::Ended | Change::AddIfItLasts(_) => {}
            Change::Nothing if before.is_told_by(segment.direction, view) => {
                self.known.positions = numbers::first(segment);
            }
            Change::Nothing => self.follow(before, segment),
            Change::Add(seen) => {
                self.seen = seen;
                if segment.flags & tcp::RST == 0 {
                    self.follow(before, segment);
                }
            }
            Change::Answers(seen) => {
                self.seen = seen;
                self.set_position(segment.direction.reverse(), segment.ack);
                self.follow(before, segment);
            }
            Change::Places(seen) => {
                self.seen = seen;
                self.known.positions = numbers::first(segment);
            }
            Change::Doubt(seen, number, answers) => {
                self.seen = seen;
                self.known.doubt = number;
                if answers {
                    self.set_position(segment.direction.reverse(), segment.ack);
                }
            }
            Change::NewGeneration(seen) => {
                self.seen = seen;
                self.known.positions = numbers::first(segment);
            }
        }
        change
    }

    /// Processes a further segment from this host, when what was seen of the flow so far was
    /// [forged](crate::way::SideWay::is_disproved_by).
    pub fn see_disproved(&mut self, segment: &Segment, view: View) -> Change {
        match self.seen.anew(segment) {
            Some(seen) => {
                self.seen = seen;
                self.known.positions = numbers::first(segment);
                Change::NewGeneration(seen)
            }
            None => self.see(segment, view),
        }
    }

    fn follow(&mut self, before: Seen, segment: &Segment) {
        let positions = self.known.positions;
        if let Some(position) = advance(positions, before, segment) {
            self.set_position(segment.direction, position);
        }
        if is_apart(positions, segment) {
            let apart = numbers::apart(positions, self.known.doubt, before, segment, true);
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
