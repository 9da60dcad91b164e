//! What the kernel counts of the interfaces of this network namespace.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};

/// Where the kernel says what each interface of a thread's network namespace has carried.
const FILE: &str = "/proc/thread-self/net/dev";

/// The bytes that each interface has received and sent, whatever their packets were.
///
/// # Errors
///
/// The file cannot be read.
pub(super) fn bytes() -> Result<BTreeMap<String, [u64; 2]>> {
    let text = fs::read_to_string(FILE).with_context(|| format!("cannot read {FILE}"))?;
    Ok(text.lines().filter_map(parse).collect())
}

/// A line of the file: the name, eight numbers of what was received, eight of what was sent, each
/// beginning with bytes. `None`: a heading.
fn parse(line: &str) -> Option<(String, [u64; 2])> {
    let (name, numbers) = line.rsplit_once(':')?;
    let mut numbers = numbers.split_ascii_whitespace();
    let received = numbers.next()?.parse().ok()?;
    let sent = numbers.nth(7)?.parse().ok()?;
    Some((name.trim().to_owned(), [received, sent]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_interfaces_and_headings() {
        assert_eq!(parse("Inter-|   Receive          |  Transmit"), None);
        assert_eq!(parse(" face |bytes    packets errs|bytes  packets"), None);
        assert_eq!(
            parse("  eth0: 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"),
            Some(("eth0".to_owned(), [1, 9]))
        );
        assert_eq!(
            parse("a:b:18446744073709551615 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16"),
            Some(("a:b".to_owned(), [u64::MAX, 9]))
        );
        assert_eq!(parse("eth0: 1 2"), None);
    }

    #[test]
    fn this_host_has_a_loopback_interface() {
        assert!(bytes().unwrap().contains_key("lo"));
    }
}
