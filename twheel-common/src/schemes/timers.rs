//! The part that all schemes have in common.

use super::{
    error::Error,
    scheme::{Expired, LAST_TICK, Scheme},
    slab::{Handle, ListId, Slab},
};

/// Timers with values `T` in a structure `S`: one of the types in this module's table.
///
/// A timer takes 24 bytes besides its value; once it is removed, 8 more until its place is used
/// again; a slot takes 8. Memory is allocated in chunks of 512 timers; it is reused, and kept until
/// the whole is dropped.
#[derive(Debug)]
pub struct Timers<T, S> {
    slab: Slab<T>,
    structure: S,
    elapsed: u64,
}

/// How timers are found when they are due: the part in which the schemes differ. Only this crate
/// can use it, because the slab is not public.
pub trait Structure {
    /// Whether a timer may stay where it is when its deadline moves to a later tick. It may if its
    /// deadline is checked when it is reached. Moving it is then one store.
    const LAZY: bool;

    /// Number of lists that it needs at first.
    fn slots(&self) -> u32;

    /// Refuses an interval that the scheme does not support.
    fn check(&self, _interval: u64) -> Result<(), Error> {
        Ok(())
    }

    /// Puts a timer where it belongs. The timer is in no list, and is due later than `elapsed`.
    fn place<T>(&mut self, slab: &mut Slab<T>, elapsed: u64, timer: u32);

    /// Removes a timer that was placed.
    fn displace<T>(&mut self, slab: &mut Slab<T>, timer: u32);

    /// Advances `elapsed` to `now`, and moves what is due by then to [`ListId::DUE`], in order.
    /// Returns whether the budget was enough.
    fn advance<T>(
        &mut self,
        slab: &mut Slab<T>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool;

    /// The tick at which there is work next.
    fn next<T>(&self, slab: &Slab<T>, elapsed: u64) -> Option<u64>;

    /// Removes all timers.
    fn clear(&mut self);
}

/// How many more timers or slots may be looked at.
#[derive(Clone, Copy, Debug)]
pub struct Budget(usize);

impl Budget {
    /// Spends one, if any is left. Returns whether one was.
    pub fn spend(&mut self) -> bool {
        let some = self.0 > 0;
        self.0 = self.0.saturating_sub(1);
        some
    }
}

impl<T, S: Structure> Timers<T, S> {
    /// Without timers, at tick 0. The first bookkeeping moves it to any other tick at once.
    pub fn new(structure: S) -> Self {
        Self {
            slab: Slab::new(structure.slots()),
            structure,
            elapsed: 0,
        }
    }

    /// The structure, for its own methods.
    pub fn structure(&self) -> &S {
        &self.structure
    }

    /// Places a timer that is in no list.
    fn put(&mut self, timer: u32) {
        self.structure.place(&mut self.slab, self.elapsed, timer);
    }

    /// Removes a timer from wherever it is.
    fn take(&mut self, timer: u32) {
        if self.slab.list(timer) == Some(ListId::DUE) {
            self.slab.unlink(timer);
        } else {
            self.structure.displace(&mut self.slab, timer);
        }
    }

    fn when(&self, now: u64, interval: u64) -> u64 {
        let when = now.saturating_add(interval).min(LAST_TICK);
        when.max(self.elapsed + 1)
    }
}

impl<T, S: Structure> Scheme<T> for Timers<T, S> {
    fn start_timer(&mut self, now: u64, interval: u64, value: T) -> Result<Handle, Error> {
        self.structure.check(interval)?;
        let timer = self.slab.insert(self.when(now, interval), value)?;
        self.put(timer.index);
        Ok(timer)
    }

    fn restart_timer(&mut self, timer: Handle, now: u64, interval: u64) -> Result<bool, Error> {
        self.structure.check(interval)?;
        let Some(timer) = self.slab.find(timer) else {
            return Ok(false);
        };
        let when = self.when(now, interval);
        let is_due = self.slab.list(timer) == Some(ListId::DUE);
        let stays = S::LAZY && when >= self.slab.when(timer) && !is_due;
        if !stays {
            self.take(timer);
        }
        self.slab.set_when(timer, when);
        if !stays {
            self.put(timer);
        }
        Ok(true)
    }

    fn stop_timer(&mut self, timer: Handle) -> Option<T> {
        let timer = self.slab.find(timer)?;
        self.take(timer);
        Some(self.slab.remove(timer))
    }

    fn per_tick_bookkeeping(&mut self, now: u64, budget: usize) -> bool {
        let now = now.min(LAST_TICK);
        let Self {
            slab,
            structure,
            elapsed,
        } = self;
        structure.advance(slab, elapsed, now, &mut Budget(budget.max(1)))
    }

    fn expiry_processing(&mut self) -> Option<Expired<T>> {
        let index = self.slab.first(ListId::DUE)?;
        let (timer, deadline) = (self.slab.handle(index), self.slab.when(index));
        self.slab.unlink(index);
        Some(Expired {
            timer,
            value: self.slab.remove(index),
            deadline,
        })
    }

    fn next_tick(&self) -> Option<u64> {
        if self.slab.first(ListId::DUE).is_some() {
            return Some(self.elapsed);
        }
        if self.is_empty() {
            return None;
        }
        self.structure.next(&self.slab, self.elapsed)
    }

    fn elapsed(&self) -> u64 {
        self.elapsed
    }

    fn deadline(&self, timer: Handle) -> Option<u64> {
        self.slab.find(timer).map(|timer| self.slab.when(timer))
    }

    fn len(&self) -> usize {
        self.slab.len()
    }

    fn stop_all(&mut self) -> Vec<T> {
        self.structure.clear();
        self.slab.remove_all()
    }
}
