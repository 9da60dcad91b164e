//! The interfaces of a run in other network namespaces, which come and go with these.

use std::{collections::BTreeMap, os::fd::OwnedFd};

use anyhow::{Context, Result};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    resource::{Resource, getrlimit, setrlimit},
};
use twheel_common::state::MAX_NAMESPACES;

use super::follow::{Common, Elsewhere, Interfaces};
use crate::{
    data_plane::DataPlane,
    failure::{Failure, Kind},
    netns::{self, Names, Namespace, News},
    notices,
    patterns::{self, Asked},
    pins::{self, Instance},
    stub::{Stubs, TailCalls},
};

/// What tells of names, among what tells of interfaces by the numbers of their namespaces.
const NAMES: u64 = u64::MAX;

/// Which network namespaces a run is of.
#[derive(Clone, Debug)]
pub struct Wanted(Vec<Asked>);

impl Wanted {
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
                    netns::DIRECTORY
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

    /// Whether the run's own is one of them.
    pub fn has_own(&self) -> bool {
        self.0.is_empty() || self.0.contains(&Asked::All)
    }

    fn matches(&self, name: &str) -> bool {
        self.0
            .iter()
            .any(|it| *it == Asked::All || it.matches(name))
    }
}

/// One of them.
struct There<'a> {
    // Dropped before the namespace.
    news: notices::Interfaces,
    interfaces: Interfaces<'a>,
    namespace: Namespace,
    inode: u64,
}

/// The network namespaces of a run, but for its own.
pub struct Namespaces<'a> {
    wanted: Wanted,
    common: Common<'a>,
    instance: Instance,
    calls: TailCalls,
    own: u64,
    names: Names,
    /// By their numbers.
    there: BTreeMap<u32, There<'a>>,
    epoll: Epoll,
    is_full: bool,
}

impl<'a> Namespaces<'a> {
    /// Those that are there are attached by the first [`follow`](Self::follow).
    ///
    /// # Errors
    ///
    /// Their names cannot be watched, or an earlier run's cannot be removed.
    pub fn new(
        wanted: Wanted,
        common: Common<'a>,
        instance: &Instance,
        plane: &mut DataPlane,
    ) -> Result<Self> {
        // Each takes five. Where there are too few, that is said of those that are too many.
        if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
            let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
        }
        let new = Self {
            calls: TailCalls::open(plane, instance)?,
            own: pins::namespace()?,
            names: Names::watch()?,
            there: BTreeMap::new(),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            instance: instance.clone(),
            is_full: false,
            wanted,
            common,
        };
        for pattern in new.wanted.0.iter().filter(|it| **it != Asked::All) {
            if !new.names.known().any(|name| pattern.matches(name)) {
                say!(
                    "--netns {}: no network namespace matches: waiting for one",
                    pattern.text()
                );
            }
        }
        for source in new.names.sources() {
            new.epoll
                .add(source, EpollEvent::new(EpollFlags::EPOLLIN, NAMES))?;
        }
        // An earlier run's that this one has nothing to do with.
        for name in instance.namespaces()? {
            let is_there = matches!(Namespace::open(&name), Ok(Some(_)));
            if !is_there || !new.wanted.matches(&name) {
                instance.remove_elsewhere(&name)?;
            }
        }
        Ok(new)
    }

    /// Readable when there is something to [follow](Self::follow).
    ///
    /// # Errors
    ///
    /// There are too many descriptors.
    pub fn ready(&self) -> Result<OwnedFd> {
        Ok(self.epoll.0.try_clone()?)
    }

    /// Does what has been told since.
    ///
    /// # Errors
    ///
    /// The kernel tells nothing any more.
    pub fn follow(&mut self, plane: &mut DataPlane) -> Result<()> {
        self.follow_names(plane)?;
        loop {
            let mut events = [EpollEvent::empty(); 64];
            let count = match self.epoll.wait(&mut events, EpollTimeout::ZERO) {
                Ok(0) => return Ok(()),
                Ok(count) => count,
                Err(nix::Error::EINTR) => continue,
                Err(error) => return Err(error).context("cannot hear of network namespaces"),
            };
            for event in &events[..count] {
                match event.data() {
                    NAMES => self.follow_names(plane)?,
                    number => self.follow_interfaces(plane, number as u32),
                }
            }
        }
    }

    /// The interfaces of all of them.
    pub fn interfaces(&self) -> impl Iterator<Item = &Interfaces<'a>> {
        self.there.values().map(|there| &there.interfaces)
    }

    fn follow_names(&mut self, plane: &mut DataPlane) -> Result<()> {
        let known: Vec<_> = self
            .there
            .values()
            .map(|it| it.namespace.name.as_str())
            .collect();
        for news in self.names.news(&known)? {
            match news {
                News::Gone(name) => self.leave(&name),
                News::Is(namespace) if self.wanted.matches(&namespace.name) => {
                    let name = namespace.name.clone();
                    // One of this name may have gone unnoticed.
                    self.leave(&name);
                    if let Err(error) = self.come(plane, namespace) {
                        say!("{name}: this network namespace is not watched: {error:#}");
                    }
                }
                News::Is(_) => {}
            }
        }
        Ok(())
    }

    fn follow_interfaces(&mut self, plane: &mut DataPlane, number: u32) {
        let Some(there) = self.there.get_mut(&number) else {
            return;
        };
        let There {
            news,
            interfaces,
            namespace,
            ..
        } = there;
        let followed = namespace.enter(|| {
            let numbers = interfaces.numbers();
            let news = news.changes(numbers.into_iter())?;
            interfaces.follow(plane, &news)
        });
        if let Err(error) = followed {
            let name = namespace.name.clone();
            say!("{name}: this network namespace is watched no more: {error:#}");
            self.leave(&name);
        }
    }

    fn come(&mut self, plane: &mut DataPlane, namespace: Namespace) -> Result<()> {
        let inode = namespace.inode()?;
        let name = &namespace.name;
        if inode == self.own && self.wanted.has_own() {
            return Ok(());
        }
        if let Some(other) = self.there.values().find(|it| it.inode == inode) {
            say!(
                "{name}: is the network namespace {}, too",
                other.namespace.name
            );
            return Ok(());
        }
        let mut free = (0..MAX_NAMESPACES).filter(|number| !self.there.contains_key(number));
        let Some(number) = free.next() else {
            if !self.is_full {
                say!(
                    "{name}: not watched, and neither are others that appear: a run has room for {MAX_NAMESPACES} network \
                     namespaces: name those that matter with --netns"
                );
                self.is_full = true;
            }
            return Ok(());
        };
        let part = self.instance.elsewhere(name)?;
        let attach = || -> Result<_> {
            // First, so that nothing is missed.
            let news = notices::Interfaces::listen()?;
            let there = Elsewhere {
                name: name.clone(),
                number,
                stubs: Stubs::load(&self.calls, number, &part)?,
            };
            let mut interfaces = Interfaces::new(self.common.clone(), part.clone(), Some(there))?;
            interfaces.attach_all(plane)?;
            part.share(self.common.group)?;
            Ok((news, interfaces))
        };
        let attached = namespace.enter(attach);
        let (news, interfaces) = match attached {
            Ok(attached) => attached,
            Err(error) => {
                self.instance.remove_elsewhere(name)?;
                return Err(error);
            }
        };
        let event = EpollEvent::new(EpollFlags::EPOLLIN, number.into());
        self.epoll.add(&news, event)?;
        let there = There {
            news,
            interfaces,
            namespace,
            inode,
        };
        self.there.insert(number, there);
        Ok(())
    }

    fn leave(&mut self, name: &str) {
        let mut found = self
            .there
            .iter()
            .filter(|(_, it)| it.namespace.name == name);
        let Some(number) = found.next().map(|(number, _)| *number) else {
            return;
        };
        let Some(mut there) = self.there.remove(&number) else {
            return;
        };
        let left = there.interfaces.leave_all().and_then(|()| {
            let part = self.instance.elsewhere(name)?;
            there.namespace.enter(|| part.remove())
        });
        match left {
            Ok(()) => say!(
                "{name}: this network namespace is gone: flows end when their timeouts are over"
            ),
            Err(error) => {
                say!("{name}: this network namespace is gone, and its pins are not: {error:#}")
            }
        }
    }
}
