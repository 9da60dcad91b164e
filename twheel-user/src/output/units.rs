//! Durations and numbers for people.

use std::{fmt, time::Duration};

/// A duration in at most two units, such as `12.3s`, `4m05s`, `3h07m`, `4d23h`.
pub fn short(duration: Duration) -> String {
    Short(duration).to_string()
}

/// The same, to be written.
pub struct Short(pub Duration);

impl fmt::Display for Short {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let seconds = self.0.as_secs();
        match seconds {
            0..60 => {
                let tenths = (self.0.subsec_millis() + 50) / 100;
                write!(to, "{}.{}s", seconds + u64::from(tenths / 10), tenths % 10)
            }
            60..3600 => write!(to, "{}m{:02}s", seconds / 60, seconds % 60),
            3600..86_400 => write!(to, "{}h{:02}m", seconds / 3600, seconds / 60 % 60),
            _ => write!(to, "{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
        }
    }
}

/// How numbers of packets, bytes and events are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Units {
    /// Large numbers with three digits and a unit, a power of 1000 as with `ip -h`: `1.23M`.
    #[default]
    Human,
    /// Every digit.
    Exact,
}

/// Smaller numbers are written in full.
const FULL: u64 = 100_000;

impl Units {
    /// A number in these units.
    pub fn count(self, number: u64) -> String {
        Count(self, number).to_string()
    }

    /// A number of each side.
    pub fn sides(self, orig: u64, reply: u64) -> impl fmt::Display {
        fmt::from_fn(move |to| write!(to, "{}/{}", Count(self, orig), Count(self, reply)))
    }

    /// How many characters a number of each side has.
    pub fn width_of_sides(self, orig: u64, reply: u64) -> usize {
        [orig, reply].map(|it| self.width(it)).iter().sum::<usize>() + "/".len()
    }

    fn width(self, number: u64) -> usize {
        match self {
            Self::Human if number >= FULL => self.count(number).len(),
            _ => number.checked_ilog10().unwrap_or(0) as usize + 1,
        }
    }
}

struct Count(Units, u64);

impl fmt::Display for Count {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(units, number) = *self;
        if units == Units::Exact || number < FULL {
            return number.fmt(to);
        }
        let mut scaled = number as f64;
        let mut unit = "";
        for next in ["k", "M", "G", "T", "P", "E"] {
            // From here on three digits would be rounded to 1000.
            if scaled < 999.5 {
                break;
            }
            scaled /= 1000.0;
            unit = next;
        }
        let digits = match scaled {
            ..9.995 => 2,
            ..99.95 => 1,
            _ => 0,
        };
        write!(to, "{scaled:.digits$}{unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_short() {
        for (seconds, text) in [
            (0.0, "0.0s"),
            (59.94, "59.9s"),
            (59.999, "60.0s"),
            (60.0, "1m00s"),
            (3599.0, "59m59s"),
            (3600.0, "1h00m"),
            (86_399.0, "23h59m"),
            (431_999.0, "4d23h"),
        ] {
            assert_eq!(short(Duration::from_secs_f64(seconds)), text);
        }
    }

    #[test]
    fn numbers_have_five_characters_at_most() {
        for (number, text) in [
            (0, "0"),
            (99_999, "99999"),
            (100_000, "100k"),
            (999_499, "999k"),
            (999_500, "1.00M"),
            (1_234_567, "1.23M"),
            (9_994_999, "9.99M"),
            (9_995_000, "10.0M"),
            (12_345_678, "12.3M"),
            (99_950_000, "100M"),
            (3_400_000_000, "3.40G"),
            (1_000_000_000_000_000, "1.00P"),
            (u64::MAX, "18.4E"),
        ] {
            assert_eq!(Units::Human.count(number), text);
            assert_eq!(Units::Exact.count(number), number.to_string());
            for units in [Units::Human, Units::Exact] {
                let sides = units.sides(number, 7).to_string();
                assert_eq!(units.width_of_sides(number, 7), sides.len(), "{sides}");
            }
        }
    }
}
