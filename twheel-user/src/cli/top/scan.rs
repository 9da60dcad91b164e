//! Goes through the table once, for whatever is shown.

use super::speed::{Speed, Speeds};
use crate::{filter::Filter, inspect::Reader, model::Tracked};

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
        if reader.matches(filter, &tracked) {
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
