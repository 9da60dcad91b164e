//! `cargo xtask bench`.

use anyhow::Result;

use crate::{run, setup, sh};

/// Runs one benchmark.
pub fn bench(name: &str, args: &[String]) -> Result<()> {
    setup::lab()?;
    let built = run::build(Some("twheel-bench"))?;
    sh::exec(
        sh::as_root(sh::target("release/twheel-bench"), built.env())?
            .arg(name)
            .args(args),
    )
}
