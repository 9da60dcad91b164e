//! Values of flows and of filters, and how they compare.

use std::{cmp::Ordering, net::IpAddr, time::Duration};

use crate::policy::network::{Network, mapped};

/// The order that two values must have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Operator {
    Less,
    AtMost,
    AtLeast,
    More,
}

impl Operator {
    pub(super) fn holds(self, ordering: Ordering) -> bool {
        match self {
            Self::Less => ordering.is_lt(),
            Self::AtMost => ordering.is_le(),
            Self::AtLeast => ordering.is_ge(),
            Self::More => ordering.is_gt(),
        }
    }
}

/// A value in a filter.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Value {
    Name(String),
    Number(u64),
    /// Both ends are included.
    Range(u64, u64),
    Duration(Duration),
    Network(Network),
}

/// A value of a flow's field.
#[derive(Clone, Copy, Debug)]
pub(super) enum FlowValue<'a> {
    Name(&'a str),
    Number(u64),
    Duration(Duration),
    Address(IpAddr),
}

impl FlowValue<'_> {
    pub(super) fn is(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Name(found), Value::Name(name)) => found.eq_ignore_ascii_case(name),
            (Self::Number(found), Value::Range(from, to)) => (from..=to).contains(&&found),
            (Self::Address(found), Value::Network(network)) => network.contains(mapped(found)),
            _ => self.compare(value) == Some(Ordering::Equal),
        }
    }

    pub(super) fn compare(self, value: &Value) -> Option<Ordering> {
        match (self, value) {
            (Self::Number(found), Value::Number(number)) => Some(found.cmp(number)),
            (Self::Duration(found), Value::Duration(duration)) => Some(found.cmp(duration)),
            _ => None,
        }
    }
}
