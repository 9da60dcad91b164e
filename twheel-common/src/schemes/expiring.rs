//! The simple wheel with expiration listeners.

use std::{fmt, hash::Hash, time::Duration};

use super::{ById, Error, Simple, Timers, ticks};

/// What a listener is removed by.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(u64);

type Listener<Id> = Box<dyn FnMut(&Id) + Send>;

/// Elements that expire when they are not added again within a timeout, and those who want to hear
/// of it: a heartbeat resets its element.
pub struct Expiring<Id> {
    wheel: ById<Id, Timers<Id, Simple>>,
    /// In ticks.
    timeout: u64,
    listeners: Vec<(ListenerId, Listener<Id>)>,
    /// Listeners so far.
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
        // A slot more than the timeout, so that an element never stands in that of the hand.
        let slots = u32::try_from(timeout + 1).unwrap_or(u32::MAX);
        Ok(Self {
            wheel: ById::new(Timers::new(Simple::new(slots)?)),
            timeout,
            listeners: Vec::new(),
            count: 0,
        })
    }

    /// Has a function called with each element that expires, after those that were added before.
    pub fn add_listener(&mut self, listener: impl FnMut(&Id) + Send + 'static) -> ListenerId {
        self.count += 1;
        let id = ListenerId(self.count);
        self.listeners.push((id, Box::new(listener)));
        id
    }

    /// Says whether there was such a listener.
    pub fn remove_listener(&mut self, listener: ListenerId) -> bool {
        let before = self.listeners.len();
        self.listeners.retain(|(id, _)| *id != listener);
        self.listeners.len() < before
    }

    /// Adds an element, or moves one that is here already. Returns the ticks that it has left, as
    /// the author's `add` does.
    ///
    /// # Errors
    ///
    /// More elements than there can be.
    pub fn add(&mut self, now: u64, id: Id) -> Result<u64, Error> {
        self.add_with(now, id, self.timeout)
    }

    /// As [`add`](Self::add), with a timeout of its own, in ticks.
    ///
    /// # Errors
    ///
    /// Also a timeout of 0, and one longer than that of the wheel.
    pub fn add_with(&mut self, now: u64, id: Id, timeout: u64) -> Result<u64, Error> {
        Error::check("the timeout in ticks", timeout, 1, self.timeout)?;
        self.wheel.start(now, timeout, id)?;
        Ok(timeout)
    }

    /// Ticks that an element has left, if it is here.
    pub fn time_left(&self, now: u64, id: &Id) -> Option<u64> {
        self.wheel.time_left(now, id)
    }

    /// Removes an element. Says whether it was here.
    pub fn remove(&mut self, id: &Id) -> bool {
        self.wheel.stop(id)
    }

    /// Moves on to tick `now` within a budget, as
    /// [`per_tick_bookkeeping`](super::Scheme::per_tick_bookkeeping), and calls the listeners with
    /// all that has been found.
    pub fn tick(&mut self, now: u64, budget: usize) -> bool {
        let done = self.wheel.tick(now, budget);
        while let Some((id, _)) = self.wheel.expired() {
            for (_, listener) in &mut self.listeners {
                listener(&id);
            }
        }
        done
    }

    /// Removes all elements and returns them; no listener hears of it. The wheel may be used again.
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
