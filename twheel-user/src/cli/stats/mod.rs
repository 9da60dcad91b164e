//! `twheel stats`

mod cost;

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    io::{self, IsTerminal, Write},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use clap::Args;
use ratatui::crossterm::terminal;
use serde::Serialize;
use twheel_common::counter::{Counter, Counters};

use self::cost::Costs;
use super::select::{Numbers, Select, interval, while_read};
use crate::{
    call,
    cost::Cost,
    given::written,
    inspect::{CounterReadings, Reader},
    output::{
        json, several,
        table::{Column, Table, wrapped},
        units::Units,
    },
};

/// Show the counters of an instance, with what they count
///
/// They are grouped by purpose; those that are 0 are left out. Counters are kept for each CPU and, if the instance has
/// several interfaces, for each interface; those of the wheels belong to none. Above them are the packets that the kernel
/// counted on each interface since it came up.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel stats
  twheel stats --watch          # every second, with rates, until Ctrl-C
  twheel stats --all --cpus     # also what is 0, and the counts of each CPU
  twheel stats --cost           # nanoseconds a packet
  twheel stats --json | jq 'select(.counter == \"events_lost\").total'")]
pub struct Stats {
    #[command(flatten)]
    select: Select,
    /// Interval between refreshes
    #[arg(long, value_parser = interval, default_value = "1s", requires = "watch")]
    interval: Duration,
    #[command(flatten)]
    show: Show,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// What the table shows.
#[derive(Args)]
struct Show {
    /// Repeat, with rates
    #[arg(long)]
    watch: bool,
    /// Also show the counters that are 0
    #[arg(long)]
    all: bool,
    /// Also show the counts of each CPU
    #[arg(long)]
    cpus: bool,
    /// Also measure for a second, or between refreshes, what the programs cost: nanoseconds a packet, and the share of a CPU.
    /// The kernel's statistics of programs are switched on meanwhile, which takes CAP_SYS_ADMIN
    #[arg(long)]
    cost: bool,
    #[command(flatten)]
    numbers: Numbers,
}

/// All counters, by what they are for.
const GROUPS: [(&str, &[Counter]); 7] = {
    use Counter as C;
    [
        (
            "Packets",
            &[
                C::Touched,
                C::Changed,
                C::SeenAgain,
                C::Moved,
                C::NoFlow,
                C::NotTracked,
                C::NotIp,
                C::Fragment,
                C::NotWatched,
            ],
        ),
        (
            "Flow table",
            &[
                C::Created,
                C::Expired,
                C::Superseded,
                C::Deleted,
                C::Evicted,
                C::TableFull,
                C::WindowFull,
            ],
        ),
        (
            "Expiry: the wheels",
            &[
                C::Visits,
                C::Rearmed,
                C::Posted,
                C::Wakes,
                C::RingFull,
                C::Orphans,
            ],
        ),
        (
            "Retransmission timers",
            &[C::RtoStarted, C::RtoExpired, C::Stalled],
        ),
        (
            "Reaper",
            &[
                C::ReapAsked,
                C::ReapSettled,
                C::EnforcedDropped,
                C::EnforcedReset,
                C::EnforcedLimited,
            ],
        ),
        (
            "Adversaries, and broken packets",
            &[
                C::OverQuota,
                C::Ignored,
                C::SameWay,
                C::BadFlags,
                C::Malformed,
                C::Truncated,
            ],
        ),
        (
            "Losses",
            &[C::EventsLost, C::HistoryLost, C::ReapLost, C::Raced],
        ),
    ]
};

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
        let is_terminal = io::stdout().is_terminal();
        let mut measured = self.show.cost.then(|| Costs::start(&reader)).transpose()?;
        while_read(|out| {
            let mut earlier: Option<Look> = None;
            if measured.is_some() {
                thread::sleep(self.interval);
            }
            loop {
                let look = Look::at(&reader)?;
                let costs = measured.as_mut().map(|it| it.look(&reader));
                let costs = costs.transpose()?.unwrap_or_default();
                let mut text = Vec::new();
                // The size of a terminal may change.
                let size = terminal::size().ok().filter(|_| is_terminal);
                if self.json {
                    write_json(&reader, &look, earlier.as_ref(), out)?;
                    cost::write_json(&reader, &costs, out)?;
                } else {
                    let wide = size.map(|(columns, _)| columns.into());
                    let looks = (&look, earlier.as_ref());
                    write_text(&reader, looks, &costs, (&self.show, wide), &mut text)?;
                }
                match size.filter(|_| self.show.watch && !self.json) {
                    Some(size) => redraw(&String::from_utf8_lossy(&text), size, out)?,
                    None => out.write_all(&text)?,
                }
                out.flush()?;
                if !self.show.watch {
                    return Ok(());
                }
                earlier = Some(look);
                thread::sleep(self.interval);
            }
        })
    }
}

/// Draws over what the terminal shows. What does not fit is left out.
fn redraw(text: &str, (columns, rows): (u16, u16), out: &mut dyn Write) -> io::Result<()> {
    // ECMA-48: the cursor to the top; the rest of a line, and of the screen, cleared.
    const TOP: &str = "\x1b[H";
    const LINE: &str = "\x1b[K";
    const REST: &str = "\x1b[J";
    let lines: Vec<_> = text.lines().collect();
    // The cursor stays in the last row.
    let room = usize::from(rows).saturating_sub(1);
    let shown = match lines.len() > room {
        true => room.saturating_sub(1),
        false => lines.len(),
    };
    write!(out, "{TOP}")?;
    for line in &lines[..shown] {
        let line: String = line.chars().take(columns.into()).collect();
        writeln!(out, "{line}{LINE}")?;
    }
    if shown < lines.len() {
        let more = lines.len() - shown;
        writeln!(out, "({more} more lines: enlarge the terminal){LINE}")?;
    }
    write!(out, "{REST}")
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

/// Most interfaces that get columns of their own.
const COLUMNS: usize = 6;

/// Writes the counters at one moment, with rates since an earlier one. `wide`: the terminal's width.
fn write_text(
    reader: &Reader,
    (look, earlier): (&Look, Option<&Look>),
    costs: &[Cost],
    (show, wide): (&Show, Option<usize>),
    out: &mut dyn Write,
) -> Result<()> {
    let units = show.numbers.units();
    let passed = passed()?;
    let mut head = Vec::new();
    write_head(reader, look, &mut head)?;
    for line in String::from_utf8_lossy(&head).lines() {
        for part in wrapped(line, wide.unwrap_or(usize::MAX)) {
            writeln!(out, "{part}")?;
        }
    }
    let held = reader.interfaces()?;
    if held.len() <= COLUMNS {
        for interface in &held {
            match passed.get(interface) {
                Some(passed) => {
                    let [received, sent] = passed.map(|it| units.count(it));
                    writeln!(out, "{interface}: {received} packets received, {sent} sent")?;
                }
                None => writeln!(out, "{interface}: gone")?,
            }
        }
    }
    if show.cost {
        cost::write_text(costs, units, out)?;
    }
    write_counters(look, earlier, (show, wide), out)?;
    let interfaces = &look.counted.interfaces;
    if interfaces.len() > COLUMNS {
        write_rows(interfaces, &passed, units, out)?;
    }
    Ok(())
}

fn write_head(reader: &Reader, look: &Look, out: &mut dyn Write) -> Result<()> {
    let meta = reader.meta();
    let geometry = meta.geometry;
    writeln!(
        out,
        "{} of at most {}; tick {}, {} wheel of {} x {} on each CPU; {}",
        several(look.sum.live(), "flow"),
        meta.max_flows,
        written(reader.clock().duration(meta.tick.into())),
        geometry.scheme_name(),
        geometry.levels,
        several(1 << geometry.bits, "slot"),
        if reader.pins().is_running()? {
            "twheel run is running"
        } else {
            "twheel run is not running: nothing expires"
        }
    )?;
    let way = call::stepping(&reader.pins().map("CALLS")?)?;
    Ok(writeln!(out, "stepped by {}", way.name())?)
}

/// Writes the counters by purpose.
fn write_counters(
    look: &Look,
    earlier: Option<&Look>,
    (show, wide): (&Show, Option<usize>),
    out: &mut dyn Write,
) -> Result<()> {
    let units = show.numbers.units();
    let CounterReadings { cpus, interfaces } = &look.counted;
    // Omits the CPUs at the end that the host could have but does not: their columns would be
    // zeros.
    let last = cpus.iter().rposition(|cpu| *cpu != Counters::default());
    let cpus = match show.cpus {
        true => &cpus[..last.map_or(0, |last| last + 1)],
        false => &[],
    };
    // A single interface would repeat the total, and many do not fit as columns.
    let interfaces = match interfaces.len() {
        2..=COLUMNS => interfaces.as_slice(),
        _ => &[],
    };
    let longest = Counter::ALL
        .iter()
        .map(|counter| counter.name().len())
        .max();
    // As wide in each look, so that nothing moves while it is watched.
    let number = |heading: &str| Column::number(heading).at_least(6);
    let mut columns = vec![
        Column::text("COUNTER").at_least(longest.unwrap_or(0)),
        number("TOTAL"),
    ];
    columns.extend(show.watch.then(|| number("A SECOND")));
    columns.extend(interfaces.iter().map(|(name, _)| number(name)));
    columns.extend((0..cpus.len()).map(|cpu| number(&format!("CPU {cpu}"))));
    columns.push(Column::text("MEANING"));
    // What is watched has a line for each counter, and more of them fit.
    let mut table = Table::new(columns).wrapped(wide.filter(|_| !show.watch));
    for (title, counters) in GROUPS {
        let shown = |counter: &&Counter| show.all || look.sum.get(**counter) > 0;
        let mut shown = counters.iter().filter(shown).peekable();
        if shown.peek().is_some() {
            table.title(title, out)?;
        }
        for counter in shown {
            let of = |counters: &Counters| units.count(counters.get(*counter));
            let mut cells = vec![counter.name().to_owned(), of(&look.sum)];
            let rate = earlier.map(|earlier| look.rate(earlier, *counter).round() as u64);
            let rate = rate.map_or_else(|| "-".to_owned(), |rate| units.count(rate));
            cells.extend(show.watch.then_some(rate));
            cells.extend(interfaces.iter().map(|(_, counters)| of(counters)));
            cells.extend(cpus.iter().map(of));
            cells.push(counter.meaning().to_owned());
            table.row(cells, out)?;
        }
    }
    writeln!(out)?;
    Ok(table.end(out)?)
}

/// Writes many interfaces, one row each: the packets that the kernel counted, and the most useful
/// counters.
fn write_rows(
    interfaces: &[(String, Counters)],
    passed: &HashMap<String, [u64; 2]>,
    units: Units,
    out: &mut dyn Write,
) -> Result<()> {
    const TOLD: [Counter; 4] = [
        Counter::Touched,
        Counter::Created,
        Counter::SeenAgain,
        Counter::NotTracked,
    ];
    let mut columns = vec![Column::text("INTERFACE")];
    columns.extend(["RECEIVED", "SENT"].map(Column::number));
    columns.extend(TOLD.map(|it| Column::number(it.name().to_uppercase().replace('_', " "))));
    let mut table = Table::new(columns);
    for (name, counters) in interfaces {
        let mut cells = vec![name.clone()];
        cells.extend((0..2).map(|way| match passed.get(name) {
            Some(passed) => units.count(passed[way]),
            // The interface has disappeared, or is in another network namespace.
            None => "-".to_owned(),
        }));
        cells.extend(TOLD.map(|counter| units.count(counters.get(counter))));
        table.row(cells, out)?;
    }
    writeln!(out)?;
    Ok(table.end(out)?)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_counter_is_in_one_group() {
        let mut grouped: Vec<_> = GROUPS
            .iter()
            .flat_map(|(_, counters)| counters.iter().map(|it| it.name()))
            .collect();
        let mut all: Vec<_> = Counter::ALL.iter().map(|it| it.name()).collect();
        grouped.sort_unstable();
        all.sort_unstable();
        assert_eq!(grouped, all);
    }

    #[test]
    fn a_terminal_is_drawn_over_and_never_scrolls() {
        let drawn = |text: &str, size| {
            let mut out = Vec::new();
            redraw(text, size, &mut out).unwrap();
            String::from_utf8(out).unwrap()
        };
        assert_eq!(
            drawn("abcdef\ng\n", (4, 4)),
            "\x1b[Habcd\x1b[K\ng\x1b[K\n\x1b[J"
        );
        assert_eq!(
            drawn("a\nb\nc\nd\n", (80, 4)),
            "\x1b[Ha\x1b[K\nb\x1b[K\n(2 more lines: enlarge the terminal)\x1b[K\n\x1b[J"
        );
    }
}
