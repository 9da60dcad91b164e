//! The interfaces of a run: attaches to those that exist at the start, and follows changes.

use std::{
    cell::RefCell,
    collections::{BTreeSet, HashMap, HashSet},
    rc::Rc,
};

use anyhow::Result;
use nix::{net::if_::if_nametoindex, unistd::Gid};
use twheel_common::state::{INDEX_BITS, Way, elsewhere};

use super::{
    report::Notes,
    setup::Setup,
    targets::{Coming, Gone, Targets, Then, Why},
};
use crate::{
    attach::{self, ProgramSource},
    data_plane::DataPlane,
    failure::{Failure, Kind},
    hooks::{HIDES_TAGS, Incoming, shows_tags},
    interfaces::{self, Change, Interface, Known},
    model::{Happened, RunEvent},
    patterns::Selection,
    pins::Instance,
    stub::Stubs,
    watched::Watch,
    zones::zone_of,
};

/// What the interfaces of all network namespaces share.
#[derive(Clone)]
pub struct Common<'a> {
    pub setup: &'a Setup,
    pub group: Option<Gid>,
    pub watch: Rc<RefCell<Watch>>,
    pub said: Rc<RefCell<SaidOnce>>,
    /// What the run is to tell of itself.
    pub notes: Notes,
}

/// A network namespace other than the run's own.
pub struct Elsewhere {
    /// The namespace's name.
    pub name: String,
    /// The namespace's number among those that are watched.
    pub number: u32,
    /// The programs for this namespace.
    pub stubs: Stubs,
}

/// The interfaces of a run in one network namespace. Whenever they are worked on, the thread is in
/// that namespace.
pub struct Interfaces<'a> {
    common: Common<'a>,
    /// The run's instance, or its part for that namespace.
    instance: Instance,
    /// `None`: the run's own namespace.
    elsewhere: Option<Elsewhere>,
    known: Known,
    targets: Targets,
    /// Interfaces where XDP sees incoming packets and, as far as is known, all VLAN tags.
    by_xdp: BTreeSet<u32>,
}

/// Messages that were printed and are not to be repeated.
#[derive(Default)]
pub struct SaidOnce {
    /// The message that the capacity is reached; reset when there is capacity again.
    pub full: bool,
    port: bool,
    vlan: bool,
}

/// Prints the patterns that match no interface.
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

/// Whether the change may bring tagged frames.
fn brings_tags(change: &Change) -> bool {
    matches!(change, Change::Is(is) if is.is_vlan() || is.filters_vlans)
}

impl<'a> Interfaces<'a> {
    /// For a run whose data plane is loaded. Attaches to nothing yet.
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
            by_xdp: BTreeSet::new(),
        })
    }

    /// The number by which programs and readers know the interface with this index in its network
    /// namespace.
    fn number(&self, index: u32) -> u32 {
        match &self.elsewhere {
            Some(there) => elsewhere(there.number) | index,
            None => index,
        }
    }

    /// The name by which users know the interface with this name in its network namespace.
    fn label(&self, name: &str) -> String {
        match &self.elsewhere {
            Some(there) => format!("{}/{name}", there.name),
            None => name.to_owned(),
        }
    }

    /// Tells the programs which interfaces are stacked on which. With several network namespaces,
    /// any interface may be stacked on any other, so they are told nothing.
    fn restack(&self) -> Result<()> {
        match self.common.setup.selection.is_everywhere() {
            true => Ok(()),
            false => self.common.watch.borrow_mut().restack(&self.known),
        }
    }

    /// Gives a group access to the pins, or the owner alone.
    pub fn permit(&self) -> Result<()> {
        self.instance.permit(self.common.group)
    }

    /// Removes what programs were told of the interfaces. Call it when all are detached. If it fails
    /// for one, it goes on with the others.
    pub fn leave_all(&mut self) -> Result<()> {
        let indexes = self.targets.clear();
        let leave = |index| self.common.watch.borrow_mut().leave(self.number(index));
        let left: Vec<_> = indexes.into_iter().map(leave).collect();
        left.into_iter().collect()
    }

    /// Attaches to all interfaces that exist.
    ///
    /// # Errors
    ///
    /// An interface that was named cannot be attached, and is not waited for.
    pub fn attach_all(&mut self, plane: &mut DataPlane) -> Result<()> {
        attach::detach_renamed(&self.instance)?;
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
                say!("{name}: does not exist yet: waiting for it");
                continue;
            }
            if let Err(error) = self.attach(plane, number) {
                if !self.common.setup.wait || if_nametoindex(name.as_str()).is_ok() {
                    return Err(error);
                }
                self.instance.detach_from(&name)?;
                say!("{name}: {error:#}: waiting for it");
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
        // Pins of an earlier run, for interfaces that have disappeared, were renamed, or are not
        // selected in this run.
        for held in self.instance.pins().interfaces()? {
            if !names.contains(held.as_str()) || !self.common.setup.selection.matches(&held) {
                self.instance.detach_from(&held)?;
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

    /// The indexes of the interfaces that are attached or were refused.
    pub fn numbers(&self) -> Vec<u32> {
        self.targets.known().collect()
    }

    /// Detaches from interfaces that have disappeared. This comes before all else, since an
    /// interface that has moved to another network namespace carries the programs of this one until
    /// then. Returns whether one was detached.
    pub fn detach_gone(&mut self, changes: &[Change]) -> Result<bool> {
        let mut went = false;
        for change in changes {
            self.known.note(change);
            if let Change::Gone(index) = change {
                went |= self.leave(*index)?;
            }
        }
        Ok(went)
    }

    /// Handles the other changes. Returns whether an interface was attached.
    pub fn follow(&mut self, plane: &mut DataPlane, changes: &[Change]) -> Result<bool> {
        // An interface that has disappeared again by now is not attached.
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
                self.note(is)?;
                attached |= self.come(plane, is)?;
            }
        }
        if changes.iter().any(brings_tags) {
            self.tell_hidden_tags();
        }
        self.restack()?;
        Ok(attached)
    }

    fn has(&self, index: u32) -> bool {
        self.targets.attached().any(|it| it == index)
    }

    /// Attaches to an interface that exists, completely or not at all.
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
        // The interface may have appeared since the options were checked. The check comes before
        // the attachment, so that nothing fails after it.
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
            say!("{label}: {why}: using {by} for incoming packets");
        }
        say!("{label}: attached, {}", attached.describe());
        self.common.notes.borrow_mut().push(RunEvent {
            hook: Some(attached.hook()),
            ..RunEvent::at(Happened::Attached, &label)
        });
        if attached.egress.is_none()
            && self.common.setup.reaps()
            && self.common.setup.selection.count() == 1
        {
            say!(
                "{interface}: outgoing packets are not seen, so --reap may act on flows that only \
                 this host keeps alive"
            );
        }
        match attached.ingress {
            Incoming::Xdp(_) if !setup.hooks.hides_tags(&is, &self.known) => {
                self.by_xdp.insert(is.index)
            }
            _ => self.by_xdp.remove(&is.index),
        };
        self.tell_twice(&is);
        Ok(())
    }

    /// Fails if an interface of another network namespace could be mistaken for another one.
    fn check_elsewhere(&self, is: &Interface) -> Result<()> {
        let why = match &self.elsewhere {
            None => return Ok(()),
            Some(_) if is.index == Way::LOOPBACK.0 => {
                "twheel cannot watch the loopback interface of another network namespace: start \
                 another `twheel run` inside that namespace"
            }
            Some(_) if is.index >> INDEX_BITS != 0 => {
                "its index is above a million: start another `twheel run` inside its network \
                 namespace"
            }
            Some(_) => return Ok(()),
        };
        Err(Failure::new(Kind::Interface, why).into())
    }

    /// Attaches to an interface that matches a pattern. Returns whether it did. If that fails, it
    /// prints why, and the run continues.
    fn attach_matching(&mut self, plane: &mut DataPlane, interface: &Interface) -> Result<bool> {
        let (name, label) = (&interface.name, self.label(&interface.name));
        let number = self.number(interface.index);
        let has_room = self.common.watch.borrow().has_room(number, &label);
        if !has_room {
            let mut said = self.common.said.borrow_mut();
            if !said.full {
                let room = self.common.watch.borrow().room();
                say!(
                    "{label}: not attached, nor are other new interfaces: this run has reached its \
                     capacity of {room} interfaces: exclude some with --exclude"
                );
                said.full = true;
            }
            drop(said);
            self.targets.refuse(interface.index, name, Why::Full);
            return Ok(false);
        }
        let number = self.targets.enter(name);
        let Err(error) = self.attach(plane, number) else {
            return Ok(true);
        };
        self.instance.detach_from(name)?;
        self.targets.give_up(number);
        match interfaces::by_index(interface.index) {
            Ok(_) => {
                say!("{label}: not attached: {error:#}");
                self.targets.refuse(interface.index, name, Why::Failed);
            }
            Err(_) => say!("{label}: disappeared before it was attached"),
        }
        Ok(false)
    }

    /// Handles an interface that has disappeared. Returns whether it was watched.
    fn leave(&mut self, index: u32) -> Result<bool> {
        let selection = &self.common.setup.selection;
        let Some(Gone { name, called, then }) = self.targets.gone(selection, index) else {
            return Ok(false);
        };
        // If the interface has moved to another network namespace, its packets would still be seen
        // there. As long as they are, programs must know the interface.
        let detached = self.instance.detach_from(&name);
        self.common.watch.borrow_mut().leave(self.number(index))?;
        detached?;
        let then = match then {
            Then::Awaited if called != name => format!(": waiting for {name}"),
            Then::Awaited => ": waiting for it".to_owned(),
            Then::Matches => String::new(),
            Then::Over => {
                format!(": start `twheel run` again when {name} is back, or use --wait-iface")
            }
        };
        let label = self.label(&called);
        say!("{label}: disappeared: detached, its flows end by their timeouts{then}");
        self.note_detached(&label);
        Ok(true)
    }

    fn note_detached(&self, label: &str) {
        let event = RunEvent::at(Happened::Detached, label);
        self.common.notes.borrow_mut().push(event);
    }

    /// Attaches to interfaces that were refused for lack of capacity, if there is capacity now.
    /// Returns whether it did.
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

    /// Notes the new name and MTU of an interface that is watched.
    fn note(&mut self, is: &Interface) -> Result<()> {
        let Some(changed) = self.targets.note(is) else {
            return Ok(());
        };
        let label = self.label(&is.name);
        if let Some(earlier) = changed.renamed {
            let earlier = self.label(&earlier);
            self.common
                .watch
                .borrow_mut()
                .rename(self.number(is.index), &label)?;
            say!("{earlier}: renamed to {}: still watched", is.name);
            // From now on events and the history have the new name.
            self.note_detached(&earlier);
            let event = RunEvent::at(Happened::Attached, &label);
            self.common.notes.borrow_mut().push(event);
        }
        if changed.has_new_mtu {
            say!("{label}: MTU changed to {}: still watched", is.mtu);
        }
        // The interface may have become a port.
        self.tell_twice(is);
        Ok(())
    }

    /// Attaches to an interface that exists, if it is selected and not attached. Returns whether it
    /// did.
    fn come(&mut self, plane: &mut DataPlane, is: &Interface) -> Result<bool> {
        let coming = self.targets.coming(&self.common.setup.selection, is);
        if coming == Coming::Nothing {
            return Ok(false);
        }
        let named = self.targets.find(&is.name);
        let old = named.and_then(|number| self.targets.detach(number));
        if let Some(old) = &old {
            say!(
                "{}: another interface has this name now: detached from the old one, now called {}",
                self.label(&is.name),
                old.called
            );
            let known_as = self.number(old.index);
            self.common.watch.borrow_mut().leave(known_as)?;
            self.instance.detach_from(&is.name)?;
            self.note_detached(&self.label(&old.called));
        }
        let attached = match coming {
            Coming::Nothing => false,
            Coming::Matches => self.attach_matching(plane, is)?,
            Coming::Awaited(number) => match self.attach(plane, number) {
                Ok(()) => true,
                Err(error) => {
                    self.instance.detach_from(&is.name)?;
                    say!(
                        "{}: {error:#}: trying again when the interface changes",
                        is.name
                    );
                    false
                }
            },
        };
        if attached {
            self.targets.admit(is.index);
            self.instance.permit_links(&is.name, self.common.group)?;
        }
        // The interface that has lost this name may be selected under its new one.
        let renamed = old.and_then(|old| self.known.get(old.index)).cloned();
        if let Some(renamed) = renamed {
            return Ok(self.come(plane, &renamed)? || attached);
        }
        Ok(attached)
    }

    /// Prints, once per interface, that XDP does not see its VLAN tags, since it has a VLAN
    /// interface now.
    fn tell_hidden_tags(&mut self) {
        let (hooks, known) = (&self.common.setup.hooks, &self.known);
        self.by_xdp.retain(|index| {
            let hidden = known.get(*index).filter(|it| hooks.hides_tags(it, known));
            if let Some(Interface { name, .. }) = hidden {
                say!(
                    "{name}: it has a VLAN interface now, and {HIDES_TAGS}: run `{}`, or restart \
                     twheel",
                    shows_tags(name)
                );
            }
            hidden.is_none()
        });
    }

    /// Prints that an interface and one above or below it are both watched, if patterns are in use;
    /// once for each kind.
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
                        "{above_name} is on top of {below_name}, and both are watched: the same \
                         packets are seen twice, and each is counted where it is seen first"
                    );
                    said.port = true;
                }
            } else if self.common.setup.config.0.vlans != 0 && !said.vlan {
                say!(
                    "{above_name} is on top of {below_name}, and both are watched: the same \
                     packets are seen twice, as flows with VLAN tag and without: exclude one with \
                     --exclude, or use --vlan ignore"
                );
                said.vlan = true;
            }
        }
    }
}
