//! Owners for the events of a run: looked up on a thread of its own when a flow begins, so that no
//! event waits for it.

use std::{
    collections::VecDeque,
    num::NonZeroUsize,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use lru::LruCache;
use twheel_common::event::Record;

use super::{Owner, Owners};
use crate::{
    model::{Birth, Flow, KnownAs, Measure, Updated},
    names::Names,
    ring::Batch,
};

/// Flows that may wait to be looked up. Later ones are skipped.
const QUEUE: usize = 4096;
/// Most flows whose owners are remembered.
const FLOWS: NonZeroUsize = NonZeroUsize::new(1 << 16).unwrap();
/// How long after a flow has begun its process is looked up again, if there was none: a connection
/// has none before the service accepts it.
const AGAIN: Duration = Duration::from_millis(100);

type Asked = (Flow, KnownAs);
type Found = Arc<Mutex<LruCache<Birth, Arc<Owner>>>>;

/// Looks up the owners of flows that begin.
pub struct Lookups {
    asked: SyncSender<Asked>,
    found: Found,
    is_behind: bool,
}

impl Lookups {
    /// Starts the thread, which ends after this is dropped.
    ///
    /// # Errors
    ///
    /// The thread cannot be started.
    pub fn start() -> Result<Self> {
        let (asked, queue) = sync_channel(QUEUE);
        let found = Arc::new(Mutex::new(LruCache::new(FLOWS)));
        let into = found.clone();
        thread::Builder::new()
            .name("owners".to_owned())
            .spawn(move || answer(&queue, &into))
            .context("cannot start a thread")?;
        Ok(Self {
            asked,
            found,
            is_behind: false,
        })
    }

    /// Asks for the owners of the flows that begin in a batch, and adds to its events those that are
    /// known by now.
    ///
    /// # Errors
    ///
    /// A name cannot be read.
    pub fn look_up(&mut self, batch: &mut Batch, names: &Names, measure: Measure) -> Result<()> {
        let mut owners = Vec::new();
        for read in &batch.events {
            let (event, is_new, is_update) = match &read.record {
                Record::Begun(event) => (event, true, false),
                // A flow that was there before the run is asked for at its first update.
                Record::Updated(event) => (event, event.since == event.age, true),
                Record::Ended(event) => (event, false, false),
                Record::Rto(_) => continue,
            };
            let updated = Updated::new(event, measure.clock, measure.one_way);
            let Some(Updated { flow, .. }) = updated else {
                continue;
            };
            let known = found(&self.found).get(&flow.birth).cloned();
            let asks = match &known {
                None => is_new,
                Some(owner) => is_update && owner.pid.is_none(),
            };
            if asks {
                self.ask(flow, names.known_as(&flow)?);
            }
            owners.extend(known.map(|owner| (event.number, owner)));
        }
        batch.owners.extend(owners);
        Ok(())
    }

    fn ask(&mut self, flow: Flow, known_as: KnownAs) {
        if self.asked.try_send((flow, known_as)).is_err() && !self.is_behind {
            self.is_behind = true;
            say!(
                "twheel: --owner: flows begin faster than their sockets are looked up: some events \
                 have no owner"
            );
        }
    }
}

fn found(found: &Found) -> MutexGuard<'_, LruCache<Birth, Arc<Owner>>> {
    // A panic cannot leave the cache half changed.
    found.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Looks up one flow after the other, and those that have a socket but no process once more.
fn answer(queue: &Receiver<Asked>, into: &Found) {
    let mut owners = Owners::new(Vec::new());
    let mut said = Vec::new();
    let mut again: VecDeque<(Instant, Asked)> = VecDeque::new();
    loop {
        let wait = again
            .front()
            .map(|(due, _)| due.duration_since(Instant::now()));
        let asked = match wait {
            None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            Some(wait) => queue.recv_timeout(wait),
        };
        let ((flow, known_as), is_first) = match asked {
            Ok(asked) => (asked, true),
            Err(RecvTimeoutError::Timeout) => match again.pop_front() {
                Some((_, asked)) => (asked, false),
                None => continue,
            },
            Err(RecvTimeoutError::Disconnected) => return,
        };
        if let Some(owner) = owners.find(&flow, known_as.named()) {
            let has_process = owner.pid.is_some();
            found(into).put(flow.birth, Arc::new(owner));
            if is_first && !has_process && again.len() < QUEUE {
                again.push_back((Instant::now() + AGAIN, (flow, known_as)));
            }
        }
        for notice in owners.notices() {
            if !said.contains(&notice) {
                say!("twheel: --owner: {notice}");
                said.push(notice);
            }
        }
    }
}
