//! A ring of slots, and a bitmap of those that are not empty.

use crate::{bitmap::Bitmap, error::Error};

/// Most slots of a wheel or of a level.
pub const MAX_SLOTS: u32 = 1 << 24;

/// Slots that stand for the ticks modulo M, a power of two. A timer is in the slot of its deadline.
#[derive(Clone, Debug)]
pub struct Ring {
    occupied: Bitmap,
    mask: u32,
}

impl Ring {
    /// This many slots, rounded up to a power of two.
    pub fn new(slots: u32) -> Result<Self, Error> {
        Error::check("the number of slots", slots.into(), 1, MAX_SLOTS.into())?;
        let slots = slots.next_power_of_two();
        Ok(Self {
            occupied: Bitmap::new(slots),
            mask: slots - 1,
        })
    }

    /// Number of slots.
    pub fn slots(&self) -> u32 {
        self.mask + 1
    }

    /// The slot of a tick.
    pub fn slot(&self, tick: u64) -> u32 {
        tick as u32 & self.mask
    }

    /// Whether all slots are empty.
    pub fn is_empty(&self) -> bool {
        self.occupied.is_empty()
    }

    /// Notes that a slot is not empty.
    pub fn occupy(&mut self, slot: u32) {
        self.occupied.set(slot);
    }

    /// Notes that a slot is empty.
    pub fn vacate(&mut self, slot: u32) {
        self.occupied.clear(slot);
    }

    /// The first tick after `elapsed` whose slot is not empty.
    pub fn next(&self, elapsed: u64) -> Option<u64> {
        let from = self.slot(elapsed + 1);
        let slot = match self.occupied.first_from(from) {
            Some(slot) => slot,
            None => self.occupied.first_from(0)?,
        };
        Some(elapsed + 1 + u64::from(slot.wrapping_sub(from) & self.mask))
    }

    /// Marks all slots as empty.
    pub fn clear(&mut self) {
        self.occupied = Bitmap::new(self.slots());
    }
}
