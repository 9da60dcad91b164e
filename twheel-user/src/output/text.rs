//! Lines for people.

use std::{io, time::Duration};

use super::Output;
use crate::{
    action::Reaped,
    model::{Ended, Flow, Mark, Named, Rto, RunEvent},
    owner::Owner,
};

/// Lines of text.
pub struct Text;

impl Output for Text {
    fn ended(
        &mut self,
        _: Mark,
        ended: &Ended,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let flow = ended.flow;
        write!(
            to,
            "end      {}  {:<21} -> {:<21}  {:<11}  age {:>8}  idle {:>8}  {}{}",
            flow.proto,
            flow.src,
            flow.dst,
            flow.state,
            seconds(ended.age),
            seconds(ended.idle),
            ended.reason.name(),
            more(flow, named),
        )?;
        if ended.picked_up {
            write!(to, "  picked up")?;
        }
        if let Some([orig, reply]) = ended.account {
            write!(
                to,
                "  packets {}/{}  bytes {}/{}",
                orig.packets, reply.packets, orig.bytes, reply.bytes
            )?;
        }
        if let Some([orig, reply]) = ended.pace {
            write!(
                to,
                "  rtt {}/{}  retransmissions {}/{}{}",
                rtt(orig.srtt),
                rtt(reply.srtt),
                orig.retransmissions,
                reply.retransmissions,
                if flow.stalled { "  stalled" } else { "" }
            )?;
        }
        writeln!(to)
    }

    fn rto(
        &mut self,
        _: Mark,
        timer: &Rto,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let flow = timer.flow;
        let (from, arrow, with) = if timer.orig {
            (flow.src, "->", flow.dst)
        } else {
            (flow.dst, "->", flow.src)
        };
        writeln!(
            to,
            "rto      {}  {:<21} {arrow} {:<21}  {:<11}  outstanding {}  backoff {}  rtt {}  rto \
             {:.1}ms{}{}",
            flow.proto,
            from,
            with,
            flow.state,
            timer.outstanding,
            timer.backoff,
            rtt(timer.pace.srtt),
            f64::from(timer.pace.rto) / 1000.0,
            if flow.stalled { "  stalled" } else { "" },
            more(flow, named),
        )
    }

    fn reaped(
        &mut self,
        _: Mark,
        (_, ended, reaped): (Mark, &Ended, &Reaped),
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let flow = ended.flow;
        writeln!(
            to,
            "reap     {}  {:<21} -> {:<21}  {:<11}  idle {:>8}  {}: {}{}{}{}",
            flow.proto,
            flow.src,
            flow.dst,
            flow.state,
            seconds(ended.idle),
            reaped.action.name(),
            reaped.outcome.meaning(),
            if reaped.error.is_some() { ": " } else { "" },
            reaped.error.as_deref().unwrap_or_default(),
            more(flow, named),
        )
    }

    fn run(&mut self, _: Mark, event: &RunEvent, to: &mut dyn io::Write) -> io::Result<()> {
        write!(to, "run      {}", event.what.name())?;
        for word in [event.iface.as_deref(), event.hook].into_iter().flatten() {
            write!(to, "  {word}")?;
        }
        let numbers = [
            ("flows", event.flows),
            ("ended", event.ended),
            ("lost", event.lost),
        ];
        for (name, number) in numbers {
            if let Some(number) = number {
                write!(to, "  {name} {number}")?;
            }
        }
        writeln!(to)
    }
}

/// The rule, what distinguishes the flow from others with the same endpoints, and its owner:
/// `  rule web  vlan 10.20  zone 7  eth0 out  pid 12 (nginx)  user www-data  cgroup /system.slice`.
/// The interface is omitted if there is only one.
pub(super) fn more(flow: Flow, named: Named<'_>) -> String {
    let mut more = String::new();
    if let Some(rule) = named.rule {
        more += &format!("  rule {rule}");
    }
    match flow.vlans {
        [0, _] => {}
        [vlan, 0] => more += &format!("  vlan {vlan}"),
        [outer, inner] => more += &format!("  vlan {outer}.{inner}"),
    }
    if named.zone != 0 {
        more += &format!("  zone {}", named.zone);
    }
    if let (Some(iface), true) = (named.iface, flow.place != 0) {
        more += &format!("  {iface} {}", flow.direction());
    }
    if let Some(owner) = named.owner {
        more += &owned(owner);
    }
    more
}

/// The owner's fields that are known. A command and a path may have any characters, also those that
/// control a terminal.
fn owned(owner: &Owner) -> String {
    let mut text = String::new();
    if let Some(pid) = owner.pid {
        text += &format!("  pid {pid}");
    }
    if let Some(command) = &owner.command {
        text += &format!(" ({})", command.escape_debug());
    }
    for (name, value) in [("user", &owner.user), ("cgroup", &owner.cgroup)] {
        if let Some(value) = value {
            text += &format!("  {name} {}", value.escape_debug());
        }
    }
    text
}

/// Milliseconds; `-` if there was no sample.
pub(super) fn rtt(micros: u32) -> String {
    match micros {
        0 => "-".to_owned(),
        micros => format!("{:.1}ms", f64::from(micros) / 1000.0),
    }
}

fn seconds(duration: Duration) -> String {
    format!("{:.1}s", duration.as_secs_f64())
}
