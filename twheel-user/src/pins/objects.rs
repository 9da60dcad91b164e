//! The maps and programs of an instance, opened by whoever uses them beside a loader.

use std::{
    fs::File,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::Result;
use aya::{maps::MapData, programs::Xdp};
use aya_obj::programs::XdpAttachType;
use nix::fcntl::{Flock, FlockArg};

use super::{
    access::try_lock,
    find::interfaces_of,
    path::{Hook, in_the_way, link_name, name, refused},
};
use crate::call::Callable;

/// The programs that are pinned, if they are loaded: of those for incoming packets, those that an interface needs.
pub const PROGRAMS: [&str; 7] = [
    "twheel_xdp",
    "twheel_ingress",
    "twheel_egress",
    "twheel_step",
    "twheel_delete",
    "twheel_enter",
    "twheel_sweep",
];

/// Those of them that interfaces have.
pub const HOOK_PROGRAMS: [&str; 3] = ["twheel_xdp", "twheel_ingress", "twheel_egress"];

/// Where an instance's maps and programs are, for those who use them beside a loader.
#[derive(Clone, Debug)]
pub struct Pins(pub(super) PathBuf);

impl Pins {
    /// The directory.
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// Where a map or a program is pinned.
    pub fn object(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Its name: the network namespace's inode, and the first interface.
    pub fn name(&self) -> String {
        name(&self.0)
    }

    /// Where a link is pinned.
    pub fn link(&self, hook: Hook, interface: &str) -> PathBuf {
        self.0.join(link_name(hook, interface))
    }

    /// Whether a loader holds it.
    pub fn has_loader(&self) -> Result<bool> {
        Ok(try_lock(&self.0, FlockArg::LockSharedNonblock)?.is_none())
    }

    /// Holds it as a loader does, for whoever does a loader's work for a moment; `None` if one does.
    pub fn hold(&self) -> Result<Option<Flock<File>>> {
        try_lock(&self.0, FlockArg::LockExclusiveNonblock)
    }

    /// The interfaces to which there are links.
    pub fn interfaces(&self) -> Result<Vec<String>> {
        interfaces_of(&self.0)
    }

    /// The same, if there is something.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`](crate::failure::Kind::Pins): there is not.
    fn there(&self, name: &str) -> Result<PathBuf> {
        let path = self.object(name);
        let exists = path.try_exists();
        if !exists.map_err(|error| refused(error.into(), &path))? {
            return in_the_way(format!(
                "there is no {}: the instance is just being set up, or removed: try again",
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
    pub fn callable(&self, name: &str) -> Result<Callable> {
        Callable::new(self.xdp(name)?, self.map("CALLS")?)
    }

    /// A lock among those who change the policy.
    ///
    /// # Errors
    ///
    /// It is held.
    pub fn lock_policy(&self) -> Result<Flock<File>> {
        // The instance's own lock is the loader's, for as long as it runs.
        let path = self.0.parent().unwrap_or(&self.0);
        // Another instance that starts holds it for a moment; one with many flows to sweep, longer.
        const TRIES: u32 = 40;
        const PAUSE: Duration = Duration::from_millis(50);
        for again in 0..TRIES {
            if again > 0 {
                thread::sleep(PAUSE);
            }
            if let Some(lock) = try_lock(path, FlockArg::LockExclusiveNonblock)? {
                return Ok(lock);
            }
        }
        in_the_way("another twheel is changing a policy just now: try again".to_owned())
    }
}
