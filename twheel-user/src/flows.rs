//! Reads the flow table while the data plane writes it. It reads through memory mappings: without a
//! system call per flow, and without holding up the data plane.
//!
//! The maps are mapped as a whole. The mapped pages are the kernel's own, so the reader's memory
//! does not grow with the table.

use std::{
    marker::PhantomData,
    mem::offset_of,
    ops::Range,
    os::fd::{AsFd, OwnedFd},
    sync::{
        OnceLock,
        atomic::{Ordering, fence},
    },
};

use anyhow::{Context, Result, anyhow, ensure};
use aya::maps::{Map, MapInfo};
use twheel_common::{
    event::Reason,
    flow::{Account, FlowKey, Word},
    offload::MARKS,
    point::Point,
    rto::{Side, Timers},
    step::Delete,
    table::{self, Changed, Details, Extras, Hash, LINE, Line, Reads, has_fingerprint},
    wheel::Link,
};
use zerocopy::{FromBytes, IntoBytes, transmute};

use crate::{mapped::ReadOnly, model::Timing, pins::Pins};

/// The flow table.
pub struct Flows {
    lines: Values<Line>,
    details: Values<Details>,
    extras: Values<Extras>,
    accounts: Option<Values<Account>>,
    timers: Option<Values<Timers>>,
    count: u32,
    mapped: OnceLock<Result<Maps, String>>,
}

/// A flow, as it was at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// The index of its record in the table.
    pub index: u32,
    /// Its key.
    pub key: FlowKey,
    /// The time of its latest packet, its generation, and its state bits.
    pub word: Word,
    /// Low 32 bits of the clock at its first packet, in units.
    pub created: u32,
    /// The CPU whose wheel it is on.
    pub cpu: u32,
    /// The rule that it matches; 0 for none.
    pub rule: u16,
    /// Whether its first packet was outgoing.
    pub is_outgoing: bool,
    /// Where its initiator's packets are counted; has no meaning if there is only one interface.
    pub point: Point,
    /// Where it is seen, as far as that is known; has no meaning likewise.
    pub seen_at: Point,
    /// What each side has sent, the key's low endpoint first; `None` if that is not counted.
    pub account: Option<Account>,
    /// What the retransmission timers know of each side, in the same order; `None` if there are no
    /// timers.
    pub timing: Option<[Timing; 2]>,
}

impl Flow {
    /// The entry that deletes this flow unless it gets a packet first. (A packet within the same
    /// clock unit as the flow's latest one does not show. A caller to whom that matters chooses
    /// flows that have been idle for at least one unit.)
    pub fn delete(&self, reason: Reason) -> Delete {
        Delete {
            index: self.index,
            outcome: reason as u32,
            word: self.word.0,
        }
    }
}

impl Flows {
    /// Opens an instance's table by its pins.
    pub fn pinned(pins: &Pins) -> Result<Self> {
        let open = |name| anyhow::Ok(Map::Array(pins.map(name)?));
        let mut flows = Self::map(&open("FLOWS")?, &open("DETAILS")?, &open("EXTRAS")?)?;
        // A map with a single value means that this is not recorded.
        let accounts = Values::new(&open("ACCOUNTS")?)?;
        flows.accounts = (accounts.count >= flows.count).then_some(accounts);
        let timers = Values::new(&open("RTOS")?)?;
        flows.timers = (timers.count >= flows.count).then_some(timers);
        Ok(flows)
    }

    /// A table without accounts and timers: the maps `FLOWS`, `DETAILS` and `EXTRAS`.
    pub fn map(flows: &Map, details: &Map, extras: &Map) -> Result<Self> {
        let lines = Values::new(flows).context("cannot read FLOWS")?;
        Ok(Self {
            count: lines.count * LINE,
            lines,
            details: Values::new(details).context("cannot read DETAILS")?,
            extras: Values::new(extras).context("cannot read EXTRAS")?,
            accounts: None,
            timers: None,
            mapped: OnceLock::new(),
        })
    }

    /// The number of records in the table.
    pub fn records(&self) -> u32 {
        self.count
    }

    /// Whether packets and bytes are counted.
    pub fn has_accounts(&self) -> bool {
        self.accounts.is_some()
    }

    /// Whether there are retransmission timers.
    pub fn has_timers(&self) -> bool {
        self.timers.is_some()
    }

    /// All flows. A flow that is in the table during the whole iteration comes exactly once; others
    /// may or may not come.
    ///
    /// # Panics
    ///
    /// If the table cannot be mapped: the process has no address space left.
    pub fn iter(&self) -> impl Iterator<Item = Flow> {
        let flows = self.of_records(0..self.count);
        flows.expect("the table can be mapped")
    }

    /// The flows of these records, as of [`iter`](Self::iter).
    ///
    /// # Errors
    ///
    /// The table cannot be mapped.
    pub fn of_records(&self, records: Range<u32>) -> Result<impl Iterator<Item = Flow>> {
        let maps = self.maps()?;
        Ok(records.filter_map(|index| maps.get(index)))
    }

    /// The flow in a record. A record that changes during every one of many reads is passed over:
    /// the CPU that writes it must have been stopped half way.
    pub fn get(&self, index: u32) -> Option<Flow> {
        self.maps().ok()?.get(index)
    }

    /// The live flow of a key, if this hash gives the homes.
    ///
    /// # Errors
    ///
    /// The answer is unknown: the table cannot be mapped, or a record keeps changing.
    pub fn find(&self, hash: &Hash, key: &FlowKey) -> Result<Option<Flow>> {
        let maps = self.maps()?;
        let place = hash.place(key);
        let record = |distance| Record {
            index: place.home + distance,
            maps,
        };
        if place.home >= self.count {
            return Ok(None);
        }
        // Packets find every flow by these, too.
        let hops = record(0).load(offset_of!(Line, hops));
        let distances = (0..table::WINDOW).filter(|distance| hops >> distance & 1 != 0);
        for distance in distances.take_while(|it| record(*it).index < self.count) {
            if !has_fingerprint(record(distance).tag(), place, distance) {
                continue;
            }
            let flow = maps.read(place.home + distance);
            let flow = flow.map_err(|Changed| anyhow!("a record keeps changing: try again"))?;
            if flow.is_some_and(|flow| flow.key == *key) {
                return Ok(flow);
            }
        }
        Ok(None)
    }

    /// The next pointer of these details: the details that follow in the same slot, if this flow is
    /// on the wheel of this CPU. The flow may be any flow by now, because the list changes while it
    /// is followed.
    pub fn next(&self, details: u32, cpu: u32) -> Option<Link> {
        self.maps().ok()?.next(details, cpu)
    }

    fn maps(&self) -> Result<&Maps> {
        let maps = self
            .mapped
            .get_or_init(|| self.map_all().map_err(|error| format!("{error:#}")));
        maps.as_ref().map_err(|error| anyhow!("{error}"))
    }

    fn map_all(&self) -> Result<Maps> {
        Ok(Maps {
            lines: self.lines.map()?,
            details: self.details.map()?,
            extras: self.extras.map()?,
            accounts: self.accounts.as_ref().map(Values::map).transpose()?,
            timers: self.timers.as_ref().map(Values::map).transpose()?,
            records: self.count,
        })
    }
}

/// An array map whose values can be mapped.
struct Values<T> {
    map: OwnedFd,
    count: u32,
    values: PhantomData<T>,
}

impl<T: FromBytes + IntoBytes> Values<T> {
    fn new(map: &Map) -> Result<Self> {
        let Map::Array(data) = map else {
            anyhow::bail!("it is not an array");
        };
        let info: MapInfo = data.info()?;
        ensure!(
            info.value_size() as usize == size_of::<T>(),
            "it has values of {} bytes",
            info.value_size()
        );
        Ok(Self {
            map: data.fd().as_fd().try_clone_to_owned()?,
            count: info.max_entries(),
            values: PhantomData,
        })
    }

    /// Maps its values, read-only.
    fn map(&self) -> Result<MappedValues<T>> {
        let memory = ReadOnly::new(&self.map, 0, self.count as usize * size_of::<T>());
        Ok(MappedValues {
            memory: memory.context("cannot map the flow table")?,
            values: PhantomData,
        })
    }
}

/// The values of a mapped array map.
struct MappedValues<T> {
    memory: ReadOnly,
    values: PhantomData<T>,
}

impl<T: FromBytes + IntoBytes> MappedValues<T> {
    /// The index of a value's first word.
    fn word(index: u32) -> usize {
        index as usize * (size_of::<T>() / size_of::<u64>())
    }

    /// A copy of a value, or of what it begins with, each word of which is whole.
    fn copy<P: FromBytes + IntoBytes>(&self, index: u32) -> Option<P> {
        const { assert!(size_of::<P>() <= size_of::<T>()) };
        self.memory.copy(Self::word(index))
    }
}

/// The mapped maps of the table.
struct Maps {
    lines: MappedValues<Line>,
    details: MappedValues<Details>,
    extras: MappedValues<Extras>,
    accounts: Option<MappedValues<Account>>,
    timers: Option<MappedValues<Timers>>,
    records: u32,
}

impl Maps {
    fn get(&self, index: u32) -> Option<Flow> {
        self.read(index).ok().flatten()
    }

    fn read(&self, index: u32) -> Result<Option<Flow>, Changed> {
        const TRIES: u32 = 1 << 20;
        for _ in 0..TRIES {
            match self.try_get(index) {
                // The write takes nanoseconds.
                Err(Changed) => std::hint::spin_loop(),
                found => return found,
            }
        }
        Err(Changed)
    }

    fn try_get(&self, index: u32) -> Result<Option<Flow>, Changed> {
        if index >= self.records {
            return Ok(None);
        }
        let record = Record { index, maps: self };
        let found = table::read(&record)?;
        Ok(found.map(|found| Flow {
            index,
            key: found.key,
            word: found.word,
            created: found.created,
            cpu: found.cpu,
            rule: found.rule,
            is_outgoing: found.is_outgoing,
            point: found.point,
            seen_at: found.seen_at,
            account: self.account(index),
            timing: self.timing(index),
        }))
    }

    fn next(&self, number: u32, cpu: u32) -> Option<Link> {
        let details: Details = self.details.copy(number)?;
        let index = details.record;
        if index >= self.records {
            return None;
        }
        let record = Record { index, maps: self };
        let is_here = table::holds_flow(record.tag()) && record.number() == number;
        (is_here && details.cpu() == cpu).then_some(details.next)
    }

    fn account(&self, index: u32) -> Option<Account> {
        self.accounts.as_ref()?.copy(index)
    }

    fn timing(&self, index: u32) -> Option<[Timing; 2]> {
        const { assert!(offset_of!(Timers, sides) == 0) };
        let sides: [Side; 2] = self.timers.as_ref()?.copy(index)?;
        Some(sides.map(Timing::from))
    }
}

/// A record that exists.
struct Record<'a> {
    index: u32,
    maps: &'a Maps,
}

impl Record<'_> {
    /// Loads a word of the line, given its offset there in bytes.
    fn load(&self, offset: usize) -> u64 {
        let line = MappedValues::<Line>::word(self.index / LINE);
        self.maps
            .lines
            .memory
            .load(line + offset / size_of::<u64>())
    }

    fn slot(&self) -> usize {
        (self.index % LINE) as usize
    }

    /// The index of its details.
    fn number(&self) -> u32 {
        let numbers: [u32; LINE as usize] = transmute!(self.load(offset_of!(Line, details)));
        numbers[self.slot()] & !MARKS
    }
}

impl Reads for Record<'_> {
    fn word(&self) -> Word {
        Word(self.load(offset_of!(Line, words) + size_of::<Word>() * self.slot()))
    }

    fn tag(&self) -> u64 {
        self.load(offset_of!(Line, tags) + size_of::<u64>() * self.slot())
    }

    fn details(&self) -> Option<(Details, Extras)> {
        let number = self.number();
        Some((
            self.maps.details.copy(number)?,
            self.maps.extras.copy(number)?,
        ))
    }

    fn fence(&self) {
        fence(Ordering::Acquire);
    }
}
