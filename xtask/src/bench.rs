//! `cargo xtask bench`.

use std::process::Command;

use anyhow::Result;

use crate::{
    fleet_tools, run, setup,
    sh::{self, say},
};

/// Runs one benchmark, or all.
pub fn bench(args: &[String]) -> Result<()> {
    // Help, and benches on the host alone, need no packages, no root, and no BPF object built from
    // these sources.
    let is_simple =
        |arg: &String| ["schemes", "ipfix", "help", "--help", "-h"].contains(&arg.as_str());
    if args.iter().any(is_simple) {
        say!("Building the bench; this usually takes 90 s the first time.");
        let mut cargo = sh::cargo();
        let build = "build --quiet --release -p twheel-bench";
        sh::run(cargo.args(build.split(' ')))?;
        let mut bench = Command::new(sh::target("release/twheel-bench"));
        return sh::exec(bench.args(args));
    }
    setup::benches()?;
    setup::kafka()?;
    let mut built = run::release_whole(&["twheel", "twheel-bench"])?;
    built.fleet_tools = fleet_tools::install();
    sh::exec(sh::as_root(sh::target("release/twheel-bench"), built.env())?.args(args))
}
