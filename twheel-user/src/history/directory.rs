//! The directory of an instance's history, and which history is an interface's.

use std::{
    fs::{self, DirBuilder, Permissions},
    io,
    os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, lchown},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use nix::unistd::{Gid, geteuid};

use super::format::segments;
use crate::{
    data_plane,
    failure::{Failure, Kind, exit_code},
    patterns::Asked,
    pins::{
        Instance, Pins, all_here, first_of, holding, namespace,
        path::{escape, name},
    },
};

/// The default directory of all histories.
pub const DIRECTORY: &str = "/var/lib/twheel";

/// A history that was not written to for this long is removed.
pub(super) const STALE: Duration = Duration::from_secs(30 * 86_400);

/// The directories of an instance's history.
pub struct Directory {
    /// The directory of all histories.
    pub(super) all: PathBuf,
    /// The directory of this instance's history.
    pub(super) own: PathBuf,
}

impl Directory {
    /// Creates the instance's directory below `all`, or takes an existing one.
    ///
    /// # Errors
    ///
    /// The directory cannot be created; or it is a symbolic link, or belongs to another user.
    pub fn make(all: &Path, pins: &Pins) -> Result<Self> {
        let own = all.join(pins.name());
        let context = || format!("cannot create {}, for the history", own.display());
        let mut builder = DirBuilder::new();
        builder.recursive(true).mode(0o755);
        builder.create(all).with_context(context)?;
        match builder.recursive(false).mode(0o700).create(&own) {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            made => made.with_context(context)?,
        }
        for path in [all, &own] {
            let found = fs::symlink_metadata(path).with_context(context)?;
            let is_ours = [0, geteuid().as_raw()].contains(&found.uid());
            let is_own = path == own;
            // `all` may be a symbolic link that the administrator has made.
            let is_real = found.is_dir() || !is_own && is_ours;
            if !is_real || is_own && (!is_ours || found.mode() & 0o022 != 0) {
                return Err(Failure::new(
                    Kind::Other,
                    format!(
                        "{} is {} of user {} (mode {:o}), who could put anything there: remove it, \
                         or choose another directory with --history",
                        path.display(),
                        if found.is_dir() {
                            "a directory"
                        } else {
                            "a symbolic link"
                        },
                        found.uid(),
                        found.mode() & 0o7777
                    ),
                )
                .into());
            }
        }
        Ok(Self {
            all: all.to_owned(),
            own,
        })
    }

    /// Lets a group that this process is in read the history, or its owner alone.
    pub fn permit(&self, group: Option<Gid>) -> Result<()> {
        let mode = match group {
            Some(_) => 0o750,
            None => 0o700,
        };
        lchown(&self.own, None, group.map(Gid::as_raw))
            .and_then(|()| fs::set_permissions(&self.own, Permissions::from_mode(mode)))
            .with_context(|| format!("cannot set the permissions of {}", self.own.display()))
    }
}

/// Removes histories that were not written to for a long time; else those of network namespaces
/// that no longer exist would accumulate.
pub(super) fn remove_stale(directory: &Path, now: SystemTime) -> Result<()> {
    let context = || format!("cannot list {}", directory.display());
    for entry in fs::read_dir(directory).with_context(context)? {
        let path = entry.with_context(context)?.path();
        // Directories of other users may be unreadable.
        let is_directory = fs::symlink_metadata(&path).is_ok_and(|it| it.is_dir());
        let Ok(Some(segments)) = is_directory.then(|| segments(&path)).transpose() else {
            continue;
        };
        let written = |(_, path): &(u64, PathBuf)| fs::metadata(path)?.modified();
        let Some(Ok(newest)) = segments.last().map(written) else {
            continue;
        };
        if now.duration_since(newest).is_ok_and(|since| since > STALE) {
            // The directory is removed only if nothing else is in it: other files are not ours.
            let _ = segments
                .iter()
                .try_for_each(|(_, segment)| fs::remove_file(segment))
                .and_then(|()| fs::remove_dir(&path));
        }
    }
    Ok(())
}

/// The name of an interface's history: that of the instance that holds the interface, or of a past
/// instance that was named after it. Without an interface: that of the only instance here, or of
/// the only one that has left a history in `directory`.
///
/// # Errors
///
/// [`Kind::Pins`]: there are several, or none; or the instance is another version's.
pub fn name_of(interface: Option<&str>, directory: &Path) -> Result<String> {
    let none = match Instance::the(interface) {
        Ok(pins) => {
            // A run that waits for its interfaces has no maps yet, and a user who may read the
            // history may lack permission to read the maps.
            if pins.object("META").exists()
                && let Err(error) = data_plane::meta(&pins)
                && exit_code(&error) == Kind::Pins as u8
            {
                return Err(error);
            }
            return Ok(pins.name());
        }
        Err(none) => none,
    };
    if let Some(interface) = interface {
        return match holding(interface) {
            Ok(others) if !others.is_empty() => Err(none),
            _ => name_left(interface, directory),
        };
    }
    match all_here(directory)?.as_slice() {
        [one] => Ok(name(one)),
        _ => Err(none),
    }
}

/// The name of a past instance that was named after an interface; or after a pattern that matches
/// it, if only that one has left a history in `directory`.
fn name_left(interface: &str, directory: &Path) -> Result<String> {
    let own = format!("{}-{}", namespace()?, escape(interface));
    if directory.join(&own).exists() {
        return Ok(own);
    }
    let stands = |path: &PathBuf| {
        first_of(path)
            .and_then(|first| Asked::parse(&first).ok())
            .is_some_and(|asked| asked.is_pattern() && asked.matches(interface))
    };
    let patterns: Vec<_> = all_here(directory)?.into_iter().filter(stands).collect();
    match patterns.as_slice() {
        [one] => Ok(name(one)),
        _ => Ok(own),
    }
}
