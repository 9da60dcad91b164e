//! The states of each interface that a run is to watch: awaited, absent, attached or refused.
//! Nothing here asks the kernel. `docs/design.md`, *States of an interface*, has a table.

use std::{collections::BTreeMap, mem};

use crate::{interfaces::Interface, patterns::Selection};

/// The interfaces of one network namespace that a run is to watch.
pub struct Targets {
    all: Vec<Target>,
    /// Interfaces that match a pattern and are not watched, by index.
    refused: BTreeMap<u32, Refused>,
    /// Wait for a named interface if it disappears.
    wait: bool,
}

/// An interface to be watched.
struct Target {
    /// The name that was asked for, under which its BPF links are pinned.
    name: String,
    origin: Origin,
    state: State,
}

/// Why an interface is to be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Origin {
    /// It was named.
    Named,
    /// It was found by a pattern.
    Found,
}

/// The state of an interface that is to be watched.
#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// It does not exist yet, or has disappeared, and is attached once it is there.
    Awaited,
    /// It does not exist yet, or has disappeared, and nobody waits for it.
    Absent,
    /// Programs are attached to it.
    Attached(Attached),
}

impl State {
    /// The state of an interface to which nothing is attached.
    fn detached(wait: bool) -> Self {
        match wait {
            true => Self::Awaited,
            false => Self::Absent,
        }
    }

    fn attached(&self) -> Option<&Attached> {
        match self {
            Self::Attached(attached) => Some(attached),
            Self::Awaited | Self::Absent => None,
        }
    }
}

/// An interface that is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// The interface's index.
    pub index: u32,
    /// The interface's present name.
    pub called: String,
    /// The interface's MTU, in bytes.
    pub mtu: u32,
}

/// Why an interface is not watched.
struct Refused {
    /// The interface's name at that time.
    name: String,
    why: Why,
}

/// Why an interface that matches a pattern is not watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Why {
    /// The capacity is reached.
    Full,
    /// Attaching to it has failed.
    Failed,
}

/// What to do about an interface that exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coming {
    /// Nothing: it is attached, or not selected, or was refused under this name.
    Nothing,
    /// Attach to it: it matches a pattern.
    Matches,
    /// Attach to it as this target, by its index, which was waited for.
    Awaited(usize),
}

/// What follows when an interface disappears.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The run waits for it.
    Awaited,
    /// A pattern matches it when it comes back.
    Matches,
    /// It is not attached when it comes back.
    Over,
}

/// An interface that has disappeared.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gone {
    /// The name that was asked for.
    pub name: String,
    /// The name that it had at last.
    pub called: String,
    /// What follows.
    pub then: Then,
}

/// What has changed about an interface that is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// If it was renamed: the name that it had before.
    pub renamed: Option<String>,
    /// Its MTU has changed.
    pub has_new_mtu: bool,
}

impl Targets {
    /// The named interfaces, none of them attached. `wait`: wait for one that disappears.
    pub fn new<'a>(names: impl Iterator<Item = &'a str>, wait: bool) -> Self {
        let target = |name: &str| Target {
            name: name.to_owned(),
            origin: Origin::Named,
            state: State::detached(wait),
        };
        Self {
            all: names.map(target).collect(),
            refused: BTreeMap::new(),
            wait,
        }
    }

    /// The number of targets.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The name of a target, as it was asked for.
    pub fn name(&self, at: usize) -> &str {
        &self.all[at].name
    }

    /// The target of this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.all.iter().position(|it| it.name == name)
    }

    fn find_attached(&self, index: u32) -> Option<usize> {
        let is_it = |it: &Target| it.state.attached().is_some_and(|it| it.index == index);
        self.all.iter().position(is_it)
    }

    /// The indexes of the attached interfaces.
    pub fn attached(&self) -> impl Iterator<Item = u32> {
        self.all
            .iter()
            .filter_map(|it| it.state.attached())
            .map(|it| it.index)
    }

    /// The indexes of the attached and the refused interfaces.
    pub fn known(&self) -> impl Iterator<Item = u32> {
        self.attached().chain(self.refused.keys().copied())
    }

    /// The target of this name; adds one, as found by a pattern, if there is none.
    pub fn enter(&mut self, name: &str) -> usize {
        self.find(name).unwrap_or_else(|| {
            self.all.push(Target {
                name: name.to_owned(),
                origin: Origin::Found,
                state: State::Absent,
            });
            self.all.len() - 1
        })
    }

    /// The target is attached, under the name that was asked for.
    pub fn attach(&mut self, at: usize, index: u32, mtu: u32) {
        let target = &mut self.all[at];
        target.state = State::Attached(Attached {
            index,
            called: target.name.clone(),
            mtu,
        });
    }

    /// The target is no longer attached. Returns what it was, if it was attached.
    pub fn detach(&mut self, at: usize) -> Option<Attached> {
        let wait = self.wait && self.all[at].origin == Origin::Named;
        match mem::replace(&mut self.all[at].state, State::detached(wait)) {
            State::Attached(was) => Some(was),
            State::Awaited | State::Absent => None,
        }
    }

    /// The target is not watched. One that was named stays a target.
    pub fn give_up(&mut self, at: usize) {
        if self.all[at].origin == Origin::Found {
            self.all.swap_remove(at);
        }
    }

    /// Removes all targets. Returns the indexes of the attached ones.
    pub fn clear(&mut self) -> Vec<u32> {
        let attached = self.attached().collect();
        self.all.clear();
        attached
    }

    /// An interface that matches a pattern is not watched.
    pub fn refuse(&mut self, index: u32, name: &str, why: Why) {
        let name = name.to_owned();
        self.refused.insert(index, Refused { name, why });
    }

    /// The interface may be tried again, or is watched.
    pub fn admit(&mut self, index: u32) {
        self.refused.remove(&index);
    }

    /// The indexes of the interfaces that were refused because the capacity was reached.
    pub fn without_room(&self) -> Vec<u32> {
        let full = self.refused.iter().filter(|(_, it)| it.why == Why::Full);
        full.map(|(index, _)| *index).collect()
    }

    /// What to do about an interface that exists.
    pub fn coming(&self, selection: &Selection, is: &Interface) -> Coming {
        if self.find_attached(is.index).is_some() {
            return Coming::Nothing;
        }
        let coming = if selection.matches_pattern(&is.name) {
            Coming::Matches
        } else {
            match self.find(&is.name).filter(|_| self.wait) {
                Some(at) => Coming::Awaited(at),
                None => Coming::Nothing,
            }
        };
        // Attaching to it failed before under this name.
        let tried = self.refused.get(&is.index);
        match tried.is_some_and(|it| it.name == is.name) {
            true => Coming::Nothing,
            false => coming,
        }
    }

    /// Notes the interface's name and MTU. `None`: it is not attached.
    pub fn note(&mut self, is: &Interface) -> Option<Changed> {
        let at = self.find_attached(is.index)?;
        let target = &mut self.all[at];
        let State::Attached(attached) = &mut target.state else {
            return None;
        };
        let changed = Changed {
            renamed: (attached.called != is.name)
                .then(|| mem::replace(&mut attached.called, is.name.clone())),
            has_new_mtu: attached.mtu != is.mtu,
        };
        attached.mtu = is.mtu;
        Some(changed)
    }

    /// The interface has disappeared. `None`: it was not attached.
    pub fn gone(&mut self, selection: &Selection, index: u32) -> Option<Gone> {
        self.refused.remove(&index);
        let at = self.find_attached(index)?;
        let called = self.detach(at)?.called;
        let target = &self.all[at];
        let name = target.name.clone();
        let then = if target.state == State::Awaited {
            Then::Awaited
        } else if selection.matches_pattern(&name) {
            Then::Matches
        } else {
            Then::Over
        };
        self.give_up(at);
        Some(Gone { name, called, then })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn selection(asked: &str) -> Selection {
        Selection::new(&[asked.to_owned()], &[]).unwrap()
    }

    fn is(index: u32, name: &str) -> Interface {
        Interface {
            index,
            name: name.to_owned(),
            mtu: 1500,
            ..Interface::default()
        }
    }

    fn gone(name: &str, then: Then) -> Gone {
        Gone {
            name: name.to_owned(),
            called: name.to_owned(),
            then,
        }
    }

    #[test]
    fn an_interface_that_was_named_is_waited_for_if_that_was_said() {
        let eth0 = selection("eth0");
        for wait in [false, true] {
            let mut targets = Targets::new(eth0.names(), wait);
            let awaited = match wait {
                true => Coming::Awaited(0),
                false => Coming::Nothing,
            };
            assert_eq!(targets.coming(&eth0, &is(7, "eth0")), awaited);
            assert_eq!(targets.coming(&eth0, &is(8, "eth1")), Coming::Nothing);
            targets.attach(0, 7, 1500);
            assert_eq!(targets.coming(&eth0, &is(7, "eth0")), Coming::Nothing);
            assert_eq!(targets.gone(&eth0, 8), None);
            let then = if wait { Then::Awaited } else { Then::Over };
            assert_eq!(targets.gone(&eth0, 7), Some(gone("eth0", then)));
            assert_eq!((targets.len(), targets.attached().count()), (1, 0));
            let left = if wait { State::Awaited } else { State::Absent };
            assert_eq!(targets.all[0].state, left);
            assert_eq!(targets.coming(&eth0, &is(9, "eth0")), awaited);
        }
    }

    #[test]
    fn an_interface_that_a_pattern_has_found_is_forgotten_when_it_goes() {
        let veths = selection("veth*");
        let mut targets = Targets::new(veths.names(), true);
        assert_eq!(targets.coming(&veths, &is(3, "veth3")), Coming::Matches);
        let at = targets.enter("veth3");
        targets.attach(at, 3, 1500);
        assert_eq!(targets.enter("veth3"), at);
        assert_eq!(targets.known().collect::<Vec<_>>(), [3]);
        let found = targets.gone(&veths, 3);
        assert_eq!(found, Some(gone("veth3", Then::Matches)));
        assert_eq!(targets.len(), 0);
    }

    #[test]
    fn what_was_refused_is_not_tried_again_under_its_name() {
        let veths = selection("veth*");
        let mut targets = Targets::new(veths.names(), false);
        targets.refuse(3, "veth3", Why::Failed);
        targets.refuse(4, "veth4", Why::Full);
        assert_eq!(targets.known().collect::<Vec<_>>(), [3, 4]);
        assert_eq!(targets.without_room(), [4]);
        assert_eq!(targets.coming(&veths, &is(3, "veth3")), Coming::Nothing);
        assert_eq!(targets.coming(&veths, &is(3, "veth5")), Coming::Matches);
        targets.admit(4);
        assert_eq!(targets.coming(&veths, &is(4, "veth4")), Coming::Matches);
        assert_eq!(targets.gone(&veths, 3), None);
        assert_eq!(targets.coming(&veths, &is(3, "veth3")), Coming::Matches);
    }

    #[test]
    fn another_of_the_name_takes_the_place_of_one_that_was_renamed() {
        let eth0 = selection("eth0");
        let mut targets = Targets::new(eth0.names(), true);
        targets.attach(0, 7, 1500);
        let changed = targets.note(&is(7, "old0")).unwrap();
        assert!(!changed.has_new_mtu);
        assert_eq!(changed.renamed.as_deref(), Some("eth0"));
        let changed = targets.note(&is(7, "old1")).unwrap();
        assert_eq!(changed.renamed.as_deref(), Some("old0"));
        assert_eq!(targets.coming(&eth0, &is(8, "eth0")), Coming::Awaited(0));
        let old = targets.detach(0).unwrap();
        assert_eq!((old.index, old.called.as_str()), (7, "old1"));
        targets.attach(0, 8, 1500);
        assert_eq!(targets.note(&is(7, "old0")), None);
        assert!(targets.note(&is(8, "new0")).is_some());
        let wanted = Gone {
            called: "new0".to_owned(),
            ..gone("eth0", Then::Awaited)
        };
        assert_eq!(targets.gone(&eth0, 8), Some(wanted));
        assert!(targets.clear().is_empty());
    }
}
