//! Where things are pinned: one directory an instance, below one for the layout's version. It is named after what `--iface` gave
//! first, be that an interface or a pattern.
//!
//! ```text
//! /sys/fs/bpf/twheel/v12/4026531840-eth0/    network namespace (inode) and first interface
//!     FLOWS WHEEL SLOTS EVENTS …            the maps
//!     twheel_xdp twheel_egress …            the programs
//!     xdp@eth0 ingress@eth0 egress@eth0     the links
//!     clsact-2@eth0 qdisc-2@eth0 …          a filter instead of a link: see `clsact.rs`
//!     next_xdp next_ingress next_egress     the programs again, for those of other network namespaces: see `stub.rs`
//!     netns-0-4026532177-blue/              of that network namespace: its programs and links
//! ```

use std::{
    collections::HashSet,
    fs::{self, DirBuilder, File, OpenOptions, Permissions},
    io,
    os::fd::AsFd,
    os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt, lchown},
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::{maps::MapData, programs::Xdp};
use aya_obj::programs::XdpAttachType;
use nix::{
    fcntl::{Flock, FlockArg, OFlag},
    unistd::{Gid, geteuid},
};
use twheel_common::{config::LAYOUT, state::MAX_NAMESPACES};

use crate::{
    bpf,
    call::Callable,
    clsact, data_plane,
    failure::{Failure, Kind, exit_code},
    links,
    netns::{self, Namespace},
    patterns::{Asked, Selection},
};

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

/// How the directory of another network namespace's part of an instance begins.
const NETNS: &str = "netns-";

/// The directory of all instances.
fn root() -> PathBuf {
    Path::new(bpf::BPFFS).join("twheel")
}

/// The directory of all instances of this layout.
fn version() -> PathBuf {
    root().join(format!("v{LAYOUT}"))
}

/// An instance's directory, or the part of it that is of another network namespace; locked: one loader at a time. The lock ends
/// with the process.
#[derive(Clone)]
pub struct Instance {
    path: PathBuf,
    lock: Arc<Flock<File>>,
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
                interfaces: all_interfaces_of(&path)?,
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
            .with_context(|| format!("cannot look at the lock of {}", path.display())),
    }
}

/// Where an instance's maps and programs are, for those who use them beside a loader.
#[derive(Clone, Debug)]
pub struct Pins(PathBuf);

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
    /// [`Kind::Pins`]: there is not.
    fn there(&self, name: &str) -> Result<PathBuf> {
        let path = self.object(name);
        let exists = path.try_exists();
        if !exists.map_err(|error| refused(error.into(), &path))? {
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
        pins("another twheel is changing a policy just now: try again".to_owned())
    }
}

/// A link's hook.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Hook {
    /// XDP, packets that come in.
    Xdp,
    /// TCX, packets that come in.
    Ingress,
    /// TCX, packets that go out.
    Egress,
}

impl Hook {
    fn name(self) -> &'static str {
        match self {
            Self::Xdp => "xdp",
            Self::Ingress => "ingress",
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
        Self::open_for(&Selection::new(interfaces, &[])?)
    }

    /// The same, for interfaces that patterns stand for.
    ///
    /// # Errors
    ///
    /// As there.
    pub fn open_for(interfaces: &Selection) -> Result<Self> {
        let path = Self::choose(interfaces)?;
        make_directories(&path)?;
        Self::lock(path)
    }

    /// The instance that [`open`](Self::open) would open, if it exists.
    ///
    /// # Errors
    ///
    /// As there, but that it may be in use.
    pub fn find(interfaces: &[String]) -> Result<Option<Pins>> {
        if !root().exists() {
            return Ok(None);
        }
        check_ours(&root())?;
        let path = Self::choose(&Selection::new(interfaces, &[])?)?;
        if !path.exists() {
            return Ok(None);
        }
        check_ours(&path)?;
        Ok(Some(Pins(path)))
    }

    /// The directory for these interfaces.
    fn choose(interfaces: &Selection) -> Result<PathBuf> {
        let mut found = Vec::new();
        for directory in everywhere()? {
            let mut held = interfaces_of(&directory)?.into_iter();
            let held = held.find(|it| interfaces.matches(it));
            let Some(held) = held.or(named_after(&directory, interfaces)?) else {
                continue;
            };
            if directory.parent() != Some(&version()) {
                return pins(format!(
                    "{held} carries pins of another version of twheel at {}: remove them with `twheel detach --iface {}`",
                    directory.display(),
                    quoted(&held)
                ));
            }
            found.push(directory);
        }
        let path = match found.as_slice() {
            [] => {
                let given = interfaces.texts();
                let first = given.first().context("no interface")?;
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
            if !interfaces.matches(&held) {
                return pins(format!(
                    "the instance at {} holds {held} as well: give --iface {held} too, or run \
                     `twheel detach --iface {held}`",
                    path.display()
                ));
            }
        }
        Ok(path)
    }

    /// The instance that holds an interface, or one that a pattern stands for, be a loader running or not.
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
                     `twheel run --iface {}`",
                    quoted(interface)
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
            let held = all_interfaces_of(&path)?;
            if !held.is_empty() {
                all.push((path, held.join(", ")));
            } else if is_held(&path)? == Some(true) {
                // A run that waits for its interfaces.
                let first = first_of(&path).unwrap_or_default();
                all.push((path, first));
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
                return Ok(Self {
                    path,
                    lock: Arc::new(lock),
                });
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
        Ok(!all_interfaces_of(&self.path)?.is_empty())
    }

    /// The part that is of another network namespace, made if it is not there; and its number. That is the one that its programs
    /// have, if an earlier run has left some; else the lowest that `is_free`. What was of an earlier namespace of this name is
    /// removed. `None`: there is no number.
    ///
    /// # Errors
    ///
    /// It cannot be made.
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
                part.remove()?;
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
        // Filters there are this instance's, too.
        let meta = path.join("META");
        match fs::hard_link(self.object("META"), &meta) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                Err(error).with_context(|| format!("cannot make the pin {}", meta.display()))
            }
            _ => Ok(Some((self.at(path), number))),
        }
    }

    /// A part of it, under the same lock.
    fn at(&self, path: PathBuf) -> Self {
        let lock = self.lock.clone();
        Self { path, lock }
    }

    /// Where a map or a program is pinned.
    pub fn object(&self, name: &str) -> PathBuf {
        self.path.join(name)
    }

    /// Where a link is pinned.
    pub fn link(&self, hook: Hook, interface: &str) -> PathBuf {
        self.path.join(link_name(hook, interface))
    }

    /// Lets go of an interface, be it still there or not.
    ///
    /// # Errors
    ///
    /// A pin or a filter cannot be removed.
    pub fn let_go(&self, interface: &str) -> Result<()> {
        self.unpin_all(interface)?;
        clsact::let_go(&self.path, interface)
    }

    /// The same of one that is gone for sure, and its filters with it.
    fn forget(&self, interface: &str) -> Result<()> {
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

    /// Detaches a link and removes its pin, if it is there.
    ///
    /// # Errors
    ///
    /// It cannot be removed.
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

    /// Who may use the links that are pinned for an interface, likewise.
    ///
    /// # Errors
    ///
    /// A mode cannot be set.
    pub fn share_links(&self, interface: &str, group: Option<Gid>) -> Result<()> {
        for hook in [Hook::Xdp, Hook::Ingress, Hook::Egress] {
            let link = self.link(hook, interface);
            if link.exists() {
                share(&link, group)?;
            }
        }
        clsact::pins(&self.path, interface)?
            .iter()
            .try_for_each(|pin| share(pin, group))
    }

    /// Who may use what is pinned here, beside its owner: nobody, or a group that this process is in.
    pub fn share(&self, group: Option<Gid>) -> Result<()> {
        for entry in entries(&self.path)? {
            share(&entry, group)?;
        }
        share(&self.path, group)
    }

    /// Removes all pins, links first: what is attached goes before what it needs.
    pub fn remove(self) -> Result<()> {
        remove_directory(&self.path)
    }

    /// Removes the parts that are of other network namespaces, but for those that are there and are to be kept, by their names.
    pub fn remove_elsewhere_but(&self, is_kept: impl Fn(&str) -> bool) -> Result<()> {
        for part in parts(&self.path)? {
            if !is_kept(&part.namespace) || part.open()?.is_none() {
                part.remove()?;
            }
        }
        Ok(())
    }

    /// Removes the pins of maps and programs of an instance that has no links: a loader died before
    /// it had set all up.
    pub fn clear(&self) -> Result<()> {
        clear_directory(&self.path)
    }
}

/// Gives a directory or a pin to a group, or takes it from all but its owner.
fn share(path: &Path, group: Option<Gid>) -> Result<()> {
    let mode = match (path.is_dir(), group) {
        (true, Some(_)) => 0o750,
        (true, None) => 0o700,
        (false, Some(_)) => 0o660,
        (false, None) => 0o600,
    };
    lchown(path, None, group.map(Gid::as_raw))
        .and_then(|()| fs::set_permissions(path, Permissions::from_mode(mode)))
        .with_context(|| format!("cannot set the mode of {}", path.display()))
}

/// A lock among those who start, to be had until links are pinned: only then others see which interfaces an instance has,
/// and two of different names might want the same.
pub fn lock_start() -> Result<Flock<File>> {
    // A start takes seconds at most.
    const PATIENCE: Duration = Duration::from_secs(60);
    const PAUSE: Duration = Duration::from_millis(20);
    let (root, until) = (root(), Instant::now() + PATIENCE);
    loop {
        make_directory(&root, 0o755)?;
        check_ours(&root)?;
        let there = || Ok::<_, io::Error>(fs::metadata(&root)?.ino());
        if let Some(lock) = try_lock(&root, FlockArg::LockExclusiveNonblock)?
            // Who removes the last instance takes it away.
            && there().ok() == lock.metadata().ok().map(|it| it.ino())
        {
            return Ok(lock);
        }
        if Instant::now() > until {
            return pins(format!(
                "another twheel is just starting, and does not come to an end: `fuser {}` says which",
                root.display()
            ));
        }
        thread::sleep(PAUSE);
    }
}

/// Makes a directory where there is none.
fn make_directory(path: &Path, mode: u32) -> Result<()> {
    match DirBuilder::new().mode(mode).create(path) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(error)
            .with_context(|| format!("cannot create the pin directory {}", path.display())),
        _ => Ok(()),
    }
}

/// Makes an instance's directory and those above it.
fn make_directories(path: &Path) -> Result<()> {
    make_directory(&root(), 0o755)?;
    make_directory(path.parent().unwrap_or(path), 0o755)?;
    make_directory(path, 0o700)?;
    check_ours(path)
}

/// Fails if an instance's directory, or one above it, could be in somebody else's hands. A BPF file system that was mounted
/// by hand is writable for all: what is found there need not be twheel's.
fn check_ours(path: &Path) -> Result<()> {
    let is_below = |it: &&Path| it.starts_with(root());
    let mut directories: Vec<_> = path.ancestors().take_while(is_below).collect();
    directories.reverse();
    for directory in directories {
        let owner = match fs::symlink_metadata(directory) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            found => {
                let found =
                    found.with_context(|| format!("cannot look at {}", directory.display()))?;
                check_real(directory, &found)?;
                found
            }
        };
        if ![0, geteuid().as_raw()].contains(&owner.uid()) || owner.mode() & 0o022 != 0 {
            return pins(format!(
                "{} belongs to user {} (mode {:o}), who could put anything there: run as that user, or remove it",
                directory.display(),
                owner.uid(),
                owner.mode() & 0o7777
            ));
        }
    }
    Ok(())
}

fn check_real(path: &Path, found: &fs::Metadata) -> Result<()> {
    if found.is_dir() {
        return Ok(());
    }
    let what = match found.is_symlink() {
        true => "a symbolic link, which is not followed",
        false => "no directory",
    };
    pins(format!(
        "{} is {what}: it is not twheel's, find out who put it there and remove it",
        path.display()
    ))
}

/// Opens a directory, which a symbolic link is not.
fn open_directory(path: &Path) -> io::Result<File> {
    OpenOptions::new()
        .read(true)
        .custom_flags((OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW).bits())
        .open(path)
}

/// Locks a pin directory; `None` if others have it locked.
fn try_lock(path: &Path, how: FlockArg) -> Result<Option<Flock<File>>> {
    let directory = open_directory(path)
        .with_context(|| format!("cannot open the pin directory {}", path.display()))?;
    match Flock::lock(directory, how) {
        Ok(lock) => Ok(Some(lock)),
        Err((_, nix::Error::EWOULDBLOCK)) => Ok(None),
        Err((_, error)) => {
            Err(io::Error::from(error)).with_context(|| format!("cannot lock {}", path.display()))
        }
    }
}

/// Detaches an interface, or those that a pattern stands for: its links, and the whole instance when no link is left; and a filter whose pins somebody has
/// removed. Works for pins of any version. Returns whether there was anything.
///
/// # Errors
///
/// [`Kind::Pins`]: a loader is running on it.
pub fn detach(interface: &Asked) -> Result<bool> {
    let mut found = false;
    for directory in holding(interface.text())? {
        found = true;
        check_ours(&directory)?;
        let instance = Instance::lock(directory)?;
        let held = all_interfaces_of(instance.path())?;
        let is_going = |it: &String| interface.matches(it) || interface.matches(there(it));
        let (going, staying): (Vec<_>, Vec<_>) = held.into_iter().partition(is_going);
        if staying.is_empty() {
            instance.remove()?;
            continue;
        }
        let (elsewhere, own): (Vec<_>, Vec<_>) = going.iter().partition(|it| it.contains('/'));
        for interface in own {
            instance.let_go(interface)?;
        }
        for part in parts(instance.path())? {
            let its = instance.at(part.path.clone());
            for (namespace, interface) in elsewhere.iter().filter_map(|it| it.rsplit_once('/')) {
                if namespace == part.namespace {
                    part.within(|| its.let_go(interface), || its.forget(interface))?;
                }
            }
        }
    }
    if !interface.is_pattern() {
        return Ok(clsact::remove_stray(interface.text())? || found);
    }
    for link in links::all()? {
        if interface.matches(&link.name) {
            found |= clsact::remove_stray(&link.name)?;
        }
    }
    Ok(found)
}

/// The name of the instance that holds an interface, or that was made for it first and is gone; without one, of the
/// only instance here, or the only one that has left something in `directory`.
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

/// The name of an instance that is gone and was named after an interface; or after a pattern that stands for it, if that is what has
/// left something in `directory`.
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

/// The instances of any version that hold an interface of this network namespace, or one that a pattern stands for; that are
/// named after the pattern; or that were about to hold it when their loader died. Those named after it come alone. Where no
/// interface here is called so: those that hold one of another network namespace.
fn holding(interface: &str) -> Result<Vec<PathBuf>> {
    let asked = Selection::new(&[interface.to_owned()], &[])?;
    let (mut named, mut found, mut elsewhere) = (Vec::new(), Vec::new(), Vec::new());
    for directory in everywhere()? {
        let held = all_interfaces_of(&directory)?;
        let own = |it: &&String| !it.contains('/') || interface.contains('/');
        let holds = held.iter().filter(own).any(|it| asked.matches(it));
        if held.iter().any(|it| asked.matches(there(it))) {
            elsewhere.push(directory.clone());
        }
        if named_after(&directory, &asked)?.is_some() && (asked.has_pattern() || held.is_empty()) {
            named.push(directory);
        } else if holds {
            found.push(directory);
        }
    }
    if asked.has_pattern() && !named.is_empty() {
        return Ok(named);
    }
    found.append(&mut named);
    match found.is_empty() {
        true => Ok(elsewhere),
        false => Ok(found),
    }
}

/// The name of an interface within its network namespace: `eth0` of `blue/eth0`.
fn there(interface: &str) -> &str {
    interface.rsplit('/').next().unwrap_or(interface)
}

/// The instances of any version in this network namespace.
fn everywhere() -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for version in entries(&root())? {
        found.extend(all_here(&version)?);
    }
    Ok(found)
}

/// The name or pattern after which an instance is named, if it is one of these; after that of an interface, only if it holds
/// none.
fn named_after(directory: &Path, interfaces: &Selection) -> Result<Option<String>> {
    let after = first_of(directory).filter(|first| interfaces.texts().contains(first));
    let Some(after) = after else {
        return Ok(None);
    };
    let is_pattern = interfaces.patterns().any(|it| it.text() == after);
    let names_it = is_pattern || interfaces_of(directory)?.is_empty();
    Ok(names_it.then_some(after))
}

/// As a shell takes it.
fn quoted(interface: &str) -> String {
    match interface.contains(['*', '?', '[']) {
        true => format!("'{interface}'"),
        false => interface.to_owned(),
    }
}

/// What of a directory is of instances in this network namespace.
fn all_here(directory: &Path) -> Result<Vec<PathBuf>> {
    let prefix = format!("{}-", namespace()?);
    let mut found = entries(directory)?;
    found.retain(|instance| name(instance).starts_with(&prefix));
    Ok(found)
}

/// The interface or pattern after which an instance is named.
fn first_of(instance: &Path) -> Option<String> {
    let name = name(instance);
    name.split_once('-').map(|(_, first)| unescape(first))
}

/// The interfaces to which an instance has links, each once.
fn interfaces_of(instance: &Path) -> Result<Vec<String>> {
    let entries = match entries(instance) {
        // Who may not look has its name to go by.
        Err(error) if exit_code(&error) == Kind::Permission as u8 => {
            return Ok(first_of(instance).into_iter().collect());
        }
        entries => entries?,
    };
    let (mut interfaces, mut seen) = (Vec::new(), HashSet::new());
    for entry in entries {
        let name = name(&entry);
        if let Some((_, interface)) = name.split_once('@')
            && seen.insert(interface.to_owned())
        {
            interfaces.push(unescape(interface));
        }
    }
    Ok(interfaces)
}

/// Detaches a link, if that is what is pinned there, before its pin goes: of one that is merely unpinned the kernel lets go a
/// moment later, and whoever attaches next would find its place taken, or count packets twice.
fn detach_link(pin: &Path) {
    // A link whose interface is gone, or no link at all: without its pin nothing is left of it.
    let _ = bpf::open(pin).and_then(|link| bpf::detach(link.as_fd()));
}

/// The interfaces of other network namespaces, too: those as `blue/eth0`.
fn all_interfaces_of(instance: &Path) -> Result<Vec<String>> {
    let mut interfaces = interfaces_of(instance)?;
    for part in parts(instance).unwrap_or_default() {
        let there = interfaces_of(&part.path)?.into_iter();
        interfaces.extend(there.map(|interface| format!("{}/{interface}", part.namespace)));
    }
    Ok(interfaces)
}

/// The part of an instance that is of another network namespace.
struct Part {
    /// The namespace's name.
    namespace: String,
    inode: u64,
    /// What its programs add to the indexes of interfaces.
    number: u32,
    path: PathBuf,
}

/// The parts of an instance that are of other network namespaces.
fn parts(instance: &Path) -> Result<Vec<Part>> {
    let part = |path: PathBuf| {
        let name = name(&path);
        let (number, rest) = name.strip_prefix(NETNS)?.split_once('-')?;
        let (inode, namespace) = rest.split_once('-')?;
        path.is_dir().then_some(())?;
        Some(Part {
            namespace: unescape(namespace),
            inode: inode.parse().ok()?,
            number: number.parse().ok()?,
            path,
        })
    };
    Ok(entries(instance)?.into_iter().filter_map(part).collect())
}

impl Part {
    /// The namespace, by its name, or by another that it has. `None`: it has none.
    ///
    /// # Errors
    ///
    /// It cannot be told.
    fn open(&self) -> Result<Option<Namespace>> {
        let is_it = |it: &Namespace| it.inode().is_ok_and(|inode| inode == self.inode);
        match Namespace::open(&self.namespace) {
            Ok(Some(found)) if is_it(&found) => return Ok(Some(found)),
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                let context = || format!("cannot open the network namespace {}", self.namespace);
                return Err(error).with_context(context);
            }
            _ => {}
        }
        let others = netns::names()?.into_iter();
        let others = others.filter_map(|name| Namespace::open(&name).ok().flatten());
        Ok(others.into_iter().find(is_it))
    }

    /// Does something there; or something else, if it is gone.
    fn within(
        &self,
        there: impl FnOnce() -> Result<()>,
        gone: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        match self.open()? {
            Some(namespace) => namespace.enter(there),
            None => gone(),
        }
    }

    /// Removes its pins. Its filters are gone with its interfaces if it is gone.
    fn remove(&self) -> Result<()> {
        self.within(|| clear_directory(&self.path), || clear_pins(&self.path))?;
        let path = &self.path;
        fs::remove_dir(path).with_context(|| format!("cannot remove {}", path.display()))
    }
}

fn clear_directory(path: &Path) -> Result<()> {
    for part in parts(path)? {
        part.remove()?;
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

fn remove_directory(path: &Path) -> Result<()> {
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

/// What a directory holds; nothing if it does not exist.
pub(crate) fn entries(path: &Path) -> Result<Vec<PathBuf>> {
    let context = || format!("cannot list {}", path.display());
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        found => check_real(path, &found.with_context(context)?)?,
    }
    match fs::read_dir(path) {
        Ok(entries) => entries
            .map(|entry| Ok(entry.with_context(context)?.path()))
            .collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(refused(error.into(), path)),
    }
}

pub(crate) fn name(path: &Path) -> String {
    path.file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default()
}

pub(crate) fn link_name(hook: Hook, interface: &str) -> String {
    format!("{}@{}", hook.name(), escape(interface))
}

/// What names of interfaces and patterns may have and names of pins do not: bpffs reserves the dot, which names of VLAN
/// interfaces have, and a shell would take what patterns have for a pattern.
const ESCAPED: [(char, &str); 6] = [
    ('.', "%2E"),
    ('@', "%40"),
    ('*', "%2A"),
    ('?', "%3F"),
    ('[', "%5B"),
    (']', "%5D"),
];

pub(crate) fn escape(interface: &str) -> String {
    let percent = interface.replace('%', "%25");
    let escape = |name: String, (it, escaped): &(char, &str)| name.replace(*it, escaped);
    ESCAPED.iter().fold(percent, escape)
}

pub(crate) fn unescape(name: &str) -> String {
    let unescape = |name: String, (it, escaped): &(char, &str)| {
        name.replace(escaped, it.encode_utf8(&mut [0; 4]))
    };
    let unescaped = ESCAPED.iter().fold(name.to_owned(), unescape);
    unescaped.replace("%25", "%")
}

/// The inode of this network namespace: interfaces of other namespaces may have the same names.
pub fn namespace() -> Result<u64> {
    Ok(fs::metadata("/proc/thread-self/ns/net")
        .context("cannot tell the network namespace")?
        .ino())
}

/// Why something that is pinned cannot be opened.
fn refused(error: anyhow::Error, path: &Path) -> anyhow::Error {
    let is_refusal = |it: &io::Error| it.kind() == io::ErrorKind::PermissionDenied;
    let causes = || {
        error
            .chain()
            .filter_map(|it| it.downcast_ref::<io::Error>())
    };
    let path = path.display();
    if !causes().any(is_refusal) {
        return error.context(format!("cannot open {path}"));
    }
    error.context(Failure::new(
        Kind::Permission,
        format!(
            "not permitted to open {path}: do this as the user of `twheel run`, or give that a --group that you are in"
        ),
    ))
}

fn pins<T>(message: String) -> Result<T> {
    Err(Failure::new(Kind::Pins, message).into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_survive_escaping() {
        for name in [
            "eth0",
            "eth0.100",
            "a@b",
            "a%2Eb",
            "a%.b",
            "veth[0-9]?*",
            "a%2A*",
        ] {
            assert!(!escape(name).contains(['.', '@', '*', '?', '[', ']']));
            assert_eq!(unescape(&escape(name)), name);
        }
    }
}
