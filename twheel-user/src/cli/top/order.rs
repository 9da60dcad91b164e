//! What flows and groups are sorted by.

use std::{cmp::Ordering, sync::LazyLock};

use clap::{ValueEnum, builder::PossibleValue};

use super::{group::Sum, scan::Row};
use crate::{
    cli::{first::Order, flows::Key},
    filter::Knowable,
};

/// What flows are sorted by: two keys of `top` alone, and those of `twheel flows`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sort {
    /// Bits a second of both sides together, most first.
    Rate,
    /// Time since the last packet, shortest first.
    Last,
    /// As `twheel flows` sorts.
    By(Key),
}

impl ValueEnum for Sort {
    fn value_variants<'a>() -> &'a [Self] {
        static ALL: LazyLock<Vec<Sort>> = LazyLock::new(|| {
            let others = Key::value_variants().iter().map(|key| Sort::By(*key));
            [Sort::Rate, Sort::Last].into_iter().chain(others).collect()
        });
        &ALL
    }

    fn to_possible_value(&self) -> Option<PossibleValue> {
        match self {
            Self::Rate => {
                let help = "Bits a second of both sides together, most first";
                Some(PossibleValue::new("rate").help(help))
            }
            Self::Last => {
                let help = "Time since the last packet, shortest first";
                Some(PossibleValue::new("last").help(help))
            }
            Self::By(key) => key.to_possible_value(),
        }
    }
}

impl Sort {
    /// What is known best of how busy a flow is.
    pub fn usual(known: Knowable) -> Self {
        match known.accounting {
            true => Self::Rate,
            false => Self::Last,
        }
    }

    /// Whether flows have what this sorts by.
    pub fn is_known(self, known: Knowable) -> bool {
        match self {
            Self::Rate => known.accounting,
            Self::Last => true,
            Self::By(key) => key.unknown(known).is_none(),
        }
    }
}

impl Order<Row> for Sort {
    fn compare(self, one: &Row, two: &Row) -> Ordering {
        match self {
            Self::Rate => {
                let order = two.bits().total_cmp(&one.bits());
                // Of flows without a rate, the last to have a packet comes first.
                order.then(one.tracked.idle.cmp(&two.tracked.idle))
            }
            Self::Last => one.tracked.idle.cmp(&two.tracked.idle),
            Self::By(key) => key.compare(&one.tracked, &two.tracked),
        }
    }
}

/// What groups of flows are sorted by, most first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum GroupSort {
    /// Bits a second.
    Rate,
    /// Packets a second.
    PacketRate,
    /// Flows.
    Flows,
    /// Bytes of the flows that are in the table.
    Bytes,
}

impl GroupSort {
    /// Whether groups have what this sorts by.
    pub fn is_known(self, known: Knowable) -> bool {
        known.accounting || self == Self::Flows
    }

    /// The order of two groups.
    pub fn compare(self, one: &Sum, two: &Sum) -> Ordering {
        let order = match self {
            Self::Rate => two.bits().total_cmp(&one.bits()),
            Self::PacketRate => two.packets_a_second.total_cmp(&one.packets_a_second),
            Self::Flows => two.flows.cmp(&one.flows),
            Self::Bytes => two.bytes.cmp(&one.bytes),
        };
        order.then(two.flows.cmp(&one.flows))
    }
}

/// The name of a sort key, as options have it.
pub fn name(key: &impl ValueEnum) -> String {
    let value = key.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

/// The sort key that is `by` positions further in the list of those that `is_known`.
pub fn further<T: ValueEnum + PartialEq + Copy>(
    key: T,
    by: isize,
    is_known: impl Fn(T) -> bool,
) -> T {
    let keys: Vec<T> = T::value_variants()
        .iter()
        .copied()
        .filter(|it| is_known(*it))
        .collect();
    let at = keys.iter().position(|it| *it == key).unwrap_or(0);
    let next = (at as isize + by).rem_euclid(keys.len().max(1) as isize);
    keys.get(next as usize).copied().unwrap_or(key)
}
