//! Scheme 4.

use super::{
    error::Error,
    hashed::Hashed,
    slab::Slab,
    timers::{Budget, Structure},
};

/// Scheme 4: a wheel whose range covers all intervals, so that everything in the hand's slot is
/// due.
///
/// It is a hashed wheel that never goes round twice. Deadlines are checked nevertheless: so moving
/// one is one store, and timers are right even if the driver lags behind its clock. If all timers
/// have the same timeout, each new one goes to the slot just behind the hand.
#[derive(Clone, Debug)]
pub struct Simple(Hashed);

impl Simple {
    /// For intervals of less than `slots` ticks; rounded up to a power of two.
    ///
    /// # Errors
    ///
    /// No slots, or more than 2^24.
    pub fn new(slots: u32) -> Result<Self, Error> {
        Hashed::new(slots).map(Self)
    }

    /// The longest interval, in ticks.
    pub fn range(&self) -> u64 {
        u64::from(self.0.slots()) - 1
    }
}

impl Structure for Simple {
    const LAZY: bool = true;

    fn slots(&self) -> u32 {
        self.0.slots()
    }

    fn check(&self, interval: u64) -> Result<(), Error> {
        Error::check("the interval in ticks", interval, 0, self.range()).map(drop)
    }

    fn place<T>(&mut self, slab: &mut Slab<T>, elapsed: u64, timer: u32) {
        self.0.place(slab, elapsed, timer);
    }

    fn displace<T>(&mut self, slab: &mut Slab<T>, timer: u32) {
        self.0.displace(slab, timer);
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool {
        self.0.advance(slab, elapsed, now, budget)
    }

    fn next<T>(&self, slab: &Slab<T>, elapsed: u64) -> Option<u64> {
        self.0.next(slab, elapsed)
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}
