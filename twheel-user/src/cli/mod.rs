//! The commands: a file each.

mod detach;
mod run;

use anyhow::Result;
use clap::{Parser, Subcommand};

/// Watches the TCP flows of network interfaces from inside the kernel and says when one has expired.
#[derive(Parser)]
#[command(name = "twheel", version, after_help = EXIT_CODES)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(run::Run),
    Detach(detach::Detach),
}

const EXIT_CODES: &str = "\
Exit codes: 0 success; 1 failure; 2 unusable arguments; 3 not permitted; 4 the host lacks \
something; 5 the interface is unknown or taken; 6 pins in the way, or none where some are needed.";

impl Cli {
    /// Does what was asked.
    pub fn execute(self) -> Result<()> {
        match self.command {
            Command::Run(run) => run.execute(),
            Command::Detach(detach) => detach.execute(),
        }
    }
}
