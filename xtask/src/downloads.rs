//! Fetches tools beside something else, such as a build. What they print goes to logs.

use std::{
    path::PathBuf,
    thread::{self, JoinHandle},
};

use anyhow::{Result, anyhow, ensure};

use crate::{
    fleet_tools, kubernetes_tools, prometheus, setup,
    sh::{self, say},
    vm,
};

/// Tools that are being fetched.
pub struct Downloads {
    fleet: Thread,
    kubernetes: Thread,
    prometheus: Thread,
}

type Thread = JoinHandle<Option<PathBuf>>;

/// The tools of tests. `None`: they cannot be had, which was said; the tests that need them are skipped.
pub struct Downloaded {
    /// What the tests of a fleet need.
    pub fleet_tools: Option<PathBuf>,
    /// What the tests of the manifests for Kubernetes need.
    pub kubernetes_tools: Option<PathBuf>,
    /// Prometheus.
    pub prometheus: Option<PathBuf>,
}

/// Begins to fetch the tools that are not there.
pub fn start() -> Downloads {
    Downloads {
        fleet: thread::spawn(fleet_tools::install),
        kubernetes: thread::spawn(kubernetes_tools::install),
        prometheus: thread::spawn(prometheus::install),
    }
}

impl Downloads {
    /// Waits until they are there.
    pub fn wait(self) -> Downloaded {
        // A thread that panics has said why.
        let end = |thread: Thread| thread.join().ok().flatten();
        Downloaded {
            fleet_tools: end(self.fleet),
            kubernetes_tools: end(self.kubernetes),
            prometheus: end(self.prometheus),
        }
    }
}

impl Downloaded {
    /// What is missing, and so which tests.
    fn missing(&self) -> Vec<&'static str> {
        [
            (&self.fleet_tools, "the tools of a fleet"),
            (&self.kubernetes_tools, "the tools of Kubernetes"),
            (&self.prometheus, "Prometheus"),
        ]
        .into_iter()
        .filter_map(|(path, name)| path.is_none().then_some(name))
        .collect()
    }
}

/// Installs and fetches all that `.ci/run` needs, and builds nothing: `cargo xtask setup --landing`.
/// The other commands may run beside it: each waits for what it needs itself.
pub fn landing() -> Result<()> {
    let missing = setup::landing()?;
    for missing in &missing {
        say!("{missing}.");
    }
    // Beside one another: each waits for another server.
    let downloads = start();
    let machines = thread::spawn(|| match vm::is_needed() {
        true => vm::fetch(),
        false => Ok(()),
    });
    let downloaded = downloads.wait().missing();
    machines
        .join()
        .map_err(|_| anyhow!("what virtual machines need was not fetched"))??;
    let names: Vec<_> = missing.iter().map(|it| it.tool.as_str()).collect();
    let names = [names, downloaded].concat().join(", ");
    ensure!(
        !sh::is_ci() || names.is_empty(),
        "in CI nothing may be missing, but {names} cannot be had; the lines above say why"
    );
    say!("Ready for .ci/run.");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Downloaded;

    #[test]
    fn what_is_missing_is_named() {
        let mut downloaded = Downloaded {
            fleet_tools: Some("fleet".into()),
            kubernetes_tools: None,
            prometheus: None,
        };
        assert_eq!(
            downloaded.missing(),
            ["the tools of Kubernetes", "Prometheus"]
        );
        downloaded.kubernetes_tools = Some("kubernetes".into());
        downloaded.prometheus = Some("prometheus".into());
        assert!(downloaded.missing().is_empty());
    }
}
