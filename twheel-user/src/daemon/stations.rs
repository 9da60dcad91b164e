//! Where events come by between the ring and its release: the ring, the history, the reaper, the metrics, standard output.

use std::{
    io::{self, Write},
    sync::Arc,
};

use anyhow::Result;
use tokio::sync::watch;
use twheel_common::event::{Event, Record};

use crate::{
    history,
    metrics::Metrics,
    model::{Expired, Flow, KnownAs},
    names::Names,
    reap::{self, Reaper},
    ring::{Events, Read},
};

/// Where an event comes by, in the order of these methods.
pub trait Stations {
    /// Reads on in the ring, in order, until there are so many or a few more. They stay there.
    fn read(&mut self, into: &mut Vec<Read>, enough: usize);
    /// Has the history keep these, if there is one.
    fn keep(&self, batch: &Arc<Vec<Read>>);
    /// Up to where the history has what was read, or has lost it; `None`: there is no history.
    fn kept(&self) -> Option<watch::Receiver<u64>>;
    /// Has done to flows what is to be done to them.
    fn reap(&self, records: &[Record]) -> Result<()>;
    /// What a flow is known as.
    fn known_as(&self, flow: &Flow) -> Result<KnownAs>;
    /// Has the metrics count flows that have ended.
    fn count(&self, ended: &[(&Event, Expired, KnownAs)]);
    /// Writes lines to standard output.
    fn print(&mut self, lines: &[u8]) -> io::Result<()>;
    /// Gives back the room of all records that end there or before. Returns whether there were any.
    fn release(&mut self, end: u64) -> bool;
    /// The same of all that was read, and of what was passed over.
    fn release_all(&mut self) -> bool;
}

/// What a run's events come by.
pub struct Outside {
    /// The ring.
    pub events: Events,
    /// The history, if one is kept.
    pub history: Option<history::Writer>,
    /// The reaper, until it is to end.
    pub reaper: Option<Reaper>,
    /// The metrics, if they are served.
    pub metrics: Option<Arc<Metrics>>,
    /// What flows are known as.
    pub names: Names,
}

impl Outside {
    /// Ends the reaper; gives what it has done.
    pub fn take_reaper(
        &mut self,
    ) -> impl FnOnce() -> Option<Arc<reap::ReaperState>> + Send + use<> {
        let reaper = self.reaper.take();
        move || {
            let reaper = reaper?;
            let shared = reaper.shared();
            reaper.stop();
            Some(shared)
        }
    }

    /// Lets the reaper go on, if it has paused. Returns whether it had.
    pub fn resume(&self) -> bool {
        self.reaper.as_ref().is_some_and(|reaper| {
            let paused = reaper.shared().is_paused();
            if paused {
                reaper.resume();
                say!("reaping goes on");
            }
            paused
        })
    }

    /// Ends the history. Returns how many events are not in it.
    pub fn end_history(&mut self) -> u64 {
        self.history.take().map_or(0, history::Writer::end)
    }
}

impl Stations for Outside {
    fn read(&mut self, into: &mut Vec<Read>, enough: usize) {
        self.events.read(into, enough);
    }

    fn keep(&self, batch: &Arc<Vec<Read>>) {
        if let Some(history) = &self.history {
            history.add(batch);
        }
    }

    fn kept(&self) -> Option<watch::Receiver<u64>> {
        self.history.as_ref().map(history::Writer::written)
    }

    fn reap(&self, records: &[Record]) -> Result<()> {
        match &self.reaper {
            Some(reaper) => reaper.reap(records),
            None => Ok(()),
        }
    }

    fn known_as(&self, flow: &Flow) -> Result<KnownAs> {
        self.names.known_as(flow)
    }

    fn count(&self, ended: &[(&Event, Expired, KnownAs)]) {
        if let Some(metrics) = &self.metrics {
            let mut batch = metrics.batch();
            for (event, ended, known_as) in ended {
                batch.ended(event, ended, known_as);
            }
        }
    }

    fn print(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(lines)?;
        stdout.flush()
    }

    fn release(&mut self, end: u64) -> bool {
        self.events.release(end)
    }

    fn release_all(&mut self) -> bool {
        self.events.release_all()
    }
}
