//! The commands, one file each.

pub mod clickhouse;
pub mod complete;
mod completions;
mod config;
mod delete;
mod detach;
mod doctor;
mod expired;
mod export;
mod files;
mod first;
mod fleet;
mod flows;
mod flush;
mod help;
mod idle;
mod list;
mod man;
mod options;
mod owner;
mod plan;
mod policy;
mod reap;
mod run;
mod select;
mod stats;
mod talkers;
mod top;
mod version;
mod wheel;

use anyhow::Result;
use clap::{Parser, Subcommand, ValueEnum};

/// Tracks the flows of network interfaces from inside the kernel and reports each one that has ended.
#[derive(Parser)]
#[command(name = "twheel", version, after_help = AFTER_HELP, disable_help_subcommand = true)]
pub struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    Run(Box<run::Run>),
    Flows(flows::Flows),
    Expired(expired::Expired),
    Stats(stats::Stats),
    Talkers(talkers::Talkers),
    Top(top::Top),
    Wheel(wheel::Wheel),
    Delete(delete::Delete),
    Flush(flush::Flush),
    Detach(detach::Detach),
    Idle(idle::Idle),
    List(list::List),
    Export(export::Export),
    Fleet(fleet::Fleet),
    Plan(plan::Plan),
    Policy(policy::Policy),
    Config(config::Config),
    Doctor(Box<doctor::Doctor>),
    Completions(completions::Completions),
    Man(man::Man),
    Files(files::Files),
    Help(help::Help),
    Version(version::Version),
}

const AFTER_HELP: &str = "\
Examples:
  twheel doctor --iface eth0
  twheel run --iface eth0
  twheel flows 'state == established and idle > 1h'
  twheel expired --since 10m
  twheel top
  twheel policy check policy.toml
  twheel help filter             # or events, states, policy: what the documents say

Exit codes: 0 success; 1 failure; 2 unusable arguments; 3 not permitted; 4 the host lacks \
something; 5 the interface is unknown or taken; 6 pins are in the way or missing.";

impl Cli {
    /// Executes the command.
    pub fn execute(self) -> Result<()> {
        match self.command {
            Command::Run(run) => run.execute(),
            Command::Flows(flows) => flows.execute(),
            Command::Expired(expired) => expired.execute(),
            Command::Stats(stats) => stats.execute(),
            Command::Talkers(talkers) => talkers.execute(),
            Command::Top(top) => top.execute(),
            Command::Wheel(wheel) => wheel.execute(),
            Command::Delete(delete) => delete.execute(),
            Command::Flush(flush) => flush.execute(),
            Command::Detach(detach) => detach.execute(),
            Command::Idle(idle) => idle.execute(),
            Command::List(list) => list.execute(),
            Command::Export(export) => export.execute(),
            Command::Fleet(fleet) => fleet.execute(),
            Command::Plan(plan) => plan.execute(),
            Command::Policy(policy) => policy.execute(),
            Command::Config(config) => config.execute(),
            Command::Doctor(doctor) => doctor.execute(),
            Command::Completions(completions) => completions.execute(),
            Command::Man(man) => man.execute(),
            Command::Files(files) => files.execute(),
            Command::Help(help) => help.execute(),
            Command::Version(version) => version.execute(),
        }
    }
}

/// [`WheelScheme`](twheel_common::wheel::WheelScheme), as an argument.
#[derive(Clone, Copy, ValueEnum)]
enum SchemeName {
    /// One level, as long as the longest timeout (scheme 4 of Varghese and Lauck)
    Simple,
    /// One level; a longer timeout goes round several times (scheme 6)
    Hashed,
    /// Several levels; a slot lasts as long as a round of the level below (scheme 7)
    Hierarchical,
}

impl From<SchemeName> for twheel_common::wheel::WheelScheme {
    fn from(scheme: SchemeName) -> Self {
        match scheme {
            SchemeName::Simple => Self::Simple,
            SchemeName::Hashed => Self::Hashed,
            SchemeName::Hierarchical => Self::Hierarchical,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, path::PathBuf, process::Command as Program};

    use clap::{Command, CommandFactory};

    use super::*;

    /// All commands below one, each with the names of the commands above it.
    fn below(command: &Command, path: &str, found: &mut Vec<(String, Command)>) {
        for command in command.get_subcommands() {
            let path = format!("{path} {}", command.get_name());
            below(command, &path, found);
            found.push((path, command.clone()));
        }
    }

    fn commands() -> Vec<(String, Command)> {
        let mut found = vec![("twheel".to_owned(), Cli::command())];
        below(&Cli::command(), "twheel", &mut found);
        found
    }

    /// A directory of one test, removed at its end.
    struct Directory(PathBuf);

    impl Directory {
        fn new(name: &str) -> Self {
            let path = std::env::temp_dir().join(format!("twl-{}-{name}", std::process::id()));
            fs::create_dir_all(&path).unwrap();
            Self(path)
        }
    }

    impl Drop for Directory {
        fn drop(&mut self) {
            let _ = fs::remove_dir_all(&self.0);
        }
    }

    /// Asserts that a program, if it is installed, succeeds on a file and prints no complaint.
    fn is_content(program: &str, args: &[&str], file: &std::path::Path) {
        match Program::new(program).args(args).arg(file).output() {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
            result => {
                let output = result.unwrap();
                let said = String::from_utf8_lossy(&output.stderr);
                assert!(
                    output.status.success() && said.is_empty(),
                    "{program}: {said}"
                );
            }
        }
    }

    #[test]
    fn the_arguments_are_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_says_what_it_does_and_how_it_is_called() {
        for (path, command) in commands() {
            assert!(command.get_about().is_some(), "{path} has no about");
            let help = command.get_after_help().map(|help| help.to_string());
            let help = help.unwrap_or_default();
            let is_call = |line: &str| line.trim().trim_start_matches("sudo ").starts_with(&path);
            assert!(
                help.starts_with("Examples:\n") && help.lines().any(is_call),
                "{path} has no example: {help}"
            );
        }
    }

    #[test]
    fn shells_accept_their_completions() {
        let directory = Directory::new("completions");
        for (shell, program) in [
            (completions::Shell::Bash, "bash"),
            (completions::Shell::Zsh, "zsh"),
            (completions::Shell::Fish, "fish"),
        ] {
            let script = shell.script().unwrap();
            let text = String::from_utf8_lossy(&script).into_owned();
            assert!(text.contains(complete::VARIABLE), "{program}: {text}");
            let file = directory.0.join(program);
            fs::write(&file, script).unwrap();
            is_content(program, &["-n"], &file);
        }
    }

    #[test]
    fn every_command_has_a_man_page() {
        let directory = Directory::new("man");
        man::write_pages(&directory.0).unwrap();
        let mut wanted = Vec::new();
        for (path, command) in commands() {
            if !command.is_hide_set() {
                wanted.push(format!("{}.1", path.replace(' ', "-")));
            }
        }
        let mut found: Vec<_> = fs::read_dir(&directory.0)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        wanted.sort();
        found.sort();
        assert_eq!(found, wanted);
        for page in found {
            let page = directory.0.join(page);
            let text = fs::read_to_string(&page).unwrap();
            let version = concat!("\"twheel ", env!("CARGO_PKG_VERSION"), "\"");
            let title = text.lines().find(|line| line.starts_with(".TH"));
            assert!(title.is_some_and(|it| it.contains(version)), "{title:?}");
            assert!(!text.contains(".SH \"REAPING:"), "{text}");
            is_content(
                "man",
                &["--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z"],
                &page,
            );
            is_content("mandoc", &["-Tlint", "-W", "error"], &page);
        }
    }
}
