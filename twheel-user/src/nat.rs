//! The endpoints on the other side of a network address translation (`--nat`), as conntrack knows
//! them while it has an entry.

use std::{
    io,
    time::{Duration, Instant},
};

use anyhow::Result;
use twheel_common::event::{Event, Record};

use crate::{
    conntrack::{Conntrack, protocol},
    model::{Flow, Measure, Translation, Updated},
    names::Names,
    ring::Batch,
};

/// How long the look-ups of one batch of events may take. Those that are left are skipped.
const BATCH: Duration = Duration::from_millis(20);

/// Looks up the translations of flows.
pub struct Nat {
    conntrack: Conntrack,
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
            skipped: 0,
            failed: None,
        })
    }

    /// Looks up the flows of a batch that have ended, or are reported for the first time.
    pub fn look_up(&mut self, batch: &mut Batch, names: &Names, measure: Measure) -> Result<()> {
        let until = Instant::now() + BATCH;
        let mut found = Vec::new();
        for read in &batch.events {
            let event = match &read.record {
                Record::Ended(event) => event,
                Record::Updated(event) if event.since == event.age => event,
                _ => continue,
            };
            if Instant::now() > until {
                self.skip();
                continue;
            }
            let Some(updated) = Updated::new(event, measure.clock, measure.one_way) else {
                continue;
            };
            if let Some(nat) = self.find(event, &updated.flow, names)? {
                found.push((event.number, nat));
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

    fn find(&mut self, event: &Event, flow: &Flow, names: &Names) -> Result<Option<Translation>> {
        let Some(proto) = protocol(event.key.proto()) else {
            return Ok(None);
        };
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
