//! Lines for people.

use std::{io, time::Duration};

use super::Output;
use crate::{
    action::Reaped,
    model::{Ended, Flow, Mark, Named, Rto, RunEvent, Updated},
    owner::Owner,
};

/// Lines of text.
pub struct Text;

/// Writes an event that tells how a flow is.
fn write_flow(
    event: &str,
    updated: &Updated,
    reason: Option<&str>,
    named: Named<'_>,
    to: &mut dyn io::Write,
) -> io::Result<()> {
    let flow = updated.flow;
    write!(
        to,
        "{event}  {}  {:<21} -> {:<21}  {:<11}  age {:>8}  idle {:>8}",
        flow.proto,
        flow.src,
        flow.dst,
        flow.state,
        seconds(updated.age),
        seconds(updated.idle),
    )?;
    if let Some(reason) = reason {
        write!(to, "  {reason}")?;
    }
    write!(to, "{}", more(flow, named))?;
    if updated.picked_up {
        write!(to, "  picked up")?;
    }
    if let Some([orig, reply]) = updated.account {
        write!(
            to,
            "  packets {}/{}  bytes {}/{}",
            orig.packets, reply.packets, orig.bytes, reply.bytes
        )?;
    }
    if let Some([orig, reply]) = updated.interval.and_then(|it| it.account) {
        write!(
            to,
            "  since the last update {}/{} packets, {}/{} bytes",
            orig.packets, reply.packets, orig.bytes, reply.bytes
        )?;
    }
    if let Some([orig, reply]) = updated.pace {
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

impl Output for Text {
    fn begun(
        &mut self,
        _: Mark,
        begun: &Updated,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let flow = begun.flow;
        writeln!(
            to,
            "begin    {}  {:<21} -> {:<21}  {:<11}{}{}",
            flow.proto,
            flow.src,
            flow.dst,
            flow.state,
            more(flow, named),
            if begun.picked_up { "  picked up" } else { "" },
        )
    }

    fn updated(
        &mut self,
        _: Mark,
        updated: &Updated,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        write_flow("update ", updated, None, named, to)
    }

    fn ended(
        &mut self,
        _: Mark,
        ended: &Ended,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        write_flow("end    ", ended, Some(ended.reason.name()), named, to)
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
    if let Some(nat) = named.nat {
        more += &format!("  nat {} -> {}", nat.src, nat.dst);
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
