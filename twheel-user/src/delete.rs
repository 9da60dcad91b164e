//! Deleting flows of an instance from beside its loader.

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    mem,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow};
use nix::fcntl::Flock;
use serde::Serialize;
use twheel_common::{
    counter::Counter,
    event::{Reason, Record},
    flow::idle,
    step::{Delete, Deleted, MAX_DELETES},
};

use crate::{
    call::Callable,
    cpu::pin_to,
    data_plane::{Events, LoaderCounters},
    failure::{Failure, Kind},
    flows::Flow,
    history::{Directory, Writer},
    inspect::Reader,
    pins::Pins,
    progress, reap,
};

/// How long a ring of events may stay full before whoever reads it is taken for gone.
const PATIENCE: Duration = Duration::from_secs(5);
/// Between two looks at a full ring.
const PAUSE: Duration = Duration::from_millis(1);

/// How deleting went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Flows deleted, each with an event.
    #[serde(rename = "deleted")]
    pub done: u64,
    /// Flows that had a packet since they were chosen, or have ended: left as they are.
    #[serde(rename = "stayed")]
    pub changed: u64,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} flows deleted", self.done)?;
        match self.changed {
            0 => Ok(()),
            changed => write!(f, ", {changed} had a packet or an end meanwhile"),
        }
    }
}

/// The events of an instance that has no loader: whoever deletes flows there takes them out of the ring meanwhile, and
/// keeps them in the history.
pub struct Unread {
    /// No loader comes meanwhile.
    _held: Flock<File>,
    pins: Pins,
    events: Events,
    history: Option<Writer>,
    tally: Arc<LoaderCounters>,
    /// Somebody's events are in the ring that no loader has printed yet.
    left: bool,
    /// Actions that are to be done to their flows.
    asked: u64,
}

impl Unread {
    /// Of an instance; `None` if a loader reads its events. `history`: the directory of histories, or `off`.
    pub fn open(reader: &Reader, history: &Path) -> Result<Option<Self>> {
        let pins = reader.pins();
        let Some(held) = pins.hold()? else {
            return Ok(None);
        };
        let tally = Arc::new(LoaderCounters::open(pins)?);
        let history = (history.as_os_str() != "off")
            .then(|| {
                let directory = Directory::make(history, pins)?;
                Writer::start(&directory, pins, tally.clone(), None, reader.measure())
            })
            .transpose()?;
        let mut unread = Self {
            _held: held,
            pins: pins.clone(),
            events: Events::open(pins.map("EVENTS")?)?,
            history,
            tally,
            left: false,
            asked: 0,
        };
        unread.keep()?;
        // Whatever that was, it was not deleted by this.
        unread.left = unread.events.has_unreleased();
        Ok(Some(unread))
    }

    /// Keeps in the history what has come, and in the ring.
    fn keep(&mut self) -> Result<()> {
        let mut batch = Vec::new();
        self.events.read(&mut batch, usize::MAX);
        let records: Vec<_> = batch.iter().map(|read| read.record).collect();
        self.asked += reap::asked(&self.pins, &records)?;
        if let Some(history) = &mut self.history {
            history.add_now(batch);
        }
        // The packet path goes on meanwhile.
        let is_own = |record: &Record| match record {
            Record::Ended(event) => {
                let own = [Reason::Deleted, Reason::Flushed];
                own.iter().any(|reason| event.reason == *reason as u32)
            }
            Record::Rto(_) => false,
        };
        self.left |= !records.iter().all(is_own);
        Ok(())
    }

    /// If all was deleted by this it leaves the ring. Else it stays there, for the next loader to print and to act upon.
    fn end(&mut self) -> Result<()> {
        self.keep()?;
        if !self.left {
            self.events.release_all();
        }
        Ok(())
    }

    /// Makes room for more events. What was to be done to the flows of those that leave the ring is not done, and counted
    /// by the next loader.
    fn make_room(&mut self) -> Result<()> {
        self.keep()?;
        self.left = false;
        self.tally
            .add(Counter::ReapAsked, mem::take(&mut self.asked));
        self.events.release_all();
        Ok(())
    }
}

/// Deletes the flows that are chosen, each on the CPU of its wheel. A flow that had a packet since it was chosen stays.
/// `chosen` is asked with the clock's low 32 bits, perhaps twice. Memory does not grow with the number of flows.
///
/// # Errors
///
/// [`Kind::Other`]: the ring of events stays full, since nobody reads it; what was deleted until then is.
pub fn delete_all(
    reader: &Reader,
    chosen: impl Fn(&Flow, u32) -> bool + Send,
    reason: Reason,
    unread: Option<&mut Unread>,
) -> Result<Tally> {
    // A thread of its own: this one stays where it may run.
    thread::scope(|scope| {
        scope
            .spawn(|| {
                let mut deletion = Deletion {
                    reader,
                    chosen,
                    reason,
                    unread,
                    program: reader.pins().callable("twheel_delete")?,
                    tally: Tally::default(),
                    batches: BTreeMap::new(),
                    young: Vec::new(),
                };
                deletion.run()?;
                Ok(deletion.tally)
            })
            .join()
            .unwrap_or_else(|_| Err(anyhow!("the thread that deletes panicked")))
    })
}

/// Flows that had a packet just now and wait for the clock, at most.
const YOUNG: usize = 4096;

struct Deletion<'a, C> {
    reader: &'a Reader,
    chosen: C,
    reason: Reason,
    unread: Option<&'a mut Unread>,
    program: Callable,
    tally: Tally,
    /// By CPU.
    batches: BTreeMap<u32, Vec<Delete>>,
    young: Vec<u32>,
}

impl<C: Fn(&Flow, u32) -> bool> Deletion<'_, C> {
    fn run(&mut self) -> Result<()> {
        let reader = self.reader;
        let now = reader.now()?;
        let bar = progress::bar("deleting", reader.table().records().into());
        for flow in reader.table().iter() {
            bar.set_position(flow.index.into());
            if !(self.chosen)(&flow, now) {
                continue;
            }
            // Another packet in the unit of the clock that is not over yet would leave no trace: a flow is chosen when
            // that has passed.
            if idle(now.into(), flow.word.stamp()) == 0 {
                self.young.push(flow.index);
                if self.young.len() == YOUNG {
                    self.choose_young()?;
                }
            } else {
                self.add(&flow)?;
            }
        }
        self.choose_young()?;
        for (cpu, batch) in mem::take(&mut self.batches) {
            self.delete(cpu, batch)?;
        }
        match &mut self.unread {
            Some(unread) => unread.end(),
            None => Ok(()),
        }
    }

    fn choose_young(&mut self) -> Result<()> {
        if self.young.is_empty() {
            return Ok(());
        }
        thread::sleep(2 * self.reader.clock().unit());
        let now = self.reader.now()?;
        for index in mem::take(&mut self.young) {
            let flow = self.reader.table().get(index);
            match flow.filter(|flow| (self.chosen)(flow, now)) {
                Some(flow) if idle(now.into(), flow.word.stamp()) > 0 => self.add(&flow)?,
                _ => self.tally.changed += 1,
            }
        }
        Ok(())
    }

    fn add(&mut self, flow: &Flow) -> Result<()> {
        let batch = self.batches.entry(flow.cpu).or_default();
        batch.push(flow.delete(self.reason));
        if batch.len() == MAX_DELETES {
            let batch = mem::take(batch);
            self.delete(flow.cpu, batch)?;
        }
        Ok(())
    }

    /// Deletes flows of one CPU's wheel.
    fn delete(&mut self, cpu: u32, mut batch: Vec<Delete>) -> Result<()> {
        let tally = &mut self.tally;
        pin_to(cpu)?;
        let mut since = Instant::now();
        while !batch.is_empty() {
            let mut asked = batch.clone();
            self.program.delete(&mut asked)?;
            let mut left = Vec::new();
            for (entry, answer) in batch.iter().zip(&asked) {
                match Deleted::from_raw(answer.outcome) {
                    Some(Deleted::Done) => tally.done += 1,
                    // Elsewhere: the record is another flow's by now.
                    Some(Deleted::Changed | Deleted::Elsewhere) => tally.changed += 1,
                    Some(Deleted::RingFull | Deleted::Posted) => left.push(*entry),
                    None => {
                        return Err(anyhow!("outcome {}", answer.outcome))
                            .context("the program that deletes gives an answer that is none");
                    }
                }
            }
            if left.len() < batch.len() {
                since = Instant::now();
            } else if since.elapsed() > PATIENCE {
                return Err(Failure::new(
                Kind::Other,
                format!(
                    "{} flows deleted; the rest stay, since nobody reads the events: run twheel on the \
                     interface meanwhile, or remove the instance with `twheel detach`",
                    tally.done
                ),
            )
            .into());
            }
            batch = left;
            match &mut self.unread {
                _ if batch.is_empty() => {}
                Some(unread) => unread.make_room()?,
                None => thread::sleep(PAUSE),
            }
        }
        Ok(())
    }
}
