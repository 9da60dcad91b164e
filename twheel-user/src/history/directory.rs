//! Where the history of an instance is, and which one is an interface's.

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

/// Where histories are, unless told otherwise.
pub const DIRECTORY: &str = "/var/lib/twheel";

/// A history that was not written to for so long is removed.
pub(super) const STALE: Duration = Duration::from_secs(30 * 86_400);

/// Where the history of an instance is written.
pub struct Directory {
    /// With those of other instances.
    pub(super) all: PathBuf,
    /// Its own.
    pub(super) own: PathBuf,
}

impl Directory {
    /// Makes it, or takes the one that is there, below one for all.
    ///
    /// # Errors
    ///
    /// It cannot be made; or what is there is a symbolic link, or somebody else's.
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
            // A link to all of them may be the administrator's.
            let is_real = found.is_dir() || !is_own && is_ours;
            if !is_real || is_own && (!is_ours || found.mode() & 0o022 != 0) {
                return Err(Failure::new(
                    Kind::Other,
                    format!(
                        "{} is {} of user {} (mode {:o}), who could put anything there: remove it, or give another \
                         --history",
                        path.display(),
                        if found.is_dir() { "a directory" } else { "a symbolic link" },
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

    /// Who may read it, beside its owner: nobody, or a group that this process is in.
    pub fn permit(&self, group: Option<Gid>) -> Result<()> {
        let mode = match group {
            Some(_) => 0o750,
            None => 0o700,
        };
        lchown(&self.own, None, group.map(Gid::as_raw))
            .and_then(|()| fs::set_permissions(&self.own, Permissions::from_mode(mode)))
            .with_context(|| format!("cannot set the mode of {}", self.own.display()))
    }
}

/// Removes histories of instances that nobody has written to for long: those of namespaces that are gone would pile up.
pub(super) fn remove_stale(directory: &Path, now: SystemTime) -> Result<()> {
    let context = || format!("cannot list {}", directory.display());
    for entry in fs::read_dir(directory).with_context(context)? {
        let path = entry.with_context(context)?.path();
        // What belongs to others may not be looked at.
        let is_directory = fs::symlink_metadata(&path).is_ok_and(|it| it.is_dir());
        let Ok(Some(segments)) = is_directory.then(|| segments(&path)).transpose() else {
            continue;
        };
        let written = |(_, path): &(u64, PathBuf)| fs::metadata(path)?.modified();
        let Some(Ok(newest)) = segments.last().map(written) else {
            continue;
        };
        if now.duration_since(newest).is_ok_and(|since| since > STALE) {
            // What else is there is not ours.
            let _ = segments
                .iter()
                .try_for_each(|(_, segment)| fs::remove_file(segment))
                .and_then(|()| fs::remove_dir(&path));
        }
    }
    Ok(())
}

/// The name of the history of an interface: that of the instance that holds it, or that was made for it first and is
/// gone. Without an interface: that of the only instance here, or of the only one that has left something in `directory`.
///
/// # Errors
///
/// [`Kind::Pins`]: there are several, or none; or what is there is another version's.
pub fn name_of(interface: Option<&str>, directory: &Path) -> Result<String> {
    let none = match Instance::the(interface) {
        Ok(pins) => {
            // A run that waits for its interfaces has none yet, and who may read the history may be kept from it.
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

/// The name of an instance that is gone and was named after an interface; or after a pattern that stands for it, if that is
/// what has left something in `directory`.
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
