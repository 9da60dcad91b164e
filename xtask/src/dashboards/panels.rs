//! What the dashboards of a fleet show.

use super::queries as sql;

/// How a panel shows its rows.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// One number.
    Value,
    /// A line for each series.
    Lines,
    /// The same, one upon the other.
    Stack,
    /// A table.
    Table,
}

/// A panel. A store that has no query for it does not show it.
pub struct Panel {
    /// Its heading, unique in a dashboard.
    pub title: &'static str,
    /// What it means, in a sentence or two.
    pub about: &'static str,
    pub form: Form,
    /// Grafana's name of the unit of its numbers.
    pub unit: &'static str,
    /// Columns, of 24.
    pub width: u8,
    /// ClickHouse's query.
    pub sql: Option<String>,
    /// Prometheus' queries, each with its legend.
    pub promql: &'static [(&'static str, &'static str)],
    /// Units of a table's columns, where they differ from `unit`.
    pub columns: &'static [(&'static str, &'static str)],
}

/// Panels under one heading.
pub struct Row {
    pub title: &'static str,
    pub panels: Vec<Panel>,
}

impl Panel {
    fn new(title: &'static str, about: &'static str, form: Form) -> Self {
        Self {
            title,
            about,
            form,
            unit: "short",
            width: 12,
            sql: None,
            promql: &[],
            columns: &[],
        }
    }

    fn unit(self, unit: &'static str) -> Self {
        Self { unit, ..self }
    }

    fn width(self, width: u8) -> Self {
        Self { width, ..self }
    }

    fn sql(self, sql: String) -> Self {
        Self {
            sql: Some(sql),
            ..self
        }
    }

    fn promql(self, promql: &'static [(&'static str, &'static str)]) -> Self {
        Self { promql, ..self }
    }

    fn columns(self, columns: &'static [(&'static str, &'static str)]) -> Self {
        Self { columns, ..self }
    }
}

/// The description.
pub fn rows() -> Vec<Row> {
    vec![
        Row {
            title: "Ends of flows",
            panels: ends(),
        },
        Row {
            title: "Leaks: established flows that end idle rather than closed",
            panels: leaks(),
        },
        Row {
            title: "Lost and late events",
            panels: losses(),
        },
        Row {
            title: "Flow tables",
            panels: tables(),
        },
    ]
}

fn ends() -> Vec<Panel> {
    vec![
        Panel::new("Ends a second", "Of all hosts.", Form::Value)
            .unit("ops")
            .width(6)
            .sql(sql::ends_a_second())
            .promql(&[(
                "sum(rate(twheel_ended_flows_total{instance=~\"$host\"}[${interval}s]))",
                "ends",
            )]),
        Panel::new("Hosts", "Hosts that have reported something.", Form::Value)
            .width(6)
            .sql(sql::host_count())
            .promql(&[("count(twheel_build_info{instance=~\"$host\"})", "hosts")]),
        Panel::new(
            "Idle ends",
            "Share of all ends: the flow had no packet for its whole timeout.",
            Form::Value,
        )
        .unit("percentunit")
        .width(6)
        .sql(sql::idle_share())
        .promql(&[(
            "sum(rate(twheel_ended_flows_total{instance=~\"$host\",reason=\"idle\"}[${interval}s])) \
             / (sum(rate(twheel_ended_flows_total{instance=~\"$host\"}[${interval}s])) > 0)",
            "idle",
        )]),
        Panel::new(
            "Missing events",
            "Numbers that never came. Events that `--events` leaves out also count.",
            Form::Value,
        )
        .width(6)
        .sql(sql::missing_count())
        .promql(&[(
            "sum(increase(twheel_events_lost_total{instance=~\"$host\"}[$__range])) \
             + sum(increase(twheel_history_lost_total{instance=~\"$host\"}[$__range]))",
            "missing",
        )]),
        Panel::new(
            "Ends a second by host",
            "The 20 hosts with most ends.",
            Form::Lines,
        )
        .unit("ops")
        .sql(sql::ends_by_host())
        .promql(&[(
            "topk(20, sum by (instance) (rate(twheel_ended_flows_total{instance=~\"$host\"}[${interval}s])))",
            "{{instance}}",
        )]),
        Panel::new("Ends a second by reason", "", Form::Stack)
            .unit("ops")
            .sql(sql::ends_by("reason"))
            .promql(&[(
                "sum by (reason) (rate(twheel_ended_flows_total{instance=~\"$host\"}[${interval}s]))",
                "{{reason}}",
            )]),
        Panel::new("Ends a second by state", "", Form::Stack)
            .unit("ops")
            .sql(sql::ends_by("state"))
            .promql(&[(
                "sum by (state) (rate(twheel_ended_flows_total{instance=~\"$host\"}[${interval}s]))",
                "{{state}}",
            )]),
        Panel::new(
            "Ends a second by service",
            "Protocol and port of the responder; the 20 with most ends.",
            Form::Lines,
        )
        .unit("ops")
        .sql(sql::ends_by_service()),
        Panel::new(
            "Ends a second by interface and direction",
            "The 20 with most ends, of all hosts.",
            Form::Lines,
        )
        .unit("ops")
        .promql(&[(
            "topk(20, sum by (interface, direction) \
             (rate(twheel_interface_ended_flows_total{instance=~\"$host\"}[${interval}s])))",
            "{{interface}} {{direction}}",
        )]),
    ]
}

fn leaks() -> Vec<Panel> {
    vec![
        Panel::new(
            "Leaking services",
            "TCP flows that were established and ended without a FIN or RST. `change`: the share in \
             the second half of the time range, less the share in the first half.",
            Form::Table,
        )
        .width(12)
        .sql(sql::leaks())
        .columns(&[("share", "percentunit"), ("change", "percentunit")]),
        Panel::new(
            "Share of established flows that end idle, by service",
            "The 10 services with most of them.",
            Form::Lines,
        )
        .unit("percentunit")
        .sql(sql::leak_share()),
        Panel::new(
            "Established flows that end idle, by host",
            "The 20 hosts with most of them.",
            Form::Lines,
        )
        .unit("ops")
        .sql(sql::leaks_by_host())
        .promql(&[(
            "topk(20, sum by (instance) (rate(twheel_ended_flows_total{instance=~\"$host\",\
             reason=\"idle\",state=\"established\"}[${interval}s])))",
            "{{instance}}",
        )]),
        Panel::new(
            "Share of TCP flows that end idle while established, by host",
            "Of those that ended idle while established, closed or reset.",
            Form::Lines,
        )
        .unit("percentunit")
        .promql(&[(
            "topk(20, sum by (instance) (rate(twheel_ended_flows_total{instance=~\"$host\",\
             reason=\"idle\",state=\"established\"}[${interval}s])) / (sum by (instance) \
             (rate(twheel_ended_flows_total{instance=~\"$host\",reason=\"idle\",state=\"established\"}[${interval}s])) \
             + sum by (instance) (rate(twheel_ended_flows_total{instance=~\"$host\",\
             reason=~\"closed|reset\"}[${interval}s])) > 0))",
            "{{instance}}",
        )]),
    ]
}

fn losses() -> Vec<Panel> {
    vec![
        Panel::new(
            "Lost events by host",
            "Numbers of the time range that never came, by instance: lost on the host, or still on \
             their way. Events that `--events` leaves out also count.",
            Form::Table,
        )
        .sql(sql::missing_by_host()),
        Panel::new(
            "Exporters",
            "What each exporter last said of itself. Two of one instance are one too many.",
            Form::Table,
        )
        .sql(sql::exporters())
        .columns(&[("behind", "s"), ("silent", "s")]),
        Panel::new(
            "Exporters' delay by host",
            "Age of the oldest event that has not arrived yet. The 20 hosts with the largest delay.",
            Form::Lines,
        )
        .unit("s")
        .sql(sql::delay()),
        Panel::new(
            "Events not sent by host",
            "Events that the history had dropped before they were exported, in all.",
            Form::Lines,
        )
        .sql(sql::not_sent()),
        Panel::new(
            "Events lost to a full ring, by host",
            "The packet path cannot wait for room in the ring.",
            Form::Lines,
        )
        .unit("ops")
        .promql(&[(
            "topk(20, rate(twheel_events_lost_total{instance=~\"$host\"}[${interval}s]))",
            "{{instance}}",
        )]),
        Panel::new(
            "Events missing from the history, by host",
            "The disk was slow or full.",
            Form::Lines,
        )
        .unit("ops")
        .promql(&[(
            "topk(20, rate(twheel_history_lost_total{instance=~\"$host\"}[${interval}s]))",
            "{{instance}}",
        )]),
        Panel::new(
            "How late flows end",
            "After their timeout: the 99th percentile of each host.",
            Form::Lines,
        )
        .unit("s")
        .promql(&[(
            "topk(20, histogram_quantile(0.99, sum by (instance, le) \
             (rate(twheel_expiry_lateness_seconds_bucket{instance=~\"$host\"}[${interval}s]))))",
            "{{instance}}",
        )]),
        Panel::new(
            "Hosts that do not answer",
            "1: Prometheus cannot read the host's metrics.",
            Form::Lines,
        )
        .promql(&[(
            "1 - up{instance=~\"$host\"} and on (instance) \
             (count_over_time(twheel_build_info{instance=~\"$host\"}[$__range]))",
            "{{instance}}",
        )]),
    ]
}

fn tables() -> Vec<Panel> {
    vec![
        Panel::new("Flows in the table", "The 20 largest.", Form::Lines).promql(&[(
            "topk(20, twheel_flows{instance=~\"$host\"})",
            "{{instance}}",
        )]),
        Panel::new(
            "Occupancy",
            "Flows in the table, of `--max-flows`. The 20 fullest.",
            Form::Lines,
        )
        .unit("percentunit")
        .promql(&[(
            "topk(20, twheel_flows{instance=~\"$host\"} / twheel_max_flows{instance=~\"$host\"})",
            "{{instance}}",
        )]),
        Panel::new(
            "Evicted flows by host",
            "The table was full, or a source was over its quota.",
            Form::Lines,
        )
        .unit("ops")
        .sql(sql::evicted_by_host())
        .promql(&[(
            "topk(20, rate(twheel_evicted_total{instance=~\"$host\"}[${interval}s]))",
            "{{instance}}",
        )]),
        Panel::new("Reap actions by outcome", "", Form::Stack)
            .unit("ops")
            .sql(sql::reaped())
            .promql(&[(
                "sum by (action, outcome) (rate(twheel_reaped_total{instance=~\"$host\"}[${interval}s]))",
                "{{action}} {{outcome}}",
            )]),
    ]
}
