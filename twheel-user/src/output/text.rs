//! One line a flow, for people.

use std::{io, time::Duration};

use super::{Expired, Output};

/// Lines of text.
pub struct Text;

impl Output for Text {
    fn expired(
        &mut self,
        flow: &Expired,
        rule: Option<&str>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        write!(
            to,
            "expired  {}  {:<21} -> {:<21}  {:<11}  age {:>8}  idle {:>8}  {}{}{}",
            flow.proto,
            flow.src.to_string(),
            flow.dst.to_string(),
            flow.state,
            seconds(flow.age),
            seconds(flow.idle),
            flow.reason.name(),
            if rule.is_some() { "  rule " } else { "" },
            rule.unwrap_or_default(),
        )?;
        if flow.picked_up {
            write!(to, "  picked up")?;
        }
        if let Some([orig, reply]) = flow.account {
            write!(
                to,
                "  packets {}/{}  bytes {}/{}",
                orig.packets, reply.packets, orig.bytes, reply.bytes
            )?;
        }
        writeln!(to)
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.1}s", duration.as_secs_f64())
}
