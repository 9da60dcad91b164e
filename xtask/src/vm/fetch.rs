//! Fetches the kernels that `cargo xtask vm-test` boots.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail};

use super::{
    arch::Arch,
    archive::Archive,
    kernels::{self, Kernel, Selection},
    qemu::Qemu,
};
use crate::{setup, toolchain};

/// The directory of what is fetched.
pub fn cache() -> Result<PathBuf> {
    let cache = toolchain::cache()?.join("vm");
    fs::create_dir_all(&cache).with_context(|| format!("cannot make {}", cache.display()))?;
    Ok(cache)
}

/// Fetches all that `vm-test --ci` boots, and QEMU: nothing is built. What is there already is not
/// fetched again.
pub fn fetch() -> Result<()> {
    setup::vm()?;
    let cache = cache()?;
    let archive = Archive::new(&cache)?;
    kernels(&archive, &Selection::Ci, &cache)?;
    Qemu::new(&archive, Arch::Amd64, &cache)?;
    Ok(())
}

/// Whether QEMU was unpacked before, so that it need not be installed.
pub fn has_qemu() -> bool {
    cache().is_ok_and(|cache| Qemu::is_unpacked(Arch::Amd64, &cache))
}

/// The chosen kernels, which are fetched if need be.
pub fn kernels(archive: &Archive, wanted: &Selection<'_>, cache: &Path) -> Result<Vec<Kernel>> {
    let names = archive.names()?;
    let releases = kernels::choose(&names, wanted);
    if releases.is_empty() {
        bail!("Debian has no such kernel; leave --kernel out to see which there are");
    }
    if matches!(wanted, Selection::Ci)
        && let Some([major, minor]) = kernels::missing(&releases)
    {
        bail!("the mirror has no whole kernel of {major}.{minor}, which is to be booted");
    }
    releases
        .into_iter()
        .map(|release| Kernel::fetch(archive, &names, release, cache))
        .collect()
}
