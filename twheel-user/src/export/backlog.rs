//! What was read of a history and has not arrived yet: how old it is, and how many events are missing
//! before it.

use std::{
    collections::VecDeque,
    mem,
    sync::Arc,
    time::{Duration, SystemTime},
};

use super::{losses::Losses, position::Last};
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
    /// How many events are missing before some of them.
    gaps: Vec<Number>,
}

/// What was read and has not arrived.
#[derive(Default)]
pub struct Backlog {
    written: VecDeque<Batch>,
    /// When the first event was that is not written yet.
    unwritten: Option<SystemTime>,
    /// What is missing before events that are not written yet.
    gaps: Vec<Number>,
    /// The highest number of the instance that was read last.
    last: Option<Number>,
    /// The highest number of the instance that has arrived last.
    arrived: Option<Number>,
    /// What is missing, by instance.
    pub losses: Losses,
}

impl Backlog {
    /// What has arrived before is what an earlier process has kept.
    pub fn new(kept: Option<&Last>) -> Self {
        let arrived = kept.map(|last| {
            let identity = Identity {
                instance: last.instance.clone(),
                ..Identity::default()
            };
            (Arc::new(identity), last.number)
        });
        Self {
            arrived,
            ..Self::default()
        }
    }

    /// The last event that has arrived, to be kept.
    pub fn last(&self) -> Option<Last> {
        self.arrived.as_ref().map(|(identity, number)| Last {
            instance: identity.instance.clone(),
            number: *number,
        })
    }

    /// The history is read again, from behind the last event that has arrived.
    pub fn begin(&mut self) {
        self.written.clear();
        self.unwritten = None;
        self.gaps.clear();
        self.losses.begin();
        self.last = self.arrived.clone();
    }

    /// An event was read. `is_cut`: the history has removed segments between this one and the one before
    /// it. Then the numbers that are missing in between count as lost; if this is another instance,
    /// those before this one, since nobody knows how many the instance before had.
    pub fn read(&mut self, past: &Past, is_cut: bool) {
        self.unwritten.get_or_insert(past.mark.time);
        let (identity, number) = (&past.identity, past.mark.number);
        let before = match &self.last {
            Some((it, last)) if it.instance == identity.instance => *last,
            Some(_) => 0,
            // What comes before the first event of all was nothing that we had to send.
            None => {
                let before = number.saturating_sub(1);
                self.arrived = Some((identity.clone(), before));
                before
            }
        };
        let gap = number.saturating_sub(before + 1);
        if is_cut && gap > 0 {
            self.losses.missing(identity, gap);
            self.gaps.push((identity.clone(), gap));
        }
        // Numbers may come a little out of order.
        self.last = Some((identity.clone(), number.max(before)));
    }

    /// Whether there is something to write.
    pub fn is_unwritten(&self) -> bool {
        self.unwritten.is_some()
    }

    /// What was read is written now. `next` is the position behind it.
    pub fn wrote(&mut self, next: Position) {
        if let (Some(oldest), Some(last)) = (self.unwritten.take(), self.last.clone()) {
            let gaps = mem::take(&mut self.gaps);
            self.written.push_back(Batch {
                next,
                oldest,
                last,
                gaps,
            });
        }
    }

    /// Everything before this position has arrived.
    pub fn arrived(&mut self, before: Position) {
        while let Some(batch) = self.written.front()
            && batch.next <= before
        {
            let Some(batch) = self.written.pop_front() else {
                return;
            };
            for (identity, gap) in &batch.gaps {
                self.losses.confirm(identity, *gap);
            }
            self.arrived = Some(batch.last);
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
            backlog.read(&past("a", number, second(number)), false);
            backlog.wrote(at(number));
        }
        backlog.read(&past("a", 4, second(4)), false);
        for (arrived, behind) in [(0, 8), (1, 7), (3, 5)] {
            backlog.arrived(at(arrived));
            assert_eq!(backlog.behind(second(9)), Duration::from_secs(behind));
        }
        backlog.wrote(at(4));
        backlog.arrived(at(4));
        assert_eq!(backlog.behind(second(9)), Duration::ZERO);
    }

    fn lost(backlog: &Backlog, instance: &str) -> u64 {
        backlog
            .losses
            .of(&past(instance, 0, SystemTime::now()).identity)
    }

    #[test]
    fn a_gap_in_the_numbers_is_counted_once_and_from_what_has_arrived() {
        let now = SystemTime::now();
        let mut backlog = Backlog::default();
        // What was before the first event is not ours.
        backlog.read(&past("a", 7, now), true);
        backlog.wrote(at(1));
        backlog.arrived(at(1));
        backlog.read(&past("a", 8, now), false);
        assert_eq!(lost(&backlog, "a"), 0);
        // What was not written is read again; meanwhile the history has removed some, and more later.
        for number in [18, 18, 21] {
            backlog.begin();
            assert!(lost(&backlog, "a") <= 13);
            backlog.read(&past("a", number, now), true);
            assert_eq!(lost(&backlog, "a"), number - 8);
        }
        backlog.wrote(at(2));
        backlog.arrived(at(2));
        // Another gap, after that one has arrived.
        backlog.begin();
        backlog.read(&past("a", 24, now), true);
        // 8 to 20, 22 and 23.
        assert_eq!(lost(&backlog, "a"), 13 + 2);
        // Numbers may come a little out of order.
        backlog.read(&past("a", 23, now), false);
        backlog.read(&past("a", 26, now), true);
        assert_eq!(backlog.losses.all(), 13 + 2 + 1);
    }

    #[test]
    fn what_is_missing_of_another_instance_is_counted_even_by_another_process() {
        let now = SystemTime::now();
        for (kept, number, missing) in [
            (Some("a"), 1_000, 999),
            (Some("b"), 1_000, 992),
            (Some("b"), 8, 0),
            // The file of an earlier twheel does not tell.
            (None, 1_000, 0),
        ] {
            let kept = kept.map(|instance| Last {
                instance: instance.to_owned(),
                number: 7,
            });
            let mut backlog = Backlog::new(kept.as_ref());
            backlog.begin();
            backlog.read(&past("b", number, now), true);
            assert_eq!(lost(&backlog, "b"), missing, "{kept:?}");
            assert_eq!(lost(&backlog, "a"), 0);
            backlog.wrote(at(1));
            backlog.arrived(at(1));
            assert_eq!(
                backlog.last(),
                Some(Last {
                    instance: "b".to_owned(),
                    number
                })
            );
        }
        // An instance that begins loses nothing.
        let mut backlog = Backlog::default();
        backlog.read(&past("a", 1, now), false);
        backlog.read(&past("b", 5, now), false);
        assert_eq!(backlog.losses.all(), 0);
    }
}
