//! `twheel version`

use std::io::{self, Write};

use anyhow::{Context, Result};
use clap::Args;

/// Print the version, and with --verbose what this program was built from
///
/// With --verbose: the commit; the SHA-256 of the eBPF object inside, which twheel-ebpf/prebuilt/MANIFEST.toml names; the
/// features; the target.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel version
  twheel version --verbose")]
pub struct Version {
    /// Also print commit, eBPF object, features and target
    #[arg(long, short)]
    verbose: bool,
}

/// What the build script has noted, with its name here.
const BUILD: [(&str, &str); 4] = [
    ("commit", env!("TWHEEL_COMMIT")),
    ("object", env!("TWHEEL_OBJECT_SHA256")),
    ("features", env!("TWHEEL_FEATURES")),
    ("target", env!("TWHEEL_TARGET")),
];

impl Version {
    pub(super) fn execute(self) -> Result<()> {
        io::stdout()
            .lock()
            .write_all(self.text().as_bytes())
            .context("cannot write to standard output")
    }

    fn text(&self) -> String {
        let mut text = format!("twheel {}\n", env!("CARGO_PKG_VERSION"));
        for (name, value) in BUILD.iter().filter(|_| self.verbose) {
            let value = match value.is_empty() {
                true => "none",
                false => value,
            };
            text += &format!("{name:<9}{value}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbose_says_what_it_was_built_from() {
        let text = |verbose| Version { verbose }.text();
        let lines: Vec<_> = text(true).lines().map(str::to_owned).collect();
        let [version, commit, object, features, target] = lines.as_slice() else {
            panic!("{lines:?}");
        };
        assert_eq!(text(false), format!("{version}\n"));
        assert!(
            commit.starts_with("commit   ") && commit.len() > 9,
            "{commit}"
        );
        assert!(
            object.starts_with("object   ") && object.len() == 9 + 64,
            "{object}"
        );
        let kafka = cfg!(feature = "kafka");
        assert_eq!(features.contains("kafka"), kafka, "{features}");
        assert!(target.contains("-linux-"), "{target}");
    }
}
