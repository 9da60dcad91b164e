//! Other network namespaces: those with a name in `/run/netns`, where `ip netns` and container
//! runtimes put them.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, AsRawFd, BorrowedFd},
        unix::{
            fs::{MetadataExt, OpenOptionsExt},
            net::UnixDatagram,
        },
    },
    path::Path,
    process,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use caps::Capability;
use nix::{
    sched::{CloneFlags, setns},
    sys::{
        inotify::{AddWatchFlags, InitFlags, Inotify},
        statfs::{FsType, fstatfs},
        time::TimeSpec,
        timerfd::{ClockId, Expiration, TimerFd, TimerFlags, TimerSetTimeFlags},
    },
};

use crate::{
    failure::{Failure, Kind},
    patterns::{self, Asked},
    privilege::lacks,
};

/// The directory of the names.
pub const DIRECTORY: &str = "/run/netns";
/// The file system of namespaces (`NSFS_MAGIC`, `include/uapi/linux/magic.h`).
const NSFS: FsType = FsType(0x6e73_6673);
/// How long a name may exist before its namespace does: `ip netns add` makes a file, then the
/// namespace, and then mounts it on the file.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often to check whether the namespace exists. The kernel does not notify.
const RETRY: Duration = Duration::from_millis(5);

/// The network namespaces that a run watches.
#[derive(Clone, Debug)]
pub struct NamespaceSelection(Vec<Asked>);

impl NamespaceSelection {
    /// From the values of `--netns`.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: one of them is not a valid name or pattern.
    pub fn parse(texts: &[String]) -> Result<Self> {
        let wanted = patterns::parse("--netns", texts)?;
        let bad = wanted
            .iter()
            .find(|it| it.text().contains('/') || it.text().is_empty());
        match bad {
            Some(bad) => Err(Failure::new(
                Kind::Usage,
                format!(
                    "--netns {}: give a name in {}, as `ip netns` lists them, or all",
                    bad.text(),
                    DIRECTORY
                ),
            )
            .into()),
            None => Ok(Self(wanted)),
        }
    }

    /// Whether any of them is not the run's own.
    pub fn is_elsewhere(&self) -> bool {
        !self.0.is_empty()
    }

    /// The ones given by name or pattern.
    pub fn given(&self) -> impl Iterator<Item = &Asked> {
        self.0.iter().filter(|it| **it != Asked::All)
    }

    /// Whether the run's own is among them.
    pub fn has_own(&self) -> bool {
        self.0.is_empty() || self.0.contains(&Asked::All)
    }

    /// Whether a network namespace of this name is among them.
    pub fn matches(&self, name: &str) -> bool {
        self.0
            .iter()
            .any(|it| *it == Asked::All || it.matches(name))
    }
}

/// A network namespace. It exists at least as long as this value.
#[derive(Debug)]
pub struct Namespace {
    /// Its name.
    pub name: String,
    file: File,
}

impl Namespace {
    /// Opens it by its name. `None`: the file is not a namespace, or not yet.
    ///
    /// # Errors
    ///
    /// The file does not exist, or cannot be opened.
    pub fn open(name: &str) -> io::Result<Option<Self>> {
        // Does not block, whatever kind of file it is.
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(Path::new(DIRECTORY).join(name))?;
        let is_namespace = fstatfs(&file)?.filesystem_type() == NSFS;
        let name = name.to_owned();
        Ok(is_namespace.then_some(Self { name, file }))
    }

    /// Its inode, which identifies it among the namespaces that exist at the same time.
    pub fn inode(&self) -> Result<u64> {
        Ok(self.file.metadata()?.ino())
    }

    /// Runs a closure with this thread in the namespace. A socket that is opened there stays there.
    ///
    /// # Errors
    ///
    /// The namespace cannot be entered.
    pub fn enter<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        /// Brings the thread back when dropped.
        struct Back(File);
        impl Drop for Back {
            fn drop(&mut self) {
                if let Err(error) = setns(&self.0, CloneFlags::CLONE_NEWNET) {
                    // If the thread went on, everything else would happen in the wrong namespace.
                    eprintln!(
                        "twheel: cannot return to its own network namespace, and stops: {error}"
                    );
                    process::abort();
                }
            }
        }
        let own = File::open(OWN);
        let back = Back(own.context("cannot open the current network namespace")?);
        setns(&self.file, CloneFlags::CLONE_NEWNET).map_err(|error| {
            let error = io::Error::from(error);
            let why = lacks(&error, Capability::CAP_SYS_ADMIN);
            anyhow!("cannot enter the network namespace {}: {why}", self.name)
        })?;
        let done = work();
        drop(back);
        done
    }
}

/// All names in the directory.
///
/// # Errors
///
/// The directory cannot be read.
pub fn names() -> Result<Vec<String>> {
    let context = || format!("cannot list {DIRECTORY}");
    let names = match fs::read_dir(DIRECTORY) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        names => names.with_context(context)?,
    };
    let name = |entry: io::Result<fs::DirEntry>| -> Result<String> {
        let name = entry.with_context(context)?.file_name();
        Ok(name.to_string_lossy().into_owned())
    };
    names.map(name).collect()
}

/// This thread's network namespace.
const OWN: &str = "/proc/thread-self/ns/net";
/// A setting that only the first network namespace has (`net_core_table`,
/// `net/core/sysctl_net_core.c`); `/proc/sys/net` is that of the caller's namespace.
const ONLY_IN_THE_FIRST: &str = "/proc/sys/net/core/netdev_budget";

/// A network namespace's name that lasts: an inode is given out again once a namespace is gone, and
/// a new kernel has others. `host` for the kernel's first namespace, `netns-NAME` for one with a
/// name, else `cookie-N-BOOT`: its cookie, which the kernel gives to one namespace only
/// (`net_gen_cookie`, `net/core/net_namespace.c`), and the beginning of the boot's id; or
/// `inode-N-BOOT` if the namespace is gone, or is another one and the caller lacks CAP_SYS_ADMIN.
pub fn lasting_name(inode: u64) -> String {
    let is_it = |path: &Path| is_at(path, inode);
    let is_first = match is_it(Path::new(OWN)) {
        true => Path::new(ONLY_IN_THE_FIRST).exists(),
        // In a container, process 1 is in the caller's own namespace.
        false => is_it(Path::new("/proc/1/ns/net")),
    };
    if is_first {
        return "host".to_owned();
    }
    let mut names = names().unwrap_or_default();
    names.sort();
    let named = |name: &String| is_it(&Path::new(DIRECTORY).join(name));
    if let Some(name) = names.into_iter().find(named) {
        return format!("netns-{name}");
    }
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let boot = boot.get(..8).unwrap_or_default();
    match cookie(inode) {
        Some(cookie) => format!("cookie-{cookie}-{boot}"),
        None => format!("inode-{inode}-{boot}"),
    }
}

/// Whether the file at a path has this inode.
fn is_at(path: &Path, inode: u64) -> bool {
    fs::metadata(path).is_ok_and(|it| it.ino() == inode)
}

/// The cookie of the network namespace of this inode, if it can be had.
fn cookie(inode: u64) -> Option<u64> {
    if is_at(Path::new(OWN), inode) {
        return own_cookie().ok();
    }
    let processes = fs::read_dir("/proc").ok()?.flatten();
    let mut paths = processes.map(|it| it.path().join("ns/net"));
    let namespace = Namespace {
        name: format!("with inode {inode}"),
        file: File::open(paths.find(|path| is_at(path, inode))?).ok()?,
    };
    namespace.enter(|| Ok(own_cookie()?)).ok()
}

/// The cookie of this thread's network namespace (`SO_NETNS_COOKIE`).
fn own_cookie() -> io::Result<u64> {
    let socket = UnixDatagram::unbound()?;
    let (mut cookie, mut size) = (0u64, size_of::<u64>() as libc::socklen_t);
    // SAFETY: the kernel writes at most `size` bytes to `cookie`, which has as many.
    let got = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_NETNS_COOKIE,
            (&raw mut cookie).cast(),
            &mut size,
        )
    };
    match got {
        0 => Ok(cookie),
        _ => Err(io::Error::last_os_error()),
    }
}

/// What happened to a name.
#[derive(Debug)]
pub enum News {
    /// The name and its namespace exist.
    Is(Namespace),
    /// The name no longer exists.
    Gone(String),
    /// The name exists, but is not a network namespace or cannot be opened; with the reason.
    IsNone(String, String),
}

impl News {
    /// The name.
    pub fn name(&self) -> &str {
        match self {
            Self::Is(namespace) => &namespace.name,
            Self::Gone(name) | Self::IsNone(name, _) => name,
        }
    }
}

/// Watches the names as they appear and disappear.
pub struct NameWatch {
    inotify: Inotify,
    /// Runs while there are names whose namespaces do not exist yet.
    retry: TimerFd,
    /// Those names, and when they appeared.
    unmounted: BTreeMap<String, Instant>,
}

impl NameWatch {
    /// Starts to watch. The names that exist already are reported first.
    ///
    /// # Errors
    ///
    /// The directory cannot be created or watched.
    pub fn watch() -> Result<Self> {
        let flags = TimerFlags::TFD_CLOEXEC | TimerFlags::TFD_NONBLOCK;
        let mut names = Self {
            inotify: Inotify::init(InitFlags::IN_CLOEXEC | InitFlags::IN_NONBLOCK)?,
            retry: TimerFd::new(ClockId::CLOCK_MONOTONIC, flags)?,
            unmounted: BTreeMap::new(),
        };
        names.watch_directory()?;
        names.list()?;
        Ok(names)
    }

    fn watch_directory(&self) -> Result<()> {
        // As `ip netns add` does.
        let made = fs::create_dir_all(DIRECTORY);
        made.with_context(|| {
            format!("cannot create {DIRECTORY}: create it before you start twheel")
        })?;
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM;
        let watched = self.inotify.add_watch(DIRECTORY, flags);
        watched.with_context(|| format!("cannot watch {DIRECTORY}"))?;
        Ok(())
    }

    /// Reports a name once more, if it exists.
    pub fn look_again(&mut self, name: &str) {
        self.unmounted.insert(name.to_owned(), Instant::now());
        self.wake();
    }

    /// Notes all names that exist.
    fn list(&mut self) -> Result<()> {
        for name in names()? {
            self.unmounted.entry(name).or_insert_with(Instant::now);
        }
        Ok(())
    }

    /// What happened since the last call. `known`: the names that were reported and have not
    /// disappeared.
    ///
    /// # Errors
    ///
    /// The kernel's notifications cannot be read.
    pub fn news(&mut self, known: &[&str]) -> Result<Vec<News>> {
        let mut news = Vec::new();
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(nix::Error::EAGAIN) => break,
                Err(nix::Error::EINTR) => continue,
                Err(error) => {
                    return Err(error)
                        .context("cannot receive notifications about network namespaces");
                }
            };
            for event in events {
                let is_removed = event.mask.contains(AddWatchFlags::IN_IGNORED);
                if is_removed {
                    // The directory was removed: watch it anew.
                    self.watch_directory()?;
                }
                if is_removed || event.mask.contains(AddWatchFlags::IN_Q_OVERFLOW) {
                    let is_gone = |name: &&&str| !Path::new(DIRECTORY).join(name).exists();
                    let gone = known.iter().filter(is_gone);
                    news.extend(gone.map(|name| News::Gone((*name).to_owned())));
                    self.list()?;
                    continue;
                }
                let Some(name) = event.name.and_then(|name| name.into_string().ok()) else {
                    continue;
                };
                let is_there = AddWatchFlags::IN_CREATE | AddWatchFlags::IN_MOVED_TO;
                if event.mask.intersects(is_there) {
                    self.unmounted.insert(name, Instant::now());
                } else {
                    self.unmounted.remove(&name);
                    news.push(News::Gone(name));
                }
            }
        }
        self.unmounted.retain(|name, since| {
            let why = match Namespace::open(name) {
                Ok(Some(namespace)) => {
                    news.push(News::Is(namespace));
                    return false;
                }
                Err(error) if error.kind() == io::ErrorKind::NotFound => return false,
                Ok(None) => "it is not a network namespace".to_owned(),
                // A user who may not read every file gets this for the file that `ip netns add`
                // makes first.
                Err(error) => format!("it cannot be opened: {error}"),
            };
            let is_patient = since.elapsed() < PATIENCE;
            if !is_patient {
                news.push(News::IsNone(name.clone(), why));
            }
            is_patient
        });
        self.wake();
        Ok(news)
    }

    /// Sets the timer, if names wait for their namespaces. The timer is not readable again until it
    /// next expires.
    fn wake(&self) {
        let retry = TimeSpec::from(RETRY);
        // These calls fail only for invalid arguments, and these are valid.
        let _ = match self.unmounted.is_empty() {
            true => self.retry.unset(),
            false => self
                .retry
                .set(Expiration::OneShot(retry), TimerSetTimeFlags::empty()),
        };
    }

    /// The names that were not reported yet.
    pub fn untold(&self) -> impl Iterator<Item = &str> {
        self.unmounted.keys().map(String::as_str)
    }

    /// One of these is readable when there may be [`news`](Self::news).
    pub fn sources(&self) -> [BorrowedFd<'_>; 2] {
        [self.inotify.as_fd(), self.retry.as_fd()]
    }
}
