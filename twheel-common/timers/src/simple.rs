//! Scheme 4.

use crate::{
    blocks::At,
    error::Error,
    hashed::Hashed,
    slab::Slab,
    timers::{Budget, sealed::Structure},
};

/// Scheme 4: a wheel whose range covers all intervals, so that everything in the hand's slot is
/// due.
///
/// It is a hashed wheel that never goes round twice. Deadlines are checked nevertheless: so moving
/// one is one store, and timers are right even if the driver lags behind its clock. If all timers
/// have the same timeout, each new one goes to the slot just behind the hand.
///
/// ```
/// use twheel_timers::{Scheme, Simple, Timers};
///
/// let mut timers = Timers::new(Simple::new(64)?);
/// timers.insert(0, 63, "in range")?;
/// assert!(timers.insert(0, 64, "not in range").is_err());
/// assert!(timers.expire(63).is_some());
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct Simple(Hashed);

impl Simple {
    /// For intervals of less than `slots` ticks; rounded up to a power of two.
    ///
    /// # Errors
    ///
    /// No slots, or more than 2^24.
    ///
    /// ```
    /// use twheel_timers::Simple;
    ///
    /// assert!(Simple::new(4_096).is_ok());
    /// assert!(Simple::new(0).is_err());
    /// ```
    pub fn new(slots: u32) -> Result<Self, Error> {
        Hashed::new(slots).map(Self)
    }

    /// The longest interval, in ticks.
    ///
    /// ```
    /// use twheel_timers::Simple;
    ///
    /// assert_eq!(Simple::new(1_000)?.range(), 1_023);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn range(&self) -> u64 {
        u64::from(self.0.slots()) - 1
    }
}

impl Structure for Simple {
    type Link = At;
    const LAZY: bool = true;

    #[inline]
    fn check(&self, interval: u64) -> Result<(), Error> {
        Error::check("the interval in ticks", interval, 0, self.range()).map(drop)
    }

    #[inline]
    fn place<T>(&mut self, slab: &mut Slab<T, At>, elapsed: u64, timer: u32) {
        self.0.place(slab, elapsed, timer);
    }

    #[inline]
    fn displace<T>(&mut self, slab: &mut Slab<T, At>, timer: u32, at: At) {
        self.0.displace(slab, timer, at);
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T, At>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool {
        self.0.advance(slab, elapsed, now, budget)
    }

    #[inline]
    fn pop_due<T>(&mut self, slab: &mut Slab<T, At>) -> Option<u32> {
        self.0.pop_due(slab)
    }

    fn push_due<T>(&mut self, slab: &mut Slab<T, At>, timer: u32) {
        self.0.push_due(slab, timer);
    }

    fn has_due(&self) -> bool {
        self.0.has_due()
    }

    fn next<T>(&self, slab: &Slab<T, At>, elapsed: u64) -> Option<u64> {
        self.0.next(slab, elapsed)
    }

    fn release(&mut self) {
        self.0.release();
    }

    fn clear(&mut self) {
        self.0.clear();
    }
}
