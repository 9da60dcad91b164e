//! The simple wheel with expiration listeners.

use std::{fmt, hash::Hash, time::Duration};

use super::{by_id::ById, error::Error, scheme::ticks, simple::Simple, timers::Timers};

/// Names a listener, so that it can be removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(u64);

type Listener<Id> = Box<dyn FnMut(&Id) + Send>;

/// Elements that expire unless they are added again within a timeout, as a heartbeat does;
/// listeners are told of each expiry.
pub struct Expiring<Id> {
    wheel: ById<Id, Timers<Id, Simple>>,
    /// In ticks.
    timeout: u64,
    listeners: Vec<(ListenerId, Listener<Id>)>,
    /// Number of listeners added so far.
    count: u64,
}

impl<Id: Clone + Eq + Hash> Expiring<Id> {
    /// Elements that expire after `timeout`, rounded up to whole ticks.
    ///
    /// # Errors
    ///
    /// A tick of zero, one longer than the timeout, and a timeout of more than 2^24 - 1 ticks.
    pub fn new(timeout: Duration, tick: Duration) -> Result<Self, Error> {
        let timeout = ticks(timeout, tick)?;
        // One slot more than the timeout, so that an element is never in the slot of the hand.
        let slots = u32::try_from(timeout + 1).unwrap_or(u32::MAX);
        Ok(Self {
            wheel: ById::new(Timers::new(Simple::new(slots)?)),
            timeout,
            listeners: Vec::new(),
            count: 0,
        })
    }

    /// Adds a listener: a function that is called with each expired element, after the listeners
    /// that were added before.
    pub fn add_listener(&mut self, listener: impl FnMut(&Id) + Send + 'static) -> ListenerId {
        self.count += 1;
        let id = ListenerId(self.count);
        self.listeners.push((id, Box::new(listener)));
        id
    }

    /// Removes a listener. Returns whether it existed.
    pub fn remove_listener(&mut self, listener: ListenerId) -> bool {
        let before = self.listeners.len();
        self.listeners.retain(|(id, _)| *id != listener);
        self.listeners.len() < before
    }

    /// Adds an element, or restarts the timeout of one that exists. Returns the ticks that it has
    /// left.
    ///
    /// # Errors
    ///
    /// Too many elements.
    pub fn add(&mut self, now: u64, id: Id) -> Result<u64, Error> {
        self.add_with(now, id, self.timeout)
    }

    /// Like [`add`](Self::add), but with a timeout of its own, in ticks.
    ///
    /// # Errors
    ///
    /// Also a timeout of 0, or one longer than that of the wheel.
    pub fn add_with(&mut self, now: u64, id: Id, timeout: u64) -> Result<u64, Error> {
        Error::check("the timeout in ticks", timeout, 1, self.timeout)?;
        self.wheel.start(now, timeout, id)?;
        Ok(timeout)
    }

    /// Ticks that an element has left, if it exists.
    pub fn time_left(&self, now: u64, id: &Id) -> Option<u64> {
        self.wheel.time_left(now, id)
    }

    /// Removes an element. Returns whether it existed.
    pub fn remove(&mut self, id: &Id) -> bool {
        self.wheel.stop(id)
    }

    /// Advances to tick `now` within a budget, like
    /// [`per_tick_bookkeeping`](super::Scheme::per_tick_bookkeeping), and calls the listeners with
    /// everything that it has found.
    pub fn tick(&mut self, now: u64, budget: usize) -> bool {
        let done = self.wheel.tick(now, budget);
        while let Some((id, _)) = self.wheel.expired() {
            for (_, listener) in &mut self.listeners {
                listener(&id);
            }
        }
        done
    }

    /// Removes all elements and returns them, without calling listeners. The wheel may be used
    /// again.
    pub fn stop(&mut self) -> Vec<Id> {
        self.wheel.stop_all()
    }
}

impl<Id: fmt::Debug> fmt::Debug for Expiring<Id> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Expiring")
            .field("wheel", &self.wheel)
            .field("timeout", &self.timeout)
            .field("listeners", &self.listeners.len())
            .finish()
    }
}
