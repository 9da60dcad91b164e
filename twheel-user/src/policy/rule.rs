//! The rules of a policy, and which flows match one.

use std::{fmt, net::Ipv6Addr, ops::RangeInclusive, time::Duration};

use twheel_common::{
    flow::VLAN_BITS,
    policy::{Hook, Protocol, TIMEOUTS},
};

use super::network::Network;
use crate::{action::Actions, toml_file::Location};

/// A timeout for each [`TimeoutName`](twheel_common::policy::TimeoutName); `None`: the timeout that
/// the flow would have without this rule or policy.
pub type Timeouts = [Option<Duration>; TIMEOUTS];

/// The content of a policy file, checked.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The file's name in errors.
    pub file: String,
    /// Timeouts of flows that match no rule.
    pub timeouts: Timeouts,
    /// Actions on expired flows that match no rule; `None`: those of `--reap`.
    pub reap: Option<Reap>,
    /// The rules, in the order of the file; rule `n` of
    /// [`first_match`](twheel_common::policy::first_match) is `rules[n - 1]`.
    pub rules: Vec<Rule>,
}

/// A rule. A flow must match all of its conditions; `None` is no condition.
#[derive(Clone, Debug)]
pub struct Rule {
    /// The rule's name, which no other rule has.
    pub name: String,
    /// Where the rule begins.
    pub place: Location,
    /// Ports of the responder; not empty, and without overlaps.
    pub ports: Option<Vec<RangeInclusive<u16>>>,
    /// Addresses of the initiator; not empty.
    pub source: Option<Vec<Network>>,
    /// Addresses of the responder; not empty.
    pub destination: Option<Vec<Network>>,
    /// Networks that at least one end must be in; not empty.
    pub either: Option<Vec<Network>>,
    /// Interfaces by name, each with its location in the file; not empty.
    pub interfaces: Option<Vec<(String, Location)>>,
    /// VLAN identifiers: the flow is in at least one of them; 0: it is in no VLAN. Not empty.
    pub vlans: Option<Vec<u16>>,
    /// Zones by conntrack's number, each with its location in the file; 0: the flow is in no zone.
    /// Not empty.
    pub zones: Option<Vec<(u16, Location)>>,
    /// The direction of the flow's first packet.
    pub hook: Option<Hook>,
    /// Protocols; not empty.
    pub protocols: Option<Vec<Protocol>>,
    /// Timeouts of a flow for which this is the first matching rule: those of the rule, else those
    /// of the policy.
    pub timeouts: Timeouts,
    /// Actions on the rule's expired flows; `None`: those of `--reap`.
    pub reap: Option<Reap>,
}

/// What is done to expired flows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reap {
    /// The actions.
    pub actions: Actions,
    /// They are taken only on flows with a local socket in one of these cgroups, or below one;
    /// empty: on all flows.
    pub cgroups: Vec<String>,
}

impl fmt::Display for Reap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.actions.fmt(f)?;
        match self.cgroups.is_empty() {
            true => Ok(()),
            false => write!(f, " cgroup {}", list(&self.cgroups)),
        }
    }
}

/// A description of a flow; `None` is unknown.
#[derive(Clone, Debug, Default)]
pub struct Query {
    /// Protocol.
    pub protocol: Option<Protocol>,
    /// The initiator's address, IPv4 mapped.
    pub source: Option<Ipv6Addr>,
    /// The responder's address, IPv4 mapped.
    pub destination: Option<Ipv6Addr>,
    /// The responder's port.
    pub port: Option<u16>,
    /// Name of the interface.
    pub interface: Option<String>,
    /// The outer and the inner VLAN identifier; 0: none.
    pub vlans: Option<[u16; 2]>,
    /// conntrack's number of the zone; 0: none.
    pub zone: Option<u16>,
    /// The direction of the flow's first packet.
    pub hook: Option<Hook>,
}

/// Whether a flow matches a rule.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The flow matches.
    Met,
    /// The flow does not match: the first condition that fails, in words.
    Failed(String),
    /// The answer depends on something unknown: the key of the first such condition.
    Unknown(&'static str),
}

impl Rule {
    /// Whether a flow matches the rule, condition by condition: slow, but easy to verify. The data
    /// plane uses [`Compiled`](super::Compiled), which must give the same answer.
    pub fn judge(&self, query: &Query) -> Verdict {
        let conditions = [
            judge(
                "proto",
                &self.protocols,
                query.protocol,
                |all, it| all.contains(&it),
                |it| it.name().into(),
            ),
            judge(
                "direction",
                &self.hook,
                query.hook,
                |hook, it| *hook == it,
                |it| hook_name(*it).into(),
            ),
            judge(
                "iface",
                &self.interfaces,
                query.interface.as_deref(),
                |all, it| all.iter().any(|(name, _)| name == it),
                |it| it.to_string(),
            ),
            judge(
                "vlan",
                &self.vlans,
                query.vlans,
                |all, it| admits_vlans(all, it),
                |vlans| list(is_in(*vlans)),
            ),
            judge(
                "zone",
                &self.zones,
                query.zone,
                |all, it| all.iter().any(|(zone, _)| *zone == it),
                |it| it.to_string(),
            ),
            self.judge_port(query),
            judge(
                "src",
                &self.source,
                query.source,
                |all, it| contains(all, it),
                |it| it.to_canonical().to_string(),
            ),
            judge(
                "dst",
                &self.destination,
                query.destination,
                |all, it| contains(all, it),
                |it| it.to_canonical().to_string(),
            ),
            self.judge_either(query),
        ];
        let failed = |verdict: &&Verdict| matches!(verdict, Verdict::Failed(_));
        let unknown = |verdict: &&Verdict| matches!(verdict, Verdict::Unknown(_));
        let worst = conditions
            .iter()
            .find(failed)
            .or(conditions.iter().find(unknown));
        worst.cloned().unwrap_or(Verdict::Met)
    }

    fn judge_port(&self, query: &Query) -> Verdict {
        if self.ports.is_some() && query.protocol == Some(Protocol::Icmp) {
            return Verdict::Failed("dport: icmp has no ports".into());
        }
        let within = |ports: &Vec<RangeInclusive<u16>>, port| {
            ports.iter().any(|range| range.contains(&port))
        };
        let verdict = judge("dport", &self.ports, query.port, within, |it| {
            it.to_string()
        });
        match verdict {
            // The rule has no condition on the protocol, but an ICMP flow would have no port.
            Verdict::Met
                if self.ports.is_some() && query.protocol.is_none() && self.protocols.is_none() =>
            {
                Verdict::Unknown("proto")
            }
            verdict => verdict,
        }
    }

    fn judge_either(&self, query: &Query) -> Verdict {
        let Some(either) = &self.either else {
            return Verdict::Met;
        };
        let ends = [("src", query.source), ("dst", query.destination)];
        if ends
            .iter()
            .any(|(_, end)| end.is_some_and(|end| contains(either, end)))
        {
            return Verdict::Met;
        }
        match ends.iter().find(|(_, end)| end.is_none()) {
            Some((name, _)) => Verdict::Unknown(name),
            None => Verdict::Failed(format!("any: neither end is in {}", list(either))),
        }
    }

    /// The conditions, each as `key value,value`; empty if there are none.
    pub fn conditions(&self) -> Vec<String> {
        let names = |all: &Vec<Protocol>| list(all.iter().map(|it| it.name()));
        let ports = |all: &Vec<RangeInclusive<u16>>| {
            list(all.iter().map(|range| match range.clone().into_inner() {
                (low, high) if low == high => low.to_string(),
                (low, high) => format!("{low}-{high}"),
            }))
        };
        let all = [
            ("proto", self.protocols.as_ref().map(names)),
            (
                "direction",
                self.hook.map(|hook| hook_name(hook).to_owned()),
            ),
            (
                "iface",
                self.interfaces
                    .as_ref()
                    .map(|all| list(all.iter().map(|(name, _)| name))),
            ),
            ("vlan", self.vlans.as_ref().map(list)),
            (
                "zone",
                self.zones
                    .as_ref()
                    .map(|all| list(all.iter().map(|(zone, _)| zone))),
            ),
            ("dport", self.ports.as_ref().map(ports)),
            ("src", self.source.as_ref().map(list)),
            ("dst", self.destination.as_ref().map(list)),
            ("any", self.either.as_ref().map(list)),
        ];
        let written =
            |(key, value): (&str, Option<String>)| value.map(|value| format!("{key} {value}"));
        all.into_iter().filter_map(written).collect()
    }
}

fn judge<C, V>(
    key: &'static str,
    condition: &Option<C>,
    value: Option<V>,
    admits: impl FnOnce(&C, V) -> bool,
    written: impl FnOnce(&V) -> String,
) -> Verdict {
    let Some(condition) = condition else {
        return Verdict::Met;
    };
    let Some(value) = value else {
        return Verdict::Unknown(key);
    };
    let written = written(&value);
    match admits(condition, value) {
        true => Verdict::Met,
        false => Verdict::Failed(format!("{key}: not {written}")),
    }
}

/// The VLANs that a flow is in; 0 if it is in none.
fn is_in(vlans: [u16; 2]) -> Vec<u16> {
    match vlans.into_iter().filter(|vlan| *vlan != 0).collect() {
        none if Vec::is_empty(&none) => vec![0],
        some => some,
    }
}

fn admits_vlans(admitted: &[u16], vlans: [u16; 2]) -> bool {
    is_in(vlans).iter().any(|vlan| admitted.contains(vlan))
}

/// VLANs in the form of [`Tuple`](twheel_common::policy::Tuple).
pub fn packed([outer, inner]: [u16; 2]) -> u32 {
    u32::from(outer) | u32::from(inner) << VLAN_BITS
}

fn contains(networks: &[Network], address: Ipv6Addr) -> bool {
    networks.iter().any(|network| network.contains(address))
}

fn list<T: ToString>(items: impl IntoIterator<Item = T>) -> String {
    let items: Vec<_> = items.into_iter().map(|item| item.to_string()).collect();
    items.join(",")
}

/// The direction's name in a policy file.
pub fn hook_name(hook: Hook) -> &'static str {
    match hook {
        Hook::Ingress => "in",
        Hook::Egress => "out",
    }
}
