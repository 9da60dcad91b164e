//! Other network namespaces: those that have a name in `/run/netns`, where `ip netns` and container runtimes put one.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{MetadataExt, OpenOptionsExt},
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

/// Where they have their names.
pub const DIRECTORY: &str = "/run/netns";
/// The file system of namespaces (`NSFS_MAGIC`, `include/uapi/linux/magic.h`).
const NSFS: FsType = FsType(0x6e73_6673);
/// How long a name may be there before its namespace is: `ip netns add` makes a file, then the namespace, and then mounts it there.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it is looked whether it is. The kernel does not tell.
const RETRY: Duration = Duration::from_millis(5);

/// Which network namespaces a run is of.
#[derive(Clone, Debug)]
pub struct NamespaceSelection(Vec<Asked>);

impl NamespaceSelection {
    /// By the values of `--netns`.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: one of them cannot be read.
    pub fn parse(texts: &[String]) -> Result<Self> {
        let wanted = patterns::parse("--netns", texts)?;
        let bad = wanted
            .iter()
            .find(|it| it.text().contains('/') || it.text().is_empty());
        match bad {
            Some(bad) => Err(Failure::new(
                Kind::Usage,
                format!(
                    "--netns {}: give a name below {}, as `ip netns` lists them, or all",
                    bad.text(),
                    DIRECTORY
                ),
            )
            .into()),
            None => Ok(Self(wanted)),
        }
    }

    /// Whether there are others than the run's own.
    pub fn is_elsewhere(&self) -> bool {
        !self.0.is_empty()
    }

    /// Those that were given by name or by pattern.
    pub fn given(&self) -> impl Iterator<Item = &Asked> {
        self.0.iter().filter(|it| **it != Asked::All)
    }

    /// Whether the run's own is one of them.
    pub fn has_own(&self) -> bool {
        self.0.is_empty() || self.0.contains(&Asked::All)
    }

    /// Whether a network namespace of this name is one of them.
    pub fn matches(&self, name: &str) -> bool {
        self.0
            .iter()
            .any(|it| *it == Asked::All || it.matches(name))
    }
}

/// A network namespace. It lives on for as long as this is held.
#[derive(Debug)]
pub struct Namespace {
    /// Its name.
    pub name: String,
    file: File,
}

impl Namespace {
    /// By its name. `None`: there is a file, and it is no namespace, or none yet.
    ///
    /// # Errors
    ///
    /// There is no such file, or it cannot be opened.
    pub fn open(name: &str) -> io::Result<Option<Self>> {
        // Whatever else may be there is not waited for.
        let file = File::options()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(Path::new(DIRECTORY).join(name))?;
        let is_namespace = fstatfs(&file)?.filesystem_type() == NSFS;
        let name = name.to_owned();
        Ok(is_namespace.then_some(Self { name, file }))
    }

    /// Its number, which no other has at the same time.
    pub fn inode(&self) -> Result<u64> {
        Ok(self.file.metadata()?.ino())
    }

    /// Does something with this thread in it. A socket that is opened there stays there.
    ///
    /// # Errors
    ///
    /// It cannot be entered.
    pub fn enter<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        /// Brings the thread back.
        struct Back(File);
        impl Drop for Back {
            fn drop(&mut self) {
                if let Err(error) = setns(&self.0, CloneFlags::CLONE_NEWNET) {
                    // All else would be done in the wrong place.
                    eprintln!("twheel: cannot return to its network namespace: {error}");
                    process::abort();
                }
            }
        }
        let own = File::open("/proc/thread-self/ns/net");
        let back = Back(own.context("cannot open this network namespace")?);
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

/// All names that are there.
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

/// What has become of a name.
#[derive(Debug)]
pub enum News {
    /// It is there, and its namespace is.
    Is(Namespace),
    /// It is there no more.
    Gone(String),
    /// It is there, and what it names is no network namespace, or cannot be opened: why.
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

/// The names, and those that come and go.
pub struct NameWatch {
    inotify: Inotify,
    /// Runs while there are names whose namespaces are not there yet.
    retry: TimerFd,
    /// Those names, and since when.
    unmounted: BTreeMap<String, Instant>,
}

impl NameWatch {
    /// From now on. Those that are there are told first.
    ///
    /// # Errors
    ///
    /// The directory cannot be made or watched.
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
        // As `ip netns add` makes it.
        let made = fs::create_dir_all(DIRECTORY);
        made.with_context(|| format!("cannot make {DIRECTORY}: `mkdir` it before the start"))?;
        let flags = AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_MOVED_TO
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVED_FROM;
        let watched = self.inotify.add_watch(DIRECTORY, flags);
        watched.with_context(|| format!("cannot watch {DIRECTORY}"))?;
        Ok(())
    }

    /// Tells of a name once more, if it is there.
    pub fn look_again(&mut self, name: &str) {
        self.unmounted.insert(name.to_owned(), Instant::now());
        self.wake();
    }

    /// Notes all that are there.
    fn list(&mut self) -> Result<()> {
        for name in names()? {
            self.unmounted.entry(name).or_insert_with(Instant::now);
        }
        Ok(())
    }

    /// What has become of them since. `known`: the names that were told and are not gone.
    ///
    /// # Errors
    ///
    /// The kernel does not say.
    pub fn news(&mut self, known: &[&str]) -> Result<Vec<News>> {
        let mut news = Vec::new();
        loop {
            let events = match self.inotify.read_events() {
                Ok(events) => events,
                Err(nix::Error::EAGAIN) => break,
                Err(nix::Error::EINTR) => continue,
                Err(error) => return Err(error).context("cannot hear of network namespaces"),
            };
            for event in events {
                let is_removed = event.mask.contains(AddWatchFlags::IN_IGNORED);
                if is_removed {
                    // The directory was removed.
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
                Ok(None) => "it is no network namespace".to_owned(),
                // So it is of the file of `ip netns add`, for all who may not read everything.
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

    /// Sets the timer, if there is something to wait for. It is readable no more until it expires again.
    fn wake(&self) {
        let retry = TimeSpec::from(RETRY);
        // These fail where their arguments are wrong, and these are not.
        let _ = match self.unmounted.is_empty() {
            true => self.retry.unset(),
            false => self
                .retry
                .set(Expiration::OneShot(retry), TimerSetTimeFlags::empty()),
        };
    }

    /// NameWatch of which nothing was told yet.
    pub fn untold(&self) -> impl Iterator<Item = &str> {
        self.unmounted.keys().map(String::as_str)
    }

    /// Of these one is readable when there may be [`news`](Self::news).
    pub fn sources(&self) -> [BorrowedFd<'_>; 2] {
        [self.inotify.as_fd(), self.retry.as_fd()]
    }
}
