//! The part that all schemes have in common.

use alloc::vec::Vec;
use core::fmt;

use crate::{
    error::Error,
    scheme::{Expired, LAST_TICK, Scheme, Sealed},
    slab::{Key, Slab},
};

/// Timers with values `T` in a structure `S`: one of the types in the [table](crate#schemes) of
/// this crate. What one does with timers is in the trait [`Scheme`].
///
/// A timer of schemes 4, 6 and 7 takes 16 bytes besides its value, and its part of a block of 64
/// bytes that holds 16 timers of a slot; one of the other schemes takes 24 bytes. Once a timer is
/// removed, its place takes 4 bytes more until it is used again. A slot takes 8 bytes. Memory grows
/// by a quarter at most, without moving a timer; it is reused, and kept until the whole is dropped.
///
/// ```
/// use twheel_timers::{Hierarchical, Scheme, Timers};
///
/// let mut timers = Timers::new(Hierarchical::new(3, 1024)?);
/// timers.insert(0, 5, "heartbeat")?;
/// assert_eq!(timers.expire(5).map(|timer| timer.value), Some("heartbeat"));
/// # Ok::<(), twheel_timers::Error>(())
/// ```
pub struct Timers<T, S: Structure> {
    slab: Slab<T, S::Link>,
    structure: S,
    elapsed: u64,
}

/// How timers are found when they are due: the part in which the schemes differ. The types in the
/// [table](crate#schemes) of this crate implement it, and no others can.
///
/// ```
/// use twheel_timers::{Hashed, Scheme, Structure, Timers};
///
/// struct Connections<S: Structure> {
///     idle: Timers<u32, S>,
/// }
///
/// impl<S: Structure> Connections<S> {
///     fn opened(&mut self, now: u64, id: u32) -> Result<(), twheel_timers::Error> {
///         self.idle.insert(now, 30, id).map(drop)
///     }
/// }
///
/// let mut connections = Connections { idle: Timers::new(Hashed::new(64)?) };
/// connections.opened(0, 1)?;
/// # Ok::<(), twheel_timers::Error>(())
/// ```
pub trait Structure: sealed::Structure {}

impl<S: sealed::Structure> Structure for S {}

pub(crate) mod sealed {
    use crate::{arena::Zeroed, error::Error, slab::Slab, timers::Budget};

    /// What only this crate can implement, because the slab is not public.
    pub trait Structure {
        /// How it finds a timer in its lists.
        type Link: Copy + Zeroed;

        /// Whether a timer may stay where it is when its deadline moves to a later tick. It may if
        /// its deadline is checked when it is reached. Moving it is then one store.
        const LAZY: bool;

        /// Refuses an interval that the scheme does not support.
        fn check(&self, _interval: u64) -> Result<(), Error> {
            Ok(())
        }

        /// Puts a timer where it belongs. The timer is in no list, and is due at tick `when`, later
        /// than `elapsed`.
        fn place<T>(&mut self, slab: &mut Slab<T, Self::Link>, elapsed: u64, timer: u32);

        /// Removes a timer, which had this link, from wherever it is.
        fn displace<T>(&mut self, slab: &mut Slab<T, Self::Link>, timer: u32, link: Self::Link);

        /// Advances `elapsed` to `now`, and finds what is due by then, in order. Returns whether the
        /// budget was enough.
        fn advance<T>(
            &mut self,
            slab: &mut Slab<T, Self::Link>,
            elapsed: &mut u64,
            now: u64,
            budget: &mut Budget,
        ) -> bool;

        /// Takes the first of the timers that were found due out of their list.
        fn pop_due<T>(&mut self, slab: &mut Slab<T, Self::Link>) -> Option<u32>;

        /// Puts a timer that is in no list behind those that were found due.
        fn push_due<T>(&mut self, slab: &mut Slab<T, Self::Link>, timer: u32);

        /// Whether timers were found due that are still there.
        fn has_due(&self) -> bool;

        /// The tick at which there is work next.
        fn next<T>(&self, slab: &Slab<T, Self::Link>, elapsed: u64) -> Option<u64>;

        /// Removes all timers.
        fn clear(&mut self);

        /// Frees memory; there are no timers.
        fn release(&mut self) {}
    }
}

/// How many more timers or slots may be looked at.
#[derive(Clone, Copy, Debug)]
pub struct Budget(usize);

impl Budget {
    /// Spends one, if any is left. Returns whether one was.
    #[inline(always)]
    pub fn spend(&mut self) -> bool {
        let some = self.0 > 0;
        self.0 = self.0.saturating_sub(1);
        some
    }
}

impl<T, S: Structure> Timers<T, S> {
    /// Without timers, at tick 0. The first [`advance`](Scheme::advance) moves it to any other tick
    /// at once.
    ///
    /// ```
    /// use twheel_timers::{Heap, Scheme, Timers};
    ///
    /// let timers = Timers::<u64, _>::new(Heap::new());
    /// assert_eq!((timers.len(), timers.elapsed()), (0, 0));
    /// ```
    pub fn new(structure: S) -> Self {
        Self {
            slab: Slab::new(),
            structure,
            elapsed: 0,
        }
    }

    /// The timer that is due first. It looks at all timers, so it is for the curious;
    /// [`next_tick`](Scheme::next_tick) says how long to sleep.
    ///
    /// ```
    /// use twheel_timers::{Hashed, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Hashed::new(64)?);
    /// let later = timers.insert(0, 20, "later")?;
    /// let sooner = timers.insert(0, 10, "sooner")?;
    /// assert_eq!(timers.earliest(), Some(sooner));
    /// timers.reset(sooner, 0, 30)?;
    /// assert_eq!(timers.earliest(), Some(later));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn earliest(&self) -> Option<Key> {
        self.slab.earliest().map(|timer| self.slab.key(timer))
    }

    /// Frees memory, if no timer is armed. (With timers it cannot, as no timer is ever moved.) Stale
    /// keys stay stale.
    ///
    /// ```
    /// use twheel_timers::{Hashed, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Hashed::new(64)?);
    /// let key = timers.insert(0, 20, "a")?;
    /// timers.remove(key);
    /// timers.shrink_to_fit();
    /// assert_eq!(timers.capacity(), 0);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn shrink_to_fit(&mut self) {
        if self.slab.release() {
            self.structure.release();
        }
    }

    /// The structure, for its own methods.
    ///
    /// ```
    /// use twheel_timers::{Simple, Timers};
    ///
    /// let timers = Timers::<u64, _>::new(Simple::new(1_024)?);
    /// assert_eq!(timers.structure().range(), 1_023);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn structure(&self) -> &S {
        &self.structure
    }

    #[inline(always)]
    fn when(&self, now: u64, interval: u64) -> u64 {
        let when = now.saturating_add(interval).min(LAST_TICK);
        when.max(self.elapsed + 1)
    }
}

#[cfg(feature = "tokio")]
impl<T, S: Structure> Timers<T, S> {
    /// Starts a timer that is due at tick `deadline`, which may be the present one or past: then it
    /// is handed out next.
    pub(crate) fn insert_due(&mut self, deadline: u64, value: T) -> Result<Key, Error> {
        let deadline = deadline.min(LAST_TICK);
        let key = self.slab.insert(deadline, value)?;
        self.put(key.index, deadline);
        Ok(key)
    }

    /// Moves a timer's deadline to a tick, which may be the present one or past. Returns whether it
    /// was armed.
    pub(crate) fn reset_due(&mut self, key: Key, deadline: u64) -> bool {
        if deadline > self.elapsed {
            return self.reset(key, deadline, 0).unwrap_or(false);
        }
        let Some(timer) = self.slab.find(key) else {
            return false;
        };
        let link = self.slab.link(timer);
        self.structure.displace(&mut self.slab, timer, link);
        self.slab.set_when(timer, deadline);
        self.put(timer, deadline);
        true
    }

    fn put(&mut self, timer: u32, deadline: u64) {
        if deadline > self.elapsed {
            self.structure.place(&mut self.slab, self.elapsed, timer);
        } else {
            self.structure.push_due(&mut self.slab, timer);
        }
    }

    /// Whether a timer is due that was not yet handed out.
    pub(crate) fn has_due(&self) -> bool {
        self.structure.has_due()
    }
}

impl<T, S: Structure> Sealed for Timers<T, S> {}

impl<T, S: Structure> Scheme<T> for Timers<T, S> {
    #[inline]
    fn insert(&mut self, now: u64, interval: u64, value: T) -> Result<Key, Error> {
        self.structure.check(interval)?;
        let key = self.slab.insert(self.when(now, interval), value)?;
        self.structure
            .place(&mut self.slab, self.elapsed, key.index);
        Ok(key)
    }

    #[inline]
    fn reset(&mut self, key: Key, now: u64, interval: u64) -> Result<bool, Error> {
        self.structure.check(interval)?;
        let Some(timer) = self.slab.find(key) else {
            return Ok(false);
        };
        let (before, when) = (self.slab.when(timer), self.when(now, interval));
        self.slab.set_when(timer, when);
        // What is due may have been found already, and then is not where its deadline is checked.
        let stays = S::LAZY && when >= before && before > self.elapsed;
        if !stays {
            let link = self.slab.link(timer);
            self.structure.displace(&mut self.slab, timer, link);
            self.structure.place(&mut self.slab, self.elapsed, timer);
        }
        Ok(true)
    }

    #[inline]
    fn remove(&mut self, key: Key) -> Option<T> {
        let (value, link) = self.slab.take(key)?;
        self.structure.displace(&mut self.slab, key.index, link);
        Some(value)
    }

    fn advance(&mut self, now: u64, budget: usize) -> bool {
        let now = now.min(LAST_TICK);
        let Self {
            slab,
            structure,
            elapsed,
        } = self;
        structure.advance(slab, elapsed, now, &mut Budget(budget.max(1)))
    }

    #[inline]
    fn pop_expired(&mut self) -> Option<Expired<T>> {
        let timer = self.structure.pop_due(&mut self.slab)?;
        let (key, deadline) = (self.slab.key(timer), self.slab.when(timer));
        Some(Expired {
            key,
            value: self.slab.remove(timer),
            deadline,
        })
    }

    fn next_tick(&self) -> Option<u64> {
        if self.is_empty() {
            return None;
        }
        if self.structure.has_due() {
            return Some(self.elapsed);
        }
        self.structure.next(&self.slab, self.elapsed)
    }

    fn elapsed(&self) -> u64 {
        self.elapsed
    }

    fn deadline(&self, key: Key) -> Option<u64> {
        self.slab.find(key).map(|timer| self.slab.when(timer))
    }

    fn get(&self, key: Key) -> Option<&T> {
        self.slab.value(self.slab.find(key)?)
    }

    fn get_mut(&mut self, key: Key) -> Option<&mut T> {
        self.slab.value_mut(self.slab.find(key)?)
    }

    fn len(&self) -> usize {
        self.slab.len()
    }

    fn drain(&mut self) -> Vec<T> {
        self.structure.clear();
        self.slab.remove_all()
    }

    fn capacity(&self) -> usize {
        self.slab.capacity()
    }

    fn reserve(&mut self, additional: usize) -> Result<(), Error> {
        self.slab.reserve(additional)
    }
}

impl<T, S: Structure + fmt::Debug> fmt::Debug for Timers<T, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Timers")
            .field("len", &self.slab.len())
            .field("elapsed", &self.elapsed)
            .finish_non_exhaustive()
    }
}
