//! Scheme 5.

use super::{
    error::Error,
    ordered,
    ordered::End,
    ring::Ring,
    slab::{ListId, Slab},
    timers::{Budget, Structure},
};

/// Scheme 5: a hashed wheel with ordered lists. Only the first timer of a list is looked at.
#[derive(Clone, Debug)]
pub struct HashedOrdered {
    ring: Ring,
}

impl HashedOrdered {
    /// With this many slots, rounded up to a power of two.
    ///
    /// # Errors
    ///
    /// No slots, or more than 2^24.
    pub fn new(slots: u32) -> Result<Self, Error> {
        Ring::new(slots).map(|ring| Self { ring })
    }

    /// The first timer in the hand's slot, if it is due.
    fn due<T>(&self, slab: &Slab<T>, elapsed: u64) -> Option<u32> {
        slab.first(ListId::of_slot(self.ring.slot(elapsed)))
            .filter(|timer| slab.when(*timer) <= elapsed)
    }
}

impl Structure for HashedOrdered {
    const LAZY: bool = false;

    fn slots(&self) -> u32 {
        self.ring.slots()
    }

    fn place<T>(&mut self, slab: &mut Slab<T>, _elapsed: u64, timer: u32) {
        let slot = self.ring.slot(slab.when(timer));
        ordered::insert(slab, ListId::of_slot(slot), End::Rear, timer);
        self.ring.occupy(slot);
    }

    fn displace<T>(&mut self, slab: &mut Slab<T>, timer: u32) {
        self.ring.displace(slab, timer);
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool {
        loop {
            while let Some(timer) = self.due(slab, *elapsed) {
                if !budget.spend() {
                    return false;
                }
                self.displace(slab, timer);
                slab.push(ListId::DUE, timer);
            }
            match self.ring.next(*elapsed) {
                Some(tick) if tick <= now => {
                    if !budget.spend() {
                        return false;
                    }
                    *elapsed = tick;
                }
                _ => {
                    *elapsed = now.max(*elapsed);
                    return true;
                }
            }
        }
    }

    fn next<T>(&self, slab: &Slab<T>, elapsed: u64) -> Option<u64> {
        match self.due(slab, elapsed) {
            Some(_) => Some(elapsed),
            None => self.ring.next(elapsed),
        }
    }

    fn clear(&mut self) {
        self.ring.clear();
    }
}
