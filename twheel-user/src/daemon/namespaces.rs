//! The network namespaces of a run, and what comes and goes there.

use std::{
    collections::{BTreeMap, BTreeSet},
    mem,
    os::fd::OwnedFd,
};

use anyhow::{Context, Result, anyhow};
use nix::sys::{
    epoll::{Epoll, EpollCreateFlags, EpollEvent, EpollFlags, EpollTimeout},
    resource::{Resource, getrlimit, setrlimit},
};
use twheel_common::state::MAX_NAMESPACES;

use super::interfaces::{Common, Elsewhere, Interfaces, tell_unmatched};
use crate::{
    data_plane::DataPlane,
    interfaces::Change,
    names::LABEL_BYTES,
    netns::{NameWatch, Namespace, News},
    notices,
    pins::{self, Instance},
    stub::{Stubs, TailCalls},
};

/// What tells of names, among what tells of interfaces by the numbers of their namespaces.
const NAMES: u64 = u64::MAX;
/// The number of the run's own, which no other has.
const OWN: u32 = MAX_NAMESPACES;
/// Bytes of a name, at most: with that of an interface it has room where programs and readers look it up.
const LONGEST: usize = LABEL_BYTES - libc::IFNAMSIZ;

/// One of them.
struct There<'a> {
    // Dropped before the namespace.
    news: notices::InterfaceNotices,
    interfaces: Interfaces<'a>,
    /// `None`: the run's own.
    other: Option<OtherNamespace>,
}

/// Another network namespace than the run's own.
struct OtherNamespace {
    namespace: Namespace,
    inode: u64,
    /// Its part of the instance.
    part: Instance,
    /// Its other names.
    also: BTreeSet<String>,
}

impl<'a> There<'a> {
    /// Does something in it.
    fn enter<T>(
        &mut self,
        work: impl FnOnce(&mut Interfaces<'a>, &notices::InterfaceNotices) -> Result<T>,
    ) -> Result<T> {
        let work = || work(&mut self.interfaces, &self.news);
        match &self.other {
            Some(other) => other.namespace.enter(work),
            None => work(),
        }
    }

    /// What has become of its interfaces since.
    fn changes(&mut self) -> Result<Vec<Change>> {
        self.enter(|interfaces, news| news.changes(interfaces.numbers().into_iter()))
    }
}

impl OtherNamespace {
    /// Removes its part of the instance. What cannot be removed is said.
    fn remove(self) {
        let name = &self.namespace.name;
        if let Err(error) = self.namespace.enter(|| self.part.remove()) {
            say!("{name}: pins are left, `twheel detach` removes them: {error:#}");
        }
    }
}

/// What it takes to watch other network namespaces than the run's own.
struct Others {
    calls: TailCalls,
    names: NameWatch,
    /// The run's own.
    own: u64,
    /// NameWatch for which there was no number.
    waiting: BTreeSet<String>,
}

/// The network namespaces of a run.
pub struct Namespaces<'a> {
    common: Common<'a>,
    instance: Instance,
    /// By their numbers; the run's own by [`OWN`].
    there: BTreeMap<u32, There<'a>>,
    others: Option<Others>,
    /// Numbers of those that were let go of since changes were read.
    freed: BTreeSet<u32>,
    epoll: Epoll,
}

impl<'a> Namespaces<'a> {
    /// None is attached yet.
    ///
    /// # Errors
    ///
    /// NameWatch or interfaces cannot be watched, or what an earlier run has left cannot be removed.
    pub fn new(common: Common<'a>, instance: &Instance, plane: &mut DataPlane) -> Result<Self> {
        let setup = common.setup;
        let selection = &setup.namespaces;
        let mut new = Self {
            there: BTreeMap::new(),
            others: None,
            freed: BTreeSet::new(),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            instance: instance.clone(),
            common,
        };
        if selection.has_own() {
            // First, so that nothing is missed.
            let news = notices::InterfaceNotices::listen()?;
            let interfaces = Interfaces::new(new.common.clone(), instance.clone(), None)?;
            new.add(OWN, news, interfaces, None)?;
        }
        if selection.is_elsewhere() {
            // Each takes five. Where there are too few, that is said of those that are too many.
            if let Ok((_, most)) = getrlimit(Resource::RLIMIT_NOFILE) {
                let _ = setrlimit(Resource::RLIMIT_NOFILE, most, most);
            }
            let others = Others {
                calls: TailCalls::open(plane, instance)?,
                own: pins::namespace()?,
                names: NameWatch::watch()?,
                waiting: BTreeSet::new(),
            };
            for source in others.names.sources() {
                let event = EpollEvent::new(EpollFlags::EPOLLIN, NAMES);
                new.epoll.add(source, event)?;
            }
            new.others = Some(others);
        }
        Ok(new)
    }

    fn add(
        &mut self,
        number: u32,
        news: notices::InterfaceNotices,
        interfaces: Interfaces<'a>,
        other: Option<OtherNamespace>,
    ) -> Result<()> {
        let event = EpollEvent::new(EpollFlags::EPOLLIN, number.into());
        self.epoll.add(&news, event)?;
        let there = There {
            news,
            interfaces,
            other,
        };
        self.there.insert(number, there);
        Ok(())
    }

    /// Attaches to all interfaces that are there.
    ///
    /// # Errors
    ///
    /// One that was named cannot be attached, and is not waited for.
    pub fn attach_all(&mut self, plane: &mut DataPlane) -> Result<()> {
        match self.there.get_mut(&OWN) {
            Some(own) => own.enter(|interfaces, _| interfaces.attach_all(plane))?,
            None => {
                // An earlier run's: of what is not watched no packet is to be seen.
                for interface in self.instance.pins().interfaces()? {
                    self.instance.let_go(&interface)?;
                    say!("{interface}: let go of: --netns leaves this network namespace out");
                }
            }
        }
        self.attach_others(plane)?;
        self.common.watch.borrow_mut().forget_left()
    }

    fn attach_others(&mut self, plane: &mut DataPlane) -> Result<()> {
        let Some(Others { names, .. }) = &self.others else {
            return Ok(());
        };
        let selection = &self.common.setup.namespaces;
        for pattern in selection
            .given()
            .filter(|it| !names.untold().any(|name| it.matches(name)))
        {
            say!(
                "--netns {}: no network namespace matches: waiting for one",
                pattern.text()
            );
        }
        // An earlier run's that this one has nothing to do with.
        self.instance
            .remove_elsewhere_but(|name| selection.matches(name))?;
        self.follow_names(plane)?;
        self.follow(plane)?;
        // Of a namespace that is not there it was said.
        let everywhere: Vec<_> = self.there.values().map(|it| &it.interfaces).collect();
        if !everywhere.is_empty() {
            tell_unmatched(&self.common.setup.selection, &everywhere);
        }
        Ok(())
    }

    /// Readable when there is something to [follow](Self::follow).
    ///
    /// # Errors
    ///
    /// There are too many descriptors.
    pub fn ready(&self) -> Result<OwnedFd> {
        Ok(self.epoll.0.try_clone()?)
    }

    /// Does what has been told since. Returns whether an interface was attached.
    ///
    /// # Errors
    ///
    /// The kernel tells nothing any more, or the programs cannot be told.
    pub fn follow(&mut self, plane: &mut DataPlane) -> Result<bool> {
        let mut attached = false;
        loop {
            let (changes, names) = self.told()?;
            if changes.is_empty() && !names {
                return Ok(attached);
            }
            // An interface that has moved is gone from one and new in another: what is gone comes first, of all of them.
            let mut went = false;
            self.freed.clear();
            for (number, changes) in &changes {
                went |= self.try_in(*number, |interfaces| interfaces.let_go(changes))?;
            }
            if names {
                let (is_room, has_come) = self.follow_names(plane)?;
                went |= is_room;
                attached |= has_come;
            }
            // A number that was freed may be another's by now.
            for (number, changes) in &changes {
                if self.freed.contains(number) {
                    continue;
                }
                attached |= self.try_in(*number, |interfaces| interfaces.follow(plane, changes))?;
            }
            if went {
                attached |= self.fill(plane)?;
            }
        }
    }

    /// The changes of interfaces, by their network namespace, and whether names have come or gone. Reads until there is no more:
    /// when the kernel tells that an interface has come, it has told already where that has gone from.
    fn told(&mut self) -> Result<(BTreeMap<u32, Vec<Change>>, bool)> {
        /// Reads at most, since more may come all the time.
        const TIMES: usize = 16;
        let (mut told, mut names) = (BTreeMap::<u32, Vec<Change>>::new(), false);
        for _ in 0..TIMES {
            let mut events = [EpollEvent::empty(); 64];
            let count = match self.epoll.wait(&mut events, EpollTimeout::ZERO) {
                Err(nix::Error::EINTR) => continue,
                count => count.context("cannot hear of network namespaces")?,
            };
            let mut is_more = false;
            for event in &events[..count] {
                if event.data() == NAMES {
                    names = true;
                    continue;
                }
                let number = event.data() as u32;
                let Some(there) = self.there.get_mut(&number) else {
                    continue;
                };
                match there.changes() {
                    Ok(changes) => told.entry(number).or_default().extend(changes),
                    Err(error) => self.give_up(number, error)?,
                }
                is_more = true;
            }
            if !is_more {
                break;
            }
        }
        Ok((told, names))
    }

    /// Does something with the interfaces of one. If that fails, it is watched no more; the run's own is what the run is for.
    fn try_in(
        &mut self,
        number: u32,
        work: impl FnOnce(&mut Interfaces<'a>) -> Result<bool>,
    ) -> Result<bool> {
        let Some(there) = self.there.get_mut(&number) else {
            return Ok(false);
        };
        match there.enter(|interfaces, _| work(interfaces)) {
            Ok(done) => Ok(done),
            Err(error) => self.give_up(number, error).map(|()| false),
        }
    }

    fn give_up(&mut self, number: u32, error: anyhow::Error) -> Result<()> {
        let other = self.there.get(&number).and_then(|it| it.other.as_ref());
        let Some(other) = other else {
            return Err(error);
        };
        let name = &other.namespace.name;
        say!("{name}: this network namespace is watched no more: {error:#}");
        self.leave(number);
        Ok(())
    }

    /// Attaches to interfaces for which there was no room, in any of them. Returns whether it did.
    fn fill(&mut self, plane: &mut DataPlane) -> Result<bool> {
        self.common.said.borrow_mut().full = false;
        let mut attached = false;
        let numbers: Vec<_> = self.there.keys().copied().collect();
        for number in numbers {
            attached |= self.try_in(number, |interfaces| interfaces.fill(plane))?;
        }
        Ok(attached)
    }

    /// Returns whether one has gone, and whether an interface of one that has come was attached.
    fn follow_names(&mut self, plane: &mut DataPlane) -> Result<(bool, bool)> {
        let Some(others) = &mut self.others else {
            return Ok((false, false));
        };
        let known = self.there.values().filter_map(|it| it.other.as_ref());
        let known: Vec<_> = known.map(|it| it.namespace.name.as_str()).collect();
        let mut news = others.names.news(&known)?;
        news.retain(|news| self.common.setup.namespaces.matches(news.name()));
        let (mut went, mut attached) = (false, false);
        for news in news {
            match news {
                News::Gone(name) => went |= self.go(&name),
                News::Is(namespace) => {
                    let name = namespace.name.clone();
                    match self.come(plane, namespace) {
                        Ok(has_come) => attached |= has_come,
                        Err(error) => {
                            say!("{name}: this network namespace is not watched: {error:#}");
                        }
                    }
                }
                News::IsNone(name, why) => say!("{name}: not watched: {why}"),
            }
        }
        Ok((went, attached))
    }

    /// Watches a network namespace. Returns whether it was not watched.
    fn come(&mut self, plane: &mut DataPlane, namespace: Namespace) -> Result<bool> {
        let inode = namespace.inode()?;
        let name = namespace.name.clone();
        let find = |of: &dyn Fn(&OtherNamespace) -> bool| {
            let all = self.there.iter();
            let mut found = all.filter(|(_, it)| it.other.as_ref().is_some_and(of));
            found.next().map(|(number, _)| *number)
        };
        if let Some(number) = find(&|it| it.inode == inode) {
            let other = self.there.get_mut(&number).and_then(|it| it.other.as_mut());
            if let Some(other) = other
                && other.namespace.name != name
                && other.also.insert(name.clone())
            {
                say!(
                    "{name}: is the network namespace {}, too",
                    other.namespace.name
                );
            }
            return Ok(false);
        }
        if let Some(number) = find(&|it| it.namespace.name == name) {
            // It has gone unnoticed.
            self.leave(number);
        }
        let Some(others) = &mut self.others else {
            return Ok(false);
        };
        if inode == others.own && self.common.setup.namespaces.has_own() {
            return Ok(false);
        }
        if name.len() > LONGEST {
            return Err(anyhow!("its name has more than {LONGEST} bytes"));
        }
        let is_free = |number| !self.there.contains_key(&number);
        let Some((part, number)) = self.instance.elsewhere(&name, inode, is_free)? else {
            if others.waiting.is_empty() {
                say!(
                    "{name}: not watched, and neither are others that appear: a run has room for {MAX_NAMESPACES} network \
                     namespaces: name those that matter with --netns"
                );
            }
            others.waiting.insert(name);
            return Ok(false);
        };
        let (common, calls) = (self.common.clone(), &others.calls);
        let prepare = || {
            // First, so that nothing is missed.
            let news = notices::InterfaceNotices::listen()?;
            let there = Elsewhere {
                name: name.clone(),
                number,
                stubs: Stubs::load(calls, number, &part)?,
            };
            let interfaces = Interfaces::new(common, part.clone(), Some(there))?;
            Ok((news, interfaces))
        };
        let prepared = namespace.enter(prepare);
        let other = OtherNamespace {
            namespace,
            inode,
            part,
            also: BTreeSet::new(),
        };
        let added = match prepared {
            Ok((news, interfaces)) => self.add(number, news, interfaces, Some(other)),
            Err(error) => {
                other.remove();
                return Err(error);
            }
        };
        let attached = added.and_then(|()| match self.there.get_mut(&number) {
            Some(there) => there.enter(|interfaces, _| {
                interfaces.attach_all(plane)?;
                interfaces.permit()
            }),
            None => Ok(()),
        });
        if attached.is_err() {
            self.leave(number);
        }
        attached.map(|()| true)
    }

    /// A name has gone. Returns whether a network namespace was let go of.
    fn go(&mut self, name: &str) -> bool {
        if let Some(others) = &mut self.others {
            others.waiting.remove(name);
        }
        let mut found = None;
        for (number, there) in &mut self.there {
            if let Some(other) = &mut there.other {
                if other.namespace.name == name {
                    found = Some(*number);
                } else {
                    other.also.remove(name);
                }
            }
        }
        let Some(number) = found else {
            return false;
        };
        self.leave(number);
        say!("{name}: this network namespace is gone: flows end when their timeouts are over");
        true
    }

    /// Lets go of another network namespace. One that has another name comes again under that, and one for which there was no
    /// number comes now.
    fn leave(&mut self, number: u32) {
        let Some(mut there) = self.there.remove(&number) else {
            return;
        };
        self.freed.insert(number);
        let left = there.interfaces.leave_all();
        let Some(mut other) = there.other else {
            return;
        };
        if let Err(error) = left {
            let name = &other.namespace.name;
            say!("{name}: programs could not be told that it is let go of: {error:#}");
        }
        let mut again = mem::take(&mut other.also);
        other.remove();
        if let Some(others) = &mut self.others {
            again.append(&mut others.waiting);
            for name in &again {
                others.names.look_again(name);
            }
        }
    }
}
