//! The tables of groups, of reasons and of what the programs cost.

use ratatui::style::Style;
use twheel_common::{counter::Counter, event::Reason};

use super::{
    app::App,
    columns::{Column, Side, Table, scaled},
    group::{Group, Sum},
    order::GroupSort,
    style,
    views::View,
};
use crate::cost::Cost;

/// A cell of a row.
type Cell<T> = fn(&App, &T) -> (String, Style);

/// A table whose first column stays. `columns`: heading, side, least width, text.
fn table<T>(app: &App, rows: &[T], columns: &[(&str, Side, usize, Cell<T>)]) -> Table {
    let column = |(heading, side, least, cell): &(&str, Side, usize, Cell<T>)| Column {
        cells: rows.iter().map(|row| cell(app, row)).collect(),
        ..Column::new(*heading, *side, *least)
    };
    Table {
        columns: columns.iter().map(column).collect(),
        fixed: 1,
        across: app.across,
        selected: None,
    }
}

fn plain(text: impl Into<String>) -> (String, Style) {
    (text.into(), Style::new())
}

/// The groups of the view.
pub fn groups(app: &App, rows: &[(Group, Sum)]) -> Table {
    type Line = (Group, Sum);
    let heading = match app.view {
        View::Sources => "SOURCE",
        View::Services => "SERVICE",
        View::States => "STATE",
        _ => "RULE",
    };
    let name: Cell<Line> = |app, (group, _)| {
        let text = match (group, &app.names) {
            (Group::Source(address), Some(names)) => names.host(*address),
            (Group::Service(proto, port), Some(names)) => match names.service(proto, *port) {
                Some(name) => format!("{proto}/{name}"),
                None => group.text(&app.picture.reader),
            },
            _ => group.text(&app.picture.reader),
        };
        match group {
            Group::State(state) => (text, style::of_state(state)),
            _ => plain(text),
        }
    };
    let flows: Cell<Line> = |_, (_, sum)| plain(sum.flows.to_string());
    let share: Cell<Line> = |app, (_, sum)| {
        let all = app.picture.sums.matching.max(1);
        plain(format!("{:.1}%", 100.0 * sum.flows as f64 / all as f64))
    };
    let mut columns = vec![
        (heading, Side::Left, 15, name),
        ("FLOWS", Side::Right, 9, flows),
        ("SHARE", Side::Right, 6, share),
    ];
    if app.picture.reader.table().has_accounts() {
        fn rate(app: &App, rate: f64) -> (String, Style) {
            match app.picture.speeds.are_known() {
                true => plain(scaled(rate)),
                false => plain("-"),
            }
        }
        columns.extend([
            (
                "BIT/S>",
                Side::Right,
                6,
                (|app, (_, sum)| rate(app, sum.bits_a_second[0])) as Cell<Line>,
            ),
            ("<BIT/S", Side::Right, 6, |app, (_, sum)| {
                rate(app, sum.bits_a_second[1])
            }),
            ("PKT/S", Side::Right, 6, |app, (_, sum)| {
                rate(app, sum.packets_a_second)
            }),
            ("PACKETS", Side::Right, 7, |_, (_, sum)| {
                plain(scaled(sum.packets as f64))
            }),
            ("BYTES", Side::Right, 7, |_, (_, sum)| {
                plain(scaled(sum.bytes as f64))
            }),
        ]);
    }
    let mut table = table(app, rows, &columns);
    for column in &mut table.columns {
        column.is_key = match app.group_sort {
            GroupSort::Rate => ["BIT/S>", "<BIT/S"].contains(&column.heading.as_str()),
            GroupSort::PacketRate => column.heading == "PKT/S",
            GroupSort::Flows => column.heading == "FLOWS",
            GroupSort::Bytes => column.heading == "BYTES",
        };
    }
    table.lift_key(1);
    table
}

/// A row of the table of reasons.
struct Ends {
    name: &'static str,
    count: u64,
    rate: Option<f64>,
    meaning: &'static str,
}

/// The reasons of ended flows: from the history, or else from the counters, which do not tell all
/// of them apart.
pub fn reasons(app: &App) -> Table {
    let told = app.reasons.as_ref().filter(|it| it.wrong().is_none());
    let rows: Vec<_> = match told {
        Some(reasons) => {
            let lines = reasons.lines().into_iter();
            let ends = lines.map(|line| Ends {
                name: line.reason.name(),
                count: line.count,
                rate: line.rate,
                meaning: meaning(line.reason),
            });
            ends.collect()
        }
        None => {
            const COUNTED: [(Counter, &str); 5] = [
                (Counter::Expired, "idle, closed and reset"),
                (Counter::Superseded, meaning(Reason::Superseded)),
                (Counter::Evicted, meaning(Reason::Evicted)),
                (
                    Counter::OverQuota,
                    "of these, the source was over its quota",
                ),
                (Counter::Deleted, "deleted and flushed"),
            ];
            let ends = COUNTED.map(|(counter, meaning)| Ends {
                name: counter.name(),
                count: app.picture.look.sum.get(counter),
                rate: app.picture.rate(counter),
                meaning,
            });
            ends.into()
        }
    };
    table(
        app,
        &rows,
        &[
            ("REASON", Side::Left, 10, |_, row: &Ends| plain(row.name)),
            ("ENDED", Side::Right, 10, |_, row| {
                plain(row.count.to_string())
            }),
            ("A SECOND", Side::Right, 8, |_, row| {
                plain(row.rate.map_or("-".to_owned(), |rate| format!("{rate:.1}")))
            }),
            ("MEANING", Side::Left, 0, |_, row| plain(row.meaning)),
        ],
    )
}

const fn meaning(reason: Reason) -> &'static str {
    match reason {
        Reason::Idle => "no packet for the whole timeout",
        Reason::Closed => "FIN from both sides, then the short timeout",
        Reason::Reset => "RST, then the short timeout",
        Reason::Superseded => "a new connection with the same endpoints",
        Reason::Evicted => "the table was full, and a new flow needed room",
        Reason::Deleted => "chosen by a user",
        Reason::Flushed => "all flows were flushed",
    }
}

/// What each program costs, and those that see packets together.
pub fn cost(app: &App, costs: &[Cost]) -> Table {
    let packets = costs.iter().filter(|it| it.is_for_packets());
    let sum = Cost::sum("all packets", packets);
    let rows: Vec<_> = costs.iter().cloned().chain([sum]).collect();
    table(
        app,
        &rows,
        &[
            ("PROGRAM", Side::Left, 14, |_, cost: &Cost| {
                plain(match &cost.namespace {
                    Some(namespace) => {
                        format!("{} ({})", cost.program, namespace.escape_debug())
                    }
                    None => cost.program.clone(),
                })
            }),
            ("RUNS/S", Side::Right, 7, |_, cost| {
                plain(scaled(cost.runs_a_second()))
            }),
            ("NS/RUN", Side::Right, 7, |_, cost| {
                plain(
                    cost.nanos_a_run()
                        .map_or("-".to_owned(), |it| format!("{it:.0}")),
                )
            }),
            ("CPU", Side::Right, 7, |_, cost| {
                plain(format!("{:.2}%", 100.0 * cost.cpu_share()))
            }),
            ("RUNS FOR", Side::Left, 0, |_, cost| {
                plain(match cost.program.as_str() {
                    "twheel_xdp" | "twheel_ingress" => "packets that come in",
                    "twheel_egress" => "packets that go out",
                    "twheel_step" => "turns of a wheel",
                    "twheel_delete" => "flows to delete",
                    "twheel_enter" => "flows to enter",
                    "twheel_sweep" => "sweeps of the table, and clock reads",
                    _ => "",
                })
            }),
        ],
    )
}
