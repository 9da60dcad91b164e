//! What all schemes have in common.

use super::{Error, Expired, Handle, LAST_TICK, Scheme, slab::ListId, slab::Slab};

/// Timers with values `T` in a structure `S`: one of the types of this module's table.
///
/// A timer takes 24 bytes beside its value, a slot takes 8. Memory comes in chunks of 512 timers; it
/// is used again, and kept until all is dropped.
#[derive(Debug)]
pub struct Timers<T, S> {
    slab: Slab<T>,
    structure: S,
    elapsed: u64,
    queue: Queue,
}

/// Timers that were started and wait to be placed, in two lists, so that however many are started
/// meanwhile, it comes to an end to place those that were there.
#[derive(Debug)]
struct Queue {
    /// Which of [`ListId::QUEUES`] new ones come to.
    filling: usize,
    /// No timer in the list of that number is due before this tick; [`EMPTY`](Self::EMPTY)'s if it is empty.
    due: [u64; 2],
}

impl Queue {
    const EMPTY: Self = Self {
        filling: 0,
        due: [u64::MAX; 2],
    };

    fn push<T>(&mut self, slab: &mut Slab<T>, timer: u32) {
        let due = &mut self.due[self.filling];
        *due = slab.when(timer).min(*due);
        slab.push(ListId::QUEUES[self.filling], timer);
    }

    /// Takes a timer out if it is in here.
    fn take<T>(&mut self, slab: &mut Slab<T>, timer: u32) -> bool {
        let list = slab.list(timer);
        let Some(queue) = ListId::QUEUES.iter().position(|it| Some(*it) == list) else {
            return false;
        };
        if slab.unlink(timer).is_some() {
            self.due[queue] = u64::MAX;
        }
        true
    }

    /// The timer to place next.
    fn first<T>(&mut self, slab: &Slab<T>) -> Option<u32> {
        let first = slab.first(ListId::QUEUES[1 - self.filling]);
        if first.is_some() || slab.first(ListId::QUEUES[self.filling]).is_none() {
            return first;
        }
        self.filling = 1 - self.filling;
        slab.first(ListId::QUEUES[1 - self.filling])
    }

    /// None of them is due before this tick.
    fn due(&self) -> u64 {
        self.due[0].min(self.due[1])
    }

    fn is_empty<T>(&self, slab: &Slab<T>) -> bool {
        ListId::QUEUES.iter().all(|it| slab.first(*it).is_none())
    }
}

/// How timers are found when they are due: what tells one scheme from another. Of use to this crate
/// alone, since the slab is not public.
pub trait Structure {
    /// Whether a timer may stay where it is while its deadline moves to a later tick: whoever comes
    /// to it asks it when it is due. Then moving it is one store.
    const LAZY: bool;

    /// Whether timers that were started wait for the next bookkeeping to place them, as Netty's do: where
    /// there are so many slots that each start meets another one, which is not in the caches. A timer
    /// that is stopped before then never sees a slot.
    const QUEUED: bool = false;

    /// Lists that it wants at first.
    fn slots(&self) -> u32;

    /// Refuses an interval.
    fn check(&self, _interval: u64) -> Result<(), Error> {
        Ok(())
    }

    /// Puts a timer that stands nowhere, and is due later than `elapsed`, where it belongs.
    fn place<T>(&mut self, slab: &mut Slab<T>, elapsed: u64, timer: u32);

    /// Takes a timer out that was placed.
    fn displace<T>(&mut self, slab: &mut Slab<T>, timer: u32);

    /// Moves `elapsed` on to `now`, and what is due by then to [`ListId::DUE`], in order. Says
    /// whether the budget was enough.
    fn advance<T>(
        &mut self,
        slab: &mut Slab<T>,
        elapsed: &mut u64,
        now: u64,
        budget: &mut Budget,
    ) -> bool;

    /// The tick at which there is something to do next.
    fn next<T>(&self, slab: &Slab<T>, elapsed: u64) -> Option<u64>;

    /// Forgets all timers.
    fn clear(&mut self);
}

/// How many looks are left.
#[derive(Clone, Copy, Debug)]
pub struct Budget(usize);

impl Budget {
    /// Spends one, if there is one.
    pub fn spend(&mut self) -> bool {
        let some = self.0 > 0;
        self.0 = self.0.saturating_sub(1);
        some
    }
}

impl<T, S: Structure> Timers<T, S> {
    /// Without timers, at tick 0. The first bookkeeping moves it to any other at once.
    pub fn new(structure: S) -> Self {
        Self {
            slab: Slab::new(structure.slots()),
            structure,
            elapsed: 0,
            queue: Queue::EMPTY,
        }
    }

    /// The structure, for what it has to say about itself.
    pub fn structure(&self) -> &S {
        &self.structure
    }

    /// Puts a timer that stands nowhere where it is to wait.
    fn put(&mut self, timer: u32) {
        if S::QUEUED {
            self.queue.push(&mut self.slab, timer);
        } else {
            self.structure.place(&mut self.slab, self.elapsed, timer);
        }
    }

    /// Takes a timer out of wherever it stands.
    fn take(&mut self, timer: u32) {
        if self.slab.list(timer) == Some(ListId::DUE) {
            self.slab.unlink(timer);
        } else if !(S::QUEUED && self.queue.take(&mut self.slab, timer)) {
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
        self.put(timer);
        Ok(self.slab.handle(timer))
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
            queue,
        } = self;
        // One to place a timer and one to turn the wheel, so that neither has to wait for the other.
        let mut budget = Budget(budget.max(2));
        let mut half = Budget(budget.0 / 2);
        loop {
            while let Some(timer) = queue.first(slab) {
                if !half.spend() {
                    break;
                }
                budget.spend();
                queue.take(slab, timer);
                structure.place(slab, *elapsed, timer);
            }
            // What waits to be placed is not passed by.
            let until = now.min(queue.due() - 1);
            if !structure.advance(slab, elapsed, until, &mut budget) {
                return false;
            }
            if queue.is_empty(slab) && *elapsed >= now {
                return true;
            }
            if budget.0 == 0 {
                return false;
            }
            half = budget;
        }
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
        let next = self.structure.next(&self.slab, self.elapsed);
        if self.queue.is_empty(&self.slab) {
            return next;
        }
        Some(next.unwrap_or(LAST_TICK).min(self.queue.due()))
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
        self.queue = Queue::EMPTY;
        self.slab.remove_all()
    }
}
