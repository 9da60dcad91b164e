//! What is counted of the programs and their registrations, for metrics.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
};

use twheel_client::protocol::{Outcome, Reply};

use super::ends::{Shared, lock};

/// What the thread counts.
#[derive(Default)]
pub(super) struct Counts {
    /// Programs that are connected.
    pub(super) programs: AtomicUsize,
    /// Events, by their kind.
    told: [AtomicU64; 3],
    /// Requests that were refused, by error number.
    refused: Mutex<BTreeMap<u32, u64>>,
}

impl Counts {
    /// The end of a registration is told.
    pub(super) fn tell(&self, outcome: Outcome) {
        self.told[place(outcome)].fetch_add(1, Ordering::Relaxed);
    }

    /// These replies are sent.
    pub(super) fn reply(&self, replies: &[Reply]) {
        let errors = replies.iter().map(|reply| reply.error);
        for error in errors.filter(|error| *error != 0) {
            *lock(&self.refused).entry(error).or_default() += 1;
        }
    }
}

/// Where an outcome's count is.
fn place(outcome: Outcome) -> usize {
    // The protocol's numbers begin with 1.
    outcome as usize - 1
}

/// Reads what the thread counts.
#[derive(Clone)]
pub struct Tally(pub(super) Arc<Shared>);

impl Tally {
    /// Registrations, with those that programs may still reclaim.
    pub fn registrations(&self) -> usize {
        self.0.held.load(Ordering::Relaxed)
    }

    /// Programs that are connected.
    pub fn programs(&self) -> usize {
        self.0.counts.programs.load(Ordering::Relaxed)
    }

    /// Registrations whose end was told as this.
    pub fn told(&self, outcome: Outcome) -> u64 {
        self.0.counts.told[place(outcome)].load(Ordering::Relaxed)
    }

    /// Requests that were refused, by error number.
    pub fn refused(&self) -> BTreeMap<u32, u64> {
        lock(&self.0.counts.refused).clone()
    }
}
