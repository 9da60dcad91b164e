//! The ring of events, as its reader sees it.
//!
//! A record stays in the ring until the reader *releases* it, after all work on it is done. If a
//! reader dies earlier, no record is lost: the ring is pinned and holds the reader's position, so
//! the next reader reads the unreleased records again.

use std::{
    collections::HashMap,
    os::fd::{AsFd, BorrowedFd},
    sync::{
        Arc, Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU64, Ordering, fence},
    },
    time::SystemTime,
};

use anyhow::{Context, Result};
use aya::maps::MapData;
use nix::unistd::{SysconfVar, sysconf};
use twheel_common::event::{Event, Record, RtoExpired};
use zerocopy::transmute;

use crate::{
    call::Callable,
    clock::{Clock, Wall},
    mapped::{Mapped, ReadOnly},
    model::{Mark, Translation},
    owner::Owner,
    pins::Pins,
};

/// `BPF_RINGBUF_BUSY_BIT`: the record is being written.
const BUSY: u32 = 1 << 31;
/// `BPF_RINGBUF_DISCARD_BIT`: the writer gave the space back; the record is to be skipped.
const DISCARD: u32 = 1 << 30;
/// `BPF_RINGBUF_HDR_SZ`.
const HEADER: usize = 8;

/// One event that was read. A record may hold several.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// The event.
    pub record: Record,
    /// Position where the event ends, in bytes since the ring's beginning. It is unique: no other
    /// event ends there, and positions grow for as long as the ring exists.
    pub end: u64,
    /// Position up to which the ring may be [released](Events::release) once this event is done. A
    /// record's space is released as a whole, so for all but the last event of a record this is the
    /// record's beginning.
    pub free: u64,
}

/// Reads the ring in batches, and knows the time of day of what it reads.
pub struct Batches {
    /// The ring.
    pub events: Events,
    /// The program that tells the data plane's time.
    sweep: Callable,
    wall: Wall,
}

impl Batches {
    /// Of an instance's ring. `clock`: the data plane's.
    ///
    /// # Errors
    ///
    /// The program that tells the time cannot be called.
    pub fn new(events: Events, pins: &Pins, clock: Clock) -> Result<Self> {
        let sweep = pins.callable("twheel_sweep")?;
        Ok(Self {
            wall: Wall::new(clock, sweep.now()?, SystemTime::now()),
            events,
            sweep,
        })
    }

    /// Reads on, as [`Events::read`] does. `None`: there is nothing.
    ///
    /// # Errors
    ///
    /// The time cannot be read.
    pub fn read(&mut self, enough: usize) -> Result<Option<Batch>> {
        let mut events = Vec::new();
        self.events.read(&mut events, enough);
        if events.is_empty() {
            return Ok(None);
        }
        self.wall.follow(self.sweep.now()?, SystemTime::now());
        let wall = self.wall;
        Ok(Some(Batch::new(events, wall)))
    }

    /// The time of day of a time of the data plane's clock.
    pub fn wall(&self) -> Wall {
        self.wall
    }
}

/// Gives numbers to events that the running twheel itself reports, from the same counter as the data
/// plane's events.
pub struct Numbers(Mapped);

impl Numbers {
    /// Opens the map `NUMBER`.
    ///
    /// # Errors
    ///
    /// It cannot be mapped.
    pub fn open(map: &MapData) -> Result<Self> {
        let word = Mapped::new(map.fd(), size_of::<u64>()).context("cannot map NUMBER")?;
        Ok(Self(word))
    }

    /// The next number.
    pub fn next(&self) -> u64 {
        self.0.word(0).fetch_add(1, Ordering::Relaxed) + 1
    }
}

/// Events that were read together.
#[derive(Clone, Debug)]
pub struct Batch {
    /// The events, in order.
    pub events: Vec<Read>,
    /// The time of day of a time of theirs.
    pub wall: Wall,
    /// The translations of their flows, by the numbers of events, as far as they were looked up.
    pub translations: HashMap<u64, Translation>,
    /// The owners of their sockets, likewise.
    pub owners: HashMap<u64, Arc<Owner>>,
}

impl Batch {
    /// Events of which nothing else was looked up.
    pub fn new(events: Vec<Read>, wall: Wall) -> Self {
        Self {
            events,
            wall,
            translations: HashMap::new(),
            owners: HashMap::new(),
        }
    }

    /// The translation of an event's flow.
    pub fn nat(&self, record: &Record) -> Option<Translation> {
        self.translations.get(&self.mark(record).number).copied()
    }

    /// The records of the events.
    pub fn records(&self) -> Vec<Record> {
        self.events.iter().map(|read| read.record).collect()
    }

    /// An event's number, and the time of day at which it was decided.
    pub fn mark(&self, record: &Record) -> Mark {
        let (number, at) = match record {
            Record::Begun(event) | Record::Updated(event) | Record::Ended(event) => {
                (event.number, event.at)
            }
            Record::Rto(event) => (event.number, event.at),
        };
        Mark {
            number,
            time: self.wall.time(at as u32),
        }
    }

    /// The owner of the local socket of an event's flow.
    pub fn owner(&self, record: &Record) -> Option<Arc<Owner>> {
        self.owners.get(&self.mark(record).number).cloned()
    }

    /// Position where the last event ends; `None` if there is none.
    pub fn end(&self) -> Option<u64> {
        self.events.last().map(|read| read.end)
    }
}

/// The ring of events.
pub struct Events {
    map: MapData,
    /// The page with the reader's position.
    consumer: Mapped,
    /// The page with the writers' position, then the ring's data, mapped twice in a row, so that
    /// each record is contiguous.
    producer: ReadOnly,
    page: usize,
    size: usize,
    /// Position up to which the ring was read.
    at: u64,
}

impl Events {
    /// Opens the map `EVENTS`.
    pub fn open(map: MapData) -> Result<Self> {
        let page = sysconf(SysconfVar::PAGE_SIZE)?.context("cannot read the page size")? as usize;
        let size = map.info()?.max_entries() as usize;
        let context = "cannot map EVENTS";
        let consumer = Mapped::new(map.fd(), page);
        let producer = ReadOnly::new(map.fd(), page as u64, page + 2 * size);
        let mut events = Self {
            consumer: consumer.context(context)?,
            producer: producer.context(context)?,
            map,
            page,
            size,
            at: 0,
        };
        events.at = events.released();
        Ok(events)
    }

    /// The position up to which records are released.
    fn position(&self) -> &AtomicU64 {
        self.consumer.word(0)
    }

    /// The position up to which records are released, in bytes since the ring's beginning.
    pub fn released(&self) -> u64 {
        self.position().load(Ordering::Acquire)
    }

    /// The ring's size in bytes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Reads on, in order, until `into` holds `enough` events, or a few more because records are
    /// read as a whole. The events stay in the ring.
    pub fn read(&mut self, into: &mut Vec<Read>, enough: usize) {
        const { assert!(size_of::<RtoExpired>() < size_of::<Event>()) };
        // So the last event of a record ends where the record ends.
        const { assert!(size_of::<Event>().is_multiple_of(8)) };
        // Either this thread sees a new record, or its writer sees the released position and wakes
        // the reader.
        fence(Ordering::SeqCst);
        let end = self.producer.acquire(0);
        while into.len() < enough && self.at != end {
            // Positions are multiples of 8 within the ring, which is mapped twice.
            let offset = self.page + (self.at as usize & (self.size - 1));
            // A header is there, since the writers' position is further on. The kernel may change
            // its length, the first half, until it is no longer busy.
            let [header, _]: [u32; 2] = transmute!(self.producer.acquire(offset / 8));
            if header & BUSY != 0 {
                break;
            }
            let length = (header & !DISCARD) as usize;
            let start = self.at;
            self.at += (HEADER + length).next_multiple_of(8) as u64;
            if header & DISCARD != 0 {
                continue;
            }
            // The record is no longer written to, because it is not released.
            let record = (offset + HEADER) / 8;
            if length == size_of::<RtoExpired>() {
                let event = self.producer.copy(record);
                into.extend(event.map(|event| Read {
                    record: Record::Rto(event),
                    end: self.at,
                    free: self.at,
                }));
                continue;
            }
            let mut at = start + HEADER as u64;
            for number in 0..length / size_of::<Event>() {
                let event = self.producer.copy(record + number * size_of::<Event>() / 8);
                at += size_of::<Event>() as u64;
                into.extend(event.map(|event: Event| Read {
                    record: event.into(),
                    end: at,
                    free: if at == self.at { at } else { start },
                }));
            }
        }
    }

    /// Releases all records that end at or before `end`, a [`Read::free`]. Returns whether there
    /// were any.
    pub fn release(&mut self, end: u64) -> bool {
        // One load is enough: there is one reader, and only the reader writes the position.
        let more = end > self.position().load(Ordering::Relaxed);
        if more {
            self.position().store(end, Ordering::Release);
        }
        more
    }

    /// Whether records were read and not yet released.
    pub fn has_unreleased(&self) -> bool {
        self.at > self.released()
    }

    /// Releases all records that were read, and those that were skipped. Returns whether there were
    /// any.
    pub fn release_all(&mut self) -> bool {
        self.release(self.at)
    }

    /// Reads and releases all records, in order.
    pub fn drain(&mut self, into: &mut Vec<Record>) {
        let mut read = Vec::new();
        self.read(&mut read, usize::MAX);
        into.extend(read.iter().map(|it| it.record));
        self.release_all();
    }

    /// Like [`drain`](Self::drain), for the ends of flows alone; other records are released and
    /// dropped.
    pub fn drain_ended(&mut self, into: &mut Vec<Event>) {
        let mut records = Vec::new();
        self.drain(&mut records);
        into.extend(records.into_iter().filter_map(|record| match record {
            Record::Ended(event) => Some(event),
            _ => None,
        }));
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.fd().as_fd()
    }
}

/// Signals between the steppers, which fill the ring, and its reader.
#[derive(Default)]
pub struct Signals {
    filled: tokio::sync::Notify,
    room: Mutex<Room>,
    changed: Condvar,
}

/// The state of the ring's free space, as the reader tells it.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// How often the reader has released records.
    times: u64,
    /// The reader has ended and will release no more.
    closed: bool,
}

impl Signals {
    fn lock(&self) -> MutexGuard<'_, Room> {
        // A panic cannot leave this half changed: it is a number and a flag.
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells the reader that there are events.
    pub fn fill(&self) {
        self.filled.notify_one();
    }

    /// Returns when there may be events to read.
    pub async fn filled(&self) {
        self.filled.notified().await;
    }

    /// Tells the steppers that records were released.
    pub fn make_room(&self) {
        self.lock().times += 1;
        self.changed.notify_all();
    }

    /// Tells the steppers that the reader has ended.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// The state before a step, to pass to [`await_room`](Self::await_room) after it.
    pub fn room(&self) -> Room {
        *self.lock()
    }

    /// Waits until the reader has released records since `since`. Returns whether there still is a
    /// reader.
    pub fn await_room(&self, since: Room) -> bool {
        let room = self.changed.wait_while(self.lock(), |room| {
            !room.closed && room.times == since.times
        });
        !room.unwrap_or_else(PoisonError::into_inner).closed
    }
}
