//! Timers that are named by ids.

use std::{collections::HashMap, hash::Hash};

use super::{error::Error, scheme::Scheme, slab::Handle};

/// A scheme whose timers are named by the client's own ids. An id is armed at most once: starting
/// an armed id moves its deadline.
#[derive(Debug)]
pub struct ById<Id, S> {
    scheme: S,
    armed: HashMap<Id, Handle>,
}

impl<Id: Clone + Eq + Hash, S: Scheme<Id>> ById<Id, S> {
    /// Uses a scheme without timers.
    pub fn new(scheme: S) -> Self {
        Self {
            scheme,
            armed: HashMap::new(),
        }
    }

    /// Arms an id for tick `now + interval`, or for the next tick if that is in the past. Returns
    /// whether it was armed before.
    ///
    /// # Errors
    ///
    /// As for [`Scheme::start_timer`]; nothing is changed then.
    pub fn start(&mut self, now: u64, interval: u64, id: Id) -> Result<bool, Error> {
        if let Some(timer) = self.armed.get(&id) {
            return self.scheme.restart_timer(*timer, now, interval);
        }
        let timer = self.scheme.start_timer(now, interval, id.clone())?;
        self.armed.insert(id, timer);
        Ok(false)
    }

    /// Disarms an id. Returns whether it was armed.
    pub fn stop(&mut self, id: &Id) -> bool {
        let timer = self.armed.remove(id);
        timer.is_some_and(|timer| self.scheme.stop_timer(timer).is_some())
    }

    /// Ticks until an id is due, if it is armed.
    pub fn time_left(&self, now: u64, id: &Id) -> Option<u64> {
        let deadline = self.scheme.deadline(*self.armed.get(id)?)?;
        Some(deadline.saturating_sub(now))
    }

    /// As [`Scheme::per_tick_bookkeeping`].
    pub fn tick(&mut self, now: u64, budget: usize) -> bool {
        self.scheme.per_tick_bookkeeping(now, budget)
    }

    /// As [`Scheme::expiry_processing`]: an id that is due, and its deadline. The id may be started
    /// again at once.
    pub fn expired(&mut self) -> Option<(Id, u64)> {
        let expired = self.scheme.expiry_processing()?;
        self.armed.remove(&expired.value);
        Some((expired.value, expired.deadline))
    }

    /// Disarms all ids. Returns them.
    pub fn stop_all(&mut self) -> Vec<Id> {
        self.armed.clear();
        self.scheme.stop_all()
    }

    /// The scheme, for its other methods.
    pub fn scheme(&self) -> &S {
        &self.scheme
    }
}
