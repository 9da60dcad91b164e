//! Goes through the table once, for whatever is shown.

use std::{cmp::Ordering, collections::BinaryHeap};

use super::{
    order::Sort,
    speed::{Speed, Speeds},
};
use crate::{
    filter::{Filter, Subject},
    inspect::Reader,
    model::Tracked,
};

/// A flow in a row of the screen.
#[derive(Clone, Copy)]
pub struct Row {
    /// The index of its record.
    pub index: u32,
    /// The flow.
    pub tracked: Tracked,
    /// Its speed, if it is known.
    pub speed: Option<Speed>,
}

impl Row {
    /// Bits a second of both sides; less than none if that is unknown.
    pub fn bits(&self) -> f32 {
        self.speed
            .map_or(-1.0, |speed| speed.bits[0] + speed.bits[1])
    }
}

/// Sums over the flows of the table.
#[derive(Clone, Copy, Debug, Default)]
pub struct Sums {
    /// Flows that match the filter.
    pub matching: u64,
    /// Their bits a second.
    pub matching_bits: f64,
    /// The bits a second of all flows.
    pub bits: f64,
}

/// Passes each flow that matches the filter to `take`. `is_new`: the speeds are taken anew.
pub fn scan(
    reader: &Reader,
    filter: &Filter,
    now: u32,
    (speeds, is_new): (&mut Speeds, bool),
    mut take: impl FnMut(Row),
) -> Sums {
    let mut sums = Sums::default();
    if is_new {
        let is_counted = reader.table().has_accounts();
        speeds.begin(if is_counted {
            reader.table().records()
        } else {
            0
        });
    }
    // `for_each` and not a loop: flows are then passed from one iterator to the next without being
    // copied.
    reader.flows(now).for_each(|(flow, tracked)| {
        let speed = match is_new {
            true => speeds.read(&flow, &tracked),
            false => speeds.get(&flow),
        };
        let bits = speed.map_or(0.0, |it| f64::from(it.bits[0]) + f64::from(it.bits[1]));
        sums.bits += bits;
        if filter.is_empty()
            || filter.matches(&Subject::tracked(&tracked, reader.known_as(&tracked.flow)))
        {
            sums.matching += 1;
            sums.matching_bits += bits;
            take(Row {
                index: flow.index,
                tracked,
                speed,
            });
        }
    });
    sums
}

/// The first flows by an order.
pub struct First {
    sort: Sort,
    reverse: bool,
    limit: usize,
    /// A heap whose top is the last of the chosen flows.
    chosen: BinaryHeap<Ranked>,
}

impl First {
    /// At most `limit` flows.
    pub fn new(sort: Sort, reverse: bool, limit: usize) -> Self {
        Self {
            sort,
            reverse,
            limit,
            chosen: BinaryHeap::new(),
        }
    }

    /// Takes a flow, if it is among the first.
    pub fn take(&mut self, row: Row) {
        let ranked = Ranked {
            row,
            sort: self.sort,
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

    /// The flows in order.
    pub fn rows(self) -> Vec<Row> {
        let chosen = self.chosen.into_sorted_vec();
        chosen.into_iter().map(|it| it.row).collect()
    }
}

/// A flow with its order. Equal flows are ordered by their index in the table, so that consecutive
/// lists agree.
struct Ranked {
    row: Row,
    sort: Sort,
    reverse: bool,
}

impl Ord for Ranked {
    fn cmp(&self, other: &Self) -> Ordering {
        let order = self.sort.compare(&self.row, &other.row);
        let order = if self.reverse { order.reverse() } else { order };
        order.then(self.row.index.cmp(&other.row.index))
    }
}

impl PartialOrd for Ranked {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Ranked {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Ranked {}
