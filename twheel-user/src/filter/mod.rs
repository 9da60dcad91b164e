//! Which flows are meant: `state == established and dport == 443 and idle > 30s and src in 10.0.0.0/8`.
//!
//! `docs/filter.md` is the language's reference. A filter is parsed by the grammar in `filter.pest`, and checked
//! against what its fields are: what is wrong is said with the column in which it is.

mod expression;
mod field;
mod parse;
mod subject;
mod value;

use anyhow::Result;

use self::expression::Test;
pub use self::{
    field::{Field, Knowable, STATES},
    subject::Subject,
};
use crate::failure::{Failure, Kind};

/// A filter, checked. Without an expression it lets everything pass.
#[derive(Clone, Debug, Default)]
pub struct Filter(Option<Test>);

impl Filter {
    /// Reads a filter; an empty one lets everything pass.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`], with the column: what is no filter, names a field that does not exist or that nobody knows
    /// here, or compares with what such a field cannot be.
    pub fn parse(text: &str, known: Knowable) -> Result<Self> {
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

#[cfg(test)]
mod tests;
