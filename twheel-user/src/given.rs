//! Durations, sizes and numbers as users give them.

use std::{fmt::Display, ops::RangeInclusive, time::Duration};

use bytesize::ByteSize;

/// Reads a duration.
///
/// # Errors
///
/// What to give instead.
pub fn duration(text: &str) -> Result<Duration, String> {
    humantime::parse_duration(text)
        .map_err(|_| "give a duration with its unit, such as 150ms, 30s, 10m, 2h or 1d".to_owned())
}

/// Reads a number of bytes.
///
/// # Errors
///
/// What to give instead.
pub fn size(text: &str) -> Result<ByteSize, String> {
    text.parse()
        .map_err(|_| "give a size, such as 500MB or 2GiB".to_owned())
}

/// Reads a whole number in these bounds.
///
/// # Errors
///
/// What to give instead.
pub fn number<T>(allowed: RangeInclusive<T>) -> impl Fn(&str) -> Result<T, String> + Clone
where
    T: TryFrom<u64> + PartialOrd + Clone + Display,
    u64: From<T>,
{
    move |text| {
        let number = text.parse().ok().and_then(|it: u64| T::try_from(it).ok());
        let number = number.filter(|it| allowed.contains(it));
        number.ok_or_else(|| format!("give {} to {}", allowed.start(), allowed.end()))
    }
}

/// Reads a number of lines, of flows or of another thing that there may be any number of.
///
/// # Errors
///
/// What to give instead.
pub fn count(text: &str) -> Result<usize, String> {
    let wrong = |_| "give a whole number, such as 20".to_owned();
    text.parse().map_err(wrong)
}

/// Writes a duration as a user may have given it, in the largest unit that it is a multiple of:
/// `150ms`, `90s`, `99999d`.
pub fn written(duration: Duration) -> String {
    const UNITS: [(u128, &str); 6] = [
        (86_400_000_000_000, "d"),
        (3_600_000_000_000, "h"),
        (60_000_000_000, "m"),
        (1_000_000_000, "s"),
        (1_000_000, "ms"),
        (1_000, "us"),
    ];
    let nanoseconds = duration.as_nanos();
    if nanoseconds == 0 {
        return "0s".to_owned();
    }
    let unit = UNITS
        .iter()
        .find(|(unit, _)| nanoseconds.is_multiple_of(*unit));
    let (unit, name) = unit.copied().unwrap_or((1, "ns"));
    format!("{}{name}", nanoseconds / unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_duration_is_written_as_it_was_given() {
        for text in ["0s", "1ns", "15us", "150ms", "90s", "5m", "36h", "99999d"] {
            assert_eq!(written(duration(text).unwrap()), text);
        }
    }

    #[test]
    fn what_cannot_be_read_is_refused_with_an_example() {
        for text in ["yesterday", "", "10", "s", "-1s", "99999999999999999999d"] {
            assert!(duration(text).unwrap_err().contains("10m"), "{text}");
        }
        for text in ["banana", "", "-1", "1parsec"] {
            assert!(size(text).unwrap_err().contains("2GiB"), "{text}");
        }
        assert_eq!(size("1KiB").unwrap().as_u64(), 1024);
        for text in ["0", "9", "1e1", "x", "", "-1", "99999999999999999999"] {
            assert_eq!(number(1..=8u8)(text).unwrap_err(), "give 1 to 8", "{text}");
        }
        assert_eq!([number(1..=8u32)("1"), number(1..=8)("8")], [Ok(1), Ok(8)]);
        for text in ["x", "", "-1", "1e3"] {
            assert!(count(text).unwrap_err().contains("such as 20"), "{text}");
        }
        assert_eq!(count("0"), Ok(0));
    }
}
