//! Scheme 3.

use alloc::vec::Vec;

use crate::{
    linked::{self, DUE, Linked, Links, set_position},
    slab::Slab,
    timers::{Budget, sealed::Structure},
};

/// Scheme 3: a binary heap of deadlines, as in java.util.Timer and ScheduledThreadPoolExecutor; the
/// baseline for all wheels. Each timer knows its position in the heap, so stopping it needs no
/// search.
///
/// ```
/// use twheel_timers::{Heap, Scheme, Timers};
///
/// let mut timers = Timers::new(Heap::new());
/// timers.insert(0, 1_000, "b")?;
/// timers.insert(0, 10, "a")?;
/// assert_eq!(timers.next_tick(), Some(10));
/// # Ok::<(), twheel_timers::Error>(())
/// ```
#[derive(Debug)]
pub struct Heap {
    /// Deadlines, each followed by its timer, so that comparisons need not look at the timers.
    entries: Vec<(u64, u32)>,
    /// What was found due.
    lists: Linked,
}

impl Default for Heap {
    fn default() -> Self {
        Self::new()
    }
}

impl Heap {
    /// Without timers.
    ///
    /// ```
    /// use twheel_timers::{Heap, Timers};
    ///
    /// let timers = Timers::<u64, _>::new(Heap::new());
    /// ```
    pub fn new() -> Self {
        Self {
            entries: Vec::new(),
            lists: Linked::new(0),
        }
    }

    fn set<T>(&mut self, slab: &mut Slab<T, Links>, at: usize, entry: (u64, u32)) {
        self.entries[at] = entry;
        set_position(slab, entry.1, at as u32);
    }

    /// Fills the hole at `at` with an entry: moves the hole up or down until the entry is neither
    /// before its parent nor after its children.
    fn settle<T>(&mut self, slab: &mut Slab<T, Links>, mut at: usize, entry: (u64, u32)) {
        while at > 0 {
            let parent = (at - 1) / 2;
            if self.entries[parent].0 <= entry.0 {
                break;
            }
            self.set(slab, at, self.entries[parent]);
            at = parent;
        }
        loop {
            let left = 2 * at + 1;
            let children = self.entries.get(left..).unwrap_or_default().iter().take(2);
            let Some((child, _)) = (left..).zip(children).min_by_key(|(_, entry)| entry.0) else {
                break;
            };
            if self.entries[child].0 >= entry.0 {
                break;
            }
            self.set(slab, at, self.entries[child]);
            at = child;
        }
        self.set(slab, at, entry);
    }
}

impl Structure for Heap {
    type Link = Links;
    const LAZY: bool = false;

    fn place<T>(&mut self, slab: &mut Slab<T, Links>, _elapsed: u64, timer: u32) {
        let entry = (slab.when(timer), timer);
        self.entries.push(entry);
        self.settle(slab, self.entries.len() - 1, entry);
    }

    fn displace<T>(&mut self, slab: &mut Slab<T, Links>, timer: u32, _at: Links) {
        if linked::list(slab, timer) == DUE {
            self.lists.unlink(slab, timer);
            return;
        }
        let at = linked::position(slab, timer) as usize;
        // The last entry fills the hole, unless it is the hole itself.
        if let Some(last) = self.entries.pop().filter(|last| last.1 != timer) {
            self.settle(slab, at, last);
        }
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T, Links>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool {
        while let Some(&(when, timer)) = self.entries.first() {
            if when > now {
                break;
            }
            if !budget.spend() {
                return false;
            }
            *elapsed = when.max(*elapsed);
            let link = slab.link(timer);
            self.displace(slab, timer, link);
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

    fn next<T>(&self, _slab: &Slab<T, Links>, _elapsed: u64) -> Option<u64> {
        self.entries.first().map(|entry| entry.0)
    }

    fn clear(&mut self) {
        self.entries.clear();
        self.lists.clear();
    }
}
