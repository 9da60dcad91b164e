//! Tables for people. Lines are written one at a time, so that no number of flows needs to be held
//! in memory.

use std::{
    io::{self, Write},
    time::Duration,
};

use super::text;
use crate::model::{Flow, Named, Timing, Tracked};

/// A duration in at most two units, such as `12.3s`, `4m05s`, `3h07m`, `4d23h`.
pub fn short(duration: Duration) -> String {
    let seconds = duration.as_secs();
    match seconds {
        0..60 => format!("{:.1}s", duration.as_millis() as f64 / 1000.0),
        60..3600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3600..86_400 => format!("{}h{:02}m", seconds / 3600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3600 % 24),
    }
}

/// The optional columns.
#[derive(Clone, Copy, Debug, Default)]
pub struct Columns {
    /// Packets and bytes.
    pub accounting: bool,
    /// Round trips and retransmissions.
    pub rto: bool,
    /// Names of rules.
    pub rules: bool,
}

/// The heading of a table of flows.
pub fn heading(columns: Columns, to: &mut dyn Write) -> io::Result<()> {
    write!(
        to,
        "{:<6} {:<11} {:<21}    {:<21} {:>7} {:>7} {:>7}",
        "PROTO", "STATE", "SRC", "DST", "IDLE", "EXPIRES", "AGE"
    )?;
    if columns.accounting {
        write!(to, " {:>15} {:>19}", "PACKETS", "BYTES")?;
    }
    if columns.rto {
        write!(to, " {:>15} {:>7}", "RTT", "RETRANS")?;
    }
    writeln!(to, "{}", if columns.rules { "  RULE" } else { "" })
}

/// A line of the table.
pub fn line(
    tracked: &Tracked,
    named: Named<'_>,
    columns: Columns,
    to: &mut dyn Write,
) -> io::Result<()> {
    let Flow {
        proto,
        state,
        src,
        dst,
        ..
    } = tracked.flow;
    write!(
        to,
        "{proto:<6} {state:<11} {src:<21} -> {dst:<21} {:>7} {:>7} {:>7}",
        short(tracked.idle),
        short(tracked.expires),
        short(tracked.age),
    )?;
    if columns.accounting {
        let [orig, reply] = tracked.account.unwrap_or_default();
        write!(
            to,
            " {:>15} {:>19}",
            format!("{}/{}", orig.packets, reply.packets),
            format!("{}/{}", orig.bytes, reply.bytes)
        )?;
    }
    if columns.rto {
        let [orig, reply] = tracked.timing.unwrap_or_default();
        write!(
            to,
            " {:>15} {:>7}",
            format!("{}/{}", rtt(orig), rtt(reply)),
            format!("{}/{}", orig.retransmissions, reply.retransmissions)
        )?;
    }
    let mut more = String::new();
    if let Some(rule) = named.rule.filter(|_| columns.rules) {
        more = format!("  {rule}");
    }
    more += &text::more(
        tracked.flow,
        Named {
            rule: None,
            ..named
        },
    );
    if tracked.flow.stalled {
        more += "  stalled";
    }
    if tracked.picked_up {
        more += "  picked up";
    }
    writeln!(to, "{more}")
}

fn rtt(timing: Timing) -> String {
    text::rtt(timing.srtt)
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
}
