//! Which zone an interface is in, and the places of zones in the keys of flows.

use anyhow::{Context, Result};
use aya::maps::{Array, Map, MapData};
use twheel_common::flow::ZONES;

use crate::{
    failure::{Failure, Kind},
    patterns::Asked,
    pins::Pins,
};

/// The zone of an interface, as given by `--zone`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Zone {
    /// The interface's name.
    pub interface: String,
    /// conntrack's number of the zone.
    pub number: u16,
}

impl Zone {
    /// Reads `eth0=7`.
    ///
    /// # Errors
    ///
    /// The text to give instead.
    pub fn parse(text: &str) -> Result<Self, String> {
        let wanted = "give an interface and its zone from 1 to 65535, such as eth0=7";
        let (interface, number) = text.rsplit_once('=').ok_or(wanted)?;
        match number.parse() {
            Ok(number @ 1..) if !interface.is_empty() && !interface.contains('=') => Ok(Self {
                interface: interface.to_owned(),
                number,
            }),
            _ => Err(wanted.to_owned()),
        }
    }
}

/// The number of an interface's zone: that of the first entry that names it, otherwise that of the
/// first pattern that matches; 0: none.
pub fn zone_of(zones: &[Zone], interface: &str) -> u16 {
    let named = zones.iter().find(|zone| zone.interface == interface);
    let matches =
        |zone: &&Zone| Asked::parse(&zone.interface).is_ok_and(|it| it.matches(interface));
    let zone = named.or_else(|| zones.iter().find(matches));
    zone.map_or(0, |zone| zone.number)
}

/// The error that there is no place left for a zone.
pub fn too_many_zones(number: u16) -> anyhow::Error {
    let most = ZONES - 1;
    Failure::new(
        Kind::Usage,
        format!(
            "--zone: zone {number} is too many: a run has a capacity of {most} zones, which \
             includes those of its policies: start another run for other interfaces"
        ),
    )
    .into()
}

/// The zones of a data plane. Each has a *place*, the number by which the keys of flows contain it.
/// Zone 0, for interfaces that have no zone, has place 0. A place is never given to another zone.
///
/// Two processes must not enter zones at the same time. A run enters all of its zones when it
/// starts, and a policy's zones get their places when it is loaded, both under
/// [`Pins::lock_policy`].
pub struct Zones(Array<MapData, u32>);

impl Zones {
    /// From the map of zone numbers.
    pub fn open(map: MapData) -> Result<Self> {
        let map = Array::try_from(Map::Array(map));
        map.map(Self)
            .context("the map ZONES is not an array as expected")
    }

    /// Gives each of these zones a place, whether or not its interface exists yet.
    ///
    /// # Errors
    ///
    /// [`Kind::Usage`]: no place is left.
    pub fn enter_all(&mut self, numbers: &[u16]) -> Result<()> {
        let places = self.enter(numbers)?;
        let mut all = numbers.iter().zip(places);
        match all.find(|(_, place)| place.is_none()) {
            Some((number, _)) => Err(too_many_zones(*number)),
            None => Ok(()),
        }
    }

    /// The places of these zones: the ones that they have, otherwise free ones, which they keep.
    /// `None` for each zone that has no place left; in that case no zone gets a new place.
    pub fn enter(&mut self, numbers: &[u16]) -> Result<Vec<Option<u8>>> {
        let get = |place| self.0.get(&place, 0).context("cannot read ZONES");
        let before: Vec<u32> = (0..ZONES as u32).map(get).collect::<Result<_>>()?;
        let mut held = before.clone();
        let places: Vec<_> = numbers
            .iter()
            .map(|number| zone_place(&mut held, *number))
            .collect();
        if places.iter().all(Option::is_some) {
            for ((place, number), had) in (0..).zip(held).zip(before) {
                if number != had {
                    let set = self.0.set(place, number, 0);
                    set.context("cannot write ZONES")?;
                }
            }
        }
        Ok(places)
    }
}

/// The place of a zone among the places in use; the first free one if it has none.
fn zone_place(held: &mut [u32], number: u16) -> Option<u8> {
    if number == 0 {
        return Some(0);
    }
    let number = u32::from(number);
    let mut places = (0..).zip(held).skip(1);
    let (place, of) = places.find(|(_, of)| **of == 0 || **of == number)?;
    *of = number;
    Some(place)
}

/// The numbers of zones, by their places in keys.
pub fn numbers(pins: &Pins) -> Result<Vec<u16>> {
    let zones = Array::<_, u32>::try_from(Map::Array(pins.map("ZONES")?))?;
    (0..zones.len())
        .map(|place| Ok(zones.get(&place, 0).context("cannot read ZONES")? as u16))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_zone_keeps_its_place() {
        let mut held = [0; 4];
        let mut place = |number| zone_place(&mut held, number);
        assert_eq!([0, 7, 65_535, 7].map(&mut place), [0, 1, 2, 1].map(Some));
        assert_eq!(
            [8, 9, 0, 8].map(&mut place),
            [Some(3), None, Some(0), Some(3)]
        );
        assert_eq!(held, [0, 7, 65_535, 8]);
    }
}
