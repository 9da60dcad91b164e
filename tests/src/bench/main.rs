//! `twheel-bench`, the benches of `cargo xtask bench`. They attach nothing to anything.
//!
//! Those of the data plane need root; their times are the kernel's own, `duration` of
//! `BPF_PROG_TEST_RUN`, never with `repeat`.

mod insert;
mod inspect;
mod machine;
mod memory;
mod plan;
mod plane;
mod report;
mod rto;
mod schemes;
mod step;
mod touch;

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};

use crate::report::Report;

/// Measures twheel's data plane on this machine.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Cli {
    #[command(subcommand)]
    bench: Bench,

    /// A JSON object a line instead of a table
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Subcommand)]
enum Bench {
    /// Nanoseconds a packet, beside the least that a flow table can cost
    Touch {
        /// Runs of each program at each number of flows
        #[arg(long, default_value_t = 151, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        rounds: u32,
    },
    /// Nanoseconds of a new flow, beside a bare insertion into the kernel's hash
    Insert {
        /// Fillings of the table from half to full
        #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
    },
    /// Nanoseconds of a visit and of an eviction with its event, beside the kernel's hash
    Step {
        /// Lives of the whole table
        #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
    },
    /// Bytes a flow: what the kernel charges for all maps; and how long a large table takes to load
    Memory,
    /// What `twheel plan` predicts, beside what steppers then take
    Plan,
    /// What it takes to look at a million flows from the command line
    Inspect,
    /// What retransmission timers cost the steppers
    Rto,
    /// Nanoseconds and bytes of the paper's seven schemes on the host, beside two crates; no root
    Schemes(schemes::Options),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(&cli) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(cli: &Cli) -> Result<()> {
    if !matches!(cli.bench, Bench::Schemes(_)) {
        twheel::host::check()?;
    }
    let mut report = Report::new(cli.json);
    report.say(&machine::describe());
    match cli.bench {
        Bench::Schemes(ref options) => schemes::bench(options, &mut report),
        Bench::Touch { rounds } => touch::bench(rounds, &mut report),
        Bench::Insert { rounds } => insert::bench(rounds, &mut report),
        Bench::Step { rounds } => step::bench(rounds, &mut report),
        Bench::Memory => memory::bench(&mut report),
        Bench::Plan => plan::bench(&mut report),
        Bench::Inspect => inspect::bench(&mut report),
        Bench::Rto => rto::bench(&mut report),
    }
}
