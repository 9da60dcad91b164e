//! The documents name the metrics that are served.

use std::{collections::BTreeSet, fs, path::Path};

use anyhow::{Context, Result, ensure};
use twheel_client::{
    channel::Channel,
    protocol::{Op, Request},
};
use twheel_tests::{
    directory::Directory,
    netns::require_root,
    pair::{Busy, Pair},
};

use crate::{Watched, expiries, millis};

/// A file of the project's documentation.
fn document(name: &str) -> Result<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../docs")
        .join(name);
    fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
}

/// All words that begin like one of twheel's metrics, as names of families.
fn families(text: &str) -> BTreeSet<String> {
    text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
        .filter(|word| word.starts_with("twheel_") || word.starts_with("process_"))
        .map(|word| {
            let mut suffixes = ["_bucket", "_sum", "_count"].iter();
            suffixes
                .find_map(|it| word.strip_suffix(it))
                .unwrap_or(word)
        })
        .map(str::to_owned)
        .collect()
}

/// The queries of a dashboard.
fn queries(value: &serde_json::Value, found: &mut Vec<String>) {
    match value {
        serde_json::Value::Object(fields) => {
            for (name, value) in fields {
                match value.as_str() {
                    Some(text) if ["expr", "query", "definition"].contains(&name.as_str()) => {
                        found.push(text.to_owned());
                    }
                    _ => queries(value, found),
                }
            }
        }
        serde_json::Value::Array(values) => values.iter().for_each(|it| queries(it, found)),
        _ => {}
    }
}

/// Sends twheel a request that it refuses, and waits for the answer.
fn refused(path: &Path) -> Result<()> {
    let channel = Channel::connect(path)?;
    channel.send(1, &[Request::new(Op::Start)], &[])?;
    channel.receive()?.context("twheel has ended").map(drop)
}

#[test]
fn the_documents_name_what_is_served() -> Result<()> {
    require_root();
    let pair = Pair::new()?;
    let directory = Directory::new("documents")?;
    let path = directory.0.join("offload");
    let offload = path.to_str().context("a path")?;
    let args = ["--timeout", "300ms", "--offload", offload];
    let watched = Watched::start(&pair.server, &args)?;
    // A family without samples is not served.
    refused(&path)?;
    let _connection = pair.connect_some(1)?;
    expiries(&watched.twheel, 1)?;
    // While this looks, the programs' runs are counted.
    let busy = Busy::start(pair.connect_some(1)?, millis(5));
    let looked = pair.server.twheel_once(&["stats", "--cost"])?;
    ensure!(looked.code() == Some(0), "{}", looked.stderr);
    busy.stop()?;
    let served = watched.scrape()?.families;
    assert_eq!(
        families(&document("metrics.md")?),
        served,
        "docs/metrics.md"
    );

    let dashboard: serde_json::Value = serde_json::from_str(&document("grafana-dashboard.json")?)?;
    let panels = dashboard["panels"].as_array().context("no panels")?;
    ensure!(panels.len() >= 6, "{} panels", panels.len());
    let ids: BTreeSet<_> = panels.iter().filter_map(|it| it["id"].as_u64()).collect();
    assert_eq!(ids.len(), panels.len(), "two panels have the same id");
    for panel in panels {
        for key in ["title", "type", "gridPos", "targets", "datasource"] {
            assert!(!panel[key].is_null(), "no {key}: {panel}");
        }
    }
    let mut asked = Vec::new();
    queries(&dashboard, &mut asked);
    let asked = families(&asked.join(" "));
    assert!(asked.len() >= 8, "{asked:?}");
    let unknown: Vec<_> = asked.difference(&served).collect();
    assert!(unknown.is_empty(), "not served: {unknown:?}");
    Ok(())
}
