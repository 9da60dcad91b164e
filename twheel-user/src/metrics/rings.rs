//! The wheels as the page draws them: how many flows are where on each level.

use std::{collections::BTreeMap, time::Duration};

use anyhow::Result;
use serde::Serialize;

use crate::{
    inspect::Reader,
    wheels::{Slot, Wheels},
};

/// Cells of a level; each stands for the same number of slots.
const CELLS: u32 = 64;
/// Flows of a slot that are counted; more are drawn alike.
const OF_SLOT: u32 = 1000;
/// Flows that are counted of all wheels.
const OF_ALL: u32 = 1 << 16;
/// Wheels that are drawn one by one. If there are more, they are drawn as one.
const WHEELS: usize = 4;

/// What is drawn.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Rings {
    wheels: Vec<Ring>,
    /// How many CPUs have wheels.
    cpus: usize,
}

/// The wheel of a CPU, or of all.
#[derive(Clone, Debug, Serialize)]
struct Ring {
    /// The CPU; `None`: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    cpu: Option<u32>,
    /// Milliseconds until its next slot is due; `None`: it is empty.
    next_ms: Option<i64>,
    levels: Vec<Level>,
}

#[derive(Clone, Debug, Serialize)]
struct Level {
    /// The time of a round, in seconds.
    round: f64,
    /// Slots that hold flows.
    slots: u32,
    /// Flows in each cell. Of a slot, up to a thousand are counted, and at least one.
    cells: Vec<u32>,
}

/// Reads the wheels.
pub(super) fn read_rings(reader: &Reader) -> Result<Rings> {
    let wheels = Wheels::read(reader, reader.now()?)?;
    let cpus = wheels.wheels.len();
    let of_wheel = OF_ALL / cpus.max(1) as u32;
    let counted = wheels.count_up_to(reader, OF_SLOT, of_wheel)?;
    let cells = wheels.slots().min(CELLS);
    let per_cell = wheels.slots() / cells;
    let mut rings: Vec<Ring> = Vec::new();
    for (turning, counted) in wheels.wheels.iter().zip(&counted) {
        let of_slot = |it: &Slot| ((it.level, it.slot), it.flows);
        let flows: BTreeMap<_, _> = counted.slots.iter().map(of_slot).collect();
        let levels = (0..wheels.geometry.levels).map(|level| {
            let mut ring = Level {
                round: seconds(wheels.span(level)) * f64::from(wheels.slots()),
                slots: 0,
                cells: vec![0; cells as usize],
            };
            for slot in turning.wheel.occupied(wheels.geometry, level) {
                ring.slots += 1;
                // At least one flow, even if it was not counted.
                let flows = flows.get(&(level, slot)).copied().unwrap_or(1);
                ring.cells[(slot / per_cell) as usize] += flows;
            }
            ring
        });
        rings.push(Ring {
            cpu: Some(turning.cpu),
            next_ms: wheels.next(turning),
            levels: levels.collect(),
        });
    }
    if rings.len() > WHEELS {
        rings = vec![together(&rings)];
    }
    Ok(Rings {
        wheels: rings,
        cpus,
    })
}

/// All wheels as one: slots of the same number are due at the same time.
fn together(rings: &[Ring]) -> Ring {
    let mut all = rings[0].clone();
    all.cpu = None;
    for ring in &rings[1..] {
        all.next_ms = [all.next_ms, ring.next_ms].into_iter().flatten().min();
        for (level, other) in all.levels.iter_mut().zip(&ring.levels) {
            level.slots += other.slots;
            for (cell, more) in level.cells.iter_mut().zip(&other.cells) {
                *cell += more;
            }
        }
    }
    all
}

fn seconds(duration: Duration) -> f64 {
    duration.as_secs_f64()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wheels_are_added_up() {
        let ring = |cpu, next_ms, cells: &[u32]| Ring {
            cpu: Some(cpu),
            next_ms,
            levels: vec![Level {
                round: 6.4,
                slots: 1,
                cells: cells.to_vec(),
            }],
        };
        let all = together(&[
            ring(0, None, &[1, 0]),
            ring(1, Some(50), &[1000, 2]),
            ring(2, Some(7), &[0, 0]),
        ]);
        assert_eq!((all.cpu, all.next_ms), (None, Some(7)));
        assert_eq!(all.levels[0].slots, 3);
        assert_eq!(all.levels[0].cells, [1001, 2]);
    }
}
