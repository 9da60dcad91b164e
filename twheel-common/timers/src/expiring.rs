//! The simple wheel with expiration listeners.

use std::{boxed::Box, fmt, hash::Hash, time::Duration, vec::Vec};

use crate::{by_id::ById, error::Error, scheme::ticks, simple::Simple, timers::Timers};

/// Names a listener, so that it can be removed: what [`Expiring::add_listener`] returns.
///
/// ```
/// use std::time::Duration;
/// use twheel_timers::{Expiring, ListenerId};
///
/// let mut wheel = Expiring::<u32>::new(Duration::from_secs(1), Duration::from_millis(100))?;
/// let listener: ListenerId = wheel.add_listener(|id| println!("{id} has expired"));
/// assert!(wheel.remove_listener(listener));
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ListenerId(u64);

type Listener<Id> = Box<dyn FnMut(&Id) + Send>;

/// Elements that expire unless they are added again within a timeout, as a heartbeat does;
/// listeners are told of each expiry.
///
/// ```
/// use std::{sync::mpsc, time::Duration};
/// use twheel_timers::Expiring;
///
/// let ms = Duration::from_millis;
/// // 30 ticks of 100 ms.
/// let mut nodes = Expiring::new(ms(3_000), ms(100))?;
/// let (dead, deaths) = mpsc::channel();
/// nodes.add_listener(move |node: &&str| dead.send(*node).unwrap());
/// nodes.insert(0, "a")?;
/// nodes.insert(0, "b")?;
/// nodes.insert(20, "b")?;
/// nodes.advance(30, 1_000);
/// assert_eq!(deaths.try_iter().collect::<Vec<_>>(), ["a"]);
/// assert_eq!(nodes.time_left(30, &"b"), Some(20));
/// # Ok::<(), twheel_timers::Error>(())
/// ```
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
    ///
    /// ```
    /// use std::time::Duration;
    /// use twheel_timers::Expiring;
    ///
    /// let second = Duration::from_secs(1);
    /// assert!(Expiring::<u32>::new(second, second / 10).is_ok());
    /// assert!(Expiring::<u32>::new(second, second * 10).is_err());
    /// ```
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
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::Expiring;
    /// # let mut wheel = Expiring::new(Duration::from_secs(1), Duration::from_millis(100))?;
    /// wheel.add_listener(|id: &u32| println!("{id} has expired"));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn add_listener(&mut self, listener: impl FnMut(&Id) + Send + 'static) -> ListenerId {
        self.count += 1;
        let id = ListenerId(self.count);
        self.listeners.push((id, Box::new(listener)));
        id
    }

    /// Removes a listener. Returns whether it existed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::Expiring;
    /// # let mut wheel = Expiring::new(Duration::from_secs(1), Duration::from_millis(100))?;
    /// let listener = wheel.add_listener(|id: &u32| println!("{id} has expired"));
    /// assert!(wheel.remove_listener(listener));
    /// assert!(!wheel.remove_listener(listener));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
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
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::Expiring;
    /// # let mut wheel = Expiring::new(Duration::from_secs(1), Duration::from_millis(100))?;
    /// assert_eq!(wheel.insert(0, "a")?, 10);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn insert(&mut self, now: u64, id: Id) -> Result<u64, Error> {
        self.insert_with(now, id, self.timeout)
    }

    /// Like [`insert`](Self::insert), but with a timeout of its own, in ticks.
    ///
    /// # Errors
    ///
    /// Also a timeout of 0, or one longer than that of the wheel.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::Expiring;
    /// # let mut wheel = Expiring::new(Duration::from_secs(1), Duration::from_millis(100))?;
    /// assert_eq!(wheel.insert_with(0, "a", 3)?, 3);
    /// assert!(wheel.insert_with(0, "a", 11).is_err());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn insert_with(&mut self, now: u64, id: Id, timeout: u64) -> Result<u64, Error> {
        Error::check("the timeout in ticks", timeout, 1, self.timeout)?;
        self.wheel.insert(now, timeout, id)?;
        Ok(timeout)
    }

    /// Ticks that an element has left, if it exists.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::Expiring;
    /// # let mut wheel = Expiring::new(Duration::from_secs(1), Duration::from_millis(100))?;
    /// wheel.insert(0, "a")?;
    /// assert_eq!(wheel.time_left(4, &"a"), Some(6));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn time_left(&self, now: u64, id: &Id) -> Option<u64> {
        self.wheel.time_left(now, id)
    }

    /// Removes an element. Returns whether it existed.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::Expiring;
    /// # let mut wheel = Expiring::new(Duration::from_secs(1), Duration::from_millis(100))?;
    /// wheel.insert(0, "a")?;
    /// assert!(wheel.remove(&"a"));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn remove(&mut self, id: &Id) -> bool {
        self.wheel.remove(id)
    }

    /// Advances to tick `now` within a budget, like [`Scheme::advance`](crate::Scheme::advance), and
    /// calls the listeners with everything that it has found.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::Expiring;
    /// # let mut wheel = Expiring::new(Duration::from_secs(1), Duration::from_millis(100))?;
    /// wheel.add_listener(|id| assert_eq!(*id, "a"));
    /// wheel.insert(0, "a")?;
    /// assert!(wheel.advance(10, 1_000));
    /// assert_eq!(wheel.time_left(10, &"a"), None);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn advance(&mut self, now: u64, budget: usize) -> bool {
        let done = self.wheel.advance(now, budget);
        while let Some((id, _)) = self.wheel.pop_expired() {
            for (_, listener) in &mut self.listeners {
                listener(&id);
            }
        }
        done
    }

    /// Removes all elements and returns them, without calling listeners. The wheel may be used
    /// again.
    ///
    /// ```
    /// # use std::time::Duration;
    /// # use twheel_timers::Expiring;
    /// # let mut wheel = Expiring::new(Duration::from_secs(1), Duration::from_millis(100))?;
    /// wheel.insert(0, "a")?;
    /// assert_eq!(wheel.drain(), ["a"]);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn drain(&mut self) -> Vec<Id> {
        self.wheel.drain()
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
