//! `twheel man`, for `cargo xtask man` and for packagers

use std::{fs, path::PathBuf};

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};

use super::Cli;

/// Write a man page for each command into a directory
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel man target/man && man -l target/man/twheel.1")]
pub struct Man {
    /// Directory; created if it does not exist
    directory: PathBuf,
}

impl Man {
    pub(super) fn execute(self) -> Result<()> {
        let directory = &self.directory;
        fs::create_dir_all(directory)
            .and_then(|()| clap_mangen::generate_to(Cli::command(), directory))
            .with_context(|| format!("cannot write man pages into {}", directory.display()))
    }
}
