//! Which sockets and conntrack entries may belong to a flow. With VLANs or zones, addresses alone
//! do not decide that.
//!
//! A flow without VLAN and zone has the sockets that are bound to no interface, unless their local
//! address belongs to an interface of a zone or to a VLAN device; and the conntrack entries of zone
//! 0. A flow in a VLAN or zone has the entries of its zone. Its sockets are those
//! bound to its interface, or to the VRF or bridge that the interface is a port of; and unbound
//! sockets, if no other interface has their local address.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use nix::{ifaddrs::getifaddrs, net::if_::if_nametoindex};
use twheel_common::event::Event;

use crate::{
    interfaces::{self, Interface},
    zones::{Zone, zone_of},
};

/// Stands for a socket that is bound to no interface.
const UNBOUND: u32 = 0;

/// What tells the flows of one tenant from those of another.
#[derive(Debug, Default)]
pub struct Tenants {
    /// The zones of interfaces.
    zones: Vec<Zone>,
    /// VLANs are part of a flow.
    vlans: bool,
    /// What [`apart`](Self::apart) returns, and when that was found out.
    found: Option<(Instant, BTreeSet<u32>)>,
}

/// For how long what was found out of interfaces is used: a list of a thousand takes milliseconds.
const FRESH: Duration = Duration::from_secs(1);

impl Tenants {
    /// Of a run.
    pub fn new(zones: Vec<Zone>, vlans: bool) -> Self {
        Self {
            zones,
            vlans,
            found: None,
        }
    }

    /// The interfaces whose addresses are not those of flows without VLAN and zone: those of a zone,
    /// the VRFs and bridges that have one of these as a port, and VLAN devices.
    fn apart(&mut self) -> Result<BTreeSet<u32>> {
        match &self.found {
            Some((when, found)) if when.elapsed() < FRESH => Ok(found.clone()),
            _ => {
                let found = self.find(&interfaces::all()?);
                self.found = Some((Instant::now(), found.clone()));
                Ok(found)
            }
        }
    }

    fn find(&self, all: &[Interface]) -> BTreeSet<u32> {
        let in_zone = |it: &&Interface| zone_of(&self.zones, &it.name) != 0;
        let zoned = all.iter().filter(in_zone);
        let mut apart: BTreeSet<_> = zoned
            .flat_map(|it| [Some(it.index), it.master])
            .flatten()
            .collect();
        if self.vlans {
            apart.extend(all.iter().filter(|it| it.vlan.is_some()).map(|it| it.index));
        }
        apart
    }
}

/// Where to look for the socket and the conntrack entry of a flow.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The zone, as conntrack's number.
    pub zone: u16,
    /// The interfaces that sockets may be bound to; `None`: sockets are bound to no interface.
    interfaces: Option<BTreeSet<u32>>,
    /// Sockets with an address of one of these interfaces are other tenants'.
    others: BTreeSet<u32>,
}

impl Scope {
    /// The scope of a flow in this zone, seen at the interface of this index; `None`: the interface
    /// is not known.
    pub fn of_flow(event: &Event, zone: u16, interface: Option<u32>) -> Result<Self> {
        let all = interfaces::all()?;
        Ok(Self {
            zone,
            interfaces: Some(interfaces(&all, interface, event.key.vlans())),
            others: BTreeSet::new(),
        })
    }

    /// The scope of a flow without VLAN and zone, seen at the interface of this index.
    pub fn of_rest(tenants: &mut Tenants, interface: Option<u32>) -> Result<Self> {
        let mut others = tenants.apart()?;
        // A VLAN device sees its packets without their tags.
        if let Some(interface) = interface {
            others.remove(&interface);
        }
        Ok(Self {
            others,
            ..Self::default()
        })
    }

    /// Whether a socket with this local address is another tenant's.
    pub fn is_of_others(&self, local: IpAddr) -> Result<bool> {
        Ok(!self.others.is_empty() && !owners(local)?.is_disjoint(&self.others))
    }

    /// Whether the flow is in a VLAN or zone. This host then cannot tell whether the flow's
    /// addresses are its own, or those of hosts that it reaches.
    pub fn is_apart(&self) -> bool {
        self.interfaces.is_some()
    }

    /// The interfaces to which a socket with this local address may be bound; 0: unbound.
    pub fn bound(&self, local: IpAddr) -> Result<Vec<u32>> {
        let Some(interfaces) = &self.interfaces else {
            return Ok(match self.is_of_others(local)? {
                true => Vec::new(),
                false => vec![UNBOUND],
            });
        };
        let mut bound: Vec<_> = interfaces.iter().copied().collect();
        let owners = owners(local)?;
        if !owners.is_empty() && owners.is_subset(interfaces) {
            bound.push(UNBOUND);
        }
        Ok(bound)
    }
}

/// The flow's interface or, if its packets have VLAN tags, the VLAN device on it; and the device
/// that this one is a port of.
fn interfaces(all: &[Interface], interface: Option<u32>, vlans: [u16; 2]) -> BTreeSet<u32> {
    let mut found = interface;
    for vlan in vlans.into_iter().filter(|vlan| *vlan != 0) {
        let upon = |it: &&Interface| it.vlan == Some(vlan) && found.is_some() && it.lower == found;
        found = all.iter().find(upon).map(|it| it.index);
    }
    let mut interfaces = BTreeSet::from_iter(found);
    let own = all.iter().find(|it| Some(it.index) == found);
    interfaces.extend(own.and_then(|it| it.master));
    interfaces
}

/// The interfaces that have this address.
fn owners(address: IpAddr) -> Result<BTreeSet<u32>> {
    let owners = getifaddrs().context("cannot list the interfaces")?;
    let owners = owners.filter(|it| {
        let held = it.address.as_ref().and_then(|held| {
            let v4 = held.as_sockaddr_in().map(|held| IpAddr::from(held.ip()));
            v4.or_else(|| held.as_sockaddr_in6().map(|held| IpAddr::from(held.ip())))
        });
        held == Some(address)
    });
    let numbers = owners.filter_map(|it| if_nametoindex(it.interface_name.as_str()).ok());
    Ok(numbers.collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(
        index: u32,
        vlan: Option<u16>,
        lower: Option<u32>,
        master: Option<u32>,
    ) -> Interface {
        Interface {
            index,
            vlan,
            lower,
            master,
            ..Interface::default()
        }
    }

    #[test]
    fn interfaces_of_zones_and_vlan_devices_are_apart() {
        let named = |index, name: &str, vlan, master| Interface {
            name: name.to_owned(),
            ..interface(index, vlan, None, master)
        };
        let all = [
            named(2, "eth0", None, None),
            named(3, "eth1", None, Some(9)),
            named(4, "eth0.10", Some(10), None),
            named(9, "blue", None, None),
        ];
        let found = |zones: &[Zone], vlans| -> Vec<u32> {
            let found = Tenants::new(zones.to_vec(), vlans).find(&all);
            found.into_iter().collect()
        };
        let zone = Zone {
            interface: "eth1".to_owned(),
            number: 7,
        };
        assert_eq!(found(&[], false), [0; 0]);
        assert_eq!(found(&[], true), [4]);
        assert_eq!(found(&[zone], true), [3, 4, 9], "and the VRF of eth1");
    }

    #[test]
    fn a_flow_of_a_vlan_is_of_the_device_upon_its_interface() {
        let all = [
            interface(2, None, None, None),
            interface(3, Some(10), Some(2), Some(9)),
            interface(4, Some(20), Some(3), None),
            interface(5, Some(10), Some(7), None),
            interface(9, None, None, None),
        ];
        let of = |interface, vlans| -> Vec<u32> {
            interfaces(&all, interface, vlans).into_iter().collect()
        };
        assert_eq!(of(Some(2), [0, 0]), [2]);
        assert_eq!(
            of(Some(2), [10, 0]),
            [3, 9],
            "and the VRF that it is a port of"
        );
        assert_eq!(of(Some(2), [10, 20]), [4]);
        assert_eq!(of(Some(2), [30, 0]), [0; 0], "nobody here is in that VLAN");
        assert_eq!(of(Some(2), [10, 30]), [0; 0]);
        assert_eq!(
            of(None, [10, 0]),
            [0; 0],
            "nor where the interface is not known"
        );
    }

    #[test]
    fn a_flow_without_vlan_and_zone_has_sockets_that_are_bound_to_nothing() {
        let local = "192.0.2.1".parse().unwrap();
        assert_eq!(Scope::default().bound(local).unwrap(), [UNBOUND]);
        let scope = Scope {
            zone: 7,
            interfaces: Some(BTreeSet::from([3])),
            others: BTreeSet::new(),
        };
        assert_eq!(scope.bound(local).unwrap(), [3], "nobody has that address");
        let lo = Scope {
            zone: 7,
            interfaces: Some(BTreeSet::from([1])),
            others: BTreeSet::new(),
        };
        let local = "127.0.0.1".parse().unwrap();
        let apart = Scope {
            others: BTreeSet::from([1]),
            ..Scope::default()
        };
        assert!(apart.bound(local).unwrap().is_empty());
        let elsewhere = "192.0.2.1".parse().unwrap();
        assert_eq!(apart.bound(elsewhere).unwrap(), [UNBOUND]);
        assert_eq!(lo.bound(local).unwrap(), [1, UNBOUND]);
        assert_eq!(scope.bound(local).unwrap(), [3]);
    }
}
