//! The wheels of an instance as a reader sees them: how far they have turned, and which flows are
//! in which slots.
//!
//! The wheels turn while they are read. A wheel is copied by one system call. The lists of its
//! slots are followed through the flows, which begin, end and move meanwhile, so a count is exact
//! if nothing moves, and approximate otherwise.

use std::{collections::BTreeMap, time::Duration};

use anyhow::{Context, Result};
use aya::maps::{Map, PerCpuArray};
use twheel_common::wheel::{Geometry, Heads, Link, NEVER, Wheel};

use crate::{clock::Clock, inspect::Reader};

/// The wheels of all CPUs, as they were at one moment.
pub struct Wheels {
    /// The wheels that have turned or hold flows, by CPU.
    pub wheels: Vec<Turning>,
    /// The shape of each wheel.
    pub geometry: Geometry,
    /// Clock units per tick.
    tick: u32,
    clock: Clock,
    /// Low 32 bits of the clock, in units.
    now: u32,
}

/// A CPU's wheel.
pub struct Turning {
    /// The CPU.
    pub cpu: u32,
    /// Its hand and occupancy.
    pub wheel: Wheel,
}

/// The flows of a wheel, counted.
#[derive(Clone, Default)]
pub struct Counted {
    /// The slots that are not empty, by level and slot.
    pub slots: Vec<Slot>,
    /// Flows that were handed out and await their timer visit.
    pub handed_out: u32,
}

/// A slot that is not empty.
#[derive(Clone, Copy, Debug)]
pub struct Slot {
    /// Its level.
    pub level: u32,
    /// Its number within the level.
    pub slot: u32,
    /// How many flows it holds.
    pub flows: u32,
    /// The tick at which it is handed out.
    pub turn: u64,
}

impl Counted {
    /// The number of flows on the wheel.
    pub fn flows(&self) -> u64 {
        let slots = self.slots.iter().map(|slot| u64::from(slot.flows));
        slots.sum::<u64>() + u64::from(self.handed_out)
    }
}

impl Turning {
    /// Whether its stepper sleeps until it is woken.
    pub fn sleeps(&self) -> bool {
        self.wheel.wake == NEVER
    }
}

impl Wheels {
    /// Reads the wheels; `now` as returned by [`Reader::now`].
    pub fn read(reader: &Reader, now: u32) -> Result<Self> {
        let map = Map::PerCpuArray(reader.pins().map("WHEEL")?);
        let wheels = PerCpuArray::<_, Wheel>::try_from(map)?;
        let wheels = wheels.get(&0, 0).context("cannot read WHEEL")?;
        let geometry = reader.meta().geometry;
        let wheels = (0..).zip(wheels.iter());
        Ok(Self {
            // A CPU that the host may have but does not have has a wheel that has never turned.
            wheels: wheels
                .filter(|(_, wheel)| wheel.elapsed > 0 || wheel.first(geometry).is_some())
                .map(|(cpu, &wheel)| Turning { cpu, wheel })
                .collect(),
            geometry,
            tick: reader.meta().tick,
            clock: reader.clock(),
            now,
        })
    }

    /// The time in units. Its upper bits follow from the hand, unless the hand lags by months.
    fn now(&self, turning: &Turning) -> i128 {
        let elapsed = i128::from(turning.wheel.elapsed) * i128::from(self.tick);
        elapsed + i128::from(self.now.wrapping_sub(elapsed as u32) as i32)
    }

    /// Milliseconds until a tick of a wheel begins; negative if it is overdue.
    pub fn until(&self, turning: &Turning, tick: u64) -> i64 {
        let units = i128::from(tick) * i128::from(self.tick) - self.now(turning);
        (units * self.clock.unit().as_nanos() as i128 / 1_000_000) as i64
    }

    /// Milliseconds until the next slot is due; negative if it is overdue; `None` if the wheel is
    /// empty.
    pub fn next(&self, turning: &Turning) -> Option<i64> {
        let first = turning.wheel.first(self.geometry)?;
        Some(self.until(turning, first.starts))
    }

    /// The length of a tick.
    pub fn tick(&self) -> Duration {
        self.clock.duration(self.tick.into())
    }

    /// The time that a slot of a level spans.
    pub fn span(&self, level: u32) -> Duration {
        let units = u64::from(self.tick) << (level * self.geometry.bits);
        self.clock.duration(units)
    }

    /// The number of slots per level.
    pub fn slots(&self) -> u32 {
        1 << self.geometry.bits
    }

    /// The slot of a level that the hand is on. Over empty slots it is computed from the time,
    /// because the stepper moves the hand only when there is something to hand out.
    pub fn hand(&self, turning: &Turning, level: u32) -> u32 {
        let tick = self.now(turning) / i128::from(self.tick.max(1));
        let first = turning.wheel.first(self.geometry);
        let most = first.map_or(tick, |first| tick.min(i128::from(first.starts) - 1));
        let tick = most.max(turning.wheel.elapsed.into()) as u64;
        (tick >> (level * self.geometry.bits)) as u32 & (self.slots() - 1)
    }

    /// Counts the flows of each wheel, in the order of `wheels`.
    pub fn count(&self, reader: &Reader) -> Result<Vec<Counted>> {
        self.count_up_to(reader, u32::MAX, reader.table().records())
    }

    /// Counts at most `of_slot` flows of each slot and `of_wheel` flows of each wheel. Slots that
    /// come after those are not among the counted.
    pub fn count_up_to(
        &self,
        reader: &Reader,
        of_slot: u32,
        of_wheel: u32,
    ) -> Result<Vec<Counted>> {
        let geometry = self.geometry;
        let map = Map::PerCpuArray(reader.pins().map("SLOTS")?);
        let heads = PerCpuArray::<_, Heads>::try_from(map)?;
        // One system call returns the list heads of all CPUs.
        let mut wanted: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for (place, turning) in self.wheels.iter().enumerate() {
            for level in 0..geometry.levels {
                for slot in turning.wheel.occupied(geometry, level) {
                    let index = level << geometry.bits | slot;
                    wanted.entry(index).or_default().push(place);
                }
            }
        }
        wanted.insert(geometry.slots(), (0..self.wheels.len()).collect());
        let mut counted = vec![Counted::default(); self.wheels.len()];
        // A list that changes while it is followed may become a circle.
        let mut left = vec![of_wheel; self.wheels.len()];
        for (index, places) in wanted {
            let heads = heads.get(&index, 0).context("cannot read SLOTS")?;
            for place in places {
                let turning = &self.wheels[place];
                let heads = heads.get(turning.cpu as usize).copied();
                let lists = heads.unwrap_or_default().into_iter();
                let all = of_slot.min(left[place]);
                let mut of_this = all;
                let lengths = lists.map(|head| length(reader, head, turning.cpu, &mut of_this));
                let flows = lengths.sum();
                left[place] -= all - of_this;
                if index == geometry.slots() {
                    counted[place].handed_out = flows;
                } else if flows > 0 {
                    counted[place].slots.push(Slot {
                        level: index >> geometry.bits,
                        slot: index & (self.slots() - 1),
                        flows,
                        turn: turning.wheel.turn(geometry, index),
                    });
                }
            }
        }
        Ok(counted)
    }
}

/// Counts the flows of a CPU's list: up to its end, or up to a record that is not a flow of this
/// CPU by now, or until `left` is used up.
fn length(reader: &Reader, head: Link, cpu: u32, left: &mut u32) -> u32 {
    let mut flows = 0;
    let mut link = head;
    while let Some(index) = link.as_flow()
        && *left > 0
        && let Some(next) = reader.table().next(index, cpu)
    {
        flows += 1;
        *left -= 1;
        link = next;
    }
    flows
}

/// How many flows are due when.
#[derive(Clone, Copy, Debug, Default)]
pub struct Due([u64; Due::BOUNDS.len() + 1]);

impl Due {
    /// The bounds and their names.
    const BOUNDS: [(Duration, &str); 6] = [
        (Duration::from_secs(1), "1s"),
        (Duration::from_secs(10), "10s"),
        (Duration::from_secs(60), "1m"),
        (Duration::from_secs(600), "10m"),
        (Duration::from_secs(3600), "1h"),
        (Duration::from_secs(86_400), "1d"),
    ];

    /// Counts flows by the time that they have left.
    pub fn count(left: impl Iterator<Item = Duration>) -> Self {
        let mut due = Self::default();
        for left in left {
            due.0[Self::BOUNDS.partition_point(|(bound, _)| *bound < left)] += 1;
        }
        due
    }

    /// Each name and bound with the number of flows that are due within this bound but not within
    /// the one before; the last has no bound.
    pub fn each(&self) -> impl Iterator<Item = (&'static str, Option<Duration>, u64)> {
        let bounds = Self::BOUNDS.map(|(bound, name)| (name, Some(bound)));
        let bounds = bounds.into_iter().chain([("later", None)]);
        bounds
            .zip(self.0)
            .map(|((name, bound), flows)| (name, bound, flows))
    }
}

/// Draws the filled slots of a level in at most `width` cells. Each cell stands for the same number
/// of slots; its height shows how many flows they hold, relative to the fullest cell.
pub fn draw(slots: u32, filled: impl Iterator<Item = (u32, u32)>, width: usize) -> Vec<char> {
    const GLYPHS: [char; 9] = [' ', '▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    let mut cells = vec![0u64; cell(slots, slots - 1, width) + 1];
    for (slot, flows) in filled {
        cells[cell(slots, slot, width)] += u64::from(flows);
    }
    let most = cells.iter().copied().max().unwrap_or(0).max(1);
    let glyph = |flows: u64| GLYPHS[(flows * 8).div_ceil(most) as usize];
    cells.into_iter().map(glyph).collect()
}

/// The cell in which [`draw`] shows a slot.
pub fn cell(slots: u32, slot: u32, width: usize) -> usize {
    let width = u32::try_from(width).unwrap_or(u32::MAX).max(1);
    (slot / slots.div_ceil(width).next_power_of_two()) as usize
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_level_fits_its_width() {
        let drawn = |filled: &[(u32, u32)], width| -> String {
            draw(8, filled.iter().copied(), width).into_iter().collect()
        };
        assert_eq!(drawn(&[(0, 8), (1, 4), (7, 1)], 100), "█▄     ▁");
        assert_eq!(drawn(&[(0, 8), (1, 4), (7, 1)], 8), "█▄     ▁");
        assert_eq!(drawn(&[(0, 8), (1, 4), (7, 12)], 7), "█  █");
        assert_eq!(drawn(&[(0, 1000), (7, 1)], 8), "█      ▁");
        assert_eq!(drawn(&[(3, 1)], 0), "█");
        assert_eq!(drawn(&[], 8), "        ");
    }

    #[test]
    fn what_is_due_stands_at_its_bound() {
        let left = [0, 1000, 1001, 86_400_000, 86_400_001].map(Duration::from_millis);
        let due = Due::count(left.into_iter());
        let flows: Vec<_> = due.each().map(|(_, _, flows)| flows).collect();
        assert_eq!(flows, [2, 1, 0, 0, 0, 1, 1]);
        assert_eq!(due.each().last().unwrap().0, "later");
    }
}
