//! What was read of a history and has not arrived yet: how old it is, and how many events the history
//! removed before they were read.

use std::{
    collections::VecDeque,
    sync::Arc,
    time::{Duration, SystemTime},
};

use crate::{
    history::{Past, Position},
    identity::Identity,
};

/// An event that was read: of which instance, and its number there.
type Number = (Arc<Identity>, u64);

/// Events that were written together.
struct Batch {
    /// The position behind them.
    next: Position,
    /// When the oldest of them was.
    oldest: SystemTime,
    /// The last of them.
    last: Number,
}

/// What was read and has not arrived.
#[derive(Default)]
pub struct Backlog {
    written: VecDeque<Batch>,
    /// When the first event was that is not written yet.
    unwritten: Option<SystemTime>,
    /// The event that was read last.
    last: Option<Number>,
    /// The last event that has arrived.
    arrived: Option<Number>,
}

impl Backlog {
    /// The history is read again, from behind the last event that has arrived.
    pub fn begin(&mut self) {
        self.written.clear();
        self.unwritten = None;
        self.last = self.arrived.clone();
    }

    /// An event was read. Returns how many numbers are missing before it.
    pub fn read(&mut self, past: &Past) -> u64 {
        self.unwritten.get_or_insert(past.mark.time);
        let number = past.mark.number;
        let gap = match &self.last {
            Some((identity, last)) if identity.instance == past.identity.instance => {
                number.saturating_sub(last + 1)
            }
            _ => 0,
        };
        self.last = Some((past.identity.clone(), number));
        gap
    }

    /// Whether there is something to write.
    pub fn is_unwritten(&self) -> bool {
        self.unwritten.is_some()
    }

    /// What was read is written now. `next` is the position behind it.
    pub fn wrote(&mut self, next: Position) {
        if let (Some(oldest), Some(last)) = (self.unwritten.take(), self.last.clone()) {
            self.written.push_back(Batch { next, oldest, last });
        }
    }

    /// Everything before this position has arrived.
    pub fn arrived(&mut self, before: Position) {
        while let Some(batch) = self.written.front()
            && batch.next <= before
        {
            self.arrived = self.written.pop_front().map(|batch| batch.last);
        }
    }

    /// How old the oldest event is that has not arrived; 0 if all have.
    pub fn behind(&self, now: SystemTime) -> Duration {
        let oldest = self.written.front().map(|batch| batch.oldest);
        let oldest = oldest.or(self.unwritten);
        oldest.map_or(Duration::ZERO, |oldest| {
            now.duration_since(oldest).unwrap_or_default()
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        history::PastEvent,
        model::{Happened, KnownAs, Mark, RunEvent},
    };

    fn past(instance: &str, number: u64, time: SystemTime) -> Past {
        Past {
            mark: Mark { number, time },
            identity: Arc::new(Identity {
                instance: instance.to_owned(),
                ..Identity::default()
            }),
            event: PastEvent::Run(RunEvent::new(Happened::Attached)),
            known_as: KnownAs::default(),
        }
    }

    fn at(record: u64) -> Position {
        Position {
            segment: 1,
            record,
            checksum: 0,
        }
    }

    #[test]
    fn the_oldest_event_that_has_not_arrived_tells_how_far_an_export_is_behind() {
        let start = SystemTime::now();
        let second = |n| start + Duration::from_secs(n);
        let mut backlog = Backlog::default();
        assert_eq!(backlog.behind(second(9)), Duration::ZERO);
        for number in 1..=3 {
            assert_eq!(backlog.read(&past("a", number, second(number))), 0);
            backlog.wrote(at(number));
        }
        backlog.read(&past("a", 4, second(4)));
        for (arrived, behind) in [(0, 8), (1, 7), (3, 5)] {
            backlog.arrived(at(arrived));
            assert_eq!(backlog.behind(second(9)), Duration::from_secs(behind));
        }
        backlog.wrote(at(4));
        backlog.arrived(at(4));
        assert_eq!(backlog.behind(second(9)), Duration::ZERO);
    }

    #[test]
    fn a_gap_in_the_numbers_of_an_instance_is_counted_from_what_has_arrived() {
        let now = SystemTime::now();
        let mut backlog = Backlog::default();
        assert_eq!(backlog.read(&past("a", 7, now)), 0);
        backlog.wrote(at(1));
        backlog.arrived(at(1));
        assert_eq!(backlog.read(&past("a", 8, now)), 0);
        // What was not written is read again; meanwhile the history has removed some.
        backlog.begin();
        assert_eq!(backlog.read(&past("a", 18, now)), 10);
        assert_eq!(backlog.read(&past("b", 1_000, now)), 0);
        // Numbers may come a little out of order.
        assert_eq!(backlog.read(&past("b", 999, now)), 0);
    }
}
