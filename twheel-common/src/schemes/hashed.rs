//! Scheme 6.

use super::{
    error::Error,
    ring::Ring,
    slab::{ListId, Slab},
    timers::{Budget, Structure},
};

/// Scheme 6: a wheel that goes round as often as an interval needs, with unordered lists. Netty's
/// HashedWheelTimer counts down the rounds of each timer; here the deadline implies them.
///
/// A timer is in the slot of its deadline, or of an earlier deadline that it had. When the hand
/// reaches a slot, the deadline of each timer is checked: the timer is due, stays, or moves to its
/// slot. So moving a deadline to a later tick is one store.
#[derive(Clone, Debug)]
pub struct Hashed {
    ring: Ring,
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
    pub fn new(slots: u32) -> Result<Self, Error> {
        Ok(Self {
            ring: Ring::new(slots)?,
            visiting: None,
        })
    }
}

impl Structure for Hashed {
    const LAZY: bool = true;

    fn slots(&self) -> u32 {
        self.ring.slots()
    }

    fn place<T>(&mut self, slab: &mut Slab<T>, _elapsed: u64, timer: u32) {
        let slot = self.ring.slot(slab.when(timer));
        let list = ListId::of_slot(slot);
        if self.visiting == Some(slot) {
            // At the front: the walk under way must not reach it, or it might never end.
            slab.link(list, None, timer);
            self.ring.occupy(slot);
        } else if slab.push(list, timer) {
            self.ring.occupy(slot);
        }
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
            if let Some(slot) = self.visiting {
                while !slab.at_end() {
                    if !budget.spend() {
                        return false;
                    }
                    let Some(timer) = slab.step() else { break };
                    let when = slab.when(timer);
                    if when <= *elapsed {
                        self.displace(slab, timer);
                        slab.push(ListId::DUE, timer);
                    } else if self.ring.slot(when) != slot {
                        self.displace(slab, timer);
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
                    slab.walk(ListId::of_slot(slot));
                }
                _ => {
                    *elapsed = now.max(*elapsed);
                    return true;
                }
            }
        }
    }

    fn next<T>(&self, slab: &Slab<T>, elapsed: u64) -> Option<u64> {
        match self.visiting {
            Some(_) if !slab.at_end() => Some(elapsed),
            _ => self.ring.next(elapsed),
        }
    }

    fn clear(&mut self) {
        self.ring.clear();
        self.visiting = None;
    }
}
