//! The endpoints on the other side of a network address translation (`--nat`), as conntrack knows
//! them while it has an entry.

use std::{
    io,
    num::NonZeroUsize,
    time::{Duration, Instant},
};

use anyhow::Result;
use lru::LruCache;
use twheel_common::event::Record;

use crate::{
    conntrack::{Conntrack, protocol},
    model::{Birth, Flow, Measure, Translation, Updated},
    names::Names,
    ring::Batch,
};

/// How long the look-ups of one batch of events may take. Those that are left are skipped.
const BATCH: Duration = Duration::from_millis(20);

/// Most live flows whose translations are remembered.
const FLOWS: NonZeroUsize = NonZeroUsize::new(1 << 16).unwrap();

/// Looks up the translations of flows.
pub struct Nat {
    conntrack: Conntrack,
    /// The translations of flows that were reported and live on.
    known: LruCache<Birth, Translation>,
    /// Look-ups that were skipped, because they took too long.
    skipped: u64,
    /// The last error, which was printed.
    failed: Option<io::ErrorKind>,
}

impl Nat {
    /// Asks the conntrack of this thread's network namespace.
    ///
    /// # Errors
    ///
    /// A netlink socket cannot be opened.
    pub fn open() -> Result<Self> {
        Ok(Self {
            conntrack: Conntrack::open()?,
            known: LruCache::new(FLOWS),
            skipped: 0,
            failed: None,
        })
    }

    /// Looks up the flows of a batch that have ended, or are reported for the first time.
    pub fn look_up(&mut self, batch: &mut Batch, names: &Names, measure: Measure) -> Result<()> {
        let until = Instant::now() + BATCH;
        let mut found = Vec::new();
        for read in &batch.events {
            let (event, is_end) = match &read.record {
                Record::Ended(event) => (event, true),
                Record::Updated(event) => (event, false),
                _ => continue,
            };
            let Some(updated) = Updated::new(event, measure.clock, measure.one_way) else {
                continue;
            };
            let birth = updated.flow.birth;
            let mut nat = match is_end {
                true => self.known.pop(&birth),
                false => self.known.get(&birth).copied(),
            };
            if nat.is_none() && (is_end || event.since == event.age) {
                if Instant::now() > until {
                    self.skip();
                    continue;
                }
                nat = self.find(&updated.flow, names)?;
            }
            let Some(nat) = nat else {
                continue;
            };
            found.push((event.number, nat));
            if !is_end {
                self.known.put(birth, nat);
            }
        }
        batch.translations.extend(found);
        Ok(())
    }

    fn skip(&mut self) {
        if self.skipped == 0 {
            say!(
                "twheel: --nat: conntrack is too slow for all flows that end: some events have no \
                 translation"
            );
        }
        self.skipped += 1;
    }

    fn find(&mut self, flow: &Flow, names: &Names) -> Result<Option<Translation>> {
        let Some(proto) = protocol(flow.birth.key.proto()) else {
            return Ok(None);
        };
        // What is counted in another network namespace is not in this one's conntrack.
        let iface = names.iface(flow.place)?;
        if iface.is_some_and(|iface| iface.contains('/')) {
            return Ok(None);
        }
        let zone = names.zone(flow.zone)?;
        match self.conntrack.translation(proto, flow.src, flow.dst, zone) {
            Ok(found) => Ok(found),
            Err(error) => {
                if self.failed != Some(error.kind()) {
                    say!("twheel: --nat: conntrack does not answer: {error}");
                }
                self.failed = Some(error.kind());
                Ok(None)
            }
        }
    }
}
