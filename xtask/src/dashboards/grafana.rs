//! The description as Grafana's JSON.

use anyhow::Result;
use serde_json::{Value, json};

use super::{
    panels::{Form, Panel, rows},
    queries,
};

/// The version of Grafana's dashboard model, that of Grafana 12.2.
const SCHEMA_VERSION: u32 = 42;
/// The height of a panel, in Grafana's rows.
const HEIGHT: u32 = 8;
/// The height of a panel with one number.
const LOW: u32 = 4;
/// The length of intervals to choose from.
const INTERVALS: [(&str, u32); 6] = [
    ("1m", 60),
    ("5m", 300),
    ("15m", 900),
    ("1h", 3600),
    ("6h", 21_600),
    ("1d", 86_400),
];
/// The interval at first, of [`INTERVALS`].
const FIRST: usize = 1;

/// Where a dashboard's numbers are stored.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Store {
    ClickHouse,
    Prometheus,
}

impl Store {
    pub const ALL: [Self; 2] = [Self::ClickHouse, Self::Prometheus];

    /// The dashboard's identifier, and the name of its file.
    pub fn uid(self) -> &'static str {
        match self {
            Self::ClickHouse => "twheel-fleet-clickhouse",
            Self::Prometheus => "twheel-fleet-prometheus",
        }
    }

    /// Grafana's name of the data source's type.
    fn plugin(self) -> &'static str {
        match self {
            Self::ClickHouse => "grafana-clickhouse-datasource",
            Self::Prometheus => "prometheus",
        }
    }

    /// The data source that the reader of the dashboard chooses.
    fn source(self) -> Value {
        json!({"type": self.plugin(), "uid": "${datasource}"})
    }

    /// A panel's queries. Empty: the store does not have its numbers.
    fn targets(self, panel: &Panel) -> Vec<Value> {
        match self {
            Self::ClickHouse => panel
                .sql
                .iter()
                .map(|sql| {
                    let (format, kind) = match panel.form {
                        Form::Lines | Form::Stack => (0, "timeseries"),
                        Form::Value | Form::Table => (1, "table"),
                    };
                    json!({
                        "refId": "A", "datasource": self.source(), "editorType": "sql",
                        "format": format, "queryType": kind, "rawSql": sql,
                    })
                })
                .collect(),
            Self::Prometheus => panel
                .promql
                .iter()
                .zip('A'..='Z')
                .map(|((expr, legend), id)| {
                    json!({
                        "refId": id.to_string(), "datasource": self.source(), "editorMode": "code",
                        "expr": expr, "legendFormat": legend, "range": true,
                    })
                })
                .collect(),
        }
    }

    /// What can be chosen above the panels.
    fn variables(self) -> Vec<Value> {
        let source = json!({
            "name": "datasource", "label": "Data source", "type": "datasource",
            "query": self.plugin(), "current": {}, "hide": 0, "refresh": 1,
        });
        let several = |name: &str, label: &str, query: Value, definition: &str| {
            json!({
                "name": name, "label": label, "type": "query", "datasource": self.source(),
                "query": query, "definition": definition, "includeAll": true, "multi": true,
                "refresh": 2, "sort": 1,
                "current": {"text": ["All"], "value": ["$__all"]},
            })
        };
        let mut variables = vec![source];
        match self {
            Self::ClickHouse => {
                for (name, label, query) in [
                    ("host", "Host", queries::host_names()),
                    ("service", "Service", queries::service_names()),
                ] {
                    variables.push(several(name, label, json!(query), &query));
                }
            }
            Self::Prometheus => {
                let query = "label_values(twheel_build_info, instance)";
                let asked = json!({"query": query, "refId": "A"});
                let mut host = several("host", "Host", asked, query);
                host["allValue"] = ".*".into();
                variables.push(host);
            }
        }
        let option = |(index, (text, seconds)): (usize, (&str, u32))| json!({"text": text, "value": seconds.to_string(), "selected": index == FIRST});
        let options: Vec<_> = INTERVALS.into_iter().enumerate().map(option).collect();
        let query: Vec<_> = INTERVALS
            .iter()
            .map(|(text, seconds)| format!("{text} : {seconds}"))
            .collect();
        variables.push(json!({
            "name": "interval", "label": "Interval", "type": "custom", "query": query.join(","),
            "current": options[FIRST].clone(), "options": options, "includeAll": false,
            "multi": false,
        }));
        variables
    }
}

/// The look of a panel's form.
fn look(panel: &Panel) -> (&'static str, Value, Value) {
    let lines = |fill: u8, mode: &str| {
        json!({
            "drawStyle": "line", "lineWidth": 1, "fillOpacity": fill, "showPoints": "auto",
            "stacking": {"mode": mode, "group": "A"},
        })
    };
    let legend = json!({
        "legend": {"displayMode": "list", "placement": "bottom", "showLegend": true},
        "tooltip": {"mode": "multi", "sort": "desc"},
    });
    match panel.form {
        Form::Value => (
            "stat",
            json!({}),
            json!({
                "reduceOptions": {"calcs": ["lastNotNull"], "fields": "", "values": false},
                "colorMode": "value", "graphMode": "none",
            }),
        ),
        Form::Lines => ("timeseries", lines(10, "none"), legend),
        Form::Stack => ("timeseries", lines(30, "normal"), legend),
        Form::Table => (
            "table",
            json!({"filterable": true}),
            json!({"showHeader": true, "cellHeight": "sm"}),
        ),
    }
}

fn panel(store: Store, panel: &Panel, id: u32, place: [u32; 4]) -> Value {
    let (kind, custom, options) = look(panel);
    let unit = |(column, unit): &(&str, &str)| {
        json!({
            "matcher": {"id": "byName", "options": column},
            "properties": [{"id": "unit", "value": unit}],
        })
    };
    let overrides: Vec<_> = panel.columns.iter().map(unit).collect();
    let [x, y, w, h] = place;
    json!({
        "id": id, "title": panel.title, "description": panel.about, "type": kind,
        "datasource": store.source(), "gridPos": {"x": x, "y": y, "w": w, "h": h},
        "fieldConfig": {
            "defaults": {"unit": panel.unit, "custom": custom},
            "overrides": overrides,
        },
        "options": options, "targets": store.targets(panel),
    })
}

/// The text of a store's dashboard.
pub fn dashboard(store: Store) -> Result<String> {
    let (mut panels, mut id, mut y) = (Vec::new(), 0, 0);
    let mut next = || {
        id += 1;
        id
    };
    for row in rows() {
        let shown = row.panels.iter().filter(|it| !store.targets(it).is_empty());
        panels.push(json!({
            "id": next(), "type": "row", "title": row.title, "collapsed": false, "panels": [],
            "gridPos": {"x": 0, "y": y, "w": 24, "h": 1},
        }));
        y += 1;
        let (mut x, mut height) = (0, 0);
        for it in shown {
            let tall = if it.form == Form::Value { LOW } else { HEIGHT };
            let wide = u32::from(it.width);
            if x + wide > 24 || height != 0 && tall != height {
                (x, y) = (0, y + height);
            }
            height = tall;
            panels.push(panel(store, it, next(), [x, y, wide, tall]));
            x += wide;
        }
        y += height;
    }
    let name = match store {
        Store::ClickHouse => "ClickHouse",
        Store::Prometheus => "Prometheus",
    };
    let mut text = serde_json::to_string_pretty(&json!({
        "uid": store.uid(), "title": format!("twheel fleet ({name})"), "tags": ["twheel"],
        "description": "Made by `cargo xtask dashboards`: change its description, not this file.",
        "editable": true, "graphTooltip": 1, "schemaVersion": SCHEMA_VERSION, "version": 1,
        "refresh": "1m", "time": {"from": "now-6h", "to": "now"}, "timezone": "browser",
        "annotations": {"list": []}, "links": [],
        "templating": {"list": store.variables()}, "panels": panels,
    }))?;
    text.push('\n');
    Ok(text)
}
