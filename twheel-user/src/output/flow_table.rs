//! The table of `twheel flows`.

use std::{
    io::{self, Write},
    net::SocketAddr,
    time::Duration,
};

use super::{
    table::{Cells, Column, Table, characters, printable},
    text,
    units::{Short, Units, short},
};
use crate::model::{Flow, Named, Timing, Tracked};

/// The optional columns of a table of flows.
#[derive(Clone, Copy, Debug, Default)]
pub struct Columns {
    /// Packets and bytes.
    pub accounting: bool,
    /// Round trips and retransmissions.
    pub rto: bool,
    /// Names of rules.
    pub rules: bool,
}

/// A table of flows.
pub fn flows(columns: Columns) -> Table {
    let text = Column::text;
    let number = |heading| Column::number(heading).at_least(6);
    let mut all = vec![
        text("PROTO"),
        text("STATE").at_least(11),
        text("SRC").at_least(21),
        text("   DST").at_least(24),
        number("IDLE"),
        number("EXPIRES"),
        number("AGE"),
    ];
    if columns.accounting {
        all.extend([number("PACKETS"), number("BYTES").at_least(9)]);
    }
    if columns.rto {
        all.extend([number("RTT").at_least(11), number("RETRANS")]);
    }
    if columns.rules {
        all.push(text("RULE"));
    }
    all.push(text(""));
    Table::new(all)
}

/// The cells of a flow in such a table, instead of what was in `cells`.
pub fn flow(
    tracked: &Tracked,
    named: Named<'_>,
    (columns, units): (Columns, Units),
    cells: &mut Cells,
) {
    let Flow {
        proto,
        state,
        src,
        dst,
        ..
    } = tracked.flow;
    cells.clear();
    cells.push(proto);
    cells.push(state);
    cells.push(src);
    cells.push(format_args!("-> {dst}"));
    for time in [tracked.idle, tracked.expires, tracked.age] {
        cells.push(Short(time));
    }
    if columns.accounting {
        let [orig, reply] = tracked.account.unwrap_or_default();
        cells.push(units.sides(orig.packets, reply.packets));
        cells.push(units.sides(orig.bytes, reply.bytes));
    }
    if columns.rto {
        let [orig, reply] = tracked.timing.unwrap_or_default();
        cells.push(format_args!("{}/{}", rtt(orig), rtt(reply)));
        let [orig, reply] = [orig, reply].map(|it| it.retransmissions.into());
        cells.push(units.sides(orig, reply));
    }
    if columns.rules {
        cells.push(named.rule.unwrap_or("-"));
    }
    let unruled = Named {
        rule: None,
        ..named
    };
    let mut more = text::more(tracked.flow, unruled);
    if tracked.flow.stalled {
        more += "  stalled";
    }
    if tracked.picked_up {
        more += "  picked up";
    }
    cells.push(more.trim_start());
}

/// A shorter time has at most the characters that its column has at least.
const LONG: Duration = Duration::from_secs(100 * 86_400);

/// Makes the columns of such a table wide enough for a flow that comes later, without writing its
/// cells.
pub fn measure_flow(
    table: &mut Table,
    tracked: &Tracked,
    named: Named<'_>,
    (columns, units): (Columns, Units),
) {
    let Flow {
        proto,
        state,
        src,
        dst,
        ..
    } = tracked.flow;
    let mut all = table.columns.iter_mut();
    let mut next = |width: usize| {
        if let Some(column) = all.next() {
            column.width = column.width.max(width);
        }
    };
    next(proto.len());
    next(state.len());
    next(endpoint(src));
    next("-> ".len() + endpoint(dst));
    for time in [tracked.idle, tracked.expires, tracked.age] {
        next(if time < LONG { 0 } else { short(time).len() });
    }
    if columns.accounting {
        let [orig, reply] = tracked.account.unwrap_or_default();
        next(units.width_of_sides(orig.packets, reply.packets));
        next(units.width_of_sides(orig.bytes, reply.bytes));
    }
    if columns.rto {
        let [orig, reply] = tracked.timing.unwrap_or_default();
        next(
            [orig, reply]
                .map(|it| characters(&rtt(it)))
                .iter()
                .sum::<usize>()
                + "/".len(),
        );
        let [orig, reply] = [orig, reply].map(|it| it.retransmissions.into());
        next(units.width_of_sides(orig, reply));
    }
    if columns.rules {
        next(characters(&printable(named.rule.unwrap_or("-"))));
    }
}

/// How many characters an endpoint has; 0 if all of its kind fit the narrowest column.
fn endpoint(endpoint: SocketAddr) -> usize {
    match endpoint {
        SocketAddr::V4(_) => 0,
        SocketAddr::V6(_) => endpoint.to_string().len(),
    }
}

/// The heading of a table of flows with columns of fixed widths.
pub fn heading(columns: Columns, to: &mut dyn Write) -> io::Result<()> {
    flows(columns).heading(to)
}

/// A line of such a table.
pub fn line(
    tracked: &Tracked,
    named: Named<'_>,
    columns: Columns,
    to: &mut dyn Write,
) -> io::Result<()> {
    let mut cells = Cells::default();
    flow(tracked, named, (columns, Units::Human), &mut cells);
    flows(columns).line(cells.iter(), to)
}

fn rtt(timing: Timing) -> String {
    text::rtt(timing.srtt)
}

#[cfg(test)]
mod tests {
    use twheel_common::flow::{FlowKey, Traffic};

    use super::*;
    use crate::model::Birth;

    fn tracked([src, dst]: [&str; 2], number: u64, time: Duration) -> Tracked {
        let side = Traffic {
            packets: number,
            bytes: number / 3,
        };
        let timing = Timing {
            srtt: number as u32,
            retransmissions: (number >> 8) as u32,
        };
        Tracked {
            flow: Flow {
                proto: "icmpv6",
                src: src.parse().unwrap(),
                dst: dst.parse().unwrap(),
                state: "established",
                rule: 0,
                vlans: [0; 2],
                zone: 0,
                place: 0,
                is_outgoing: false,
                stalled: false,
                replied: true,
                birth: Birth {
                    key: FlowKey::from_parts([0, 1, 0, 2], 1 << 32),
                    created: 0,
                    generation: 0,
                },
            },
            picked_up: false,
            age: time,
            idle: time / 2,
            expires: time / 7,
            cpu: 0,
            account: Some([side, Traffic::default()]),
            timing: Some([timing, Timing::default()]),
        }
    }

    #[test]
    fn a_flow_is_measured_as_it_is_written() {
        let columns = Columns {
            accounting: true,
            rto: true,
            rules: true,
        };
        let short = "10.0.0.1:1";
        let days = |days: u64| Duration::from_secs(days * 86_400);
        for (ends, number, time, rule) in [
            ([short, short], 0, days(0), None),
            (
                [short, "255.255.255.255:65535"],
                99_999,
                days(99),
                Some("größer"),
            ),
            (["[::1]:7", short], 100_000, days(100), Some("\u{7}")),
            (
                [short, "[2001:db8:ffff:ffff:ffff:ffff:ffff:ffff]:65535"],
                u64::MAX,
                days(1 << 20),
                None,
            ),
            (
                [short, short],
                1_234_567,
                Duration::from_secs(59),
                Some("a rule with a name"),
            ),
        ] {
            let tracked = tracked(ends, number, time);
            let named = Named {
                rule,
                ..Named::default()
            };
            for units in [Units::Human, Units::Exact] {
                let mut cells = Cells::default();
                flow(&tracked, named, (columns, units), &mut cells);
                let [mut measured, mut written] = [flows(columns), flows(columns)];
                measure_flow(&mut measured, &tracked, named, (columns, units));
                written.measure(&cells);
                let widths = |table: Table| {
                    table
                        .columns
                        .into_iter()
                        .map(|it| it.width)
                        .collect::<Vec<_>>()
                };
                assert_eq!(widths(measured), widths(written), "{cells:?}");
            }
        }
    }
}
