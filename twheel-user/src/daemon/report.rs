//! Takes events from the ring to the history, the reaper, the metrics and standard output, in this
//! order, and only then releases them from the ring. So no event is lost if the process is killed
//! on the way.

use std::{
    cell::RefCell,
    collections::{BTreeMap, VecDeque},
    rc::Rc,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use tokio::sync::watch;
use twheel_common::{
    counter::{Counter, Counters},
    event::{Event, Reason, Record},
};

use super::{
    life::{End, Life, Outlet},
    stations::Stations,
};
use crate::{
    action::{Action, News, Outcome},
    history::Own,
    model::{Ended, EventKind, FlowEvent, Happened, KnownAs, Mark, Measure, RunEvent},
    output::{Output, several},
    reap,
    ring::{Batch, Signals},
};

/// Events that are read from the ring at a time.
const BATCH: usize = 512;
/// Batches that may wait for the history. While there are as many, no more are read.
const BATCHES: usize = 8;
/// The most that a write to a pipe writes as a whole (`PIPE_BUF`). So lines in a pipe are never
/// cut.
const PIPE: usize = 4096;
/// How long events wait for a slow disk.
const SLOW: Duration = Duration::from_secs(1);
/// How many causes of failures the summary lists separately.
const REASONS: usize = 16;

/// What the run is to tell of itself, until it is told.
pub type Notes = Rc<RefCell<Vec<RunEvent>>>;

/// Takes events from station to station, and counts them.
pub struct Report<S> {
    /// The stations.
    pub stations: S,
    signals: Arc<Signals>,
    unwritten: Unwritten,
    output: Box<dyn Output>,
    /// The kinds of events that are written.
    kinds: Vec<EventKind>,
    notes: Notes,
    measure: Measure,
    life: Life,
    outlet: Outlet,
    ended: BTreeMap<(Reason, &'static str), u64>,
    /// Expired retransmission timers.
    rtos: u64,
    /// Causes of failed actions, and how often each occurred.
    failures: BTreeMap<String, u64>,
}

/// The events between the ring and standard output.
struct Unwritten {
    /// Batches that were given to the history and not yet written to standard output, and when each
    /// was read.
    batches: VecDeque<(Arc<Batch>, Instant)>,
    /// How far the history has come.
    kept: Option<watch::Receiver<u64>>,
    /// Where the last event ends that was read.
    read: u64,
    /// The history does not keep up. Events do not wait for it until it has caught up.
    behind: bool,
}

impl Unwritten {
    /// Reads the next batch.
    fn read(&mut self, stations: &mut impl Stations) -> Result<Option<Arc<Batch>>> {
        if self.batches.len() == BATCHES {
            return Ok(None);
        }
        self.behind &= !self.has_kept(self.read);
        let Some(batch) = stations.read(BATCH)?.map(Arc::new) else {
            return Ok(None);
        };
        self.read = batch.end().unwrap_or(self.read);
        self.batches.push_back((batch.clone(), Instant::now()));
        Ok(Some(batch))
    }

    /// Whether the history has come as far as `end`, or there is no history.
    fn has_kept(&self, end: u64) -> bool {
        let kept = self.kept.as_ref();
        kept.is_none_or(|kept| *kept.borrow() >= end)
    }

    /// Takes the first batch if the history has it, or if it has waited long enough.
    fn ready(&mut self) -> Option<Arc<Batch>> {
        let (batch, since) = self.batches.front()?;
        let (end, since) = (batch.end()?, *since);
        let is_kept = self.has_kept(end);
        self.behind |= !is_kept && since.elapsed() >= SLOW;
        if !is_kept && !self.behind {
            return None;
        }
        self.batches.pop_front().map(|(batch, _)| batch)
    }

    /// Returns when the history has advanced, or the first batch has waited long enough. Never
    /// returns if no batch waits for a history.
    async fn wait(&mut self) {
        let (Some((_, since)), Some(kept)) = (self.batches.front(), &mut self.kept) else {
            return std::future::pending().await;
        };
        // `changed` fails only if the history's thread has ended, and that outlives this.
        let _ = tokio::time::timeout_at((*since + SLOW).into(), kept.changed()).await;
    }
}

/// How events are written, and which.
pub struct Printer {
    /// The format.
    pub output: Box<dyn Output>,
    /// The kinds that are written.
    pub kinds: Vec<EventKind>,
    /// What the run is to tell of itself.
    pub notes: Notes,
}

/// An event that can be printed, and the names that belong to its flow.
enum Printable {
    /// Index among the flows that have ended.
    Ended(usize),
    /// Of a flow that lives on.
    Live(Box<(Mark, FlowEvent, KnownAs)>),
}

impl<S: Stations> Report<S> {
    /// For a run that has come as far as `life`.
    pub fn new(
        stations: S,
        printer: Printer,
        measure: Measure,
        life: Life,
        signals: Arc<Signals>,
    ) -> Self {
        let Printer {
            output,
            kinds,
            notes,
        } = printer;
        Self {
            unwritten: Unwritten {
                batches: VecDeque::new(),
                kept: stations.kept(),
                read: 0,
                behind: false,
            },
            stations,
            signals,
            output,
            kinds,
            notes,
            measure,
            life,
            outlet: Outlet::Open,
            ended: BTreeMap::new(),
            rtos: 0,
            failures: BTreeMap::new(),
        }
    }

    /// Whether nobody reads the output any more.
    pub fn is_closed(&self) -> bool {
        self.outlet != Outlet::Open
    }

    /// Returns when the history has advanced, or a batch has waited long enough for it; never, if
    /// none waits.
    pub async fn wait(&mut self) {
        self.unwritten.wait().await;
    }

    /// Takes the waiting events one step further. Returns whether some are still on their way.
    pub fn go_on(&mut self) -> Result<bool> {
        if self.outlet == Outlet::Left {
            return Ok(false);
        }
        let mut more = false;
        if let Some(batch) = self.unwritten.read(&mut self.stations)? {
            self.stations.keep(&batch);
            more = true;
        }
        while let Some(batch) = self.unwritten.ready() {
            self.print(&batch)?;
            // Once a batch: a stepper that is woken after each write finds room for a few events.
            self.signals.make_room();
            more = true;
        }
        if more {
            // Come back after the other sources of events were looked at.
            self.signals.fill();
        } else if self.unwritten.batches.is_empty() {
            // Records that were skipped are released, too. A writer wakes the reader only if all
            // records are released, so look once more after this.
            if self.stations.release_all() {
                self.signals.make_room();
                self.signals.fill();
            }
        }
        Ok(more || !self.unwritten.batches.is_empty())
    }

    /// Gives events to the reaper, the metrics and standard output, and releases them as they are
    /// written.
    fn print(&mut self, batch: &Batch) -> Result<()> {
        // First: if the process is killed after this, the next one repeats it. (The reaper's queue
        // is lost.)
        let records = batch.records();
        self.stations.reap(&records)?;
        let mut ended = Vec::new();
        let mut said = Vec::with_capacity(records.len());
        for record in &records {
            said.push(self.take(batch, record, &mut ended)?);
        }
        // How many ended flows the metrics have counted, and how many of them have a line in `out`.
        let (mut counted, mut written) = (0, 0);
        let (mut out, mut line) = (Vec::with_capacity(PIPE), Vec::new());
        // How many bytes of `out` belong to whole records, and where the last of those records
        // ends.
        let mut whole = None;
        for (read, said) in batch.events.iter().zip(said) {
            line.clear();
            let at = match said {
                Some(Printable::Ended(at)) => {
                    let (mark, _, ended, known_as) = &ended[at];
                    if self.kinds.contains(&EventKind::End) {
                        self.output
                            .ended(*mark, ended, known_as.named(), &mut line)?;
                    }
                    Some(at)
                }
                Some(Printable::Live(said)) => {
                    let (mark, event, known_as) = *said;
                    if self.kinds.contains(&event.kind()) {
                        self.output
                            .flow(mark, &event, known_as.named(), &mut line)?;
                    }
                    None
                }
                None => continue,
            };
            while out.len() + line.len() > PIPE && !out.is_empty() {
                self.stations.count(&ended[counted..written]);
                counted = written;
                self.write(&mut out, whole.take())?;
            }
            out.extend_from_slice(&line);
            written = at.map_or(written, |at| at + 1);
            if read.free == read.end {
                whole = Some((out.len(), read.end));
            }
        }
        self.stations.count(&ended[counted..]);
        self.write(&mut out, whole)
    }

    /// Counts an event; `None`: it cannot be read.
    fn take<'a>(
        &mut self,
        batch: &Batch,
        record: &'a Record,
        all: &mut Vec<(Mark, &'a Event, Ended, KnownAs)>,
    ) -> Result<Option<Printable>> {
        let Some(event) = FlowEvent::new(record, self.measure) else {
            log::error!("invalid event: {record:?}");
            return Ok(None);
        };
        let mark = batch.mark(record);
        let known_as = KnownAs {
            nat: batch.nat(record),
            owner: batch.owner(record),
            ..self.stations.known_as(event.flow())?
        };
        if let (Record::Ended(raw), FlowEvent::Ended(ended)) = (record, event) {
            let count = self.ended.entry((ended.reason, ended.flow.state));
            *count.or_default() += 1;
            all.push((mark, raw, ended, known_as));
            return Ok(Some(Printable::Ended(all.len() - 1)));
        }
        self.rtos += u64::from(matches!(event, FlowEvent::Rto(_)));
        Ok(Some(Printable::Live(Box::new((mark, event, known_as)))))
    }

    /// Writes the lines of whole records, and releases these. If a single record is longer than a
    /// pipe takes, writes the lines so far.
    fn write(&mut self, out: &mut Vec<u8>, whole: Option<(usize, u64)>) -> Result<()> {
        let length = whole.map_or(out.len(), |(length, _)| length);
        self.say(&out[..length])?;
        out.drain(..length);
        // If the output's reader has gone, records stay in the ring, for the next run.
        if let Some((_, end)) = whole
            && self.outlet != Outlet::Left
        {
            self.stations.release(end);
        }
        Ok(())
    }

    /// Writes lines, if the output is read, and notes if its reader has gone.
    fn say(&mut self, lines: &[u8]) -> Result<()> {
        if self.is_closed() {
            return Ok(());
        }
        let Err(error) = self.stations.print(lines) else {
            return Ok(());
        };
        let (outlet, end) = Outlet::after(&error, self.life);
        self.outlet = outlet;
        if outlet == Outlet::Left {
            // A stepper that waits for space in the ring would wait for ever.
            self.signals.close();
        }
        match end {
            End::Good => Ok(()),
            End::Failed => Err(error).context("cannot write to standard output"),
        }
    }

    /// Prints the outcomes of actions.
    pub fn reaped(&mut self, results: &mut Vec<News>) -> Result<()> {
        let Measure { clock, one_way } = self.measure;
        let (mut lines, mut own) = (Vec::new(), Vec::new());
        for news in results.drain(..) {
            let News::Reaped(reaped) = news else {
                self.note(RunEvent::new(Happened::Paused));
                continue;
            };
            let Some(ended) = Ended::new(&reaped.event, clock, one_way) else {
                continue;
            };
            if let Some(error) = &reaped.error {
                let more = "for other reasons";
                let is_known = self.failures.contains_key(error) || self.failures.len() < REASONS;
                let why = if is_known { error } else { more };
                *self.failures.entry(why.to_owned()).or_default() += 1;
            }
            let known_as = self.stations.known_as(&ended.flow)?;
            let (mark, end) = (self.stations.mark(), self.stations.mark_of(&reaped.event));
            own.push((mark, Own::Reaped(reaped.clone(), end.time)));
            if !self.kinds.contains(&EventKind::Reap) {
                continue;
            }
            self.output
                .reaped(mark, (end, &ended, &reaped), known_as.named(), &mut lines)?;
        }
        self.stations.keep_own(own);
        match lines.is_empty() {
            true => Ok(()),
            false => self.say(&lines),
        }
    }

    /// Notes something to [tell](Self::tell).
    pub fn note(&self, event: RunEvent) {
        self.notes.borrow_mut().push(event);
    }

    /// Writes what the run is to tell of itself.
    pub fn tell(&mut self) -> Result<()> {
        let events: Vec<_> = self.notes.borrow_mut().drain(..).collect();
        let (mut lines, mut own) = (Vec::new(), Vec::new());
        for event in events {
            let mark = self.stations.mark();
            own.push((mark, Own::Run(event.clone())));
            if self.kinds.contains(&EventKind::Run) {
                self.output.run(mark, &event, &mut lines)?;
            }
        }
        self.stations.keep_own(own);
        match lines.is_empty() {
            true => Ok(()),
            false => self.say(&lines),
        }
    }

    /// Writes the event that sums up the run, its last one.
    pub fn tell_summary(&mut self, counters: &Counters) -> Result<()> {
        self.note(RunEvent {
            flows: Some(counters.live()),
            ended: Some(self.ended.values().sum()),
            lost: Some(lost_of(counters)),
            ..RunEvent::new(Happened::Summary)
        });
        self.tell()
    }

    /// Prints the summary at the end. `lost`: events that the history has lost.
    pub fn summary(&self, counters: &Counters, reaped: Option<&reap::ReaperState>, lost: u64) {
        let total: u64 = self.ended.values().sum();
        say!("{} ended, {} live", several(total, "flow"), counters.live());
        let touched = counters.get(Counter::Touched);
        say!("  {touched:>8}  {}", Counter::Touched.meaning());
        if self.rtos > 0 {
            say!(
                "  {:>8}  {}, {} stalled",
                self.rtos,
                Counter::RtoExpired.meaning(),
                several(counters.get(Counter::Stalled), "flow")
            );
        }
        for ((reason, state), count) in &self.ended {
            say!("  {count:>8}  {} in {state}", reason.name());
        }
        for counter in [
            Counter::OverQuota,
            Counter::TableFull,
            Counter::WindowFull,
            Counter::SameWay,
            Counter::Raced,
            Counter::EventsLost,
            Counter::Orphans,
        ] {
            if counters.get(counter) > 0 {
                say!("  {:>8}  {}", counters.get(counter), counter.meaning());
            }
        }
        for action in Action::ALL {
            for outcome in Outcome::ALL {
                let count = reaped.map_or(0, |reaped| reaped.count(action, *outcome));
                if count > 0 {
                    say!("  {count:>8}  {}: {}", action.name(), outcome.meaning());
                }
            }
        }
        for (why, count) in &self.failures {
            say!("  {count:>8}  failed: {why}");
        }
        if lost > 0 {
            say!("  {lost:>8}  events missing from the history: the disk was too slow or full");
        }
    }
}

/// The events that an instance has lost, by the ring and by the history.
pub fn lost_of(counters: &Counters) -> u64 {
    counters.get(Counter::EventsLost) + counters.get(Counter::HistoryLost)
}

#[cfg(test)]
mod tests;
