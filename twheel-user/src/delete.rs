//! Deletes flows of an instance from a process other than its running twheel.

use std::{
    collections::BTreeMap,
    fmt,
    fs::File,
    iter, mem,
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
    data_plane::{Events, UserCounters},
    failure::{Failure, Kind},
    flows::Flow,
    history::{Directory, Writer},
    inspect::Reader,
    output::several,
    pins::Pins,
    progress, reap,
    ring::Batches,
};

/// How long the ring of events may stay full before a deletion assumes that nobody reads it.
const PATIENCE: Duration = Duration::from_secs(5);
/// How long to wait before a full ring is checked again.
const PAUSE: Duration = Duration::from_millis(1);

/// The result of a deletion.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Tally {
    /// Flows that were deleted, each with an event.
    #[serde(rename = "deleted")]
    pub done: u64,
    /// Flows that were left as they are: they had a packet since they were chosen, or have ended.
    #[serde(rename = "stayed")]
    pub changed: u64,
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} deleted", several(self.done, "flow"))?;
        match self.changed {
            0 => Ok(()),
            changed => write!(f, ", {changed} not: they had a packet or ended meanwhile"),
        }
    }
}

/// The events of an instance that has no running twheel. The process that deletes flows reads the
/// ring meanwhile, and writes the events to the history.
pub struct Unread {
    /// The lock that keeps a new twheel from starting meanwhile.
    _held: Flock<File>,
    pins: Pins,
    ring: Batches,
    history: Option<Writer>,
    tally: Arc<UserCounters>,
    /// The ring holds events of other flows, which no running twheel has printed yet.
    left: bool,
    /// Actions that were requested for the deleted flows.
    asked: u64,
}

impl Unread {
    /// Opens an instance's ring; `None` if a running twheel reads it. `history`: the directory of
    /// histories, or `off`.
    pub fn open(reader: &Reader, history: &Path) -> Result<Option<Self>> {
        let pins = reader.pins();
        let Some(held) = pins.hold()? else {
            return Ok(None);
        };
        let tally = Arc::new(UserCounters::open(pins)?);
        let history = (history.as_os_str() != "off")
            .then(|| {
                let directory = Directory::make(history, pins)?;
                Writer::start(&directory, pins, tally.clone(), None, reader.measure())
            })
            .transpose()?;
        let mut unread = Self {
            _held: held,
            pins: pins.clone(),
            ring: Batches::new(Events::open(pins.map("EVENTS")?)?, pins, reader.clock())?,
            history,
            tally,
            left: false,
            asked: 0,
        };
        unread.keep()?;
        // Events that are already in the ring do not belong to this deletion.
        unread.left = unread.ring.events.has_unreleased();
        Ok(Some(unread))
    }

    /// Writes the new events to the history; they stay in the ring.
    fn keep(&mut self) -> Result<()> {
        let Some(batch) = self.ring.read(usize::MAX)? else {
            return Ok(());
        };
        let records = batch.records();
        self.asked += reap::asked(&self.pins, &records)?;
        if let Some(history) = &mut self.history {
            history.add_now(batch);
        }
        // The packet path keeps writing events meanwhile.
        let is_own = |record: &Record| match record {
            Record::Ended(event) => {
                let own = [Reason::Deleted, Reason::Flushed];
                own.iter().any(|reason| event.reason == *reason as u32)
            }
            _ => false,
        };
        self.left |= !records.iter().all(is_own);
        Ok(())
    }

    /// If all events belong to this deletion, they are released. Otherwise they stay in the ring,
    /// for the next run to print and act upon.
    fn end(&mut self) -> Result<()> {
        self.keep()?;
        if !self.left {
            self.ring.events.release_all();
        }
        Ok(())
    }

    /// Releases events, so that the ring has space for more. Actions that were requested for their
    /// flows are not done; the next run counts them.
    fn make_room(&mut self) -> Result<()> {
        self.keep()?;
        self.left = false;
        self.tally
            .add(Counter::ReapAsked, mem::take(&mut self.asked));
        self.ring.events.release_all();
        Ok(())
    }
}

/// Deletes the chosen flows, each on the CPU of its wheel. A flow that had a packet since it was
/// chosen stays. `chosen` is called with the clock's low 32 bits, perhaps twice for a flow. Memory
/// does not grow with the number of flows.
///
/// # Errors
///
/// [`Kind::Other`]: the ring of events stays full because nothing reads it; flows deleted until
/// then stay deleted.
pub fn delete_all(
    reader: &Reader,
    chosen: impl Fn(&Flow, u32) -> bool + Send,
    reason: Reason,
    unread: Option<&mut Unread>,
) -> Result<Tally> {
    let records = reader.table().records();
    let bar = progress::bar("deleting", records.into());
    let flows = reader.table().iter();
    let flows = flows.inspect(|flow| bar.set_position(flow.index.into()));
    delete_of(reader, flows, chosen, reason, unread)
}

/// The same for the flow of one record, whose index is `index`: no other is looked at.
///
/// # Errors
///
/// As for [`delete_all`].
pub fn delete_flow(
    reader: &Reader,
    index: u32,
    chosen: impl Fn(&Flow, u32) -> bool + Send,
    reason: Reason,
    unread: Option<&mut Unread>,
) -> Result<Tally> {
    // It is read after the clock, as all flows are.
    let flow = iter::once_with(|| reader.table().get(index)).flatten();
    delete_of(reader, flow, chosen, reason, unread)
}

fn delete_of(
    reader: &Reader,
    flows: impl Iterator<Item = Flow> + Send,
    chosen: impl Fn(&Flow, u32) -> bool + Send,
    reason: Reason,
    unread: Option<&mut Unread>,
) -> Result<Tally> {
    // In a thread of its own, so that the calling thread keeps its CPU affinity.
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
                deletion.run(flows)?;
                Ok(deletion.tally)
            })
            .join()
            .unwrap_or_else(|_| Err(anyhow!("the deleting thread panicked")))
    })
}

/// The most flows that had a packet just now and wait for the clock to advance.
const YOUNG: usize = 4096;

struct Deletion<'a, C> {
    reader: &'a Reader,
    chosen: C,
    reason: Reason,
    unread: Option<&'a mut Unread>,
    program: Callable,
    tally: Tally,
    /// The batches, by CPU.
    batches: BTreeMap<u32, Vec<Delete>>,
    young: Vec<u32>,
}

impl<C: Fn(&Flow, u32) -> bool> Deletion<'_, C> {
    fn run(&mut self, flows: impl Iterator<Item = Flow>) -> Result<()> {
        let now = self.reader.now()?;
        for flow in flows {
            if !(self.chosen)(&flow, now) {
                continue;
            }
            // Another packet within the current clock unit would leave no trace, so a flow is
            // chosen only once that unit has passed.
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

    /// Deletes flows from the wheel of one CPU.
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
                    // `Elsewhere`: the record holds another flow by now.
                    Some(Deleted::Changed | Deleted::Elsewhere) => tally.changed += 1,
                    Some(Deleted::RingFull | Deleted::Posted) => left.push(*entry),
                    None => {
                        return Err(anyhow!("outcome {}", answer.outcome))
                            .context("invalid result from twheel_delete");
                    }
                }
            }
            if left.len() < batch.len() {
                since = Instant::now();
            } else if since.elapsed() > PATIENCE {
                return Err(Failure::new(
                    Kind::Other,
                    format!(
                        "{} deleted, the others not: the ring of events is full, and nobody \
                         reads it: start `twheel run` on the interface, or remove the instance \
                         with `twheel detach`",
                        several(tally.done, "flow")
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
