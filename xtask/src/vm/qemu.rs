//! QEMU: the one that is installed, or one that is unpacked into the cache.

use std::{
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::Result;

use super::{
    arch::Arch,
    archive::{Archive, this_suite},
};
use crate::{
    apt,
    sh::{self, say},
};

/// The directories of its firmware, below its root.
const FIRMWARE: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];
const MODULES: &str = "usr/lib/x86_64-linux-gnu/qemu";

/// A QEMU installation.
pub struct Qemu {
    /// The directory that it is unpacked in, if it is not the installed one.
    root: Option<PathBuf>,
}

impl Qemu {
    /// Finds QEMU for an architecture, or installs it. If its package cannot be installed without
    /// removing others, unpacks it below `cache` with all that it depends on.
    pub fn new(archive: &Archive, arch: Arch, cache: &Path) -> Result<Self> {
        let package = package(arch);
        let root = cache.join(package);
        if Self::is_unpacked(arch, cache) {
            return Ok(Self { root: Some(root) });
        }
        if !sh::which(arch.qemu()).is_empty() {
            return Ok(Self { root: None });
        }
        let Err(error) = apt::install(&[package], "1 min") else {
            return Ok(Self { root: None });
        };
        say!(
            "{error:#}; unpacking {package} into {} instead.",
            root.display()
        );
        archive.unpack_all(&[package], (Arch::Amd64, &this_suite()?), &root)?;
        Ok(Self { root: Some(root) })
    }

    /// Whether it was unpacked below `cache`: then it need not be installed.
    pub fn is_unpacked(arch: Arch, cache: &Path) -> bool {
        cache.join(package(arch)).exists()
    }

    /// Appends the program that emulates an architecture to a command.
    pub fn append_to(&self, command: &mut Command, arch: Arch) {
        let Some(root) = &self.root else {
            command.arg(arch.qemu());
            return;
        };
        // With its own loader, libraries and modules.
        let libraries = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
        let libraries = libraries.map(|it| root.join(it).display().to_string());
        command
            .env("QEMU_MODULE_DIR", root.join(MODULES))
            .arg(root.join("lib64/ld-linux-x86-64.so.2"))
            .args(["--library-path", &libraries.join(":")])
            .arg(root.join("usr/bin").join(arch.qemu()));
        for firmware in FIRMWARE {
            command.arg("-L").arg(root.join(firmware));
        }
    }
}

/// The Debian package that emulates an architecture.
fn package(arch: Arch) -> &'static str {
    match arch {
        Arch::Amd64 => "qemu-system-x86",
        Arch::Arm64 => "qemu-system-arm",
    }
}
