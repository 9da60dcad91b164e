//! Scheme 2.

use super::{
    slab::{ListId, Slab},
    timers::{Budget, Structure},
};

/// The end of an ordered list at which the search for a position begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// At the earliest deadline.
    Front,
    /// At the latest deadline: better if intervals are similar.
    Rear,
}

/// Scheme 2: one list in the order of deadlines. Only its first timer is looked at.
#[derive(Clone, Debug)]
pub struct Ordered {
    end: End,
    reads: u64,
}

impl Ordered {
    /// Without timers; searches begin at this end.
    pub fn new(end: End) -> Self {
        Self { end, reads: 0 }
    }

    /// Number of timers that searches have looked at so far. The paper counts two more accesses for
    /// each insertion, those that link the timer.
    pub fn reads(&self) -> u64 {
        self.reads
    }
}

/// Links a timer into a list in the order of deadlines, after those with the same deadline. Returns
/// how many other timers were looked at.
pub fn insert<T>(slab: &mut Slab<T>, list: ListId, end: End, timer: u32) -> u64 {
    let when = slab.when(timer);
    let mut reads = 0;
    let mut belongs = |other: &u32, later: bool| {
        reads += 1;
        (slab.when(*other) > when) == later
    };
    let behind = match end {
        End::Front => {
            let mut behind = None;
            let mut at = slab.first(list);
            while let Some(other) = at.filter(|other| belongs(other, false)) {
                behind = at;
                at = slab.next(other);
            }
            behind
        }
        End::Rear => {
            let mut at = slab.last(list);
            while let Some(other) = at.filter(|other| belongs(other, true)) {
                at = slab.prev(other);
            }
            at
        }
    };
    slab.link(list, behind, timer);
    reads
}

const ALL: u32 = 0;

impl Structure for Ordered {
    const LAZY: bool = false;

    fn slots(&self) -> u32 {
        1
    }

    fn place<T>(&mut self, slab: &mut Slab<T>, _elapsed: u64, timer: u32) {
        self.reads += insert(slab, ListId::of_slot(ALL), self.end, timer);
    }

    fn displace<T>(&mut self, slab: &mut Slab<T>, timer: u32) {
        slab.unlink(timer);
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool {
        while let Some(timer) = slab.first(ListId::of_slot(ALL)) {
            let when = slab.when(timer);
            if when > now {
                break;
            }
            if !budget.spend() {
                return false;
            }
            *elapsed = when.max(*elapsed);
            slab.unlink(timer);
            slab.push(ListId::DUE, timer);
        }
        *elapsed = now.max(*elapsed);
        true
    }

    fn next<T>(&self, slab: &Slab<T>, _elapsed: u64) -> Option<u64> {
        slab.first(ListId::of_slot(ALL))
            .map(|timer| slab.when(timer))
    }

    fn clear(&mut self) {}
}
