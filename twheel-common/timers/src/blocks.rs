//! Lists of timers in blocks of one cache line.
//!
//! A list is a chain of blocks, each with up to [`ENTRIES`] timers. Compared with lists that are
//! linked through the timers themselves:
//!
//! - A timer is removed by clearing a bit. Its neighbours, which may be anywhere in memory, are not
//!   touched: one cache miss less or two.
//! - Whoever empties a list knows the next timers before it has loaded the present one, so it can
//!   prefetch them. A linked list names the next timer only once the present one is there.
//! - A block is freed when its last timer goes. So memory is bounded by what is armed, at the worst
//!   by one block a timer.
//! - A block is only its entries. Which of them are timers, and the chain, are in arrays beside
//!   them, of 14 bytes for each block, which the cache holds longest. So to remove a timer, its
//!   block is not touched, either; and to add one, nobody waits for it to be loaded.

use alloc::{vec, vec::Vec};

use crate::{
    arena::{Arena, Zeroed},
    slab::{NIL, Slab},
};

/// Timers in a block: with them it fills a cache line.
const ENTRIES: u32 = 1 << BITS;

/// log2 of that.
const BITS: u32 = 4;

/// A timer's place: the number of its block, and of its entry there.
pub type At = u32;

/// A list: [`DUE`], or that of a slot.
pub type List = u32;

/// The list of timers that were found due and not yet handed out.
pub const DUE: List = 0;

/// The list of a slot.
#[inline(always)]
pub const fn list_of(slot: u32) -> List {
    slot + 1
}

/// The slot of a list; `None` for [`DUE`].
#[inline(always)]
pub const fn slot_of(list: List) -> Option<u32> {
    list.checked_sub(1)
}

#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
struct Block([u32; ENTRIES as usize]);

// SAFETY: integers.
unsafe impl Zeroed for Block {}

/// Where a block is.
#[derive(Clone, Copy, Debug)]
struct Chain {
    next: u32,
    prev: u32,
    list: List,
}

// SAFETY: integers.
unsafe impl Zeroed for Chain {}

#[derive(Clone, Copy, Debug)]
struct Ends {
    /// The first block.
    head: u32,
    /// The place after that of the last timer that was added. It is the next one's if it is in the
    /// same block; if it is the first of a block, there is no room.
    next: At,
}

const EMPTY: Ends = Ends { head: NIL, next: 0 };

impl Ends {
    /// Whether the next timer needs a new block.
    #[inline(always)]
    fn is_full(self) -> bool {
        self.next & (ENTRIES - 1) == 0
    }

    /// The last block.
    #[inline(always)]
    fn tail(self) -> u32 {
        match self.head {
            NIL => NIL,
            _ => self.next.wrapping_sub(1) >> BITS,
        }
    }

    /// How many entries of the last block are used.
    #[inline(always)]
    fn used(self) -> u32 {
        (self.next.wrapping_sub(1) & (ENTRIES - 1)) + 1
    }
}

/// A walk through a list, up to what was its end when the walk began. While it is under way, timers
/// may be removed anywhere and added at the end.
#[derive(Debug)]
struct Walk {
    /// [`NIL`] if there is none.
    block: u32,
    entry: u32,
    end_block: u32,
    end_entry: u32,
}

/// Lists of timers.
#[derive(Debug)]
pub struct Blocks {
    blocks: Arena<Block>,
    chain: Arena<Chain>,
    /// For each block, which of its entries are timers.
    live: Vec<u16>,
    /// Blocks from this one on were never used.
    fresh: u32,
    vacant: Vec<u32>,
    ends: Vec<Ends>,
    walk: Walk,
}

impl Blocks {
    /// [`DUE`] and the lists of this many slots, all empty.
    pub fn new(slots: u32) -> Self {
        Self {
            blocks: Arena::new(),
            chain: Arena::new(),
            live: Vec::new(),
            fresh: 0,
            vacant: Vec::new(),
            ends: vec![EMPTY; slots as usize + 1],
            walk: Walk {
                block: NIL,
                entry: 0,
                end_block: NIL,
                end_entry: 0,
            },
        }
    }

    /// Adds the lists of more slots.
    pub fn add_slots(&mut self, slots: u32) {
        let lists = self.ends.len() + slots as usize;
        self.ends.resize(lists, EMPTY);
    }

    /// Empties all lists.
    pub fn clear(&mut self) {
        self.ends.fill(EMPTY);
        self.live.fill(0);
        self.vacant.clear();
        self.fresh = 0;
        self.walk.block = NIL;
    }

    /// Frees all memory but that of the lists themselves, which are empty.
    pub fn release(&mut self) {
        self.clear();
        (self.blocks, self.chain) = (Arena::new(), Arena::new());
        (self.live, self.vacant) = (Vec::new(), Vec::new());
    }

    /// Whether a list is empty.
    #[inline(always)]
    pub fn is_empty(&self, list: List) -> bool {
        self.ends[list as usize].head == NIL
    }

    /// Appends a timer that is in no list to a list. Returns whether the list was empty.
    #[inline]
    pub fn push<T>(&mut self, slab: &mut Slab<T, At>, list: List, timer: u32) -> bool {
        let ends = &mut self.ends[list as usize];
        let (mut at, was_empty) = (ends.next, ends.head == NIL);
        if ends.is_full() {
            at = self.extend(list);
        } else {
            ends.next = at + 1;
        }
        *slab.link_mut(timer) = at;
        let (block, entry) = (at >> BITS, at & (ENTRIES - 1));
        self.blocks.at_mut(block).0[entry as usize] = timer;
        self.live[block as usize] |= 1 << entry;
        was_empty
    }

    /// Appends a block to a list. Returns the place of its first entry, which is taken.
    fn extend(&mut self, list: List) -> At {
        let new = self.take();
        let ends = &mut self.ends[list as usize];
        let prev = ends.tail();
        if prev == NIL {
            ends.head = new;
        }
        ends.next = new << BITS | 1;
        if prev != NIL {
            self.chain.at_mut(prev).next = new;
        }
        let next = NIL;
        *self.chain.at_mut(new) = Chain { next, prev, list };
        new << BITS
    }

    /// A vacant block. There are enough: at the worst one a timer, and there are fewer timers than
    /// blocks fit into [`At`].
    #[inline]
    fn take(&mut self) -> u32 {
        if let Some(block) = self.vacant.pop() {
            return block;
        }
        if self.fresh == self.blocks.places() {
            self.blocks.grow();
            self.chain.grow();
            self.live.resize(self.blocks.places() as usize, 0);
        }
        self.fresh += 1;
        self.fresh - 1
    }

    /// Removes a timer from its list. Returns the list if it is now empty.
    #[inline]
    pub fn remove(&mut self, at: At) -> Option<List> {
        let index = at >> BITS;
        let live = &mut self.live[index as usize];
        *live &= !(1 << (at & (ENTRIES - 1)));
        if *live != 0 {
            return None;
        }
        self.free(index)
    }

    /// Frees a block without timers. Returns its list if that is now empty.
    fn free(&mut self, index: u32) -> Option<List> {
        let Chain { next, prev, list } = *self.chain.at(index);
        let walk = &mut self.walk;
        if index == walk.block {
            (walk.block, walk.entry) = (next, 0);
            if index == walk.end_block {
                walk.block = NIL;
            }
        } else if index == walk.end_block {
            (walk.end_block, walk.end_entry) = (prev, ENTRIES);
        }
        let ends = &mut self.ends[list as usize];
        if prev == NIL {
            ends.head = next;
        }
        if next == NIL {
            ends.next = (prev << BITS).wrapping_add(ENTRIES);
        }
        if prev != NIL {
            self.chain.at_mut(prev).next = next;
        }
        if next != NIL {
            self.chain.at_mut(next).prev = prev;
        }
        self.vacant.push(index);
        (prev == NIL && next == NIL).then_some(list)
    }

    /// Removes the first timer of a list.
    #[inline]
    pub fn pop(&mut self, list: List) -> Option<u32> {
        self.pop_and(list, |_, _| ())
    }

    /// Removes the first timer of a list that is to be emptied, and prefetches those that come
    /// after it.
    #[inline]
    pub fn pop_ahead<T>(&mut self, slab: &Slab<T, At>, list: List) -> Option<u32> {
        self.pop_and(list, |blocks, next| blocks.enter(slab, next))
    }

    #[inline(always)]
    fn pop_and(&mut self, list: List, enter: impl FnOnce(&Self, u32)) -> Option<u32> {
        let head = self.ends[list as usize].head;
        if head == NIL {
            return None;
        }
        let block = self.blocks.at(head);
        let live = &mut self.live[head as usize];
        let timer = block.0[live.trailing_zeros() as usize % ENTRIES as usize];
        *live &= *live - 1;
        if *live == 0 {
            let next = self.chain.at(head).next;
            self.free(head);
            if next != NIL {
                enter(self, next);
            }
        }
        Some(timer)
    }

    /// Prefetches the first timers of a list that will be walked or emptied.
    #[inline]
    pub fn arrive<T>(&self, slab: &Slab<T, At>, list: List) {
        let head = self.ends[list as usize].head;
        if head != NIL {
            self.prefetch_timers(slab, head);
            self.enter(slab, head);
        }
    }

    /// Prefetches what comes after a block: the timers of the next one, and the one after that.
    #[inline]
    fn enter<T>(&self, slab: &Slab<T, At>, index: u32) {
        let next = self.chain.at(index).next;
        if next != NIL {
            self.prefetch_timers(slab, next);
            let later = self.chain.at(next).next;
            if later != NIL {
                self.blocks.prefetch(later);
            }
        }
    }

    #[inline(always)]
    fn prefetch_timers<T>(&self, slab: &Slab<T, At>, index: u32) {
        let block = self.blocks.at(index);
        let mut live = self.live[index as usize];
        while live != 0 {
            slab.prefetch(block.0[live.trailing_zeros() as usize % ENTRIES as usize]);
            live &= live - 1;
        }
    }

    /// Begins a walk through a list. There is one walk at a time.
    pub fn walk<T>(&mut self, slab: &Slab<T, At>, list: List) {
        let ends = self.ends[list as usize];
        self.walk = Walk {
            block: ends.head,
            entry: 0,
            end_block: ends.tail(),
            end_entry: ends.used(),
        };
        self.arrive(slab, list);
    }

    /// The next timer of the walk. It may be removed meanwhile, as any other.
    #[inline]
    pub fn step<T>(&mut self, slab: &Slab<T, At>) -> Option<u32> {
        loop {
            let walk = &mut self.walk;
            if walk.block == NIL {
                return None;
            }
            let is_last = walk.block == walk.end_block;
            let end = if is_last { walk.end_entry } else { ENTRIES };
            let live = u32::from(self.live[walk.block as usize]);
            let rest = live & ((1 << end) - 1) & (u32::MAX << walk.entry);
            if rest != 0 {
                let entry = rest.trailing_zeros();
                walk.entry = entry + 1;
                let block = self.blocks.at(walk.block);
                return Some(block.0[(entry % ENTRIES) as usize]);
            }
            if is_last {
                walk.block = NIL;
                return None;
            }
            let next = self.chain.at(walk.block).next;
            (walk.block, walk.entry) = (next, 0);
            self.enter(slab, next);
        }
    }

    /// Whether the walk is at its end; it may be even if this says no.
    pub fn at_end(&self) -> bool {
        self.walk.block == NIL
    }
}

#[cfg(test)]
mod tests {
    use super::{Block, Blocks, DUE, ENTRIES, list_of, slot_of};
    use crate::slab::Slab;
    use alloc::vec::Vec;

    #[test]
    fn a_block_is_a_cache_line() {
        assert_eq!((size_of::<Block>(), align_of::<Block>()), (64, 64));
        assert_eq!((slot_of(DUE), slot_of(list_of(7))), (None, Some(7)));
    }

    /// `count` timers in list 1.
    fn filled(count: u32) -> (Slab<u32, u32>, Blocks) {
        let (mut slab, mut blocks) = (Slab::new(), Blocks::new(1));
        for value in 0..count {
            let timer = slab.insert(0, value).unwrap().index;
            assert_eq!(blocks.push(&mut slab, 1, timer), value == 0);
        }
        (slab, blocks)
    }

    #[test]
    fn what_is_pushed_is_popped_in_order() {
        let (slab, mut blocks) = filled(100);
        let all: Vec<u32> = core::iter::from_fn(|| blocks.pop_ahead(&slab, 1)).collect();
        assert!(all.into_iter().eq(0..100));
        assert!(blocks.is_empty(1) && blocks.pop(1).is_none());
        assert_eq!(blocks.vacant.len(), 100usize.div_ceil(ENTRIES as usize));
    }

    #[test]
    fn a_walk_survives_that_any_timers_go_and_does_not_meet_new_ones() {
        for count in [1, 15, 16, 17, 32, 40] {
            for first in 0..count {
                for gone in 0..=count {
                    // `gone` timers go from the first one on, while the walk has come to `count / 3`.
                    let (mut slab, mut blocks) = filled(count);
                    blocks.walk(&slab, 1);
                    let come = count / 3;
                    for at in 0..come {
                        assert_eq!(blocks.step(&slab), Some(at));
                    }
                    let going = first..(first + gone).min(count);
                    for timer in going.clone() {
                        let is_last = going.len() as u32 == count && timer == count - 1;
                        assert_eq!(blocks.remove(slab.link(timer)), is_last.then_some(1));
                    }
                    for value in 0..20 {
                        let new = slab.insert(0, value).unwrap().index;
                        blocks.push(&mut slab, 1, new);
                    }
                    let rest: Vec<u32> = core::iter::from_fn(|| blocks.step(&slab)).collect();
                    let expected = (come..count).filter(|timer| !going.contains(timer));
                    assert!(rest.into_iter().eq(expected), "{count}, {going:?}");
                    assert!(blocks.at_end());
                }
            }
        }
    }

    #[test]
    fn a_block_is_used_again_once_its_timers_are_gone() {
        const BLOCKS: u32 = 10;
        let (mut slab, mut blocks) = filled(ENTRIES * BLOCKS);
        let all = || 0..ENTRIES * BLOCKS;
        for _ in 0..100 {
            // One of each block stays.
            for timer in all().filter(|timer| timer % ENTRIES != 5) {
                assert_eq!(blocks.remove(slab.link(timer)), None);
            }
            for timer in all() {
                if timer % ENTRIES == 5 {
                    blocks.remove(slab.link(timer));
                }
                blocks.push(&mut slab, 1, timer);
            }
        }
        assert!(blocks.fresh <= 2 * BLOCKS + 2, "{} blocks", blocks.fresh);
    }
}
