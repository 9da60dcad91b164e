//! Static programs: all that twheel needs in one file, which runs on every distribution.
//!
//! The same commit gives the same bytes in whichever directory it is built: no path of the machine
//! and no time gets into the program. [`check`] builds it twice and compares.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use clap::ValueEnum;

use crate::{
    ebpf::{self, Objects},
    setup,
    sh::{self, say},
    toolchain,
    zig::Zig,
};

/// What static programs have beside what every twheel has.
pub const FEATURES: &str = "kafka-static";

/// An architecture of static programs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub enum Arch {
    /// x86-64
    #[value(name = "x86_64")]
    X86_64,
    /// 64-bit ARM
    Aarch64,
}

impl Arch {
    /// All.
    pub const ALL: [Self; 2] = [Self::X86_64, Self::Aarch64];

    /// Its name in Rust, in RPM and in `uname -m`.
    pub fn name(self) -> &'static str {
        match self {
            Self::X86_64 => "x86_64",
            Self::Aarch64 => "aarch64",
        }
    }

    /// Its name in Debian.
    pub fn debian(self) -> &'static str {
        match self {
            Self::X86_64 => "amd64",
            Self::Aarch64 => "arm64",
        }
    }
}

/// A directory with the sources, and one to build in.
struct Place {
    sources: PathBuf,
    target: PathBuf,
}

/// Builds the program, around the eBPF objects of these sources.
pub fn build(arch: Arch) -> Result<PathBuf> {
    let here = Place {
        sources: sh::workspace().to_owned(),
        target: sh::target("static"),
    };
    build_in(&here, arch, &ebpf::objects()?)
}

/// Builds the program here, and again in another directory; fails if the two differ.
pub fn check(arch: Arch) -> Result<()> {
    let first = build(arch)?;
    let objects = ebpf::objects()?;
    // Another depth, too, and away from the first.
    let elsewhere = std::env::temp_dir().join(format!("twheel-again-{}/of/it", std::process::id()));
    let again = Place {
        sources: elsewhere.join("sources"),
        target: elsewhere.join("built"),
    };
    copy_sources(&again.sources)?;
    let compared = build_in(&again, arch, &objects).and_then(|second| {
        let [first, second] = [&first, &second].map(fs::read);
        ensure!(
            first? == second?,
            "two builds for {} in different directories differ: diffoscope on the two says where",
            arch.name()
        );
        Ok(())
    });
    if compared.is_ok() {
        let root = elsewhere.ancestors().nth(2).context("it is three deep")?;
        fs::remove_dir_all(root).context("cannot remove the second build")?;
        say!("{}: both builds are the same, byte for byte.", arch.name());
    }
    compared
}

/// Copies the files that git knows.
pub fn copy_sources(to: &Path) -> Result<()> {
    let files = sh::output(sh::git().args(["ls-files", "-z"]))?;
    for file in files.split('\0').filter(|it| !it.is_empty()) {
        let (from, to) = (sh::workspace().join(file), to.join(file));
        let directory = to.parent().context("files are in directories")?;
        fs::create_dir_all(directory)
            .and_then(|()| fs::copy(&from, &to))
            .with_context(|| format!("cannot copy {}", from.display()))?;
    }
    Ok(())
}

fn build_in(place: &Place, arch: Arch, objects: &Objects) -> Result<PathBuf> {
    setup::kafka()?;
    let zig = Zig::new(arch.name())?;
    let toolchain = toolchain::with_sources()?;
    say!(
        "Building a static twheel for {}; this usually takes 8 min the first time.",
        arch.name()
    );
    let triple = triple(arch);
    let mut flags = vec![
        "-Ctarget-feature=+crt-static".to_owned(),
        // Zig has the C library.
        "-Clink-self-contained=no".to_owned(),
        "-Cstrip=symbols".to_owned(),
    ];
    for (path, name) in toolchain.paths(&place.sources)? {
        flags.push(format!("--remap-path-prefix={path}={name}"));
    }
    flags.push(format!(
        "--remap-path-prefix={}=/built",
        place.target.display()
    ));
    let mut cargo = toolchain.cargo();
    sh::forget_xtask(&mut cargo);
    cargo
        .current_dir(&place.sources)
        .args([
            "build",
            "--quiet",
            "--locked",
            "--release",
            "-p",
            "twheel-user",
        ])
        .args(["--bin", "twheel", "--features", FEATURES])
        .args(["-Z", "build-std=std,panic_abort", "--target", &triple])
        .arg("--target-dir")
        .arg(&place.target)
        .env("CARGO_ENCODED_RUSTFLAGS", flags.join("\x1f"))
        .envs(objects.build_env())
        .env("TWHEEL_COMMIT", commit()?)
        .env("SOURCE_DATE_EPOCH", epoch()?);
    zig.set(&mut cargo, arch.name(), &place.target)?;
    sh::run(&mut cargo)?;
    Ok(place.target.join(triple).join("release/twheel"))
}

/// The target of static programs for an architecture.
pub fn triple(arch: Arch) -> String {
    format!("{}-unknown-linux-musl", arch.name())
}

/// The commit that is built, and whether files were changed since.
fn commit() -> Result<String> {
    let head = sh::output(sh::git().args(["rev-parse", "HEAD"]))?;
    let changed = sh::output(sh::git().args(["status", "--porcelain", "--untracked-files=no"]))?;
    Ok(match changed.trim().is_empty() {
        true => head.trim().to_owned(),
        false => format!("{}, and changes", head.trim()),
    })
}

/// The time of the commit, in seconds since 1970: the only time that gets into what is built.
pub fn epoch() -> Result<String> {
    let time = sh::output(sh::git().args(["log", "-1", "--format=%ct"]))?;
    Ok(time.trim().to_owned())
}
