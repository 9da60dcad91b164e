//! Every map of the data plane. Sizes that depend on the configuration are set by the loader.
//! Pinned maps outlive the loader and are adopted by the next one.

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    macros::map,
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf},
};
use twheel_common::{
    config::{Meta, NAME_BYTES, RULES, SEATS, Watched},
    counter::{self, Counters},
    enforce::{Bucket, Tomb},
    event::Staged,
    flow::Account,
    jiffies,
    key::{self, FlowKey},
    policy::{Active, Ends, Header, MAX_CLASSES, MAX_NAMED, MAX_PREFIXES, PortClasses, Rules},
    pool::Shelf,
    quota::{MAX_OVER_QUOTA, OverQuota, Victims},
    rto::Timers,
    rule::Rule,
    step::Answer,
    table::{Details, Extras, Line},
    wheel::{Heads, Wheel},
};

/// The flow table: see `table`. Mappable: its lines then begin where cache lines do, and userspace
/// reads it without a system call.
#[map]
pub static FLOWS: Array<Line> = Array::pinned(95, BPF_F_MMAPABLE);

/// What no packet of a known flow needs. Mappable, likewise.
#[map]
pub static DETAILS: Array<Details> = Array::pinned(64, BPF_F_MMAPABLE);

/// What few flows need: as many.
#[map]
pub static EXTRAS: Array<Extras> = Array::pinned(64, BPF_F_MMAPABLE);

/// Free details: the head of the depot, and how many were ever had.
#[map]
pub static DEPOT: Array<u64> = Array::pinned(2, 0);

/// Free details of a CPU, touched by that CPU alone, with bottom halves off.
#[map]
pub static SHELF: PerCpuArray<Shelf> = PerCpuArray::pinned(1, 0);

/// What was sent, by the index of the flow's record; of one value where that is not counted.
#[map]
pub static ACCOUNTS: Array<Account> = Array::pinned(1, BPF_F_MMAPABLE);

/// Retransmission timers, likewise; of one value where there are none.
#[map]
pub static RTOS: Array<Timers> = Array::pinned(1, BPF_F_MMAPABLE);

/// What rules give their flows: that of no rule, and each rule. Userspace changes them while packets come.
#[map]
pub static TIMEOUTS: Array<Rule> = Array::pinned(RULES as u32, 0);

/// Two policies, of which one counts: a new one is written beside the old and then takes over.
#[map]
pub static ACTIVE: Array<Active> = Array::pinned(1, 0);

/// Of each of the two: `twheel_common::policy` has what these five maps are.
#[map]
pub static POLICIES: Array<Header> = Array::pinned(2, 0);

/// See [`POLICIES`].
#[map]
pub static PORTS: Array<PortClasses> = Array::pinned(2, 0);

/// See [`POLICIES`]; the second policy's behind the first's.
#[map]
pub static CLASSES: Array<Rules> = Array::pinned(2 * MAX_CLASSES as u32, 0);

/// See [`POLICIES`]. Interfaces, VLANs and zones that rules name, by `Named::key`. No memory is taken for those that
/// none names.
#[map]
pub static INTERFACES: HashMap<[u32; 2], Rules> =
    HashMap::pinned(2 * MAX_NAMED as u32, BPF_F_NO_PREALLOC);

/// See [`POLICIES`]. The policy's number, four bytes, and the address.
#[map]
pub static SOURCES: LpmTrie<[u32; 5], Ends> =
    LpmTrie::pinned(2 * MAX_PREFIXES as u32, BPF_F_NO_PREALLOC);

/// See [`SOURCES`].
#[map]
pub static DESTINATIONS: LpmTrie<[u32; 5], Ends> =
    LpmTrie::pinned(2 * MAX_PREFIXES as u32, BPF_F_NO_PREALLOC);

/// What flows bear, of each rule of each of the two policies, by the rule's place in its file.
#[map]
pub static NUMBERS: Array<[u16; 256]> = Array::pinned(2, 0);

/// Names of rules by the numbers that flows bear; for readers.
#[map]
pub static NAMES: Array<[u8; NAME_BYTES]> = Array::pinned(RULES as u32, 0);

/// Flows that a packet on another CPU wants looked at: the inbox of each CPU.
#[map]
pub static INBOXES: Array<Inbox> = Array::pinned(1, 0);

/// The head of an inbox, in a cache line of its own: [`twheel_common::wheel::Link`] in the low half.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct Inbox {
    /// All CPUs write here.
    pub head: u64,
    /// 1 if the CPU's stepper is called and has not come since.
    pub called: u64,
    reserved: [u64; 6],
}

/// Flows in the table, and such as are just entering it. A map of its own: all CPUs write there.
#[map]
pub static TRACKED: Array<u64> = Array::pinned(1, 0);

/// A wheel per CPU, touched by that CPU alone, with bottom halves off.
#[map]
pub static WHEEL: PerCpuArray<Wheel> = PerCpuArray::pinned(1, 0);

/// Heads of the lists of flows of each slot of the wheel, and behind them those of the flows that have been handed out
/// and await their visit. Same rule as [`WHEEL`].
#[map]
pub static SLOTS: PerCpuArray<Heads> = PerCpuArray::pinned((3 << 10) + 1, 0);

/// What there is to say of flows: `twheel_common::event`.
#[map]
pub static EVENTS: RingBuf = RingBuf::pinned(1 << 20, 0);

/// Events of this CPU's stepper on their way there. Pinned: their flows have ended, whatever becomes of the loader.
#[map]
pub static STAGED: PerCpuArray<Staged> = PerCpuArray::pinned(1, 0);

/// CPUs (`u64`) whose stepper sleeps past a new deadline, and [`CALL`](twheel_common::quota::CALL). A ring of its own, so that no amount of
/// events keeps a stepper asleep.
#[map]
pub static WAKES: RingBuf = RingBuf::pinned(1 << 12, 0);

/// Flows that have expired and whose packets are answered; of one entry where none are. Userspace writes, packets
/// delete. Who fills it pushes out those that were met longest ago.
#[map]
pub static EXPIRED: LruHashMap<FlowKey, Tomb> = LruHashMap::pinned(1, 0);

/// Answers to each source address; of one entry, likewise. Not pinned: what a bucket says is said for one rate.
#[map]
pub static ANSWERS: LruHashMap<[u64; 2], Bucket> = LruHashMap::with_max_entries(1, 0);

/// Sources that hold more than their quota of a full table. Not pinned, as all that is known of quotas: it is of one
/// loader, and soon forgotten.
#[map]
pub static HOGS: HashMap<[u64; 2], OverQuota> = HashMap::with_max_entries(MAX_OVER_QUOTA, 0);

/// Flows of theirs on each CPU's wheel.
#[map]
pub static VICTIMS: PerCpuArray<Victims> = PerCpuArray::with_max_entries(1, 0);

/// When the loader was last told that the table is full, clock units.
#[map]
pub static FULL: Array<u64> = Array::with_max_entries(1, 0);

/// Interfaces that programs ask about, by index; of one entry where they do not. The loader writes.
#[map]
pub static WATCHED: HashMap<u32, Watched> = HashMap::pinned(1, 0);

/// The same, found without hashing: by an interface's [`seat`](twheel_common::config::seat) its index, and above it
/// [`Watched::packed`]. Of two interfaces with the same seat, the second is in [`WATCHED`] alone.
#[map]
pub static SEATED: Array<u64> = Array::pinned(SEATS, 0);

/// Counters per CPU, by place: [`counter`](twheel_common::counter) says whose they are.
#[map]
pub static COUNTERS: PerCpuArray<Counters> = PerCpuArray::pinned(counter::FIRST_INTERFACE, 0);

/// Which of [`COUNTERS`] whatever runs on this CPU counts in; of no meaning where there is one interface. And what is to be added to
/// the next packet's interface, if it is in [another network namespace](twheel_common::state::elsewhere): its program leaves
/// it, and goes on in one of ours. Pinned for those programs.
#[map]
pub static PLACE: PerCpuArray<[u32; 2]> = PerCpuArray::pinned(1, 0);

/// The interface that each of [`COUNTERS`] is of; 0: none. Written by the loader, for the next one and for readers.
#[map]
pub static COUNTED: Array<u32> = Array::pinned(counter::FIRST_INTERFACE, 0);

/// The name of each of those interfaces, padded with zeros; likewise.
#[map]
pub static LABELS: Array<[u8; 64]> = Array::pinned(counter::FIRST_INTERFACE, 0);

/// The number of each zone, by its place in the keys of flows. Written by the loader, for the next one and for readers.
#[map]
pub static ZONES: Array<u32> = Array::pinned(key::ZONES as u32, 0);

/// Answers of programs that userspace runs by live frames, by the number of the call; of one entry where it does not.
/// A caller that dies before it has looked leaves its answer, which is pushed out by later ones.
#[map]
pub static CALLS: LruHashMap<u64, Answer> = LruHashMap::pinned(1, 0);

/// What the pinned maps were made for; written by the loader, for the next one.
#[map]
pub static META: Array<Meta> = Array::pinned(1, 0);

/// Values that the clock has had: [`jiffies`]. Not pinned: what nobody remembers is in doubt.
#[map]
pub static JIFFIES: Array<u64> = Array::with_max_entries(jiffies::WORDS, 0);

/// Virtual time, units; read only where the configuration says so.
#[map]
pub static CLOCK: Array<u64> = Array::pinned(1, 0);
