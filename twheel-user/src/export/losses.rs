//! How many events could not be sent because the history does not have them, by instance: each is
//! counted once, however often the history is read again.

use std::{collections::VecDeque, sync::Arc};

use crate::identity::Identity;

/// Most instances of which each has a sum of its own.
const INSTANCES: usize = 16;

/// What is missing.
#[derive(Default)]
pub struct Losses {
    instances: VecDeque<Sum>,
    /// What was missing of instances before these.
    earlier: u64,
    /// What is missing of an instance that is not known yet.
    unclaimed: u64,
}

/// What is missing of an instance.
struct Sum {
    identity: Arc<Identity>,
    /// What is counted for good.
    sure: u64,
    /// What is missing before events that have not arrived: it is found again when these are read again.
    pending: u64,
    /// The most that these two were.
    most: u64,
    /// What was told last.
    told: u64,
}

impl Losses {
    /// The history is read again, from behind what has arrived; and what was told may not have arrived.
    pub fn begin(&mut self) {
        for sum in &mut self.instances {
            (sum.pending, sum.told) = (0, 0);
        }
    }

    /// So many events are missing before one that was read now.
    pub fn missing(&mut self, identity: &Arc<Identity>, events: u64) {
        self.change(identity, |sum| sum.pending += events);
    }

    /// The event after these has arrived.
    pub fn confirm(&mut self, identity: &Arc<Identity>, events: u64) {
        self.change(identity, |sum| {
            sum.pending = sum.pending.saturating_sub(events);
            sum.sure += events;
        });
    }

    /// So many events are missing, of which this is found once.
    pub fn lost(&mut self, identity: Option<Arc<Identity>>, events: u64) {
        self.unclaimed += events;
        if let Some(identity) = identity
            && self.unclaimed > 0
        {
            let events = std::mem::take(&mut self.unclaimed);
            self.change(&identity, |sum| sum.sure += events);
        }
    }

    fn change(&mut self, identity: &Arc<Identity>, change: impl FnOnce(&mut Sum)) {
        let at = self.instances.iter().position(|it| is(it, identity));
        let at = at.unwrap_or_else(|| {
            if self.instances.len() == INSTANCES
                && let Some(oldest) = self.instances.pop_front()
            {
                self.earlier += oldest.most;
            }
            self.instances.push_back(Sum {
                identity: identity.clone(),
                sure: 0,
                pending: 0,
                most: 0,
                told: 0,
            });
            self.instances.len() - 1
        });
        let sum = &mut self.instances[at];
        change(sum);
        sum.most = sum.most.max(sum.sure + sum.pending);
    }

    /// How many are missing of an instance.
    pub fn of(&self, identity: &Identity) -> u64 {
        let sum = self.instances.iter().find(|it| is(it, identity));
        sum.map_or(0, |sum| sum.most)
    }

    /// How many are missing of all.
    pub fn all(&self) -> u64 {
        let sums = self.instances.iter().map(|sum| sum.most);
        self.earlier + self.unclaimed + sums.sum::<u64>()
    }

    /// Whether there is something to tell.
    pub fn has_grown(&self) -> bool {
        self.instances.iter().any(|sum| sum.most > sum.told)
    }

    /// The instances of which more is missing than was told, and how many: they are told now.
    pub fn take_grown(&mut self) -> Vec<(Arc<Identity>, u64)> {
        let grown = self.instances.iter_mut().filter(|it| it.most > it.told);
        grown
            .map(|sum| {
                sum.told = sum.most;
                (sum.identity.clone(), sum.most)
            })
            .collect()
    }
}

fn is(sum: &Sum, identity: &Identity) -> bool {
    sum.identity.instance == identity.instance
}

#[cfg(test)]
mod tests {
    use super::*;

    fn named(instance: impl Into<String>) -> Arc<Identity> {
        Arc::new(Identity {
            instance: instance.into(),
            ..Identity::default()
        })
    }

    #[test]
    fn what_is_missing_is_told_for_the_instance_that_lost_it_and_again_in_each_session() {
        let mut losses = Losses::default();
        losses.lost(None, 3);
        assert!(!losses.has_grown());
        losses.lost(Some(named("a")), 0);
        losses.missing(&named("b"), 5);
        let told = |losses: &mut Losses| -> Vec<_> {
            let grown = losses.take_grown().into_iter();
            grown.map(|(it, sum)| (it.instance.clone(), sum)).collect()
        };
        let both = [("a".to_owned(), 3), ("b".to_owned(), 5)];
        assert_eq!(told(&mut losses), both);
        assert!(!losses.has_grown() && told(&mut losses).is_empty());
        losses.begin();
        assert_eq!(told(&mut losses), both);
        assert_eq!(losses.all(), 8);
    }

    #[test]
    fn the_sums_of_many_instances_are_one() {
        let mut losses = Losses::default();
        for number in 0..1_000 {
            losses.lost(Some(named(number.to_string())), 2);
        }
        assert_eq!((losses.instances.len(), losses.all()), (INSTANCES, 2_000));
        assert_eq!(losses.of(&named("999")), 2);
    }
}
