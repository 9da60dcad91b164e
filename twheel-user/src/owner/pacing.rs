//! Limits how often something expensive is done.

use std::time::{Duration, Instant};

/// The time between two turns is at least this many times as long as the first of them took.
const PAUSE: u32 = 8;
/// And at least this long.
const LEAST: Duration = Duration::from_millis(10);

/// Lets work take an eighth of a CPU at most.
#[derive(Default)]
pub(super) struct Pacing {
    next: Option<Instant>,
}

impl Pacing {
    /// Does the work, unless it is too early.
    pub(super) fn turn<T>(&mut self, work: impl FnOnce() -> T) -> Option<T> {
        let begin = Instant::now();
        if self.next.is_some_and(|next| begin < next) {
            return None;
        }
        let done = work();
        let end = Instant::now();
        self.next = Some(end + LEAST.max(PAUSE * (end - begin)));
        Some(done)
    }
}
