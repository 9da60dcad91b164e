//! What is refused.

use core::fmt;

/// Bad input: a value outside the allowed range.
///
/// ```
/// use twheel_timers::Hashed;
///
/// let error = Hashed::new(0).unwrap_err();
/// assert_eq!((error.value, error.least, error.most), (0, 1, 1 << 24));
/// assert_eq!(
///     error.to_string(),
///     "the number of slots cannot be 0: it must lie between 1 and 16777216"
/// );
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
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
    pub(crate) fn check(
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

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            what,
            value,
            least,
            most,
        } = self;
        write!(
            f,
            "{what} cannot be {value}: it must lie between {least} and {most}"
        )
    }
}

impl core::error::Error for Error {}
