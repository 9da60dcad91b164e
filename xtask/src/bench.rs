//! `cargo xtask bench`.

use std::process::Command;

use anyhow::Result;

use crate::{
    run, setup,
    sh::{self, say},
};

/// Runs one benchmark, or all.
pub fn bench(args: &[String]) -> Result<()> {
    // On the host alone: neither root nor a BPF object.
    if args.iter().any(|arg| arg == "schemes") {
        say!("Building the bench; this usually takes 90 s the first time.");
        let mut cargo = sh::cargo();
        let build = "build --quiet --release -p twheel-tests --bin twheel-bench";
        sh::run(cargo.args(build.split(' ')))?;
        let mut bench = Command::new(sh::target("release/twheel-bench"));
        return sh::exec(bench.args(args));
    }
    setup::benches()?;
    let built = run::build(Some("twheel-bench"))?;
    sh::exec(sh::as_root(sh::target("release/twheel-bench"), built.env())?.args(args))
}
