//! Which interfaces are stacked on which: a VLAN on a card, a bridge on its ports.

use std::collections::{BTreeMap, BTreeSet};

use twheel_common::{config::Watched, state::Way};

use crate::interfaces::Interface;

/// For each interface, those that it is stacked on directly.
pub type Below = BTreeMap<u32, Vec<u32>>;

/// For each of these interfaces, the ones that it is stacked on directly.
pub fn below<'a>(interfaces: impl Iterator<Item = &'a Interface>) -> Below {
    let mut below = Below::new();
    for interface in interfaces {
        below
            .entry(interface.index)
            .or_default()
            .extend(interface.lower);
        if let Some(master) = interface.master {
            below.entry(master).or_default().push(interface.index);
        }
    }
    below
}

/// All interfaces that one is stacked on, directly or not.
pub fn all_below(below: &Below, top: u32) -> impl Iterator<Item = u32> + use<> {
    let (mut seen, mut next) = (BTreeSet::from([top]), vec![top]);
    while let Some(at) = next.pop() {
        for lower in below.get(&at).into_iter().flatten() {
            if seen.insert(*lower) {
                next.push(*lower);
            }
        }
    }
    seen.into_iter().filter(move |it| *it != top)
}

/// For each watched interface, whether it is stacked on other watched ones, or they on it: flags of
/// [`Watched`]. The loopback interface is stacked on itself, because what comes in there went out
/// there before.
pub fn stacked(below: &Below, watched: &BTreeMap<u32, u32>) -> BTreeMap<u32, u8> {
    let mut flags: BTreeMap<u32, u8> = BTreeMap::new();
    for top in watched.keys() {
        for lower in all_below(below, *top).filter(|it| watched.contains_key(it)) {
            *flags.entry(*top).or_default() |= Watched::IS_ABOVE;
            *flags.entry(lower).or_default() |= Watched::IS_BELOW;
        }
    }
    if watched.contains_key(&Way::LOOPBACK.0) {
        *flags.entry(Way::LOOPBACK.0).or_default() |= Watched::IS_ABOVE;
    }
    flags
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_stands_upon_whom_is_told_through_those_that_are_not_watched() {
        let interface = |index, lower, master| Interface {
            index,
            lower,
            master,
            ..Interface::default()
        };
        // Two members of a bond, a VLAN on it, a bridge above that; and an unrelated interface.
        let interfaces = [
            interface(1, None, None),
            interface(2, None, Some(4)),
            interface(3, None, Some(4)),
            interface(4, None, None),
            interface(5, Some(4), Some(6)),
            interface(6, None, None),
            interface(7, None, None),
        ];
        let of = |watched: &[u32]| -> Vec<(u32, u8)> {
            let watched = watched.iter().map(|index| (*index, 0)).collect();
            stacked(&below(interfaces.iter()), &watched)
                .into_iter()
                .collect()
        };
        let (above, under) = (Watched::IS_ABOVE, Watched::IS_BELOW);
        assert_eq!(
            of(&[2, 3, 7]),
            [],
            "members of one bond see no packet of one another"
        );
        assert_eq!(of(&[2, 3, 4]), [(2, under), (3, under), (4, above)]);
        assert_eq!(of(&[3, 6, 7]), [(3, under), (6, above)]);
        assert_eq!(of(&[4, 5, 6]), [(4, under), (5, above | under), (6, above)]);
        assert_eq!(of(&[1]), [(1, above)], "what comes in by lo went out by it");
    }

    #[test]
    fn what_lies_on_an_interface_is_found_through_others() {
        let link = |index, lower, master| Interface {
            index,
            lower,
            master,
            ..Interface::default()
        };
        // A member of a bond, a VLAN on the bond, a port of a bridge.
        let links = [
            link(2, None, Some(4)),
            link(4, None, None),
            link(5, Some(4), Some(6)),
            link(6, None, None),
        ];
        let all = |top| all_below(&below(links.iter()), top).collect::<Vec<_>>();
        assert_eq!(all(6), [2, 4, 5]);
        assert_eq!(all(4), [2]);
        assert!(all(2).is_empty());
    }

    #[test]
    fn two_ends_of_a_veth_pair_stand_upon_one_another() {
        let interface = |index, lower| Interface {
            index,
            lower: Some(lower),
            ..Interface::default()
        };
        let interfaces = [interface(2, 3), interface(3, 2)];
        let both = Watched::IS_ABOVE | Watched::IS_BELOW;
        let watched = BTreeMap::from([(2, 0), (3, 0)]);
        let stacked = stacked(&below(interfaces.iter()), &watched);
        assert_eq!(stacked, BTreeMap::from([(2, both), (3, both)]));
    }
}
