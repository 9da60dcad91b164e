//! What programs are told of the interfaces that they are attached to, and which counters belong to
//! which interface.
//!
//! An interface has a *place*: a number below
//! [`MAX_INTERFACES`](twheel_common::counter::MAX_INTERFACES) that it keeps as long as it is
//! watched, and that counters, flows and events carry. A place is given to another interface only
//! when no other place is left. The place of an interface of this network namespace is never given
//! to one of another namespace, nor the reverse: flows that still carry the place would be
//! attributed to the wrong namespace.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    mem,
};

use anyhow::{Context, Result};
use aya::maps::{Array, HashMap, Map, MapData, PerCpuArray, PerCpuValues};
use twheel_common::{
    config::{Watched, seat},
    counter::{Counters, FIRST_INTERFACE, NO_INTERFACE, USERSPACE},
    state::is_elsewhere,
};

use crate::{
    data_plane::{self, DataPlane},
    failure::{Failure, Kind},
    interfaces::Known,
    names::{LABEL_BYTES, text},
    pins::Pins,
    stack::{Below, all_below, below, stacked},
    zones::{Zones, too_many_zones},
};

/// How many unused places are kept for this network namespace while other places are available.
const RESERVED: usize = 16;

/// The interfaces of a data plane.
pub struct Watch {
    programs: Programs,
    counted: Array<MapData, u32>,
    labels: Array<MapData, [u8; LABEL_BYTES]>,
    counters: PerCpuArray<MapData, Counters>,
    zones: Zones,
    /// By place: the interface that has it or had it last; 0: none yet.
    places: Vec<u32>,
    /// The names of those interfaces, by place.
    names: Vec<String>,
    /// The places of the watched interfaces, by interface.
    alive: BTreeMap<u32, u32>,
    /// What programs are told of them.
    told: BTreeMap<u32, Watched>,
    /// Interfaces that are not watched but are stacked on watched ones; programs are told of these,
    /// too.
    above: BTreeSet<u32>,
    /// The places of interfaces that disappeared, the earliest first.
    gone: VecDeque<u32>,
    /// Interfaces that an earlier run told its programs of. Those programs rely on that until each
    /// is replaced.
    left: BTreeSet<u32>,
}

/// The map that tells programs of interfaces.
pub struct Programs {
    watched: HashMap<MapData, u32, Watched>,
    seated: Array<MapData, u64>,
}

impl Programs {
    /// Of a data plane.
    pub fn open(plane: &DataPlane) -> Result<Self> {
        Ok(Self {
            watched: HashMap::try_from(Map::HashMap(plane.open("WATCHED")?))?,
            seated: Array::try_from(Map::Array(plane.open("SEATED")?))?,
        })
    }

    /// Tells programs of an interface.
    pub fn tell(&mut self, interface: u32, watched: Watched) -> Result<()> {
        let written = self.watched.insert(interface, watched, 0);
        written.context("cannot write WATCHED")?;
        match self.seat_of(interface)? {
            Seat::Other => Ok(()),
            Seat::Own | Seat::Free => {
                let entry = u64::from(interface) | u64::from(watched.packed()) << 32;
                self.set_seat(interface, entry)
            }
        }
    }

    /// Removes what programs were told of an interface.
    pub fn remove(&mut self, interface: u32) -> Result<()> {
        if let Seat::Own = self.seat_of(interface)? {
            self.set_seat(interface, 0)?;
        }
        match self.watched.remove(&interface) {
            Err(aya::maps::MapError::KeyNotFound) | Ok(()) => Ok(()),
            Err(error) => Err(error).context("cannot write WATCHED"),
        }
    }

    fn seat_of(&self, interface: u32) -> Result<Seat> {
        if seat(interface) >= self.seated.len() {
            // An instance that was made for a single interface.
            return Ok(Seat::Other);
        }
        let has = self.seated.get(&seat(interface), 0);
        Ok(match has.context("cannot read SEATED")? as u32 {
            0 => Seat::Free,
            index if index == interface => Seat::Own,
            _ => Seat::Other,
        })
    }

    fn set_seat(&mut self, interface: u32, entry: u64) -> Result<()> {
        let set = self.seated.set(seat(interface), entry, 0);
        set.context("cannot write SEATED")
    }
}

/// Which interface the seat belongs to.
enum Seat {
    Own,
    Free,
    Other,
}

impl Watch {
    /// From a data plane that was just loaded. If it was adopted, interfaces keep their places;
    /// none is watched yet.
    pub fn open(plane: &DataPlane) -> Result<Self> {
        let open = |name| plane.open(name);
        let counted = Array::<_, u32>::try_from(Map::Array(open("COUNTED")?))?;
        let places: Vec<u32> = (0..counted.len())
            .map(|place| counted.get(&place, 0).context("cannot read COUNTED"))
            .collect::<Result<_>>()?;
        let labels = Array::try_from(Map::Array(open("LABELS")?))?;
        let mut watch = Self {
            programs: Programs::open(plane)?,
            names: read_labels(&labels)?,
            labels,
            counters: PerCpuArray::try_from(Map::PerCpuArray(open("COUNTERS")?))?,
            zones: Zones::open(open("ZONES")?)?,
            counted,
            gone: (FIRST_INTERFACE..places.len() as u32)
                .filter(|place| places[*place as usize] != 0)
                .collect(),
            places,
            alive: BTreeMap::new(),
            told: BTreeMap::new(),
            above: BTreeSet::new(),
            left: BTreeSet::new(),
        };
        watch.left = watch
            .programs
            .watched
            .keys()
            .filter_map(Result::ok)
            .collect();
        Ok(watch)
    }

    /// Removes what programs were told of interfaces that only an earlier run watched. Call it once
    /// all existing interfaces are attached.
    pub fn remove_left(&mut self) -> Result<()> {
        for interface in mem::take(&mut self.left) {
            if !self.is_told(interface) {
                self.programs.remove(interface)?;
            }
        }
        Ok(())
    }

    /// Whether this run has told programs of an interface.
    fn is_told(&self, interface: u32) -> bool {
        self.alive.contains_key(&interface) || self.above.contains(&interface)
    }

    /// How many interfaces can be watched at once.
    pub fn room(&self) -> usize {
        self.places.len().saturating_sub(FIRST_INTERFACE as usize)
    }

    /// Stores the name of the only interface; programs do not look it up then.
    pub fn name_only(&mut self, label: &str) -> Result<()> {
        self.set_label(NO_INTERFACE, label)
    }

    /// Whether an interface has a place or could get one.
    pub fn has_room(&self, interface: u32, label: &str) -> bool {
        self.alive.contains_key(&interface)
            || choose(&self.places, &self.names, &self.gone, interface, label).is_some()
    }

    /// The interface has another name now.
    pub fn rename(&mut self, interface: u32, label: &str) -> Result<()> {
        let place = self.alive.get(&interface).copied();
        // The only interface has no place.
        self.set_label(place.unwrap_or(NO_INTERFACE), label)
    }

    fn set_label(&mut self, place: u32, label: &str) -> Result<()> {
        let mut bytes = [0; LABEL_BYTES];
        for (byte, of) in bytes.iter_mut().zip(label.bytes()) {
            *byte = of;
        }
        let set = self.labels.set(place, bytes, 0);
        set.context("cannot write LABELS")?;
        if let Some(name) = self.names.get_mut(place as usize) {
            label.clone_into(name);
        }
        Ok(())
    }

    /// Tells programs of an interface that is about to be attached. Until
    /// [`restack`](Self::restack) is called, they assume that any other interface may have seen its
    /// packets first. `flags`: [`flags`](crate::interfaces::Interface::flags).
    ///
    /// # Errors
    ///
    /// [`Kind::Interface`]: no place is left for it. [`Kind::Usage`]: no place is left for its
    /// zone.
    pub fn enter(&mut self, interface: u32, label: &str, zone: u16, flags: u8) -> Result<()> {
        let zone = self.zone(zone)?;
        let place = self.place(interface, label)?;
        self.set_label(place, label)?;
        self.gone.retain(|gone| *gone != place);
        let watched = Watched {
            place: place as u16,
            zone,
            flags: Watched::IS_ABOVE | Watched::IS_BELOW | flags,
        };
        self.alive.insert(interface, place);
        self.above.remove(&interface);
        self.told.insert(interface, watched);
        self.programs.tell(interface, watched)
    }

    /// Tells programs which interfaces are stacked on which, as they are now.
    pub fn restack(&mut self, known: &Known) -> Result<()> {
        let below = below(known.iter());
        self.tell_above(&below)?;
        let stacked = stacked(&below, &self.alive);
        let changed: Vec<_> = self
            .told
            .iter_mut()
            .filter_map(|(interface, told)| {
                let stands = stacked.get(interface).copied().unwrap_or(0);
                let flags = told.flags & !(Watched::IS_ABOVE | Watched::IS_BELOW) | stands;
                let is_new = told.flags != flags;
                told.flags = flags;
                is_new.then_some((*interface, *told))
            })
            .collect();
        changed
            .into_iter()
            .try_for_each(|(interface, watched)| self.programs.tell(interface, watched))
    }

    /// Tells them of interfaces that are not watched but are stacked on watched ones: a bridge, a
    /// VRF, a bond. For an outgoing packet the kernel names such an interface as the one that it
    /// came in through, but it was seen on the interface below.
    fn tell_above(&mut self, below: &Below) -> Result<()> {
        let above: BTreeSet<_> = below
            .keys()
            .filter(|top| !self.alive.contains_key(top))
            .filter(|top| all_below(below, **top).any(|it| self.alive.contains_key(&it)))
            .copied()
            .collect();
        let before = mem::replace(&mut self.above, above);
        for interface in before.difference(&self.above) {
            self.programs.remove(*interface)?;
        }
        for interface in self.above.difference(&before) {
            self.programs.tell(*interface, Watched::IS_SEEN_BELOW)?;
        }
        Ok(())
    }

    /// The interface is no longer watched. Its counters stay.
    pub fn leave(&mut self, interface: u32) -> Result<()> {
        match self.alive.remove(&interface) {
            Some(place) => {
                self.told.remove(&interface);
                self.gone.push_back(place);
                self.programs.remove(interface)
            }
            None => Ok(()),
        }
    }

    /// The place for an interface: its own, or that of an interface of the same name that
    /// disappeared; or an unused one; otherwise that of the interface that disappeared first.
    fn place(&mut self, interface: u32, label: &str) -> Result<u32> {
        let free = choose(&self.places, &self.names, &self.gone, interface, label);
        let Some(place) = free else {
            return Err(Failure::new(
                Kind::Interface,
                format!(
                    "{label}: cannot watch another interface: this run has reached its capacity of \
                     {} interfaces: select fewer, or run `twheel detach` and start again with all \
                     of them",
                    self.room()
                ),
            )
            .into());
        };
        let had = self.places[place as usize];
        // The counters of an earlier interface of this name continue.
        let is_same = had == interface && !is_elsewhere(interface);
        if had != 0 && !is_same && self.names[place as usize] != label {
            self.empty(place)?;
        }
        self.places[place as usize] = interface;
        self.counted
            .set(place, interface, 0)
            .context("cannot write COUNTED")?;
        Ok(place)
    }

    /// Moves the counters of a place to those of the running twheel, so that the sum over all
    /// places stays the same.
    fn empty(&mut self, place: u32) -> Result<()> {
        let read = |map: &PerCpuArray<MapData, Counters>, place| {
            map.get(&place, 0).context("cannot read the counters")
        };
        let of_place = read(&self.counters, place)?;
        let sum = Counters::sum(of_place.iter());
        let mut loader: Vec<_> = read(&self.counters, USERSPACE)?.iter().copied().collect();
        if let Some(first) = loader.first_mut() {
            first.add(&sum);
        }
        let zeros = vec![Counters::default(); loader.len()];
        for (place, values) in [(place, zeros), (USERSPACE, loader)] {
            self.counters
                .set(place, PerCpuValues::try_from(values)?, 0)
                .context("cannot write the counters")?;
        }
        Ok(())
    }

    /// The place of a zone in keys.
    fn zone(&mut self, number: u16) -> Result<u8> {
        let places = self.zones.enter(&[number])?;
        places
            .into_iter()
            .next()
            .flatten()
            .ok_or_else(|| too_many_zones(number))
    }
}

/// The place that an interface has or gets. An interface of another network namespace is recognised
/// by its name: the numbers of namespaces are reused when these disappear, and each run assigns
/// them anew.
fn choose(
    places: &[u32],
    names: &[String],
    gone: &VecDeque<u32>,
    interface: u32,
    label: &str,
) -> Option<u32> {
    let find = |index| {
        let all = (FIRST_INTERFACE..).zip(places.iter().skip(FIRST_INTERFACE as usize));
        all.filter(move |(_, had)| **had == index)
            .map(|(place, _)| place)
    };
    let elsewhere = is_elsewhere(interface);
    let alike = |place: &u32| is_elsewhere(places[*place as usize]) == elsewhere;
    let mut gone = gone.iter().copied().filter(alike);
    let namesake = |place: &u32| names[*place as usize] == label;
    let own = find(interface).next().filter(|_| !elsewhere);
    let new = find(0).next();
    let is_reserved = elsewhere && find(0).nth(RESERVED).is_none();
    own.or_else(|| gone.clone().find(namesake))
        .or(new.filter(|_| !is_reserved))
        .or_else(|| gone.next())
        .or(new)
}

/// The names of interfaces, each with its counters, from the counters of all places and CPUs.
///
/// # Errors
///
/// A map cannot be read.
pub fn by_interface(pins: &Pins, places: &[Vec<Counters>]) -> Result<Vec<(String, Counters)>> {
    let apart = data_plane::counted(pins)?;
    let mut interfaces: Vec<_> = apart
        .iter()
        .zip(labels(pins)?.into_iter().zip(places))
        .filter(|(interface, _)| **interface != 0)
        .map(|(_, (label, place))| (label, Counters::sum(place)))
        .collect();
    if interfaces.is_empty() {
        // A single interface has no place of its own.
        let all = Counters::sum(places.iter().flatten());
        interfaces.extend(only(pins)?.map(|name| (name, all)));
    }
    Ok(interfaces)
}

/// The present name of the interface of an instance that was made for a single one; `None`: it is
/// attached to none.
///
/// # Errors
///
/// A map or the directory cannot be read.
pub fn only(pins: &Pins) -> Result<Option<String>> {
    // Its pins keep the name that it had when it was attached.
    let Some(pinned) = pins.interfaces()?.into_iter().next() else {
        return Ok(None);
    };
    let label = labels(pins)?.into_iter().nth(NO_INTERFACE as usize);
    Ok(Some(label.filter(|it| !it.is_empty()).unwrap_or(pinned)))
}

/// The names of interfaces by place; empty for a place that no interface has.
pub fn labels(pins: &Pins) -> Result<Vec<String>> {
    let labels = Array::<_, [u8; LABEL_BYTES]>::try_from(Map::Array(pins.map("LABELS")?))?;
    read_labels(&labels)
}

fn read_labels(labels: &Array<MapData, [u8; LABEL_BYTES]>) -> Result<Vec<String>> {
    (0..labels.len())
        .map(|place| {
            let label = labels.get(&place, 0).context("cannot read LABELS")?;
            Ok(text(&label).unwrap_or_default())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use twheel_common::state::elsewhere;

    use super::*;

    #[test]
    fn an_interface_keeps_its_place() {
        let names = |names: &[&str]| names.iter().map(|it| (*it).to_owned()).collect::<Vec<_>>();
        let choose = |places: &[u32], gone: &[u32], interface, label| {
            let names = names(&["", "", "seven", "five"]);
            let gone = gone.iter().copied().collect();
            super::choose(places, &names, &gone, interface, label)
        };
        assert_eq!(choose(&[0; 4], &[], 7, "a"), Some(2));
        assert_eq!(choose(&[0, 0, 7, 0], &[2], 7, "a"), Some(2), "it had it");
        assert_eq!(choose(&[0, 0, 7, 0], &[2], 5, "a"), Some(3), "nobody's");
        assert_eq!(
            choose(&[0, 0, 7, 0], &[2], 5, "seven"),
            Some(2),
            "its name's"
        );
        assert_eq!(choose(&[0, 0, 7, 5], &[], 9, "a"), None, "both are watched");
        assert_eq!(choose(&[0, 0, 7, 5], &[3], 9, "a"), Some(3), "5 is gone");
        assert_eq!(
            choose(&[0, 0, 7, 5], &[3, 2], 9, "a"),
            Some(3),
            "for longer"
        );
    }

    #[test]
    fn an_interface_of_another_namespace_has_the_place_of_its_name() {
        let [blue, green] = [0, 1].map(|number| elsewhere(number) | 2);
        let names = ["", "", "blue/eth0", "green/eth0", ""].map(str::to_owned);
        let places = [0, 0, blue, green, 0];
        let choose = |gone: &[u32], interface, label| {
            let gone = gone.iter().copied().collect();
            super::choose(&places, &names, &gone, interface, label)
        };
        assert_eq!(choose(&[2, 3], blue, "blue/eth0"), Some(2));
        // A later run has numbered the namespaces the other way round.
        assert_eq!(choose(&[2, 3], green, "blue/eth0"), Some(2));
        assert_eq!(choose(&[2, 3], blue, "green/eth0"), Some(3));
        assert_eq!(choose(&[2], blue, "red/eth0"), Some(2), "blue has gone");
        assert_eq!(choose(&[], blue, "red/eth0"), Some(4), "nobody's");
    }

    #[test]
    fn no_interface_has_the_place_of_one_of_another_namespace() {
        let blue = elsewhere(0) | 2;
        let names = ["", "", "blue/eth0", "eth0"].map(str::to_owned);
        let choose = |places: &[u32], gone: &[u32], interface, label| {
            let gone = gone.iter().copied().collect();
            super::choose(places, &names, &gone, interface, label)
        };
        let places = [0, 0, blue, 7];
        assert_eq!(choose(&places, &[2, 3], 9, "eth1"), Some(3));
        assert_eq!(choose(&places, &[2], 9, "eth1"), None);
        assert_eq!(choose(&places, &[3, 2], blue + 1, "green/eth0"), Some(2));
        assert_eq!(choose(&places, &[3], blue + 1, "green/eth0"), None);
    }

    #[test]
    fn pods_leave_room_for_this_namespace() {
        let places = vec![0; FIRST_INTERFACE as usize + RESERVED + 1];
        let names = vec![String::new(); places.len()];
        let (mut places, first) = (places, FIRST_INTERFACE);
        let choose = |places: &[u32], gone: &[u32], interface| {
            let gone = gone.iter().copied().collect();
            super::choose(places, &names, &gone, interface, "any")
        };
        let blue = elsewhere(0) | 2;
        assert_eq!(choose(&places, &[], blue), Some(first));
        places[first as usize] = blue;
        assert_eq!(
            choose(&places, &[], blue + 1),
            Some(first + 1),
            "none is gone"
        );
        assert_eq!(choose(&places, &[first], blue + 1), Some(first), "one is");
        assert_eq!(choose(&places, &[first], 7), Some(first + 1));
    }
}
