//! Linux's timer wheel (`kernel/time/timer.c` since 4.8), written for this bench from its
//! description: the comment at the head of that file, and the articles about it (LWN 646950). It is
//! not the kernel's code.
//!
//! - 9 levels of 64 slots. A slot of level `l` spans `8^l` ticks ([`CLK_SHIFT`] 3), and level `l`
//!   begins where the slots of those below end, after `63 · 8^(l-1)` ticks.
//! - A timer is put into the slot of its deadline, rounded up to the level's slots, and never moved
//!   to another level: it expires up to an eighth of its interval late.
//! - The timers of a slot are a list through the timers themselves, singly linked forwards, and each
//!   has a pointer to the pointer that points to it (`hlist`): it can be unlinked without the list's
//!   head.
//! - A bitmap has the slots that are not empty, and the next expiry is remembered.
//!
//! The driver owns the timers, as whoever embeds a `struct timer_list` does, and its handle is the
//! timer's address. Each timer is an allocation of its own, as the object is that it is part of, and
//! the driver keeps the handles in a vector, as those of the other contenders. There are no locks,
//! and no other CPUs.

use std::ptr;

use super::contender::Contender;

const LEVELS: usize = 9;
const SLOTS: usize = 64;
const CLK_SHIFT: u32 = 3;

/// A timer in its list; `struct timer_list` with its `hlist_node`, and the caller's value.
struct Timer {
    next: *mut Timer,
    /// The pointer that points here; null while the timer is not armed.
    pprev: *mut *mut Timer,
    expires: u64,
    slot: u32,
    value: u64,
}

/// Timers that were never armed.
fn unarmed(value: u64) -> Timer {
    Timer {
        next: ptr::null_mut(),
        pprev: ptr::null_mut(),
        expires: 0,
        slot: 0,
        value,
    }
}

struct Base {
    /// The tick that is looked at next.
    clk: u64,
    next_expiry: u64,
    next_is_stale: bool,
    pending: [u64; LEVELS],
    /// The first timers; a vector only for its address.
    slots: Vec<*mut Timer>,
}

fn start_of(level: u32) -> u64 {
    ((SLOTS - 1) as u64) << ((level - 1) * CLK_SHIFT)
}

impl Base {
    /// Where the first timer of a slot is.
    fn head(&mut self, slot: usize) -> *mut *mut Timer {
        assert!(slot < self.slots.len());
        // SAFETY: the slot exists.
        unsafe { self.slots.as_mut_ptr().add(slot) }
    }

    /// The slot of a deadline, and the tick at which that slot is looked at.
    fn slot(&self, expires: u64) -> (usize, u64) {
        let delta = expires.saturating_sub(self.clk);
        let level = (1..LEVELS as u32)
            .find(|level| delta < start_of(*level))
            .unwrap_or(LEVELS as u32)
            - 1;
        let shift = level * CLK_SHIFT;
        // Rounded up, so that no timer is early.
        let at = (expires.max(self.clk) + (1 << shift)) >> shift;
        (level as usize * SLOTS + at as usize % SLOTS, at << shift)
    }

    /// Arms a timer that is not armed.
    ///
    /// # Safety
    ///
    /// The timer and those in the slots exist, and nobody else has references to them.
    unsafe fn enqueue(&mut self, timer: *mut Timer, expires: u64) {
        let (slot, at) = self.slot(expires);
        let head = self.head(slot);
        // SAFETY: the caller's promise; a pointer in a list points to a timer in the list.
        unsafe {
            let first = *head;
            (*timer).next = first;
            if !first.is_null() {
                (*first).pprev = &raw mut (*timer).next;
            }
            (*timer).pprev = head;
            (*timer).expires = expires;
            (*timer).slot = slot as u32;
            *head = timer;
        }
        self.pending[slot / SLOTS] |= 1 << (slot % SLOTS);
        self.next_expiry = self.next_expiry.min(at);
    }

    /// Disarms a timer. Returns whether it was armed.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    unsafe fn detach(&mut self, timer: *mut Timer) -> bool {
        // SAFETY: as above.
        unsafe {
            let Timer {
                next, pprev, slot, ..
            } = *timer;
            if pprev.is_null() {
                return false;
            }
            *pprev = next;
            if next.is_null() {
                if pprev == self.head(slot as usize) {
                    // It was the only one.
                    self.pending[slot as usize / SLOTS] &= !(1 << (slot as usize % SLOTS));
                    self.next_is_stale = true;
                }
            } else {
                (*next).pprev = pprev;
            }
            (*timer).pprev = ptr::null_mut();
        }
        true
    }

    /// The tick at which a slot that is not empty is looked at next.
    fn find_next(&self) -> u64 {
        let mut next = u64::MAX;
        let mut clk = self.clk;
        for level in 0..LEVELS {
            let shift = level as u32 * CLK_SHIFT;
            let pending = self.pending[level];
            if pending != 0 {
                let ahead = pending.rotate_right((clk % SLOTS as u64) as u32);
                next = next.min((clk + u64::from(ahead.trailing_zeros())) << shift);
            }
            // A slot of the level above that begins within this one comes after it.
            let rest = clk & ((1 << CLK_SHIFT) - 1);
            clk = (clk >> CLK_SHIFT) + u64::from(rest > 0);
        }
        next
    }

    /// Calls a function with the timers whose slots are looked at up to tick `now`.
    ///
    /// # Safety
    ///
    /// As for [`enqueue`](Self::enqueue).
    unsafe fn run(&mut self, now: u64, mut expired: impl FnMut(&mut Timer)) {
        while self.clk <= now {
            if self.next_is_stale {
                self.next_expiry = self.find_next();
                self.next_is_stale = false;
            }
            if self.next_expiry > now {
                self.clk = now + 1;
                return;
            }
            self.clk = self.clk.max(self.next_expiry);
            let mut clk = self.clk;
            let mut found = [ptr::null_mut(); LEVELS];
            for (level, found) in found.iter_mut().enumerate() {
                let slot = (clk % SLOTS as u64) as usize;
                if self.pending[level] & 1 << slot != 0 {
                    self.pending[level] &= !(1 << slot);
                    let head = self.head(level * SLOTS + slot);
                    // SAFETY: nobody else has a reference to it.
                    *found = unsafe { ptr::replace(head, ptr::null_mut()) };
                }
                if clk & ((1 << CLK_SHIFT) - 1) != 0 {
                    break;
                }
                clk >>= CLK_SHIFT;
            }
            self.clk += 1;
            self.next_expiry = self.find_next();
            // From above, as the kernel does.
            for first in found.iter_mut().rev() {
                if !first.is_null() {
                    // SAFETY: the caller's promise. The list is now headed by `first`.
                    unsafe { (**first).pprev = first };
                }
                while !first.is_null() {
                    let timer = *first;
                    // SAFETY: as above.
                    unsafe {
                        *first = (*timer).next;
                        if !(*first).is_null() {
                            (**first).pprev = first;
                        }
                        (*timer).pprev = ptr::null_mut();
                        expired(&mut *timer);
                    }
                }
            }
        }
    }
}

/// The driver, and its timers.
pub struct Linux {
    base: Base,
    /// Each from [`Box::into_raw`].
    timers: Vec<*mut Timer>,
    now: u64,
    sum: u64,
}

impl Linux {
    /// For this many timers.
    pub fn new(n: usize) -> Self {
        Self {
            base: Base {
                clk: 1,
                next_expiry: u64::MAX,
                next_is_stale: false,
                pending: [0; LEVELS],
                slots: vec![ptr::null_mut(); LEVELS * SLOTS],
            },
            timers: Vec::with_capacity(n),
            now: 0,
            sum: 0,
        }
    }

    fn arm(&mut self, id: u32, interval: u32) {
        let expires = self.now + u64::from(interval);
        let timer = self.timers[id as usize];
        // SAFETY: all timers live as long as this does, and no reference to one lives across a call.
        unsafe {
            self.base.detach(timer);
            self.base.enqueue(timer, expires);
        }
    }
}

impl Drop for Linux {
    fn drop(&mut self) {
        for timer in self.timers.drain(..) {
            // SAFETY: it is from `Box::into_raw`, and nothing uses it any more.
            drop(unsafe { Box::from_raw(timer) });
        }
    }
}

impl Contender for Linux {
    fn start(&mut self, intervals: &[u32]) {
        assert!(self.timers.is_empty() || self.timers.len() == intervals.len());
        for (id, interval) in (0..).zip(intervals) {
            if self.timers.len() == id as usize {
                self.timers
                    .push(Box::into_raw(Box::new(unarmed(id.into()))));
            }
            self.arm(id, *interval);
        }
    }

    fn start_again(&mut self, order: &[u32], intervals: &[u32]) {
        for (id, interval) in order.iter().zip(intervals) {
            self.arm(*id, *interval);
        }
    }

    fn rearm(&mut self, order: &[u32], intervals: &[u32]) {
        self.start_again(order, intervals);
    }

    fn stop(&mut self, order: &[u32]) {
        for id in order {
            let timer = self.timers[*id as usize];
            // SAFETY: as in `arm`.
            unsafe { self.base.detach(timer) };
        }
    }

    fn pass(&mut self, ticks: u32) {
        self.now += u64::from(ticks);
    }

    fn expire(&mut self) -> usize {
        let (mut count, mut sum) = (0, self.sum);
        // SAFETY: as in `arm`.
        unsafe {
            self.base.run(self.now, |timer| {
                count += 1;
                // What a callback would look at.
                sum = sum.wrapping_add(timer.value ^ timer.expires);
            });
        }
        self.sum = sum;
        count
    }

    fn handles(&self) -> usize {
        self.timers.capacity() * size_of::<*mut Timer>()
    }

    fn slack(&self) -> u32 {
        // An eighth of the longest interval, and the rest of a slot.
        1 << 14
    }
}
