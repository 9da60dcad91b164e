//! `cargo xtask dashboards`: writes the dashboards of a fleet for Grafana, one for ClickHouse and one
//! for Prometheus, from one description.
//!
//! `panels` is the description: what is shown, in which order, and the query of each store.
//! `grafana` turns it into Grafana's JSON. The queries are run in `tests/tests/dashboards`.

mod grafana;
mod panels;
mod queries;

use std::{fs, path::PathBuf};

use anyhow::{Context, Result, ensure};

use self::grafana::Store;
use crate::sh::{self, say};

/// The file of a store's dashboard.
fn path(store: Store) -> PathBuf {
    sh::workspace()
        .join("dist/grafana")
        .join(format!("{}.json", store.uid()))
}

/// Writes both dashboards.
pub fn write() -> Result<()> {
    for store in Store::ALL {
        let path = path(store);
        let directory = path.parent().context("a file is in a directory")?;
        fs::create_dir_all(directory)?;
        fs::write(&path, grafana::dashboard(store)?)
            .with_context(|| format!("cannot write {}", path.display()))?;
        say!("Wrote {}.", path.display());
    }
    Ok(())
}

/// Fails if a dashboard is not what the description gives.
pub fn check() -> Result<()> {
    for store in Store::ALL {
        let path = path(store);
        let is =
            fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        ensure!(
            is == grafana::dashboard(store)?,
            "{} differs from its description in xtask/src/dashboards: run `cargo xtask dashboards`",
            path.display()
        );
    }
    Ok(())
}
