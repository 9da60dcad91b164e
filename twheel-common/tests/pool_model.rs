//! The depot of free details under a model checker: every interleaving of two CPUs that take chains
//! and bring them back. (`table_model` describes what loom models.)
#![allow(missing_docs)]

use std::panic::{AssertUnwindSafe, catch_unwind};

use loom::{
    sync::{
        Arc,
        atomic::{
            AtomicU64,
            Ordering::{AcqRel, Acquire, Relaxed},
        },
    },
    thread,
};
use twheel_common::{
    pool::{self, CHAIN, Pool, Shelf},
    wheel::Link,
};

const DETAILS: u32 = 4;

/// Details, each in a chain of its own.
struct Depot {
    below: Vec<AtomicU64>,
    head: AtomicU64,
    /// Whether a head has a version that tells it from an earlier, equal one.
    has_versions: bool,
}

impl Depot {
    /// A depot with the chains 0, 1 and 2, in this order.
    fn new(has_versions: bool) -> Self {
        let below = |details| match details {
            0 | 1 => Link::flow(details + 1),
            _ => Link::NONE,
        };
        Self {
            below: (0..DETAILS)
                .map(|details| AtomicU64::new(below(details).raw().into()))
                .collect(),
            head: AtomicU64::new(Link::flow(0).raw().into()),
            has_versions,
        }
    }
}

impl Pool for Depot {
    fn next(&self, _: u32) -> Link {
        Link::NONE
    }

    fn set_next(&self, _: u32, _: Link) {}

    fn below(&self, details: u32) -> Link {
        Link::from_raw(self.below[details as usize].load(Relaxed) as u32)
    }

    fn set_below(&self, details: u32, below: Link) {
        self.below[details as usize].store(below.raw().into(), Relaxed);
    }

    fn depot(&self) -> u64 {
        self.head.load(Acquire)
    }

    fn change_depot(&self, old: u64, new: u64) -> u64 {
        let new = match self.has_versions {
            true => new,
            false => new & u64::from(u32::MAX),
        };
        match self.head.compare_exchange(old, new, AcqRel, Acquire) {
            Ok(held) | Err(held) => held,
        }
    }

    fn fresh(&self) -> Option<u32> {
        None
    }

    fn repeat(&self, turns: u32, mut turn: impl FnMut(u32) -> bool) {
        for number in 0..turns {
            if turn(number) {
                break;
            }
        }
    }
}

/// One CPU takes a chain, while another takes two and brings back the first. In the end, each of
/// the details is in exactly one place.
fn chains(has_versions: bool) {
    loom::model(move || {
        let depot = Arc::new(Depot::new(has_versions));
        let other = depot.clone();
        let second = thread::spawn(move || {
            let mut shelf = Shelf::default();
            let [first, next] = [0; 2].map(|_| pool::take(&*other, &mut shelf));
            let (first, next) = (first.unwrap(), next.unwrap());
            let mut shelf = Shelf {
                free: Link::flow(next),
                count: CHAIN,
                spare: Link::flow(first),
                ..Shelf::default()
            };
            pool::give(&*other, &mut shelf, 3);
            let mut held = vec![3, next];
            if shelf.spare == Link::flow(first) {
                held.push(first);
            }
            held
        });
        let mut held: Vec<_> = pool::take(&*depot, &mut Shelf::default())
            .into_iter()
            .collect();
        held.extend(second.join().unwrap());
        let mut rest = Shelf::default();
        while let Some(details) = pool::take(&*depot, &mut rest) {
            held.push(details);
            assert!(held.len() <= DETAILS as usize, "{held:?}");
        }
        held.sort_unstable();
        assert_eq!(
            held,
            Vec::from_iter(0..DETAILS),
            "not each of the details once"
        );
    });
}

#[test]
fn two_that_take_and_bring_back_lose_and_share_nothing() {
    chains(true);
}

#[test]
fn a_head_without_a_version_is_found() {
    assert!(catch_unwind(AssertUnwindSafe(|| chains(false))).is_err());
}
