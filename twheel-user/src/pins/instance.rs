//! An instance, the directory of one `twheel run`: finds or creates it, locks it, sets its
//! permissions, and removes it.

use std::{
    collections::HashSet,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, Result};
use nix::{
    fcntl::{Flock, FlockArg},
    unistd::Gid,
};
use twheel_common::state::MAX_NAMESPACES;

use super::{
    access::{check_ours, is_held, make_directories, make_directory, permit, retry, try_lock},
    find::{all_here, all_interfaces_of, choose, first_of, holding, present, quoted, renamed},
    objects::Pins,
    parts::{NETNS, parts},
    path::{Hook, entries, escape, in_the_way, link_name, root, version},
    remove::{clear_directory, detach_link, remove_directory, remove_part},
};
use crate::{clsact, patterns::Selection};

/// An instance's directory, or its part for another network namespace. It is locked, so only one
/// twheel runs on it; the lock ends with the process.
#[derive(Clone)]
pub struct Instance {
    path: PathBuf,
    lock: Arc<Flock<File>>,
}

impl Instance {
    /// Opens the instance that holds any of these interfaces, or makes a new one.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`](crate::failure::Kind::Pins): the instance also has other interfaces, is in
    /// use, or was made by a version with another layout.
    pub fn open(interfaces: &[String]) -> Result<Self> {
        Self::open_for(&Selection::new(interfaces, &[])?)
    }

    /// The same, for a selection with patterns.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open).
    pub fn open_for(interfaces: &Selection) -> Result<Self> {
        let path = choose(interfaces)?;
        make_directories(&path)?;
        Self::lock(path)
    }

    /// The instance that [`open`](Self::open) would open, if it exists.
    ///
    /// # Errors
    ///
    /// As for [`open`](Self::open), except that the instance may be in use.
    pub fn find(interfaces: &[String]) -> Result<Option<Pins>> {
        if !root().exists() {
            return Ok(None);
        }
        check_ours(&root())?;
        let path = choose(&Selection::new(interfaces, &[])?)?;
        if !path.exists() {
            return Ok(None);
        }
        check_ours(&path)?;
        Ok(Some(Pins(path)))
    }

    /// The instance that holds an interface, or one that a pattern stands for, whether its twheel
    /// runs or not.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`](crate::failure::Kind::Pins): no instance of this layout does, or several do.
    pub fn with(interface: &str) -> Result<Pins> {
        let found = holding(interface)?;
        let ours: Vec<_> = found
            .iter()
            .filter(|it| it.parent() == Some(&version()))
            .collect();
        match ours.as_slice() {
            [path] => Ok(Pins((*path).clone())),
            [one, two, ..] => in_the_way(format!(
                "{interface} belongs to two instances, {} and {}: run \
                 `twheel detach --iface {interface}`",
                one.display(),
                two.display()
            )),
            [] => match found.first() {
                Some(other) => in_the_way(format!(
                    "another version of twheel left pins for {interface} at {}: use that version, \
                     or run `twheel detach --iface {interface}`",
                    other.display()
                )),
                None => match renamed(interface)? {
                    Some((instance, _)) => Ok(Pins(instance)),
                    None => in_the_way(format!(
                        "twheel is not running on {interface} and left no pins for it: start it \
                         with `twheel run --iface {}`",
                        quoted(interface)
                    )),
                },
            },
        }
    }

    /// The instance that holds an interface; without a name, the only instance in this network
    /// namespace.
    ///
    /// # Errors
    ///
    /// As for [`with`](Self::with); and, without a name, if there are several instances.
    pub fn the(interface: Option<&str>) -> Result<Pins> {
        if let Some(interface) = interface {
            return Self::with(interface);
        }
        let mut all = Vec::new();
        for path in all_here(&version())? {
            let held = present(&path, all_interfaces_of(&path)?);
            if !held.is_empty() {
                all.push((path, held.join(", ")));
            } else if is_held(&path)? == Some(true) {
                // A run that still waits for its interfaces.
                let first = first_of(&path).unwrap_or_default();
                all.push((path, first));
            }
        }
        match all.as_slice() {
            [(path, _)] => Ok(Pins(path.clone())),
            [] => in_the_way(
                "twheel is not running here and left no pins: start it with \
                 `twheel run --iface NAME`"
                    .to_owned(),
            ),
            several => in_the_way(format!(
                "there are several instances here: choose one with --iface NAME: {}",
                several
                    .iter()
                    .map(|(_, held)| held.as_str())
                    .collect::<Vec<_>>()
                    .join(", ")
            )),
        }
    }

    /// Its pins.
    pub fn pins(&self) -> Pins {
        Pins(self.path.clone())
    }

    /// Locks an existing directory.
    pub(super) fn lock(path: PathBuf) -> Result<Self> {
        // A process that only checks the lock holds it for a moment.
        const TRIES: u32 = 10;
        const PAUSE: Duration = Duration::from_millis(50);
        match retry(TRIES, PAUSE, || {
            try_lock(&path, FlockArg::LockExclusiveNonblock)
        })? {
            Some(lock) => Ok(Self {
                path,
                lock: Arc::new(lock),
            }),
            None => in_the_way(format!(
                "another twheel is using {}: end that `twheel run` first",
                path.display()
            )),
        }
    }

    /// Its directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a BPF link is pinned here.
    pub fn is_attached(&self) -> Result<bool> {
        Ok(!all_interfaces_of(&self.path)?.is_empty())
    }

    /// The part for another network namespace, which is made unless it exists, and its number. The
    /// number is the one that an earlier run's programs have, if there are any; otherwise the
    /// lowest that `is_free`. What is left of an earlier namespace of this name is removed. `None`:
    /// no number is free.
    ///
    /// # Errors
    ///
    /// The part cannot be made.
    pub fn elsewhere(
        &self,
        namespace: &str,
        inode: u64,
        is_free: impl Fn(u32) -> bool,
    ) -> Result<Option<(Self, u32)>> {
        let (mut own, mut taken) = (None, HashSet::new());
        for part in parts(&self.path)? {
            if part.inode == inode && part.namespace == namespace && is_free(part.number) {
                own = Some(part.number);
            } else if part.namespace == namespace || part.inode == inode {
                remove_part(&part)?;
            } else {
                taken.insert(part.number);
            }
        }
        let mut free = (0..MAX_NAMESPACES).filter(|it| is_free(*it) && !taken.contains(it));
        let Some(number) = own.or_else(|| free.next()) else {
            return Ok(None);
        };
        let part = format!("{NETNS}{number}-{inode}-{}", escape(namespace));
        let path = self.path.join(part);
        make_directory(&path, 0o700)?;
        // Filters in that namespace belong to this instance, too.
        let meta = path.join("META");
        match fs::hard_link(self.object("META"), &meta) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(error).with_context(|| format!("cannot create the pin {}", meta.display()))
            }
            _ => Ok(Some((self.at(path), number))),
        }
    }

    /// A part of this instance, under the same lock.
    pub(super) fn at(&self, path: PathBuf) -> Self {
        let lock = self.lock.clone();
        Self { path, lock }
    }

    /// The path of the pin of a map or program.
    pub fn object(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// The path of the pin of a BPF link.
    pub fn link(&self, hook: Hook, interface: &str) -> PathBuf {
        self.path.join(link_name(hook, interface))
    }

    /// Detaches from an interface, whether it still exists or not.
    ///
    /// # Errors
    ///
    /// A pin or a filter cannot be removed.
    pub fn detach_from(&self, interface: &str) -> Result<()> {
        self.unpin_all(interface)?;
        clsact::detach(&self.path, interface)
    }

    /// The same for an interface that certainly no longer exists, so that its filters are gone,
    /// too.
    pub(super) fn remove_pins(&self, interface: &str) -> Result<()> {
        self.unpin_all(interface)?;
        for pin in clsact::pins(&self.path, interface)? {
            fs::remove_file(&pin).with_context(|| format!("cannot remove {}", pin.display()))?;
        }
        Ok(())
    }

    fn unpin_all(&self, interface: &str) -> Result<()> {
        self.unpin(Hook::Xdp, interface)?;
        self.unpin(Hook::Ingress, interface)?;
        self.unpin(Hook::Egress, interface)
    }

    /// Detaches a BPF link and removes its pin, if it exists.
    ///
    /// # Errors
    ///
    /// The pin cannot be removed.
    pub fn unpin(&self, hook: Hook, interface: &str) -> Result<()> {
        let link = self.link(hook, interface);
        detach_link(&link);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(error).with_context(|| format!("cannot remove {}", link.display()))
            }
            _ => Ok(()),
        }
    }

    /// Sets who may use the pinned BPF links of an interface, as [`permit`](Self::permit) does.
    ///
    /// # Errors
    ///
    /// A mode cannot be set.
    pub fn permit_links(&self, interface: &str, group: Option<Gid>) -> Result<()> {
        for hook in [Hook::Xdp, Hook::Ingress, Hook::Egress] {
            let link = self.link(hook, interface);
            if link.exists() {
                permit(&link, group)?;
            }
        }
        clsact::pins(&self.path, interface)?
            .iter()
            .try_for_each(|pin| permit(pin, group))
    }

    /// Sets who may use what is pinned here besides its owner: nobody, or a group that this process
    /// is in.
    pub fn permit(&self, group: Option<Gid>) -> Result<()> {
        for entry in entries(&self.path)? {
            let is_secret = entry.ends_with("OFFLOAD_KEY");
            permit(&entry, group.filter(|_| !is_secret))?;
        }
        permit(&self.path, group)
    }

    /// Removes all pins. BPF links first, because what is attached needs the rest.
    pub fn remove(self) -> Result<()> {
        remove_directory(&self.path)
    }

    /// Removes the parts for other network namespaces, except those that exist and whose names are
    /// to be kept.
    pub fn remove_elsewhere_but(&self, is_kept: impl Fn(&str) -> bool) -> Result<()> {
        for part in parts(&self.path)? {
            if !is_kept(&part.namespace) || part.open()?.is_none() {
                remove_part(&part)?;
            }
        }
        Ok(())
    }

    /// Removes the pins of maps and programs of an instance without BPF links: its run died before
    /// it had set up everything.
    pub fn clear(&self) -> Result<()> {
        clear_directory(&self.path)
    }
}
