//! The network namespaces of a run: watches their names and interfaces, and follows changes.

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
    model::{Happened, RunEvent},
    names::LABEL_BYTES,
    netns::{NameWatch, Namespace, News},
    notices,
    pins::{self, Instance},
    stub::{Stubs, TailCalls},
};

/// The epoll number of notices of names; the notices of interfaces have the numbers of their
/// namespaces.
const NAMES: u64 = u64::MAX;
/// The number of the run's own namespace, which no other has.
const OWN: u32 = MAX_NAMESPACES;
/// The longest name, in bytes: it must fit, with an interface's name, into the label that programs
/// and readers look up.
const LONGEST: usize = LABEL_BYTES - libc::IFNAMSIZ;

/// A network namespace that is watched.
struct There<'a> {
    // Declared first, so that it is dropped before the namespace.
    news: notices::InterfaceNotices,
    interfaces: Interfaces<'a>,
    /// `None`: the run's own namespace.
    other: Option<OtherNamespace>,
}

/// A network namespace other than the run's own.
struct OtherNamespace {
    namespace: Namespace,
    inode: u64,
    /// The namespace's part of the instance.
    part: Instance,
    /// The namespace's other names.
    also: BTreeSet<String>,
}

impl<'a> There<'a> {
    /// Does something in this namespace.
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

    /// The changes of its interfaces since the last call.
    fn changes(&mut self) -> Result<Vec<Change>> {
        self.enter(|interfaces, news| news.changes(interfaces.numbers().into_iter()))
    }
}

impl OtherNamespace {
    /// Detaches, and removes the namespace's part of the instance. Prints what cannot be removed.
    /// Returns the namespace's name.
    fn remove(self) -> String {
        let Self {
            namespace, part, ..
        } = self;
        if let Err(error) = namespace.enter(|| part.remove()) {
            say!(
                "{}: some pins could not be removed: {error:#}: remove them with `twheel detach`",
                namespace.name
            );
        }
        namespace.name
    }
}

/// What is needed to watch other network namespaces than the run's own.
struct Others {
    calls: TailCalls,
    names: NameWatch,
    /// The inode of the run's own namespace.
    own: u64,
    /// Names of namespaces for which there was no number.
    waiting: BTreeSet<String>,
}

/// The network namespaces of a run.
pub struct Namespaces<'a> {
    common: Common<'a>,
    instance: Instance,
    /// By number; the run's own has [`OWN`].
    there: BTreeMap<u32, There<'a>>,
    others: Option<Others>,
    /// Numbers of namespaces that were left since changes were read.
    freed: BTreeSet<u32>,
    /// Changes that were read early and are still to be followed.
    early: Changes,
    epoll: Epoll,
}

/// Changes that were read.
#[derive(Default)]
struct Changes {
    /// The changes of interfaces, in order, by the number of the network namespace.
    interfaces: BTreeMap<u32, Vec<Change>>,
    /// Names of network namespaces have appeared or disappeared.
    names: bool,
    /// An interface was detached since it had disappeared.
    went: bool,
}

impl<'a> Namespaces<'a> {
    /// Attaches to nothing yet.
    ///
    /// # Errors
    ///
    /// Names or interfaces cannot be watched, or what an earlier run has left cannot be removed.
    pub fn new(common: Common<'a>, instance: &Instance, plane: &mut DataPlane) -> Result<Self> {
        let setup = common.setup;
        let selection = &setup.namespaces;
        let mut new = Self {
            there: BTreeMap::new(),
            others: None,
            freed: BTreeSet::new(),
            early: Changes::default(),
            epoll: Epoll::new(EpollCreateFlags::EPOLL_CLOEXEC)?,
            instance: instance.clone(),
            common,
        };
        if selection.has_own() {
            // Listen first, so that no change is missed.
            let news = notices::InterfaceNotices::listen()?;
            let interfaces = Interfaces::new(new.common.clone(), instance.clone(), None)?;
            new.add(OWN, news, interfaces, None)?;
        }
        if selection.is_elsewhere() {
            // Each namespace takes five file descriptors. Raise the limit; if it is still too low,
            // the namespaces beyond it are reported.
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

    /// Attaches to all interfaces that exist.
    ///
    /// # Errors
    ///
    /// An interface that was named cannot be attached, and is not waited for.
    pub fn attach_all(&mut self, plane: &mut DataPlane) -> Result<()> {
        match self.there.get_mut(&OWN) {
            Some(own) => own.enter(|interfaces, _| interfaces.attach_all(plane))?,
            None => {
                // Attached by an earlier run: packets of a namespace that is not watched must not
                // be seen.
                for interface in self.instance.pins().interfaces()? {
                    self.instance.detach_from(&interface)?;
                    say!("{interface}: detached: --netns does not include this network namespace");
                    let event = RunEvent::at(Happened::Detached, &interface);
                    self.common.notes.borrow_mut().push(event);
                }
            }
        }
        self.attach_others(plane)?;
        self.common.watch.borrow_mut().remove_left()
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
        // Pins of an earlier run, for namespaces that this one does not watch.
        self.instance
            .remove_elsewhere_but(|name| selection.matches(name))?;
        self.follow_names(plane)?;
        self.follow(plane)?;
        // If there is no namespace, that was printed already.
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

    /// Handles all changes since the last call. Returns whether an interface was attached.
    ///
    /// # Errors
    ///
    /// The kernel's notices cannot be read any more, or the programs cannot be updated.
    pub fn follow(&mut self, plane: &mut DataPlane) -> Result<bool> {
        let mut attached = false;
        loop {
            self.freed.clear();
            let mut changes = self.told()?;
            if changes.interfaces.is_empty() && !changes.names {
                return Ok(attached);
            }
            self.detach_gone(&mut changes)?;
            if changes.names {
                let (is_room, has_come) = self.follow_names(plane)?;
                changes.went |= is_room;
                attached |= has_come;
            }
            // A freed number may belong to another namespace by now.
            for (number, changes) in &changes.interfaces {
                if self.freed.contains(number) {
                    continue;
                }
                attached |= self.try_in(*number, |interfaces| interfaces.follow(plane, changes))?;
            }
            if changes.went {
                attached |= self.fill(plane)?;
            }
        }
    }

    /// Detaches from interfaces that have disappeared, in all namespaces: an interface that has
    /// moved is attached in its new namespace only after that.
    fn detach_gone(&mut self, changes: &mut Changes) -> Result<()> {
        for (number, told) in &changes.interfaces {
            changes.went |= self.try_in(*number, |interfaces| interfaces.detach_gone(told))?;
        }
        Ok(())
    }

    /// Detaches from interfaces that have disappeared from a namespace, before those of a new one
    /// are attached: some may have moved there. All else that has changed is followed later.
    fn detach_moved(&mut self) -> Result<()> {
        let mut changes = self.told()?;
        let detached = self.detach_gone(&mut changes);
        // The namespaces that this has left have no changes to follow.
        changes
            .interfaces
            .retain(|number, _| self.there.contains_key(number));
        self.early = changes;
        detached
    }

    /// The changes since the last call. Reads until there are no more: when the kernel reports an
    /// interface that has moved in, it has already reported that it has left its former namespace.
    fn told(&mut self) -> Result<Changes> {
        /// Most reads, since changes may come without end.
        const TIMES: usize = 16;
        let mut told = mem::take(&mut self.early);
        for _ in 0..TIMES {
            let mut events = [EpollEvent::empty(); 64];
            let count = match self.epoll.wait(&mut events, EpollTimeout::ZERO) {
                Err(nix::Error::EINTR) => continue,
                count => count.context("cannot receive notices of network namespaces")?,
            };
            let mut is_more = false;
            for event in &events[..count] {
                if event.data() == NAMES {
                    told.names = true;
                    continue;
                }
                let number = event.data() as u32;
                let Some(there) = self.there.get_mut(&number) else {
                    continue;
                };
                match there.changes() {
                    Ok(changes) => told.interfaces.entry(number).or_default().extend(changes),
                    Err(error) => {
                        told.interfaces.remove(&number);
                        self.give_up(number, error)?;
                    }
                }
                is_more = true;
            }
            if !is_more {
                break;
            }
        }
        Ok(told)
    }

    /// Does something with the interfaces of one namespace. If that fails, the namespace is no
    /// longer watched; for the run's own namespace the error ends the run.
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
        say!("{name}: this network namespace is no longer watched: {error:#}");
        self.leave(number);
        Ok(())
    }

    /// Attaches to interfaces in all namespaces that were refused for lack of capacity. Returns
    /// whether it did.
    fn fill(&mut self, plane: &mut DataPlane) -> Result<bool> {
        self.common.said.borrow_mut().full = false;
        let mut attached = false;
        let numbers: Vec<_> = self.there.keys().copied().collect();
        for number in numbers {
            attached |= self.try_in(number, |interfaces| interfaces.fill(plane))?;
        }
        Ok(attached)
    }

    /// Follows changes of names. Returns whether a namespace was left, and whether an interface of
    /// a new one was attached.
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

    /// Watches a network namespace. Returns whether it is new.
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
                    "{name}: another name of the network namespace {}",
                    other.namespace.name
                );
            }
            return Ok(false);
        }
        if let Some(number) = find(&|it| it.namespace.name == name) {
            // The former namespace of this name has disappeared unnoticed.
            self.leave(number);
        }
        let Some(others) = &mut self.others else {
            return Ok(false);
        };
        if inode == others.own && self.common.setup.namespaces.has_own() {
            return Ok(false);
        }
        if name.len() > LONGEST {
            return Err(anyhow!("its name is longer than {LONGEST} bytes"));
        }
        let is_free = |number| !self.there.contains_key(&number);
        let Some((part, number)) = self.instance.elsewhere(&name, inode, is_free)? else {
            if others.waiting.is_empty() {
                say!(
                    "{name}: not watched, nor are other new namespaces: a run has a capacity of \
                     {MAX_NAMESPACES} network namespaces: name the ones you want with --netns"
                );
            }
            others.waiting.insert(name);
            return Ok(false);
        };
        let (common, calls) = (self.common.clone(), &others.calls);
        let prepare = || {
            // Listen first, so that no change is missed.
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
        let attached = added.and_then(|()| self.detach_moved());
        let attached = attached.and_then(|()| match self.there.get_mut(&number) {
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

    /// A name has disappeared. Returns whether a network namespace was left.
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
        say!("{name}: this network namespace disappeared: its flows end by their timeouts");
        true
    }

    /// Leaves another network namespace. If it has another name, it is watched again under that;
    /// and a namespace for which there was no number is watched now.
    fn leave(&mut self, number: u32) {
        let Some(mut there) = self.there.remove(&number) else {
            return;
        };
        self.freed.insert(number);
        self.early.interfaces.remove(&number);
        let (name, mut again) = match there.other {
            Some(mut other) => {
                let again = mem::take(&mut other.also);
                (other.remove(), again)
            }
            None => return,
        };
        if let Err(error) = there.interfaces.leave_all() {
            say!("{name}: cannot update the programs after detaching: {error:#}");
        }
        if let Some(others) = &mut self.others {
            again.append(&mut others.waiting);
            for name in &again {
                others.names.look_again(name);
            }
        }
    }
}
