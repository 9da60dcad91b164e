//! `cargo xtask build`: the program, for this machine or for another architecture.
//!
//! Builds the standard library of the other architecture as well, from the sources that come with a
//! rustup nightly or with Debian's rustc: so no server of rustup's is needed.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};
use clap::ValueEnum;
use serde_json::Value;

use crate::{
    ebpf, run, setup,
    sh::{self, say},
    statics::{self, Arch},
    toolchain,
};

/// An architecture to build for.
#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Target {
    /// This machine's
    Native,
    /// 64-bit ARM, with Debian's C library: runs on Debian 12 and newer
    Aarch64,
    /// x86-64, static: runs on every distribution
    #[value(name = "x86_64-musl")]
    X86_64Musl,
    /// 64-bit ARM, static
    Aarch64Musl,
}

/// Builds twheel and prints its path.
pub fn build(target: Target) -> Result<()> {
    let twheel = match target {
        Target::Native => run::release()?.twheel,
        Target::Aarch64 => {
            let object = ebpf::objects()?.twheel;
            Cross::aarch64()?.twheel(&object)?
        }
        Target::X86_64Musl => statics::build(Arch::X86_64)?,
        Target::Aarch64Musl => statics::build(Arch::Aarch64)?,
    };
    println!("{}", twheel.display());
    Ok(())
}

/// A compiler for another architecture.
pub struct Cross {
    triple: &'static str,
    linker: &'static str,
    /// `CARGO_TARGET_<TRIPLE>_LINKER`, the variable that names the linker.
    variable: &'static str,
    toolchain: toolchain::WithSources,
}

impl Cross {
    /// The compiler for 64-bit ARM.
    pub fn aarch64() -> Result<Self> {
        setup::aarch64()?;
        Ok(Self {
            triple: "aarch64-unknown-linux-gnu",
            linker: "aarch64-linux-gnu-gcc",
            variable: "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER",
            toolchain: toolchain::with_sources()?,
        })
    }

    /// The target directory, apart from the host's, which another compiler writes.
    fn dir(&self) -> PathBuf {
        sh::target("cross")
    }

    fn cargo(&self, command: &str, object: &Path) -> Command {
        let mut cargo = self.toolchain.cargo();
        cargo
            .args([command, "--quiet", "--release", "--target", self.triple])
            .args(["-Z", "build-std=std,panic_abort,test", "--target-dir"])
            .arg(self.dir())
            .env(self.variable, self.linker)
            .env("TWHEEL_BPF_OBJECT", object);
        cargo
    }

    /// Builds the command `twheel` around an eBPF object.
    pub fn twheel(&self, object: &Path) -> Result<PathBuf> {
        say!(
            "Building twheel for {}; this usually takes 4 min the first time.",
            self.triple
        );
        let mut cargo = self.cargo("build", object);
        sh::run(cargo.args(["-p", "twheel-user", "--bin", "twheel"]))?;
        Ok(self.dir().join(self.triple).join("release/twheel"))
    }

    /// Builds test binaries.
    pub fn tests(
        &self,
        object: &Path,
        names: &[&'static str],
    ) -> Result<Vec<(&'static str, PathBuf)>> {
        say!(
            "Building tests for {}; this usually takes 3 min the first time.",
            self.triple
        );
        let mut cargo = self.cargo("test", object);
        cargo.args(["-p", "twheel-tests"]);
        test_binaries(cargo, names)
    }
}

/// Runs a `cargo test` that builds binaries of twheel-tests, and returns their paths.
pub fn test_binaries(
    mut cargo: Command,
    names: &[&'static str],
) -> Result<Vec<(&'static str, PathBuf)>> {
    cargo.args(["--no-run", "--message-format=json"]);
    cargo.args(names.iter().flat_map(|name| ["--test", name]));
    let messages = sh::output(&mut cargo)?;
    let built: Vec<Value> = messages
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok())
        .collect();
    let path = |name: &'static str| {
        let message = built
            .iter()
            .find(|it| it["target"]["name"] == name && it["target"]["kind"][0] == "test");
        let path = message.and_then(|it| it["executable"].as_str());
        let path = path.with_context(|| format!("cargo has built no {name}"))?;
        Ok((name, PathBuf::from(path)))
    };
    names.iter().map(|name| path(name)).collect()
}
