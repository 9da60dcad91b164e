//! `cargo xtask run`, and functions for the other commands that run twheel.

use std::{ffi::OsStr, path::PathBuf, process::Command};

use anyhow::Result;

use crate::{
    ebpf::{self, Objects},
    fleet_tools, kubernetes_tools, prometheus, setup,
    sh::{self, say},
};

/// The built programs and objects.
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

/// Builds twheel around a fresh eBPF object, and one test binary if its name is given.
pub fn build(tests_bin: Option<&str>) -> Result<Built> {
    build_with(tests_bin, "")
}

/// The same, with the export to Kafka; installs what that takes.
pub fn build_whole(tests_bin: Option<&str>) -> Result<Built> {
    setup::kafka()?;
    build_with(tests_bin, " --features kafka")
}

fn build_with(tests_bin: Option<&str>, features: &str) -> Result<Built> {
    let built = Built {
        objects: ebpf::objects()?,
        twheel: sh::target("release/twheel"),
        fleet_tools: None,
        kubernetes_tools: None,
        prometheus: None,
    };
    say!("Building twheel; this usually takes 5 to 10 min the first time, on two CPUs.");
    let cargo = |args: &str| {
        let mut cargo = sh::cargo();
        cargo
            .args(["build", "--quiet", "--release"])
            .args(args.split(' '));
        cargo.env("TWHEEL_PROBE_OBJECT", &built.objects.probe);
        sh::run(cargo.env("TWHEEL_BPF_OBJECT", &built.objects.twheel))
    };
    cargo(&format!("-p twheel-user{features}"))?;
    if let Some(bin) = tests_bin {
        cargo(&format!("-p twheel-tests{features} --bin {bin}"))?;
    }
    Ok(built)
}

/// Runs twheel, or its lab: `cargo xtask run`.
pub fn run(args: &[String]) -> Result<()> {
    let has = |name| args.iter().any(|arg| arg == name);
    if has("--help") || has("-h") {
        return sh::exec(Command::new(build(None)?.twheel).arg("run").args(args));
    }
    // Fail before the build, which takes minutes.
    sh::require_root()?;
    if has("--iface") || args.iter().any(|arg| arg.starts_with("--iface=")) {
        setup::bpffs()?;
        return sh::exec(sh::as_root(build(None)?.twheel, [])?.arg("run").args(args));
    }
    setup::lab()?;
    let built = build(Some("twheel-lab"))?;
    sh::exec(sh::as_root(sh::target("release/twheel-lab"), built.env())?.args(args))
}
