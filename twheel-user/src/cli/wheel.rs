//! `twheel wheel`

use std::{
    io::{self, IsTerminal, Write},
    time::Duration,
};

use anyhow::Result;
use clap::Args;
use ratatui::crossterm::terminal;
use serde::Serialize;

use super::select::{Select, while_read};
use crate::{
    identity::Identity,
    inspect::Reader,
    output::{
        json, several,
        table::{Column, Table},
        units::short,
    },
    wheels::{Counted, Due, Turning, Wheels, cell, draw},
};

/// Draw the timing wheels: flows in each slot, the hands, and when flows are due
///
/// Each level is a row of cells, taller where more flows are; the mark below is the hand. A flow is in the slot of its
/// next timer visit. The table at the end counts the deadlines that flows have after their last packets.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel wheel
  twheel wheel --iface eth0 --json | jq 'select(.event == \"slot\" and .starts_in_us < 1000000)'")]
pub struct Wheel {
    #[command(flatten)]
    select: Select,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
#[serde(untagged)]
enum WheelLine<'a> {
    Wheel {
        cpu: u32,
        scheme: &'a str,
        levels: u32,
        slots: u32,
        tick_us: u64,
        elapsed: u64,
        #[serde(skip_serializing_if = "Option::is_none")]
        next_in_us: Option<i64>,
        sleeps: bool,
        flows: u64,
        handed_out: u32,
    },
    Slot {
        cpu: u32,
        level: u32,
        slot: u32,
        flows: u32,
        starts_in_us: i64,
    },
    Due {
        #[serde(skip_serializing_if = "Option::is_none")]
        within_us: Option<u64>,
        flows: u64,
    },
}

impl Wheel {
    pub(super) fn execute(self) -> Result<()> {
        let reader = self.select.open()?;
        let now = reader.now()?;
        let wheels = Wheels::read(&reader, now)?;
        let counted = wheels.count(&reader)?;
        let due = Due::count(reader.flows(now).map(|(_, tracked)| tracked.expires));
        while_read(|out| match self.json {
            true => write_json(reader.identity(), &wheels, &counted, due, out),
            false => write_text(&reader, &wheels, &counted, due, out),
        })
    }
}

fn write_json(
    identity: &Identity,
    wheels: &Wheels,
    counted: &[Counted],
    due: Due,
    out: &mut dyn Write,
) -> Result<()> {
    let mut write = |line: WheelLine<'_>| {
        let event = match &line {
            WheelLine::Wheel { .. } => "wheel",
            WheelLine::Slot { .. } => "slot",
            WheelLine::Due { .. } => "due",
        };
        json::write_found(event, identity, line, out)
    };
    for (turning, counted) in wheels.wheels.iter().zip(counted) {
        let cpu = turning.cpu;
        write(WheelLine::Wheel {
            cpu,
            scheme: wheels.geometry.scheme_name(),
            levels: wheels.geometry.levels,
            slots: wheels.slots(),
            tick_us: json::micros(wheels.tick()),
            elapsed: turning.wheel.elapsed,
            next_in_us: wheels.next(turning).map(|millis| millis * 1000),
            sleeps: turning.sleeps(),
            flows: counted.flows(),
            handed_out: counted.handed_out,
        })?;
        for slot in &counted.slots {
            write(WheelLine::Slot {
                cpu,
                level: slot.level,
                slot: slot.slot,
                flows: slot.flows,
                starts_in_us: wheels.until(turning, slot.turn) * 1000,
            })?;
        }
    }
    for (_, bound, flows) in due.each() {
        write(WheelLine::Due {
            within_us: bound.map(json::micros),
            flows,
        })?;
    }
    Ok(())
}

fn write_text(
    reader: &Reader,
    wheels: &Wheels,
    counted: &[Counted],
    due: Due,
    out: &mut dyn Write,
) -> Result<()> {
    const CELLS: usize = 128;
    let width = match terminal::size() {
        Ok((columns, _)) if io::stdout().is_terminal() => columns.into(),
        _ => CELLS,
    };
    writeln!(
        out,
        "{} on {} of {} x {} ({}), tick {}; {}",
        several(counted.iter().map(Counted::flows).sum(), "flow"),
        several(counted.len() as u64, "wheel"),
        wheels.geometry.levels,
        several(wheels.slots().into(), "slot"),
        wheels.geometry.scheme_name(),
        span(wheels.tick()),
        if reader.pins().is_running()? {
            "twheel run is running"
        } else {
            "twheel run is not running: the wheels stand still"
        }
    )?;
    for (turning, counted) in wheels.wheels.iter().zip(counted) {
        write!(
            out,
            "\nCPU {}: {}",
            turning.cpu,
            several(counted.flows(), "flow")
        )?;
        if counted.handed_out > 0 {
            write!(
                out,
                ", {} of them await their timer visit",
                counted.handed_out
            )?;
        }
        writeln!(out, "; {}", next(wheels, turning))?;
        for level in 0..wheels.geometry.levels {
            let slots = counted.slots.iter().filter(|slot| slot.level == level);
            let filled = slots.map(|slot| (slot.slot, slot.flows));
            let (used, flows) = filled.clone().fold((0, 0u64), |(used, sum), (_, flows)| {
                (used + 1, sum + u64::from(flows))
            });
            writeln!(
                out,
                "level {level}: {} in {}; a slot is {}, a round {}",
                several(flows, "flow"),
                several(used, "slot"),
                span(wheels.span(level)),
                span(wheels.span(level) * wheels.slots())
            )?;
            let cells: String = draw(wheels.slots(), filled, width).into_iter().collect();
            writeln!(out, "{}", cells.trim_end())?;
            let hand = cell(wheels.slots(), wheels.hand(turning, level), width);
            writeln!(out, "{:hand$}^", "")?;
        }
    }
    writeln!(out)?;
    let mut table = Table::new([Column::text("DUE WITHIN"), Column::number("FLOWS")]);
    for (name, _, flows) in due.each() {
        table.row(vec![name.to_string(), flows.to_string()], out)?;
    }
    Ok(table.end(out)?)
}

/// When the wheel's next slot is due.
pub(super) fn next(wheels: &Wheels, turning: &Turning) -> String {
    let short = |milliseconds: i64| short(Duration::from_millis(milliseconds.unsigned_abs()));
    match wheels.next(turning) {
        None => "sleeps".to_owned(),
        Some(overdue @ ..0) => format!("next turn overdue by {}", short(overdue)),
        Some(next) => format!("next turn in {}", short(next)),
    }
}

/// The time that a slot spans, also in milliseconds.
fn span(duration: Duration) -> String {
    match duration.as_millis() {
        milliseconds @ ..1000 => format!("{milliseconds}ms"),
        _ => short(duration),
    }
}
