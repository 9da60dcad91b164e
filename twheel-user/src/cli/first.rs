//! The first of any number of flows, by an order.

use std::{cmp::Ordering, collections::BinaryHeap};

/// What flows are sorted by.
pub trait Order<T>: Copy {
    /// The order of two of them.
    fn compare(self, one: &T, two: &T) -> Ordering;
}

/// The first by an order. No more than these are in memory.
pub struct First<T, O: Order<T>> {
    order: O,
    reverse: bool,
    limit: usize,
    /// A heap whose top is the last of the chosen ones.
    chosen: BinaryHeap<Ranked<T, O>>,
}

impl<T, O: Order<T>> First<T, O> {
    /// At most `limit`.
    pub fn new(order: O, reverse: bool, limit: usize) -> Self {
        Self {
            order,
            reverse,
            limit,
            chosen: BinaryHeap::new(),
        }
    }

    /// Takes a flow, if it is among the first. `index`: that of its record.
    pub fn take(&mut self, index: u32, flow: T) {
        let ranked = Ranked {
            index,
            flow,
            order: self.order,
            reverse: self.reverse,
        };
        if self.chosen.len() < self.limit {
            self.chosen.push(ranked);
        } else if let Some(mut last) = self.chosen.peek_mut()
            && ranked < *last
        {
            *last = ranked;
        }
    }

    /// The first ones, in order.
    pub fn sorted(self) -> impl Iterator<Item = T> {
        let chosen = self.chosen.into_sorted_vec();
        chosen.into_iter().map(|it| it.flow)
    }
}

/// A flow with its order. Equal flows are ordered by their index in the table, so that consecutive
/// lists agree.
struct Ranked<T, O> {
    index: u32,
    flow: T,
    order: O,
    reverse: bool,
}

impl<T, O: Order<T>> Ord for Ranked<T, O> {
    fn cmp(&self, other: &Self) -> Ordering {
        let order = self.order.compare(&self.flow, &other.flow);
        let order = if self.reverse { order.reverse() } else { order };
        order.then(self.index.cmp(&other.index))
    }
}

impl<T, O: Order<T>> PartialOrd for Ranked<T, O> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<T, O: Order<T>> PartialEq for Ranked<T, O> {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl<T, O: Order<T>> Eq for Ranked<T, O> {}
