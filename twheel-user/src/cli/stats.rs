//! `twheel stats`

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{IsTerminal, Write},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use twheel_common::counter::{Counter, Counters};

use super::select::{Select, interval, while_read};
use crate::{
    call,
    inspect::{CounterReadings, Reader},
    output::json,
};

/// Show every counter of an instance, with what it counts
///
/// Counters are kept for each CPU and, if the instance has several interfaces, for each interface; those of the wheels
/// belong to none. Above them are the packets that the kernel counted on each interface since it came up.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel stats
  twheel stats --watch          # every second, with rates, until Ctrl-C
  twheel stats --json | jq 'select(.counter == \"events_lost\").total'")]
pub struct Stats {
    #[command(flatten)]
    select: Select,
    /// Repeat, with rates
    #[arg(long)]
    watch: bool,
    /// Interval between refreshes
    #[arg(long, value_parser = interval, default_value = "1s", requires = "watch")]
    interval: Duration,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct StatsLine<'a> {
    counter: &'a str,
    total: u64,
    cpus: &'a [u64],
    interfaces: BTreeMap<&'a str, u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    per_second: Option<f64>,
    meaning: &'a str,
}

/// The counters at one moment.
pub(super) struct Look {
    at: Instant,
    counted: CounterReadings,
    /// The sums over all CPUs.
    pub sum: Counters,
}

impl Look {
    /// Reads the counters now.
    pub fn at(reader: &Reader) -> Result<Self> {
        let counted = reader.counted()?;
        Ok(Self {
            at: Instant::now(),
            sum: Counters::sum(&counted.cpus),
            counted,
        })
    }

    /// The rate per second since an earlier reading.
    pub fn rate(&self, earlier: &Self, counter: Counter) -> f64 {
        let more = self
            .sum
            .get(counter)
            .saturating_sub(earlier.sum.get(counter));
        more as f64 / (self.at - earlier.at).as_secs_f64().max(f64::EPSILON)
    }
}

impl Stats {
    pub(super) fn execute(self) -> Result<()> {
        let reader = self.select.open()?;
        let clear = self.watch && !self.json && std::io::stdout().is_terminal();
        while_read(|out| {
            let mut earlier: Option<Look> = None;
            loop {
                let look = Look::at(&reader)?;
                if self.json {
                    write_json(&reader, &look, earlier.as_ref(), out)?;
                } else {
                    if clear {
                        // Moves the cursor to the top and clears the screen.
                        write!(out, "\x1b[H\x1b[2J")?;
                    }
                    write_text(&reader, &look, earlier.as_ref(), out)?;
                }
                out.flush()?;
                if !self.watch {
                    return Ok(());
                }
                earlier = Some(look);
                thread::sleep(self.interval);
            }
        })
    }
}

fn write_json(
    reader: &Reader,
    look: &Look,
    earlier: Option<&Look>,
    out: &mut dyn Write,
) -> Result<()> {
    for counter in Counter::ALL {
        let CounterReadings { cpus, interfaces } = &look.counted;
        let cpus: Vec<_> = cpus.iter().map(|cpu| cpu.get(*counter)).collect();
        let interfaces = interfaces.iter();
        let line = StatsLine {
            counter: counter.name(),
            total: look.sum.get(*counter),
            cpus: &cpus,
            interfaces: interfaces
                .map(|(name, counters)| (name.as_str(), counters.get(*counter)))
                .collect(),
            per_second: earlier.map(|earlier| look.rate(earlier, *counter)),
            meaning: counter.meaning(),
        };
        json::write_found("counter", reader.identity(), line, out)?;
    }
    Ok(())
}

/// The longest name of an interface; a name with its network namespace may be longer.
const WIDE: usize = 15;
/// Most interfaces that get columns of their own.
const COLUMNS: usize = 6;

fn write_text(
    reader: &Reader,
    look: &Look,
    earlier: Option<&Look>,
    out: &mut dyn Write,
) -> Result<()> {
    let meta = reader.meta();
    let geometry = meta.geometry;
    writeln!(
        out,
        "{} flows of at most {}; tick {}, {} wheel of {} x {} slots on each CPU; {}",
        look.sum.live(),
        meta.max_flows,
        humantime::format_duration(reader.clock().duration(meta.tick.into())),
        geometry.scheme_name(),
        geometry.levels,
        1u64 << geometry.bits,
        if reader.pins().is_running()? {
            "twheel run is running"
        } else {
            "twheel run is not running: nothing expires"
        }
    )?;
    let way = call::stepping(&reader.pins().map("CALLS")?)?;
    writeln!(out, "stepped by {}", way.name())?;
    let (held, passed) = (reader.pins().interfaces()?, passed()?);
    if held.len() <= COLUMNS {
        for interface in &held {
            match passed.get(interface) {
                Some([received, sent]) => {
                    writeln!(out, "{interface}: {received} packets received, {sent} sent")?;
                }
                None => writeln!(out, "{interface}: gone")?,
            }
        }
    }
    writeln!(out)?;
    let CounterReadings { cpus, interfaces } = &look.counted;
    // Omits the CPUs at the end that the host could have but does not: their columns would be
    // zeros.
    let last = cpus.iter().rposition(|cpu| *cpu != Counters::default());
    let cpus = &cpus[..last.map_or(0, |last| last + 1)];
    // A single interface would repeat the total, and many do not fit as columns.
    let columns = match interfaces.len() {
        2..=COLUMNS => interfaces.as_slice(),
        _ => &[],
    };
    let names = columns.iter().map(|(name, _)| name.chars().count());
    let wide = names.max().unwrap_or(0).max(WIDE);
    write!(out, "{:<14} {:>12}", "COUNTER", "TOTAL")?;
    if earlier.is_some() {
        write!(out, " {:>10}", "A SECOND")?;
    }
    for (name, _) in columns {
        write!(out, " {name:>wide$}")?;
    }
    for cpu in 0..cpus.len() {
        write!(out, " {:>12}", format!("CPU {cpu}"))?;
    }
    writeln!(out, "  MEANING")?;
    for counter in Counter::ALL {
        write!(out, "{:<14} {:>12}", counter.name(), look.sum.get(*counter))?;
        if let Some(earlier) = earlier {
            write!(out, " {:>10.0}", look.rate(earlier, *counter))?;
        }
        for (_, counters) in columns {
            write!(out, " {:>wide$}", counters.get(*counter))?;
        }
        for cpu in cpus {
            write!(out, " {:>12}", cpu.get(*counter))?;
        }
        writeln!(out, "  {}", counter.meaning())?;
    }
    if interfaces.len() > COLUMNS {
        write_rows(interfaces, &passed, out)?;
    }
    Ok(())
}

/// Writes many interfaces, one row each: the packets that the kernel counted, and the most useful
/// counters.
fn write_rows(
    interfaces: &[(String, Counters)],
    passed: &HashMap<String, [u64; 2]>,
    out: &mut dyn Write,
) -> Result<()> {
    const TOLD: [Counter; 4] = [
        Counter::Touched,
        Counter::Created,
        Counter::SeenAgain,
        Counter::NotTracked,
    ];
    let names = interfaces.iter().map(|(name, _)| name.chars().count());
    let wide = names.max().unwrap_or(0).max("INTERFACE".len());
    write!(
        out,
        "\n{:<wide$} {:>12} {:>12}",
        "INTERFACE", "RECEIVED", "SENT"
    )?;
    for counter in TOLD {
        write!(
            out,
            " {:>12}",
            counter.name().to_uppercase().replace('_', " ")
        )?;
    }
    writeln!(out)?;
    for (name, counters) in interfaces {
        write!(out, "{name:<wide$}")?;
        for way in 0..2 {
            match passed.get(name) {
                Some(passed) => write!(out, " {:>12}", passed[way])?,
                // The interface has disappeared, or is in another network namespace.
                None => write!(out, " {:>12}", "-")?,
            }
        }
        for counter in TOLD {
            write!(out, " {:>12}", counters.get(counter))?;
        }
        writeln!(out)?;
    }
    Ok(())
}

/// Packets that each interface of this network namespace has received and sent, as the kernel
/// counts them.
fn passed() -> Result<HashMap<String, [u64; 2]>> {
    const TABLE: &str = "/proc/thread-self/net/dev";
    let table = fs::read_to_string(TABLE).with_context(|| format!("cannot read {TABLE}"))?;
    Ok(table
        .lines()
        .filter_map(|line| {
            let (name, numbers) = line.split_once(':')?;
            let mut numbers = numbers.split_ascii_whitespace();
            // The columns are bytes, packets and six more for reception; then the same for
            // transmission.
            let received = numbers.nth(1)?.parse().ok()?;
            let sent = numbers.nth(7)?.parse().ok()?;
            Some((name.trim().to_owned(), [received, sent]))
        })
        .collect())
}
