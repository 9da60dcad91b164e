//! `cargo xtask man`.

use std::process::Command;

use anyhow::Result;

use crate::{
    run,
    sh::{self, say},
};

/// Writes the man pages into `target/man`.
pub fn man() -> Result<()> {
    let twheel = run::release()?.twheel;
    let pages = sh::target("man");
    sh::run(Command::new(twheel).args(["man", "--dir"]).arg(&pages))?;
    say!("Read them: man -l {}", pages.join("twheel.1").display());
    Ok(())
}
