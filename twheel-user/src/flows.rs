//! Reads the flow table while the data plane writes it. It reads through memory mappings: without a
//! system call per flow, and without holding up the data plane.
//!
//! The maps are mapped as a whole. The mapped pages are the kernel's own, so the reader's memory
//! does not grow with the table.

use std::{
    os::fd::{AsFd, OwnedFd},
    sync::{
        OnceLock,
        atomic::{AtomicU32, AtomicU64, Ordering, fence},
    },
};

use anyhow::{Context, Result, anyhow, ensure};
use aya::maps::{Map, MapInfo};
use memmap2::{MmapOptions, MmapRaw};
use twheel_common::{
    event::Reason,
    flow::{Account, FlowKey, Traffic, Word},
    point::Point,
    rto::{Side, Timers},
    step::Delete,
    table::{self, Changed, Details, Extras, Hash, LINE, Line, Reads},
    wheel::Link,
};

use crate::pins::Pins;

/// The flow table.
pub struct Flows {
    lines: Values,
    details: Values,
    extras: Values,
    accounts: Option<Values>,
    timers: Option<Values>,
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
    /// What each side has sent, the key's low endpoint first; `None` if that is not counted.
    pub account: Option<Account>,
    /// What the retransmission timers know of each side, in the same order; `None` if there are no
    /// timers.
    pub sides: Option<[Side; 2]>,
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
        let extra = |values: Values| (values.count >= flows.count).then_some(values);
        let accounts = extra(Values::new::<Account>(&open("ACCOUNTS")?)?);
        let timers = extra(Values::new::<Timers>(&open("RTOS")?)?);
        (flows.accounts, flows.timers) = (accounts, timers);
        Ok(flows)
    }

    /// A table without accounts and timers: the maps `FLOWS`, `DETAILS` and `EXTRAS`.
    pub fn map(flows: &Map, details: &Map, extras: &Map) -> Result<Self> {
        let lines = Values::new::<Line>(flows).context("cannot read FLOWS")?;
        Ok(Self {
            count: lines.count * LINE,
            lines,
            details: Values::new::<Details>(details).context("cannot read DETAILS")?,
            extras: Values::new::<Extras>(extras).context("cannot read EXTRAS")?,
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
        let maps = self.maps().expect("the table can be mapped");
        (0..self.count).filter_map(|index| maps.get(index))
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
        let home = hash.place(key).home;
        // Looks through the key's whole window: packets find every flow there.
        for index in home..(home + table::WINDOW).min(self.count) {
            let flow = maps.read(index);
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
        let extra = |values: &Option<Values>| values.as_ref().map(Values::map).transpose();
        Ok(Maps {
            lines: self.lines.map()?,
            details: self.details.map()?,
            extras: self.extras.map()?,
            accounts: extra(&self.accounts)?,
            timers: extra(&self.timers)?,
            records: self.count,
            flows: self.details.count,
        })
    }
}

/// An array map whose values can be mapped.
struct Values {
    map: OwnedFd,
    size: usize,
    count: u32,
}

impl Values {
    fn new<T>(map: &Map) -> Result<Self> {
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
            size: size_of::<T>(),
            count: info.max_entries(),
        })
    }

    /// Maps its values, read-only.
    fn map(&self) -> Result<MmapRaw> {
        MmapOptions::new()
            .len(self.count as usize * self.size)
            .map_raw_read_only(&self.map)
            .context("cannot map the flow table")
    }
}

/// The mapped maps of the table.
struct Maps {
    lines: MmapRaw,
    details: MmapRaw,
    extras: MmapRaw,
    accounts: Option<MmapRaw>,
    timers: Option<MmapRaw>,
    records: u32,
    flows: u32,
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
        let record = Mapped { index, maps: self };
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
            account: self.account(index),
            sides: self.sides(index),
        }))
    }

    fn next(&self, number: u32, cpu: u32) -> Option<Link> {
        let details = self.details(number)?;
        let index = details.record;
        if index >= self.records {
            return None;
        }
        let record = Mapped { index, maps: self };
        let is_here = table::holds_flow(record.tag()) && record.number() == number;
        (is_here && details.cpu() == cpu).then_some(details.next)
    }

    /// A copy of the details, each word of which is whole.
    fn details(&self, number: u32) -> Option<Details> {
        const WORDS: usize = size_of::<Details>() / size_of::<u64>();
        let words = self.words::<WORDS>(&self.details, number)?;
        // SAFETY: the sizes are equal, and any bits are valid in each field.
        Some(unsafe { std::mem::transmute::<[u64; WORDS], Details>(words) })
    }

    fn extras(&self, number: u32) -> Option<Extras> {
        const WORDS: usize = size_of::<Extras>() / size_of::<u64>();
        let words = self.words::<WORDS>(&self.extras, number)?;
        // SAFETY: as in `details`.
        Some(unsafe { std::mem::transmute::<[u64; WORDS], Extras>(words) })
    }

    /// A value of the details or extras, as this many words, by its number.
    fn words<const WORDS: usize>(&self, values: &MmapRaw, number: u32) -> Option<[u64; WORDS]> {
        if number >= self.flows {
            return None;
        }
        // SAFETY: the words lie within the mapping, which has that many values and is aligned to a
        // page. They are only read, and atomically, since the kernel writes there.
        let words = unsafe {
            &*values
                .as_mut_ptr()
                .cast::<[AtomicU64; WORDS]>()
                .add(number as usize)
        };
        Some(words.each_ref().map(|word| word.load(Ordering::Relaxed)))
    }

    fn account(&self, index: u32) -> Option<Account> {
        let accounts = self.accounts.as_ref()?;
        if index >= self.records {
            return None;
        }
        // SAFETY: there is an account for each record, of four aligned words each.
        let words = unsafe {
            &*accounts
                .as_mut_ptr()
                .cast::<[AtomicU64; 4]>()
                .add(index as usize)
        };
        let [a, b, c, d] = words.each_ref().map(|word| word.load(Ordering::Relaxed));
        let traffic = |packets, bytes| Traffic { packets, bytes };
        Some([traffic(a, b), traffic(c, d)])
    }

    fn sides(&self, index: u32) -> Option<[Side; 2]> {
        let timers = self.timers.as_ref()?;
        if index >= self.records {
            return None;
        }
        // SAFETY: there are timers for each record. The kernel writes there meanwhile, so they are
        // copied by volatile loads. Any bytes are a valid `Side`, whose fields may then be of
        // different moments.
        Some(unsafe {
            (&raw const (*timers.as_mut_ptr().cast::<Timers>().add(index as usize)).sides)
                .read_volatile()
        })
    }
}

/// A record that exists.
struct Mapped<'a> {
    index: u32,
    maps: &'a Maps,
}

impl Mapped<'_> {
    fn line(&self) -> *mut Line {
        // SAFETY: the line lies within the mapping, which has that many lines and is aligned to a
        // page by the kernel. No references to it are made, since others write there.
        unsafe {
            self.maps
                .lines
                .as_mut_ptr()
                .cast::<Line>()
                .add((self.index / LINE) as usize)
        }
    }

    fn slot(&self) -> usize {
        (self.index % LINE) as usize
    }

    /// The index of its details.
    fn number(&self) -> u32 {
        // SAFETY: an aligned word of the line.
        let number = unsafe { AtomicU32::from_ptr(&raw mut (*self.line()).details[self.slot()]) };
        number.load(Ordering::Relaxed)
    }
}

/// Every access is to aligned words within the mapping. They are only read, and atomically.
impl Reads for Mapped<'_> {
    fn word(&self) -> Word {
        // SAFETY: as above; a `Word` is a `u64`.
        let word =
            unsafe { AtomicU64::from_ptr((&raw mut (*self.line()).words[self.slot()]).cast()) };
        Word(word.load(Ordering::Relaxed))
    }

    fn tag(&self) -> u64 {
        // SAFETY: as above.
        let tag = unsafe { AtomicU64::from_ptr(&raw mut (*self.line()).tags[self.slot()]) };
        tag.load(Ordering::Relaxed)
    }

    fn details(&self) -> Option<(Details, Extras)> {
        let number = self.number();
        Some((self.maps.details(number)?, self.maps.extras(number)?))
    }

    fn fence(&self) {
        fence(Ordering::Acquire);
    }
}
