//! `twheel-bench`, the benchmarks of `cargo xtask bench`.
//!
//! Those of the data plane need root. Their times are the kernel's own, `duration` of
//! `BPF_PROG_TEST_RUN`, never with `repeat`.
//!
//! | question | modules |
//! |---|---|
//! | What does a packet cost? | `touch`, `insert`, `tagged`, `cores`, `before`; on a path: `path`, `gateway`, `bulk` |
//! | What does an expiry cost, and how late is it? | `step`, `expire`, `lateness`, `rto`, `schemes` |
//! | What do a table and a program cost? | `memory`, `scale`, `idle`, `plan`, `inspect`, `exporter`, `offload` |
//! | What does it cost to send events on, and to keep those of a fleet? | `records`, `fleet` |
//! | What is measured? | `inputs`, `plane`, `real`, `peers`, `batch` |
//! | How is it shown? | `report`, `plot`, `machine` |

mod batch;
mod before;
mod bulk;
mod cores;
mod expire;
mod exporter;
#[cfg(feature = "kafka")]
mod fleet;
mod gateway;
mod idle;
mod inputs;
mod insert;
mod inspect;
mod lateness;
mod machine;
mod memory;
mod offload;
mod path;
mod peers;
mod plan;
mod plane;
mod plot;
mod real;
mod records;
mod report;
mod rto;
mod scale;
mod schemes;
mod step;
mod tagged;
mod touch;

use std::{
    path::PathBuf,
    process::{Command, ExitCode},
};

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};

use crate::report::Report;

/// A size or a time: `full`, or in a debug build the least with which a benchmark still runs.
/// Figures of a debug build mean nothing; `cargo xtask test` runs each benchmark that way only to
/// see whether it works.
const fn size<T: Copy>(full: T, least: T) -> T {
    if cfg!(debug_assertions) { least } else { full }
}

/// Measures twheel's data plane on this machine.
#[derive(Parser)]
#[command(name = "cargo xtask bench", bin_name = "cargo xtask bench")]
struct Cli {
    /// All of them, one after the other, where none is named
    #[command(subcommand)]
    bench: Option<Bench>,

    /// A JSON object a line instead of a table, and no page
    #[arg(long, global = true)]
    json: bool,

    /// Where pages and plots are written to, instead of docs/bench
    #[arg(long, global = true, value_name = "DIR")]
    out: Option<PathBuf>,
}

#[derive(Subcommand)]
enum Bench {
    /// Nanoseconds a packet, beside the least that a flow table can cost
    Touch {
        /// Runs of each program at each number of flows
        #[arg(long, default_value_t = size(151, 1), value_parser = clap::value_parser!(u32).range(1..=10_000))]
        rounds: u32,
    },
    /// Nanoseconds of what matters most, beside an earlier object of the benches
    Before {
        /// That object: target/bpf/bpfel-unknown-none/release/bench of another checkout, with the same layout
        object: PathBuf,
        /// Runs of each
        #[arg(long, default_value_t = size(101, 1), value_parser = clap::value_parser!(u32).range(1..=10_000))]
        rounds: u32,
    },
    /// Nanoseconds of a new flow, beside a bare insertion into the kernel's hash
    Insert {
        /// Fillings of the table from half to full
        #[arg(long, default_value_t = size(15, 1), value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
    },
    /// Nanoseconds of a visit and of an eviction with its event, beside the kernel's hash
    Step {
        /// Lives of the whole table
        #[arg(long, default_value_t = size(5, 1), value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
    },
    /// Nanoseconds added to a packet that is forwarded, beside what nf_conntrack adds
    Path {
        /// Runs through each gateway at each number of flows
        #[arg(long, default_value_t = size(9, 1), value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
    },
    /// CPU time of watching a capture that is replayed, beside a flow exporter's
    Exporter {
        /// Replays to each
        #[arg(long, default_value_t = size(7, 1), value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
    },
    /// What stepping live flows takes of a CPU, beside sweeps of the same precision and timers of the kernel
    Expire,
    /// Two CPUs that touch the same flows, beside flows of their own
    Cores {
        /// Rounds at each number of flows
        #[arg(long, default_value_t = size(31, 1), value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rounds: u32,
    },
    /// Bytes a flow: what the kernel charges for all maps; and how long a large table takes to load
    Memory,
    /// What `twheel plan` predicts, beside what steppers then take
    Plan,
    /// What it takes to look at a million flows from the command line
    Inspect,
    /// What programs save that hand over the timeouts of their connections, and what that takes
    Offload,
    /// Nanoseconds of an event as a record that leaves the host
    Records,
    /// Bytes of a fleet's events in ClickHouse and on Kafka, and what sending and inserting them costs
    #[cfg(feature = "kafka")]
    Fleet,
    /// What retransmission timers cost the steppers
    Rto,
    /// How late flows expire while both CPUs have all the packets that they can take
    Lateness {
        /// Seconds over which flows begin, and over which they expire
        #[arg(long, default_value_t = size(60, 2), value_parser = clap::value_parser!(u32).range(1..=600))]
        seconds: u32,
    },
    /// What a program costs that has nothing to do, and what is left of flows that are gone
    Idle {
        /// Seconds in which nothing is to happen
        #[arg(long, default_value_t = size(60, 1), value_parser = clap::value_parser!(u32).range(1..=3600))]
        seconds: u32,
        /// Flows that expire, of which the second half is to leave nothing
        #[arg(long, default_value_t = size(20, 4) * idle::ROUND, value_parser = clap::value_parser!(u32).range(i64::from(2 * idle::ROUND)..=100_000_000))]
        flows: u32,
    },
    /// Ten million flows: loaded, begun, touched, expired, and the memory for all that
    Scale {
        /// How many instead
        #[arg(long, default_value_t = size(10_000_000, 100_000), value_parser = clap::value_parser!(u32).range(100_000..=10_000_000))]
        flows: u32,
    },
    /// Nanoseconds and bytes of the paper's seven schemes on the host, beside two crates and the
    /// design of Linux's timers; no root
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

/// All benchmarks that run by default, without options.
const ALL: [&str; 17] = [
    "touch", "insert", "expire", "step", "path", "exporter", "memory", "lateness", "scale", "idle",
    "cores", "plan", "inspect", "records", "rto", "offload", "schemes",
];

fn run(cli: &Cli) -> Result<()> {
    ensure!(
        !cfg!(debug_assertions) || cli.json || cli.out.is_some(),
        "a debug build has no figures for docs/bench: run `cargo xtask bench`, or give --out"
    );
    let docs = || concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/bench").into();
    let out = cli.out.clone().unwrap_or_else(docs);
    let mut report = Report::new(cli.json, out)?;
    match &cli.bench {
        Some(bench) => one(bench, &mut report),
        None => ALL.into_iter().try_for_each(|name| alone(name, cli)),
    }
}

/// Runs a benchmark in a process of its own, because some pin themselves to a CPU and stay there.
fn alone(name: &str, cli: &Cli) -> Result<()> {
    let mut command = Command::new(std::env::current_exe()?);
    command.arg(name);
    if cli.json {
        command.arg("--json");
    }
    if let Some(out) = &cli.out {
        command.arg("--out").arg(out);
    }
    let status = command.status().context("cannot start a bench")?;
    ensure!(status.success(), "the bench {name} has failed");
    Ok(())
}

fn one(bench: &Bench, report: &mut Report) -> Result<()> {
    if !matches!(bench, Bench::Schemes(_)) {
        twheel::host::check()?;
    }
    report.begin(bench.name(), command(bench));
    report.say(&machine::describe());
    if cfg!(debug_assertions) {
        report.say("A debug build, with the least sizes: its figures mean nothing.");
    }
    match *bench {
        // Writes its own page.
        Bench::Schemes(ref options) => return schemes::bench(options, report),
        // Prints its results and has no page: the object that it compares with is not from this
        // tree.
        Bench::Before { ref object, rounds } => return before::bench(object, rounds, report),
        Bench::Touch { rounds } => touch::bench(rounds, report),
        Bench::Insert { rounds } => insert::bench(rounds, report),
        Bench::Step { rounds } => step::bench(rounds, report),
        Bench::Path { rounds } => path::bench(rounds, report),
        Bench::Exporter { rounds } => exporter::bench(rounds, report),
        Bench::Expire => expire::bench(report),
        Bench::Cores { rounds } => cores::bench(rounds, report),
        Bench::Memory => memory::bench(report),
        Bench::Plan => plan::bench(report),
        Bench::Inspect => inspect::bench(report),
        Bench::Offload => offload::bench(report),
        Bench::Records => records::bench(report),
        #[cfg(feature = "kafka")]
        Bench::Fleet => fleet::bench(report),
        Bench::Rto => rto::bench(report),
        Bench::Lateness { seconds } => lateness::bench(seconds, report),
        Bench::Idle { seconds, flows } => idle::bench(seconds, flows, report),
        Bench::Scale { flows } => scale::bench(flows, report),
    }?;
    report.end()
}

/// The command line that repeats this measurement, wherever the page is written.
fn command(bench: &Bench) -> String {
    let given: Vec<_> = std::env::args().skip(1).collect();
    let mut given = given.iter().map(String::as_str);
    let mut command = format!("cargo xtask bench {}", bench.name());
    while let Some(argument) = given.next() {
        match argument {
            "--out" => drop(given.next()),
            _ if argument == bench.name() || argument.starts_with("--out=") => {}
            _ => {
                command.push(' ');
                command.push_str(argument);
            }
        }
    }
    command
}

impl Bench {
    fn name(&self) -> &'static str {
        match self {
            Self::Touch { .. } => "touch",
            Self::Before { .. } => "before",
            Self::Insert { .. } => "insert",
            Self::Step { .. } => "step",
            Self::Path { .. } => "path",
            Self::Exporter { .. } => "exporter",
            Self::Expire => "expire",
            Self::Cores { .. } => "cores",
            Self::Memory => "memory",
            Self::Plan => "plan",
            Self::Inspect => "inspect",
            Self::Offload => "offload",
            Self::Records => "records",
            #[cfg(feature = "kafka")]
            Self::Fleet => "fleet",
            Self::Rto => "rto",
            Self::Lateness { .. } => "lateness",
            Self::Idle { .. } => "idle",
            Self::Scale { .. } => "scale",
            Self::Schemes(_) => "schemes",
        }
    }
}
