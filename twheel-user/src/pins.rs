//! Where things are pinned: one directory an instance, below one for the layout's version.
//!
//! ```text
//! /sys/fs/bpf/twheel/v7/4026531840-eth0/    network namespace (inode) and first interface
//!     FLOWS WHEEL SLOTS EVENTS …            the maps
//!     twheel_xdp twheel_egress …            the programs
//!     xdp@eth0 egress@eth0                  the links
//! ```

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};

use anyhow::{Context, Result};
use aya::{maps::MapData, programs::Xdp};
use aya_obj::programs::XdpAttachType;
use nix::fcntl::{Flock, FlockArg};
use twheel_common::config::LAYOUT;

use crate::failure::{Failure, Kind};

/// The BPF file system.
pub const BPFFS: &str = "/sys/fs/bpf";

/// The programs that are pinned.
pub const PROGRAMS: [&str; 5] = [
    "twheel_xdp",
    "twheel_egress",
    "twheel_step",
    "twheel_delete",
    "twheel_sweep",
];

/// The directory of all instances.
fn root() -> PathBuf {
    Path::new(BPFFS).join("twheel")
}

/// The directory of all instances of this layout.
fn version() -> PathBuf {
    root().join(format!("v{LAYOUT}"))
}

/// An instance's directory, locked: one loader at a time. The lock ends with the process.
pub struct Instance {
    path: PathBuf,
    _lock: Flock<File>,
}

/// An instance as it is found, of any version and network namespace.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its directory.
    pub path: PathBuf,
    /// Its maps are laid out as this version's are.
    pub current: bool,
    /// Inode of its network namespace; `None` where the name of the directory is none of twheel's.
    pub namespace: Option<u64>,
    /// The interfaces to which it has links.
    pub interfaces: Vec<String>,
    /// A loader is using it.
    pub held: bool,
}

/// All instances there are.
///
/// # Errors
///
/// A directory cannot be read.
pub fn found() -> Result<Vec<Found>> {
    let mut found = Vec::new();
    for directory in entries(&root())? {
        for path in entries(&directory)? {
            let name = name(&path);
            let Some(held) = is_held(&path)? else {
                continue;
            };
            found.push(Found {
                current: directory == version(),
                namespace: name
                    .split_once('-')
                    .and_then(|(inode, _)| inode.parse().ok()),
                interfaces: interfaces_of(&path)?,
                held,
                path,
            });
        }
    }
    found.sort_by(|one, other| one.path.cmp(&other.path));
    Ok(found)
}

/// Whether a loader has an instance; `None` if it has just gone. A loader that starts in the very microseconds of this
/// finds it taken.
fn is_held(path: &Path) -> Result<Option<bool>> {
    let directory = match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        result => {
            result.with_context(|| format!("cannot open the pin directory {}", path.display()))?
        }
    };
    match Flock::lock(directory, FlockArg::LockSharedNonblock) {
        Ok(_) => Ok(Some(false)),
        Err((_, nix::Error::EWOULDBLOCK)) => Ok(Some(true)),
        Err((_, error)) => Err(io::Error::from(error))
            .with_context(|| format!("cannot look at the lock of {}", path.display())),
    }
}

/// Where an instance's maps and programs are, for those who use them beside a loader.
#[derive(Clone, Debug)]
pub struct Pins(PathBuf);

impl Pins {
    /// Where a map or a program is pinned.
    pub fn object(&self, name: &str) -> PathBuf {
        self.0.join(name)
    }

    /// Its name: the network namespace's inode, and the first interface.
    pub fn name(&self) -> String {
        name(&self.0)
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
    /// [`Kind::Pins`]: there is not.
    fn there(&self, name: &str) -> Result<PathBuf> {
        let path = self.object(name);
        if !path.exists() {
            return pins(format!(
                "there is no {}: the instance is just being set up, or removed: try again",
                path.display()
            ));
        }
        Ok(path)
    }

    /// Opens a map.
    pub fn map(&self, name: &str) -> Result<MapData> {
        let path = self.there(name)?;
        MapData::from_pin(&path).with_context(|| format!("cannot open {}", path.display()))
    }

    /// Opens an XDP program.
    pub fn xdp(&self, name: &str) -> Result<Xdp> {
        let path = self.there(name)?;
        Xdp::from_pin(&path, XdpAttachType::Interface)
            .with_context(|| format!("cannot open {}", path.display()))
    }

    /// A lock among those who change the policy.
    ///
    /// # Errors
    ///
    /// It is held.
    pub fn lock_policy(&self) -> Result<Flock<File>> {
        // The instance's own lock is the loader's, for as long as it runs.
        let path = self.0.parent().unwrap_or(&self.0);
        let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
        Flock::lock(file, FlockArg::LockExclusiveNonblock)
            .map_err(|(_, error)| io::Error::from(error))
            .context("another twheel is changing a policy just now: try again")
    }
}

/// A link's hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// XDP, packets that come in.
    Xdp,
    /// TCX, packets that go out.
    Egress,
}

impl Hook {
    fn name(self) -> &'static str {
        match self {
            Self::Xdp => "xdp",
            Self::Egress => "egress",
        }
    }
}

impl Instance {
    /// Opens the instance that holds any of these interfaces, or makes a new one.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`]: it has interfaces other than these, is in use, or was made by a version with
    /// another layout.
    pub fn open(interfaces: &[String]) -> Result<Self> {
        let mut found = Vec::new();
        for interface in interfaces {
            for directory in holding(interface)? {
                if directory.parent() != Some(&version()) {
                    return pins(format!(
                        "{interface} carries pins of another version of twheel at {}: remove them \
                         with `twheel detach --iface {interface}`",
                        directory.display()
                    ));
                }
                if !found.contains(&directory) {
                    found.push(directory);
                }
            }
        }
        let path = match found.as_slice() {
            [] => {
                let first = interfaces.first().context("no interface")?;
                version().join(format!("{}-{}", namespace()?, escape(first)))
            }
            [one] => one.clone(),
            [one, two, ..] => {
                return pins(format!(
                    "the interfaces belong to two instances, {} and {}: run `twheel detach` on one",
                    one.display(),
                    two.display()
                ));
            }
        };
        for held in interfaces_of(&path)? {
            if !interfaces.contains(&held) {
                return pins(format!(
                    "the instance at {} holds {held} as well: give --iface {held} too, or run \
                     `twheel detach --iface {held}`",
                    path.display()
                ));
            }
        }
        fs::create_dir_all(&path)
            .with_context(|| format!("cannot create the pin directory {}", path.display()))?;
        Self::lock(path)
    }

    /// The instance that holds an interface, be a loader running or not.
    ///
    /// # Errors
    ///
    /// [`Kind::Pins`]: there is none of this layout, or several claim the interface.
    pub fn of(interface: &str) -> Result<Pins> {
        let found = holding(interface)?;
        let ours: Vec<_> = found
            .iter()
            .filter(|it| it.parent() == Some(&version()))
            .collect();
        match ours.as_slice() {
            [path] => Ok(Pins((*path).clone())),
            [one, two, ..] => pins(format!(
                "{interface} belongs to two instances, {} and {}: run `twheel detach --iface {interface}`",
                one.display(),
                two.display()
            )),
            [] => match found.first() {
                Some(other) => pins(format!(
                    "{interface} carries pins of another version of twheel at {}: use that version, or run \
                     `twheel detach --iface {interface}`",
                    other.display()
                )),
                None => pins(format!(
                    "twheel is not running on {interface}, and has left nothing there: start it with \
                     `twheel run --iface {interface}`"
                )),
            },
        }
    }

    /// The instance that holds an interface; without one, the only instance in this network namespace.
    ///
    /// # Errors
    ///
    /// As [`of`](Self::of); and if without an interface there are several.
    pub fn the(interface: Option<&str>) -> Result<Pins> {
        if let Some(interface) = interface {
            return Self::of(interface);
        }
        let mut all = Vec::new();
        for path in all_here(&version())? {
            let held = interfaces_of(&path)?;
            if !held.is_empty() {
                all.push((path, held.join(", ")));
            }
        }
        match all.as_slice() {
            [(path, _)] => Ok(Pins(path.clone())),
            [] => pins(
                "twheel is not running here, and has left nothing: start it with `twheel run --iface NAME`"
                    .to_owned(),
            ),
            several => pins(format!(
                "there are several instances here: say which with --iface NAME, one of {}",
                several
                    .iter()
                    .map(|(_, held)| held.as_str())
                    .collect::<Vec<_>>()
                    .join(", ")
            )),
        }
    }

    /// Where everything is.
    pub fn pins(&self) -> Pins {
        Pins(self.path.clone())
    }

    /// Locks a directory that exists.
    fn lock(path: PathBuf) -> Result<Self> {
        // Whoever only looks whether it is locked holds it for a moment.
        const TRIES: u32 = 10;
        const PAUSE: Duration = Duration::from_millis(50);
        for again in 0..TRIES {
            if again > 0 {
                thread::sleep(PAUSE);
            }
            if let Some(lock) = try_lock(&path, FlockArg::LockExclusiveNonblock)? {
                return Ok(Self { path, _lock: lock });
            }
        }
        pins(format!(
            "another twheel is using {}: stop it first",
            path.display()
        ))
    }

    /// The directory.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether a link is pinned here.
    pub fn is_attached(&self) -> Result<bool> {
        Ok(!interfaces_of(&self.path)?.is_empty())
    }

    /// Where a map or a program is pinned.
    pub fn object(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Where a link is pinned.
    pub fn link(&self, hook: Hook, interface: &str) -> PathBuf {
        self.path.join(link_name(hook, interface))
    }

    /// Removes all pins, links first: what is attached goes before what it needs.
    pub fn remove(self) -> Result<()> {
        remove_directory(&self.path)
    }

    /// Removes the pins of maps and programs of an instance that has no links: a loader died before
    /// it had set all up.
    pub fn clear(&self) -> Result<()> {
        clear_directory(&self.path)
    }
}

/// Locks a pin directory; `None` if others have it locked.
fn try_lock(path: &Path, how: FlockArg) -> Result<Option<Flock<File>>> {
    let directory = File::open(path)
        .with_context(|| format!("cannot open the pin directory {}", path.display()))?;
    match Flock::lock(directory, how) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::Error::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => {
            Err(io::Error::from(error)).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}

/// Detaches an interface: its links, and the whole instance when no link is left. Works for pins of
/// any version. Returns whether there was anything.
///
/// # Errors
///
/// [`Kind::Pins`]: a loader is running on it.
pub fn detach(interface: &str) -> Result<bool> {
    let mut found = false;
    for directory in holding(interface)? {
        found = true;
        let instance = Instance::lock(directory)?;
        for hook in [Hook::Xdp, Hook::Egress] {
            let link = instance.link(hook, interface);
            match fs::remove_file(&link) {
                Ok(()) => {}
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => {
                    return Err(error).with_context(|| format!("cannot remove {}", link.display()));
                }
            }
        }
        if interfaces_of(instance.path())?.is_empty() {
            instance.remove()?;
        }
    }
    Ok(found)
}

/// The name of the instance that holds an interface, or that was made for it first and is gone; without one, of the
/// only instance here, or the only one that has left something in `directory`.
///
/// # Errors
///
/// [`Kind::Pins`]: there are several, or none.
pub fn name_of(interface: Option<&str>, directory: &Path) -> Result<String> {
    if let Some(interface) = interface {
        return match Instance::of(interface) {
            Ok(pins) => Ok(pins.name()),
            Err(_) => Ok(format!("{}-{}", namespace()?, escape(interface))),
        };
    }
    let none = match Instance::the(None) {
        Ok(pins) => return Ok(pins.name()),
        Err(none) => none,
    };
    match all_here(directory)?.as_slice() {
        [one] => Ok(name(one)),
        _ => Err(none),
    }
}

/// The instances of any version that hold an interface of this network namespace, or were about to
/// when their loader died.
fn holding(interface: &str) -> Result<Vec<PathBuf>> {
    let own = format!("{}-{}", namespace()?, escape(interface));
    let mut found = Vec::new();
    for version in entries(&root())? {
        for instance in all_here(&version)? {
            let held = interfaces_of(&instance)?;
            if held.iter().any(|held| held == interface)
                || held.is_empty() && name(&instance) == own
            {
                found.push(instance);
            }
        }
    }
    Ok(found)
}

/// What of a directory is of instances in this network namespace.
fn all_here(directory: &Path) -> Result<Vec<PathBuf>> {
    let prefix = format!("{}-", namespace()?);
    let mut found = entries(directory)?;
    found.retain(|instance| name(instance).starts_with(&prefix));
    Ok(found)
}

/// The interfaces to which an instance has links, each once.
fn interfaces_of(instance: &Path) -> Result<Vec<String>> {
    let mut interfaces = Vec::new();
    for entry in entries(instance)? {
        let name = name(&entry);
        if let Some((_, interface)) = name.split_once('@') {
            let interface = unescape(interface);
            if !interfaces.contains(&interface) {
                interfaces.push(interface);
            }
        }
    }
    Ok(interfaces)
}

fn clear_directory(path: &Path) -> Result<()> {
    let mut entries = entries(path)?;
    entries.sort_by_key(|entry| !name(entry).contains('@'));
    for entry in entries {
        fs::remove_file(&entry).with_context(|| format!("cannot remove {}", entry.display()))?;
    }
    Ok(())
}

fn remove_directory(path: &Path) -> Result<()> {
    clear_directory(path)?;
    fs::remove_dir(path).with_context(|| format!("cannot remove {}", path.display()))?;
    // The directories above go with the last instance.
    for parent in [path.parent(), path.parent().and_then(Path::parent)] {
        if parent.is_none_or(|parent| fs::remove_dir(parent).is_err()) {
            break;
        }
    }
    Ok(())
}

/// What a directory holds; nothing if it does not exist.
fn entries(path: &Path) -> Result<Vec<PathBuf>> {
    let context = || format!("cannot list {}", path.display());
    match fs::read_dir(path) {
        Ok(entries) => entries
            .map(|entry| Ok(entry.with_context(context)?.path()))
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(error).with_context(context),
    }
}

fn name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

fn link_name(hook: Hook, interface: &str) -> String {
    format!("{}@{}", hook.name(), escape(interface))
}

/// bpffs reserves the dot, which names of VLAN interfaces have.
fn escape(interface: &str) -> String {
    interface.replace('%', "%25").replace('.', "%2E")
}

fn unescape(name: &str) -> String {
    name.replace("%2E", ".").replace("%25", "%")
}

/// The inode of this network namespace: interfaces of other namespaces may have the same names.
pub fn namespace() -> Result<u64> {
    Ok(fs::metadata("/proc/thread-self/ns/net")
        .context("cannot tell the network namespace")?
        .ino())
}

fn pins<T>(message: String) -> Result<T> {
    Err(Failure::new(Kind::Pins, message).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_escaping() {
        for name in ["eth0", "eth0.100", "a%2Eb", "a%.b"] {
            assert!(!escape(name).contains('.'));
            assert_eq!(unescape(&escape(name)), name);
        }
    }
}
