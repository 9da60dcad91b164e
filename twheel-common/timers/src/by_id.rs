//! Timers that are named by ids.

use std::{collections::HashMap, hash::Hash, vec::Vec};

use crate::{error::Error, scheme::Scheme, slab::Key};

/// A scheme whose timers are named by the client's own ids. An id is armed at most once: starting
/// an armed id moves its deadline.
///
/// ```
/// use twheel_timers::{ById, Hashed, Timers};
///
/// let mut idle = ById::new(Timers::new(Hashed::new(1_024)?));
/// idle.insert(0, 30, "10.0.0.1:443")?;
/// // A packet: 30 ticks from now.
/// idle.insert(20, 30, "10.0.0.1:443")?;
/// assert_eq!(idle.time_left(40, &"10.0.0.1:443"), Some(10));
/// assert_eq!(idle.expire(49), None);
/// assert_eq!(idle.expire(50), Some(("10.0.0.1:443", 50)));
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct ById<Id, S> {
    scheme: S,
    armed: HashMap<Id, Key>,
}

impl<Id: Clone + Eq + Hash, S: Scheme<Id>> ById<Id, S> {
    /// Uses a scheme without timers.
    ///
    /// ```
    /// use twheel_timers::{ById, Heap, Timers};
    ///
    /// let timers = ById::<u32, _>::new(Timers::new(Heap::new()));
    /// ```
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
    /// As for [`Scheme::insert`]; nothing is changed then.
    ///
    /// ```
    /// # use twheel_timers::{ById, Heap, Timers};
    /// # let mut timers = ById::new(Timers::new(Heap::new()));
    /// assert!(!timers.insert(0, 5, "a")?);
    /// assert!(timers.insert(0, 9, "a")?);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn insert(&mut self, now: u64, interval: u64, id: Id) -> Result<bool, Error> {
        if let Some(key) = self.armed.get(&id) {
            return self.scheme.reset(*key, now, interval);
        }
        let key = self.scheme.insert(now, interval, id.clone())?;
        self.armed.insert(id, key);
        Ok(false)
    }

    /// Disarms an id. Returns whether it was armed.
    ///
    /// ```
    /// # use twheel_timers::{ById, Heap, Timers};
    /// # let mut timers = ById::new(Timers::new(Heap::new()));
    /// timers.insert(0, 5, "a")?;
    /// assert!(timers.remove(&"a"));
    /// assert!(!timers.remove(&"a"));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn remove(&mut self, id: &Id) -> bool {
        let key = self.armed.remove(id);
        key.is_some_and(|key| self.scheme.remove(key).is_some())
    }

    /// Whether an id is armed.
    ///
    /// ```
    /// # use twheel_timers::{ById, Heap, Timers};
    /// # let mut timers = ById::new(Timers::new(Heap::new()));
    /// timers.insert(0, 5, "a")?;
    /// assert!(timers.contains(&"a") && !timers.contains(&"b"));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn contains(&self, id: &Id) -> bool {
        self.armed.contains_key(id)
    }

    /// Ticks until an id is due, if it is armed.
    ///
    /// ```
    /// # use twheel_timers::{ById, Heap, Timers};
    /// # let mut timers = ById::new(Timers::new(Heap::new()));
    /// timers.insert(0, 5, "a")?;
    /// assert_eq!(timers.time_left(2, &"a"), Some(3));
    /// assert_eq!(timers.time_left(2, &"b"), None);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn time_left(&self, now: u64, id: &Id) -> Option<u64> {
        let deadline = self.scheme.deadline(*self.armed.get(id)?)?;
        Some(deadline.saturating_sub(now))
    }

    /// As [`Scheme::advance`].
    ///
    /// ```
    /// # use twheel_timers::{ById, Heap, Timers};
    /// # let mut timers = ById::new(Timers::new(Heap::new()));
    /// timers.insert(0, 5, "a")?;
    /// assert!(timers.advance(5, 100));
    /// assert_eq!(timers.pop_expired(), Some(("a", 5)));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn advance(&mut self, now: u64, budget: usize) -> bool {
        self.scheme.advance(now, budget)
    }

    /// As [`Scheme::pop_expired`]: an id that is due, and its deadline. The id may be started again
    /// at once.
    ///
    /// ```
    /// # use twheel_timers::{ById, Heap, Timers};
    /// # let mut timers = ById::new(Timers::new(Heap::new()));
    /// timers.insert(0, 5, "a")?;
    /// timers.advance(9, 100);
    /// assert_eq!(timers.pop_expired(), Some(("a", 5)));
    /// assert_eq!(timers.pop_expired(), None);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn pop_expired(&mut self) -> Option<(Id, u64)> {
        let expired = self.scheme.pop_expired()?;
        self.armed.remove(&expired.value);
        Some((expired.value, expired.deadline))
    }

    /// As [`Scheme::expire`]: an id that is due at tick `now`, and its deadline.
    ///
    /// ```
    /// # use twheel_timers::{ById, Heap, Timers};
    /// # let mut timers = ById::new(Timers::new(Heap::new()));
    /// timers.insert(0, 5, "a")?;
    /// assert_eq!(timers.expire(9), Some(("a", 5)));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn expire(&mut self, now: u64) -> Option<(Id, u64)> {
        let expired = self.scheme.expire(now)?;
        self.armed.remove(&expired.value);
        Some((expired.value, expired.deadline))
    }

    /// Disarms all ids. Returns them.
    ///
    /// ```
    /// # use twheel_timers::{ById, Heap, Timers};
    /// # let mut timers = ById::new(Timers::new(Heap::new()));
    /// timers.insert(0, 5, "a")?;
    /// assert_eq!(timers.drain(), ["a"]);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn drain(&mut self) -> Vec<Id> {
        self.armed.clear();
        self.scheme.drain()
    }

    /// The scheme, for its other methods.
    ///
    /// ```
    /// # use twheel_timers::{ById, Heap, Timers};
    /// use twheel_timers::Scheme;
    ///
    /// let mut timers = ById::new(Timers::new(Heap::new()));
    /// timers.insert(0, 5, "a")?;
    /// assert_eq!((timers.scheme().len(), timers.scheme().next_tick()), (1, Some(5)));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn scheme(&self) -> &S {
        &self.scheme
    }
}
