//! Picks the eBPF objects that the library carries: those that `cargo xtask` has just built, else the
//! committed ones, so that a plain `cargo build` needs no compiler for the BPF target.

use std::{env, fs, path::PathBuf};

fn main() {
    take("TWHEEL_BPF_OBJECT", "twheel.bpf.o");
    take("TWHEEL_PROBE_OBJECT", "probe.bpf.o");
}

fn take(variable: &str, name: &str) {
    println!("cargo::rerun-if-env-changed={variable}");
    let object = env::var_os(variable).map_or_else(
        || PathBuf::from("../twheel-ebpf/prebuilt").join(name),
        PathBuf::from,
    );
    println!("cargo::rerun-if-changed={}", object.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    if let Err(error) = fs::copy(&object, out.join(name)) {
        println!(
            "cargo::error=cannot copy the eBPF object {}: {error}",
            object.display()
        );
    }
}
