//! The stations of an event between its reading and its release: the ring, the history, the reaper,
//! the metrics, standard output.

use std::{
    io::{self, Write},
    sync::Arc,
    time::SystemTime,
};

use anyhow::Result;
use tokio::sync::watch;
use twheel_common::event::{Event, Record};

use crate::{
    history::{self, Own},
    metrics::Metrics,
    model::{Ended, Flow, Happened, KnownAs, Mark, Measure, RunEvent},
    names::Names,
    nat::Nat,
    offload, owner,
    reap::{self, Reaper},
    ring::{Batch, Batches, Numbers},
};

/// The stations of an event, in the order of these methods.
pub trait Stations {
    /// Reads events from the ring, in order, until there are `enough`, or a few more. They stay in
    /// the ring. `None`: there are none.
    fn read(&mut self, enough: usize) -> Result<Option<Batch>>;
    /// Gives events of the run itself to the history, if there is one.
    fn keep_own(&self, events: Vec<(Mark, Own)>);
    /// The number of an event that is not from the ring, and its time: now.
    fn mark(&self) -> Mark;
    /// The number of the end of a flow that was read before, and its time.
    fn mark_of(&self, ended: &Event) -> Mark;
    /// Gives a batch to the history, if there is one.
    fn keep(&self, batch: &Arc<Batch>);
    /// Position up to which the history has stored what was read, or has lost it; `None`: there is
    /// no history.
    fn kept(&self) -> Option<watch::Receiver<u64>>;
    /// Queues the actions on expired flows.
    fn reap(&self, records: &[Record]) -> Result<()>;
    /// The names that belong to a flow.
    fn known_as(&self, flow: &Flow) -> Result<KnownAs>;
    /// Counts ended flows in the metrics.
    fn count(&self, ended: &[(Mark, &Event, Ended, KnownAs)]);
    /// Writes lines to standard output.
    fn print(&mut self, lines: &[u8]) -> io::Result<()>;
    /// Releases all records that end at or before `end`. Returns whether there were any.
    fn release(&mut self, end: u64) -> bool;
    /// Releases all records that were read, and those that were skipped.
    fn release_all(&mut self) -> bool;
}

/// The stations of a run.
pub struct Outside {
    /// The ring.
    pub ring: Batches,
    /// The history, if one is kept.
    pub history: Option<history::Writer>,
    /// The reaper, until it is stopped.
    pub reaper: Option<Reaper>,
    /// The timeouts of programs, if there are any.
    pub offload: Option<offload::Ends>,
    /// The metrics, if they are served.
    pub metrics: Option<Arc<Metrics>>,
    /// Names of rules, interfaces and zones.
    pub names: Names,
    /// The numbers of events.
    pub numbers: Numbers,
    /// Translations, with `--nat`.
    pub nat: Option<Nat>,
    /// Owners, with `--owner`.
    pub owners: Option<owner::Lookups>,
    /// How to read the data plane's records.
    pub measure: Measure,
}

impl Outside {
    /// Takes the reaper, to stop it by the returned function, which returns its state.
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

    /// Resumes reaping after a pause. Returns whether it was paused.
    pub fn resume(&self) -> bool {
        self.reaper.as_ref().is_some_and(|reaper| {
            let paused = reaper.shared().is_paused();
            if paused {
                reaper.resume();
                say!("reaping resumed");
            }
            paused
        })
    }

    /// Ends the history. Returns how many events it has lost.
    pub fn end_history(&mut self) -> u64 {
        self.history.take().map_or(0, history::Writer::end)
    }
}

impl Stations for Outside {
    fn read(&mut self, enough: usize) -> Result<Option<Batch>> {
        let mut batch = self.ring.read(enough)?;
        if let Some(batch) = &mut batch {
            if let Some(nat) = &mut self.nat {
                nat.look_up(batch, &self.names, self.measure)?;
            }
            if let Some(owners) = &mut self.owners {
                owners.look_up(batch, &self.names, self.measure)?;
            }
        }
        Ok(batch)
    }

    fn keep_own(&self, events: Vec<(Mark, Own)>) {
        let Some(history) = self.history.as_ref().filter(|_| !events.is_empty()) else {
            return;
        };
        for (_, own) in &events {
            if let Own::Run(RunEvent {
                what: Happened::Attached,
                iface: Some(iface),
                ..
            }) = own
            {
                history.note_interface(iface);
            }
        }
        history.add_own(events);
    }

    fn mark(&self) -> Mark {
        Mark {
            number: self.numbers.next(),
            time: SystemTime::now(),
        }
    }

    fn mark_of(&self, ended: &Event) -> Mark {
        Mark {
            number: ended.number,
            time: self.ring.wall().time(ended.at as u32),
        }
    }

    fn keep(&self, batch: &Arc<Batch>) {
        if let Some(history) = &self.history {
            history.add(batch);
        }
    }

    fn kept(&self) -> Option<watch::Receiver<u64>> {
        self.history.as_ref().map(history::Writer::written)
    }

    fn reap(&self, records: &[Record]) -> Result<()> {
        if let Some(offload) = &self.offload {
            offload.pass(records);
        }
        match &self.reaper {
            Some(reaper) => reaper.reap(records),
            None => Ok(()),
        }
    }

    fn known_as(&self, flow: &Flow) -> Result<KnownAs> {
        self.names.known_as(flow)
    }

    fn count(&self, ended: &[(Mark, &Event, Ended, KnownAs)]) {
        if let Some(metrics) = &self.metrics {
            let mut batch = metrics.batch();
            for (mark, event, ended, known_as) in ended {
                batch.ended(*mark, event, ended, known_as);
            }
        }
    }

    fn print(&mut self, lines: &[u8]) -> io::Result<()> {
        let mut stdout = io::stdout().lock();
        stdout.write_all(lines)?;
        stdout.flush()
    }

    fn release(&mut self, end: u64) -> bool {
        self.ring.events.release(end)
    }

    fn release_all(&mut self) -> bool {
        self.ring.events.release_all()
    }
}
