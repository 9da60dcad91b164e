//! Reads the flow table a part at a time, again and again from its beginning to its end.
//!
//! The place of a flow in the table is a hash of its key, so each part is a fair sample of all
//! flows: what it says of all is scaled to their number. A table that is read in one part is counted
//! exactly. Sums by source and service are made of all parts of a pass.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;

use super::talkers::Sums;
use crate::{inspect::Reader, model::Tracked};

/// Flows of a part, about, at most.
const FLOWS: u64 = 1 << 16;
/// Records of a part, at most, with flows or without.
const RECORDS: u32 = 1 << 20;

/// Number of flows by state.
pub(super) type States = BTreeMap<&'static str, u64>;

/// Within which times the flows that are due are counted.
pub(super) const DUE: [Duration; 11] = [
    Duration::from_secs(1),
    Duration::from_secs(5),
    Duration::from_secs(15),
    Duration::from_secs(60),
    Duration::from_secs(2 * 60),
    Duration::from_secs(5 * 60),
    Duration::from_secs(15 * 60),
    Duration::from_secs(3600),
    Duration::from_secs(6 * 3600),
    Duration::from_secs(86_400),
    Duration::from_secs(5 * 86_400),
];

/// What a part says of all flows.
#[derive(Clone, Debug, Default)]
pub(super) struct Part {
    /// Flows by state.
    pub(super) states: States,
    /// Flows by the time that they have left: up to each of [`DUE`] and more than the one before,
    /// and those that have more than all.
    pub(super) due: [u64; DUE.len() + 1],
    /// The flows that were read.
    pub(super) read: u64,
    /// They are all flows: nothing is estimated.
    pub(super) is_whole: bool,
}

/// Passes over a flow table.
pub(super) struct Passes {
    pub(super) reader: Reader,
    /// The record with which the next part begins.
    next: u32,
    /// The records of each part of this pass.
    size: u32,
    /// What the parts of this pass have found so far.
    found: Sums,
}

impl Passes {
    pub(super) fn new(reader: Reader) -> Self {
        Self {
            reader,
            next: 0,
            size: 0,
            found: Sums::default(),
        }
    }

    /// Reads the next part. Also returns the sums of a whole pass, if it ends with this part.
    /// `live`: how many flows there are.
    pub(super) fn go_on(&mut self, live: u64) -> Result<(Part, Option<Sums>)> {
        self.reader.read_timeouts()?;
        let now = self.reader.now()?;
        let (records, first) = (self.reader.table().records(), self.next);
        if first == 0 {
            let parts = live.div_ceil(FLOWS).max(records.div_ceil(RECORDS).into());
            self.size = records.div_ceil(parts.clamp(1, records.max(1).into()) as u32);
        }
        let end = records.min(first.saturating_add(self.size));
        let mut part = Part::default();
        for flow in self.reader.table().of_records(first..end)? {
            if let Some(tracked) = self.reader.tracked(&flow, now) {
                part.add(&tracked);
                self.found.add(&tracked.flow, tracked.account);
            }
        }
        part.is_whole = first == 0 && end == records;
        if !part.is_whole {
            part.scale(live);
        }
        self.next = if end == records { 0 } else { end };
        let whole = (self.next == 0).then(|| std::mem::take(&mut self.found));
        Ok((part, whole))
    }
}

impl Part {
    fn add(&mut self, flow: &Tracked) {
        self.read += 1;
        *self.states.entry(flow.flow.state).or_default() += 1;
        self.due[DUE.partition_point(|bound| *bound < flow.expires)] += 1;
    }

    /// Makes of the numbers of some flows those of `live` flows.
    fn scale(&mut self, live: u64) {
        let read = self.read.max(1) as f64;
        let scaled = |count: u64| (count as f64 * live as f64 / read).round() as u64;
        self.states.values_mut().for_each(|it| *it = scaled(*it));
        self.due.iter_mut().for_each(|it| *it = scaled(*it));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_scaled_to_all() {
        let mut part = Part {
            states: States::from([("established", 3), ("syn_sent", 1)]),
            read: 4,
            ..Part::default()
        };
        part.due[2] = 4;
        part.scale(1000);
        assert_eq!(
            part.states,
            States::from([("established", 750), ("syn_sent", 250)])
        );
        assert_eq!(part.due[2], 1000);
        let mut none = Part::default();
        none.scale(7);
        assert_eq!(none.due, [0; DUE.len() + 1]);
    }
}
