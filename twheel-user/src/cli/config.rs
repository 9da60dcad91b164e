//! `twheel config`, and the configuration files of `twheel run` and `twheel doctor`.
//!
//! A file becomes arguments, which stand before those of the command line: so options mean the same
//! in both, and are checked once.

mod example;
mod file;

use std::{
    ffi::{OsStr, OsString},
    io::{self, Write},
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::{
    ArgMatches, Args, Command as Parsed, CommandFactory, FromArgMatches, Subcommand,
    parser::ValueSource,
};

use self::file::File;
use super::{Cli, Command, complete, run};
use crate::failure::{Failure, Kind};

/// A file that `--config` names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ConfigFile {
    path: PathBuf,
    may_be_missing: bool,
}

impl From<OsString> for ConfigFile {
    fn from(text: OsString) -> Self {
        match text.as_bytes().strip_prefix(b"-") {
            Some(path) => Self {
                path: OsStr::from_bytes(path).into(),
                may_be_missing: true,
            },
            None => Self {
                path: text.into(),
                may_be_missing: false,
            },
        }
    }
}

impl Cli {
    /// The command line, and the configuration files that it names. Ends the process if the command
    /// line cannot be used, or asks for help.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: a configuration file cannot be used, as `FILE:LINE:COLUMN: what is wrong:
    /// what is allowed`.
    pub fn read() -> Result<Self> {
        let mut args: Vec<_> = std::env::args_os().collect();
        let matches = Self::command().get_matches_from(&args);
        let matches = match from_files(&matches)? {
            Some(more) => {
                // After the names of the program and of its command.
                args.splice(2..2, more);
                Self::command().get_matches_from(args)
            }
            None => matches,
        };
        Ok(Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit()))
    }
}

/// The arguments that the configuration files of a command line stand for, except those that it
/// gives itself; `None`: it names no file.
fn from_files(matches: &ArgMatches) -> Result<Option<Vec<OsString>>> {
    let Some((name, given)) = matches.subcommand() else {
        return Ok(None);
    };
    // Only the commands with the options of `run` have this one.
    let Ok(Some(files)) = given.try_get_many::<ConfigFile>("config") else {
        return Ok(None);
    };
    let cli = Cli::command();
    let command = cli.find_subcommand(name).context("clap knows no command")?;
    let is_given = |id: &str| {
        let source = given.value_source(id);
        matches!(
            source,
            Some(ValueSource::CommandLine | ValueSource::EnvVariable)
        )
    };
    let mut arguments = Vec::new();
    for option in options_of(files)? {
        // `doctor` has not every option of `run`, and prints JSON only if it is asked to itself.
        let known = command
            .get_arguments()
            .find(|it| it.get_long() == Some(&option.name))
            .filter(|_| name == "run" || option.name != "json");
        if known.is_some_and(|arg| !is_given(arg.get_id().as_str())) {
            arguments.extend(option.arguments.into_iter().map(Into::into));
        }
    }
    Ok(Some(arguments))
}

/// The options that files set, each once: a later file wins.
fn options_of<'a>(files: impl IntoIterator<Item = &'a ConfigFile>) -> Result<Vec<file::Set>> {
    let mut options: Vec<file::Set> = Vec::new();
    let run = run_command();
    for ConfigFile {
        path,
        may_be_missing,
    } in files
    {
        if *may_be_missing && is_missing(path) {
            continue;
        }
        let later = File::read(path, &run)?.options;
        options.retain(|it| later.iter().all(|later| later.name != it.name));
        options.extend(later);
    }
    Ok(options)
}

fn is_missing(path: &Path) -> bool {
    path.metadata()
        .is_err_and(|error| error.kind() == io::ErrorKind::NotFound)
}

/// `twheel run`, as clap knows it.
fn run_command() -> Parsed {
    run::Run::augment_args(Parsed::new("run").no_binary_name(true))
}

/// Check configuration files of `twheel run`, and print an example
///
/// The unit twheel@eth0.service reads /etc/twheel/twheel.toml and /etc/twheel/eth0.toml, if they exist.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel config example > eth0.toml
  twheel config check eth0.toml
  twheel run --config eth0.toml")]
pub struct Config {
    #[command(subcommand)]
    command: What,
}

#[derive(Subcommand)]
enum What {
    Example(Example),
    Check(Check),
}

impl Config {
    pub(super) fn execute(self) -> Result<()> {
        let mut text = Vec::new();
        match self.command {
            What::Example(_) => example::write(&run_command(), &mut text)?,
            What::Check(check) => check.execute(&mut text)?,
        }
        let mut out = io::stdout().lock();
        let written = out.write_all(&text);
        written.context("cannot write to standard output")
    }
}

/// Print a configuration file with every option, its help and its default, as comments
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel config example > /etc/twheel/eth0.toml")]
struct Example {}

/// Check configuration files, and print the command line that they stand for
///
/// Checks all that `twheel run` checks before it touches an interface, a policy file included. `twheel doctor --config`
/// also tries it on this host.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel config check /etc/twheel/eth0.toml
  twheel config check /etc/twheel/twheel.toml /etc/twheel/eth0.toml --iface eth0    # as the unit reads them")]
struct Check {
    /// Configuration files; a later one wins over an earlier one
    #[arg(value_name = "FILE", required = true, value_hint = clap::ValueHint::FilePath)]
    files: Vec<PathBuf>,
    /// Interface, as for `twheel run`, if no file names one [default: all]
    #[arg(long = "iface", value_name = "NAME", add = complete::interfaces())]
    interfaces: Vec<String>,
}

impl Check {
    fn execute(self, out: &mut Vec<u8>) -> Result<()> {
        let files = self.files.iter().map(|path| ConfigFile {
            path: path.clone(),
            may_be_missing: false,
        });
        let mut options = options_of(&files.collect::<Vec<_>>())?;
        let asked = self.interfaces.iter();
        let asked: Vec<_> = asked.map(|it| format!("--iface={it}")).collect();
        if !asked.is_empty() {
            options.retain(|it| it.name != "iface");
        }
        let mut arguments = asked;
        arguments.extend(options.into_iter().flat_map(|it| it.arguments));
        write!(out, "twheel run")?;
        for argument in &arguments {
            write!(out, " {}", for_shell(argument))?;
        }
        writeln!(out)?;
        if !arguments.iter().any(|it| it.starts_with("--iface=")) {
            arguments.push("--iface=all".to_owned());
        }
        let line = ["twheel", "run"].map(str::to_owned).into_iter();
        let parsed = Cli::command().try_get_matches_from(line.chain(arguments));
        let parsed = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
        match parsed.map(|cli| cli.command) {
            Ok(Command::Run(run)) => run.check(),
            Ok(_) => Ok(()),
            Err(error) => Err(Failure::new(Kind::Usage, file::said(&error)).into()),
        }
    }
}

/// An argument as a shell reads it.
fn for_shell(argument: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_=,./:%@+".contains(c);
    match argument.chars().all(is_plain) {
        true => argument.to_owned(),
        false => format!("'{}'", argument.replace('\'', r"'\''")),
    }
}

#[cfg(test)]
mod tests;
