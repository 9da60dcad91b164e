//! Storage of timers.

use alloc::vec::Vec;
use core::{
    mem::{MaybeUninit, needs_drop},
    num::NonZeroU32,
};

use crate::{
    arena::{Arena, Zeroed},
    error::Error,
};

/// The index of nothing.
pub const NIL: u32 = u32::MAX;

/// Names a timer: what [`insert`](crate::Scheme::insert) returns.
///
/// A key is 8 bytes, and so is an `Option<Key>`. The key of a timer that has expired or was removed
/// is stale: operations on it find nothing. It is not taken for the key of another timer in the
/// same place until that place has been used 2^31 times. A key means something only to the timers
/// that gave it.
///
/// ```
/// use twheel_timers::{Hashed, Key, Scheme, Timers};
///
/// let mut timers = Timers::new(Hashed::new(64)?);
/// let key: Key = timers.insert(0, 5, "a")?;
/// assert_eq!(timers.remove(key), Some("a"));
/// assert_eq!(timers.remove(key), None);
/// assert_eq!(size_of::<Option<Key>>(), 8);
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    pub(crate) index: u32,
    /// Odd, as that of an armed timer.
    generation: NonZeroU32,
}

/// An armed timer or a vacant place. `L` is how a scheme finds the timer in its lists.
#[repr(C)]
#[derive(Debug)]
struct Node<T, L> {
    when: u64,
    /// Odd while a timer is armed here, even while the place is vacant.
    generation: u32,
    link: L,
    /// Initialized unless the place is vacant.
    value: MaybeUninit<T>,
}

impl<T, L> Node<T, L> {
    /// Takes the value out.
    #[inline(always)]
    fn empty(&mut self) -> T {
        assert!(self.generation & 1 == 1, "a vacant place has no timer");
        self.generation = self.generation.wrapping_add(1);
        // SAFETY: the place was not vacant, so `insert` has written a value. Now it is vacant, so
        // the value is never read again.
        unsafe { self.value.assume_init_read() }
    }
}

// SAFETY: the integers and links may be zero, and generation 0 means that there is no value. `when`
// takes 8 bytes.
unsafe impl<T, L: Zeroed> Zeroed for Node<T, L> {}

// SAFETY: an integer.
unsafe impl Zeroed for u32 {}

/// A place is prefetched when this many others will be used before it.
const AHEAD: usize = 8;

/// Timers with values `T` and links `L`.
#[derive(Debug)]
pub struct Slab<T, L> {
    nodes: Arena<Node<T, L>>,
    /// Places from this one on were never used.
    fresh: u32,
    /// The generation of the first timer in a place that was never used: above that of any timer
    /// whose memory was released, so that their keys stay stale.
    first: NonZeroU32,
    /// Other vacant places; the next one to use is at the end. They are not linked through the places
    /// themselves, because none could then be prefetched.
    vacant: Vec<u32>,
}

impl<T, L: Copy + Zeroed> Slab<T, L> {
    /// Most timers.
    pub const MOST: u32 = 1 << 28;

    /// Without timers.
    pub const fn new() -> Self {
        Self {
            nodes: Arena::new(),
            fresh: 0,
            first: NonZeroU32::MIN,
            vacant: Vec::new(),
        }
    }

    /// Number of timers.
    pub fn len(&self) -> usize {
        self.fresh as usize - self.vacant.len()
    }

    /// Number of timers for which there is memory.
    pub fn capacity(&self) -> usize {
        self.nodes.places() as usize
    }

    /// Allocates memory for this many timers more than there are.
    pub fn reserve(&mut self, additional: usize) -> Result<(), Error> {
        let wanted = self.len() as u64 + additional as u64;
        Error::check("the number of timers", wanted, 0, Self::MOST.into())?;
        while u64::from(self.nodes.places()) < wanted {
            self.nodes.grow();
        }
        Ok(())
    }

    /// Frees all memory, if there are no timers. Returns whether it did.
    pub fn release(&mut self) -> bool {
        if self.len() > 0 {
            return false;
        }
        self.nodes.each(self.fresh, |node| {
            // That of a vacant place is even, and at least 2.
            let next = NonZeroU32::new(node.generation.wrapping_add(1));
            self.first = self.first.max(next.unwrap_or(NonZeroU32::MIN));
        });
        let first = self.first;
        *self = Self::new();
        self.first = first;
        true
    }

    /// The timer that is due first.
    pub fn earliest(&self) -> Option<u32> {
        let armed = |timer: &u32| self.nodes.at(*timer).generation & 1 == 1;
        let timers = (0..self.fresh).filter(armed);
        timers.min_by_key(|timer| self.when(*timer))
    }

    /// Adds a timer, whose link the caller sets.
    #[inline]
    pub fn insert(&mut self, when: u64, value: T) -> Result<Key, Error> {
        let index = match self.vacant.pop() {
            Some(index) => {
                if let Some(later) = self.vacant.len().checked_sub(AHEAD) {
                    self.nodes.prefetch(self.vacant[later]);
                }
                index
            }
            None => self.fresh()?,
        };
        let node = self.nodes.at_mut(index);
        // Even, as the place is vacant; 0 if it was never used.
        let next = NonZeroU32::new(node.generation | 1).filter(|_| node.generation > 0);
        let generation = next.unwrap_or(self.first);
        node.when = when;
        node.generation = generation.get();
        node.value.write(value);
        Ok(Key { index, generation })
    }

    /// A place that was never used.
    fn fresh(&mut self) -> Result<u32, Error> {
        if self.fresh == self.nodes.places() {
            self.reserve(1)?;
        }
        self.fresh += 1;
        Ok(self.fresh - 1)
    }

    /// Removes a timer. The caller takes it out of its list, which its link tells.
    #[inline(always)]
    pub fn take(&mut self, key: Key) -> Option<(T, L)> {
        // A key of other timers may name a place that is not here.
        if key.index >= self.nodes.places() {
            return None;
        }
        // SAFETY: as was just checked.
        let node = unsafe { self.nodes.at_known(key.index) };
        // In a place that was never used this is 0.
        if node.generation != key.generation.get() {
            return None;
        }
        let (value, link) = (node.empty(), node.link);
        self.vacant.push(key.index);
        Some((value, link))
    }

    /// Removes a timer that is in no list.
    #[inline(always)]
    pub fn remove(&mut self, timer: u32) -> T {
        let value = self.nodes.at_mut(timer).empty();
        self.vacant.push(timer);
        value
    }

    /// Removes all timers.
    pub fn remove_all(&mut self) -> Vec<T> {
        let armed = |timer: &u32| self.nodes.at(*timer).generation & 1 == 1;
        let all: Vec<u32> = (0..self.fresh).filter(armed).collect();
        all.into_iter().map(|timer| self.remove(timer)).collect()
    }

    /// The key of an armed timer.
    #[inline]
    pub fn key(&self, timer: u32) -> Key {
        let generation = NonZeroU32::new(self.nodes.at(timer).generation);
        Key {
            index: timer,
            generation: generation.unwrap_or(NonZeroU32::MIN),
        }
    }

    /// The timer of a key; `None` if the key is stale.
    #[inline]
    pub fn find(&self, key: Key) -> Option<u32> {
        // A key of other timers may name a place that is not here.
        let known = key.index < self.nodes.places();
        (known && self.nodes.at(key.index).generation == key.generation.get()).then_some(key.index)
    }

    /// The value of an armed timer.
    pub fn value(&self, timer: u32) -> Option<&T> {
        let node = self.nodes.at(timer);
        // SAFETY: `insert` has written a value, and it was not removed.
        (node.generation & 1 == 1).then(|| unsafe { node.value.assume_init_ref() })
    }

    /// The value of an armed timer, to change it.
    pub fn value_mut(&mut self, timer: u32) -> Option<&mut T> {
        let node = self.nodes.at_mut(timer);
        // SAFETY: as above.
        (node.generation & 1 == 1).then(|| unsafe { node.value.assume_init_mut() })
    }

    /// The tick at which the timer is due.
    #[inline(always)]
    pub fn when(&self, timer: u32) -> u64 {
        self.nodes.at(timer).when
    }

    /// Sets the tick at which the timer is due; the caller moves it to its list.
    #[inline(always)]
    pub fn set_when(&mut self, timer: u32, when: u64) {
        self.nodes.at_mut(timer).when = when;
    }

    /// The timer's link.
    #[inline(always)]
    pub fn link(&self, timer: u32) -> L {
        self.nodes.at(timer).link
    }

    /// The timer's link, to change it.
    #[inline(always)]
    pub fn link_mut(&mut self, timer: u32) -> &mut L {
        &mut self.nodes.at_mut(timer).link
    }

    /// Prefetches a timer into the cache.
    #[inline(always)]
    pub fn prefetch(&self, timer: u32) {
        self.nodes.prefetch(timer);
    }
}

impl<T, L> Drop for Slab<T, L> {
    fn drop(&mut self) {
        if needs_drop::<T>() {
            self.nodes.each(self.fresh, |node| {
                if node.generation & 1 == 1 {
                    node.generation += 1;
                    // SAFETY: the place was not vacant, so there is a value; now it is.
                    unsafe { node.value.assume_init_drop() };
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Key, Node, Slab};
    use alloc::{rc::Rc, vec::Vec};

    #[test]
    fn a_timer_takes_16_bytes_beside_its_value() {
        assert_eq!(size_of::<Node<u64, u32>>(), 16 + 8);
        assert_eq!(size_of::<Node<(), u32>>(), 16);
        assert_eq!(size_of::<Option<Key>>(), 8);
    }

    #[test]
    fn it_does_not_grow_while_timers_come_and_go() {
        let mut slab = Slab::<(), u32>::new();
        let mut timers: Vec<u32> = (0..1_000)
            .map(|_| slab.insert(1, ()).unwrap().index)
            .collect();
        let capacity = slab.capacity();
        assert!((1_000..=1_024).contains(&capacity), "{capacity}");
        for round in 0..10_000 {
            let at = round % timers.len();
            slab.remove(timers[at]);
            timers[at] = slab.insert(1, ()).unwrap().index;
        }
        assert_eq!((slab.len(), slab.capacity()), (1_000, capacity));
        slab.reserve(capacity - 1_000).unwrap();
        assert_eq!(slab.capacity(), capacity);
        slab.reserve(capacity - 999).unwrap();
        assert!(slab.capacity() > capacity);
    }

    #[test]
    fn a_key_stays_stale_when_memory_was_released() {
        let mut slab = Slab::<_, u32>::new();
        let keys: Vec<Key> = (0..100).map(|id| slab.insert(1, id).unwrap()).collect();
        for _ in 0..3 {
            slab.remove(7);
            slab.insert(1, 7).unwrap();
        }
        assert!(!slab.release());
        for key in &keys {
            slab.remove(key.index);
        }
        assert!(slab.release());
        assert_eq!((slab.capacity(), slab.len()), (0, 0));
        for id in 0..100 {
            slab.insert(1, id).unwrap();
        }
        assert!(keys.iter().all(|key| slab.find(*key).is_none()));
    }

    #[test]
    fn each_value_is_dropped_once() {
        let value = Rc::new(());
        let mut slab = Slab::<_, u32>::new();
        let timers: Vec<u32> = (0..600)
            .map(|_| slab.insert(0, Rc::clone(&value)).unwrap().index)
            .collect();
        let count = timers.len() + 1;
        assert_eq!(Rc::strong_count(&value), count);
        for (gone, timer) in timers.iter().step_by(3).enumerate() {
            assert_eq!(Rc::strong_count(&value), count - gone);
            drop(slab.remove(*timer));
        }
        let gone = timers.len().div_ceil(3);
        // Used again.
        for _ in 0..5 {
            slab.insert(0, Rc::clone(&value)).unwrap();
        }
        assert_eq!(Rc::strong_count(&value), count - gone + 5);
        drop(slab);
        assert_eq!(Rc::strong_count(&value), 1);
    }

    #[test]
    fn a_stale_key_finds_nothing() {
        let mut slab = Slab::<_, u32>::new();
        let stale = slab.insert(1, 'a').unwrap();
        let first = stale.index;
        assert_eq!(
            (slab.find(stale), slab.value(first)),
            (Some(first), Some(&'a'))
        );
        slab.remove(first);
        assert_eq!((slab.find(stale), slab.value(first)), (None, None));
        let second = slab.insert(1, 'b').unwrap().index;
        assert_eq!(second, first, "its place is used again");
        assert_eq!(
            (slab.find(stale), slab.value_mut(second)),
            (None, Some(&mut 'b'))
        );
        // A key of other timers.
        assert_eq!(Slab::<char, u32>::new().find(stale), None);
    }
}
