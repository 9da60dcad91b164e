//! Scheme 2.

use crate::{
    linked::{self, DUE, Linked, Links, List, list_of},
    slab::Slab,
    timers::{Budget, sealed::Structure},
};

/// The end of an ordered list at which the search for a position begins.
///
/// ```
/// use twheel_timers::{End, Ordered, Timers};
///
/// let timers = Timers::<u64, _>::new(Ordered::new(End::Rear));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// At the earliest deadline.
    Front,
    /// At the latest deadline: better if intervals are similar.
    Rear,
}

/// Scheme 2: one list in the order of deadlines. Only its first timer is looked at.
///
/// ```
/// use twheel_timers::{End, Ordered, Scheme, Timers};
///
/// let mut timers = Timers::new(Ordered::new(End::Rear));
/// timers.insert(0, 10, "a")?;
/// timers.insert(0, 20, "b")?;
/// assert_eq!(timers.next_tick(), Some(10));
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct Ordered {
    lists: Linked,
    end: End,
    reads: u64,
}

impl Ordered {
    /// Without timers; searches begin at this end.
    ///
    /// ```
    /// use twheel_timers::{End, Ordered, Timers};
    ///
    /// let timers = Timers::<u64, _>::new(Ordered::new(End::Front));
    /// ```
    pub fn new(end: End) -> Self {
        Self {
            lists: Linked::new(1),
            end,
            reads: 0,
        }
    }

    /// Number of timers that searches have looked at so far. The paper counts two more accesses for
    /// each insertion, those that link the timer.
    ///
    /// ```
    /// use twheel_timers::{End, Ordered, Scheme, Timers};
    ///
    /// let mut timers = Timers::new(Ordered::new(End::Rear));
    /// for interval in [10, 20, 15] {
    ///     timers.insert(0, interval, ())?;
    /// }
    /// // None for the first, one for the second, two for the third.
    /// assert_eq!(timers.structure().reads(), 3);
    /// # Ok::<(), twheel_timers::Error>(())
    /// ```
    pub fn reads(&self) -> u64 {
        self.reads
    }
}

/// Links a timer into a list in the order of deadlines, after those with the same deadline. Returns
/// how many other timers were looked at.
pub fn insert<T>(
    lists: &mut Linked,
    slab: &mut Slab<T, Links>,
    list: List,
    end: End,
    timer: u32,
) -> u64 {
    let when = slab.when(timer);
    let mut reads = 0;
    let mut belongs = |other: &u32, later: bool| {
        reads += 1;
        (slab.when(*other) > when) == later
    };
    let behind = match end {
        End::Front => {
            let mut behind = None;
            let mut at = lists.first(list);
            while let Some(other) = at.filter(|other| belongs(other, false)) {
                behind = at;
                at = linked::next(slab, other);
            }
            behind
        }
        End::Rear => {
            let mut at = lists.last(list);
            while let Some(other) = at.filter(|other| belongs(other, true)) {
                at = linked::prev(slab, other);
            }
            at
        }
    };
    lists.link(slab, list, behind, timer);
    reads
}

const ALL: List = list_of(0);

impl Structure for Ordered {
    type Link = Links;
    const LAZY: bool = false;

    fn place<T>(&mut self, slab: &mut Slab<T, Links>, _elapsed: u64, timer: u32) {
        self.reads += insert(&mut self.lists, slab, ALL, self.end, timer);
    }

    fn displace<T>(&mut self, slab: &mut Slab<T, Links>, timer: u32, _at: Links) {
        self.lists.unlink(slab, timer);
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T, Links>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool {
        while let Some(timer) = self.lists.first(ALL) {
            let when = slab.when(timer);
            if when > now {
                break;
            }
            if !budget.spend() {
                return false;
            }
            *elapsed = when.max(*elapsed);
            self.lists.unlink(slab, timer);
            self.push_due(slab, timer);
        }
        *elapsed = now.max(*elapsed);
        true
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

    fn next<T>(&self, slab: &Slab<T, Links>, _elapsed: u64) -> Option<u64> {
        self.lists.first(ALL).map(|timer| slab.when(timer))
    }

    fn clear(&mut self) {
        self.lists.clear();
    }
}
