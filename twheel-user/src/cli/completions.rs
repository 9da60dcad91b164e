//! `twheel completions`

use std::io::{self, Write};

use anyhow::{Context, Result};
use clap::{Args, CommandFactory};
use clap_complete::Shell;

use super::Cli;

/// Print a script that completes twheel's arguments in a shell
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel completions bash > /etc/bash_completion.d/twheel
  twheel completions zsh > /usr/local/share/zsh/site-functions/_twheel
  twheel completions fish > ~/.config/fish/completions/twheel.fish")]
pub struct Completions {
    /// Shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    pub(super) fn execute(self) -> Result<()> {
        // Into memory first: clap_complete panics if it cannot write.
        let mut script = Vec::new();
        clap_complete::generate(self.shell, &mut Cli::command(), "twheel", &mut script);
        let mut out = io::stdout().lock();
        out.write_all(&script)
            .and_then(|()| out.flush())
            .context("cannot write to standard output")
    }
}
