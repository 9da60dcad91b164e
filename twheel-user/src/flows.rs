//! Reading the flow table while the data plane writes it: through mappings, without a system call a flow and
//! without holding anybody up.
//!
//! The table is looked at in windows of `WINDOW` records, one mapped at a time, so that a reader's memory does not
//! grow with the table.

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
    rto::{Side, Timers},
    step::Delete,
    table::{self, BLOCK, Block, Changed, Hash, Node, Reads, Record},
    wheel::Link,
};

use crate::pins::Pins;

/// Records that are mapped at a time, whole blocks: every array's part begins on a page then.
const WINDOW: u32 = 1 << 16;

/// The table.
pub struct Flows {
    blocks: Values,
    accounts: Option<Values>,
    timers: Option<Values>,
    count: u32,
    /// For those who ask for one flow.
    whole: OnceLock<Option<Window>>,
}

/// A flow, as it was at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Flow {
    /// Where it stands in the table.
    pub index: u32,
    /// Whose it is.
    pub key: FlowKey,
    /// Time of the latest packet, generation, and what was seen.
    pub word: Word,
    /// Low 32 bits of the clock at its first packet, units.
    pub created: u32,
    /// The CPU on whose wheel it stands.
    pub cpu: u32,
    /// The rule it has met; 0 for none.
    pub rule: u16,
    /// What each side has sent, the key's low endpoint first, if that is counted.
    pub account: Option<Account>,
    /// What the retransmission timers know of each side, likewise.
    pub sides: Option<[Side; 2]>,
}

impl Flow {
    /// What deletes this flow, unless it has a packet before. (A packet in the very unit of the clock in
    /// which the flow had its latest does not show: whoever minds chooses flows that were idle for one.)
    pub fn delete(&self, reason: Reason) -> Delete {
        Delete {
            index: self.index,
            outcome: reason as u32,
            word: self.word.0,
        }
    }
}

impl Flows {
    /// An instance's table, by its pins.
    pub fn pinned(pins: &Pins) -> Result<Self> {
        let open = |name| anyhow::Ok(Map::Array(pins.map(name)?));
        let mut flows = Self::map(&open("FLOWS")?)?;
        // Of one value where there is nothing to read.
        let extra = |values: Values| (values.count >= flows.count).then_some(values);
        let accounts = extra(Values::new::<Account>(&open("ACCOUNTS")?)?);
        let timers = extra(Values::new::<Timers>(&open("RTOS")?)?);
        (flows.accounts, flows.timers) = (accounts, timers);
        Ok(flows)
    }

    /// A table without what is counted and timed: the map `FLOWS`.
    pub fn map(flows: &Map) -> Result<Self> {
        let blocks = Values::new::<Block>(flows).context("cannot read FLOWS")?;
        Ok(Self {
            count: blocks.count * BLOCK as u32,
            blocks,
            accounts: None,
            timers: None,
            whole: OnceLock::new(),
        })
    }

    /// Records of the table.
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

    /// All flows: each that is in the table from beginning to end of this, once; others perhaps.
    ///
    /// # Panics
    ///
    /// If a window cannot be mapped: the process is out of address space.
    pub fn iter(&self) -> impl Iterator<Item = Flow> {
        (0..self.count).step_by(WINDOW as usize).flat_map(|first| {
            let count = WINDOW.min(self.count - first);
            let window = self.window(first, count).expect("a window can be mapped");
            (first..first + count).filter_map(move |index| window.get(index))
        })
    }

    /// The flow in a record. One that changes all the time while it is looked at so often that its CPU
    /// must have been stopped half way is passed over.
    pub fn get(&self, index: u32) -> Option<Flow> {
        self.whole()?.get(index)
    }

    /// The live flow of a key, where homes are as this hash has them.
    ///
    /// # Errors
    ///
    /// It cannot be told: the table cannot be mapped, or a record does not come to rest.
    pub fn find(&self, hash: &Hash, key: &FlowKey) -> Result<Option<Flow>> {
        let whole = self.whole().context("cannot map the flow table")?;
        let home = hash.home(key);
        // All of its window: what stands there is what packets find.
        for index in home..(home + table::WINDOW).min(self.count) {
            let flow = whole.read(index);
            let flow = flow.map_err(|Changed| anyhow!("a record changes all the time"))?;
            if flow.is_some_and(|flow| flow.key == *key) {
                return Ok(flow);
            }
        }
        Ok(None)
    }

    /// The record that follows in the same slot of the wheel, if the flow of this one stands on the wheel of this
    /// CPU, and whatever it is by now: the list changes while it is followed.
    pub fn next(&self, index: u32, cpu: u32) -> Option<Link> {
        self.whole()?.next(index, cpu)
    }

    fn whole(&self) -> Option<&Window> {
        self.whole
            .get_or_init(|| self.window(0, self.count).ok())
            .as_ref()
    }

    fn window(&self, first: u32, count: u32) -> Result<Window> {
        let extra = |values: &Option<Values>| {
            let values = values.as_ref();
            values.map(|it| it.map(first, count)).transpose()
        };
        Ok(Window {
            blocks: self
                .blocks
                .map(first / BLOCK as u32, count / BLOCK as u32)?,
            accounts: extra(&self.accounts)?,
            timers: extra(&self.timers)?,
            first,
            count,
        })
    }
}

/// An array whose values can be mapped.
struct Values {
    map: OwnedFd,
    size: usize,
    count: u32,
}

impl Values {
    fn new<T>(map: &Map) -> Result<Self> {
        let Map::Array(data) = map else {
            anyhow::bail!("it is no array");
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

    /// Some of its values, for reading. The first is one where a page begins.
    fn map(&self, first: u32, count: u32) -> Result<MmapRaw> {
        MmapOptions::new()
            .offset(u64::from(first) * self.size as u64)
            .len(count as usize * self.size)
            .map_raw_read_only(&self.map)
            .context("cannot map the flow table")
    }
}

/// Records from `first` on, mapped.
struct Window {
    blocks: MmapRaw,
    accounts: Option<MmapRaw>,
    timers: Option<MmapRaw>,
    first: u32,
    count: u32,
}

impl Window {
    fn get(&self, index: u32) -> Option<Flow> {
        self.read(index).ok().flatten()
    }

    fn read(&self, index: u32) -> Result<Option<Flow>, Changed> {
        const TRIES: u32 = 1 << 20;
        for _ in 0..TRIES {
            match self.try_get(index) {
                // A matter of nanoseconds.
                Err(Changed) => std::hint::spin_loop(),
                found => return found,
            }
        }
        Err(Changed)
    }

    /// A record and its node.
    fn at(&self, index: u32) -> Option<Mapped<'_>> {
        let at = index.checked_sub(self.first)?;
        if at >= self.count {
            return None;
        }
        // SAFETY: within the mapping, which has `count` records in whole blocks; the kernel has it aligned to a page. No
        // references are made of it: others write there.
        let (record, node) = unsafe {
            let block = self.blocks.as_mut_ptr().cast::<Block>();
            let block = block.add(at as usize / BLOCK);
            let number = at as usize % BLOCK;
            (
                (&raw mut (*block).records).cast::<Record>().add(number),
                (&raw mut (*block).nodes).cast::<Node>().add(number),
            )
        };
        Some(Mapped {
            record,
            node,
            at,
            window: self,
        })
    }

    fn try_get(&self, index: u32) -> Result<Option<Flow>, Changed> {
        let Some(record) = self.at(index) else {
            return Ok(None);
        };
        let found = table::read(&record)?;
        Ok(found.map(|found| Flow {
            index,
            key: found.key,
            word: found.word,
            created: found.created,
            cpu: found.cpu,
            rule: found.rule,
            account: record.account(),
            sides: record.sides(),
        }))
    }

    fn next(&self, index: u32, cpu: u32) -> Option<Link> {
        let record = self.at(index)?;
        let tag = record.tag();
        (table::holds_flow(tag) && table::cpu(tag) == cpu).then(|| record.next())
    }
}

/// A record and what belongs to it, of a window.
struct Mapped<'a> {
    record: *mut Record,
    node: *mut Node,
    at: u32,
    window: &'a Window,
}

impl Mapped<'_> {
    fn next(&self) -> Link {
        // SAFETY: as in `Reads`; a `Link` is a `u32`.
        let next = unsafe { AtomicU32::from_ptr((&raw mut (*self.record).next).cast()) };
        Link::from_raw(next.load(Ordering::Relaxed))
    }

    fn account(&self) -> Option<Account> {
        let accounts = self.window.accounts.as_ref()?;
        // SAFETY: an account for each record, each of four aligned words.
        let words = unsafe {
            &*accounts
                .as_mut_ptr()
                .cast::<[AtomicU64; 4]>()
                .add(self.at as usize)
        };
        let [a, b, c, d] = words.each_ref().map(|word| word.load(Ordering::Relaxed));
        let traffic = |packets, bytes| Traffic { packets, bytes };
        Some([traffic(a, b), traffic(c, d)])
    }

    fn sides(&self) -> Option<[Side; 2]> {
        let timers = self.window.timers.as_ref()?;
        // SAFETY: timers for each record. The kernel writes there meanwhile, so they are copied by volatile loads;
        // any bytes are a valid `Side`, whose fields may then be of different moments.
        Some(unsafe {
            (&raw const (*timers.as_mut_ptr().cast::<Timers>().add(self.at as usize)).sides)
                .read_volatile()
        })
    }
}

/// Every access is to aligned words within the mapping, which are only read, and atomically.
impl Reads for Mapped<'_> {
    fn word(&self) -> Word {
        // SAFETY: see above; a `Word` is a `u64`.
        let word = unsafe { AtomicU64::from_ptr((&raw mut (*self.record).word).cast()) };
        Word(word.load(Ordering::Relaxed))
    }

    fn tag(&self) -> u64 {
        // SAFETY: see above.
        let tag = unsafe { AtomicU64::from_ptr(&raw mut (*self.record).tag) };
        tag.load(Ordering::Relaxed)
    }

    fn addresses(&self) -> [u64; 4] {
        // SAFETY: see above; an array of words, each at its place.
        let words = unsafe { &*(&raw mut (*self.record).addresses).cast::<[AtomicU64; 4]>() };
        words.each_ref().map(|word| word.load(Ordering::Relaxed))
    }

    fn created(&self) -> u32 {
        // SAFETY: see above.
        let created = unsafe { AtomicU32::from_ptr(&raw mut (*self.node).created) };
        created.load(Ordering::Relaxed)
    }

    fn fence(&self) {
        fence(Ordering::Acquire);
    }
}
