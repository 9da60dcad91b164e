//! What the reaper may do, and its state as seen from outside.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::sites::Sites;
use crate::{
    action::{Action, Outcome},
    filter::Filter,
};

/// What the reaper may do.
pub struct Mandate {
    /// Flows that are never reaped.
    pub protect: Vec<Filter>,
    /// Report what would be done, and do nothing.
    pub dry_run: bool,
    /// Most actions per second; `None`: no limit.
    pub rate: Option<u32>,
    /// The largest share of the live flows, 0 to 1, that may be reaped within a minute.
    pub max_share: f64,
    /// Where to look for sockets and conntrack entries.
    pub sites: Sites,
    /// Set with `--pickup strict`: only a SYN begins a flow, so the reaper cannot tell whether a
    /// connection is alive again.
    pub strict: bool,
    /// The XDP program can drop packets of an expired flow.
    pub holds: bool,
}

/// The reaper's state, as seen from outside.
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

    /// Whether reaping is paused, because too large a share of the flows was to be reaped.
    pub fn is_paused(&self) -> bool {
        self.paused.load(Ordering::Relaxed)
    }

    /// Flows whose actions wait to be taken.
    pub fn queued(&self) -> usize {
        self.queued.load(Ordering::Relaxed)
    }

    pub(super) fn add(&self, action: Action, outcome: Outcome) {
        self.counts[action.index()][outcome as usize].fetch_add(1, Ordering::Relaxed);
    }
}
