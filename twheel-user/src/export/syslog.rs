//! Events as syslog messages (RFC 5424). The crate `syslog_fmt` writes their headers.

use std::io::{self, Write};

use syslog_fmt::{
    Facility, Severity,
    v5424::{Config, Msg, Timestamp},
};

use super::{Format, json::Lines};
use crate::{history::Past, model::EventKind};

/// Events of some kinds as syslog messages, whose text is the line that `twheel run --json` prints.
///
/// They are written with octet counting (RFC 6587, section 3.4.1): the length in bytes, a space, the
/// message.
pub struct Syslog {
    lines: Lines,
    /// A line and a message, while they are written.
    line: Vec<u8>,
    message: Vec<u8>,
}

impl Syslog {
    /// Of these kinds of events.
    pub fn new(kinds: Vec<EventKind>) -> Self {
        Self {
            lines: Lines::new(kinds),
            line: Vec::new(),
            message: Vec::new(),
        }
    }
}

impl Format for Syslog {
    fn begin(&mut self, _: u64, _: &mut Vec<u8>) {}

    fn event(&mut self, past: &Past, to: &mut Vec<u8>) -> io::Result<()> {
        self.line.clear();
        self.lines.event(past, &mut self.line)?;
        if self.line.is_empty() {
            return Ok(());
        }
        let severity = match past.kind() {
            EventKind::Begin | EventKind::Update => Severity::Info,
            EventKind::End | EventKind::Rto | EventKind::Reap | EventKind::Run => Severity::Notice,
        };
        let time = humantime::format_rfc3339_micros(past.mark.time).to_string();
        let host = host_name(&past.identity.host);
        let config = Config {
            facility: Facility::Daemon,
            hostname: host.as_deref(),
            app_name: Some("twheel"),
            proc_id: None,
        };
        self.message.clear();
        config.into_formatter().write_without_data(
            &mut self.message,
            severity,
            Timestamp::PreformattedStr(&time),
            // Without a byte order mark (MSG-ANY): most programs would take it for part of the JSON.
            Msg::NonUnicodeBytes(self.line.trim_ascii_end()),
            Some(past.kind().name()),
        )?;
        write!(to, "{} ", self.message.len())?;
        to.extend_from_slice(&self.message);
        Ok(())
    }

    fn complete(&mut self, _: u64, _: &mut Vec<u8>) {}

    fn messages<'a>(&self, bytes: &'a [u8]) -> Box<dyn Iterator<Item = &'a [u8]> + 'a> {
        Box::new(messages(bytes))
    }
}

/// A host's name as syslog may have it: at most 255 printable ASCII characters without spaces
/// (RFC 5424, section 6). `None` if it is empty.
fn host_name(name: &str) -> Option<String> {
    let characters = name.chars().take(255);
    let fit = |character: char| match character.is_ascii_graphic() {
        true => character,
        false => '_',
    };
    Some(characters.map(fit).collect()).filter(|name: &String| !name.is_empty())
}

/// The messages without their lengths.
fn messages(mut bytes: &[u8]) -> impl Iterator<Item = &[u8]> {
    std::iter::from_fn(move || {
        let space = bytes.iter().position(|byte| *byte == b' ')?;
        let (length, rest) = bytes.split_at(space);
        let length = str::from_utf8(length).ok()?.parse().ok()?;
        let (message, rest) = rest.get(1..)?.split_at_checked(length)?;
        bytes = rest;
        Some(message)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_by_their_lengths() {
        let found: Vec<_> = messages(b"3 a b5 12 \n 0 1 x").collect();
        assert_eq!(found, [&b"a b"[..], b"12 \n ", b"", b"x"]);
        for bytes in [&b""[..], b"9", b"9 short", b"x y"] {
            assert_eq!(messages(bytes).count(), 0);
        }
    }

    #[test]
    fn a_host_name_has_no_spaces() {
        assert_eq!(host_name("gw 1\u{e4}").as_deref(), Some("gw_1_"));
        assert_eq!(host_name(""), None);
        assert_eq!(
            host_name(&"a".repeat(300)).map(|name| name.len()),
            Some(255)
        );
    }
}
