//! The interfaces of a run: attached at its start, and as they come and go.

use std::{
    cell::RefCell,
    collections::{HashMap, HashSet},
    rc::Rc,
};

use anyhow::Result;
use nix::{net::if_::if_nametoindex, unistd::Gid};
use twheel_common::state::{INDEX_BITS, Way, elsewhere};

use super::{
    setup::Setup,
    targets::{Coming, Targets, Then},
};
use crate::{
    attach::{self, ProgramSource},
    data_plane::DataPlane,
    failure::{Failure, Kind},
    interfaces::{self, Change, Interface, Known},
    patterns::Selection,
    pins::Instance,
    stub::Stubs,
    watched::Watch,
    zones::zone_of,
};

/// What a run's interfaces have in common, of whatever network namespace they are.
#[derive(Clone)]
pub struct Common<'a> {
    pub setup: &'a Setup,
    pub group: Option<Gid>,
    pub watch: Rc<RefCell<Watch>>,
    pub said: Rc<RefCell<SaidOnce>>,
}

/// Another network namespace than the run's own.
pub struct Elsewhere {
    /// Its name.
    pub name: String,
    /// Its number among those that are watched.
    pub number: u32,
    /// Its programs.
    pub stubs: Stubs,
}

/// The interfaces of a run that are in one network namespace, which the thread is in whenever something is done to them.
pub struct Interfaces<'a> {
    common: Common<'a>,
    /// Of the run, or its part that is of that namespace.
    instance: Instance,
    /// `None`: the run's own.
    elsewhere: Option<Elsewhere>,
    known: Known,
    targets: Targets,
}

/// What is said once.
#[derive(Default)]
pub struct SaidOnce {
    /// That there is no room, until there is.
    pub full: bool,
    port: bool,
    vlan: bool,
}

/// Says which patterns stand for no interface that is there.
pub fn tell_unmatched(selection: &Selection, everywhere: &[&Interfaces<'_>]) {
    let there = || everywhere.iter().flat_map(|it| it.known.iter());
    for pattern in selection.patterns() {
        let matches = |it: &Interface| pattern.matches(&it.name) && selection.matches(&it.name);
        if !there().any(matches) {
            say!(
                "--iface {}: no interface matches: waiting for one",
                pattern.text()
            );
        }
    }
}

impl<'a> Interfaces<'a> {
    /// Of a run whose data plane is loaded. None is attached yet.
    pub fn new(
        common: Common<'a>,
        instance: Instance,
        elsewhere: Option<Elsewhere>,
    ) -> Result<Self> {
        let Setup {
            selection, wait, ..
        } = common.setup;
        Ok(Self {
            targets: Targets::new(selection.names(), *wait),
            common,
            instance,
            elsewhere,
            known: Known::read()?,
        })
    }

    /// What programs and readers know an interface by that has this index in its network namespace.
    fn number(&self, index: u32) -> u32 {
        match &self.elsewhere {
            Some(there) => elsewhere(there.number) | index,
            None => index,
        }
    }

    /// What people know an interface by that has this name in its network namespace.
    fn label(&self, name: &str) -> String {
        match &self.elsewhere {
            Some(there) => format!("{}/{name}", there.name),
            None => name.to_owned(),
        }
    }

    /// Tells programs which interfaces stand upon which. Where there are several network namespaces, each may stand upon any.
    fn restack(&self) -> Result<()> {
        match self.common.setup.selection.is_everywhere() {
            true => Ok(()),
            false => self.common.watch.borrow_mut().restack(&self.known),
        }
    }

    /// Gives a group, or its owner alone, what is pinned.
    pub fn permit(&self) -> Result<()> {
        self.instance.permit(self.common.group)
    }

    /// Lets go of all of them, before the network namespace is let go of. One that fails does not keep the others.
    pub fn leave_all(&mut self) -> Result<()> {
        let indexes = self.targets.clear();
        let leave = |index| self.common.watch.borrow_mut().leave(self.number(index));
        let left: Vec<_> = indexes.into_iter().map(leave).collect();
        left.into_iter().collect()
    }

    /// Attaches to all that are there.
    ///
    /// # Errors
    ///
    /// One that was named cannot be attached, and is not waited for.
    pub fn attach_all(&mut self, plane: &mut DataPlane) -> Result<()> {
        self.attach_named(plane)?;
        if self.common.setup.selection.has_pattern() {
            self.attach_matching_all(plane)?;
        }
        self.restack()
    }

    fn attach_named(&mut self, plane: &mut DataPlane) -> Result<()> {
        for number in 0..self.targets.len() {
            let name = self.targets.name(number).to_owned();
            if self.common.setup.wait && if_nametoindex(name.as_str()).is_err() {
                say!("{name}: not there yet: waited for");
                continue;
            }
            if let Err(error) = self.attach(plane, number) {
                if !self.common.setup.wait || if_nametoindex(name.as_str()).is_ok() {
                    return Err(error);
                }
                self.instance.let_go(&name)?;
                say!("{name}: {error:#}: waited for");
            }
        }
        Ok(())
    }

    fn attach_matching_all(&mut self, plane: &mut DataPlane) -> Result<()> {
        let there: Vec<_> = self.known.iter().cloned().collect();
        let names: HashSet<_> = there
            .iter()
            .map(|interface| interface.name.as_str())
            .collect();
        // An earlier run's: of interfaces that are gone, are called otherwise, or are none of this run's.
        for held in self.instance.pins().interfaces()? {
            if !names.contains(held.as_str()) || !self.common.setup.selection.matches(&held) {
                self.instance.let_go(&held)?;
            }
        }
        if !self.common.setup.selection.is_everywhere() {
            tell_unmatched(&self.common.setup.selection, &[self]);
        }
        for interface in &there {
            let selection = &self.common.setup.selection;
            if selection.matches_pattern(&interface.name) && !self.has(interface.index) {
                self.attach_matching(plane, interface)?;
            }
        }
        Ok(())
    }

    /// The numbers of those that are there and that it has to do with.
    pub fn numbers(&self) -> Vec<u32> {
        self.targets.known().collect()
    }

    /// Lets go of what has gone. First, since one that has moved to another network namespace carries the programs of this one
    /// until then. Returns whether one was let go of.
    pub fn let_go(&mut self, changes: &[Change]) -> Result<bool> {
        let mut went = false;
        for change in changes {
            self.known.note(change);
            if let Change::Gone(index) = change {
                went |= self.leave(*index)?;
            }
        }
        Ok(went)
    }

    /// Does what else changes ask for. Returns whether an interface was attached.
    pub fn follow(&mut self, plane: &mut DataPlane, changes: &[Change]) -> Result<bool> {
        // What has gone by now is not to be attached.
        let mut last = HashMap::new();
        for change in changes {
            match change {
                Change::Is(is) => last.insert(is.index, true),
                Change::Gone(index) => last.insert(*index, false),
            };
        }
        let mut attached = false;
        for change in changes {
            if let Change::Is(is) = change
                && last.get(&is.index) == Some(&true)
            {
                self.note(is);
                attached |= self.come(plane, is)?;
            }
        }
        self.restack()?;
        Ok(attached)
    }

    fn has(&self, index: u32) -> bool {
        self.targets.attached().any(|it| it == index)
    }

    /// Attaches to an interface that is there, wholly or not at all.
    fn attach(&mut self, plane: &mut DataPlane, number: usize) -> Result<()> {
        let attached = self.try_attach(plane, number);
        if attached.is_err()
            && let Some(was) = self.targets.detach(number)
        {
            let known_as = self.number(was.index);
            self.common.watch.borrow_mut().leave(known_as)?;
        }
        attached
    }

    fn try_attach(&mut self, plane: &mut DataPlane, number: usize) -> Result<()> {
        let interface = &self.targets.name(number).to_owned();
        let label = self.label(interface);
        // It may have come since the options were looked at. And before it is attached, so that nothing fails then.
        let is = attach::check_interface(interface)?;
        self.check_elsewhere(&is)?;
        let zones = &self.common.setup.zones;
        let zone = match zone_of(zones, &label) {
            0 => zone_of(zones, interface),
            zone => zone,
        };
        let known_as = self.number(is.index);
        let Common { watch, setup, .. } = &self.common;
        self.targets.attach(number, is.index, is.mtu);
        match plane.config().watched {
            0 => watch.borrow_mut().name_only(&label)?,
            _ => watch
                .borrow_mut()
                .enter(known_as, &label, zone, is.flags())?,
        }
        let programs: &mut dyn ProgramSource = match &mut self.elsewhere {
            Some(there) => &mut there.stubs,
            None => plane,
        };
        let attached = attach::attach(
            programs,
            &self.instance,
            interface,
            &setup.hooks,
            &self.known,
        )?;
        if let Some(why) = &attached.why {
            let by = attached.ingress.name();
            say!("{label}: {why}: incoming packets are seen by {by}");
        }
        say!("{label}: attached, {}", attached.describe());
        if attached.egress.is_none()
            && self.common.setup.reaps()
            && self.common.setup.selection.count() == 1
        {
            say!("{interface}: --reap: packets that go out are not seen, and keep no flow alive");
        }
        self.tell_twice(&is);
        Ok(())
    }

    /// Fails if an interface of another network namespace cannot be told apart from others.
    fn check_elsewhere(&self, is: &Interface) -> Result<()> {
        let why = match &self.elsewhere {
            None => return Ok(()),
            Some(_) if is.index == Way::LOOPBACK.0 => {
                "the loopback interface of another network namespace is not watched: `twheel run` inside of it does"
            }
            Some(_) if is.index >> INDEX_BITS != 0 => {
                "its index is above a million, which takes a `twheel run` inside of its network namespace"
            }
            Some(_) => return Ok(()),
        };
        Err(Failure::new(Kind::Interface, why).into())
    }

    /// Attaches to an interface that a pattern stands for. Returns whether it did: one that cannot be attached is said, and the
    /// run goes on.
    fn attach_matching(&mut self, plane: &mut DataPlane, interface: &Interface) -> Result<bool> {
        let (name, label) = (&interface.name, self.label(&interface.name));
        let number = self.number(interface.index);
        let has_room = self.common.watch.borrow().has_room(number, &label);
        if !has_room {
            let mut said = self.common.said.borrow_mut();
            if !said.full {
                let room = self.common.watch.borrow().room();
                say!(
                    "{label}: not attached, and neither are others that appear: this run has room for {room} interfaces: \
                     leave some out with --exclude"
                );
                said.full = true;
            }
            drop(said);
            self.targets.refuse(interface.index, name, true);
            return Ok(false);
        }
        let number = self.targets.enter(name);
        let Err(error) = self.attach(plane, number) else {
            return Ok(true);
        };
        self.instance.let_go(name)?;
        self.targets.give_up(number);
        match interfaces::by_index(interface.index) {
            Ok(_) => {
                say!("{label}: not attached: {error:#}");
                self.targets.refuse(interface.index, name, false);
            }
            Err(_) => say!("{label}: disappeared before it was attached"),
        }
        Ok(false)
    }

    /// An interface is there no more. Returns whether it was watched.
    fn leave(&mut self, index: u32) -> Result<bool> {
        self.common.watch.borrow_mut().leave(self.number(index))?;
        let selection = &self.common.setup.selection;
        let Some((name, then)) = self.targets.gone(selection, index) else {
            return Ok(false);
        };
        // In another network namespace it would go on to be watched.
        self.instance.let_go(&name)?;
        let then = match then {
            Then::Awaited => ": waited for",
            Then::Matches => "",
            Then::Over => ": start again when it is back, or with --wait-iface",
        };
        let label = self.label(&name);
        say!("{label}: gone: its flows end when their timeouts are over, no packet is seen{then}");
        Ok(true)
    }

    /// Attaches to those for which there was no room before, if there is now. Returns whether it did.
    pub fn fill(&mut self, plane: &mut DataPlane) -> Result<bool> {
        let mut attached = false;
        for index in self.targets.without_room() {
            let waits = self.known.get(index).cloned();
            let waits = waits
                .filter(|interface| self.common.setup.selection.matches_pattern(&interface.name));
            let Some(interface) = waits else {
                self.targets.admit(index);
                continue;
            };
            let (number, label) = (self.number(index), self.label(&interface.name));
            if !self.common.watch.borrow().has_room(number, &label) {
                break;
            }
            self.targets.admit(index);
            attached |= self.come(plane, &interface)?;
        }
        if attached {
            self.restack()?;
        }
        Ok(attached)
    }

    /// Notes what has become of an interface that is watched.
    fn note(&mut self, is: &Interface) {
        let Some(changed) = self.targets.note(is) else {
            return;
        };
        let (prefix, name) = (self.label(""), &changed.name);
        if changed.is_renamed {
            let now = &is.name;
            say!(
                "{prefix}{name}: is called {now} now, and watched as before; for twheel it is still {prefix}{name}"
            );
        }
        if changed.has_new_mtu {
            say!(
                "{prefix}{name}: the MTU is {} now; it is watched as before",
                is.mtu
            );
        }
        // It may have become a port.
        self.tell_twice(is);
    }

    /// Attaches to an interface that is there, if it is to be watched and is not. Returns whether it did.
    fn come(&mut self, plane: &mut DataPlane, is: &Interface) -> Result<bool> {
        let coming = self.targets.coming(&self.common.setup.selection, is);
        if coming == Coming::Nothing {
            return Ok(false);
        }
        if let Some(number) = self.targets.find(&is.name)
            && let Some(old) = self.targets.detach(number)
        {
            say!(
                "{}: {}, which was called so, is let go of: there is another",
                self.label(&is.name),
                old.called
            );
            let known_as = self.number(old.index);
            self.common.watch.borrow_mut().leave(known_as)?;
            self.instance.let_go(&is.name)?;
        }
        let attached = match coming {
            Coming::Nothing => false,
            Coming::Matches => self.attach_matching(plane, is)?,
            Coming::Awaited(number) => match self.attach(plane, number) {
                Ok(()) => true,
                Err(error) => {
                    self.instance.let_go(&is.name)?;
                    say!("{}: {error:#}: tried again when it changes", is.name);
                    false
                }
            },
        };
        if attached {
            self.targets.admit(is.index);
            self.instance.permit_links(&is.name, self.common.group)?;
        }
        Ok(attached)
    }

    /// Says that an interface and one above or below it are both watched, of those that patterns stand for; once for each kind.
    fn tell_twice(&mut self, interface: &Interface) {
        let mut said = self.common.said.borrow_mut();
        if !self.common.setup.selection.has_pattern() || said.port && said.vlan {
            return;
        }
        let watched: HashSet<_> = self.targets.attached().collect();
        let is_other = |it: &&Interface| it.index != interface.index && watched.contains(&it.index);
        for other in self.known.iter().filter(is_other) {
            let (above, below) = if other.is_above(interface) {
                (other, interface)
            } else if interface.is_above(other) {
                (interface, other)
            } else {
                continue;
            };
            let (above_name, below_name) = (self.label(&above.name), self.label(&below.name));
            if !above.is_vlan() {
                if !said.port {
                    say!(
                        "{above_name} lies on {below_name}, and both are watched: the same packets are seen twice, and each is \
                         counted where it is seen first"
                    );
                    said.port = true;
                }
            } else if self.common.setup.config.0.vlans != 0 && !said.vlan {
                say!(
                    "{above_name} lies on {below_name}, and both are watched: the same packets are seen twice, as flows with \
                     their tag and without: --exclude one of the two, or give --vlan ignore"
                );
                said.vlan = true;
            }
        }
    }
}
