//! What all schemes have in common.

use alloc::{boxed::Box, vec::Vec};
use core::time::Duration;

use crate::{entry::Entry, error::Error, slab::Key};

/// The last tick: later deadlines and clocks count as this. It is so far from the end of 64 bits
/// that no sum of a tick and a wheel's range overflows.
///
/// ```
/// use twheel_timers::{Heap, LAST_TICK, Scheme, Timers};
///
/// let mut timers = Timers::new(Heap::new());
/// let never = timers.insert(5, u64::MAX, "never")?;
/// assert_eq!(timers.deadline(never), Some(LAST_TICK));
/// # Ok::<(), twheel_timers::Error>(())
/// ```
pub const LAST_TICK: u64 = 1 << 62;

/// A timer that is due: what [`pop_expired`](Scheme::pop_expired) returns.
///
/// ```
/// use twheel_timers::{Expired, Heap, Scheme, Timers};
///
/// let mut timers = Timers::new(Heap::new());
/// let key = timers.insert(0, 3, "a")?;
/// let expired = timers.expire(10);
/// assert_eq!(expired, Some(Expired { key, value: "a", deadline: 3 }));
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expired<T> {
    /// The timer's key. Stale from now on.
    pub key: Key,
    /// The value that it was started with.
    pub value: T,
    /// The tick at which it was due.
    pub deadline: u64,
}

/// Keeps [`Scheme`] to this crate.
pub trait Sealed {}

impl<S: Sealed + ?Sized> Sealed for Box<S> {}

/// Timers with values `T`, whatever structure they are in.
///
/// The trait is that of all [`Timers`](crate::Timers), and of a `Box<dyn Scheme<T>>`, if the scheme
/// is chosen at run time. It can be used in bounds; only this crate implements it, so that methods
/// can be added.
///
/// | here | Varghese and Lauck | called by |
/// |---|---|---|
/// | [`insert`](Self::insert), [`reset`](Self::reset) | START_TIMER | the client |
/// | [`remove`](Self::remove) | STOP_TIMER | the client |
/// | [`advance`](Self::advance) | PER_TICK_BOOKKEEPING | the clock |
/// | [`pop_expired`](Self::pop_expired) | EXPIRY_PROCESSING | the clock |
/// | [`expire`](Self::expire) | the last two in one | the clock |
///
/// ```
/// use twheel_timers::{Hashed, Heap, Scheme, Timers};
///
/// /// Works with any scheme.
/// fn fire_all(timers: &mut impl Scheme<u32>, now: u64) -> Vec<u32> {
///     std::iter::from_fn(|| timers.expire(now)).map(|timer| timer.value).collect()
/// }
///
/// for name in ["heap", "wheel"] {
///     let mut timers: Box<dyn Scheme<u32>> = match name {
///         "heap" => Box::new(Timers::new(Heap::new())),
///         _ => Box::new(Timers::new(Hashed::new(256)?)),
///     };
///     timers.insert(0, 7, 1)?;
///     timers.insert(0, 2, 2)?;
///     timers.insert(0, 1_000, 3)?;
///     assert_eq!(fire_all(&mut timers, 10), [2, 1]);
/// }
/// # Ok::<(), twheel_timers::Error>(())
/// ```
pub trait Scheme<T>: Sealed {
    /// Starts a timer that is due at tick `now + interval`, or at the next tick if that is in the
    /// past: START_TIMER.
    ///
    /// # Errors
    ///
    /// An interval (in ticks) longer than the scheme supports, or more than 2^28 timers.
    ///
    /// ```
    /// use twheel_timers::{Scheme, Simple, Timers};
    ///
    /// let mut timers = Timers::new(Simple::new(64)?);
    /// let key = timers.insert(100, 5, "a")?;
    /// assert_eq!(timers.deadline(key), Some(105));
    /// assert!(timers.insert(100, 64, "too far").is_err());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn insert(&mut self, now: u64, interval: u64, value: T) -> Result<Key, Error>;

    /// Starts a timer that is due at tick `deadline`, or at the next tick if that is in the past.
    ///
    /// # Errors
    ///
    /// As for [`insert`](Self::insert); the interval is that from [`elapsed`](Self::elapsed).
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// timers.advance(100, usize::MAX);
    /// let key = timers.insert_at(105, "a")?;
    /// assert_eq!(timers.deadline(key), Some(105));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn insert_at(&mut self, deadline: u64, value: T) -> Result<Key, Error> {
        let now = self.elapsed();
        self.insert(now, deadline.saturating_sub(now), value)
    }

    /// Moves a timer's deadline to tick `now + interval`: START_TIMER of an armed timer. Returns
    /// whether it was armed. A timer that was handed out is not; a timer that is due but was not yet
    /// handed out is.
    ///
    /// # Errors
    ///
    /// As for [`insert`](Self::insert); the deadline then stays as it was.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 5, "a")?;
    /// assert!(timers.reset(key, 3, 5)?);
    /// assert_eq!(timers.expire(7), None);
    /// assert_eq!(timers.expire(8).map(|timer| timer.value), Some("a"));
    /// assert!(!timers.reset(key, 8, 5)?);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn reset(&mut self, key: Key, now: u64, interval: u64) -> Result<bool, Error>;

    /// Disarms a timer: STOP_TIMER. Returns its value if it was armed.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 5, "a")?;
    /// assert_eq!(timers.remove(key), Some("a"));
    /// assert_eq!(timers.remove(key), None);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn remove(&mut self, key: Key) -> Option<T>;

    /// Finds what is due at the ticks up to `now`, tick by tick: PER_TICK_BOOKKEEPING. It looks at
    /// no more than `budget` timers or slots; a budget of 0 counts as 1. Returns whether it has
    /// finished; if not, call it again.
    ///
    /// ```
    /// use twheel_timers::{Hashed, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Hashed::new(64)?);
    /// for id in 0..1_000 {
    ///     timers.insert(0, 1, id)?;
    /// }
    /// // In parts of 100, so that other work can be done meanwhile.
    /// let mut fired = 0;
    /// while !timers.advance(1, 100) {
    ///     while timers.pop_expired().is_some() {
    ///         fired += 1;
    ///     }
    /// }
    /// assert_eq!(fired, 999);
    /// assert!(timers.pop_expired().is_some());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn advance(&mut self, now: u64, budget: usize) -> bool;

    /// Hands out one timer that [`advance`](Self::advance) has found, in the order of deadlines:
    /// EXPIRY_PROCESSING. The caller then acts on it, and may start and stop any timers.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// timers.insert(0, 5, "a")?;
    /// timers.advance(5, usize::MAX);
    /// assert_eq!(timers.pop_expired().map(|timer| timer.value), Some("a"));
    /// assert_eq!(timers.pop_expired(), None);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn pop_expired(&mut self) -> Option<Expired<T>>;

    /// Hands out one timer that is due at tick `now`: [`advance`](Self::advance) as far as is
    /// needed, and [`pop_expired`](Self::pop_expired). Returns `None` when no more are due.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// timers.insert(0, 5, "a")?;
    /// assert_eq!(timers.expire(4), None);
    /// assert_eq!(timers.expire(5).map(|timer| timer.value), Some("a"));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn expire(&mut self, now: u64) -> Option<Expired<T>> {
        /// Few enough that what was found is still in the cache when it is handed out.
        const BUDGET: usize = 256;
        loop {
            let expired = self.pop_expired();
            if expired.is_some() {
                return expired;
            }
            if self.advance(now, BUDGET) {
                return self.pop_expired();
            }
        }
    }

    /// The tick at which [`advance`](Self::advance) next has work; `None` if nothing is armed. It is
    /// never later than the earliest deadline, so sleeping until then misses nothing.
    ///
    /// ```
    /// use twheel_timers::{Heap, Hierarchical, Scheme, Timers};
    ///
    /// let mut heap = Timers::new(Heap::new());
    /// let mut wheel = Timers::new(Hierarchical::new(3, 256)?);
    /// assert_eq!(wheel.next_tick(), None);
    /// heap.insert(0, 1_000, "a")?;
    /// wheel.insert(0, 1_000, "a")?;
    /// assert_eq!(heap.next_tick(), Some(1_000));
    /// // The timer is moved to a lower level then.
    /// assert_eq!(wheel.next_tick(), Some(768));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn next_tick(&self) -> Option<u64>;

    /// The tick that [`advance`](Self::advance) has reached.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::<(), _>::new(Heap::new());
    /// timers.advance(7, usize::MAX);
    /// assert_eq!(timers.elapsed(), 7);
    /// ```
    fn elapsed(&self) -> u64;

    /// The deadline of a timer, as a tick, if it is armed.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(10, 5, "a")?;
    /// assert_eq!(timers.deadline(key), Some(15));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn deadline(&self, key: Key) -> Option<u64>;

    /// The value of a timer, if it is armed.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 5, "a")?;
    /// assert_eq!(timers.get(key), Some(&"a"));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn get(&self, key: Key) -> Option<&T>;

    /// The value of a timer, to change it, if it is armed.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 5, 0)?;
    /// *timers.get_mut(key).unwrap() += 1;
    /// assert_eq!(timers.remove(key), Some(1));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn get_mut(&mut self, key: Key) -> Option<&mut T>;

    /// Whether a timer is armed.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 5, "a")?;
    /// assert!(timers.contains(key));
    /// timers.remove(key);
    /// assert!(!timers.contains(key));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn contains(&self, key: Key) -> bool {
        self.deadline(key).is_some()
    }

    /// A timer that is armed, to look at it, move it or stop it.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 5, "a")?;
    /// if let Some(entry) = timers.entry(key) {
    ///     assert_eq!((entry.deadline(), entry.remove()), (5, "a"));
    /// }
    /// assert!(timers.entry(key).is_none());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn entry(&mut self, key: Key) -> Option<Entry<'_, T, Self>>
    where
        Self: Sized,
    {
        Entry::new(self, key)
    }

    /// Number of armed timers, including those that are due but were not yet handed out.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// timers.insert(0, 5, "a")?;
    /// timers.advance(5, usize::MAX);
    /// assert_eq!(timers.len(), 1);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn len(&self) -> usize;

    /// Whether no timer is armed.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// assert!(Timers::<(), _>::new(Heap::new()).is_empty());
    /// ```
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Disarms all timers. Returns their values, in no particular order.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// timers.insert(0, 5, "a")?;
    /// assert_eq!(timers.drain(), ["a"]);
    /// assert!(timers.is_empty());
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn drain(&mut self) -> Vec<T>;

    /// Number of timers for which there is memory.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Heap::new());
    /// timers.insert(0, 5, "a")?;
    /// assert!(timers.capacity() >= 1);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn capacity(&self) -> usize;

    /// Allocates memory for this many timers more, so that their start need not do it.
    ///
    /// # Errors
    ///
    /// More than 2^28 timers in all.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let mut timers = Timers::<u64, _>::new(Heap::new());
    /// timers.reserve(10_000)?;
    /// assert!(timers.capacity() >= 10_000);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    fn reserve(&mut self, additional: usize) -> Result<(), Error>;
}

/// A scheme that is chosen at run time.
impl<T, S: Scheme<T> + ?Sized> Scheme<T> for Box<S> {
    fn insert(&mut self, now: u64, interval: u64, value: T) -> Result<Key, Error> {
        (**self).insert(now, interval, value)
    }

    fn reset(&mut self, key: Key, now: u64, interval: u64) -> Result<bool, Error> {
        (**self).reset(key, now, interval)
    }

    fn remove(&mut self, key: Key) -> Option<T> {
        (**self).remove(key)
    }

    fn advance(&mut self, now: u64, budget: usize) -> bool {
        (**self).advance(now, budget)
    }

    fn pop_expired(&mut self) -> Option<Expired<T>> {
        (**self).pop_expired()
    }

    fn next_tick(&self) -> Option<u64> {
        (**self).next_tick()
    }

    fn elapsed(&self) -> u64 {
        (**self).elapsed()
    }

    fn deadline(&self, key: Key) -> Option<u64> {
        (**self).deadline(key)
    }

    fn get(&self, key: Key) -> Option<&T> {
        (**self).get(key)
    }

    fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        (**self).get_mut(key)
    }

    fn len(&self) -> usize {
        (**self).len()
    }

    fn drain(&mut self) -> Vec<T> {
        (**self).drain()
    }

    fn capacity(&self) -> usize {
        (**self).capacity()
    }

    fn reserve(&mut self, additional: usize) -> Result<(), Error> {
        (**self).reserve(additional)
    }
}

/// Ticks of a timeout, rounded up, so that nothing fires early.
///
/// # Errors
///
/// A tick of zero, or a tick longer than the timeout. The values and ranges are in nanoseconds.
///
/// ```
/// use std::time::Duration;
/// use twheel_timers::ticks;
///
/// let ms = Duration::from_millis;
/// assert_eq!(ticks(ms(1_000), ms(300)), Ok(4));
/// assert!(ticks(ms(1), ms(300)).is_err());
/// ```
pub fn ticks(timeout: Duration, tick: Duration) -> Result<u64, Error> {
    let nanos = |duration: Duration| u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX);
    // For a timeout of zero no tick is valid; the error's range is then 1 to 1.
    let most = nanos(timeout).max(1);
    let tick = Error::check("the tick in nanoseconds", nanos(tick), 1, most)?;
    Ok(most.div_ceil(tick))
}
