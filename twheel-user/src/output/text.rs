//! Lines for people.

use std::io;

use super::{
    Output,
    table::printable,
    units::{Units, short},
};
use crate::{
    action::Reaped,
    model::{Ended, Flow, Mark, Named, Rto, RunEvent, Updated},
    owner::Owner,
};

/// Lines of text. Endpoints stand below one another: their columns are as wide as the widest so far.
pub struct Text {
    proto: usize,
    src: usize,
    dst: usize,
    units: Units,
}

impl Default for Text {
    fn default() -> Self {
        Self::new(Units::Human)
    }
}

impl Text {
    /// With numbers in these units.
    pub fn new(units: Units) -> Self {
        Self {
            proto: 4,
            // The longest endpoints of IPv4.
            src: 21,
            dst: 21,
            units,
        }
    }

    /// Widens the columns for a flow that is written later.
    pub fn make_room(&mut self, flow: &Flow) {
        self.proto = self.proto.max(flow.proto.len());
        self.src = self.src.max(flow.src.to_string().len());
        self.dst = self.dst.max(flow.dst.to_string().len());
    }

    /// What every line about a flow begins with. `is_orig`: its initiator stands first.
    fn begin(&mut self, event: &str, flow: &Flow, is_orig: bool) -> String {
        self.make_room(flow);
        let Self {
            proto, src, dst, ..
        } = *self;
        let (from, with) = match is_orig {
            true => (flow.src, flow.dst),
            false => (flow.dst, flow.src),
        };
        format!(
            "{event:<7}  {:<proto$}  {:<src$} -> {:<dst$}  {:<11}",
            flow.proto,
            from.to_string(),
            with.to_string(),
            flow.state,
        )
    }

    fn sides(&self, [orig, reply]: [u64; 2]) -> String {
        format!("{}/{}", self.units.count(orig), self.units.count(reply))
    }

    /// Writes an event that tells how a flow is.
    fn write_flow(
        &mut self,
        event: &str,
        (updated, reason): (&Updated, Option<&str>),
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let flow = updated.flow;
        write!(
            to,
            "{}  age {:>6}  idle {:>6}",
            self.begin(event, &flow, true),
            short(updated.age),
            short(updated.idle),
        )?;
        if let Some(reason) = reason {
            write!(to, "  {reason}")?;
        }
        write!(to, "{}", more(flow, named))?;
        if updated.picked_up {
            write!(to, "  picked up")?;
        }
        if let Some(sides) = updated.account {
            let packets = self.sides(sides.map(|it| it.packets));
            let bytes = self.sides(sides.map(|it| it.bytes));
            write!(to, "  packets {packets}  bytes {bytes}")?;
        }
        if let Some(sides) = updated.interval.and_then(|it| it.account) {
            let packets = self.sides(sides.map(|it| it.packets));
            let bytes = self.sides(sides.map(|it| it.bytes));
            write!(
                to,
                "  since the last update {packets} packets, {bytes} bytes"
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
            "{}{}{}",
            self.begin("begin", &flow, true),
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
        self.write_flow("update", (updated, None), named, to)
    }

    fn ended(
        &mut self,
        _: Mark,
        ended: &Ended,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        self.write_flow("end", (ended, Some(ended.reason.name())), named, to)
    }

    fn rto(
        &mut self,
        _: Mark,
        timer: &Rto,
        named: Named<'_>,
        to: &mut dyn io::Write,
    ) -> io::Result<()> {
        let flow = timer.flow;
        writeln!(
            to,
            "{}  outstanding {}  backoff {}  rtt {}  rto {}{}{}",
            self.begin("rto", &flow, timer.orig),
            timer.outstanding,
            timer.backoff,
            rtt(timer.pace.srtt),
            rtt(timer.pace.rto),
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
            "{}  idle {:>6}  {}: {}{}{}{}",
            self.begin("reap", &flow, true),
            short(ended.idle),
            reaped.action.name(),
            reaped.outcome.meaning(),
            if reaped.error.is_some() { ": " } else { "" },
            printable(reaped.error.as_deref().unwrap_or_default()),
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
        more += &format!("  rule {}", printable(rule));
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
        more += &format!("  {} {}", printable(iface), flow.direction());
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

/// A time in microseconds, with three digits; `-` if there was no sample.
pub(super) fn rtt(micros: u32) -> String {
    let millis = f64::from(micros) / 1000.0;
    match micros {
        0 => "-".to_owned(),
        1..1000 => format!("{micros}µs"),
        1000..10_000 => format!("{millis:.2}ms"),
        10_000..100_000 => format!("{millis:.1}ms"),
        100_000..10_000_000 => format!("{millis:.0}ms"),
        _ => format!("{:.1}s", millis / 1000.0),
    }
}
