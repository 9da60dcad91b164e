//! Removing pins, and what they hold.

use std::{fs, os::fd::AsFd, path::Path};

use anyhow::{Context, Result};
use nix::fcntl::FlockArg;

use super::{
    access::try_lock,
    parts::{Part, parts},
    path::{entries, name, root},
};
use crate::{bpf, clsact};

/// Detaches a link, if that is what is pinned there, before its pin goes: of one that is merely unpinned the kernel lets go a
/// moment later, and whoever attaches next would find its place taken, or count packets twice.
pub(super) fn detach_link(pin: &Path) {
    // A link whose interface is gone, or no link at all: without its pin nothing is left of it.
    let _ = bpf::open(pin).and_then(|link| bpf::detach(link.as_fd()));
}

/// Removes the pins of a part. Its filters are gone with its interfaces if it is gone.
pub(super) fn remove_part(part: &Part) -> Result<()> {
    part.within(|| clear_directory(&part.path), || clear_pins(&part.path))?;
    let path = &part.path;
    fs::remove_dir(path).with_context(|| format!("cannot remove {}", path.display()))
}

/// Removes all that is in the directory of an instance, or of a part.
pub(super) fn clear_directory(path: &Path) -> Result<()> {
    for part in parts(path)? {
        remove_part(&part)?;
    }
    clsact::let_go_of_all(path)?;
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
    // The directories above go with the last instance, unless another is just starting.
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
