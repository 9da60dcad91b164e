//! `twheel completions`

use std::{
    env,
    io::{self, Write},
};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use clap_complete::env::{Bash, Elvish, EnvCompleter, Fish, Powershell, Zsh};

use super::complete::VARIABLE;

/// Print a script that completes twheel's arguments in a shell
///
/// The shell then asks twheel itself, which knows interfaces, instances, rules, groups, states, actions and the fields of
/// filters.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel completions bash > /etc/bash_completion.d/twheel
  source <(twheel completions zsh)                                  # in ~/.zshrc, after compinit
  twheel completions fish > ~/.config/fish/completions/twheel.fish")]
pub struct Completions {
    /// Shell
    #[arg(value_enum)]
    shell: Shell,
}

/// A shell.
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum Shell {
    Bash,
    Elvish,
    Fish,
    Powershell,
    Zsh,
}

impl Completions {
    pub(super) fn execute(self) -> Result<()> {
        let mut out = io::stdout().lock();
        self.shell
            .script()
            .and_then(|script| out.write_all(&script))
            .and_then(|()| out.flush())
            .context("cannot write to standard output")
    }
}

impl Shell {
    /// The script that makes it ask twheel.
    pub(super) fn script(self) -> io::Result<Vec<u8>> {
        let shell: &dyn EnvCompleter = match self {
            Self::Bash => &Bash,
            Self::Elvish => &Elvish,
            Self::Fish => &Fish,
            Self::Powershell => &Powershell,
            Self::Zsh => &Zsh,
        };
        // A program that is not in PATH completes itself, as long as it stays where it is.
        let called = env::args().next().unwrap_or_default();
        let program = match called.contains('/') {
            true => env::current_exe()?.to_string_lossy().into_owned(),
            false => "twheel".to_owned(),
        };
        let mut script = Vec::new();
        shell.write_registration(VARIABLE, "twheel", "twheel", &program, &mut script)?;
        Ok(script)
    }
}
