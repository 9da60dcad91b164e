//! What a timer visit does with a flow, decided by its word, its timeout and the time. The data
//! plane asks [`visit`] wherever it looks at a flow's deadline: when a slot has come round, when a
//! packet needs room, and when a deadline has moved (`twheel-ebpf/src/wheel/`). A flow ends by one
//! function there, `end`.

use crate::{
    event::Reason,
    flow::{Word, idle},
};

/// The result of a timer visit. (Not an enum of both: of a flow that stays the compiler would copy a
/// reason that is not there, which the verifier refuses.)
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Visit {
    /// Why the flow ends: its deadline has passed, or it makes room for another. `None`: it stays.
    pub end: Option<Reason>,
    /// When to look again at a flow that stays (units).
    pub due: u64,
}

impl Visit {
    /// The same, but a flow that stays is looked at no later than at this time (units).
    #[inline(always)]
    pub fn no_later(self, than: u64) -> Self {
        let due = if than < self.due { than } else { self.due };
        Self { due, ..self }
    }

    /// The same, but the flow is evicted if it would stay, is not
    /// [established](crate::seen::Seen::is_established) and `may_go`, which gets the time at which it is due.
    #[inline(always)]
    pub fn for_room(self, is_established: bool, may_go: impl FnOnce(u64) -> bool) -> Self {
        let end = match self.end {
            None if !is_established && may_go(self.due) => Some(Reason::Evicted),
            end => end,
        };
        Self { end, ..self }
    }

    /// How long the flow may stay if it is to make room for another (units): 0 if it ends now;
    /// `None` if it stays, because it is [established](crate::seen::Seen::is_established).
    #[inline(always)]
    pub fn wait(self, now: u64, is_established: bool) -> Option<u64> {
        match self.end {
            Some(_) => Some(0),
            None if is_established => None,
            None => Some(self.due - now),
        }
    }
}

/// Decides the result of a timer visit. It never ends a flow early: it does so only if the
/// flow was idle for its whole timeout (units). `doubt` says by how many units the last packet
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
        let end = Some(Reason::of_expiry(word.seen()));
        return Visit { end, due: now };
    }
    Visit {
        end: None,
        due: now + u64::from(least - idle),
    }
}
