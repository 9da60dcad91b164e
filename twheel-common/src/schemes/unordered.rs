//! Scheme 1.

use super::{
    slab::{ListId, Slab},
    timers::{Budget, Structure},
};

/// Scheme 1: an unordered list. Every tick counts down the remaining time of each timer.
#[derive(Clone, Debug, Default)]
pub struct Unordered {
    /// Remaining ticks of each timer in the slab.
    remaining: Vec<u64>,
    /// No timer has less than this, so that this many ticks can be counted down at once.
    least: u64,
    /// How many ticks the walk under way counts down; 0 if there is none.
    counting: u64,
}

const ALL: u32 = 0;

impl Unordered {
    /// Without timers.
    pub fn new() -> Self {
        Self::default()
    }
}

impl Structure for Unordered {
    const LAZY: bool = false;

    fn slots(&self) -> u32 {
        1
    }

    fn place<T>(&mut self, slab: &mut Slab<T>, elapsed: u64, timer: u32) {
        let remaining = slab.when(timer) - elapsed;
        if self.remaining.len() <= timer as usize {
            self.remaining.resize(timer as usize + 1, 0);
        }
        self.remaining[timer as usize] = remaining;
        self.least = self.least.min(remaining);
        // At the front: a walk under way must not reach it.
        slab.link(ListId::of_slot(ALL), None, timer);
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
        loop {
            if self.counting > 0 {
                while !slab.at_end() {
                    if !budget.spend() {
                        return false;
                    }
                    let Some(timer) = slab.step() else { break };
                    let remaining = &mut self.remaining[timer as usize];
                    *remaining -= self.counting;
                    if *remaining == 0 {
                        slab.unlink(timer);
                        slab.push(ListId::DUE, timer);
                    } else {
                        self.least = self.least.min(*remaining);
                    }
                }
                self.counting = 0;
            }
            if *elapsed >= now {
                return true;
            }
            if slab.first(ListId::of_slot(ALL)).is_none() {
                *elapsed = now;
                return true;
            }
            self.counting = self.least.clamp(1, now - *elapsed);
            *elapsed += self.counting;
            self.least = u64::MAX;
            slab.walk(ListId::of_slot(ALL));
        }
    }

    fn next<T>(&self, slab: &Slab<T>, elapsed: u64) -> Option<u64> {
        slab.first(ListId::of_slot(ALL))?;
        Some(elapsed + u64::from(self.counting == 0))
    }

    fn clear(&mut self) {
        (self.least, self.counting) = (u64::MAX, 0);
    }
}
