//! What the reaper may do, and what is known of it from outside.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::sites::Sites;
use crate::{
    action::{Action, Outcome},
    filter::Filter,
};

/// What the reaper may do.
pub struct Mandate {
    /// Flows to which nothing is done.
    pub protect: Vec<Filter>,
    /// Say what would be done, and do nothing.
    pub dry_run: bool,
    /// Actions a second, at most; `None`: no limit.
    pub rate: Option<u32>,
    /// Which part of the live flows, 0 to 1, may be reaped within a minute.
    pub max_share: f64,
    /// Where sockets and conntrack entries are.
    pub sites: Sites,
    /// Flows begin with a SYN or are none: it cannot be told whether one is back.
    pub strict: bool,
    /// The XDP program can be told to drop packets of an expired flow.
    pub holds: bool,
}

/// What is known of the reaper from outside.
#[derive(Default)]
pub struct ReaperState {
    counts: [[AtomicU64; Outcome::ALL.len()]; Action::ALL.len()],
    pub(super) queued: AtomicUsize,
    pub(super) paused: AtomicBool,
    pub(super) resume: AtomicBool,
}

impl ReaperState {
    /// How often an action had this outcome.
    pub fn count(&self, action: Action, outcome: Outcome) -> u64 {
        self.counts[action.index()][outcome as usize].load(Ordering::Relaxed)
    }

    /// Whether nothing is reaped, because too large a share was to be.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, action: Action, outcome: Outcome) {
        self.counts[action.index()][outcome as usize].fetch_add(1, Ordering::Relaxed);
    }
}
