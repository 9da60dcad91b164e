//! `twheel policy load`

use std::{
    io::{self, Write},
    path::PathBuf,
};

use anyhow::{Context, Result};
use clap::Args;

use crate::{
    cli::complete,
    clock::Clock,
    host,
    pins::{Instance, Pins},
    policy::{
        follow::Would,
        forecast::{Forecast, Moved, forecast},
        install,
    },
    progress,
};

/// Load a policy into an instance, running or left by `run --keep`
///
/// Live flows are matched against it at once: the command says how many of them have another rule, none any more, or
/// are due now. A file that is refused changes nothing. The next `run` uses its own --policy instead.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel policy load policy.toml --iface eth0 --dry-run
  twheel policy load policy.toml --iface eth0")]
pub(super) struct Load {
    /// Policy file
    file: PathBuf,
    /// Interface that selects the instance
    #[arg(long = "iface", value_name = "NAME", add = complete::instance())]
    interface: String,
    /// Load nothing: print what would become of the live flows, by rule
    #[arg(long)]
    dry_run: bool,
}

impl Load {
    pub(super) fn execute(self) -> Result<()> {
        host::check()?;
        let pins = Instance::with(&self.interface)?;
        match self.dry_run {
            true => self.foretell(&pins),
            false => self.load(&pins),
        }
    }

    fn load(&self, pins: &Pins) -> Result<()> {
        let effect = {
            let bar = progress::bar("applying to flows", 0);
            install::load(pins, Some(&self.file), Clock::jiffies()?, &bar)?
        };
        say!("{}: in force; {effect}", self.file.display());
        Ok(())
    }

    fn foretell(&self, pins: &Pins) -> Result<()> {
        let clock = Clock::jiffies()?;
        let forecast = progress::spin("comparing flows", || forecast(pins, &self.file, clock))?;
        let mut text = Vec::new();
        writeln!(
            text,
            "{}: not loaded; {}",
            self.file.display(),
            Would(&forecast.effect)
        )
        .and_then(|()| print_moves(&forecast, &mut text))
        .and_then(|()| io::stdout().lock().write_all(&text))
        .context("cannot write to standard output")
    }
}

/// A table of which flows would leave which rule, the most flows first; none if none would.
fn print_moves(forecast: &Forecast, out: &mut impl Write) -> io::Result<()> {
    if forecast.moves.is_empty() {
        return Ok(());
    }
    let mut moves: Vec<_> = forecast.moves.iter().collect();
    moves.sort_by_key(|(_, moved)| std::cmp::Reverse(moved.flows));
    let name = |name: &Option<String>| name.clone().unwrap_or("-".to_owned());
    let width = |names: &mut dyn Iterator<Item = String>| names.map(|it| it.len()).max();
    let from = width(&mut moves.iter().map(|(it, _)| name(&it.from))).unwrap_or(0);
    let to = width(&mut moves.iter().map(|(it, _)| name(&it.to))).unwrap_or(0);
    let (from, to) = (from.max(8), to.max(8));
    writeln!(
        out,
        "\n{:>10}  {:<from$}  {:<to$}  {:>10}  {:>10}",
        "FLOWS", "FROM", "TO", "DUE", "MIGHT BE REAPED"
    )?;
    for (between, moved) in moves {
        let Moved {
            flows,
            exposed,
            due,
        } = moved;
        writeln!(
            out,
            "{flows:>10}  {:<from$}  {:<to$}  {due:>10}  {exposed:>15}",
            name(&between.from),
            name(&between.to),
        )?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use crate::policy::forecast::Move;

    use super::*;

    #[test]
    fn flows_that_would_move_are_listed_by_rule() {
        let mut forecast = Forecast::default();
        let print = |forecast: &Forecast| {
            let mut text = Vec::new();
            print_moves(forecast, &mut text).unwrap();
            String::from_utf8(text).unwrap()
        };
        assert_eq!(print(&forecast), "");
        let moves = [
            (Some("ssh-of-admins"), None, 1, 1, 0),
            (Some("web"), Some("api"), 1203, 0, 2),
        ];
        for (from, to, flows, exposed, due) in moves {
            let [from, to] = [from, to].map(|it| it.map(str::to_owned));
            let moved = Moved {
                flows,
                exposed,
                due,
            };
            forecast.moves.insert(Move { from, to }, moved);
        }
        assert_eq!(
            print(&forecast),
            "
     FLOWS  FROM           TO               DUE  MIGHT BE REAPED
      1203  web            api                2                0
         1  ssh-of-admins  -                  0                1
"
        );
    }
}
