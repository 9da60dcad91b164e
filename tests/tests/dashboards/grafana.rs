//! A dashboard as Grafana reads it.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

/// The kinds of panels that have queries.
const KINDS: [&str; 3] = ["stat", "timeseries", "table"];

/// A dashboard.
pub struct Dashboard(Value);

/// A query of a panel.
pub struct Query {
    /// The panel's heading.
    pub panel: String,
    /// The panel's names of columns with units of their own.
    pub columns: Vec<String>,
    /// The query, with Grafana's variables.
    pub text: String,
}

impl Dashboard {
    /// Reads a dashboard and checks what Grafana needs of it: identifiers that differ, places that
    /// do not overlap, and a data source that is chosen where it is imported.
    pub fn read(uid: &str, plugin: &str) -> Result<Self> {
        Self::read_file(&format!("dist/grafana/{uid}.json"), uid, plugin)
    }

    /// The same of a file of the project.
    pub fn read_file(file: &str, uid: &str, plugin: &str) -> Result<Self> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(file);
        let text = fs::read_to_string(&path).with_context(|| path.display().to_string())?;
        let dashboard = Self(serde_json::from_str(&text)?);
        ensure!(dashboard.0["uid"] == uid, "another uid");
        let (mut ids, mut cells) = (BTreeSet::new(), BTreeSet::new());
        for panel in dashboard.panels()? {
            ensure!(ids.insert(panel["id"].to_string()), "an id twice: {panel}");
            let place = |key: &str| panel["gridPos"][key].as_u64().context("no place");
            let [x, y, w, h] = [place("x")?, place("y")?, place("w")?, place("h")?];
            ensure!(x + w <= 24, "too wide: {panel}");
            for cell in (y..y + h).flat_map(|y| (x..x + w).map(move |x| (x, y))) {
                ensure!(cells.insert(cell), "it overlaps another one: {panel}");
            }
            let sources = [&panel["datasource"], &panel["targets"][0]["datasource"]];
            for source in sources.iter().filter(|_| panel["type"] != "row") {
                ensure!(
                    source["type"] == plugin && source["uid"] == "${datasource}",
                    "another data source: {panel}"
                );
            }
        }
        Ok(dashboard)
    }

    fn panels(&self) -> Result<&Vec<Value>> {
        self.0["panels"].as_array().context("no panels")
    }

    /// All queries of panels, in order.
    pub fn queries(&self) -> Result<Vec<Query>> {
        let mut queries = Vec::new();
        for panel in self.panels()?.iter().filter(|it| it["type"] != "row") {
            let text = |key: &str| panel[key].as_str().context("no text").map(str::to_owned);
            ensure!(KINDS.contains(&&*text("type")?), "an unknown kind: {panel}");
            let overrides = panel["fieldConfig"]["overrides"].as_array();
            let columns: Vec<_> = overrides
                .into_iter()
                .flatten()
                .filter_map(|it| it["matcher"]["options"].as_str().map(str::to_owned))
                .collect();
            let targets = panel["targets"].as_array().context("no targets")?;
            ensure!(!targets.is_empty(), "no query: {panel}");
            for target in targets {
                let query = target["rawSql"].as_str().or(target["expr"].as_str());
                queries.push(Query {
                    panel: text("title")?,
                    columns: columns.clone(),
                    text: query.context("no query")?.to_owned(),
                });
            }
        }
        ensure!(!queries.is_empty(), "no queries");
        Ok(queries)
    }

    /// A variable.
    pub fn variable(&self, name: &str) -> Result<&Value> {
        let variables = self.0["templating"]["list"].as_array();
        let mut variables = variables.context("no variables")?.iter();
        variables
            .find(|it| it["name"] == name)
            .with_context(|| format!("no variable {name}"))
    }

    /// The value of the chosen interval.
    pub fn interval(&self) -> Result<&str> {
        let interval = self.variable("interval")?;
        let options = interval["options"].as_array().context("no options")?;
        let pairs: Vec<_> = options
            .iter()
            .map(|it| format!("{} : {}", text(&it["text"]), text(&it["value"])))
            .collect();
        ensure!(
            interval["query"] == pairs.join(","),
            "options that differ from their text: {interval}"
        );
        interval["current"]["value"].as_str().context("no interval")
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

/// The arguments of a call whose opening parenthesis has just been read, and what follows it.
pub fn arguments(text: &str) -> Result<(Vec<&str>, &str)> {
    let (mut depth, mut begin, mut arguments) = (1, 0, Vec::new());
    for (at, letter) in text.char_indices() {
        match letter {
            '(' => depth += 1,
            ')' => depth -= 1,
            _ => {}
        }
        if depth == 0 || depth == 1 && letter == ',' {
            arguments.push(text[begin..at].trim());
            begin = at + 1;
        }
        if depth == 0 {
            return Ok((arguments, &text[begin..]));
        }
    }
    bail!("no closing parenthesis in {text}")
}

/// Fails if a query still has something that Grafana would have replaced.
pub fn replaced(query: String) -> Result<String> {
    ensure!(!query.contains('$'), "what is not replaced: {query}");
    Ok(query)
}
