//! `cargo xtask fleet`.

use anyhow::{Context, Result};
use clap::{Args, value_parser};

use crate::{
    binaries::Selection,
    fleet_tools, run, setup,
    sh::{self, say},
};

/// The program.
const LAB: &str = "twheel-fleet-lab";

/// How large a fleet, and for how long.
#[derive(Args)]
pub struct Options {
    /// Hosts, each a network namespace with a name of its own
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = value_parser!(u16).range(2..=200))]
    hosts: u16,
    /// Seconds of traffic
    #[arg(long, value_name = "N", default_value_t = 60, value_parser = value_parser!(u64).range(5..=3600))]
    seconds: u64,
    /// Connections that each host opens a second
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = value_parser!(u32).range(1..=200))]
    rate: u32,
}

/// Runs a fleet on this machine.
pub fn fleet(options: &Options) -> Result<()> {
    // Fail before the build, which takes minutes.
    sh::require_root()?;
    setup::lab()?;
    let tools = fleet_tools::install();
    let tools = tools.context("a fleet needs ClickHouse's engine and a broker")?;
    setup::kafka()?;
    let (mut built, compiled) = run::tests(&Selection::Tests(Vec::new()))?;
    built.fleet_tools = Some(tools);
    let directory = sh::target("fleet");
    let mut env = built.env();
    env.push(("TWHEEL_FLEET_DIR", directory.as_os_str()));
    say!(
        "Starting the fleet; this usually takes {} s.",
        options.seconds + 25 + 3 * u64::from(options.hosts) / 2
    );
    let mut lab = sh::as_root(compiled.program(LAB)?, env)?;
    lab.args(["--hosts", &options.hosts.to_string()]);
    lab.args(["--seconds", &options.seconds.to_string()]);
    lab.args(["--rate", &options.rate.to_string()]);
    sh::exec(&mut lab)
}
