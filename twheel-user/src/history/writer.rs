//! Writes a history, on a thread of its own, so that a slow disk delays neither wheels nor output.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread::{self, JoinHandle},
    time::{Duration, SystemTime},
};

use anyhow::{Context, Result};
use tokio::sync::watch;
use twheel_common::counter::Counter;

use super::{
    directory::{Directory, note_interface, remove_stale},
    format::{HOST, Header, IFACE, INSTANCE, NAT, OWNER, SEED, ZONE},
    log::{Entry, Log},
    record::{Known, Own, known, known_in, of_nat, of_own, of_owner, of_ring, since_1970},
};
use crate::{
    data_plane::{self, UserCounters},
    identity::Identity,
    maps,
    model::{Mark, Measure},
    names::Names,
    pins::Pins,
    ring::{Batch, Events},
};

/// Most batches that wait for the disk. If the disk falls further behind, events are missing from
/// the history, and are counted; neither wheels nor output wait.
const BATCHES: usize = 16;
/// The longest time until what was written is synced to the disk.
const SYNC: Duration = Duration::from_secs(1);
/// How often a thread that has nothing else to do checks whether its batch was written.
const WRITING: Duration = Duration::from_micros(200);
/// Writes a history, on a thread of its own.
pub struct Writer {
    /// `None` once the writer is to end.
    batches: Option<SyncSender<Message>>,
    written: watch::Receiver<u64>,
    thread: Option<JoinHandle<()>>,
    lost: Arc<Lost>,
    directory: PathBuf,
}

/// What the thread is to write.
enum Message {
    /// Events of the ring.
    Batch(Arc<Batch>),
    /// Events of the running twheel.
    Own(Vec<(Mark, Own)>),
}

/// Events that are missing from the history.
struct Lost {
    /// Those lost in the time of this writer.
    number: AtomicU64,
    tally: Arc<UserCounters>,
}

impl Lost {
    fn add(&self, more: u64) {
        if more > 0 {
            self.number.fetch_add(more, Ordering::Relaxed);
            self.tally.add(Counter::HistoryLost, more);
        }
    }

    fn get(&self) -> u64 {
        self.number.load(Ordering::Relaxed)
    }
}

impl Writer {
    /// Continues an instance's history, or begins one. `bytes`: its maximum size, at least
    /// [`LEAST_BYTES`](super::LEAST_BYTES); `None`: its present size, and at least
    /// [`DEFAULT_BYTES`](super::DEFAULT_BYTES).
    pub fn start(
        directory: &Directory,
        pins: &Pins,
        tally: Arc<UserCounters>,
        bytes: Option<u64>,
        measure: Measure,
    ) -> Result<Self> {
        let identity = identity_names(&Identity::new(pins, &data_plane::meta(pins)?));
        let header = Header {
            unit_ns: measure.clock.unit().subsec_nanos(),
            one_way: measure.one_way,
        };
        remove_stale(&directory.all, SystemTime::now())?;
        let ring = ring_of(pins)?;
        let mut log = Log::open(directory.own.clone(), header, bytes, ring, identity)?;
        let events = Events::open(pins.map("EVENTS")?)?;
        let missing = log.adopt(events.released(), tally.get(Counter::HistoryLost)?);
        if missing > 0 {
            say!(
                "twheel: up to {missing} events are not in the history: an earlier run kept no \
                 history, or was killed while the disk was slow"
            );
        }
        let lost = Arc::new(Lost {
            number: AtomicU64::new(0),
            tally,
        });
        lost.add(missing);
        let (batches, inbox) = sync_channel(BATCHES);
        let (tell, written) = watch::channel(0);
        let keeper = Keeper {
            log,
            inbox,
            tell,
            names: Names::open(&maps::pinned(pins))?,
            lost: lost.clone(),
            failing: false,
        };
        let thread = thread::Builder::new()
            .name("twheel-history".to_owned())
            .spawn(move || keeper.run(&events))
            .context("cannot start the history's thread")?;
        Ok(Self {
            batches: Some(batches),
            written,
            thread: Some(thread),
            lost,
            directory: directory.own.clone(),
        })
    }

    /// Queues a batch. Once [`written`](Self::written) has reached its end it is in the file, which
    /// outlives this process.
    pub fn add(&self, batch: &Arc<Batch>) {
        let Some(batches) = &self.batches else {
            return;
        };
        if batches.try_send(Message::Batch(batch.clone())).is_err() {
            self.lost.add(batch.events.len() as u64);
        }
    }

    /// Queues events of the running twheel.
    pub fn add_own(&self, events: Vec<(Mark, Own)>) {
        let count = events.len() as u64;
        if let Some(batches) = &self.batches
            && batches.try_send(Message::Own(events)).is_err()
        {
            self.lost.add(count);
        }
    }

    /// Queues a batch and waits until it is in the file.
    pub fn add_now(&mut self, batch: Batch) {
        let (Some(batches), Some(end)) = (&self.batches, batch.end()) else {
            return;
        };
        // The thread runs until it is told to end.
        let _ = batches.send(Message::Batch(Arc::new(batch)));
        while *self.written.borrow_and_update() < end {
            thread::sleep(WRITING);
        }
    }

    /// Where in the ring the latest event ends that is in the file, or is lost.
    pub fn written(&self) -> watch::Receiver<u64> {
        self.written.clone()
    }

    /// Notes that the history has flows of this interface, so that it is found by that name.
    pub fn note_interface(&self, interface: &str) {
        if let Err(error) = note_interface(&self.directory, interface) {
            say!(
                "twheel: cannot note in {} that it has flows of {interface}: {error}",
                self.directory.display()
            );
        }
    }

    /// Writes what is left and ends the thread. Returns how many events are missing from the
    /// history.
    pub fn end(self) -> u64 {
        let lost = self.lost.clone();
        drop(self);
        lost.get()
    }
}

/// Writes what is left.
impl Drop for Writer {
    fn drop(&mut self) {
        drop(self.batches.take());
        if let Some(thread) = self.thread.take() {
            // A panic of the thread was reported when it occurred.
            let _ = thread.join();
        }
    }
}

/// The thread that writes.
struct Keeper {
    log: Log,
    inbox: Receiver<Message>,
    /// Position up to which every event is in the file, or lost.
    tell: watch::Sender<u64>,
    names: Names,
    lost: Arc<Lost>,
    /// Writing fails; the message was printed.
    failing: bool,
}

impl Keeper {
    /// Runs until nobody can add batches any more.
    fn run(mut self, events: &Events) {
        // Write again after an error: a disk that was full may have free space again.
        while let Err(error) = self.write() {
            self.lost.add(self.log.recover());
            // A lost event counts as done, so that nobody waits for it.
            self.tell.send_replace(self.log.end);
            if !self.failing {
                say!(
                    "twheel: {error:#}: until this works again, ended flows are missing from the \
                     history"
                );
            }
            self.failing = true;
        }
        let log = &mut self.log;
        // Batches for which the disk was too slow may have left the ring. If this record cannot be
        // written, the next writer counts them again.
        log.end = log.end.max(events.released());
        log.note(self.lost.get());
        let _ = log.flush().and_then(|()| log.sync());
    }

    fn write(&mut self) -> Result<()> {
        // The record with which a writer begins.
        let mut dirty = !self.log.buffer.is_empty();
        self.log.flush()?;
        loop {
            let message = if dirty {
                match self.inbox.recv_timeout(SYNC) {
                    Ok(message) => message,
                    Err(RecvTimeoutError::Timeout) => {
                        self.log.sync()?;
                        dirty = false;
                        continue;
                    }
                    Err(RecvTimeoutError::Disconnected) => return self.log.sync(),
                }
            } else {
                match self.inbox.recv() {
                    Ok(message) => message,
                    Err(_) => return Ok(()),
                }
            };
            match message {
                Message::Batch(batch) => {
                    dirty |= self.append(&batch)?;
                    self.tell.send_replace(self.log.end);
                }
                Message::Own(events) => {
                    self.append_own(&events)?;
                    dirty = true;
                }
            }
        }
    }

    /// Writes those events of a batch that are not in the history. Returns whether there were any.
    fn append(&mut self, batch: &Batch) -> Result<bool> {
        let log = &mut self.log;
        log.reach(batch.end().unwrap_or(0));
        let events: Vec<_> = batch.events.iter().filter(|it| !log.has(it.end)).collect();
        log.wanted = events.len() as u64;
        if events.is_empty() {
            return Ok(false);
        }
        log.note_more(self.lost.get());
        for read in events {
            let when = since_1970(batch.mark(&read.record).time);
            let (kind, body) = of_ring(&read.record);
            let names = named(&self.names, known_in(&read.record))?;
            let nat = batch.nat(&read.record);
            let owner = batch.owner(&read.record);
            let more: Vec<_> = [
                nat.map(|nat| (NAT, of_nat(&nat))),
                owner.map(|owner| (OWNER, of_owner(&owner))),
            ]
            .into_iter()
            .flatten()
            .collect();
            log.append(&Entry {
                when,
                kind,
                body: &body,
                end: read.end,
                names: &names,
                more: &more,
            })?;
        }
        log.flush()?;
        self.failing = false;
        Ok(true)
    }

    /// Writes events of the running twheel.
    fn append_own(&mut self, events: &[(Mark, Own)]) -> Result<()> {
        self.log.wanted = events.len() as u64;
        for (mark, own) in events {
            let names = match own {
                Own::Reaped(reaped, _) => named(&self.names, known(&reaped.event))?,
                Own::Run(_) => Vec::new(),
            };
            let (kind, body) = of_own(own, mark.number);
            let (when, end) = (since_1970(mark.time), self.log.appended());
            self.log.append(&Entry {
                when,
                kind,
                body: &body,
                end,
                names: &names,
                more: &[],
            })?;
        }
        self.log.flush()?;
        self.failing = false;
        Ok(())
    }
}

/// A number that tells an instance's ring of events from the rings of earlier instances of its
/// name: each table has other hash keys.
fn ring_of(pins: &Pins) -> Result<u32> {
    let mut checksum = crc32fast::Hasher::new();
    for key in data_plane::meta(pins)?.hash.keys {
        checksum.update(&key.to_ne_bytes());
    }
    Ok(checksum.finalize())
}

/// The names that belong to a flow, with their numbers in [`NAME`](super::format::NAME).
fn named(names: &Names, (rule, point, zone): Known) -> Result<Vec<(u32, String)>> {
    let mut named = Vec::new();
    let mut add = |number: u32, name: Option<String>| named.extend(name.map(|name| (number, name)));
    add(rule.into(), names.rule(rule)?);
    let place = point.interface();
    add(IFACE | place, names.iface(place)?);
    if zone != 0 {
        add(ZONE | u32::from(zone), Some(names.zone(zone)?.to_string()));
    }
    Ok(named)
}

/// What a segment has of an identity.
pub(super) fn identity_names(identity: &Identity) -> Vec<(u32, String)> {
    vec![
        (HOST, identity.host.clone()),
        (INSTANCE, identity.instance.clone()),
        (SEED, format!("{:x}", identity.seed)),
    ]
}
