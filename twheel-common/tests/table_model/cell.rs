//! A word that several CPUs change at once.

use loom::sync::atomic::{
    AtomicU64,
    Ordering::{AcqRel, Relaxed, Release},
    fence,
};

/// A word of memory. Loom explores the orders of two accesses only if it takes them for dependent,
/// and forgets a thread's load when another thread loads the same word. So each load first
/// increments a counter; the increments are dependent on one another, and have no other meaning. (A
/// write is dependent on the access before it, be that a load or not.)
pub struct Cell(pub AtomicU64, AtomicU64);

impl Cell {
    pub fn new() -> Self {
        Self(AtomicU64::new(0), AtomicU64::new(0))
    }

    pub fn load(&self) -> u64 {
        self.1.fetch_add(1, Relaxed);
        self.0.load(Relaxed)
    }

    pub fn store(&self, value: u64) {
        self.0.store(value, Relaxed);
    }

    pub fn swap(&self, value: u64) {
        self.0.swap(value, AcqRel);
        fence(Release);
    }

    /// Returns the previous value.
    pub fn compare_exchange(&self, old: u64, new: u64) -> u64 {
        match self.0.compare_exchange(old, new, AcqRel, Relaxed) {
            Ok(held) => {
                fence(Release);
                held
            }
            Err(held) => held,
        }
    }

    pub fn or(&self, bits: u64) -> u64 {
        let held = self.0.fetch_or(bits, AcqRel);
        fence(Release);
        held
    }

    pub fn and(&self, bits: u64) {
        self.0.fetch_and(bits, AcqRel);
        fence(Release);
    }
}
