//! Removes pins and what they hold.

use std::{fs, os::fd::AsFd, path::Path};

use anyhow::{Context, Result};
use nix::fcntl::FlockArg;

use super::{
    access::try_lock,
    parts::{Part, parts},
    path::{entries, name, root},
};
use crate::{bpf, clsact};

/// Detaches a BPF link, if the pin is one, before the pin is removed. If the pin were only removed,
/// the kernel would release the BPF link a moment later, and the next program to attach would find
/// the hook taken, or count packets twice.
pub(super) fn detach_link(pin: &Path) {
    // Fails for a BPF link whose interface no longer exists, and for a pin of something else:
    // removing those pins is enough.
    let _ = bpf::open(pin).and_then(|link| bpf::detach(link.as_fd()));
}

/// Removes the pins of a part. If its namespace no longer exists, neither do its interfaces and
/// their filters.
pub(super) fn remove_part(part: &Part) -> Result<()> {
    part.within(|| clear_directory(&part.path), || clear_pins(&part.path))?;
    let path = &part.path;
    fs::remove_dir(path).with_context(|| format!("cannot remove {}", path.display()))
}

/// Removes everything in the directory of an instance or a part.
pub(super) fn clear_directory(path: &Path) -> Result<()> {
    for part in parts(path)? {
        remove_part(&part)?;
    }
    clsact::detach_all(path)?;
    clear_pins(path)
}

fn clear_pins(path: &Path) -> Result<()> {
    let mut entries = entries(path)?;
    entries.sort_by_key(|entry| !name(entry).contains('@'));
    for entry in entries {
        if name(&entry).contains('@') {
            detach_link(&entry);
        }
        fs::remove_file(&entry).with_context(|| format!("cannot remove {}", entry.display()))?;
    }
    Ok(())
}

/// Removes the directory of an instance.
pub(super) fn remove_directory(path: &Path) -> Result<()> {
    clear_directory(path)?;
    fs::remove_dir(path).with_context(|| format!("cannot remove {}", path.display()))?;
    // The directories above are removed with the last instance, unless another one is just
    // starting.
    let Ok(Some(_lock)) = try_lock(&root(), FlockArg::LockExclusiveNonblock) else {
        return Ok(());
    };
    for parent in [path.parent(), path.parent().and_then(Path::parent)] {
        if parent.is_none_or(|parent| fs::remove_dir(parent).is_err()) {
            break;
        }
    }
    Ok(())
}
