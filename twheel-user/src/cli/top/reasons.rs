//! Counts ended flows by reason, as the history tells of them.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant, SystemTime},
};

use anyhow::Result;
use twheel_common::event::Reason;

use crate::{
    history::{HistoryReader, PastEvent},
    model::FlowEvent,
};

/// How far back the counts begin.
pub const BACK: Duration = Duration::from_secs(600);
const KINDS: usize = Reason::ALL.len();

/// Flows that ended, by reason, since [`BACK`] before this was made. A thread counts them.
pub struct Reasons {
    shared: Arc<Shared>,
    /// The counts of an earlier look, and when it was.
    before: Option<(Instant, [u64; KINDS])>,
    /// Ends a second.
    rates: Option<[f64; KINDS]>,
}

#[derive(Default)]
struct Shared {
    counts: [AtomicU64; KINDS],
    /// Why no more is read.
    wrong: Mutex<Option<String>>,
}

/// A reason with its number of flows, and how many a second.
pub struct Line {
    pub reason: Reason,
    pub count: u64,
    pub rate: Option<f64>,
}

impl Reasons {
    /// Starts to count what the history of the instance of this name tells. `directory`: where
    /// histories are, or `off`.
    pub fn start(directory: &Path, instance: &str) -> Self {
        let shared = Arc::new(Shared::default());
        let since = SystemTime::now().checked_sub(BACK);
        let opened = match directory.as_os_str() == "off" {
            true => Err(anyhow::anyhow!("--history off")),
            false => {
                HistoryReader::open(directory, instance, since.unwrap_or(SystemTime::UNIX_EPOCH))
            }
        };
        match opened {
            Ok(mut reader) => {
                let weak = Arc::downgrade(&shared);
                thread::spawn(move || {
                    let ended = count(&mut reader, &weak);
                    if let (Err(error), Some(shared)) = (ended, weak.upgrade()) {
                        shared.say(&error);
                    }
                });
            }
            Err(error) => shared.say(&error),
        }
        Self {
            shared,
            before: None,
            rates: None,
        }
    }

    /// Why nothing, or nothing more, is counted.
    pub fn wrong(&self) -> Option<String> {
        self.shared.wrong.lock().ok()?.clone()
    }

    /// A new look: rates are those since the look before.
    pub fn look(&mut self) {
        let now = (Instant::now(), self.counts());
        if let Some((then, before)) = self.before {
            let seconds = (now.0 - then).as_secs_f64().max(f64::EPSILON);
            let rate = |at: usize| now.1[at].saturating_sub(before[at]) as f64 / seconds;
            self.rates = Some(std::array::from_fn(rate));
        }
        self.before = Some(now);
    }

    /// The reasons, most flows first.
    pub fn lines(&self) -> Vec<Line> {
        let counts = self
            .before
            .map_or_else(|| self.counts(), |(_, counts)| counts);
        let line = |(at, reason)| Line {
            reason,
            count: counts[at],
            rate: self.rates.map(|rates| rates[at]),
        };
        let mut lines: Vec<_> = Reason::ALL.into_iter().enumerate().map(line).collect();
        lines.sort_by_key(|line| std::cmp::Reverse(line.count));
        lines
    }

    fn counts(&self) -> [u64; KINDS] {
        std::array::from_fn(|at| self.shared.counts[at].load(Ordering::Relaxed))
    }
}

impl Shared {
    fn say(&self, error: &anyhow::Error) {
        if let Ok(mut wrong) = self.wrong.lock() {
            *wrong = Some(format!("{error:#}"));
        }
    }
}

/// Counts until nobody looks any more.
fn count(reader: &mut HistoryReader, shared: &Weak<Shared>) -> Result<()> {
    const WAIT: Duration = Duration::from_millis(500);
    let follow = reader.follow()?;
    loop {
        while let Some(past) = reader.next()? {
            let Some(shared) = shared.upgrade() else {
                return Ok(());
            };
            if let PastEvent::Flow(FlowEvent::Ended(ended)) = past.event
                && let Some(at) = Reason::ALL.iter().position(|it| *it == ended.reason)
            {
                shared.counts[at].fetch_add(1, Ordering::Relaxed);
            }
        }
        if shared.strong_count() == 0 {
            return Ok(());
        }
        follow.wait_for(WAIT)?;
    }
}
