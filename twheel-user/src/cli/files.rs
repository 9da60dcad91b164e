//! `twheel files`

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::{Args, builder::PossibleValuesParser};

use super::select::while_read;

/// A file that comes with twheel: its name, what it is, and its text.
type File = (&'static str, &'static str, &'static str);

/// All of them, as packages install them.
const FILES: [File; 14] = [
    (
        "systemd/twheel@.service",
        "unit: one for each interface",
        include_str!("../../../dist/twheel@.service"),
    ),
    (
        "systemd/twheel-export@.service",
        "unit: one for each export",
        include_str!("../../../dist/twheel-export@.service"),
    ),
    (
        "sysusers/twheel.conf",
        "the units' user and groups",
        include_str!("../../../dist/twheel.sysusers"),
    ),
    (
        "twheel.toml",
        "options of the units, for /etc/twheel",
        include_str!("../../../dist/twheel.toml"),
    ),
    (
        "policy.toml",
        "a policy without a rule, for /etc/twheel",
        include_str!("../../../dist/policy.toml"),
    ),
    (
        "policies/web-server.toml",
        "policy of a web server",
        include_str!("../../../dist/policies/web-server.toml"),
    ),
    (
        "policies/nat-gateway.toml",
        "policy of a NAT gateway",
        include_str!("../../../dist/policies/nat-gateway.toml"),
    ),
    (
        "policies/database-proxy.toml",
        "policy of a database proxy",
        include_str!("../../../dist/policies/database-proxy.toml"),
    ),
    (
        "policies/kubernetes-node.toml",
        "policy of a Kubernetes node",
        include_str!("../../../dist/policies/kubernetes-node.toml"),
    ),
    (
        "grafana/twheel.json",
        "dashboard of a host, from Prometheus",
        include_str!("../../../docs/grafana-dashboard.json"),
    ),
    (
        "grafana/twheel-fleet-prometheus.json",
        "dashboard of a fleet, from Prometheus",
        include_str!("../../../dist/grafana/twheel-fleet-prometheus.json"),
    ),
    (
        "grafana/twheel-fleet-clickhouse.json",
        "dashboard of a fleet, from ClickHouse",
        include_str!("../../../dist/grafana/twheel-fleet-clickhouse.json"),
    ),
    (
        "prometheus/twheel-fleet.rules.yml",
        "alerts of a fleet",
        include_str!("../../../dist/prometheus/twheel-fleet.rules.yml"),
    ),
    (
        "events.schema.json",
        "JSON schema of events",
        include_str!("../../../docs/events.schema.json"),
    ),
];

/// List or print the files that packages install: units, policies, dashboards, alerts
///
/// They are in the program, for hosts without the package.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel files
  twheel files policies/web-server.toml > policy.toml
  twheel files --dir /tmp/twheel")]
pub struct Files {
    /// Print this one
    #[arg(value_name = "FILE", hide_possible_values = true,
        value_parser = PossibleValuesParser::new(FILES.map(|(name, ..)| name)))]
    file: Option<String>,
    /// Write all of them into this directory, which is created if it does not exist
    #[arg(long, value_name = "DIR", conflicts_with = "file")]
    dir: Option<PathBuf>,
}

impl Files {
    pub(super) fn execute(self) -> Result<()> {
        if let Some(directory) = &self.dir {
            for (name, _, text) in FILES {
                let path = directory.join(name);
                let made = path.parent().map_or(Ok(()), fs::create_dir_all);
                made.and_then(|()| fs::write(&path, text))
                    .with_context(|| format!("cannot write {}", path.display()))?;
            }
            return Ok(());
        }
        while_read(|out| {
            for (name, what, text) in FILES {
                match &self.file {
                    None => writeln!(out, "{name:<38}{what}")?,
                    Some(file) if file == name => out.write_all(text.as_bytes())?,
                    Some(_) => {}
                }
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::FILES;

    #[test]
    fn all_that_packages_install_is_there() {
        let dist = Path::new(env!("CARGO_MANIFEST_DIR")).join("../dist");
        let texts: BTreeSet<_> = FILES.iter().map(|(.., text)| *text).collect();
        assert_eq!(texts.len(), FILES.len());
        let mut found = 0;
        for directory in ["", "policies", "grafana", "prometheus"] {
            for entry in dist.join(directory).read_dir().unwrap() {
                let path = entry.unwrap().path();
                if path.is_file() {
                    let text = std::fs::read_to_string(&path).unwrap();
                    assert!(
                        texts.contains(text.as_str()),
                        "{} is missing",
                        path.display()
                    );
                    found += 1;
                }
            }
        }
        // The others are documents.
        assert_eq!(found, FILES.len() - 2);
    }
}
