//! The cgroups that a policy limits actions to. The kernel's programs do not know a flow's cgroup,
//! so only the reaper reads them. They are in a pinned map, because another process may load a
//! policy.
//!
//! Like the rules, the map has two halves: the sets of a new policy are written beside those in
//! force. A rule refers to its set by the upper half of its `actions`, so both come into force
//! together.

use std::{
    fs,
    os::unix::fs::{MetadataExt, lchown},
};

use anyhow::{Context, Result, ensure};
use aya::maps::{Array, MapData};
use twheel_common::{policy::MAX_RULES, rule::Rule};

use super::rule::{Policy, Reap};
use crate::{
    maps::{Open, array, pinned},
    pins::Pins,
};

const NAME: &str = "CGROUPS";
/// Size of a set, bytes: each path is followed by a zero.
pub(super) const BYTES: usize = 1024;
/// For each rule, and for flows of no rule.
const HALF: usize = MAX_RULES + 1;
/// Where the number of a set begins in a rule's `actions`; the bits below it are those of
/// [`Actions`](crate::action::Actions).
const SHIFT: u32 = 16;
const _: () = assert!(2 * HALF < 1 << (32 - SHIFT));

/// A set of cgroups, by its index in the map.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CgroupSet(u32);

impl CgroupSet {
    /// The set that a rule's actions are limited to; `None`: they are not limited.
    pub fn of_rule(rule: &Rule) -> Option<Self> {
        (rule.actions >> SHIFT).checked_sub(1).map(Self)
    }

    /// Its paths.
    ///
    /// # Errors
    ///
    /// The map cannot be read.
    pub fn paths(self, pins: &Pins) -> Result<Vec<String>> {
        let sets = array::<[u8; BYTES]>(&pinned(pins), NAME)?;
        let set = sets.get(&self.0, 0).context("cannot read CGROUPS")?;
        let paths = set.split(|byte| *byte == 0).filter(|it| !it.is_empty());
        let path = |path: &[u8]| String::from_utf8_lossy(path).into_owned();
        Ok(paths.map(path).collect())
    }
}

/// The sets of a policy, as they are written.
pub(super) struct Sets(Option<Array<MapData, [u8; BYTES]>>, u32);

impl Sets {
    /// `half`: 0 or 1, the one that is not in force.
    pub(super) fn open(open: Open<'_>, policy: &Policy, half: u32) -> Result<Self> {
        let map = has_any(policy).then(|| array(open, NAME)).transpose()?;
        Ok(Self(map, half * HALF as u32))
    }

    /// Writes a set, and returns the actions with the reference to it. `position`: the rule's
    /// position in the file, from 1 on; 0 for flows of no rule.
    pub(super) fn write(&mut self, position: usize, reap: &Reap) -> Result<u32> {
        let bits = reap.actions.bits();
        let Self(Some(map), first) = self else {
            return Ok(bits);
        };
        if reap.cgroups.is_empty() {
            return Ok(bits);
        }
        let text = text(&reap.cgroups);
        ensure!(text.len() <= BYTES, "the cgroups are longer than {BYTES}");
        let mut set = [0; BYTES];
        set[..text.len()].copy_from_slice(text.as_bytes());
        let index = *first + position as u32;
        map.set(index, set, 0).context("cannot write CGROUPS")?;
        Ok(bits | (index + 1) << SHIFT)
    }
}

/// The paths, as they are in the map.
pub(super) fn text(paths: &[String]) -> String {
    paths
        .iter()
        .flat_map(|path| [path.as_str(), "\0"])
        .collect()
}

fn has_any(policy: &Policy) -> bool {
    let rules = policy.rules.iter().map(|rule| &rule.reap);
    let mut all = rules.chain([&policy.reap]).flatten();
    all.any(|reap| !reap.cgroups.is_empty())
}

/// Makes the map, if a policy needs it and the instance has none: 512 KiB. Whoever may use the
/// other maps may use it.
///
/// # Errors
///
/// The map cannot be made, which takes the user who started the run.
pub(super) fn make_map(pins: &Pins, policy: &Policy) -> Result<()> {
    let pin = pins.object(NAME);
    if !has_any(policy) || pin.exists() {
        return Ok(());
    }
    let made = || -> Result<()> {
        let map = Array::<MapData, [u8; BYTES]>::create(2 * HALF as u32, 0)?;
        map.pin(&pin)?;
        let like = fs::metadata(pins.object("TIMEOUTS"))?;
        lchown(&pin, Some(like.uid()), Some(like.gid()))?;
        Ok(fs::set_permissions(&pin, like.permissions())?)
    };
    made().with_context(|| {
        format!(
            "cannot make the map {}, which a policy with `cgroup` needs: load it as the user who \
             started the run",
            pin.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::action::{Action, Actions};

    #[test]
    fn a_rule_refers_to_its_set_beside_its_actions() {
        let all: Actions = Action::ALL.into_iter().collect();
        assert!(all.bits() < 1 << SHIFT);
        let rule = |set: u32| Rule {
            actions: all.bits() | set << SHIFT,
            ..Rule::default()
        };
        assert_eq!(CgroupSet::of_rule(&rule(0)), None);
        assert_eq!(CgroupSet::of_rule(&rule(1)), Some(CgroupSet(0)));
        assert_eq!(Actions::from_bits(rule(512).actions), all);
    }
}
