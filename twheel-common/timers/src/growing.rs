//! Scheme 7 with levels that are added when they are needed.

use alloc::{vec, vec::Vec};

use crate::{
    blocks::{At, Blocks, DUE, List, list_of, slot_of},
    error::Error,
    ring::{MAX_SLOTS, Ring},
    slab::Slab,
    timers::{Budget, sealed::Structure},
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
/// ```
/// use twheel_timers::{Growing, Scheme, Timers};
///
/// let mut timers = Timers::new(Growing::skipping(64)?);
/// timers.insert(0, 1 << 40, "35 years of milliseconds")?;
/// assert_eq!(timers.expire((1 << 40) - 1), None);
/// assert!(timers.expire(1 << 40).is_some());
/// # Ok::<(), twheel_timers::Error>(())
/// ```
///
/// [`Hierarchical`]: crate::Hierarchical
#[derive(Debug)]
pub struct Growing {
    lists: Blocks,
    /// Whether ticks at which all slots are empty are skipped.
    skips: bool,
    rings: Rings,
    /// The level whose slot is being visited. It and the hand's slots below it may not be empty.
    visiting: Option<usize>,
}

/// The rings of all levels, and log2 of their slots. A slot's number is `level << bits | slot`.
#[derive(Debug)]
struct Rings {
    rings: Vec<Ring>,
    bits: u32,
}

impl Rings {
    /// Notes that a slot is empty.
    #[inline]
    fn vacate(&mut self, slot: u32) {
        self.rings[(slot >> self.bits) as usize].vacate(slot & ((1 << self.bits) - 1));
    }
}

impl Growing {
    /// Every tick advances level 0, and every round of a level advances the one above, whose slot
    /// is moved back down. [`next_tick`](crate::Scheme::next_tick) is the next tick or, while the
    /// lowest levels are empty, the end of their round.
    ///
    /// # Errors
    ///
    /// Less than 2 slots per level, or more than 2^24.
    ///
    /// ```
    /// use twheel_timers::{Growing, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Growing::ticked(64)?);
    /// timers.insert(0, 50, "a")?;
    /// assert_eq!(timers.next_tick(), Some(1));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn ticked(slots: u32) -> Result<Self, Error> {
        Self::new(slots, false)
    }

    /// Like Kafka's TimingWheel with its DelayQueue of buckets: the driver waits only for slots
    /// that are not empty, so that an idle system has no wake-ups.
    /// [`next_tick`](crate::Scheme::next_tick) is the tick at which the first such slot is due.
    ///
    /// # Errors
    ///
    /// Less than 2 slots per level, or more than 2^24.
    ///
    /// ```
    /// use twheel_timers::{Growing, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Growing::skipping(64)?);
    /// timers.insert(0, 50, "a")?;
    /// assert_eq!(timers.next_tick(), Some(50));
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn skipping(slots: u32) -> Result<Self, Error> {
        Self::new(slots, true)
    }

    /// Number of levels so far.
    ///
    /// ```
    /// use twheel_timers::{Growing, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Growing::skipping(64)?);
    /// assert_eq!(timers.structure().levels(), 1);
    /// timers.insert(0, 64 * 64, "a")?;
    /// assert_eq!(timers.structure().levels(), 3);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn levels(&self) -> usize {
        self.rings.rings.len()
    }

    fn new(slots: u32, skips: bool) -> Result<Self, Error> {
        // With rings of one slot, more levels would not reach any further.
        let most = MAX_SLOTS.into();
        Error::check("the number of slots of a level", slots.into(), 2, most)?;
        let ring = Ring::new(slots)?;
        Ok(Self {
            skips,
            lists: Blocks::new(ring.slots()),
            rings: Rings {
                bits: ring.slots().trailing_zeros(),
                rings: vec![ring],
            },
            visiting: None,
        })
    }

    /// log2 of the ticks that a slot of a level spans.
    fn shift(&self, level: usize) -> u32 {
        level as u32 * self.rings.bits
    }

    fn list(&self, level: usize, slot: u32) -> List {
        list_of((level as u32) << self.rings.bits | slot)
    }

    /// The next tick at which the hand moves to another slot; if it `skips`, to a slot that is not
    /// empty.
    fn stop(&self, elapsed: u64) -> Option<u64> {
        let rings = || self.rings.rings.iter().enumerate();
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
        self.visiting = (0..self.rings.rings.len()).rev().find(begins);
    }

    /// Empties the slots that the hand is on. Returns whether the budget was enough.
    fn visit<T>(&mut self, slab: &mut Slab<T, At>, elapsed: u64, budget: &mut Budget) -> bool {
        while let Some(level) = self.visiting {
            let slot = self.rings.rings[level].slot(elapsed >> self.shift(level));
            let list = self.list(level, slot);
            if !self.lists.is_empty(list) {
                self.rings.rings[level].vacate(slot);
                self.lists.arrive(slab, list);
            }
            while !self.lists.is_empty(list) {
                if !budget.spend() {
                    return false;
                }
                let Some(timer) = self.lists.pop_ahead(slab, list) else {
                    break;
                };
                if slab.when(timer) <= elapsed {
                    self.push_due(slab, timer);
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
    type Link = At;
    const LAZY: bool = true;

    fn place<T>(&mut self, slab: &mut Slab<T, At>, elapsed: u64, timer: u32) {
        let when = slab.when(timer);
        let mut level = 0;
        // The loop ends, because no deadline has more than 63 bits.
        while (when >> self.shift(level)) - (elapsed >> self.shift(level)) >= 1 << self.rings.bits {
            level += 1;
            if level == self.rings.rings.len() {
                let mut ring = self.rings.rings[0].clone();
                ring.clear();
                self.rings.rings.push(ring);
                self.lists.add_slots(1 << self.rings.bits);
            }
        }
        let slot = self.rings.rings[level].slot(when >> self.shift(level));
        let list = self.list(level, slot);
        if self.lists.push(slab, list, timer) {
            self.rings.rings[level].occupy(slot);
        }
    }

    #[inline]
    fn displace<T>(&mut self, _slab: &mut Slab<T, At>, _timer: u32, at: At) {
        if let Some(slot) = self.lists.remove(at).and_then(slot_of) {
            self.rings.vacate(slot);
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
            Some(_) => Some(elapsed),
            None => self.stop(elapsed),
        }
    }

    fn release(&mut self) {
        self.lists.release();
    }

    fn clear(&mut self) {
        self.rings.rings.iter_mut().for_each(Ring::clear);
        self.lists.clear();
        self.visiting = None;
    }
}
