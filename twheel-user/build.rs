//! Picks the eBPF object that the library carries: the one `cargo xtask` has just built, else the
//! committed one, so that a plain `cargo build` needs no compiler for the BPF target.

use std::{env, fs, path::PathBuf};

fn main() {
    println!("cargo::rerun-if-env-changed=TWHEEL_BPF_OBJECT");
    let object = env::var_os("TWHEEL_BPF_OBJECT").map_or_else(
        || PathBuf::from("../twheel-ebpf/prebuilt/twheel.bpf.o"),
        PathBuf::from,
    );
    println!("cargo::rerun-if-changed={}", object.display());
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    if let Err(error) = fs::copy(&object, out.join("twheel.bpf.o")) {
        println!(
            "cargo::error=cannot copy the eBPF object {}: {error}",
            object.display()
        );
    }
}
