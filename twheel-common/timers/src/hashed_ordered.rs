//! Scheme 5.

use crate::{
    error::Error,
    linked::{DUE, Linked, Links, list_of, slot_of},
    ordered::{self, End},
    ring::Ring,
    slab::Slab,
    timers::{Budget, sealed::Structure},
};

/// Scheme 5: a hashed wheel with ordered lists. Only the first timer of a list is looked at.
///
/// ```
/// use twheel_timers::{HashedOrdered, Scheme, Timers};
///
/// let mut timers = Timers::new(HashedOrdered::new(64)?);
/// timers.insert(0, 1_000, "a")?;
/// assert_eq!(timers.expire(999), None);
/// assert!(timers.expire(1_000).is_some());
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct HashedOrdered {
    ring: Ring,
    lists: Linked,
}

impl HashedOrdered {
    /// With this many slots, rounded up to a power of two.
    ///
    /// # Errors
    ///
    /// No slots, or more than 2^24.
    ///
    /// ```
    /// use twheel_timers::HashedOrdered;
    ///
    /// assert!(HashedOrdered::new(4_096).is_ok());
    /// assert!(HashedOrdered::new(0).is_err());
    /// ```
    pub fn new(slots: u32) -> Result<Self, Error> {
        let ring = Ring::new(slots)?;
        Ok(Self {
            lists: Linked::new(ring.slots()),
            ring,
        })
    }

    /// The first timer in the hand's slot, if it is due.
    fn due<T>(&self, slab: &Slab<T, Links>, elapsed: u64) -> Option<u32> {
        self.lists
            .first(list_of(self.ring.slot(elapsed)))
            .filter(|timer| slab.when(*timer) <= elapsed)
    }
}

impl Structure for HashedOrdered {
    type Link = Links;
    const LAZY: bool = false;

    fn place<T>(&mut self, slab: &mut Slab<T, Links>, _elapsed: u64, timer: u32) {
        let slot = self.ring.slot(slab.when(timer));
        ordered::insert(&mut self.lists, slab, list_of(slot), End::Rear, timer);
        self.ring.occupy(slot);
    }

    fn displace<T>(&mut self, slab: &mut Slab<T, Links>, timer: u32, _at: Links) {
        if let Some(slot) = self.lists.unlink(slab, timer).and_then(slot_of) {
            self.ring.vacate(slot);
        }
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T, Links>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool {
        loop {
            while let Some(timer) = self.due(slab, *elapsed) {
                if !budget.spend() {
                    return false;
                }
                let link = slab.link(timer);
                self.displace(slab, timer, link);
                self.push_due(slab, timer);
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

    fn pop_due<T>(&mut self, slab: &mut Slab<T, Links>) -> Option<u32> {
        self.lists.pop(slab, DUE)
    }

    fn push_due<T>(&mut self, slab: &mut Slab<T, Links>, timer: u32) {
        self.lists.push(slab, DUE, timer);
    }

    fn has_due(&self) -> bool {
        self.lists.first(DUE).is_some()
    }

    fn next<T>(&self, slab: &Slab<T, Links>, elapsed: u64) -> Option<u64> {
        match self.due(slab, elapsed) {
            Some(_) => Some(elapsed),
            None => self.ring.next(elapsed),
        }
    }

    fn clear(&mut self) {
        self.lists.clear();
        self.ring.clear();
    }
}
