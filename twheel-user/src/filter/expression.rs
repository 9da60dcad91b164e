//! The checked expression of a filter.

use super::{
    field::Field,
    subject::Subject,
    value::{Operator, Value},
};

/// A condition on a flow.
#[derive(Clone, Debug)]
pub(super) enum Test {
    All(Vec<Test>),
    Any(Vec<Test>),
    Not(Box<Test>),
    /// The flag is set.
    Is(Field),
    /// The field has one of these values.
    OneOf(Field, Vec<Value>),
    /// The field's value compares in this way with this value.
    Compares(Field, Operator, Value),
}

impl Test {
    pub(super) fn holds(&self, of: &Subject<'_>) -> bool {
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
