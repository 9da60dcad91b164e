//! `twheel stats --cost`: what the programs of an instance cost.

use std::io::Write;

use anyhow::Result;
use serde::Serialize;

use crate::{
    cost::{Cost, CostReading, Meter},
    inspect::Reader,
    output::{
        json,
        table::{Column, Table},
        units::Units,
    },
};

/// The programs' use of CPUs, from one look to the next.
pub(super) struct Costs {
    /// The kernel measures as long as this lives.
    _meter: Meter,
    earlier: CostReading,
}

#[derive(Serialize)]
struct CostLine<'a> {
    program: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    netns: Option<&'a str>,
    per_packet: bool,
    runs: u64,
    elapsed_us: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    run_us: Option<f64>,
    cpu_share: f64,
}

impl Costs {
    /// Starts to measure.
    pub fn start(reader: &Reader) -> Result<Self> {
        Ok(Self {
            _meter: Meter::start()?,
            earlier: CostReading::new(reader.pins())?,
        })
    }

    /// What the programs have used since the last look.
    pub fn look(&mut self, reader: &Reader) -> Result<Vec<Cost>> {
        let now = CostReading::new(reader.pins())?;
        let costs = now.since(&self.earlier);
        self.earlier = now;
        Ok(costs)
    }
}

/// Writes what the programs that ran have used, and the sum of those that see packets.
pub(super) fn write_text(costs: &[Cost], units: Units, out: &mut dyn Write) -> Result<()> {
    let numbers = ["RUNS A SECOND", "NS A RUN", "OF ONE CPU"];
    let mut columns = vec![Column::text("PROGRAM").at_least(16)];
    columns.extend(numbers.map(Column::number));
    let mut table = Table::new(columns);
    let sum = Cost::sum("all packets", costs.iter().filter(|it| it.is_for_packets()));
    for cost in costs.iter().filter(|it| it.runs > 0).chain([&sum]) {
        let program = match &cost.namespace {
            Some(namespace) => format!("{namespace}/{}", cost.program),
            None => cost.program.clone(),
        };
        let nanoseconds = cost.nanos_a_run();
        table.row(
            vec![
                program,
                units.count(cost.runs_a_second().round() as u64),
                nanoseconds.map_or_else(|| "-".to_owned(), |it| units.count(it.round() as u64)),
                format!("{:.3}%", 100.0 * cost.cpu_share()),
            ],
            out,
        )?;
    }
    writeln!(out)?;
    Ok(table.end(out)?)
}

/// The same as lines of JSON, without the sum.
pub(super) fn write_json(reader: &Reader, costs: &[Cost], out: &mut dyn Write) -> Result<()> {
    for cost in costs {
        let line = CostLine {
            program: &cost.program,
            netns: cost.namespace.as_deref(),
            per_packet: cost.is_for_packets(),
            runs: cost.runs,
            elapsed_us: json::micros(cost.elapsed),
            run_us: cost.nanos_a_run().map(|it| it / 1000.0),
            cpu_share: cost.cpu_share(),
        };
        json::write_found("cost", reader.identity(), line, out)?;
    }
    Ok(())
}
