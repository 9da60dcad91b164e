//! Lists that are linked through the timers, for schemes whose lists are in an order.

use alloc::{vec, vec::Vec};

use crate::{
    arena::Zeroed,
    slab::{NIL, Slab},
};

/// A list: [`DUE`], or that of a slot.
pub use crate::blocks::{DUE, List, list_of, slot_of};

/// How a timer is linked.
///
/// Next and previous pointers are written without reading what they overwrite: a read would wait
/// for a cache miss, a store does not.
#[derive(Clone, Copy, Debug)]
pub struct Links {
    next: u32,
    prev: u32,
    list: List,
}

// SAFETY: integers.
unsafe impl Zeroed for Links {}

#[derive(Clone, Copy, Debug)]
struct Ends {
    head: u32,
    tail: u32,
}

const EMPTY: Ends = Ends {
    head: NIL,
    tail: NIL,
};

/// Doubly linked lists of timers; each timer is in at most one.
#[derive(Debug)]
pub struct Linked {
    ends: Vec<Ends>,
    /// The next timer of the walk through a list. Unlinking it moves the walk on.
    cursor: u32,
}

impl Linked {
    /// [`DUE`] and the lists of this many slots, all empty.
    pub fn new(slots: u32) -> Self {
        Self {
            ends: vec![EMPTY; slots as usize + 1],
            cursor: NIL,
        }
    }

    /// Empties all lists.
    pub fn clear(&mut self) {
        self.ends.fill(EMPTY);
        self.cursor = NIL;
    }

    /// The first timer of a list.
    pub fn first(&self, list: List) -> Option<u32> {
        some(self.ends[list as usize].head)
    }

    /// The last timer of a list.
    pub fn last(&self, list: List) -> Option<u32> {
        some(self.ends[list as usize].tail)
    }

    /// Appends a timer that is in no list to a list.
    pub fn push<T>(&mut self, slab: &mut Slab<T, Links>, list: List, timer: u32) {
        let ends = &mut self.ends[list as usize];
        let prev = core::mem::replace(&mut ends.tail, timer);
        if prev == NIL {
            ends.head = timer;
        } else {
            slab.link_mut(prev).next = timer;
        }
        let next = NIL;
        *slab.link_mut(timer) = Links { next, prev, list };
    }

    /// Links a timer that is in no list after another one, or at the front of the list.
    pub fn link<T>(
        &mut self,
        slab: &mut Slab<T, Links>,
        list: List,
        behind: Option<u32>,
        timer: u32,
    ) {
        let ends = &mut self.ends[list as usize];
        let prev = behind.unwrap_or(NIL);
        if ends.tail == prev {
            ends.tail = timer;
        }
        let next = match behind {
            Some(prev) => core::mem::replace(&mut slab.link_mut(prev).next, timer),
            None => core::mem::replace(&mut ends.head, timer),
        };
        if next != NIL {
            slab.link_mut(next).prev = timer;
        }
        *slab.link_mut(timer) = Links { next, prev, list };
    }

    /// Takes a timer out of its list. Returns the list if it is now empty.
    pub fn unlink<T>(&mut self, slab: &mut Slab<T, Links>, timer: u32) -> Option<List> {
        let Links { next, prev, list } = slab.link(timer);
        if self.cursor == timer {
            self.cursor = next;
        }
        if prev == NIL {
            self.ends[list as usize].head = next;
        } else {
            slab.link_mut(prev).next = next;
        }
        if next == NIL {
            self.ends[list as usize].tail = prev;
        } else {
            slab.link_mut(next).prev = prev;
        }
        (prev == NIL && next == NIL).then_some(list)
    }

    /// Takes the first timer of a list out of it.
    pub fn pop<T>(&mut self, slab: &mut Slab<T, Links>, list: List) -> Option<u32> {
        let timer = self.first(list)?;
        self.unlink(slab, timer);
        Some(timer)
    }

    /// Begins a walk through a list. There is one walk at a time.
    pub fn walk(&mut self, list: List) {
        self.cursor = self.ends[list as usize].head;
    }

    /// The next timer of the walk. Any timer may be unlinked meanwhile, also this one.
    pub fn step<T>(&mut self, slab: &Slab<T, Links>) -> Option<u32> {
        let timer = some(self.cursor)?;
        self.cursor = slab.link(timer).next;
        Some(timer)
    }

    /// Whether the walk is at its end.
    pub fn at_end(&self) -> bool {
        self.cursor == NIL
    }
}

/// The timer after this one.
pub fn next<T>(slab: &Slab<T, Links>, timer: u32) -> Option<u32> {
    some(slab.link(timer).next)
}

/// The timer before this one.
pub fn prev<T>(slab: &Slab<T, Links>, timer: u32) -> Option<u32> {
    some(slab.link(timer).prev)
}

/// The list that the timer is in, or was in last.
pub fn list<T>(slab: &Slab<T, Links>, timer: u32) -> List {
    slab.link(timer).list
}

/// The timer's position in an array, for a scheme that has one instead of lists.
pub fn position<T>(slab: &Slab<T, Links>, timer: u32) -> u32 {
    slab.link(timer).next
}

/// Sets the timer's position in an array.
pub fn set_position<T>(slab: &mut Slab<T, Links>, timer: u32, position: u32) {
    let link = slab.link_mut(timer);
    link.next = position;
    // Any list but `DUE`.
    link.list = list_of(0);
}

fn some(timer: u32) -> Option<u32> {
    (timer != NIL).then_some(timer)
}

#[cfg(test)]
mod tests {
    use super::{Linked, list_of};
    use crate::slab::Slab;
    use alloc::vec::Vec;

    #[test]
    fn a_walk_survives_that_any_timer_is_unlinked() {
        let list = list_of(0);
        for gone in 0..3 {
            let (mut slab, mut lists) = (Slab::new(), Linked::new(1));
            for value in 0..3 {
                let timer = slab.insert(0, value).unwrap().index;
                lists.push(&mut slab, list, timer);
            }
            lists.walk(list);
            assert_eq!(lists.step(&slab), Some(0));
            lists.unlink(&mut slab, gone);
            let rest: Vec<u32> = core::iter::from_fn(|| lists.step(&slab)).collect();
            let expected: Vec<u32> = [1, 2].into_iter().filter(|it| *it != gone).collect();
            assert_eq!(rest, expected);
        }
    }
}
