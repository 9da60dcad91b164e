//! Storage of timers, and the lists that they are in.

use std::{mem::MaybeUninit, num::NonZeroU32};

use super::error::Error;

/// The index of nothing.
const NIL: u32 = u32::MAX;

/// Names a timer. The handle of a timer that has fired or was stopped is never taken for that of
/// another timer in the same place, until that place has been used 2^32 times.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Handle {
    pub(super) index: u32,
    generation: u32,
}

/// A list of timers; never 0, so that `Option<ListId>` needs no tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListId(NonZeroU32);

impl ListId {
    /// Timers that were found due and not yet handed out.
    pub const DUE: Self = Self(NonZeroU32::MIN);

    /// Number of lists that do not belong to slots.
    const OTHERS: u32 = 1;

    /// The list of a slot.
    pub fn of_slot(slot: u32) -> Self {
        Self(NonZeroU32::MIN.saturating_add(slot.saturating_add(Self::OTHERS)))
    }

    /// The slot that the list belongs to.
    pub fn slot(self) -> u32 {
        self.0.get() - 1 - Self::OTHERS
    }

    fn index(self) -> usize {
        self.0.get() as usize - 1
    }
}

#[derive(Clone, Copy, Debug)]
struct List {
    head: u32,
    tail: u32,
}

impl List {
    const EMPTY: Self = Self {
        head: NIL,
        tail: NIL,
    };
}

/// An armed timer or a vacant place: 24 bytes and the value.
///
/// Next and previous pointers are written without reading what they overwrite: a read would wait
/// for a cache miss, a store does not.
#[derive(Debug)]
struct Node<T> {
    when: u64,
    next: u32,
    prev: u32,
    generation: u32,
    /// `None` if the place is vacant.
    list: Option<ListId>,
    /// Initialized unless the place is vacant.
    value: MaybeUninit<T>,
}

/// A place is prefetched when this many others will be used before it.
const AHEAD: usize = 8;

/// Prefetches a place into the cache, if the processor has an instruction for it.
fn prefetch<T>(place: &T) {
    #[cfg(target_arch = "x86_64")]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: a hint, which may name any address and changes nothing.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(std::ptr::from_ref(place).cast()) };
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = place;
}

/// Places in a chunk.
const CHUNK: usize = 512;

/// Timers, linked by their indices into doubly linked lists, each timer in at most one.
#[derive(Debug)]
pub struct Slab<T> {
    /// Not one vector: that would be copied as it grows, and be longer than needed.
    chunks: Vec<Box<[Node<T>; CHUNK]>>,
    lists: Vec<List>,
    /// Vacant places with their generations; the next one to use is at the end. They are not linked
    /// through the places themselves, because taking one would then wait for it to be loaded into
    /// the cache.
    vacant: Vec<Handle>,
    len: u32,
    /// The next timer of the walk through a list. Unlinking it moves the walk on.
    cursor: u32,
}

impl<T> Slab<T> {
    /// Without timers, with the lists of this many slots.
    pub fn new(slots: u32) -> Self {
        Self {
            chunks: Vec::new(),
            lists: vec![List::EMPTY; slots as usize + ListId::OTHERS as usize],
            vacant: Vec::new(),
            len: 0,
            cursor: NIL,
        }
    }

    /// Adds the lists of more slots.
    pub fn add_slots(&mut self, slots: u32) {
        let lists = self.lists.len() + slots as usize;
        self.lists.resize(lists, List::EMPTY);
    }

    /// Number of timers.
    pub fn len(&self) -> usize {
        self.len as usize
    }

    fn node(&self, timer: u32) -> &Node<T> {
        &self.chunks[timer as usize / CHUNK][timer as usize % CHUNK]
    }

    fn node_mut(&mut self, timer: u32) -> &mut Node<T> {
        &mut self.chunks[timer as usize / CHUNK][timer as usize % CHUNK]
    }

    /// Adds a timer, which is in no list yet.
    pub fn insert(&mut self, when: u64, value: T) -> Result<Handle, Error> {
        if self.vacant.is_empty() {
            self.grow()?;
        }
        let Some(handle) = self.vacant.pop() else {
            unreachable!("there is one now");
        };
        if let Some(later) = self.vacant.len().checked_sub(AHEAD) {
            prefetch(self.node(self.vacant[later].index));
        }
        let node = self.node_mut(handle.index);
        node.when = when;
        node.list = Some(ListId::DUE);
        node.value.write(value);
        self.len += 1;
        Ok(handle)
    }

    /// Adds a chunk of vacant places.
    #[cold]
    fn grow(&mut self) -> Result<(), Error> {
        const MOST: usize = NIL as usize / CHUNK * CHUNK;
        let count = self.chunks.len() * CHUNK;
        let what = "the number of timers";
        Error::check(what, count as u64 + 1, 1, MOST as u64)?;
        let vacant = |_| Node {
            when: 0,
            next: NIL,
            prev: NIL,
            generation: 0,
            list: None,
            value: MaybeUninit::uninit(),
        };
        let chunk: Vec<_> = (0..CHUNK).map(vacant).collect();
        let Ok(chunk) = chunk.try_into() else {
            unreachable!("it has the length of a chunk");
        };
        self.chunks.push(chunk);
        let places = count as u32..(count + CHUNK) as u32;
        self.vacant.extend(places.rev().map(|index| Handle {
            index,
            generation: 0,
        }));
        Ok(())
    }

    /// Removes a timer that is in no list.
    pub fn remove(&mut self, timer: u32) -> T {
        self.len -= 1;
        let node = self.node_mut(timer);
        assert!(node.list.take().is_some(), "a vacant place has no timer");
        node.generation = node.generation.wrapping_add(1);
        // SAFETY: the place was not vacant, so `insert` has written a value. Now it is vacant, so
        // the value is never read again.
        let value = unsafe { node.value.assume_init_read() };
        let generation = node.generation;
        self.vacant.push(Handle {
            index: timer,
            generation,
        });
        value
    }

    /// Removes all timers.
    pub fn remove_all(&mut self) -> Vec<T> {
        self.lists.fill(List::EMPTY);
        self.cursor = NIL;
        let nodes = self.chunks.iter().flat_map(|chunk| chunk.iter());
        let armed = |(timer, node): (u32, &Node<T>)| node.list.map(|_| timer);
        let all: Vec<u32> = (0..).zip(nodes).filter_map(armed).collect();
        all.into_iter().map(|timer| self.remove(timer)).collect()
    }

    /// The handle of a timer.
    pub fn handle(&self, timer: u32) -> Handle {
        Handle {
            index: timer,
            generation: self.node(timer).generation,
        }
    }

    /// The timer of a handle; `None` if the handle is stale.
    pub fn find(&self, handle: Handle) -> Option<u32> {
        let chunk = self.chunks.get(handle.index as usize / CHUNK)?;
        let node = &chunk[handle.index as usize % CHUNK];
        (node.list.is_some() && node.generation == handle.generation).then_some(handle.index)
    }

    /// The tick at which the timer is due.
    pub fn when(&self, timer: u32) -> u64 {
        self.node(timer).when
    }

    /// Sets the tick at which the timer is due; the caller moves it to its list.
    pub fn set_when(&mut self, timer: u32, when: u64) {
        self.node_mut(timer).when = when;
    }

    /// The list that the timer is in, or was in last.
    pub fn list(&self, timer: u32) -> Option<ListId> {
        self.node(timer).list
    }

    /// The timer's position in an array, for a scheme that has one instead of lists.
    pub fn position(&self, timer: u32) -> u32 {
        self.node(timer).next
    }

    /// Sets the timer's position in an array.
    pub fn set_position(&mut self, timer: u32, position: u32) {
        let node = self.node_mut(timer);
        node.next = position;
        // Any list but `DUE`.
        node.list = Some(ListId::of_slot(0));
    }

    /// The first timer of a list.
    pub fn first(&self, list: ListId) -> Option<u32> {
        some(self.lists[list.index()].head)
    }

    /// The last timer of a list.
    pub fn last(&self, list: ListId) -> Option<u32> {
        some(self.lists[list.index()].tail)
    }

    /// The timer after this one.
    pub fn next(&self, timer: u32) -> Option<u32> {
        some(self.node(timer).next)
    }

    /// The timer before this one.
    pub fn prev(&self, timer: u32) -> Option<u32> {
        some(self.node(timer).prev)
    }

    /// Appends a timer that is in no list to a list. Returns whether the list was empty.
    pub fn push(&mut self, list: ListId, timer: u32) -> bool {
        let ends = &mut self.lists[list.index()];
        let prev = std::mem::replace(&mut ends.tail, timer);
        if prev == NIL {
            ends.head = timer;
        } else {
            self.node_mut(prev).next = timer;
        }
        let node = self.node_mut(timer);
        (node.list, node.prev, node.next) = (Some(list), prev, NIL);
        prev == NIL
    }

    /// Links a timer that is in no list after another one, or at the front of the list.
    pub fn link(&mut self, list: ListId, behind: Option<u32>, timer: u32) {
        let ends = &mut self.lists[list.index()];
        let next = match behind {
            Some(prev) => {
                if ends.tail == prev {
                    ends.tail = timer;
                }
                std::mem::replace(&mut self.node_mut(prev).next, timer)
            }
            None => {
                if ends.tail == NIL {
                    ends.tail = timer;
                }
                std::mem::replace(&mut ends.head, timer)
            }
        };
        if next != NIL {
            self.node_mut(next).prev = timer;
        }
        let node = self.node_mut(timer);
        node.list = Some(list);
        node.prev = behind.unwrap_or(NIL);
        node.next = next;
    }

    /// Takes a timer out of its list. Returns the list if it is now empty.
    pub fn unlink(&mut self, timer: u32) -> Option<ListId> {
        let &Node {
            prev, next, list, ..
        } = self.node(timer);
        let list = list?;
        if self.cursor == timer {
            self.cursor = next;
        }
        if prev == NIL {
            self.lists[list.index()].head = next;
        } else {
            self.node_mut(prev).next = next;
        }
        if next == NIL {
            self.lists[list.index()].tail = prev;
        } else {
            self.node_mut(next).prev = prev;
        }
        (prev == NIL && next == NIL).then_some(list)
    }

    /// Begins a walk through a list. There is one walk at a time.
    pub fn walk(&mut self, list: ListId) {
        self.cursor = self.lists[list.index()].head;
    }

    /// The next timer of the walk. Any timer may be unlinked meanwhile, also this one.
    pub fn step(&mut self) -> Option<u32> {
        let timer = some(self.cursor)?;
        self.cursor = self.node(timer).next;
        Some(timer)
    }

    /// Whether the walk is at its end.
    pub fn at_end(&self) -> bool {
        self.cursor == NIL
    }
}

impl<T> Drop for Slab<T> {
    fn drop(&mut self) {
        drop(self.remove_all());
    }
}

fn some(timer: u32) -> Option<u32> {
    (timer != NIL).then_some(timer)
}

#[cfg(test)]
mod tests {
    use super::{CHUNK, ListId, Node, Slab};

    #[test]
    fn a_timer_takes_24_bytes_beside_its_value() {
        assert_eq!(size_of::<Node<u64>>(), 24 + 8);
        assert_eq!(size_of::<Node<()>>(), 24);
    }

    #[test]
    fn a_walk_survives_that_any_timer_is_unlinked() {
        let list = ListId::of_slot(0);
        for gone in 0..3 {
            let mut slab = Slab::new(1);
            for value in 0..3 {
                let timer = slab.insert(0, value).unwrap().index;
                slab.push(list, timer);
            }
            slab.walk(list);
            assert_eq!(slab.step(), Some(0));
            slab.unlink(gone);
            slab.remove(gone);
            let rest: Vec<u32> = std::iter::from_fn(|| slab.step()).collect();
            let expected: Vec<u32> = [1, 2].into_iter().filter(|it| *it != gone).collect();
            assert_eq!(rest, expected);
        }
    }

    #[test]
    fn it_does_not_grow_while_timers_come_and_go() {
        let mut slab = Slab::new(0);
        let mut timers: Vec<u32> = (0..1_000)
            .map(|_| slab.insert(1, ()).unwrap().index)
            .collect();
        let chunks = slab.chunks.len();
        assert_eq!(chunks, 1_000usize.div_ceil(CHUNK));
        for round in 0..10_000 {
            let at = round % timers.len();
            slab.remove(timers[at]);
            timers[at] = slab.insert(1, ()).unwrap().index;
        }
        assert_eq!((slab.len(), slab.chunks.len()), (1_000, chunks));
    }

    #[test]
    fn each_value_is_dropped_once() {
        use std::rc::Rc;
        let value = Rc::new(());
        let mut slab = Slab::new(1);
        let timers: Vec<u32> = (0..CHUNK as u32 + 10)
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
    fn a_stale_handle_finds_nothing() {
        let mut slab = Slab::new(0);
        let stale = slab.insert(1, 'a').unwrap();
        let first = stale.index;
        assert_eq!(slab.find(stale), Some(first));
        slab.remove(first);
        assert_eq!(slab.find(stale), None);
        let second = slab.insert(1, 'b').unwrap().index;
        assert_eq!(second, first, "its place is used again");
        assert_eq!(slab.find(stale), None);
    }
}
