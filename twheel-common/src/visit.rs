//! What a timer visit does with a flow, decided by its word, its timeout and the time. The data plane
//! does it in one place (`handle` in `twheel-ebpf/src/wheel/visit.rs`).

use crate::{
    event::Reason,
    flow::{Word, idle},
    seen::Seen,
};

/// The result of a timer visit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit {
    /// The flow's deadline has passed.
    Expire,
    /// It has not passed: look again at this time (units).
    Rearm(u64),
    /// It has not passed, but the flow makes room for another.
    Evict,
}

impl Visit {
    /// The same, but a flow that stays is looked at no later than at this time (units).
    #[inline(always)]
    pub fn no_later(self, than: u64) -> Self {
        match self {
            Self::Rearm(due) if than < due => Self::Rearm(than),
            other => other,
        }
    }

    /// The same, but the flow is evicted if it would stay, is not
    /// [established](Seen::is_established) and `may_go`, which gets the time at which it is due.
    #[inline(always)]
    pub fn for_room(self, is_established: bool, may_go: impl FnOnce(u64) -> bool) -> Self {
        match self {
            Self::Rearm(due) if !is_established && may_go(due) => Self::Evict,
            other => other,
        }
    }

    /// Why the flow ends, if it does not stay; `seen` are its state bits.
    #[inline(always)]
    pub fn reason(self, seen: Seen) -> Reason {
        match self {
            Self::Evict => Reason::Evicted,
            Self::Expire | Self::Rearm(_) => Reason::of_expiry(seen),
        }
    }
}

/// Decides the result of a timer visit. It never expires a flow early: `Expire` is returned only if
/// the flow was idle for its whole timeout (units). `doubt` says by how many units the last packet
/// may have come later than its stamp says.
#[inline(always)]
pub fn visit(now: u64, word: Word, timeout: u32, doubt: impl FnOnce(u32) -> u32) -> Visit {
    let idle = idle(now, word.stamp());
    let mut least = timeout;
    if idle >= least {
        // Only few visits get here, so `doubt` is called late.
        least = least.saturating_add(doubt(word.stamp()));
    }
    if idle >= least {
        return Visit::Expire;
    }
    Visit::Rearm(now + u64::from(least - idle))
}
