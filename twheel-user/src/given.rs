//! Durations and sizes as users give them.

use std::time::Duration;

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
    }
}
