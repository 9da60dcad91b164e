//! Scheme 7.

use super::{
    error::Error,
    slab::{ListId, Slab},
    timers::{Budget, Structure},
};
use crate::wheel::{Geometry, MAX_BITS, MAX_LEVELS, MIN_BITS, Wheel};

/// Scheme 7: wheels with ever longer slots, one above the other, with the arithmetic of
/// [`crate::wheel`].
///
/// As there, a timer that is taken from a slot is put into the slot of its present deadline. So
/// moving a deadline to a later tick is one store.
#[derive(Clone, Debug)]
pub struct Hierarchical {
    geometry: Geometry,
    wheel: Wheel,
    /// The slot of the hand, while it may not be empty.
    visiting: Option<ListId>,
}

impl Hierarchical {
    /// This many levels of this many slots, rounded up to a power of two. Deadlines beyond the
    /// range go round in the top level.
    ///
    /// # Errors
    ///
    /// No level, or more than [`MAX_LEVELS`]; less than 2 slots, or more than `2^MAX_BITS`.
    pub fn new(levels: u32, slots: u32) -> Result<Self, Error> {
        Error::check("the number of levels", levels.into(), 1, MAX_LEVELS as u64)?;
        Error::check(
            "the number of slots of a level",
            slots.into(),
            1 << MIN_BITS,
            1 << MAX_BITS,
        )?;
        Ok(Self {
            geometry: Geometry::hierarchical(levels, slots.next_power_of_two().trailing_zeros()),
            wheel: Wheel::default(),
            visiting: None,
        })
    }

    /// The levels and slots of the wheel.
    pub fn geometry(&self) -> Geometry {
        self.geometry
    }
}

impl Structure for Hierarchical {
    const LAZY: bool = true;

    fn slots(&self) -> u32 {
        self.geometry.slots()
    }

    fn place<T>(&mut self, slab: &mut Slab<T>, _elapsed: u64, timer: u32) {
        let slot = self.wheel.slot(self.geometry, slab.when(timer));
        slab.push(ListId::of_slot(slot.index), timer);
        self.wheel.occupy(self.geometry, slot.index);
    }

    fn displace<T>(&mut self, slab: &mut Slab<T>, timer: u32) {
        if let Some(list) = slab.unlink(timer) {
            self.wheel.vacate(self.geometry, list.slot());
        }
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool {
        loop {
            // No timer is put back into the slot of the hand: its next turn is a whole round ahead.
            while let Some(timer) = self.visiting.and_then(|list| slab.first(list)) {
                if !budget.spend() {
                    return false;
                }
                slab.unlink(timer);
                if slab.when(timer) <= *elapsed {
                    slab.push(ListId::DUE, timer);
                } else {
                    self.place(slab, *elapsed, timer);
                }
            }
            self.visiting = None;
            match self.wheel.first(self.geometry) {
                Some(slot) if slot.starts <= now => {
                    if !budget.spend() {
                        return false;
                    }
                    self.wheel.take(self.geometry, slot);
                    *elapsed = self.wheel.elapsed;
                    self.visiting = Some(ListId::of_slot(slot.index));
                }
                _ => {
                    self.wheel.advance(now);
                    *elapsed = self.wheel.elapsed;
                    return true;
                }
            }
        }
    }

    fn next<T>(&self, _slab: &Slab<T>, elapsed: u64) -> Option<u64> {
        match self.visiting {
            Some(_) => Some(elapsed),
            None => Some(self.wheel.first(self.geometry)?.starts),
        }
    }

    fn clear(&mut self) {
        let elapsed = self.wheel.elapsed;
        self.wheel = Wheel::default();
        self.wheel.advance(elapsed);
        self.visiting = None;
    }
}
