//! The directory of an instance's history, and which history is an interface's.

use std::{
    fs::{self, DirBuilder, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, lchown},
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use nix::unistd::{Gid, geteuid};

use super::format::segments;
use crate::{
    data_plane,
    failure::{Failure, Kind, exit_code},
    netns,
    patterns::Asked,
    pins::{
        Instance, Pins, holding, namespace,
        path::{entries, escape, name, unescape},
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
        let own = all.join(pins.lasting_name());
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
                .and_then(|()| match fs::remove_file(path.join(INTERFACES)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
                    _ => Ok(()),
                })
                .and_then(|()| fs::remove_dir(&path));
        }
    }
    Ok(())
}

/// The name of an interface's history: that of the instance that holds the interface, or of a past
/// instance that held it or was named after it. Without an interface: that of the only instance
/// here, or of the only one that has left a history in `directory`.
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
            return Ok(pins.lasting_name());
        }
        Err(none) => none,
    };
    let here = format!("@{}", netns::lasting_name(namespace()?));
    let mut left: Vec<_> = entries(directory)?.iter().map(|it| name(it)).collect();
    left.retain(|name| name.ends_with(&here));
    left.sort();
    match interface {
        Some(interface) => {
            match holding(interface) {
                Ok(others) if !others.is_empty() => Err(none),
                _ => Ok(name_left(interface, directory, &left)
                    .unwrap_or_else(|| escape(interface) + &here)),
            }
        }
        None if left.len() > 1 => {
            let first = |name: &String| interfaces_of(&directory.join(name), name).join(", ");
            let all: Vec<_> = left.iter().map(first).collect();
            Err(Failure::new(
                Kind::Pins,
                format!(
                    "there are several histories here: choose one with --iface NAME: {}",
                    all.join("; ")
                ),
            )
            .into())
        }
        None => left.pop().ok_or(none),
    }
}

/// Of these histories, that of a past instance that was named after an interface, or else held it;
/// or else was named after a pattern that matches it, if there is just one.
fn name_left(interface: &str, directory: &Path, left: &[String]) -> Option<String> {
    let first = |name: &&String| first_of(name);
    if let Some(own) = left.iter().find(|name| first(name) == interface) {
        return Some(own.clone());
    }
    let held = |name: &&String| {
        let interfaces = interfaces_of(&directory.join(name), name);
        interfaces.iter().any(|it| it == interface)
    };
    if let Some(own) = left.iter().find(held) {
        return Some(own.clone());
    }
    let stands = |name: &&String| {
        Asked::parse(&first(name)).is_ok_and(|asked| asked.is_pattern() && asked.matches(interface))
    };
    let mut patterns = left.iter().filter(stands);
    patterns
        .next()
        .filter(|_| patterns.next().is_none())
        .cloned()
}

/// The interface or pattern that a history's instance is named after.
pub(super) fn first_of(name: &str) -> String {
    unescape(name.split_once('@').map_or(name, |(first, _)| first))
}

/// The file that names the interfaces whose flows a history has.
const INTERFACES: &str = "interfaces";
/// Most interfaces in that file.
const MOST_INTERFACES: usize = 1024;

/// The interfaces whose flows a history may have; the one that its name has, if nothing says more.
pub fn interfaces_of(history: &Path, name: &str) -> Vec<String> {
    let noted = fs::read_to_string(history.join(INTERFACES)).unwrap_or_default();
    match noted.is_empty() {
        true => vec![first_of(name)],
        false => noted.lines().map(str::to_owned).collect(),
    }
}

/// Notes that a history has flows of this interface. Of more than a thousand the latest are noted.
///
/// # Errors
///
/// The file cannot be written.
pub(super) fn note_interface(history: &Path, interface: &str) -> io::Result<()> {
    let path = history.join(INTERFACES);
    let noted = fs::read_to_string(&path).unwrap_or_default();
    let mut all: Vec<_> = noted.lines().filter(|it| *it != interface).collect();
    all.drain(..all.len().saturating_sub(MOST_INTERFACES - 1));
    all.push(interface);
    let text = all.join("\n") + "\n";
    if text == noted {
        return Ok(());
    }
    // Users that may list the directory may read the file. It is replaced as a whole.
    let shared = fs::metadata(history).map_or(0, |it| it.mode() & 0o040);
    let new = history.join("interfaces.new");
    let _ = fs::remove_file(&new);
    let mut file = OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o600 | shared)
        .open(&new)?;
    file.write_all(text.as_bytes())?;
    fs::rename(&new, &path)
}
