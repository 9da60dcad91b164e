//! Scheme 7.

use crate::{
    blocks::{At, Blocks, DUE, list_of, slot_of},
    error::Error,
    levels::{Levels, MAX_BITS, MAX_LEVELS, MAX_RANGE},
    slab::Slab,
    timers::{Budget, sealed::Structure},
};

/// Scheme 7: wheels with ever longer slots, one above the other.
///
/// A slot of level `k` of M slots spans `M^k` ticks. A timer is in the level of the highest digit
/// (base M) in which its deadline and the present tick differ, in the slot of that digit. When the
/// hand comes to a slot of a higher level, its timers move down; so a timer moves at most as often
/// as there are levels. An example with 2 levels of 4 slots, at tick 5 (`11` in base 4):
///
/// - due at 6 (`12`): the low digit differs: level 0, slot 2, handed out at tick 6.
/// - due at 9 (`21`): the high digit differs: level 1, slot 2, moved at tick 8 (`20`) to level 0,
///   slot 1, handed out at tick 9.
/// - due at 40 (`220`): beyond the range of 12 ticks: put where the farthest tick is, and moved on
///   from there.
///
/// The deadline of a timer is checked when it is taken from its slot. So moving a deadline to a
/// later tick is one store. [`next_tick`](crate::Scheme::next_tick) is the tick of the first slot
/// that is not empty, so that there are no wake-ups while idle.
///
/// ```
/// use twheel_timers::{Hierarchical, Scheme, Timers};
///
/// // Ticks of 1 ms: 12 days, then timers go round.
/// let mut timers = Timers::new(Hierarchical::new(3, 1024)?);
/// timers.insert(0, 3_600_000, "an hour")?;
/// assert_eq!(timers.expire(3_599_999), None);
/// assert!(timers.expire(3_600_000).is_some());
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct Hierarchical {
    levels: Levels,
    lists: Blocks,
    /// The slot of the hand, while it may not be empty.
    visiting: Option<u32>,
}

impl Hierarchical {
    /// This many levels of this many slots, rounded up to a power of two. Deadlines beyond the
    /// range go round in the top level.
    ///
    /// # Errors
    ///
    /// No level, or more than 8; less than 2 slots, or more than 4,096; levels that reach further
    /// than 2^62 ticks.
    ///
    /// ```
    /// use twheel_timers::Hierarchical;
    ///
    /// assert!(Hierarchical::new(3, 1024).is_ok());
    /// assert!(Hierarchical::new(0, 1024).is_err());
    /// assert!(Hierarchical::new(8, 1024).is_err());
    /// ```
    pub fn new(levels: u32, slots: u32) -> Result<Self, Error> {
        let levels = levels_of(levels, slots)?;
        Ok(Self {
            lists: Blocks::new(levels.slots()),
            levels,
            visiting: None,
        })
    }

    /// How many ticks ahead a deadline can be without going round.
    ///
    /// ```
    /// use twheel_timers::Hierarchical;
    ///
    /// assert_eq!(Hierarchical::new(2, 4)?.range(), 12);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn range(&self) -> u64 {
        self.levels.range()
    }
}

/// As [`Hierarchical::new`] says.
pub(crate) fn levels_of(levels: u32, slots: u32) -> Result<Levels, Error> {
    Error::check("the number of levels", levels.into(), 1, MAX_LEVELS.into())?;
    Error::check(
        "the number of slots of a level",
        slots.into(),
        2,
        1 << MAX_BITS,
    )?;
    let bits = slots.next_power_of_two().ilog2();
    Error::check(
        "the range of the levels, as log2 of ticks,",
        (levels * bits).into(),
        1,
        MAX_RANGE.into(),
    )?;
    Ok(Levels::new(levels, bits))
}

impl Structure for Hierarchical {
    type Link = At;
    const LAZY: bool = true;

    #[inline]
    fn place<T>(&mut self, slab: &mut Slab<T, At>, elapsed: u64, timer: u32) {
        let slot = self.levels.slot(elapsed, slab.when(timer));
        if self.lists.push(slab, list_of(slot), timer) {
            self.levels.occupy(slot);
        }
    }

    #[inline]
    fn displace<T>(&mut self, _slab: &mut Slab<T, At>, _timer: u32, at: At) {
        if let Some(slot) = self.lists.remove(at).and_then(slot_of) {
            self.levels.vacate(slot);
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
                // No timer is put back into this slot: its next turn is a whole round ahead.
                while !self.lists.is_empty(list_of(slot)) {
                    if !budget.spend() {
                        return false;
                    }
                    let Some(timer) = self.lists.pop_ahead(slab, list_of(slot)) else {
                        break;
                    };
                    if slab.when(timer) <= *elapsed {
                        self.push_due(slab, timer);
                    } else {
                        self.place(slab, *elapsed, timer);
                    }
                }
                self.visiting = None;
            }
            match self.levels.first(*elapsed) {
                Some((slot, tick)) if tick <= now => {
                    if !budget.spend() {
                        return false;
                    }
                    self.levels.vacate(slot);
                    *elapsed = tick;
                    self.visiting = Some(slot);
                    self.lists.arrive(slab, list_of(slot));
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
            None => self.levels.first(elapsed).map(|(_, tick)| tick),
        }
    }

    fn release(&mut self) {
        self.lists.release();
    }

    fn clear(&mut self) {
        self.levels.clear();
        self.lists.clear();
        self.visiting = None;
    }
}
