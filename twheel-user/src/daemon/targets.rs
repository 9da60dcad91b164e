//! The life of each interface that a run is to watch: away, attached, gone; or refused. Nothing here asks the kernel.

use std::collections::BTreeMap;

use crate::{interfaces::Interface, patterns::Selection};

/// The interfaces of one network namespace that a run is to watch.
pub struct Targets {
    all: Vec<Target>,
    /// Those that a pattern stands for and that are not watched, by their numbers.
    refused: BTreeMap<u32, Refused>,
    /// Those that were named are waited for when they are gone.
    wait: bool,
}

/// An interface to be watched.
struct Target {
    /// As it was asked for, and as its links are pinned.
    name: String,
    /// It was named, and not found by a pattern.
    is_named: bool,
    /// `None`: not there yet, or gone.
    attached: Option<Attached>,
}

/// An interface that is attached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attached {
    /// Its number.
    pub index: u32,
    /// Its name by now.
    pub called: String,
    /// Bytes.
    pub mtu: u32,
}

/// Why an interface is not watched.
struct Refused {
    /// As it was called then.
    name: String,
    /// There was no room for it.
    is_full: bool,
}

/// What is to be done about an interface that is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Coming {
    /// Nothing: it is watched, or not to be watched, or was refused under this name.
    Nothing,
    /// It is attached as one that a pattern stands for.
    Matches,
    /// It is attached as the target of this number, which was waited for.
    Awaited(usize),
}

/// What follows when an interface is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// It is waited for.
    Awaited,
    /// A pattern finds it when it comes back.
    Matches,
    /// It is not watched when it comes back.
    Over,
}

/// What has become of an interface that is attached: what is new, and was otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// The name by which it was asked for.
    pub name: String,
    /// It is called otherwise now.
    pub is_renamed: bool,
    /// It has another MTU.
    pub has_new_mtu: bool,
}

impl Targets {
    /// Those that were named, none of them attached. `wait`: they are waited for when they are gone.
    pub fn new<'a>(names: impl Iterator<Item = &'a str>, wait: bool) -> Self {
        let target = |name: &str| Target {
            name: name.to_owned(),
            is_named: true,
            attached: None,
        };
        Self {
            all: names.map(target).collect(),
            refused: BTreeMap::new(),
            wait,
        }
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.all.len()
    }

    /// The name of one, as it was asked for.
    pub fn name(&self, at: usize) -> &str {
        &self.all[at].name
    }

    /// The number of the one of this name.
    pub fn find(&self, name: &str) -> Option<usize> {
        self.all.iter().position(|it| it.name == name)
    }

    fn find_attached(&self, index: u32) -> Option<usize> {
        let is_it = |it: &Target| it.attached.as_ref().is_some_and(|it| it.index == index);
        self.all.iter().position(is_it)
    }

    /// The indexes of those that are attached.
    pub fn attached(&self) -> impl Iterator<Item = u32> {
        self.all
            .iter()
            .filter_map(|it| it.attached.as_ref())
            .map(|it| it.index)
    }

    /// The indexes of those that are attached or refused.
    pub fn known(&self) -> impl Iterator<Item = u32> {
        self.attached().chain(self.refused.keys().copied())
    }

    /// The number of the target of this name, which a pattern has found if it was not there.
    pub fn enter(&mut self, name: &str) -> usize {
        self.find(name).unwrap_or_else(|| {
            self.all.push(Target {
                name: name.to_owned(),
                is_named: false,
                attached: None,
            });
            self.all.len() - 1
        })
    }

    /// It is attached, under the name by which it was asked for.
    pub fn attach(&mut self, at: usize, index: u32, mtu: u32) {
        let target = &mut self.all[at];
        target.attached = Some(Attached {
            index,
            called: target.name.clone(),
            mtu,
        });
    }

    /// It is attached no more. Returns what it was, if it was.
    pub fn detach(&mut self, at: usize) -> Option<Attached> {
        self.all[at].attached.take()
    }

    /// It is not watched. One that was named is kept in mind.
    pub fn give_up(&mut self, at: usize) {
        if !self.all[at].is_named {
            self.all.swap_remove(at);
        }
    }

    /// All are let go of. Returns the indexes of those that were attached.
    pub fn clear(&mut self) -> Vec<u32> {
        let attached = self.attached().collect();
        self.all.clear();
        attached
    }

    /// An interface that a pattern stands for is not watched. `is_full`: for want of room.
    pub fn refuse(&mut self, index: u32, name: &str, is_full: bool) {
        let name = name.to_owned();
        self.refused.insert(index, Refused { name, is_full });
    }

    /// It may be tried again, or is watched.
    pub fn admit(&mut self, index: u32) {
        self.refused.remove(&index);
    }

    /// The indexes of those for which there was no room.
    pub fn without_room(&self) -> Vec<u32> {
        let full = self.refused.iter().filter(|(_, it)| it.is_full);
        full.map(|(index, _)| *index).collect()
    }

    /// What is to be done about an interface that is there.
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
        // Its attachment was tried under this name.
        let tried = self.refused.get(&is.index);
        match tried.is_some_and(|it| it.name == is.name) {
            true => Coming::Nothing,
            false => coming,
        }
    }

    /// Notes what an interface is like. `None`: it is not attached.
    pub fn note(&mut self, is: &Interface) -> Option<Changed> {
        let at = self.find_attached(is.index)?;
        let target = &mut self.all[at];
        let attached = target.attached.as_mut()?;
        let changed = Changed {
            name: target.name.clone(),
            is_renamed: attached.called != is.name,
            has_new_mtu: attached.mtu != is.mtu,
        };
        attached.called.clone_from(&is.name);
        attached.mtu = is.mtu;
        Some(changed)
    }

    /// An interface is there no more. `None`: it was not attached; else its name, and what follows.
    pub fn gone(&mut self, selection: &Selection, index: u32) -> Option<(String, Then)> {
        self.refused.remove(&index);
        let at = self.find_attached(index)?;
        self.detach(at);
        let target = &self.all[at];
        let name = target.name.clone();
        let then = if self.wait && target.is_named {
            Then::Awaited
        } else if selection.matches_pattern(&name) {
            Then::Matches
        } else {
            Then::Over
        };
        self.give_up(at);
        Some((name, then))
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
            assert_eq!(targets.gone(&eth0, 7), Some(("eth0".to_owned(), then)));
            assert_eq!((targets.len(), targets.attached().count()), (1, 0));
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
        let gone = targets.gone(&veths, 3);
        assert_eq!(gone, Some(("veth3".to_owned(), Then::Matches)));
        assert_eq!(targets.len(), 0);
    }

    #[test]
    fn what_was_refused_is_not_tried_again_under_its_name() {
        let veths = selection("veth*");
        let mut targets = Targets::new(veths.names(), false);
        targets.refuse(3, "veth3", false);
        targets.refuse(4, "veth4", true);
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
        assert!(changed.is_renamed && !changed.has_new_mtu);
        assert_eq!(changed.name, "eth0");
        assert_eq!(targets.coming(&eth0, &is(8, "eth0")), Coming::Awaited(0));
        let old = targets.detach(0).unwrap();
        assert_eq!((old.index, old.called.as_str()), (7, "old0"));
        targets.attach(0, 8, 1500);
        assert_eq!(targets.note(&is(7, "old0")), None);
        assert_eq!(targets.clear(), [8]);
    }
}
