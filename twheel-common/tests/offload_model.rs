//! How packets on several CPUs leave the times of a registered flow's data, under a model checker.
//!
//! [`replace`] is that of `twheel_common::offload`; the memory is loom's. Exchanges are acquire and
//! release, and loads and stores are relaxed, as in `table_model`.
#![allow(missing_docs)]

use std::{
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
    key::Direction,
    offload::{Heard, Life, is_of_data, later, of_data, of_other, replace},
    seen::Seen,
    state::State,
};

/// A deliberate error, to test the model itself.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Broken {
    Nothing,
    /// A packet without data stores its time, whatever there is by now.
    Stored,
    /// The time of data is kept after its stamp was replaced.
    KeptLate,
    /// It is not kept.
    Unkept,
    /// A packet with data stores its time as one without does, and then as one with data.
    Twice,
}

struct Flow {
    stamp: AtomicU32,
    heard: AtomicU64,
    broken: Broken,
}

impl Flow {
    /// A plain store. (After one, loom may find what an exchange stored before it. No hardware does.)
    fn store(&self, stamp: u64) {
        self.stamp.swap(stamp as u32, Relaxed);
    }

    fn keep(&self, time: u32) {
        let raise = |held: u64| Some(later(held as u32, time).into());
        let _ = self.heard.fetch_update(AcqRel, Relaxed, raise);
    }
}

impl Heard for &Flow {
    fn raise(&self, to: u32) {
        if matches!(
            self.broken,
            Broken::Nothing | Broken::Stored | Broken::Twice
        ) {
            self.keep(to);
        }
    }

    fn exchange(&self, held: u32, stamp: u32) {
        match self.broken {
            Broken::Stored => self.store(stamp.into()),
            _ => {
                let _ = self.stamp.compare_exchange(held, stamp, AcqRel, Relaxed);
            }
        }
        if self.broken == Broken::KeptLate && is_of_data(held) {
            self.keep(held);
        }
    }
}

impl Flow {
    /// A packet with data that counts.
    fn data(&self, now: u32) {
        let held = self.stamp.load(Relaxed);
        if self.broken == Broken::Twice {
            self.store(of_other(now.into()));
        }
        if held < now || !is_of_data(held) {
            self.store(of_data(now.into()));
        }
    }

    /// The same, of which that is found out only when its time is stored.
    fn late_data(&self, now: u32) {
        self.other(now);
        let held = self.stamp.load(Relaxed);
        if held < now || !is_of_data(held) {
            self.store(of_data(now.into()));
        }
    }

    /// A packet without.
    fn other(&self, now: u32) {
        let held = self.stamp.load(Relaxed);
        if held < now {
            replace(&self, held, now.into());
        }
    }

    /// When there was data, as the running twheel reads it.
    fn latest(&self) -> u32 {
        let seen = Seen::of_socket(State::Established, Direction::FromLow, &[]).told();
        let word = Word::new(self.stamp.load(Acquire).into(), 0, seen);
        let heard = self.heard.load(Relaxed) as u32;
        Life::LOW.latest(word, heard, LATER).stamp()
    }
}

/// When the flow is looked at.
const LATER: u64 = 100;

/// Data at 1, then at 4 on one CPU, and packets without on others; and someone who looks.
fn model(broken: Broken, data: fn(&Flow), others: &'static [fn(&Flow)]) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(5 - others.len());
    model.check(move || {
        let flow = Arc::new(Flow {
            stamp: AtomicU32::new(of_data(1) as u32),
            heard: AtomicU64::new(0),
            broken,
        });
        let is_told = Arc::new(AtomicBool::new(false));
        let others: Vec<_> = others
            .iter()
            .map(|act| {
                let flow = flow.clone();
                thread::spawn(move || act(&flow))
            })
            .collect();
        let data = {
            let (flow, is_told) = (flow.clone(), is_told.clone());
            thread::spawn(move || {
                data(&flow);
                is_told.store(true, Release);
            })
        };
        let at_least = if is_told.load(Acquire) { 4 } else { 1 };
        assert!(flow.latest() >= at_least, "early");
        others.into_iter().for_each(|it| it.join().unwrap());
        data.join().unwrap();
        assert!(flow.latest() >= 4, "early, at the end");
        // What comes much later and does not count makes it no later.
        flow.other(50);
        assert!((4..=5).contains(&flow.latest()), "late");
    });
}

const ONE: &[fn(&Flow)] = &[|flow| flow.other(6)];
const TWO: &[fn(&Flow)] = &[|flow| flow.other(6), |flow| flow.other(8)];

#[test]
fn no_time_of_data_is_lost() {
    for others in [ONE, TWO] {
        model(Broken::Nothing, |flow| flow.data(4), others);
        model(Broken::Nothing, |flow| flow.late_data(4), others);
    }
}

#[test]
fn the_model_finds_errors() {
    for broken in [Broken::Stored, Broken::KeptLate, Broken::Unkept] {
        let found = catch_unwind(AssertUnwindSafe(|| {
            model(broken, |flow| flow.data(4), ONE);
        }));
        assert!(found.is_err(), "{broken:?} is not found");
    }
    // Data that comes before is lost.
    let found = catch_unwind(AssertUnwindSafe(|| {
        model(Broken::Twice, |flow| flow.data(4), &[|flow| flow.data(2)]);
    }));
    assert!(found.is_err(), "two stores are not found");
}
