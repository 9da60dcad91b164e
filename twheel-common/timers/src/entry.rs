//! A timer that is armed.

use core::{fmt, marker::PhantomData};

use crate::{error::Error, scheme::Scheme, slab::Key};

/// A timer that is armed: what [`Scheme::entry`] returns.
///
/// ```
/// use twheel_timers::{Hashed, Scheme, Timers};
///
/// let mut timers = Timers::new(Hashed::new(64)?);
/// let key = timers.insert(0, 10, vec!["a"])?;
/// let mut entry = timers.entry(key).unwrap();
/// entry.get_mut().push("b");
/// entry.reset(5, 10)?;
/// assert_eq!(entry.deadline(), 15);
/// assert_eq!(entry.remove(), ["a", "b"]);
/// # Ok::<(), twheel_timers::Error>(())
/// ```
pub struct Entry<'a, T, S> {
    timers: &'a mut S,
    key: Key,
    values: PhantomData<fn() -> T>,
}

impl<'a, T, S: Scheme<T>> Entry<'a, T, S> {
    pub(crate) fn new(timers: &'a mut S, key: Key) -> Option<Self> {
        timers.contains(key).then_some(Self {
            timers,
            key,
            values: PhantomData,
        })
    }

    /// Its key.
    ///
    /// ```
    /// # use twheel_timers::{Heap, Scheme, Timers};
    /// # let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 10, "a")?;
    /// assert_eq!(timers.entry(key).map(|entry| entry.key()), Some(key));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn key(&self) -> Key {
        self.key
    }

    /// The tick at which it is due.
    ///
    /// ```
    /// # use twheel_timers::{Heap, Scheme, Timers};
    /// # let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 10, "a")?;
    /// assert_eq!(timers.entry(key).map(|entry| entry.deadline()), Some(10));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn deadline(&self) -> u64 {
        self.timers.deadline(self.key).expect(ARMED)
    }

    /// Its value.
    ///
    /// ```
    /// # use twheel_timers::{Heap, Scheme, Timers};
    /// # let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 10, "a")?;
    /// assert_eq!(timers.entry(key).unwrap().get(), &"a");
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn get(&self) -> &T {
        self.timers.get(self.key).expect(ARMED)
    }

    /// Its value, to change it.
    ///
    /// ```
    /// # use twheel_timers::{Heap, Scheme, Timers};
    /// # let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 10, 1)?;
    /// *timers.entry(key).unwrap().get_mut() += 1;
    /// assert_eq!(timers.get(key), Some(&2));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn get_mut(&mut self) -> &mut T {
        self.timers.get_mut(self.key).expect(ARMED)
    }

    /// Moves its deadline to tick `now + interval`.
    ///
    /// # Errors
    ///
    /// As for [`Scheme::reset`].
    ///
    /// ```
    /// # use twheel_timers::{Heap, Scheme, Timers};
    /// # let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 10, "a")?;
    /// timers.entry(key).unwrap().reset(5, 10)?;
    /// assert_eq!(timers.deadline(key), Some(15));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn reset(&mut self, now: u64, interval: u64) -> Result<(), Error> {
        self.timers.reset(self.key, now, interval).map(drop)
    }

    /// Stops it. Returns its value.
    ///
    /// ```
    /// # use twheel_timers::{Heap, Scheme, Timers};
    /// # let mut timers = Timers::new(Heap::new());
    /// let key = timers.insert(0, 10, "a")?;
    /// assert_eq!(timers.entry(key).unwrap().remove(), "a");
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn remove(self) -> T {
        self.timers.remove(self.key).expect(ARMED)
    }
}

/// Why these methods cannot fail: an entry is made of an armed timer, and nobody else can stop it.
const ARMED: &str = "the timer of an entry is armed";

impl<T, S> fmt::Debug for Entry<'_, T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut entry = f.debug_struct("Entry");
        entry.field("key", &self.key).finish_non_exhaustive()
    }
}
