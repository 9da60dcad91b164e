//! Checks of rules together: rules that no flow can match, and limits.

use std::collections::BTreeSet;

use anyhow::Result;
use twheel_common::policy::{
    Hook, MAX_CLASSES, MAX_INTERFACES, MAX_PREFIXES, MAX_VLANS, MAX_ZONES, Protocol,
};

use super::{
    compile,
    network::Ranges,
    rule::{Policy, Rule},
};
use crate::toml_file::refuse;

/// Refuses rules that no flow can match, or that do not fit into the kernel's tables.
pub(super) fn check(policy: &Policy) -> Result<()> {
    let rules = &policy.rules;
    let extents: Vec<_> = rules.iter().map(Extent::new).collect();
    let last = rules.len().saturating_sub(1);
    let everything = Extent::everything();
    for (number, (rule, extent)) in rules.iter().zip(&extents).enumerate() {
        let error = |what: String| Err(refuse(&policy.file, rule.place, what));
        let name = &rule.name;
        if extent.is_empty() {
            return error(format!(
                "no flow can match rule `{name}`: src, dst and any exclude each other (both ends \
                 of a flow have one address family): widen one of them"
            ));
        }
        if number != last && extent.covers(&everything) {
            return error(format!(
                "rule `{name}` matches every flow and hides all rules after it: make it the last, \
                 or restrict it"
            ));
        }
        let hides = |(_, earlier): &(&Rule, &Extent)| earlier.covers(extent);
        if let Some((earlier, _)) = rules.iter().zip(&extents).take(number).find(hides) {
            return error(format!(
                "no flow can match rule `{name}`: rule `{}` on line {} comes first and matches all \
                 of its flows: move `{name}` before it, or remove one",
                earlier.name, earlier.place.line
            ));
        }
    }
    limits(policy)
}

/// Checks the limits of the kernel's tables. The error names the first rule that exceeds one.
fn limits(policy: &Policy) -> Result<()> {
    let rules = &policy.rules;
    let check = |fits: &dyn Fn(&[Rule]) -> bool, what: String| {
        if fits(rules) {
            return Ok(());
        }
        let numbers: Vec<_> = (0..rules.len()).collect();
        let fitting = numbers.partition_point(|&number| fits(&rules[..=number]));
        match rules.get(fitting) {
            Some(rule) => Err(refuse(
                &policy.file,
                rule.place,
                format!("rule `{}`: {what}", rule.name),
            )),
            None => Ok(()),
        }
    };
    check(
        &|rules| compile::port_classes(rules).is_some(),
        format!(
            "the rules so far need more than {MAX_CLASSES} classes of ports, the maximum: name \
             fewer ports, or ranges that overlap less"
        ),
    )?;
    check(
        &|rules| {
            let tries = [compile::SOURCE, compile::DESTINATION];
            tries
                .iter()
                .all(|end| compile::trie(rules, *end).len() <= MAX_PREFIXES)
        },
        format!(
            "the rules so far name too many networks: {} are allowed for each end",
            MAX_PREFIXES - 2
        ),
    )?;
    check(
        &|rules| {
            let named = rules
                .iter()
                .filter_map(|rule| rule.interfaces.as_ref())
                .flatten();
            named.map(|(name, _)| name).collect::<BTreeSet<_>>().len() <= MAX_INTERFACES
        },
        format!("the rules so far name too many interfaces: {MAX_INTERFACES} are allowed"),
    )?;
    check(
        &|rules| {
            let named = rules.iter().filter_map(|rule| rule.vlans.as_ref());
            named.flatten().collect::<BTreeSet<_>>().len() <= MAX_VLANS
        },
        format!("the rules so far name too many VLANs: {MAX_VLANS} are allowed"),
    )?;
    check(
        &|rules| {
            let named = rules.iter().filter_map(|rule| rule.zones.as_ref());
            let named = named.flatten().map(|(zone, _)| zone);
            let named = named.filter(|zone| **zone != 0).collect::<BTreeSet<_>>();
            named.len() <= MAX_ZONES
        },
        format!("the rules so far name too many zones: {MAX_ZONES} are allowed, and 0"),
    )
}

/// The flows that a rule admits.
struct Extent {
    protocols: Vec<Protocol>,
    hooks: Vec<Hook>,
    /// `None`: all interfaces.
    interfaces: Option<BTreeSet<String>>,
    /// VLAN identifiers, 0 for no VLAN; `None`: all.
    vlans: Option<BTreeSet<u16>>,
    /// Numbers of zones, 0 for no zone; `None`: all.
    zones: Option<BTreeSet<u16>>,
    ports: Ranges,
    /// For IPv4 and for IPv6.
    addresses: [Addresses; 2],
}

/// The pairs of addresses, of one family, that a rule admits: the first is in `source`, the second
/// in `destination`, and at least one of them in `either`.
struct Addresses {
    source: Ranges,
    destination: Ranges,
    either: Ranges,
}

impl Extent {
    fn new(rule: &Rule) -> Self {
        let ranges = |networks: &Option<Vec<_>>| match networks {
            Some(networks) => Ranges::from_networks(networks),
            None => Ranges::all(),
        };
        let (source, destination) = (ranges(&rule.source), ranges(&rule.destination));
        let either = ranges(&rule.either);
        let named = rule.protocols.clone().unwrap_or(Protocol::ALL.to_vec());
        // A protocol without ports matches no condition on ports.
        let with_ports = |protocol: &Protocol| rule.ports.is_none() || *protocol != Protocol::Icmp;
        Self {
            protocols: named.into_iter().filter(with_ports).collect(),
            hooks: rule
                .hook
                .map_or(vec![Hook::Ingress, Hook::Egress], |hook| vec![hook]),
            interfaces: rule
                .interfaces
                .as_ref()
                .map(|all| all.iter().map(|(name, _)| name.clone()).collect()),
            vlans: rule.vlans.as_ref().map(|all| all.iter().copied().collect()),
            zones: rule
                .zones
                .as_ref()
                .map(|all| all.iter().map(|(zone, _)| *zone).collect()),
            ports: match &rule.ports {
                Some(ports) => Ranges::new(
                    ports
                        .iter()
                        .map(|range| (u128::from(*range.start()), u128::from(*range.end()))),
                ),
                None => Ranges::all(),
            },
            addresses: Ranges::families().map(|family| Addresses {
                source: source.and(&family),
                destination: destination.and(&family),
                either: either.and(&family),
            }),
        }
    }

    fn everything() -> Self {
        Self {
            protocols: Protocol::ALL.to_vec(),
            hooks: vec![Hook::Ingress, Hook::Egress],
            interfaces: None,
            vlans: None,
            zones: None,
            ports: Ranges::all(),
            addresses: Ranges::families().map(|family| Addresses {
                source: family.clone(),
                destination: family.clone(),
                either: family,
            }),
        }
    }

    fn is_empty(&self) -> bool {
        let none = |addresses: &Addresses| {
            addresses
                .rectangles()
                .iter()
                .all(|(a, b)| a.is_empty() || b.is_empty())
        };
        self.protocols.is_empty() || self.addresses.iter().all(none)
    }

    /// Whether this admits each flow that `other` admits. The answer is exact: both are products of
    /// what they admit in each dimension, except for `either`, which [`Addresses::covers`] handles.
    fn covers(&self, other: &Self) -> bool {
        other
            .protocols
            .iter()
            .all(|protocol| self.protocols.contains(protocol))
            && other.hooks.iter().all(|hook| self.hooks.contains(hook))
            && admits_all(&self.interfaces, &other.interfaces)
            // A flow may be in two VLANs. But a flow in a single VLAN matches only rules that name
            // that VLAN, so the subset is required, and the answer is exact here, too.
            && admits_all(&self.vlans, &other.vlans)
            && admits_all(&self.zones, &other.zones)
            && self.ports.covers(&other.ports)
            && self
                .addresses
                .iter()
                .zip(&other.addresses)
                .all(|(these, those)| these.covers(those))
    }
}

/// Whether a condition admits all values that another does; `None` admits every value. No list
/// contains every value that exists, because of [`limits`].
fn admits_all<T: Ord>(these: &Option<BTreeSet<T>>, those: &Option<BTreeSet<T>>) -> bool {
    match (these, those) {
        (None, _) => true,
        (Some(_), None) => false,
        (Some(these), Some(those)) => those.is_subset(these),
    }
}

impl Addresses {
    /// The same pairs as two products: those whose first address is in `either`, and those whose
    /// second is.
    fn rectangles(&self) -> [(Ranges, Ranges); 2] {
        [
            (self.source.and(&self.either), self.destination.clone()),
            (self.source.clone(), self.destination.and(&self.either)),
        ]
    }

    fn covers(&self, other: &Self) -> bool {
        other.rectangles().iter().all(|(first, second)| {
            let none = first.is_empty() || second.is_empty();
            // If each side had an address outside `either`, the pair of these two addresses would
            // not be admitted.
            none || self.source.covers(first)
                && self.destination.covers(second)
                && (self.either.covers(first) || self.either.covers(second))
        })
    }
}
