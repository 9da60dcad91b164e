//! Picks the eBPF objects that the library carries: those that `cargo xtask` has just built, else the
//! committed ones, so that a plain `cargo build` needs no compiler for the BPF target. And notes what
//! `twheel version --verbose` prints.

use std::{env, fs, path::PathBuf, process::Command};

use sha2::{Digest, Sha256};

/// The commit of these sources, if they came as an archive: git replaces what is in it.
const ARCHIVED: &str = "commit.txt";

fn main() {
    let object = take("TWHEEL_BPF_OBJECT", "twheel.bpf.o");
    take("TWHEEL_PROBE_OBJECT", "probe.bpf.o");
    let hash: String = Sha256::digest(object)
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    println!("cargo::rustc-env=TWHEEL_OBJECT_SHA256={hash}");
    println!("cargo::rustc-env=TWHEEL_COMMIT={}", commit());
    let target = env::var("TARGET").expect("cargo sets TARGET");
    println!("cargo::rustc-env=TWHEEL_TARGET={target}");
    let mut features: Vec<_> = env::vars()
        .filter_map(|(key, _)| Some(key.strip_prefix("CARGO_FEATURE_")?.to_lowercase()))
        .map(|feature| feature.replace('_', "-"))
        .collect();
    features.sort();
    println!("cargo::rustc-env=TWHEEL_FEATURES={}", features.join(", "));
}

fn take(variable: &str, name: &str) -> Vec<u8> {
    println!("cargo::rerun-if-env-changed={variable}");
    let object = env::var_os(variable).map_or_else(
        || PathBuf::from("../twheel-ebpf/prebuilt").join(name),
        PathBuf::from,
    );
    println!("cargo::rerun-if-changed={}", object.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let taken =
        fs::read(&object).and_then(|bytes| fs::write(out.join(name), &bytes).map(|()| bytes));
    taken.unwrap_or_else(|error| {
        println!(
            "cargo::error=cannot copy the eBPF object {}: {error}",
            object.display()
        );
        Vec::new()
    })
}

/// The commit of these sources: as `TWHEEL_COMMIT` says, or the archive that they came in, or git.
fn commit() -> String {
    println!("cargo::rerun-if-env-changed=TWHEEL_COMMIT");
    println!("cargo::rerun-if-changed={ARCHIVED}");
    let given = env::var("TWHEEL_COMMIT").ok();
    let archived = fs::read_to_string(ARCHIVED).unwrap_or_default();
    let archived =
        Some(archived.trim().to_owned()).filter(|it| !it.is_empty() && !it.contains('$'));
    // Each commit would build the library again, for which those who develop need not wait.
    let is_release = env::var("PROFILE").is_ok_and(|it| it == "release");
    let from_git = || {
        let head = git(&["rev-parse", "HEAD"]).filter(|_| is_release)?;
        // Written whenever another commit is checked out.
        if let Some(log) = git(&["rev-parse", "--git-path", "logs/HEAD"])
            && fs::exists(&log).is_ok_and(|exists| exists)
        {
            println!("cargo::rerun-if-changed={log}");
        }
        Some(head)
    };
    let known = given.or(archived).or_else(from_git);
    known.unwrap_or_else(|| "unknown".to_owned())
}

fn git(args: &[&str]) -> Option<String> {
    let output = Command::new("git").args(args).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    Some(text.trim().to_owned()).filter(|_| output.status.success())
}
