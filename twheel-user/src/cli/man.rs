//! `twheel man`

use std::{
    fs,
    io::{self, IsTerminal, Write},
    path::{Path, PathBuf},
    process::{Command as Program, Stdio},
};

use anyhow::{Context, Result};
use clap::{Args, Command, CommandFactory};

use super::{Cli, complete, select::while_read};
use crate::failure::{Failure, Kind};

/// Show the manual page of a command
///
/// man(1) shows it, if that is installed and standard output is a terminal; otherwise the page is printed as roff.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel man
  twheel man run
  twheel man policy check
  twheel man --dir target/man && man -l target/man/twheel.1")]
pub struct Man {
    /// Command [default: all of twheel]
    #[arg(value_name = "COMMAND", add = complete::commands())]
    command: Vec<String>,
    /// Write a page for each command into this directory, which is created if it does not exist
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    dir: Option<PathBuf>,
}

impl Man {
    pub(super) fn execute(self) -> Result<()> {
        if let Some(directory) = &self.dir {
            return fs::create_dir_all(directory)
                .and_then(|()| write_pages(directory))
                .with_context(|| format!("cannot write man pages into {}", directory.display()));
        }
        let mut page = Vec::new();
        self::page(find(&self.command, &[])?).render(&mut page)?;
        if io::stdout().is_terminal() && show(&page)? {
            return Ok(());
        }
        while_read(|out| Ok(out.write_all(&page)?))
    }
}

/// The page of a command.
fn page(command: Command) -> clap_mangen::Man {
    // A command below twheel has no version of its own.
    clap_mangen::Man::new(command).source(concat!("twheel ", env!("CARGO_PKG_VERSION")))
}

/// Writes the page of each command into a directory.
pub(super) fn write_pages(directory: &Path) -> io::Result<()> {
    fn write(command: Command, directory: &Path) -> io::Result<()> {
        for below in command.get_subcommands().filter(|it| !it.is_hide_set()) {
            write(below.clone(), directory)?;
        }
        page(command).generate_to(directory).map(drop)
    }
    let mut command = Cli::command();
    command.build();
    write(command, directory)
}

/// Shows a page with man(1). Returns whether that is installed.
fn show(page: &[u8]) -> Result<bool> {
    let man = Program::new("man")
        .args(["-l", "-"])
        .stdin(Stdio::piped())
        .spawn();
    let mut man = match man {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
        man => man.context("cannot run man")?,
    };
    if let Some(mut input) = man.stdin.take() {
        // A reader that quits before the end has seen enough.
        let _ = input.write_all(page);
    }
    man.wait().context("cannot wait for man")?;
    Ok(true)
}

/// The command of these names, below twheel itself. `topics`: what may be given instead.
///
/// # Errors
///
/// [`Kind::Usage`]: there is none.
pub(super) fn find(names: &[String], topics: &[&str]) -> Result<Command> {
    let mut command = Cli::command();
    // Gives the commands their full names.
    command.build();
    for (depth, name) in names.iter().enumerate() {
        let Some(below) = command.find_subcommand(name) else {
            let above = command.get_bin_name().unwrap_or("twheel").to_owned();
            let mut known: Vec<_> = command.get_subcommands().map(Command::get_name).collect();
            known.retain(|it| *it != "help");
            if depth == 0 {
                let more = topics.iter().filter(|it| !known.contains(it));
                let more: Vec<_> = more.copied().collect();
                known.extend(more);
            }
            let known = match known.is_empty() {
                true => format!("{above} has no commands"),
                false => format!("give one of {}", known.join(", ")),
            };
            let what = format!("`{above}` has no command `{name}`: {known}");
            return Err(Failure::new(Kind::Usage, what).into());
        };
        command = below.clone();
    }
    Ok(command)
}
