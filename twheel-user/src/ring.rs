//! The ring of events, as its reader sees it.
//!
//! What was read stays in the ring until it is *released*, by whoever has done with it what is to be done. A reader that
//! dies before has taken nothing away: the ring is pinned, and so is what it says of where its reader is, so the next one
//! reads all of it again.

use std::{
    os::fd::{AsFd, AsRawFd, BorrowedFd},
    slice,
    sync::{
        Condvar, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
};

use anyhow::{Context, Result};
use aya::maps::MapData;
use memmap2::{MmapOptions, MmapRaw};
use nix::unistd::{SysconfVar, sysconf};
use twheel_common::event::{Event, Record, RtoExpired};

/// `BPF_RINGBUF_BUSY_BIT`: the record is being written.
const BUSY: u32 = 1 << 31;
/// `BPF_RINGBUF_DISCARD_BIT`: the room was given back.
const DISCARD: u32 = 1 << 30;
/// `BPF_RINGBUF_HDR_SZ`.
const HEADER: usize = 8;

/// What was read: of a record that says several things, one.
#[derive(Clone, Copy, Debug)]
pub struct Read {
    /// What it says.
    pub record: Record,
    /// Where it ends, bytes from the ring's beginning, and where nothing else does; it grows for as long as the ring is
    /// there.
    pub end: u64,
    /// Up to where the ring may be [released](Events::release) once this is done with: before the last of a record that
    /// is where the record begins, since its room is given back as a whole.
    pub free: u64,
}

/// The ring of ended flows.
pub struct Events {
    map: MapData,
    /// The page with the reader's position.
    consumer: MmapRaw,
    /// The page with the writers', and then the ring, twice in a row: no record is cut in two.
    producer: MmapRaw,
    page: usize,
    size: usize,
    /// How far it was read.
    at: u64,
}

impl Events {
    /// The map `EVENTS`.
    pub fn open(map: MapData) -> Result<Self> {
        let page = sysconf(SysconfVar::PAGE_SIZE)?.context("pages have no size")? as usize;
        let size = map.info()?.max_entries() as usize;
        let context = "cannot map EVENTS";
        let consumer = MmapOptions::new()
            .len(page)
            .map_raw(map.fd().as_fd().as_raw_fd());
        let producer = MmapOptions::new()
            .offset(page as u64)
            .len(page + 2 * size)
            .map_raw_read_only(map.fd().as_fd().as_raw_fd());
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

    /// Until where its records were released.
    fn position(&self) -> &AtomicU64 {
        // SAFETY: the first word of a page that is mapped as long as `self` lives; the kernel reads and writes it as
        // a whole, and so do we.
        unsafe { &*self.consumer.as_ptr().cast() }
    }

    /// Until where it was released, bytes from the ring's beginning.
    pub fn released(&self) -> u64 {
        self.position().load(Ordering::Acquire)
    }

    /// Bytes it holds.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Reads on, in order, until there are so many or a few more: records are read as a whole. They stay in the ring.
    pub fn read(&mut self, into: &mut Vec<Read>, enough: usize) {
        const { assert!(size_of::<RtoExpired>() < size_of::<Event>()) };
        // So that the end of the last event of a record is the record's.
        const { assert!(size_of::<Event>().is_multiple_of(8)) };
        // Either this sees a new record, or its writer sees how far records were released, and wakes.
        fence(Ordering::SeqCst);
        // SAFETY: as above, of the writers' page.
        let end = unsafe { &*self.producer.as_ptr().cast::<AtomicU64>() };
        let end = end.load(Ordering::Acquire);
        while into.len() < enough && self.at != end {
            let offset = self.page + (self.at as usize & (self.size - 1));
            // SAFETY: positions are multiples of 8 within the ring, which is mapped twice; a header is there, since the
            // writers are further, and its length is the kernel's to change until it is not busy any more.
            let header = unsafe { &*self.producer.as_ptr().add(offset).cast::<AtomicU32>() };
            let header = header.load(Ordering::Acquire);
            if header & BUSY != 0 {
                break;
            }
            let length = (header & !DISCARD) as usize;
            let start = self.at;
            self.at += (HEADER + length).next_multiple_of(8) as u64;
            if header & DISCARD != 0 {
                continue;
            }
            // SAFETY: behind the header, in the same mapping, and no longer written to: nobody has released it.
            let record = unsafe {
                slice::from_raw_parts(self.producer.as_ptr().add(offset + HEADER), length)
            };
            if length == size_of::<RtoExpired>() {
                // SAFETY: the record is that long, and any bytes are a valid `RtoExpired`.
                let event = unsafe { record.as_ptr().cast::<RtoExpired>().read_unaligned() };
                into.push(Read {
                    record: Record::Rto(event),
                    end: self.at,
                    free: self.at,
                });
                continue;
            }
            let (events, _) = record.as_chunks::<{ size_of::<Event>() }>();
            let mut at = start + HEADER as u64;
            for event in events {
                at += size_of::<Event>() as u64;
                into.push(Read {
                    // SAFETY: it is that long, and any bytes are a valid `Event`.
                    record: Record::Ended(unsafe {
                        event.as_ptr().cast::<Event>().read_unaligned()
                    }),
                    end: at,
                    free: if at == self.at { at } else { start },
                });
            }
        }
    }

    /// Gives back the room of all records that end there or before: [`Read::free`]. Returns whether there were any.
    pub fn release(&mut self, end: u64) -> bool {
        // Once, since others may not write it: there is one reader.
        let more = end > self.position().load(Ordering::Relaxed);
        if more {
            self.position().store(end, Ordering::Release);
        }
        more
    }

    /// Whether something was read and is still there.
    pub fn has_unreleased(&self) -> bool {
        self.at > self.released()
    }

    /// Gives back the room of all that was read, and of what was passed over. Returns whether there was any.
    pub fn release_all(&mut self) -> bool {
        self.release(self.at)
    }

    /// Takes all that is there, in order.
    pub fn drain(&mut self, into: &mut Vec<Record>) {
        let mut read = Vec::new();
        self.read(&mut read, usize::MAX);
        into.extend(read.iter().map(|it| it.record));
        self.release_all();
    }

    /// Takes the ends of flows, and passes over the rest.
    pub fn drain_ended(&mut self, into: &mut Vec<Event>) {
        let mut records = Vec::new();
        self.drain(&mut records);
        into.extend(records.into_iter().filter_map(|record| match record {
            Record::Ended(event) => Some(event),
            Record::Rto(_) => None,
        }));
    }
}

impl AsFd for Events {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.map.fd().as_fd()
    }
}

/// What steppers, which fill the ring, and its reader tell one another.
#[derive(Default)]
pub struct Signals {
    filled: tokio::sync::Notify,
    room: Mutex<Room>,
    changed: Condvar,
}

/// Whether there is room.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Room {
    /// How often some was made.
    times: u64,
    /// The reader is gone: there will be none.
    closed: bool,
}

impl Signals {
    fn lock(&self) -> MutexGuard<'_, Room> {
        // A number and a flag are never half changed.
        self.room.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// There is something to read.
    pub fn fill(&self) {
        self.filled.notify_one();
    }

    /// Returns when there may be something to read.
    pub async fn filled(&self) {
        self.filled.notified().await;
    }

    /// Room was made.
    pub fn make_room(&self) {
        self.lock().times += 1;
        self.changed.notify_all();
    }

    /// Nobody reads any more.
    pub fn close(&self) {
        self.lock().closed = true;
        self.changed.notify_all();
    }

    /// To be noted before a step, for [`await_room`](Self::await_room).
    pub fn room(&self) -> Room {
        *self.lock()
    }

    /// Waits until room was made since then. Returns whether somebody still reads.
    pub fn await_room(&self, since: Room) -> bool {
        let room = self.changed.wait_while(self.lock(), |room| {
            !room.closed && room.times == since.times
        });
        !room.unwrap_or_else(PoisonError::into_inner).closed
    }
}
