//! Which sockets and conntrack entries may belong to a flow. With VLANs or zones, addresses alone
//! do not decide that.
//!
//! A flow without VLAN and zone has the sockets that are bound to no interface, and the conntrack
//! entries of zone 0. A flow in a VLAN or zone has the entries of its zone. Its sockets are those
//! bound to its interface, or to the VRF or bridge that the interface is a port of; and unbound
//! sockets, if no other interface has their local address.

use std::{collections::BTreeSet, net::IpAddr};

use anyhow::{Context, Result};
use nix::{ifaddrs::getifaddrs, net::if_::if_nametoindex};

use crate::interfaces::{self, Interface};

/// Where to look for the socket and the conntrack entry of a flow.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Scope {
    /// The zone, as conntrack's number.
    pub zone: u16,
    /// The interfaces that sockets may be bound to; `None`: sockets are bound to no interface.
    interfaces: Option<BTreeSet<u32>>,
}

impl Scope {
    /// Stands for a socket that is bound to no interface.
    pub const UNBOUND: u32 = 0;

    /// The scope of a flow in these VLANs and this zone, seen at the interface of this index;
    /// `None`: the interface is not known.
    pub fn of_flow(vlans: [u16; 2], zone: u16, interface: Option<u32>) -> Result<Self> {
        if zone == 0 && vlans == [0; 2] {
            return Ok(Self::default());
        }
        let all = interfaces::all()?;
        Ok(Self {
            zone,
            interfaces: Some(interfaces(&all, interface, vlans)),
        })
    }

    /// Whether the flow is in a VLAN or zone. This host then cannot tell whether the flow's
    /// addresses are its own, or those of hosts that it reaches.
    pub fn is_apart(&self) -> bool {
        self.interfaces.is_some()
    }

    /// The interfaces to which a socket with this local address may be bound; 0: unbound.
    pub fn bound(&self, local: IpAddr) -> Result<Vec<u32>> {
        let Some(interfaces) = &self.interfaces else {
            return Ok(vec![Self::UNBOUND]);
        };
        let mut bound: Vec<_> = interfaces.iter().copied().collect();
        let owners = owners(local)?;
        if !owners.is_empty() && owners.is_subset(interfaces) {
            bound.push(Self::UNBOUND);
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
pub(super) fn owners(address: IpAddr) -> Result<BTreeSet<u32>> {
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
        assert_eq!(Scope::default().bound(local).unwrap(), [Scope::UNBOUND]);
        let scope = Scope {
            zone: 7,
            interfaces: Some(BTreeSet::from([3])),
        };
        assert_eq!(scope.bound(local).unwrap(), [3], "nobody has that address");
        let lo = Scope {
            zone: 7,
            interfaces: Some(BTreeSet::from([1])),
        };
        let local = "127.0.0.1".parse().unwrap();
        assert_eq!(lo.bound(local).unwrap(), [1, Scope::UNBOUND]);
        assert_eq!(scope.bound(local).unwrap(), [3]);
    }
}
