//! Scheme 6.

use crate::{
    blocks::{At, Blocks, DUE, list_of, slot_of},
    error::Error,
    ring::Ring,
    slab::Slab,
    timers::{Budget, sealed::Structure},
};

/// Scheme 6: a wheel that goes round as often as an interval needs, with unordered lists. Netty's
/// HashedWheelTimer counts down the rounds of each timer; here the deadline implies them.
///
/// A timer is in the slot of its deadline, or of an earlier deadline that it had. When the hand
/// reaches a slot, the deadline of each timer is checked: the timer is due, stays, or moves to its
/// slot. So moving a deadline to a later tick is one store.
///
/// ```
/// use twheel_timers::{Hashed, Scheme, Timers};
///
/// let mut timers = Timers::new(Hashed::new(64)?);
/// timers.insert(0, 1_000_000, "after 15,625 rounds")?;
/// assert_eq!(timers.expire(999_999), None);
/// assert!(timers.expire(1_000_000).is_some());
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct Hashed {
    ring: Ring,
    lists: Blocks,
    /// The slot of the hand, until all of its timers have been checked.
    visiting: Option<u32>,
}

impl Hashed {
    /// With this many slots M, rounded up to a power of two. A tick looks at n/M timers in the
    /// mean.
    ///
    /// # Errors
    ///
    /// No slots, or more than 2^24.
    ///
    /// ```
    /// use twheel_timers::Hashed;
    ///
    /// assert!(Hashed::new(4_096).is_ok());
    /// assert!(Hashed::new(0).is_err());
    /// ```
    pub fn new(slots: u32) -> Result<Self, Error> {
        let ring = Ring::new(slots)?;
        Ok(Self {
            lists: Blocks::new(ring.slots()),
            ring,
            visiting: None,
        })
    }

    /// Number of slots.
    ///
    /// ```
    /// use twheel_timers::Hashed;
    ///
    /// assert_eq!(Hashed::new(1_000)?.slots(), 1_024);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn slots(&self) -> u32 {
        self.ring.slots()
    }
}

impl Structure for Hashed {
    type Link = At;
    const LAZY: bool = true;

    #[inline]
    fn place<T>(&mut self, slab: &mut Slab<T, At>, _elapsed: u64, timer: u32) {
        let slot = self.ring.slot(slab.when(timer));
        // A walk through this slot that is under way does not reach it, or it might never end.
        if self.lists.push(slab, list_of(slot), timer) {
            self.ring.occupy(slot);
        }
    }

    #[inline]
    fn displace<T>(&mut self, _slab: &mut Slab<T, At>, _timer: u32, at: At) {
        if let Some(slot) = self.lists.remove(at).and_then(slot_of) {
            self.ring.vacate(slot);
        }
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T, At>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool {
        loop {
            if let Some(slot) = self.visiting {
                while !self.lists.at_end() {
                    if !budget.spend() {
                        return false;
                    }
                    let Some(timer) = self.lists.step(slab) else {
                        break;
                    };
                    let when = slab.when(timer);
                    if when <= *elapsed {
                        let at = slab.link(timer);
                        self.displace(slab, timer, at);
                        self.push_due(slab, timer);
                    } else if self.ring.slot(when) != slot {
                        let at = slab.link(timer);
                        self.displace(slab, timer, at);
                        self.place(slab, *elapsed, timer);
                    }
                }
                self.visiting = None;
            }
            match self.ring.next(*elapsed) {
                Some(tick) if tick <= now => {
                    if !budget.spend() {
                        return false;
                    }
                    *elapsed = tick;
                    let slot = self.ring.slot(tick);
                    self.visiting = Some(slot);
                    self.lists.walk(slab, list_of(slot));
                }
                _ => {
                    *elapsed = now.max(*elapsed);
                    return true;
                }
            }
        }
    }

    #[inline]
    fn pop_due<T>(&mut self, _slab: &mut Slab<T, At>) -> Option<u32> {
        self.lists.pop(DUE)
    }

    fn push_due<T>(&mut self, slab: &mut Slab<T, At>, timer: u32) {
        self.lists.push(slab, DUE, timer);
    }

    fn has_due(&self) -> bool {
        !self.lists.is_empty(DUE)
    }

    fn next<T>(&self, _slab: &Slab<T, At>, elapsed: u64) -> Option<u64> {
        match self.visiting {
            Some(_) if !self.lists.at_end() => Some(elapsed),
            _ => self.ring.next(elapsed),
        }
    }

    fn release(&mut self) {
        self.lists.release();
    }

    fn clear(&mut self) {
        self.ring.clear();
        self.lists.clear();
        self.visiting = None;
    }
}
