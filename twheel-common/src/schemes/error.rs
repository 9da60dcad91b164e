//! What is refused.

/// Bad input: a value outside the allowed range.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} cannot be {value}: it must lie between {least} and {most}")]
pub struct Error {
    /// What the value is, with its unit.
    pub what: &'static str,
    /// The value that was given.
    pub value: u64,
    /// The least allowed value.
    pub least: u64,
    /// The greatest allowed value.
    pub most: u64,
}

impl Error {
    /// Refuses a value that is not between two others.
    pub(super) fn check(
        what: &'static str,
        value: u64,
        least: u64,
        most: u64,
    ) -> Result<u64, Self> {
        if (least..=most).contains(&value) {
            Ok(value)
        } else {
            Err(Self {
                what,
                value,
                least,
                most,
            })
        }
    }
}
