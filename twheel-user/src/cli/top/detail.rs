//! All that is known of the selected flow.

use ratatui::{
    style::Modifier,
    text::{Line, Span},
};

use super::{
    app::App,
    columns::{scaled, width},
    flow_table::{iface, more, rtt, state},
    scan::Row,
};
use crate::output::units::short;

/// The lines about a flow, each as wide as the screen at most, as far as words allow.
pub fn lines(app: &App, row: &Row, most: usize) -> Vec<Line<'static>> {
    let tracked = &row.tracked;
    let flow = &tracked.flow;
    let reader = &app.picture.reader;
    let named = reader.known_as(flow);
    let mut lines = vec![Line::styled(
        "selected flow (-> initiator, <- responder)",
        Modifier::BOLD,
    )];
    let mut about = |label: &str, values: Vec<String>| {
        let values: Vec<_> = values.into_iter().filter(|it| !it.is_empty()).collect();
        if values.is_empty() {
            return;
        }
        // A value that does not fit goes to the next line.
        let mut line = vec![Span::styled(format!("{label:<9}"), Modifier::BOLD)];
        let mut used = 9;
        for value in values {
            let needs = width(&value) + 2;
            if used > 9 && used + needs > most {
                lines.push(Line::from(std::mem::take(&mut line)));
                line.push(Span::raw(" ".repeat(9)));
                used = 9;
            }
            used += needs;
            line.push(Span::raw(format!("{value}  ")));
        }
        lines.push(Line::from(line));
    };
    let names = app.names.as_ref().map_or_else(Vec::new, |names| {
        [flow.src, flow.dst]
            .map(|end| names.endpoint(flow.proto, end))
            .to_vec()
    });
    let ends = vec![
        flow.proto.to_owned(),
        format!("{} ->", flow.src),
        flow.dst.to_string(),
    ];
    about("flow", ends);
    about("names", names);
    let flag = |is_set: bool, name: &str| {
        if is_set {
            name.to_owned()
        } else {
            String::new()
        }
    };
    about(
        "state",
        vec![
            state(tracked).trim_end_matches(['!', '*']).to_owned(),
            flag(
                flow.stalled,
                "stalled: one side retransmits and gets no answer",
            ),
            flag(tracked.picked_up, "picked up: its beginning was not seen"),
            flag(!flow.replied, "only one side was seen"),
        ],
    );
    about(
        "time",
        vec![
            format!("age {}", short(tracked.age)),
            format!("idle {}", short(tracked.idle)),
            format!("expires in {}", short(tracked.expires)),
        ],
    );
    match tracked.account {
        Some([orig, reply]) => {
            let rates = row.speed.map_or_else(String::new, |speed| {
                format!(
                    "bit/s -> {} <- {}, packets/s {}",
                    scaled(speed.bits[0].into()),
                    scaled(speed.bits[1].into()),
                    scaled(speed.packets.into())
                )
            });
            about(
                "traffic",
                vec![
                    format!("packets -> {} <- {}", orig.packets, reply.packets),
                    format!("bytes -> {} <- {}", orig.bytes, reply.bytes),
                    rates,
                ],
            );
        }
        None => about(
            "traffic",
            vec!["not counted: twheel run --accounting".to_owned()],
        ),
    }
    if let Some([orig, reply]) = tracked.timing {
        about(
            "timing",
            vec![
                format!("rtt -> {} <- {}", rtt(orig.srtt), rtt(reply.srtt)),
                format!(
                    "retransmitted segments -> {} <- {}",
                    orig.retransmissions, reply.retransmissions
                ),
            ],
        );
    }
    let rule = named
        .rule
        .map_or_else(String::new, |rule| format!("rule {}", rule.escape_debug()));
    about(
        "place",
        vec![
            format!("interface {}", iface(app, tracked, named)),
            rule,
            more(tracked, named),
            format!("wheel of CPU {}", tracked.cpu),
        ],
    );
    about("owner", owner(app, row));
    about(
        "flow_id",
        vec![reader.identity().flow_id(&flow.birth).to_string()],
    );
    lines
}

fn owner(app: &App, row: &Row) -> Vec<String> {
    let Some(owner) = app.owner(row) else {
        return match app.shows_owners {
            true => vec!["no local socket, or not known".to_owned()],
            false => vec!["not looked for: press o".to_owned()],
        };
    };
    let escaped = |name: &str, value: &Option<String>| match value {
        Some(value) => format!("{name} {}", value.escape_debug()),
        None => String::new(),
    };
    vec![
        owner
            .pid
            .map_or_else(String::new, |pid| format!("pid {pid}")),
        escaped("command", &owner.command),
        escaped("user", &owner.user),
        escaped("cgroup", &owner.cgroup),
    ]
}
