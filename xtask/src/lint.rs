//! `cargo xtask lint`.

use anyhow::Result;

use crate::sh::{self, say};

/// Checks formatting, lints and documentation; all warnings count.
pub fn lint() -> Result<()> {
    say!("Checking formatting, lints and documentation; this usually takes 60 s the first time.");
    let cargo = |args: &str| {
        let mut cargo = sh::cargo();
        sh::run(
            cargo
                .args(args.split(' '))
                .env("RUSTDOCFLAGS", "-Dwarnings"),
        )
    };
    cargo("fmt --all --check")?;
    cargo("clippy --quiet --workspace --exclude twheel-ebpf --all-targets -- -Dwarnings")?;
    // Apart from the host crates, with which it would share features. For the host, since the
    // compiler for the BPF target may well come without clippy; the code is the same.
    cargo("clippy --quiet -p twheel-ebpf -- -Dwarnings")?;
    cargo("doc --quiet --workspace --exclude twheel-ebpf --no-deps")
}
