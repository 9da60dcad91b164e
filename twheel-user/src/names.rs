//! The names for the numbers in flow records: rules, interfaces, zones.

use anyhow::Result;
use aya::maps::{Array, MapData, MapError};
use twheel_common::config::NAME_BYTES;

use crate::{
    maps::{Open, array},
    model::{Flow, KnownAs},
};

/// Size of an interface's name in the map, bytes, padded with zeros.
pub const LABEL_BYTES: usize = 64;

/// The names of rules and interfaces, and the numbers of interfaces and zones.
pub struct Names {
    rules: Array<MapData, [u8; NAME_BYTES]>,
    labels: Array<MapData, [u8; LABEL_BYTES]>,
    counted: Array<MapData, u32>,
    zones: Array<MapData, u32>,
}

impl Names {
    /// Of an instance.
    pub fn open(open: Open<'_>) -> Result<Self> {
        Ok(Self {
            rules: array(open, "NAMES")?,
            labels: array(open, "LABELS")?,
            counted: array(open, "COUNTED")?,
            zones: array(open, "ZONES")?,
        })
    }

    /// The name of the rule with this number in flow records; `None` for 0.
    pub fn rule(&self, number: u16) -> Result<Option<String>> {
        match number {
            0 => Ok(None),
            _ => Ok(text(&self.rules.get(&number.into(), 0)?)),
        }
    }

    /// The name of the interface at a place.
    pub fn iface(&self, place: u32) -> Result<Option<String>> {
        match self.labels.get(&place, 0) {
            Ok(label) => Ok(text(&label)),
            Err(MapError::OutOfBounds { .. } | MapError::KeyNotFound) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    /// The number of the interface at a place; 0: no interface has the place, or there is only one
    /// interface.
    pub fn interface(&self, place: u32) -> Result<u32> {
        Ok(self.counted.get(&place, 0)?)
    }

    /// conntrack's number of the zone at a place in keys.
    pub fn zone(&self, place: u8) -> Result<u16> {
        match place {
            0 => Ok(0),
            _ => Ok(self.zones.get(&place.into(), 0)? as u16),
        }
    }

    /// The names of a flow's rule, interface and zone.
    pub fn known_as(&self, flow: &Flow) -> Result<KnownAs> {
        Ok(KnownAs {
            rule: self.rule(flow.rule)?,
            iface: self.iface(flow.place)?,
            zone: self.zone(flow.zone)?,
            nat: None,
            owner: None,
        })
    }
}

/// The text before the zeros; `None` if it is empty.
pub fn text(bytes: &[u8]) -> Option<String> {
    let text = String::from_utf8_lossy(bytes);
    let text = text.trim_end_matches('\0');
    (!text.is_empty()).then(|| text.to_owned())
}
