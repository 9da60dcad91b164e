//! `cargo xtask vm-test`: boots Debian's kernels in virtual machines, and runs checks there.

mod arch;
mod archive;
mod changed;
mod fetch;
mod kernels;
mod machine;
mod qemu;
mod report;
mod script;
mod system;

use std::{
    collections::VecDeque,
    fs,
    path::{Path, PathBuf},
    sync::Mutex,
    thread,
    time::Instant,
};

use anyhow::{Context, Result, ensure};

use self::{
    arch::Arch,
    archive::{Archive, this_suite},
    kernels::{Expected, Kernel, Selection},
    machine::Programs,
    qemu::Qemu,
    report::Outcome,
    script::Extent,
};
pub use self::{
    archive::mirror,
    changed::is_needed,
    fetch::{fetch, has_qemu},
};
use crate::{binaries, cross, run, setup, sh::say};

/// Packages of the arm64 machine.
const USERLAND: [&str; 8] = [
    "bpftool",
    "busybox-static",
    "iproute2",
    "kmod",
    "libgcc-s1",
    "libteam-utils",
    "nftables",
    "wireguard-tools",
];
/// Machines at a time, by default.
const JOBS: usize = 2;
/// How many lines of a failed machine's log are shown.
const TAIL: usize = 60;

/// Which kernels to test, and how many at a time.
pub struct Options {
    /// Only kernels whose names begin with this.
    pub kernel: Option<String>,
    /// Only the kernels that each CI run boots, with fewer checks.
    pub ci: bool,
    /// Only if something has changed that faces the kernel.
    pub changed: bool,
    /// Only the checks of this name.
    pub check: Option<String>,
    /// Machines at a time.
    pub jobs: Option<usize>,
    /// Whole Debian systems, and the package in them.
    pub system: bool,
}

impl Options {
    /// The whole matrix.
    pub fn all() -> Self {
        Self {
            kernel: None,
            ci: false,
            changed: false,
            check: None,
            jobs: None,
            system: false,
        }
    }
}

/// Boots each chosen kernel, and reports the outcome. Writes the table if all kernels were chosen.
pub fn test(options: &Options) -> Result<()> {
    ensure!(
        cfg!(target_arch = "x86_64"),
        "vm-test runs on x86-64 alone, from where it emulates the others"
    );
    if options.system {
        return system::test();
    }
    if options.changed && !changed::is_needed() {
        return Ok(());
    }
    setup::vm()?;
    let cache = fetch::cache()?;
    let archive = Archive::new(&cache)?;
    let (wanted, extent) = match &options.kernel {
        _ if options.ci => (Selection::Ci, Extent::Short),
        Some(part) => (Selection::Named(part), Extent::Full),
        None => (Selection::All, Extent::Full),
    };
    let kernels = fetch::kernels(&archive, &wanted, &cache)?;
    let mut programs = vec![native(&archive, &cache)?];
    if kernels.iter().any(|it| it.release.arch == Arch::Arm64) {
        programs.push(arm64(&archive, &cache, &programs[0])?);
    }

    // CI's few machines share the CPUs, so that none starts late.
    let usual = if options.ci { kernels.len() } else { JOBS };
    let jobs = options.jobs.unwrap_or(usual).max(1);
    let outcomes = boot_all(&kernels, &programs, jobs, |kernel| {
        script::script(kernel, extent, options.check.as_deref())
    });
    let table = report::table(&outcomes);
    println!("{table}");
    if matches!(wanted, Selection::All) && options.check.is_none() {
        report::write(&table)?;
        for refused in [Expected::TooOld, Expected::Interleaves] {
            ensure!(
                outcomes.iter().any(|it| it.expected() == refused),
                "no kernel of the matrix is to be refused ({refused:?}): nothing has tested that twheel refuses one"
            );
        }
    }
    let failed: Vec<_> = outcomes.iter().filter(|it| !it.is_well()).collect();
    let names: Vec<_> = failed.iter().map(|it| it.name()).collect();
    ensure!(
        failed.is_empty(),
        "{} of {} kernels fail: {}; target/vm has a log of each",
        failed.len(),
        outcomes.len(),
        names.join(", ")
    );
    Ok(())
}

/// Boots several machines at a time. Returns their outcomes in the kernels' order.
fn boot_all(
    kernels: &[Kernel],
    programs: &[Programs],
    jobs: usize,
    script: impl Fn(&Kernel) -> String + Sync,
) -> Vec<Outcome> {
    let queue: Mutex<VecDeque<_>> = Mutex::new(kernels.iter().enumerate().collect());
    let outcomes = Mutex::new(Vec::new());
    let next = || queue.lock().ok()?.pop_front();
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| {
                while let Some((index, kernel)) = next() {
                    let outcome = boot(kernel, programs, &script(kernel));
                    if let Ok(mut outcomes) = outcomes.lock() {
                        outcomes.push((index, outcome));
                    }
                }
            });
        }
    });
    let mut outcomes = outcomes.into_inner().unwrap_or_else(|it| it.into_inner());
    outcomes.sort_by_key(|(index, _)| *index);
    outcomes.into_iter().map(|(_, outcome)| outcome).collect()
}

fn boot(kernel: &Kernel, programs: &[Programs], script: &str) -> Outcome {
    let name = &kernel.release.name;
    let mut outcome = Outcome::new(kernel);
    say!("{name}: booting");
    let begun = Instant::now();
    let log = programs
        .iter()
        .find(|it| it.arch == kernel.release.arch)
        .context("nothing was built for it")
        .and_then(|programs| {
            machine::boot(kernel, programs, script, |line| {
                if let Some(news) = outcome.read(line) {
                    say!("{name}: {news}");
                }
            })
        });
    if let Err(error) = &log {
        outcome.fail(format!("{error:#}"));
    }
    outcome.finish();
    say!(
        "{name}: {}, after {} s",
        outcome.result(),
        begun.elapsed().as_secs()
    );
    if let (false, Ok(log)) = (outcome.is_well(), log) {
        show_tail(name, &log);
    }
    outcome
}

/// Shows the end of a machine's log.
fn show_tail(name: &str, log: &Path) {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<_> = text.lines().collect();
    say!("{name}: the end of {}:", log.display());
    for line in &lines[lines.len().saturating_sub(TAIL)..] {
        eprintln!("    {line}");
    }
}

/// What of the tests is built for the machines.
pub fn selection() -> binaries::Selection {
    binaries::Selection::Tests(script::binaries().map(str::to_owned).collect())
}

/// What machines of this machine's architecture run: what `cargo xtask test` has built.
fn native(archive: &Archive, cache: &Path) -> Result<Programs> {
    let qemu = Qemu::new(archive, Arch::Amd64, cache)?;
    setup::kafka()?;
    let (built, compiled) = run::tests(&selection())?;
    let test = |name: &'static str| Ok((name, compiled.test(name)?.to_owned()));
    Ok(Programs {
        arch: Arch::Amd64,
        qemu,
        userland: PathBuf::from("/"),
        tests: script::binaries().map(test).collect::<Result<_>>()?,
        twheel: built.twheel,
        object: built.objects.twheel,
    })
}

/// Builds what arm64 machines run, and fetches the other things that they need.
fn arm64(archive: &Archive, cache: &Path, native: &Programs) -> Result<Programs> {
    let qemu = Qemu::new(archive, Arch::Arm64, cache)?;
    let suite = this_suite()?;
    let userland = cache.join(format!("userland-arm64-{suite}"));
    if !userland.exists() {
        say!("Fetching arm64's libraries with apt-get; this usually takes 1 min.");
        archive.unpack_all(&USERLAND, (Arch::Arm64, &suite), &userland)?;
    }
    let cross = cross::Cross::aarch64()?;
    let tests: Vec<_> = script::binaries().collect();
    Ok(Programs {
        arch: Arch::Arm64,
        qemu,
        userland,
        twheel: cross.twheel(&native.object)?,
        tests: cross.tests(&native.object, &tests)?,
        object: native.object.clone(),
    })
}
