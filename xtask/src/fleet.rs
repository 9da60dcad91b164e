//! `cargo xtask fleet`.

use anyhow::{Context, Result};

use crate::{
    fleet_tools, run, setup,
    sh::{self, say},
};

/// The program.
const LAB: &str = "twheel-fleet-lab";

/// Runs a fleet on this machine.
pub fn fleet(args: &[String]) -> Result<()> {
    // Fail before the build, which takes minutes.
    sh::require_root()?;
    setup::lab()?;
    let tools = fleet_tools::install();
    let tools = tools.context("a fleet needs ClickHouse's engine and a broker")?;
    let built = run::Built {
        fleet_tools: Some(tools),
        ..run::build_with_kafka(Some(LAB))?
    };
    let directory = sh::target("fleet");
    let mut env = built.env();
    env.push(("TWHEEL_FLEET_DIR", directory.as_os_str()));
    say!("Starting the fleet; this usually takes 2 min.");
    sh::exec(sh::as_root(sh::target("release").join(LAB), env)?.args(args))
}
