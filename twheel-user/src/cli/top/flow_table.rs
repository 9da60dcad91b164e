//! The table of flows: what each column shows.

use ratatui::style::{Color, Modifier, Style};

use super::{
    app::App,
    columns::{Column, Side, Table, scaled},
    order::Sort,
    scan::Row,
    speed::both,
    style,
};
use crate::{
    cli::flows::Key,
    model::{Named, Tracked},
    output::units::short,
    owner::Owner,
};

/// A column of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    Proto,
    Src,
    Dst,
    State,
    Sent,
    Received,
    Owner,
    Idle,
    Expires,
    Age,
    PacketRate,
    Packets,
    Bytes,
    Rtt,
    Retrans,
    Rule,
    Iface,
    More,
}

/// Each column: what it is called, and what it shows. In the order of the screen.
const COLUMNS: [(What, &str, &str); 18] = [
    (What::Proto, "PROTO", "protocol"),
    (What::Src, "SRC", "initiator"),
    (What::Dst, "DST", "responder"),
    (
        What::State,
        "STATE",
        "state; ! stalled, * picked up: its beginning was not seen",
    ),
    (What::Sent, "BIT/S>", "bits a second of the initiator"),
    (What::Received, "<BIT/S", "bits a second of the responder"),
    (What::Owner, "OWNER", "process of the local socket (o)"),
    (What::Idle, "IDLE", "since the last packet"),
    (
        What::Expires,
        "EXPIRES",
        "until it expires if no packet comes",
    ),
    (What::Age, "AGE", "since the first packet"),
    (What::PacketRate, "PKT/S", "packets a second of both"),
    (What::Packets, "PACKETS", "of both since the first packet"),
    (What::Bytes, "BYTES", "of both since the first packet"),
    (What::Rtt, "RTT", "round trip of the slower side"),
    (What::Retrans, "RETRANS", "retransmitted segments of both"),
    (What::Rule, "RULE", "policy rule"),
    (
        What::Iface,
        "IFACE",
        "interface and direction of the initiator's packets",
    ),
    (What::More, "", "VLAN, zone"),
];

/// The columns for the help: heading and meaning.
pub fn meanings() -> impl Iterator<Item = (&'static str, &'static str)> {
    COLUMNS
        .into_iter()
        .map(|(_, heading, meaning)| (heading, meaning))
}

/// The narrowest that an endpoint is shown.
const ENDPOINT: usize = 15;

/// The table of these rows, fitted into a width.
pub fn table(app: &App, rows: &[Row], width: usize) -> Table {
    let picture = &app.picture;
    let known = picture.reader.columns();
    let is_shown = |what: What| match what {
        What::Sent | What::Received | What::PacketRate | What::Packets | What::Bytes => {
            known.accounting
        }
        What::Rtt | What::Retrans => known.rto,
        What::Rule => known.rules,
        What::Owner => app.shows_owners,
        _ => true,
    };
    let shown = COLUMNS.iter().filter(|(what, ..)| is_shown(*what));
    let columns: Vec<_> = shown
        .map(|(what, heading, _)| {
            let (side, least) = size(*what);
            Column {
                is_key: is_key(*what, app.sort),
                cells: rows.iter().map(|row| cell(app, *what, row)).collect(),
                ..Column::new(*heading, side, least)
            }
        })
        .collect();
    // The first three name the flow, and stay. The state and the rates, or the last packet, should
    // fit beside them.
    const FIXED: usize = 3;
    let mut table = Table {
        columns,
        fixed: FIXED,
        across: app.across,
        selected: None,
    };
    table.lift_key(FIXED + 1);
    let columns = &mut table.columns;
    let beside = columns[FIXED..]
        .iter()
        .take(if known.accounting { 3 } else { 2 });
    let beside: usize = beside.map(|it| it.natural() + 1).sum();
    let room = width.saturating_sub(columns[0].natural() + beside + 4);
    let [src, dst] = share(room, [columns[1].natural(), columns[2].natural()]);
    columns[1].most = Some(src);
    columns[2].most = Some(dst);
    table
}

/// Shares a room between two texts: each gets what it needs, or else half.
fn share(room: usize, needs: [usize; 2]) -> [usize; 2] {
    let half = room / 2;
    let [one, two] = needs;
    let one = one.min(half.max(room.saturating_sub(two)));
    let two = two.min(half.max(room.saturating_sub(one)));
    [one.max(ENDPOINT), two.max(ENDPOINT)]
}

fn size(what: What) -> (Side, usize) {
    match what {
        What::Proto => (Side::Left, 5),
        What::Src | What::Dst => (Side::Left, ENDPOINT),
        What::State => (Side::Left, 12),
        What::Sent | What::Received | What::PacketRate => (Side::Right, 6),
        What::Idle | What::Expires | What::Age => (Side::Right, 7),
        What::Packets | What::Bytes => (Side::Right, 7),
        What::Rtt | What::Retrans => (Side::Right, 7),
        What::Owner | What::Rule | What::Iface | What::More => (Side::Left, 0),
    }
}

fn is_key(what: What, sort: Sort) -> bool {
    match sort {
        Sort::Rate => matches!(what, What::Sent | What::Received),
        Sort::Last | Sort::By(Key::Idle) => what == What::Idle,
        Sort::By(Key::Expires) => what == What::Expires,
        Sort::By(Key::Age) => what == What::Age,
        Sort::By(Key::Packets) => what == What::Packets,
        Sort::By(Key::Bytes) => what == What::Bytes,
        Sort::By(Key::Rtt) => what == What::Rtt,
        Sort::By(Key::Src) => what == What::Src,
        Sort::By(Key::Dst) => what == What::Dst,
        Sort::By(Key::State) => what == What::State,
    }
}

fn cell(app: &App, what: What, row: &Row) -> (String, Style) {
    let tracked = &row.tracked;
    let flow = &tracked.flow;
    let named = app.picture.reader.known_as(flow);
    let rate = |side: usize| match row.speed {
        Some(speed) => scaled(speed.bits[side].into()),
        None => "-".to_owned(),
    };
    let text = match what {
        What::Proto => flow.proto.to_owned(),
        What::Src => app.endpoint(flow.proto, flow.src),
        What::Dst => app.endpoint(flow.proto, flow.dst),
        What::State => {
            let style = match flow.stalled {
                true => style::colour(Color::Red).add_modifier(Modifier::BOLD),
                false => style::of_state(flow.state),
            };
            return (state(tracked), style);
        }
        What::Sent => rate(0),
        What::Received => rate(1),
        What::PacketRate => row
            .speed
            .map_or("-".to_owned(), |it| scaled(it.packets.into())),
        What::Owner => app.owner(row).map_or_else(String::new, owner),
        What::Idle => short(tracked.idle),
        What::Expires => short(tracked.expires),
        What::Age => short(tracked.age),
        What::Packets => scaled(both(tracked.account).packets as f64),
        What::Bytes => scaled(both(tracked.account).bytes as f64),
        What::Rtt => {
            let sides = tracked.timing.unwrap_or_default();
            rtt(sides[0].srtt.max(sides[1].srtt))
        }
        What::Retrans => {
            let sides = tracked.timing.unwrap_or_default();
            let both = sides
                .iter()
                .map(|it| u64::from(it.retransmissions))
                .sum::<u64>();
            scaled(both as f64)
        }
        What::Rule => named.rule.unwrap_or("-").escape_debug().to_string(),
        What::Iface => iface(app, tracked, named),
        What::More => more(tracked, named),
    };
    (text, Style::new())
}

/// The state, with marks for what a colour says, too.
pub fn state(tracked: &Tracked) -> String {
    let flow = &tracked.flow;
    let mut text = flow.state.to_owned();
    if flow.stalled {
        text.push('!');
    }
    if tracked.picked_up {
        text.push('*');
    }
    text
}

/// The interface where the initiator's packets are counted, and their direction there.
pub fn iface(app: &App, tracked: &Tracked, named: Named<'_>) -> String {
    let flow = &tracked.flow;
    let only = app.picture.interfaces.as_str();
    let iface = named.iface.filter(|_| flow.place != 0).unwrap_or(only);
    format!("{} {}", iface.escape_debug(), flow.direction())
}

/// The VLANs and the zone, as far as there are any.
pub fn more(tracked: &Tracked, named: Named<'_>) -> String {
    let vlans = match tracked.flow.vlans {
        [0, _] => None,
        [vlan, 0] => Some(format!("vlan {vlan}")),
        [outer, inner] => Some(format!("vlan {outer}.{inner}")),
    };
    let zone = (named.zone != 0).then(|| format!("zone {}", named.zone));
    let all: Vec<_> = vlans.into_iter().chain(zone).collect();
    all.join(" ")
}

/// Microseconds in a unit that shows them; `-` if there was no sample.
pub fn rtt(micros: u32) -> String {
    match micros {
        0 => "-".to_owned(),
        1..1000 => format!("{micros}us"),
        1000..100_000 => format!("{:.1}ms", f64::from(micros) / 1e3),
        100_000..1_000_000 => format!("{}ms", micros / 1000),
        _ => format!("{:.1}s", f64::from(micros) / 1e6),
    }
}

/// The process, or the cgroup if that is all that is known. A command and a path may have any
/// characters, also those that control a terminal.
fn owner(owner: &Owner) -> String {
    match (owner.pid, &owner.command, &owner.cgroup) {
        (Some(pid), Some(command), _) => format!("pid {pid} ({})", command.escape_debug()),
        (Some(pid), None, _) => format!("pid {pid}"),
        (None, _, Some(cgroup)) => cgroup.escape_debug().to_string(),
        (None, _, None) => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_share_what_room_there_is() {
        // Both fit.
        assert_eq!(share(100, [47, 47]), [47, 47]);
        // The short one leaves room for the other.
        assert_eq!(share(60, [20, 47]), [20, 40]);
        assert_eq!(share(60, [47, 20]), [40, 20]);
        // Neither fits.
        assert_eq!(share(60, [47, 47]), [30, 30]);
        assert_eq!(share(0, [47, 47]), [ENDPOINT, ENDPOINT]);
    }

    #[test]
    fn round_trips_have_a_unit_that_shows_them() {
        for (micros, text) in [
            (0, "-"),
            (4, "4us"),
            (1000, "1.0ms"),
            (99_949, "99.9ms"),
            (250_000, "250ms"),
            (1_500_000, "1.5s"),
        ] {
            assert_eq!(rtt(micros), text);
        }
    }
}
