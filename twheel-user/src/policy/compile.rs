//! Compiles a policy into the sets of rules that the data plane looks up: one table for each
//! dimension.

use std::{
    collections::{BTreeMap, HashMap},
    net::Ipv6Addr,
};

use anyhow::Result;
use twheel_common::policy::{
    Dimensions, Ends, Header, Hook, MAX_CLASSES, Named, PortClasses, Prefix, Protocol, Rules,
    Tables,
};

use super::{
    network::Network,
    rule::{Policy, Rule},
};
use crate::toml_file::refuse;

/// A policy as the data plane has it: the contents of its maps, and (as [`Tables`]) the same
/// lookups on the host.
#[derive(Clone, Debug)]
pub struct Compiled {
    dimensions: Dimensions,
    header: Header,
    port_classes: Box<PortClasses>,
    classes: Vec<Rules>,
    interfaces: BTreeMap<u32, Rules>,
    vlans: BTreeMap<u16, Rules>,
    zones: BTreeMap<u16, Rules>,
    source: Trie,
    destination: Trie,
}

impl Policy {
    /// Compiles the policy. `index` returns the index of the interface of a name, if it exists.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`](crate::failure::Kind::Usage): there is no such interface, as
    /// `FILE:LINE:COLUMN: …`.
    pub fn compile(&self, mut index: impl FnMut(&str) -> Option<u32>) -> Result<Compiled> {
        let rules = &self.rules;
        let mut dimensions = Dimensions::default();
        let mut dimension = |restricted: &dyn Fn(&Rule) -> bool, dimension| {
            if rules.iter().any(restricted) {
                dimensions = dimensions.with(dimension);
            }
        };
        dimension(&|_| true, Dimensions::RULES);
        dimension(&|rule| rule.ports.is_some(), Dimensions::PORT);
        dimension(
            &|rule| rule.source.is_some() || rule.either.is_some(),
            Dimensions::SOURCE,
        );
        dimension(
            &|rule| rule.destination.is_some() || rule.either.is_some(),
            Dimensions::DESTINATION,
        );
        dimension(&|rule| rule.interfaces.is_some(), Dimensions::INTERFACE);
        dimension(&|rule| rule.vlans.is_some(), Dimensions::VLAN);
        dimension(&|rule| rule.zones.is_some(), Dimensions::ZONE);
        dimension(&|rule| rule.hook.is_some(), Dimensions::HOOK);
        dimension(&|rule| rule.protocols.is_some(), Dimensions::PROTOCOL);
        let mut header = Header::default();
        for protocol in Protocol::ALL {
            header.protocols[protocol as usize] = set(rules, |rule| {
                rule.protocols
                    .as_ref()
                    .is_none_or(|all| all.contains(&protocol))
            });
        }
        for hook in [Hook::Ingress, Hook::Egress] {
            header.hooks[hook as usize] = set(rules, |rule| rule.hook.is_none_or(|it| it == hook));
        }
        header.other_interfaces = set(rules, |rule| rule.interfaces.is_none());
        let mut interfaces = BTreeMap::new();
        for (number, rule) in numbered(rules) {
            for (name, place) in rule.interfaces.iter().flatten() {
                let Some(index) = index(name) else {
                    let what = format!(
                        "iface: there is no interface `{name}` here: create it first, or leave it \
                         out"
                    );
                    return Err(refuse(&self.file, *place, what));
                };
                // Two names may belong to one interface.
                interfaces
                    .entry(index)
                    .or_insert(header.other_interfaces)
                    .insert(number);
            }
        }
        header.other_vlans = set(rules, |rule| rule.vlans.is_none());
        header.other_zones = set(rules, |rule| rule.zones.is_none());
        let (mut vlans, mut zones) = (BTreeMap::new(), BTreeMap::new());
        for (number, rule) in numbered(rules) {
            for vlan in rule.vlans.iter().flatten() {
                let rules = vlans.entry(*vlan).or_insert(header.other_vlans);
                rules.insert(number);
            }
            for (zone, _) in rule.zones.iter().flatten() {
                let rules = zones.entry(*zone).or_insert(header.other_zones);
                rules.insert(number);
            }
        }
        let Some((port_classes, classes)) = port_classes(rules) else {
            anyhow::bail!("{}: more than {MAX_CLASSES} classes of ports", self.file);
        };
        Ok(Compiled {
            dimensions,
            header,
            port_classes,
            classes,
            interfaces,
            vlans,
            zones,
            source: Trie::new(trie(rules, SOURCE)),
            destination: Trie::new(trie(rules, DESTINATION)),
        })
    }
}

impl Compiled {
    /// The only value of the map of headers.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// The only value of the map of port classes.
    pub fn port_classes(&self) -> &PortClasses {
        &self.port_classes
    }

    /// The sets of the classes, from class 0 on; at most [`MAX_CLASSES`].
    pub fn classes(&self) -> &[Rules] {
        &self.classes
    }

    /// Index and set of each interface that a rule names. All other interfaces have
    /// [`Header::other_interfaces`].
    pub fn interfaces(&self) -> impl Iterator<Item = (u32, Rules)> {
        self.interfaces
            .iter()
            .map(|(index, rules)| (*index, *rules))
    }

    /// Identifier and set of each VLAN that a rule names; 0: for flows in no VLAN. All other VLANs
    /// have [`Header::other_vlans`].
    pub fn vlans(&self) -> impl Iterator<Item = (u16, Rules)> {
        self.vlans.iter().map(|(vlan, rules)| (*vlan, *rules))
    }

    /// Number and set of each zone that a rule names; 0: for flows in no zone. All other zones have
    /// [`Header::other_zones`].
    pub fn zones(&self) -> impl Iterator<Item = (u16, Rules)> {
        self.zones.iter().map(|(zone, rules)| (*zone, *rules))
    }

    /// The entries of the trie of source addresses, each network before those inside it.
    pub fn source_prefixes(&self) -> impl Iterator<Item = (Prefix, Ends)> {
        self.source.prefixes()
    }

    /// The entries of the trie of destination addresses, in the same order.
    pub fn destination_prefixes(&self) -> impl Iterator<Item = (Prefix, Ends)> {
        self.destination.prefixes()
    }
}

impl Tables for Compiled {
    fn dimensions(&self) -> Dimensions {
        self.dimensions
    }

    fn protocol(&self, protocol: Protocol) -> Rules {
        self.header.protocol(protocol)
    }

    fn hook(&self, hook: Hook) -> Rules {
        self.header.hook(hook)
    }

    fn port(&self, port: u16) -> Rules {
        let class = self.port_classes[usize::from(port)];
        self.classes
            .get(usize::from(class))
            .copied()
            .unwrap_or(Rules::NONE)
    }

    fn named(&self, named: Named, number: u32) -> Rules {
        let among = |all: &BTreeMap<u16, Rules>| all.get(&u16::try_from(number).ok()?).copied();
        let found = match named {
            Named::Interface => self.interfaces.get(&number).copied(),
            Named::Vlan => among(&self.vlans),
            Named::Zone => among(&self.zones),
        };
        found.unwrap_or(self.header.other(named))
    }

    fn source(&self, address: [u64; 2]) -> Ends {
        self.source.longest(address)
    }

    fn destination(&self, address: [u64; 2]) -> Ends {
        self.destination.longest(address)
    }
}

/// An address in the form of [`Tuple`](twheel_common::policy::Tuple).
pub fn words(address: Ipv6Addr) -> [u64; 2] {
    let [high, low] = [address.to_bits() >> 64, address.to_bits()].map(|word| word as u64);
    [high.to_be(), low.to_be()]
}

/// Rules with their numbers.
fn numbered(rules: &[Rule]) -> impl Iterator<Item = (u16, &Rule)> {
    (1..).zip(rules)
}

fn set(rules: &[Rule], admits: impl Fn(&Rule) -> bool) -> Rules {
    let mut set = Rules::NONE;
    for (number, _) in numbered(rules).filter(|(_, rule)| admits(rule)) {
        set.insert(number);
    }
    set
}

/// The class of each port, and the set of each class; `None` if there are more than
/// [`MAX_CLASSES`].
pub(super) fn port_classes(rules: &[Rule]) -> Option<(Box<PortClasses>, Vec<Rules>)> {
    // The ports where the set changes: the rules whose range ended before the port, and those whose
    // range begins at it.
    let mut changes: BTreeMap<usize, [Vec<u16>; 2]> = BTreeMap::new();
    for (number, rule) in numbered(rules) {
        for range in rule.ports.iter().flatten() {
            let [begin, end] = [*range.start(), *range.end()].map(usize::from);
            changes.entry(begin).or_default()[1].push(number);
            changes.entry(end + 1).or_default()[0].push(number);
        }
    }
    let mut current = set(rules, |rule| rule.ports.is_none());
    let mut classes = vec![current];
    let mut numbers = HashMap::from([(current, 0)]);
    let (mut from, mut class) = (0, 0);
    let mut ports: Box<PortClasses> = vec![0; 1 << 16].try_into().ok()?;
    for (port, [ended, begun]) in changes.range(..ports.len()) {
        ports[from..*port].fill(class);
        // The ended rules first: two ranges of one rule may be adjacent.
        ended.iter().for_each(|rule| current.remove(*rule));
        begun.iter().for_each(|rule| current.insert(*rule));
        class = *numbers.entry(current).or_insert_with(|| {
            classes.push(current);
            (classes.len() - 1) as u16
        });
        if classes.len() > MAX_CLASSES {
            return None;
        }
        from = *port;
    }
    ports[from..].fill(class);
    Some((ports, classes))
}

/// Selects the condition that a rule has on one end of a flow.
pub(super) type End = fn(&Rule) -> &Option<Vec<Network>>;
pub(super) const SOURCE: End = |rule| &rule.source;
pub(super) const DESTINATION: End = |rule| &rule.destination;

/// The entries of a trie, in order. Each entry includes the rules of the shorter prefixes around
/// it, since a lookup returns the longest prefix alone. But IPv4 entries do not include the rules
/// of IPv6 prefixes around them.
pub(super) fn trie(rules: &[Rule], end: End) -> Vec<(Network, Ends)> {
    let unrestricted = Ends {
        admit: set(rules, |rule| end(rule).is_none()),
        either: set(rules, |rule| rule.either.is_none()),
    };
    let mut entries = BTreeMap::from([(Network::ANY, Ends::NONE), (Network::IPV4, Ends::NONE)]);
    for (number, rule) in numbered(rules) {
        for network in end(rule).iter().flatten() {
            entries.entry(*network).or_default().admit.insert(number);
        }
        for network in rule.either.iter().flatten() {
            entries.entry(*network).or_default().either.insert(number);
        }
    }
    // The networks around the present one, the narrowest last.
    let mut around: Vec<(Network, Ends)> = Vec::new();
    let mut complete = Vec::with_capacity(entries.len());
    for (network, own) in entries {
        while around
            .pop_if(|(outer, _)| !outer.encloses(network))
            .is_some()
        {}
        let inherited = match around.last() {
            Some((_, ends)) if network != Network::IPV4 => *ends,
            _ => unrestricted,
        };
        let ends = Ends {
            admit: inherited.admit.or(own.admit),
            either: inherited.either.or(own.either),
        };
        around.push((network, ends));
        complete.push((network, ends));
    }
    complete
}

/// Does on the host what the kernel's LPM trie does.
#[derive(Clone, Debug)]
struct Trie {
    entries: BTreeMap<Network, Ends>,
    /// The prefix lengths in use, the longest first.
    lengths: Vec<u32>,
}

impl Trie {
    fn new(entries: Vec<(Network, Ends)>) -> Self {
        let mut lengths: Vec<_> = entries.iter().map(|(network, _)| network.bits()).collect();
        lengths.sort_unstable_by(|a, b| b.cmp(a));
        lengths.dedup();
        Self {
            entries: entries.into_iter().collect(),
            lengths,
        }
    }

    fn prefixes(&self) -> impl Iterator<Item = (Prefix, Ends)> {
        self.entries
            .iter()
            .map(|(network, ends)| (network.prefix(), *ends))
    }

    fn longest(&self, address: [u64; 2]) -> Ends {
        let address = Ipv6Addr::from(Prefix::host(address).address);
        let mut found = self
            .lengths
            .iter()
            .filter_map(|bits| self.entries.get(&Network::around(address, *bits)));
        found.next().copied().unwrap_or(Ends::NONE)
    }
}
