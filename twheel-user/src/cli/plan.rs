//! `twheel plan`

use std::{io::Write, time::Duration};

use anyhow::{Context, Result};
use aya::util::nr_cpus;
use clap::Args;
use serde_json::json;
use twheel_common::wheel::WheelScheme;

use crate::{
    clock::Clock,
    failure::{Failure, Kind},
    given::{self, written},
    host,
    output::{
        json::write_now,
        several,
        table::{Column, Table},
        units::short,
    },
    plan::{Costs, Demand, Plan as Prediction, calibrate},
    settings::{MAX_FLOWS, Settings},
    timeouts::Timeouts,
};

/// Recommend a wheel for a number of flows and a timeout, and predict its cost
///
/// The cost model is that of Varghese and Lauck: timer visits a second times the cost of one.
#[derive(Args)]
#[command(after_help = "\
Examples:
  twheel plan --flows 1000000 --timeout 60s --tick 100ms
  sudo twheel plan --flows 1000000 --timeout 60s --tick 10ms --calibrate
  twheel plan --flows 5000000 --timeout 1h --tick 1s --memory 1GiB")]
pub struct Plan {
    /// Number of flows
    #[arg(long, value_name = "N", value_parser = given::number(1..=MAX_FLOWS), allow_hyphen_values = true)]
    flows: u32,
    /// Timeout of established flows
    #[arg(long, value_parser = given::duration, allow_hyphen_values = true, default_value = "60s")]
    timeout: Duration,
    /// Tick, as for `twheel run`
    #[arg(long, value_parser = given::duration, allow_hyphen_values = true, default_value = "100ms")]
    tick: Duration,
    /// Most memory, such as 500MB or 2GiB
    #[arg(long, value_name = "SIZE")]
    memory: Option<Memory>,
    /// Measure this machine instead of using the figures of another (needs root, takes a few seconds)
    #[arg(long)]
    calibrate: bool,
    /// Print one JSON object a line
    #[arg(long)]
    json: bool,
}

/// A number of bytes, and the text that gave it.
#[derive(Clone)]
struct Memory {
    given: String,
    bytes: u64,
}

impl std::str::FromStr for Memory {
    type Err = String;

    fn from_str(given: &str) -> Result<Self, String> {
        let size = self::given::size(given)?;
        Ok(Self {
            given: given.to_owned(),
            bytes: size.as_u64(),
        })
    }
}

impl Plan {
    pub(super) fn execute(self) -> Result<()> {
        let clock = Clock::jiffies()?;
        let config = Settings {
            tick: self.tick,
            timeouts: Timeouts::new(self.timeout, self.timeout),
            max_flows: self.flows,
            ..Settings::default()
        }
        .config(clock)?;
        let cpus = nr_cpus().map_err(|(path, error)| {
            anyhow::Error::new(error).context(format!("cannot read {path}"))
        })?;
        let demand = Demand::new(self.flows, cpus, &config, clock);
        let costs = if self.calibrate {
            host::check()?;
            calibrate(demand.flows)?
        } else {
            Costs::typical(demand.flows)
        };
        let mut plans = Prediction::all(&demand, &costs);
        if let Some(memory) = &self.memory {
            let least = plans.iter().map(|plan| plan.memory).min().unwrap_or(0);
            plans.retain(|plan| plan.memory <= memory.bytes);
            if plans.is_empty() {
                return Err(Failure::new(
                    Kind::Usage,
                    format!(
                        "--memory {}: {} need at least {}: give more memory, or track fewer flows",
                        memory.given,
                        several(self.flows.into(), "flow"),
                        bytesize::ByteSize(least)
                    ),
                )
                .into());
            }
        }
        let best = plans.iter().copied().reduce(Prediction::better);
        let best = best.context("no wheel scheme fits")?.geometry;
        let result = if self.json {
            self.print_json(&plans, best, &costs)
        } else {
            self.print(&plans, best, &demand, &costs)
        };
        result.context("cannot write to standard output")
    }

    fn print(
        &self,
        plans: &[Prediction],
        best: twheel_common::wheel::Geometry,
        demand: &Demand,
        costs: &Costs,
    ) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        writeln!(
            out,
            "{}, each armed {} ahead at most, tick {}, {}.\nA visit {:.0} ns, a wake-up {:.1} µs: {}.\n",
            several(demand.flows, "flow"),
            short(demand.tick * u32::try_from(demand.ahead).unwrap_or(u32::MAX)),
            written(demand.tick),
            several(demand.cpus, "CPU"),
            costs.visit,
            costs.wake / 1000.0,
            if self.calibrate {
                "measured here just now"
            } else {
                "of another machine; --calibrate measures this one"
            }
        )?;
        let numbers = ["LEVELS", "SLOTS", "VISITS/S", "OF ONE CPU", "MEMORY"];
        let mut columns = vec![Column::text("SCHEME")];
        columns.extend(numbers.map(Column::number));
        columns.push(Column::text(""));
        let mut table = Table::new(columns);
        for plan in plans {
            let geometry = plan.geometry;
            let advice = match geometry == best {
                true => "<- take this",
                false => "",
            };
            let cells = vec![
                scheme(plan).name().to_owned(),
                geometry.levels.to_string(),
                (1u64 << geometry.bits).to_string(),
                format!("{:.0}", plan.visits),
                format!("{:.3}%", plan.share * 100.0),
                bytesize::ByteSize(plan.memory).to_string(),
                advice.to_owned(),
            ];
            table.row(cells, &mut out)?;
        }
        table.end(&mut out)?;
        if let Some(plan) = plans.iter().find(|plan| plan.geometry == best) {
            writeln!(
                out,
                "\ntwheel run --max-flows {} --timeout {} --tick {} --scheme {} --slots {}{}",
                self.flows,
                written(self.timeout),
                written(self.tick),
                scheme(plan).name(),
                1u64 << best.bits,
                match scheme(plan) {
                    WheelScheme::Hierarchical => format!(" --levels {}", best.levels),
                    _ => String::new(),
                }
            )?;
        }
        Ok(())
    }

    fn print_json(
        &self,
        plans: &[Prediction],
        best: twheel_common::wheel::Geometry,
        costs: &Costs,
    ) -> std::io::Result<()> {
        let mut out = std::io::stdout().lock();
        for plan in plans {
            let geometry = plan.geometry;
            let line = json!({
                "scheme": scheme(plan).name(),
                "levels": geometry.levels,
                "slots": 1u64 << geometry.bits,
                "visits_per_second": plan.visits,
                "cpu_share": plan.share,
                "memory_bytes": plan.memory,
                "recommended": geometry == best,
                "visit_us": costs.visit / 1000.0,
                "wake_us": costs.wake / 1000.0,
                "calibrated": self.calibrate,
            });
            write_now("plan", line, &mut out)?;
        }
        Ok(())
    }
}

fn scheme(plan: &Prediction) -> WheelScheme {
    WheelScheme::from_raw(plan.geometry.scheme).unwrap_or_default()
}
