//! The maps and programs of an instance, opened by processes other than its running twheel.

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::Result;
use aya::{maps::MapData, programs::Xdp};
use aya_obj::programs::XdpAttachType;
use nix::fcntl::{Flock, FlockArg};

use super::{
    access::{retry, try_lock},
    find::{interfaces_of, present},
    parts::parts,
    path::{Hook, in_the_way, lasting_name, link_name, name, refused},
};
use crate::call::{self, Callable};

/// The programs that are pinned if they are loaded. Of the programs for incoming packets, only
/// those that an interface needs are loaded.
pub const PROGRAMS: [&str; 7] = [
    "twheel_xdp",
    "twheel_ingress",
    "twheel_egress",
    "twheel_step",
    "twheel_delete",
    "twheel_enter",
    "twheel_sweep",
];

/// Those of [`PROGRAMS`] that are attached to interfaces.
pub const HOOK_PROGRAMS: [&str; 3] = ["twheel_xdp", "twheel_ingress", "twheel_egress"];

/// The pins of an instance's maps and programs, for processes other than its running twheel.
#[derive(Clone, Debug)]
pub struct Pins(pub(super) PathBuf);

/// A pinned program.
#[derive(Clone, Debug)]
pub struct PinnedProgram {
    /// The name of its pin.
    pub name: String,
    /// The network namespace whose packets it sees; `None`: that of the instance.
    pub namespace: Option<String>,
    /// The path of its pin.
    pub path: PathBuf,
}

impl Pins {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The path of the pin of a map or program.
    pub fn object(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// The instance's name: the network namespace's inode, and the first interface.
    pub fn name(&self) -> String {
        name(&self.0)
    }

    /// Its [lasting name](lasting_name).
    pub fn lasting_name(&self) -> String {
        lasting_name(&self.0)
    }

    /// The path of the pin of a BPF link.
    pub fn link(&self, hook: Hook, interface: &str) -> PathBuf {
        self.0.join(link_name(hook, interface))
    }

    /// Whether a running twheel holds the instance.
    pub fn is_running(&self) -> Result<bool> {
        Ok(try_lock(&self.0, FlockArg::LockSharedNonblock)?.is_none())
    }

    /// Holds the instance as a running twheel would, for a process that briefly does its work;
    /// `None` if a twheel runs.
    pub fn hold(&self) -> Result<Option<Flock<File>>> {
        try_lock(&self.0, FlockArg::LockExclusiveNonblock)
    }

    /// The interfaces that its BPF links are attached to.
    pub fn interfaces(&self) -> Result<Vec<String>> {
        interfaces_of(&self.0)
    }

    /// The same, by the names that they have now: pins keep those that they had when they were
    /// attached.
    pub fn present_interfaces(&self) -> Result<Vec<String>> {
        Ok(present(&self.0, self.interfaces()?))
    }

    /// The programs that are pinned, those for other network namespaces included.
    ///
    /// # Errors
    ///
    /// The directory cannot be listed.
    pub fn programs(&self) -> Result<Vec<PinnedProgram>> {
        let own = PROGRAMS.map(|name| (name, None, self.object(name)));
        let parts = parts(&self.0)?;
        let theirs = parts.iter().flat_map(|part| {
            HOOK_PROGRAMS.map(|name| (name, Some(part.namespace.clone()), part.path.join(name)))
        });
        let pinned = own.into_iter().chain(theirs);
        let there = pinned.filter(|(_, _, path)| path.exists());
        let program = |(name, namespace, path): (&str, _, _)| PinnedProgram {
            name: name.to_owned(),
            namespace,
            path,
        };
        Ok(there.map(program).collect())
    }

    /// The path of the pin of a map or program, if it exists.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`](crate::failure::Kind::Pins): it does not exist.
    fn there(&self, name: &str) -> Result<PathBuf> {
        let path = self.object(name);
        let exists = path.try_exists();
        if !exists.map_err(|error| refused(error.into(), &path))? {
            return in_the_way(format!(
                "{} does not exist: the instance is just being created or removed: try again",
                path.display()
            ));
        }
        Ok(path)
    }

    /// Opens a map.
    pub fn map(&self, name: &str) -> Result<MapData> {
        let path = self.there(name)?;
        MapData::from_pin(&path)
            .map_err(anyhow::Error::new)
            .map_err(|error| refused(error, &path))
    }

    /// Opens an XDP program.
    pub fn xdp(&self, name: &str) -> Result<Xdp> {
        let path = self.there(name)?;
        Xdp::from_pin(&path, XdpAttachType::Interface)
            .map_err(anyhow::Error::new)
            .map_err(|error| refused(error, &path))
    }

    /// Opens a program that userspace runs.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`](crate::failure::Kind::Pins): it is not pinned, or is just being replaced.
    pub fn callable(&self, name: &str) -> Result<Callable> {
        // A run that starts replaces the pin of its map of answers first, then those of its
        // programs. Between the two a program is pinned beside a map that it does not fill.
        const TRIES: u32 = 50;
        const PAUSE: Duration = Duration::from_millis(10);
        let opened = retry(TRIES, PAUSE, || {
            let (program, calls) = (self.xdp(name)?, self.map("CALLS")?);
            let fits = call::answers_in(&program, &calls)?;
            fits.then(|| Callable::new(program, calls)).transpose()
        })?;
        match opened {
            Some(callable) => Ok(callable),
            None => in_the_way(format!(
                "the programs pinned at {} are just being replaced: try again",
                self.0.display()
            )),
        }
    }

    /// Takes the lock that lets only one process change the policy at a time.
    ///
    /// # Errors
    ///
    /// Another process holds it.
    pub fn lock_policy(&self) -> Result<Flock<File>> {
        // Not the instance's own lock: the running twheel holds that one as long as it runs.
        let path = self.0.parent().unwrap_or(&self.0);
        // Another instance that starts holds it for a moment, or for longer if it has many flows to
        // sweep.
        const TRIES: u32 = 200;
        const PAUSE: Duration = Duration::from_millis(50);
        match retry(TRIES, PAUSE, || {
            try_lock(path, FlockArg::LockExclusiveNonblock)
        })? {
            Some(lock) => Ok(lock),
            None => in_the_way("another twheel is just loading a policy: try again".to_owned()),
        }
    }
}
