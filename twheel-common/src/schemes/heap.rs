//! Scheme 3.

use super::{
    slab::{ListId, Slab},
    timers::{Budget, Structure},
};

/// Scheme 3: a binary heap of deadlines, as in java.util.Timer and ScheduledThreadPoolExecutor; the
/// baseline for all wheels. Each timer knows its position in the heap, so stopping it needs no
/// search.
#[derive(Clone, Debug, Default)]
pub struct Heap {
    /// Deadlines, each followed by its timer, so that comparisons need not look at the timers.
    entries: Vec<(u64, u32)>,
}

impl Heap {
    /// Without timers.
    pub fn new() -> Self {
        Self::default()
    }

    fn set<T>(&mut self, slab: &mut Slab<T>, at: usize, entry: (u64, u32)) {
        self.entries[at] = entry;
        slab.set_position(entry.1, at as u32);
    }

    /// Fills the hole at `at` with an entry: moves the hole up or down until the entry is neither
    /// before its parent nor after its children.
    fn settle<T>(&mut self, slab: &mut Slab<T>, mut at: usize, entry: (u64, u32)) {
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
    const LAZY: bool = false;

    fn slots(&self) -> u32 {
        0
    }

    fn place<T>(&mut self, slab: &mut Slab<T>, _elapsed: u64, timer: u32) {
        let entry = (slab.when(timer), timer);
        self.entries.push(entry);
        self.settle(slab, self.entries.len() - 1, entry);
    }

    fn displace<T>(&mut self, slab: &mut Slab<T>, timer: u32) {
        let at = slab.position(timer) as usize;
        // The last entry fills the hole, unless it is the hole itself.
        if let Some(last) = self.entries.pop().filter(|last| last.1 != timer) {
            self.settle(slab, at, last);
        }
    }

    fn advance<T>(
        &mut self,
        slab: &mut Slab<T>,
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
            self.displace(slab, timer);
            slab.push(ListId::DUE, timer);
        }
        *elapsed = now.max(*elapsed);
        true
    }

    fn next<T>(&self, _slab: &Slab<T>, _elapsed: u64) -> Option<u64> {
        self.entries.first().map(|entry| entry.0)
    }

    fn clear(&mut self) {
        self.entries.clear();
    }
}
