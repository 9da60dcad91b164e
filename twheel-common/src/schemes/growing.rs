//! Scheme 7 with levels that are added when they are needed.

use super::{
    error::Error,
    ring::{MAX_SLOTS, Ring},
    slab::{ListId, Slab},
    timers::{Budget, Structure},
};

/// Scheme 7 without a limit on deadlines: insertion goes up until a level reaches the deadline, and
/// adds levels that do not exist. The driver either comes every tick or, as in Kafka, only when a
/// slot that is not empty is due.
///
/// A slot of level `k` spans `M^k` ticks. A level reaches M slots, from the one of the hand on, and
/// a timer is in the lowest level that reaches it.
///
/// An example with M = 4, elapsed = 3: level 0 reaches tick 6; level 1 (slots of 4 ticks, the hand
/// in that of 0 to 3) reaches tick 15. A timer due at 8 goes to level 1 and is moved down at 8; one
/// that is started at tick 7 for tick 9 goes to level 0. So, unlike in [`Hierarchical`], the first
/// slot may be on any level.
///
/// [`Hierarchical`]: super::Hierarchical
#[derive(Clone, Debug)]
pub struct Growing {
    /// Whether ticks at which all slots are empty are skipped.
    skips: bool,
    /// log2 of M.
    bits: u32,
    rings: Vec<Ring>,
    /// The level whose slot is being visited. It and the hand's slots below it may not be empty.
    visiting: Option<usize>,
}

impl Growing {
    /// Every tick advances level 0, and every round of a level advances the one above, whose slot
    /// is moved back down. [`next_tick`](super::Scheme::next_tick) is the next tick or, while the
    /// lowest levels are empty, the end of their round.
    ///
    /// # Errors
    ///
    /// Less than 2 slots per level, or more than 2^24.
    pub fn ticked(slots: u32) -> Result<Self, Error> {
        Self::new(slots, false)
    }

    /// Like Kafka's TimingWheel with its DelayQueue of buckets: the driver waits only for slots
    /// that are not empty, so that an idle system has no wake-ups.
    /// [`next_tick`](super::Scheme::next_tick) is the tick at which the first such slot is due.
    ///
    /// # Errors
    ///
    /// Less than 2 slots per level, or more than 2^24.
    pub fn skipping(slots: u32) -> Result<Self, Error> {
        Self::new(slots, true)
    }

    /// Number of levels so far.
    pub fn levels(&self) -> usize {
        self.rings.len()
    }

    fn new(slots: u32, skips: bool) -> Result<Self, Error> {
        // With rings of one slot, more levels would not reach any further.
        let most = MAX_SLOTS.into();
        Error::check("the number of slots of a level", slots.into(), 2, most)?;
        let ring = Ring::new(slots)?;
        Ok(Self {
            skips,
            bits: ring.slots().trailing_zeros(),
            rings: vec![ring],
            visiting: None,
        })
    }

    /// log2 of the ticks that a slot of a level spans.
    fn shift(&self, level: usize) -> u32 {
        level as u32 * self.bits
    }

    fn list(&self, level: usize, slot: u32) -> ListId {
        ListId::of_slot((level as u32) << self.bits | slot)
    }

    /// The next tick at which the hand moves to another slot; if it `skips`, to a slot that is not
    /// empty.
    fn stop(&self, elapsed: u64) -> Option<u64> {
        let rings = || self.rings.iter().enumerate();
        if self.skips {
            let start = |(level, ring): (usize, &Ring)| {
                let shift = self.shift(level);
                Some(ring.next(elapsed >> shift)? << shift)
            };
            return rings().filter_map(start).min();
        }
        let (lowest, _) = rings().find(|(_, ring)| !ring.is_empty())?;
        let shift = self.shift(lowest);
        Some(((elapsed >> shift) + 1) << shift)
    }

    /// Moves the hand to a tick.
    fn enter(&mut self, elapsed: &mut u64, tick: u64) {
        *elapsed = tick;
        // From above, so that what is moved down is found below at the same tick.
        let begins = |level: &usize| tick & ((1 << self.shift(*level)) - 1) == 0;
        self.visiting = (0..self.rings.len()).rev().find(begins);
    }

    /// Empties the slots that the hand is on. Returns whether the budget was enough.
    fn visit<T>(&mut self, slab: &mut Slab<T>, elapsed: u64, budget: &mut Budget) -> bool {
        while let Some(level) = self.visiting {
            let slot = self.rings[level].slot(elapsed >> self.shift(level));
            while let Some(timer) = slab.first(self.list(level, slot)) {
                if !budget.spend() {
                    return false;
                }
                self.displace(slab, timer);
                if slab.when(timer) <= elapsed {
                    slab.push(ListId::DUE, timer);
                } else {
                    self.place(slab, elapsed, timer);
                }
            }
            self.visiting = level.checked_sub(1);
        }
        true
    }
}

impl Structure for Growing {
    const LAZY: bool = true;

    fn slots(&self) -> u32 {
        1 << self.bits
    }

    fn place<T>(&mut self, slab: &mut Slab<T>, elapsed: u64, timer: u32) {
        let when = slab.when(timer);
        let mut level = 0;
        // The loop ends, because no deadline has more than 63 bits.
        while (when >> self.shift(level)) - (elapsed >> self.shift(level)) >= 1 << self.bits {
            level += 1;
            if level == self.rings.len() {
                let mut ring = self.rings[0].clone();
                ring.clear();
                self.rings.push(ring);
                slab.add_slots(1 << self.bits);
            }
        }
        let slot = self.rings[level].slot(when >> self.shift(level));
        self.rings[level].occupy(slot);
        slab.push(self.list(level, slot), timer);
    }

    fn displace<T>(&mut self, slab: &mut Slab<T>, timer: u32) {
        if let Some(list) = slab.unlink(timer) {
            let level = (list.slot() >> self.bits) as usize;
            self.rings[level].vacate(list.slot() & ((1 << self.bits) - 1));
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
            if !self.visit(slab, *elapsed, budget) {
                return false;
            }
            match self.stop(*elapsed) {
                Some(tick) if tick <= now => {
                    if !budget.spend() {
                        return false;
                    }
                    self.enter(elapsed, tick);
                }
                _ => {
                    *elapsed = now.max(*elapsed);
                    return true;
                }
            }
        }
    }

    fn next<T>(&self, _slab: &Slab<T>, elapsed: u64) -> Option<u64> {
        match self.visiting {
            Some(_) => Some(elapsed),
            None => self.stop(elapsed),
        }
    }

    fn clear(&mut self) {
        self.rings.iter_mut().for_each(Ring::clear);
        self.visiting = None;
    }
}
