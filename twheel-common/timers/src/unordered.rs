//! Scheme 1.

use alloc::vec::Vec;

use crate::{
    linked::{DUE, Linked, Links, List, list_of},
    slab::Slab,
    timers::{Budget, sealed::Structure},
};

/// Scheme 1: an unordered list. Every tick counts down the remaining time of each timer.
///
/// ```
/// use twheel_timers::{Scheme, Timers, Unordered};
///
/// let mut timers = Timers::new(Unordered::new());
/// timers.insert(0, 10, "a")?;
/// assert_eq!(timers.expire(9), None);
/// assert!(timers.expire(10).is_some());
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct Unordered {
    lists: Linked,
    /// Remaining ticks of each timer in the slab.
    remaining: Vec<u64>,
    /// No timer has less than this, so that this many ticks can be counted down at once.
    least: u64,
    /// How many ticks the walk under way counts down; 0 if there is none.
    counting: u64,
}

const ALL: List = list_of(0);

impl Unordered {
    /// Without timers.
    ///
    /// ```
    /// use twheel_timers::{Timers, Unordered};
    ///
    /// let timers = Timers::<u64, _>::new(Unordered::new());
    /// ```
    pub fn new() -> Self {
        Self {
            lists: Linked::new(1),
            remaining: Vec::new(),
            least: u64::MAX,
            counting: 0,
        }
    }
}

impl Default for Unordered {
    fn default() -> Self {
        Self::new()
    }
}

impl Structure for Unordered {
    type Link = Links;
    const LAZY: bool = false;

    fn place<T>(&mut self, slab: &mut Slab<T, Links>, elapsed: u64, timer: u32) {
        let remaining = slab.when(timer) - elapsed;
        if self.remaining.len() <= timer as usize {
            self.remaining.resize(timer as usize + 1, 0);
        }
        self.remaining[timer as usize] = remaining;
        self.least = self.least.min(remaining);
        // At the front: a walk under way must not reach it.
        self.lists.link(slab, ALL, None, timer);
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
        loop {
            if self.counting > 0 {
                while !self.lists.at_end() {
                    if !budget.spend() {
                        return false;
                    }
                    let Some(timer) = self.lists.step(slab) else {
                        break;
                    };
                    let remaining = &mut self.remaining[timer as usize];
                    *remaining -= self.counting;
                    if *remaining == 0 {
                        self.lists.unlink(slab, timer);
                        self.push_due(slab, timer);
                    } else {
                        self.least = self.least.min(*remaining);
                    }
                }
                self.counting = 0;
            }
            if *elapsed >= now {
                return true;
            }
            if self.lists.first(ALL).is_none() {
                *elapsed = now;
                return true;
            }
            self.counting = self.least.clamp(1, now - *elapsed);
            *elapsed += self.counting;
            self.least = u64::MAX;
            self.lists.walk(ALL);
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

    fn next<T>(&self, _slab: &Slab<T, Links>, elapsed: u64) -> Option<u64> {
        self.lists.first(ALL)?;
        Some(elapsed + u64::from(self.counting == 0))
    }

    fn clear(&mut self) {
        self.lists.clear();
        (self.least, self.counting) = (u64::MAX, 0);
    }
}
