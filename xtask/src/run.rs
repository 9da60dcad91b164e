//! `cargo xtask run`, and functions for the other commands that run twheel.

use std::{
    ffi::OsStr,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use crate::{
    binaries::{self, Compiled, HOST, Selection},
    ebpf::{self, Objects},
    fleet_tools, kubernetes_tools, prometheus, setup,
    sh::{self, say},
};

/// The program `twheel` and what it is built around, and what tests beside it need.
pub struct Built {
    /// The command `twheel`.
    pub twheel: PathBuf,
    /// The eBPF objects.
    pub objects: Objects,
    /// What the tests of a fleet need, if that was asked for and is there.
    pub fleet_tools: Option<PathBuf>,
    /// What the tests of the manifests for Kubernetes need, if that was asked for and is there.
    pub kubernetes_tools: Option<PathBuf>,
    /// Prometheus, if that was asked for and is there.
    pub prometheus: Option<PathBuf>,
}

impl Built {
    fn new(twheel: &Path, objects: Objects) -> Self {
        Self {
            twheel: twheel.to_owned(),
            objects,
            fleet_tools: None,
            kubernetes_tools: None,
            prometheus: None,
        }
    }

    /// The environment variables by which labs, tests and benchmarks find them.
    pub fn env(&self) -> Vec<(&str, &OsStr)> {
        let mut env = vec![
            ("TWHEEL_BIN", self.twheel.as_os_str()),
            ("TWHEEL_BPF_OBJECT", self.objects.twheel.as_os_str()),
            ("TWHEEL_PROBE_OBJECT", self.objects.probe.as_os_str()),
            ("TWHEEL_BENCH_OBJECT", self.objects.bench.as_os_str()),
            ("TWHEEL_PEERS_OBJECT", self.objects.peers.as_os_str()),
        ];
        for (name, path) in [
            (fleet_tools::VARIABLE, &self.fleet_tools),
            (kubernetes_tools::VARIABLE, &self.kubernetes_tools),
            (prometheus::VARIABLE, &self.prometheus),
        ] {
            env.extend(path.iter().map(|path| (name, path.as_os_str())));
        }
        env
    }
}

/// Builds what tests and labs run: the programs of a debug build, with the export to Kafka. Needs
/// what [`setup::kafka`] installs.
pub fn tests(selection: &Selection) -> Result<(Built, Compiled)> {
    let objects = ebpf::objects()?;
    say!(
        "Building twheel and what tests it; this usually takes 4 min the first time, on two CPUs."
    );
    let compiled = binaries::build(selection, &objects)?;
    let twheel = match selection {
        // It runs nothing but itself.
        Selection::Package(_) => sh::target("debug/twheel"),
        _ => compiled.program("twheel")?.to_owned(),
    };
    Ok((Built::new(&twheel, objects), compiled))
}

/// Builds the program that users run, without the export to Kafka.
pub fn release() -> Result<Built> {
    release_of("-p twheel-user")
}

/// Builds programs of the workspace in release mode, with the export to Kafka. Needs what
/// [`setup::kafka`] installs.
pub fn release_whole(programs: &[&str]) -> Result<Built> {
    let programs = programs.iter().map(|program| format!(" --bin {program}"));
    release_of(&format!("{HOST}{}", programs.collect::<String>()))
}

fn release_of(what: &str) -> Result<Built> {
    let objects = ebpf::objects()?;
    say!("Building twheel; this usually takes 4 min the first time, on two CPUs.");
    let mut cargo = sh::cargo();
    cargo
        .args(["build", "--quiet", "--release"])
        .args(what.split(' '))
        .envs(objects.build_env());
    sh::run(&mut cargo)?;
    Ok(Built::new(&sh::target("release/twheel"), objects))
}

/// Builds the lab, as the tests have it, and returns its path.
pub fn lab() -> Result<(Built, PathBuf)> {
    setup::kafka()?;
    let (built, compiled) = tests(&Selection::Tests(Vec::new()))?;
    let lab = compiled.program("twheel-lab")?.to_owned();
    Ok((built, lab))
}

/// Runs twheel, or its lab: `cargo xtask run`.
pub fn run(args: &[String]) -> Result<()> {
    let has = |name| args.iter().any(|arg| arg == name);
    if has("--help") || has("-h") {
        return sh::exec(Command::new(release()?.twheel).arg("run").args(args));
    }
    // Fail before the build, which takes minutes.
    sh::require_root()?;
    if has("--iface") || args.iter().any(|arg| arg.starts_with("--iface=")) {
        setup::bpffs()?;
        return sh::exec(sh::as_root(release()?.twheel, [])?.arg("run").args(args));
    }
    setup::lab()?;
    let (built, lab) = lab()?;
    sh::exec(sh::as_root(lab, built.env())?.args(args))
}
