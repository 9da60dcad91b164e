//! Who may use what is pinned, and which process has it locked.

use std::{
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, lchown},
    path::Path,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::{
    fcntl::{Flock, FlockArg, OFlag},
    unistd::{Gid, geteuid},
};

use super::path::{check_real, in_the_way, root};

/// Gives a group access to a directory or a pin; without a group, takes access from all but the
/// owner.
pub(super) fn permit(path: &Path, group: Option<Gid>) -> Result<()> {
    let mode = match (path.is_dir(), group) {
        (true, Some(_)) => 0o750,
        (true, None) => 0o700,
        (false, Some(_)) => 0o660,
        (false, None) => 0o600,
    };
    lchown(path, None, group.map(Gid::as_raw))
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .with_context(|| format!("cannot set the permissions of {}", path.display()))
}

/// Creates a directory unless it exists.
pub(super) fn make_directory(path: &Path, mode: u32) -> Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error)
            .with_context(|| format!("cannot create the pin directory {}", path.display())),
        _ => Ok(()),
    }
}

/// Creates an instance's directory and its parents.
pub(super) fn make_directories(path: &Path) -> Result<()> {
    make_directory(&root(), 0o755)?;
    make_directory(path.parent().unwrap_or(path), 0o755)?;
    make_directory(path, 0o700)?;
    check_ours(path)
}

/// Fails if others could control an instance's directory or one of its parents. A BPF file system
/// that was mounted by hand is writable for everybody, so what it contains need not be twheel's.
pub(super) fn check_ours(path: &Path) -> Result<()> {
    let is_below = |it: &&Path| it.starts_with(root());
    let mut directories: Vec<_> = path.ancestors().take_while(is_below).collect();
    directories.reverse();
    for directory in directories {
        let owner = match fs::symlink_metadata(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => {
                let found = found
                    .with_context(|| format!("cannot read the owner of {}", directory.display()))?;
                check_real(directory, &found)?;
                found
            }
        };
        if ![0, geteuid().as_raw()].contains(&owner.uid()) || owner.mode() & 0o022 != 0 {
            return in_the_way(format!(
                "{} belongs to user {} (mode {:o}), who could put anything there: run as that \
                 user, or remove it",
                directory.display(),
                owner.uid(),
                owner.mode() & 0o7777
            ));
        }
    }
    Ok(())
}

/// Opens a directory; fails for a symbolic link.
fn open_directory(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits())
        .open(path)
}

/// Looks for something so many times, with pauses of `pause`; `None` if it never finds it.
pub(super) fn retry<T>(
    tries: u32,
    pause: Duration,
    mut look: impl FnMut() -> Result<Option<T>>,
) -> Result<Option<T>> {
    for again in 0..tries {
        if again > 0 {
            thread::sleep(pause);
        }
        if let Some(found) = look()? {
            return Ok(Some(found));
        }
    }
    Ok(None)
}

/// Locks a pin directory; `None` if another process has it locked.
pub(super) fn try_lock(path: &Path, how: FlockArg) -> Result<Option<Flock<File>>> {
    lock(path, open_directory(path), how)
}

/// The same for a directory that was opened, or failed to be.
fn lock(path: &Path, opened: io::Result<File>, how: FlockArg) -> Result<Option<Flock<File>>> {
    let directory =
        opened.with_context(|| format!("cannot open the pin directory {}", path.display()))?;
    match Flock::lock(directory, how) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::Error::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => {
            Err(io::Error::from(error)).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}

/// Whether a running twheel holds an instance; `None` if the directory has just been removed. This
/// takes the lock for microseconds; a twheel that starts just then finds it taken.
pub(super) fn is_held(path: &Path) -> Result<Option<bool>> {
    let directory = match open_directory(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        result => {
            result.with_context(|| format!("cannot open the pin directory {}", path.display()))?
        }
    };
    match Flock::lock(directory, FlockArg::LockSharedNonblock) {
        Ok(_) => Ok(Some(false)),
        Err((_, nix::Error::EWOULDBLOCK)) => Ok(Some(true)),
        Err((_, error)) => Err(io::Error::from(error))
            .with_context(|| format!("cannot check the lock of {}", path.display())),
    }
}

/// The lock that lets only one twheel start at a time. It is held until the BPF links are pinned:
/// only then can other processes see which interfaces an instance has, and two instances with
/// different names might want the same interface.
pub fn lock_start() -> Result<Flock<File>> {
    // A start takes seconds at most.
    const PATIENCE: Duration = Duration::from_secs(60);
    const PAUSE: Duration = Duration::from_millis(20);
    let (root, until) = (root(), Instant::now() + PATIENCE);
    loop {
        make_directory(&root, 0o755)?;
        check_ours(&root)?;
        match open_directory(&root) {
            // The process that removes the last instance removes this directory, too.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            opened => {
                let there = || Ok::<_, io::Error>(fs::metadata(&root)?.ino());
                if let Some(lock) = lock(&root, opened, FlockArg::LockExclusiveNonblock)?
                    && there().ok() == lock.metadata().ok().map(|it| it.ino())
                {
                    return Ok(lock);
                }
            }
        }
        if Instant::now() > until {
            return in_the_way(format!(
                "another twheel has not finished starting within a minute: find it with \
                 `fuser {}`, and stop it",
                root.display()
            ));
        }
        thread::sleep(PAUSE);
    }
}
