//! Whether a socket with a flow's endpoints may be that of a connection in another zone or VLAN.
//!
//! Anybody can send a packet with any addresses to an interface, and it begins a flow in that
//! interface's zone. So a flow does not prove that the socket with its endpoints belongs to its
//! zone. The socket may belong to another one if a *namesake* lives there: a flow with the same
//! endpoints. It may also if an interface of another zone has the socket's local address.

use std::{
    collections::BTreeSet,
    net::IpAddr,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use aya::maps::{HashMap, Map};
use twheel_common::{
    config::{Features, Watched},
    flow::{FlowKey, VLAN_BITS, ZONES},
    state::is_elsewhere,
};

use super::scope::owners;
use crate::{
    inspect::Reader,
    interfaces::{self, Interface},
    names::Names,
};

/// How old what is known of zones and interfaces may be.
const FRESH: Duration = Duration::from_secs(1);

/// The zones and VLANs in which flows may be, and the interfaces in zones.
#[derive(Default)]
pub struct Namesakes {
    read: Option<Instant>,
    /// Places of zones and packed VLANs, as keys have them.
    domains: Vec<(u32, u32)>,
    /// Interfaces in a zone, and those stacked on them.
    zoned: BTreeSet<u32>,
}

impl Namesakes {
    /// Whether a namesake of this flow lives.
    pub fn lives(&mut self, reader: &Reader, names: &Names, key: &FlowKey) -> Result<bool> {
        self.refresh(reader, names)?;
        let hash = &reader.meta().hash;
        for key in self.keys(key) {
            let found = reader.table().find(hash, &key);
            let found = found.context("cannot find out whether another zone has such a flow")?;
            let Some(flow) = found else {
                continue;
            };
            // With only one interface, the flow has no place.
            let interface = names.interface(flow.point.interface()).unwrap_or_default();
            // The sockets of a flow in another network namespace are there.
            if !is_elsewhere(interface) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Reads the zones of the run and the interfaces of this host again, unless that was done just
    /// now.
    fn refresh(&mut self, reader: &Reader, names: &Names) -> Result<()> {
        if self.read.is_some_and(|read| read.elapsed() < FRESH) {
            return Ok(());
        }
        let mut zones = vec![0];
        for place in 1..ZONES as u8 {
            if names.zone(place)? != 0 {
                zones.push(place.into());
            }
        }
        let has_vlans = reader.meta().features.has(Features::VLANS);
        let all = match has_vlans || zones.len() > 1 {
            true => interfaces::all()?,
            false => Vec::new(),
        };
        let vlans = match has_vlans {
            true => vlans(&all),
            false => BTreeSet::from([0]),
        };
        let with = |zone: u32| vlans.iter().map(move |vlans| (zone, *vlans));
        self.domains = zones.iter().flat_map(|zone| with(*zone)).collect();
        self.zoned = match zones.len() > 1 {
            true => and_above(&all, zoned(reader)?),
            false => BTreeSet::new(),
        };
        self.read = Some(Instant::now());
        Ok(())
    }

    /// The keys of a flow's namesakes, whether they live or not.
    fn keys(&self, key: &FlowKey) -> impl Iterator<Item = FlowKey> {
        let own = (u32::from(key.zone()), key.packed_vlans());
        let domain = FlowKey::NONE.in_vlans(own.1).in_zone(own.0);
        let bare = FlowKey::from_parts(key.addresses(), key.ports() ^ domain.ports());
        let others = self.domains.iter().filter(move |it| **it != own);
        others.map(move |(zone, vlans)| bare.in_vlans(*vlans).in_zone(*zone))
    }

    /// Whether an interface in a zone has this address. Call [`lives`](Self::lives) first.
    pub fn is_in_zone(&self, address: IpAddr) -> Result<bool> {
        Ok(!self.zoned.is_empty() && !owners(address)?.is_disjoint(&self.zoned))
    }
}

/// The watched interfaces in a zone.
fn zoned(reader: &Reader) -> Result<BTreeSet<u32>> {
    let map = Map::HashMap(reader.pins().map("WATCHED")?);
    let watched = HashMap::<_, u32, Watched>::try_from(map)?;
    let mut zoned = BTreeSet::new();
    for entry in watched.iter() {
        let (interface, watched) = entry?;
        if watched.zone != 0 {
            zoned.insert(interface);
        }
    }
    Ok(zoned)
}

/// These interfaces, and those stacked on them, directly or not.
fn and_above(all: &[Interface], mut found: BTreeSet<u32>) -> BTreeSet<u32> {
    let mut next: Vec<_> = all.iter().filter(|it| found.contains(&it.index)).collect();
    while let Some(below) = next.pop() {
        let above = all.iter().filter(|it| it.is_above(below));
        next.extend(above.filter(|it| found.insert(it.index)));
    }
    found
}

/// The VLANs in which this host has devices, as keys have them, from wherever the flow is seen: a
/// device on a device of another VLAN has two tags, or one where the flow is seen on the lower
/// device. 0: none.
fn vlans(all: &[Interface]) -> BTreeSet<u32> {
    let mut found = BTreeSet::from([0]);
    for device in all {
        let Some(inner) = device.vlan else {
            continue;
        };
        found.insert(packed([inner, 0]));
        let lower = all.iter().find(|it| Some(it.index) == device.lower);
        if let Some(outer) = lower.and_then(|it| it.vlan) {
            found.insert(packed([outer, inner]));
        }
    }
    found
}

fn packed([outer, inner]: [u16; 2]) -> u32 {
    u32::from(outer) | u32::from(inner) << VLAN_BITS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interface(index: u32, vlan: Option<u16>, lower: Option<u32>) -> Interface {
        Interface {
            index,
            vlan,
            lower,
            driver: vlan.map(|_| "vlan".to_owned()),
            ..Interface::default()
        }
    }

    #[test]
    fn a_namesake_has_the_endpoints_and_another_zone_or_vlan() {
        let (bare, _) = FlowKey::new([1, 2], 3, [4, 5], 6, 6);
        let namesakes = Namesakes {
            domains: vec![(0, 0), (0, 10), (1, 0), (1, 10)],
            ..Namesakes::default()
        };
        let other = |zone, vlans| bare.in_vlans(vlans).in_zone(zone);
        for own in &namesakes.domains {
            let keys: Vec<_> = namesakes.keys(&other(own.0, own.1)).collect();
            let wanted = namesakes.domains.iter().filter(|it| *it != own);
            let wanted: Vec<_> = wanted.map(|it| other(it.0, it.1)).collect();
            assert_eq!(keys, wanted);
        }
        assert_eq!(namesakes.keys(&other(2, 20)).count(), 4);
    }

    #[test]
    fn a_run_without_zones_and_vlans_has_no_namesakes() {
        let (bare, _) = FlowKey::new([1, 2], 3, [4, 5], 6, 6);
        let namesakes = Namesakes {
            domains: vec![(0, 0)],
            ..Namesakes::default()
        };
        assert_eq!(namesakes.keys(&bare).count(), 0);
        assert!(!namesakes.is_in_zone("127.0.0.1".parse().unwrap()).unwrap());
    }

    #[test]
    fn the_vlans_are_those_of_the_devices() {
        let all = [
            interface(2, None, None),
            interface(3, Some(10), Some(2)),
            interface(4, Some(20), Some(3)),
        ];
        let wanted = [0, 10, 20, 10 | 20 << 12];
        assert_eq!(vlans(&all), BTreeSet::from(wanted));
    }

    #[test]
    fn what_is_stacked_on_an_interface_is_in_its_zone() {
        let all = [
            interface(2, None, None),
            interface(3, Some(10), Some(2)),
            interface(4, Some(20), Some(3)),
            Interface {
                master: Some(6),
                ..interface(5, None, None)
            },
            interface(6, None, None),
            // The other end of a pair is not stacked on it.
            interface(7, None, Some(2)),
        ];
        let of = |zoned| -> Vec<u32> {
            let found = and_above(&all, BTreeSet::from([zoned]));
            found.into_iter().collect()
        };
        assert_eq!(of(2), [2, 3, 4]);
        assert_eq!(of(5), [5, 6]);
        assert_eq!(of(7), [7]);
    }
}
