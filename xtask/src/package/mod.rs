//! `cargo xtask package`: deb and rpm packages of the static programs.
//!
//! | question | file |
//! |---|---|
//! | Which files are in a package? | `tree.rs` |
//! | What is around them? | `deb.rs`, `rpm.rs`; scripts and metadata: `dist/debian`, `dist/rpm` |
//! | Do they install, upgrade and go? | `roots.rs` |

mod deb;
mod roots;
mod rpm;
mod tree;

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, ensure};
use clap::Args;

use crate::{
    setup,
    sh::{self, say},
    statics::{self, Arch},
};

/// One sentence for lists of packages.
const SUMMARY: &str = "Tracks network flows in the kernel and reports how they end";
/// A paragraph for whoever thinks about installing it; lines as they are shown.
const DESCRIPTION: [&str; 4] = [
    "An eBPF program at XDP or TCX notes each packet of a TCP connection (UDP and",
    "ICMP too, if asked), and timing wheels find the flows that are idle: each is",
    "reported when it ends, and why. Flows stay tracked while the program is",
    "upgraded. It needs Linux 6.1 or newer.",
];
/// Who made the packages.
const MAINTAINER: &str = "The twheel authors <twheel@packages.invalid>";

/// What to do with packages.
#[derive(Args)]
pub struct Options {
    /// Only packages of this architecture
    #[arg(long, value_enum)]
    arch: Option<Arch>,
    /// Build everything twice, in different directories, and compare
    #[arg(long)]
    check: bool,
    /// Install, run, upgrade and purge them, in roots of Debian 12 and 13
    #[arg(long)]
    test: bool,
}

/// A package to be made.
struct Package<'a> {
    arch: Arch,
    /// The release of the package; another one is an upgrade.
    release: u32,
    /// The program in it.
    program: &'a Path,
    /// A program of this version that runs here, which prints man pages and completions.
    native: &'a Path,
    /// Where it is made.
    directory: &'a Path,
}

/// Builds packages, and checks them.
pub fn package(options: &Options) -> Result<()> {
    let archs = options.arch.map_or(Arch::ALL.to_vec(), |arch| vec![arch]);
    for (_, made) in build(&archs, options.check)? {
        for package in made.packages {
            println!("{}", package.display());
        }
    }
    if options.test {
        roots::test(&releases(&statics::build(native())?)?)?;
    }
    Ok(())
}

/// What was made for an architecture.
pub struct Made {
    /// The program.
    pub program: PathBuf,
    /// The deb and the rpm.
    pub packages: [PathBuf; 2],
}

/// Builds programs and packages; twice if they are to be compared.
pub fn build(archs: &[Arch], check: bool) -> Result<Vec<(Arch, Made)>> {
    setup::packages()?;
    // It prints man pages for the others.
    let printing = statics::build(native())?;
    let out = sh::target("packages");
    let mut all = Vec::new();
    for arch in archs.iter().copied() {
        if check {
            statics::check(arch)?;
        }
        let program = match arch == native() {
            true => printing.clone(),
            false => statics::build(arch)?,
        };
        let package = |directory| Package {
            arch,
            release: 1,
            program: &program,
            native: &printing,
            directory,
        };
        let packages = make(&package(&out))?;
        if check {
            let again = out.join("again");
            compare(&packages, &make(&package(&again))?)?;
            fs::remove_dir_all(&again).context("cannot remove the second packages")?;
            say!("{}: packages made twice are the same.", arch.name());
        }
        let [deb, rpm] = &packages;
        deb::lint(deb)?;
        rpm::lint(rpm)?;
        all.push((arch, Made { program, packages }));
    }
    Ok(all)
}

/// Fails unless packages are the same, byte for byte.
fn compare(packages: &[PathBuf; 2], again: &[PathBuf; 2]) -> Result<()> {
    for (first, second) in packages.iter().zip(again) {
        ensure!(
            fs::read(first)? == fs::read(second)?,
            "{} and {} differ",
            first.display(),
            second.display()
        );
    }
    Ok(())
}

/// A root of a release of Debian, which is made once and must not be changed.
pub use roots::base as root_of;

/// A deb for this machine, and one that upgrades it.
pub fn both_releases() -> Result<[PathBuf; 2]> {
    setup::packages()?;
    let [[first, _], [later, _]] = releases(&statics::build(native())?)?;
    Ok([first, later])
}

/// The packages for this machine, and those that upgrade them.
fn releases(program: &Path) -> Result<[[PathBuf; 2]; 2]> {
    let out = sh::target("packages");
    let release = |release: u32, directory: &Path| {
        make(&Package {
            arch: native(),
            release,
            program,
            native: program,
            directory,
        })
    };
    Ok([release(1, &out)?, release(2, &out.join("later"))?])
}

/// This machine's architecture.
fn native() -> Arch {
    match cfg!(target_arch = "aarch64") {
        true => Arch::Aarch64,
        false => Arch::X86_64,
    }
}

/// Makes the deb and the rpm.
fn make(package: &Package<'_>) -> Result<[PathBuf; 2]> {
    fs::create_dir_all(package.directory)
        .with_context(|| format!("cannot make {}", package.directory.display()))?;
    Ok([deb::make(package)?, rpm::make(package)?])
}

/// The version of twheel.
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}
