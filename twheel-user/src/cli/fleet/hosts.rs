//! `twheel fleet hosts`

use std::{
    io::Write,
    time::{Duration, SystemTime},
};

use anyhow::Result;
use clap::Args;
use serde::Serialize;

use super::ask::Place;
use crate::{
    cli::select::{Numbers, while_read},
    filter::Filter,
    fleet::hosts::{self, Host, Thresholds, Trouble},
    given,
    identity::Identity,
    output::{
        json::{self, micros},
        table::{Column, Table},
        units::{Units, short},
    },
};

/// List the hosts of the fleet, and which are silent, behind or losing events
///
/// Hosts that have sent something within --since are known, each with its instances. An instance of which the host has a
/// newer one is `ended`: it is neither silent nor behind. What is told is about events and exporters: of a run that was
/// killed while its exporter lives, only LAST grows. The metrics and their alerts tell of runs.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel fleet hosts
  twheel fleet hosts --since 7d --bad
  twheel fleet hosts --host web1 --silent 1h --json")]
pub(super) struct Hosts {
    #[command(flatten)]
    place: Place,
    /// Hosts of which anything has come within this time
    #[arg(long, value_name = "DURATION", value_parser = given::duration, allow_hyphen_values = true, default_value = "1d")]
    since: Duration,
    /// An instance is silent if neither an event nor a sign of life of its exporter has come for longer than this
    #[arg(long, value_name = "DURATION", value_parser = given::duration, allow_hyphen_values = true, default_value = "5m")]
    silent: Duration,
    /// An instance is behind if the oldest event that has not arrived is older than this
    #[arg(long, value_name = "DURATION", value_parser = given::duration, allow_hyphen_values = true, default_value = "1m")]
    behind: Duration,
    /// An instance is losing if at least N events are missing
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = given::number(0..=u64::MAX), allow_hyphen_values = true)]
    losing: u64,
    /// Show only instances with which something is wrong
    #[arg(long)]
    bad: bool,
    #[command(flatten)]
    numbers: Numbers,
}

#[derive(Serialize)]
struct HostLine {
    #[serde(skip_serializing_if = "Option::is_none")]
    last: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    alive: Option<String>,
    delay_us: u64,
    events: u64,
    lost: u64,
    exporters: u64,
    not_sent: u64,
    status: Vec<&'static str>,
}

impl Hosts {
    pub(super) fn execute(self) -> Result<()> {
        let (server, question) = self.place.open(Filter::default(), self.since)?;
        let thresholds = Thresholds {
            silent: self.silent,
            behind: self.behind,
            losing: self.losing,
        };
        let hosts = hosts::hosts(&server, &question)?;
        while_read(|out| {
            let numbers = ["LAST", "DELAY", "EVENTS", "LOST", "EXPORTERS", "NOT SENT"];
            let mut columns = ["HOST", "INSTANCE"].map(Column::text).to_vec();
            columns.extend(numbers.map(Column::number));
            columns.push(Column::text("STATUS"));
            let mut table = Table::new(columns);
            let units = self.numbers.units();
            for host in &hosts {
                let troubles = host.troubles(question.now, thresholds);
                if self.bad && troubles.is_empty() {
                    continue;
                }
                match self.place.json {
                    true => write_json(host, &troubles, out)?,
                    false => table.row(cells(host, &troubles, question.now, units), out)?,
                }
            }
            match self.place.json {
                true => Ok(()),
                false => Ok(table.end(out)?),
            }
        })
    }
}

fn write_json(host: &Host, troubles: &[Trouble], out: &mut dyn Write) -> Result<()> {
    let identity = Identity {
        host: host.host.clone(),
        instance: host.instance.clone(),
        seed: 0,
    };
    let time = |time| humantime::format_rfc3339_micros(time).to_string();
    let line = HostLine {
        last: host.last.map(time),
        alive: host.alive.map(time),
        delay_us: micros(host.delay),
        events: host.events,
        lost: host.lost,
        exporters: host.exporters,
        not_sent: host.not_sent,
        status: status(host, troubles),
    };
    Ok(json::write_found("fleet_host", &identity, line, out)?)
}

/// Whether it runs, and what is wrong.
fn status(host: &Host, troubles: &[Trouble]) -> Vec<&'static str> {
    let mut names: Vec<_> = host.ended.then_some("ended").into_iter().collect();
    names.extend(troubles.iter().map(|it| it.name()));
    if names.is_empty() {
        names.push("ok");
    }
    names
}

fn cells(host: &Host, troubles: &[Trouble], now: SystemTime, units: Units) -> Vec<String> {
    let last = host.last.map_or_else(
        || "-".to_owned(),
        |last| short(now.duration_since(last).unwrap_or_default()),
    );
    let status = status(host, troubles).join(", ").replace('_', " ");
    vec![
        host.host.escape_debug().to_string(),
        host.instance.escape_debug().to_string(),
        last,
        short(host.delay),
        units.count(host.events),
        units.count(host.lost),
        units.count(host.exporters),
        units.count(host.not_sent),
        status,
    ]
}
