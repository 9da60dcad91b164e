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
        match self {
            Self::Bash => Ok(whole_words(&String::from_utf8_lossy(&script)).into_bytes()),
            _ => Ok(script),
        }
    }
}

/// The function that the script for bash calls, without the one of [`JOINING`].
const INNER: &str = "_clap_complete_twheel";

/// Joins the parts of words. bash cuts a word at `=` and `:`, and replaces the part that the cursor
/// is in, so what is before that part is taken off again. Which parts belong together, the line tells.
const JOINING: &str = r#"
_twheel_complete() {
    local rest=$COMP_LINE words=() index=0 start='' at part blanks
    for at in "${!COMP_WORDS[@]}"; do
        part=${COMP_WORDS[at]}
        blanks=${rest%%[![:blank:]]*}
        rest=${rest#"$blanks"}
        if [[ -n $blanks || $at == 0 || $rest != "$part"* ]]; then
            words+=("")
            index=$((${#words[@]} - 1))
        fi
        if ((at < COMP_CWORD)); then
            words[index]+=$part
        elif ((at == COMP_CWORD)); then
            # Behind the sign, bash replaces nothing.
            if [[ $part != *[!=:]* && -n $part ]]; then
                words[index]+=$part
            fi
            start=${words[index]}
            words[index]+=$2
            break
        fi
        rest=${rest#"$part"}
    done
    local COMP_WORDS=("${words[@]}") COMP_CWORD=$index
    INNER "$1" "${words[index]}" "$3"
    COMPREPLY=("${COMPREPLY[@]#"$start"}")
}
"#;

/// The script for bash, so that it calls [`JOINING`].
fn whole_words(script: &str) -> String {
    let called = format!("-F {INNER} ");
    script.replace(&called, "-F _twheel_complete ") + &JOINING.replace("INNER", INNER)
}
