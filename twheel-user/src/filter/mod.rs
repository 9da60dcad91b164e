//! Filters, which select flows: `state == established and dport == 443 and idle > 30s and src in
//! 10.0.0.0/8`.
//!
//! `docs/filter.md` is the reference of the language. A filter is parsed by the grammar in
//! `filter.pest`, and then checked against the types of its fields. Errors have the column where
//! they occur.

mod expression;
mod field;
mod parse;
pub mod sql;
mod subject;
mod value;

use anyhow::Result;

use self::expression::Test;
pub use self::{
    field::{Field, Knowable, PROTOCOLS, REASONS, STATES, Type},
    subject::Subject,
};
use crate::failure::{Failure, Kind};

/// A checked filter. Without an expression it matches every flow.
#[derive(Clone, Debug, Default)]
pub struct Filter(Option<Test>);

impl Filter {
    /// Parses and checks a filter; an empty one matches every flow.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`], with the column: the text is not a filter, names a field that does not
    /// exist or is not known here, or compares a field with a value that it cannot have.
    pub fn parse(text: &str, known: Knowable) -> Result<Self> {
        if text.trim().is_empty() {
            return Ok(Self(None));
        }
        match parse::parse(text, known) {
            Ok(test) => Ok(Self(Some(test))),
            Err(wrong) => Err(Failure::new(Kind::Usage, wrong.point_at(text)).into()),
        }
    }

    /// Whether the filter is empty, and so matches every flow.
    pub fn is_empty(&self) -> bool {
        self.0.is_none()
    }

    /// Whether a flow matches.
    pub fn matches(&self, subject: &Subject<'_>) -> bool {
        self.0.as_ref().is_none_or(|test| test.holds(subject))
    }
}

#[cfg(test)]
mod tests;
