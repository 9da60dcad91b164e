//! How packets on several CPUs leave the times of a registered flow's data, under a model checker.
//!
//! [`settle`] is that of `twheel_common::offload`; the memory is loom's. Exchanges are acquire and
//! release, and loads and stores are relaxed, as in `table_model`.
#![allow(missing_docs)]

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
    // The standard library's `Arc`, since the destructor of loom's fails after a failed model.
    sync::Arc,
};

use loom::{
    sync::atomic::{
        AtomicBool, AtomicU32, AtomicU64,
        Ordering::{AcqRel, Acquire, Relaxed, Release},
    },
    thread,
};
use twheel_common::{
    flow::Word,
    offload::{FRESH, Heard, Life, OFFLOADED, SETTLING, later, settle},
    seen::Seen,
};

/// A deliberate error, to test the model itself.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    Nothing,
    /// The stamp is not read again.
    NoLastLook,
    /// Nobody knows that a time is being kept.
    Unmarked,
    /// A packet with data makes the flow fresh, and then stores its time.
    FreshFirst,
    /// A packet with data sets nothing if the flow is fresh.
    FreshOnce,
}

struct Flow {
    stamp: AtomicU32,
    marks: AtomicU32,
    heard: AtomicU64,
    broken: Broken,
}

/// The flow for one packet.
struct Packet<'a> {
    flow: &'a Flow,
    read: Cell<Option<u32>>,
}

impl Heard for Packet<'_> {
    fn stamp(&self) -> u32 {
        let is_last = self.read.get().is_some();
        match self.read.get() {
            Some(first) if is_last && self.flow.broken == Broken::NoLastLook => first,
            _ => {
                let stamp = self.flow.stamp.load(Relaxed);
                self.read.set(Some(stamp));
                stamp
            }
        }
    }

    fn raise(&self, to: u32) {
        let raise = |held: u64| Some(later(held as u32, to).into());
        let _ = self.flow.heard.fetch_update(AcqRel, Relaxed, raise);
    }

    fn begin_settling(&self) -> u32 {
        match self.flow.broken {
            Broken::Unmarked => self.flow.marks.load(Acquire),
            _ => self.flow.marks.fetch_or(SETTLING, AcqRel),
        }
    }

    fn clear_fresh(&self) {
        self.flow.marks.fetch_and(!FRESH, AcqRel);
    }

    fn end_settling(&self) {
        self.flow.marks.fetch_and(!SETTLING, AcqRel);
    }
}

impl Flow {
    fn touch(&self, now: u32) {
        if self.stamp.load(Relaxed) < now {
            self.stamp.store(now, Relaxed);
        }
    }

    /// A packet with data that counts.
    fn data(&self, now: u32) {
        let is_fresh = self.marks.load(Relaxed) & FRESH != 0;
        let hear = || self.marks.fetch_or(FRESH, AcqRel);
        match self.broken {
            Broken::FreshFirst => {
                hear();
                self.touch(now);
            }
            Broken::FreshOnce if is_fresh => self.touch(now),
            _ => {
                self.touch(now);
                hear();
            }
        }
    }

    /// A packet without.
    fn other(&self, now: u32) {
        let is_fresh = self.marks.load(Relaxed) & FRESH != 0;
        if is_fresh && self.stamp.load(Relaxed) < now {
            let (flow, read) = (self, Cell::new(None));
            settle(&Packet { flow, read });
        }
        self.touch(now);
    }

    /// When there was data, as the running twheel reads it.
    fn latest(&self) -> u32 {
        let marks = self.marks.load(Acquire);
        let word = Word::new(self.stamp.load(Relaxed).into(), 0, Seen(0));
        let heard = self.heard.load(Relaxed) as u32;
        Life::LOW.latest(marks, word, heard, LATER).stamp()
    }
}

/// When the flow is looked at.
const LATER: u64 = 100;

/// Data at 2 on one CPU, after that at 1; packets without on another; and someone who looks.
fn model(broken: Broken) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(4);
    model.check(move || {
        let flow = Arc::new(Flow {
            stamp: AtomicU32::new(1),
            marks: AtomicU32::new(OFFLOADED | FRESH),
            heard: AtomicU64::new(0),
            broken,
        });
        let is_told = Arc::new(AtomicBool::new(false));
        let on = |act: fn(&Flow)| {
            let flow = flow.clone();
            move || act(&flow)
        };
        let other = thread::spawn(on(|flow| flow.other(3)));
        let data = {
            let (act, is_told) = (on(|flow| flow.data(2)), is_told.clone());
            thread::spawn(move || {
                act();
                is_told.store(true, Release);
            })
        };
        let at_least = if is_told.load(Acquire) { 2 } else { 1 };
        assert!(flow.latest() >= at_least, "early");
        other.join().unwrap();
        data.join().unwrap();
        assert!(flow.latest() >= 2, "early, at the end");
        // What comes much later and does not count makes it no later.
        flow.other(50);
        assert!((2..=3).contains(&flow.latest()), "late");
    });
}

#[test]
fn no_time_of_data_is_lost() {
    model(Broken::Nothing);
}

#[test]
fn the_model_finds_errors() {
    for broken in [
        Broken::NoLastLook,
        Broken::Unmarked,
        Broken::FreshFirst,
        Broken::FreshOnce,
    ] {
        let found = catch_unwind(AssertUnwindSafe(|| model(broken)));
        assert!(found.is_err(), "{broken:?} is not found");
    }
}
