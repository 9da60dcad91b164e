//! The maps of a data plane, by name.

use anyhow::{Context, Result};
use aya::maps::{Array, Map, MapData};

use crate::pins::Pins;

/// Opens a map of the data plane by its name.
pub type Open<'a> = &'a dyn Fn(&str) -> Result<MapData>;

/// The maps of an instance, by their pins.
pub fn pinned(pins: &Pins) -> impl Fn(&str) -> Result<MapData> + use<> {
    let pins = pins.clone();
    move |name| pins.map(name)
}

/// An array of a data plane.
pub fn array<V: aya::Pod>(open: Open<'_>, name: &str) -> Result<Array<MapData, V>> {
    Array::try_from(Map::Array(open(name)?))
        .with_context(|| format!("the map {name} is not an array as expected"))
}
