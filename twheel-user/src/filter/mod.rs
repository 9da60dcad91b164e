//! Which flows are meant: `state == established and dport == 443 and idle > 30s and src in 10.0.0.0/8`.
//!
//! `docs/filter.md` is the language's reference. A filter is parsed by the grammar in `filter.pest`, and checked
//! against what its fields are: what is wrong is said with the column in which it is.

mod field;
mod parse;

use std::{cmp::Ordering, net::IpAddr, time::Duration};

use anyhow::Result;
use twheel_common::{event::Reason, flow::Traffic};

pub use self::field::{Field, Known, STATES};
use crate::{
    failure::{Failure, Kind},
    model::{Expired, Flow, Named, Timing, Tracked},
    policy::network::{Network, mapped},
};

/// A filter, checked. Without an expression it lets everything pass.
#[derive(Clone, Debug, Default)]
pub struct Filter(Option<Test>);

/// What a filter asks of a flow.
#[derive(Clone, Debug)]
enum Test {
    All(Vec<Test>),
    Any(Vec<Test>),
    Not(Box<Test>),
    /// The field is true of it.
    Is(Field),
    /// One of these is the field's value.
    OneOf(Field, Vec<Value>),
    /// How the field's value stands to this.
    Compares(Field, Operator, Value),
}

/// How two values are to stand to one another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Operator {
    Less,
    AtMost,
    AtLeast,
    More,
}

impl Operator {
    fn holds(self, ordering: Ordering) -> bool {
        match self {
            Self::Less => ordering.is_lt(),
            Self::AtMost => ordering.is_le(),
            Self::AtLeast => ordering.is_ge(),
            Self::More => ordering.is_gt(),
        }
    }
}

/// What a filter compares with.
#[derive(Clone, Debug, PartialEq)]
enum Value {
    Name(String),
    Number(u64),
    /// Both included.
    Range(u64, u64),
    Duration(Duration),
    Network(Network),
}

/// What can be asked about.
#[derive(Clone, Copy, Debug)]
pub struct Subject<'a> {
    /// Endpoints, protocol, state.
    pub flow: Flow,
    /// What it is known as.
    pub named: Named<'a>,
    /// Its beginning was not seen.
    pub picked_up: bool,
    /// Since its latest packet.
    pub idle: Duration,
    /// Since its first packet.
    pub age: Duration,
    /// Of both sides, if that is counted.
    pub account: Option<[Traffic; 2]>,
    /// Of both sides, if there are retransmission timers.
    pub timing: Option<[Timing; 2]>,
    /// Of a flow that is in the table: until it expires.
    pub expires: Option<Duration>,
    /// Likewise: the CPU on whose wheel it stands.
    pub cpu: Option<u32>,
    /// Of one that has ended: why.
    pub reason: Option<Reason>,
    /// Likewise: how long ago.
    pub ended: Option<Duration>,
}

impl<'a> Subject<'a> {
    /// A flow that is in the table.
    pub fn tracked(flow: &Tracked, named: Named<'a>) -> Self {
        Self {
            flow: flow.flow,
            named,
            picked_up: flow.picked_up,
            idle: flow.idle,
            age: flow.age,
            account: flow.account,
            timing: flow.timing,
            expires: Some(flow.expires),
            cpu: Some(flow.cpu),
            reason: None,
            ended: None,
        }
    }

    /// A flow that has ended so long ago.
    pub fn ended(flow: &Expired, named: Named<'a>, ago: Duration) -> Self {
        Self {
            flow: flow.flow,
            named,
            picked_up: flow.picked_up,
            idle: flow.idle,
            age: flow.age,
            account: flow.account,
            timing: flow.pace.map(|sides| sides.map(Timing::from)),
            expires: None,
            cpu: None,
            reason: Some(flow.reason),
            ended: Some(ago),
        }
    }
}

impl Filter {
    /// Reads a filter; an empty one lets everything pass.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`], with the column: what is no filter, names a field that does not exist or that nobody knows
    /// here, or compares with what such a field cannot be.
    pub fn parse(text: &str, known: Known) -> Result<Self> {
        if text.trim().is_empty() {
            return Ok(Self(None));
        }
        match parse::parse(text, known) {
            Ok(test) => Ok(Self(Some(test))),
            Err(wrong) => Err(Failure::new(Kind::Usage, wrong.point_at(text)).into()),
        }
    }

    /// Whether everything passes.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Whether a flow passes.
    pub fn matches(&self, subject: &Subject<'_>) -> bool {
        self.0.as_ref().is_none_or(|test| test.holds(subject))
    }
}

impl Test {
    fn holds(&self, of: &Subject<'_>) -> bool {
        match self {
            Self::All(tests) => tests.iter().all(|test| test.holds(of)),
            Self::Any(tests) => tests.iter().any(|test| test.holds(of)),
            Self::Not(test) => !test.holds(of),
            Self::Is(field) => field.is(of),
            Self::OneOf(field, values) => {
                field.any(of, |found| values.iter().any(|value| found.is(value)))
            }
            Self::Compares(field, operator, value) => field.any(of, |found| {
                found
                    .compare(value)
                    .is_some_and(|ordering| operator.holds(ordering))
            }),
        }
    }
}

/// A value of a flow's.
#[derive(Clone, Copy, Debug)]
enum Found<'a> {
    Name(&'a str),
    Number(u64),
    Duration(Duration),
    Address(IpAddr),
}

impl Found<'_> {
    fn is(self, value: &Value) -> bool {
        match (self, value) {
            (Self::Name(found), Value::Name(name)) => found.eq_ignore_ascii_case(name),
            (Self::Number(found), Value::Range(from, to)) => (from..=to).contains(&&found),
            (Self::Address(found), Value::Network(network)) => network.contains(mapped(found)),
            _ => self.compare(value) == Some(Ordering::Equal),
        }
    }

    fn compare(self, value: &Value) -> Option<Ordering> {
        match (self, value) {
            (Self::Number(found), Value::Number(number)) => Some(found.cmp(number)),
            (Self::Duration(found), Value::Duration(duration)) => Some(found.cmp(duration)),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests;
