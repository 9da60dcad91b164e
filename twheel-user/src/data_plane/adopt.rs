//! What pinned maps were made for, and whether a new run can adopt them.

use std::{
    io,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, Result};
use aya::{
    include_bytes_aligned,
    maps::{Array, Map, MapData, MapError, MapInfo},
    sys::SyscallError,
};
use aya_obj::{Object, maps::PinningType};
use twheel_common::{
    config::{Config, Features, LAYOUT, Meta},
    table::Hash,
    wheel::Geometry,
};

use crate::{
    clock::Clock,
    failure::{Failure, Kind},
    given::written,
    pins::Pins,
};

/// The BPF object that this executable contains.
pub static OBJECT: &[u8] = include_bytes_aligned!(concat!(env!("OUT_DIR"), "/twheel.bpf.o"));

/// Reads what an instance's maps were made for.
///
/// # Errors
///
/// [`Kind::Pins`]: their layout is not the one that this version reads.
pub fn meta(pins: &Pins) -> Result<Meta> {
    let (path, data) = (pins.object("META"), pins.map("META")?);
    if data.info()?.value_size() as usize != size_of::<Meta>() {
        return Err(other_layout(&path).into());
    }
    let map = Array::<_, Meta>::try_from(Map::Array(data))?;
    let meta = map.get(&0, 0).context("cannot read META")?;
    match meta.layout {
        LAYOUT => Ok(meta),
        _ => Err(other_layout(&path).into()),
    }
}

fn other_layout(path: &Path) -> Failure {
    let path = path.parent().unwrap_or(path);
    Failure::new(
        Kind::Pins,
        format!(
            "the pins at {} were made by another version of twheel, whose maps this version cannot \
             read: use that version, or run `twheel detach` first",
            path.display()
        ),
    )
}

/// What the maps of this configuration are made for.
pub(super) fn wanted_meta(config: &Config, clock: Clock, keys: [u64; 11]) -> Meta {
    Meta {
        layout: LAYOUT,
        tick: config.tick,
        unit_ns: clock.unit().subsec_nanos(),
        geometry: config.geometry,
        max_flows: config.max_flows,
        features: Features::needed_by(config),
        hash: Hash::new(keys, config.max_flows),
        made: SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .map_or(0, |since| since.as_nanos() as u64),
    }
}

/// Fails if a run with this configuration could not adopt what is pinned.
///
/// # Errors
///
/// [`Kind::Pins`]: it was made for another configuration, or by another version.
pub fn check_adoptable(pins: &Pins, config: &Config, clock: Clock) -> Result<()> {
    let keys = Default::default();
    adoptable(pins, &wanted_meta(config, clock, keys), OBJECT).map(drop)
}

/// What pinned maps were made for, if they can be adopted. `None`: there are no maps, or the run
/// that made them died before it had set up everything.
pub(super) fn adoptable(pins: &Pins, wanted: &Meta, object: &[u8]) -> Result<Option<Meta>> {
    let meta = match MapData::from_pin(pins.object("META")) {
        Ok(map) => {
            check_pinned(pins, object)?;
            Array::<_, Meta>::try_from(Map::Array(map))?
                .get(&0, 0)
                .context("cannot read META")?
        }
        Err(MapError::SyscallError(SyscallError { io_error, .. }))
            if io_error.kind() == io::ErrorKind::NotFound =>
        {
            Meta::default()
        }
        Err(error) => return Err(error).context("cannot open the pinned META"),
    };
    if meta.layout == 0 {
        return Ok(None);
    }
    if meta.layout != LAYOUT {
        return Err(other_layout(&pins.object("META")).into());
    }
    // The hash's secret belongs to the table, so the table's own is kept.
    let hash = Hash {
        keys: meta.hash.keys,
        ..wanted.hash
    };
    let made = meta.made;
    if meta
        != (Meta {
            hash,
            made,
            ..*wanted
        })
    {
        let options = |meta: &Meta| {
            let tick = Duration::from_nanos(u64::from(meta.tick) * u64::from(meta.unit_ns));
            let Geometry { levels, bits, .. } = meta.geometry;
            let scheme = meta.geometry.scheme_name();
            format!(
                "--max-flows {} --tick {} --scheme {scheme} --slots {} --levels {levels}{}{}{}{}{}{}",
                meta.max_flows,
                written(tick),
                1u64 << bits,
                match meta.features.has(Features::ACCOUNTING) {
                    false => "",
                    true => " --accounting",
                },
                match meta.features.has(Features::UPDATES) {
                    false => "",
                    true => " --active-timeout (or --final-records)",
                },
                match meta.features.has(Features::RTO) {
                    false => "",
                    true => " --rto on",
                },
                match meta.features.has(Features::ENFORCE) {
                    false => "",
                    true => " --i-know-this-drops-traffic",
                },
                match meta.features.has(Features::OFFLOAD) {
                    false => "",
                    true => " --offload PATH",
                },
                match meta.features.has(Features::VLANS) {
                    false => " --vlan ignore",
                    true => "",
                },
            )
        };
        return Err(Failure::new(
            Kind::Pins,
            format!(
                "the pins at {} were made with {}, not {}: use those options, or run \
                 `twheel detach` first",
                pins.path().display(),
                options(&meta),
                options(wanted),
            ),
        )
        .into());
    }
    Ok(Some(meta))
}

/// aya opens a pin without checking it: it would silently accept a map of another type or size.
fn check_pinned(pins: &Pins, object: &[u8]) -> Result<()> {
    let object = Object::parse(object).context("cannot read the eBPF object")?;
    let is_pinned = |(_, map): &(&String, &aya_obj::Map)| map.pinning() == PinningType::ByName;
    for (name, map) in object.maps.iter().filter(is_pinned) {
        let info = MapInfo::from_pin(pins.object(name));
        let matches = info.is_ok_and(|info| {
            info.map_type()
                .is_ok_and(|found| found as u32 == map.map_type())
                && info.key_size() == map.key_size()
                && info.value_size() == map.value_size()
        });
        if !matches {
            return Err(Failure::new(
                Kind::Pins,
                format!(
                    "the map pinned at {} does not fit this version of twheel: run `twheel detach` \
                     first",
                    pins.object(name).display()
                ),
            )
            .into());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use aya::maps::MapType;

    use super::*;

    #[test]
    fn the_object_says_of_which_shape_its_maps_are() {
        let object = Object::parse(OBJECT).unwrap();
        let shape = |name: &str| {
            let map = &object.maps[name];
            assert_eq!(map.pinning(), PinningType::ByName, "{name}");
            (map.map_type(), map.key_size(), map.value_size() as usize)
        };
        let array = MapType::Array as u32;
        assert_eq!(shape("META"), (array, 4, size_of::<Meta>()));
        assert_eq!(shape("EVENTS"), (MapType::RingBuf as u32, 0, 0));
        // Each run has its own.
        assert_eq!(object.maps["CALLS"].pinning(), PinningType::None);
        assert_eq!(object.maps["JIFFIES"].pinning(), PinningType::None);
    }
}
