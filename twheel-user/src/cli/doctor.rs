//! `twheel doctor`

use std::io::{self, Write};

use anstyle::{AnsiColor, Style};
use anyhow::{Context, Result};
use clap::Args;

use super::{
    complete,
    options::{Options, each_once},
};
use crate::{
    clock::Clock,
    doctor::{Finding, Intended, Status, examine},
    failure::{Failure, Kind},
    interfaces,
    order::ProgramNames,
    output::json,
    patterns::Selection,
};

/// Check whether this host has what twheel needs, and say what to do if it does not
///
/// Takes the options of `twheel run` and tries what it would load. It attaches nothing and leaves nothing behind. It needs
/// no privileges, but only root can try everything; otherwise it warns. The exit code is 4 if `twheel run` would fail.
#[derive(Args)]
#[command(after_help = "\
Examples:
  sudo twheel doctor             # this host and its interfaces
  twheel doctor --iface eth0     # does `run --iface eth0` work?
  twheel doctor --iface 'veth*'
  twheel doctor --iface eth0 --rto on --max-flows 1000000    # and with these options?
  twheel doctor --json | jq 'select(.status != \"ok\")'")]
pub struct Doctor {
    /// Interface, pattern for interfaces that exist, or a list with commas; may be repeated [default: all except loopback]
    #[arg(long = "iface", value_name = "NAME", add = complete::interfaces())]
    interfaces: Vec<String>,
    /// Exclude these from the interfaces that --iface patterns match: a name, pattern or list
    #[arg(long, value_name = "NAME", add = complete::excluded())]
    exclude: Vec<String>,
    /// Options of `twheel run`: what would be loaded
    #[command(flatten)]
    options: Options,
}

impl Doctor {
    pub(super) fn execute(self) -> Result<()> {
        let clock = Clock::jiffies()?;
        let selection = Selection::new(&self.interfaces, &self.exclude)?;
        let (config, _) = self.options.config(clock, selection.count())?;
        let hooks = self
            .options
            .hooks(selection.count(), &config.0, clock, ProgramNames::read());
        let mut interfaces: Vec<_> = selection.names().map(str::to_owned).collect();
        if selection.has_pattern() {
            let there = interfaces::all()?.into_iter().map(|it| it.name);
            let matching = there.filter(|name| selection.matches_pattern(name));
            interfaces.extend(matching);
            interfaces = each_once(interfaces);
        }
        let findings = examine(&Intended {
            interfaces,
            waits: self.options.wait_iface,
            hooks,
            config,
            clock,
            stepping: self.options.stepping,
            policy: self.options.policy,
            log_level: self.options.log_level as u8,
            metrics: self.options.metrics,
            group: self.options.group,
        });
        let result = if self.options.json {
            print_json(&findings)
        } else {
            print(&findings)
        };
        result.context("cannot write to standard output")?;
        match findings
            .iter()
            .filter(|it| it.status == Status::Fail)
            .count()
        {
            0 => Ok(()),
            1 => red("one check".to_owned()),
            count => red(format!("{count} checks")),
        }
    }
}

fn red(what: String) -> Result<()> {
    let message = format!("{what} failed: follow the remedy below each FAIL");
    Err(Failure::new(Kind::Unsupported, message).into())
}

fn print(findings: &[Finding]) -> io::Result<()> {
    // Colours only on a terminal, and only if NO_COLOR is not set.
    let mut out = anstream::stdout().lock();
    let subject = |finding: &Finding| match &finding.interface {
        Some(interface) => format!("{interface} {}", finding.name),
        None => finding.name.to_owned(),
    };
    let width = findings.iter().map(|it| subject(it).len()).max();
    let width = width.unwrap_or_default();
    for finding in findings {
        let (colour, word) = match finding.status {
            Status::Ok => (AnsiColor::Green, "ok"),
            Status::Warn => (AnsiColor::Yellow, "warn"),
            Status::Fail => (AnsiColor::Red, "FAIL"),
        };
        let style = Style::new().fg_color(Some(colour.into()));
        writeln!(
            out,
            "{style}{word:<4}{style:#}  {:<width$}  {}",
            plain(&subject(finding)),
            plain(&finding.what)
        )?;
        if let Some(remedy) = &finding.remedy {
            writeln!(out, "{:<6}{:<width$}  -> {}", "", "", plain(remedy))?;
        }
    }
    out.flush()
}

/// The text without control characters, which a terminal might obey: an interface may have any
/// name.
fn plain(text: &str) -> String {
    text.replace(char::is_control, "?")
}

fn print_json(findings: &[Finding]) -> io::Result<()> {
    let mut out = io::stdout().lock();
    for finding in findings {
        json::write_now("check", finding, &mut out)?;
    }
    Ok(())
}
