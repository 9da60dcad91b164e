//! Every map of the data plane. The running twheel sets the sizes that depend on the configuration.
//! Pinned maps outlive it, and the next `twheel run` adopts them.

use aya_ebpf::{
    bindings::{BPF_F_MMAPABLE, BPF_F_NO_PREALLOC},
    macros::map,
    maps::{Array, HashMap, LpmTrie, LruHashMap, PerCpuArray, RingBuf},
};
use twheel_common::{
    config::{Meta, NAME_BYTES, RULES, SEATS, Watched},
    counter::{self, Counters},
    enforce::{Bucket, Tombstone},
    event::Staged,
    flow::Account,
    jiffies,
    key::{self, FlowKey},
    offload::Offload,
    policy::{Active, Ends, Header, MAX_CLASSES, MAX_NAMED, MAX_PREFIXES, PortClasses, Rules},
    pool::Shelf,
    quota::{MAX_OVER_QUOTA, OverQuota, Victims},
    rto::Timers,
    rule::Rule,
    step::Answer,
    table::{Details, Extras, Line},
    update::Reported,
    wheel::{Heads, Wheel},
};

/// The flow table: see `table`. Mappable, so that its lines begin where cache lines do, and
/// userspace reads it without a system call.
#[map]
pub static FLOWS: Array<Line> = Array::pinned(95, BPF_F_MMAPABLE);

/// The details of flows: what no packet of a known flow needs. Mappable, for the same reasons.
#[map]
pub static DETAILS: Array<Details> = Array::pinned(64, BPF_F_MMAPABLE);

/// What only some flows need: as many as there are details.
#[map]
pub static EXTRAS: Array<Extras> = Array::pinned(64, BPF_F_MMAPABLE);

/// Free details: the head of the depot, and how many were ever handed out.
#[map]
pub static DEPOT: Array<u64> = Array::pinned(2, 0);

/// Free details of one CPU. Only that CPU accesses them, with bottom halves off.
#[map]
pub static SHELF: PerCpuArray<Shelf> = PerCpuArray::pinned(1, 0);

/// Packets and bytes that were counted, by the record's index; one value if nothing is counted.
#[map]
pub static ACCOUNTS: Array<Account> = Array::pinned(1, BPF_F_MMAPABLE);

/// The last update of each flow, by the index of its details; one value if live flows are not
/// reported. Only the CPU on whose wheel the flow stands accesses it; and one whose packet begins
/// another connection with the same key reads it.
#[map]
pub static UPDATES: Array<Reported> = Array::pinned(1, BPF_F_MMAPABLE);

/// Retransmission timers, by the record's index; one value if there are none.
#[map]
pub static RTOS: Array<Timers> = Array::pinned(1, BPF_F_MMAPABLE);

/// What is kept of registered flows, by the number of their details; one value if nothing can be
/// registered. Userspace writes it, too.
#[map]
pub static OFFLOADS: Array<Offload> = Array::pinned(1, BPF_F_MMAPABLE);

/// Timeouts and flags of each rule, and those of flows without a rule. Userspace changes them while
/// packets arrive.
#[map]
pub static TIMEOUTS: Array<Rule> = Array::pinned(RULES as u32, 0);

/// Which of the two policies is active: a new one is written beside the old one and then takes
/// over.
#[map]
pub static ACTIVE: Array<Active> = Array::pinned(1, 0);

/// Each of the two policies: `twheel_common::policy` describes these five maps.
#[map]
pub static POLICIES: Array<Header> = Array::pinned(2, 0);

/// See [`POLICIES`].
#[map]
pub static PORTS: Array<PortClasses> = Array::pinned(2, 0);

/// See [`POLICIES`]. The second policy's entries follow the first's.
#[map]
pub static CLASSES: Array<Rules> = Array::pinned(2 * MAX_CLASSES as u32, 0);

/// See [`POLICIES`]. Interfaces, VLANs and zones that rules name, by `Named::key`. Entries that no
/// rule names take no memory.
#[map]
pub static INTERFACES: HashMap<[u32; 2], Rules> =
    HashMap::pinned(2 * MAX_NAMED as u32, BPF_F_NO_PREALLOC);

/// See [`POLICIES`]. The key is the policy's number, four bytes, and the address.
#[map]
pub static SOURCES: LpmTrie<[u32; 5], Ends> =
    LpmTrie::pinned(2 * MAX_PREFIXES as u32, BPF_F_NO_PREALLOC);

/// See [`SOURCES`].
#[map]
pub static DESTINATIONS: LpmTrie<[u32; 5], Ends> =
    LpmTrie::pinned(2 * MAX_PREFIXES as u32, BPF_F_NO_PREALLOC);

/// The number that flows store for each rule of each of the two policies, by the rule's place in
/// its file.
#[map]
pub static NUMBERS: Array<[u16; 256]> = Array::pinned(2, 0);

/// Names of rules by the numbers that flows store; for readers.
#[map]
pub static NAMES: Array<[u8; NAME_BYTES]> = Array::pinned(RULES as u32, 0);

/// The inbox of each CPU: flows that it must look at soon, because a packet on another CPU
/// shortened their timeouts.
#[map]
pub static INBOXES: Array<Inbox> = Array::pinned(1, 0);

/// The head of an inbox, in a cache line of its own: [`twheel_common::wheel::Link`] in the low half.
#[repr(C, align(64))]
#[derive(Clone, Copy)]
pub struct Inbox {
    /// All CPUs write here.
    pub head: u64,
    /// 1 if the CPU's stepper was called and has not come since.
    pub called: u64,
    reserved: [u64; 6],
}

/// How many flows are in the table, or just entering it. A map of its own, because all CPUs write
/// it.
#[map]
pub static TRACKED: Array<u64> = Array::pinned(1, 0);

/// The number of the latest event. A map of its own, because all CPUs write it, and the running
/// twheel, too, for events of its own.
#[map]
pub static NUMBER: Array<u64> = Array::pinned(1, BPF_F_MMAPABLE);

/// A wheel per CPU. Only that CPU accesses it, with bottom halves off.
#[map]
pub static WHEEL: PerCpuArray<Wheel> = PerCpuArray::pinned(1, 0);

/// Heads of the lists of flows in each slot of the wheel, and behind them those of the flows that
/// were handed out and await their timer visit. The rule of [`WHEEL`] applies.
#[map]
pub static SLOTS: PerCpuArray<Heads> = PerCpuArray::pinned((3 << 10) + 1, 0);

/// Events of flows: `twheel_common::event`.
#[map]
pub static EVENTS: RingBuf = RingBuf::pinned(1 << 20, 0);

/// Events of this CPU's stepper on their way into the ring. Pinned, because their flows have ended,
/// even if the running twheel dies.
#[map]
pub static STAGED: PerCpuArray<Staged> = PerCpuArray::pinned(1, 0);

/// CPUs (`u64`) whose stepper would sleep past a new deadline, and
/// [`CALL`](twheel_common::quota::CALL). A ring of its own, so that no number of events keeps a
/// stepper asleep.
#[map]
pub static WAKES: RingBuf = RingBuf::pinned(1 << 12, 0);

/// Tombstones: expired flows whose later packets are refused or answered; one entry if none are.
/// Userspace writes, packets delete. New entries evict those that packets met longest ago.
#[map]
pub static TOMBSTONES: LruHashMap<FlowKey, Tombstone> = LruHashMap::pinned(1, 0);

/// How many answers each source address may have; one entry if none are answered. Not pinned,
/// because the content of a bucket depends on the configured rate.
#[map]
pub static ANSWERS: LruHashMap<[u64; 2], Bucket> = LruHashMap::with_max_entries(1, 0);

/// Over-quota sources. Not pinned, as nothing about quotas is: it concerns one running twheel, and
/// is soon out of date.
#[map]
pub static OVER_QUOTA: HashMap<[u64; 2], OverQuota> = HashMap::with_max_entries(MAX_OVER_QUOTA, 0);

/// Flows of over-quota sources on each CPU's wheel.
#[map]
pub static VICTIMS: PerCpuArray<Victims> = PerCpuArray::with_max_entries(1, 0);

/// When the running twheel was last told that the table is full, in clock units.
#[map]
pub static FULL: Array<u64> = Array::with_max_entries(1, 0);

/// Interfaces that the programs look up, by index; one entry if they do not. The running twheel
/// writes.
#[map]
pub static WATCHED: HashMap<u32, Watched> = HashMap::pinned(1, 0);

/// The same interfaces, found without hashing: at each [`seat`](twheel_common::config::seat), the
/// interface's index in the low half, and [`Watched::packed`] in the high half. Of two interfaces
/// with the same seat, the second is only in [`WATCHED`].
#[map]
pub static SEATED: Array<u64> = Array::pinned(SEATS, 0);

/// Counters per CPU and place: [`counter`](twheel_common::counter) says what each place counts.
#[map]
pub static COUNTERS: PerCpuArray<Counters> = PerCpuArray::pinned(counter::FIRST_INTERFACE, 0);

/// The place in [`COUNTERS`] that programs on this CPU count in, unused if there is one interface;
/// and what is to be added to the next packet's interface, if that is in [another network
/// namespace](twheel_common::state::elsewhere): the program of that interface stores it, and goes
/// on in one of ours. Pinned for those programs.
#[map]
pub static PLACE: PerCpuArray<[u32; 2]> = PerCpuArray::pinned(1, 0);

/// The interface of each place in [`COUNTERS`]; 0: none. Written by the running twheel, for the
/// next `twheel run` and for readers.
#[map]
pub static COUNTED: Array<u32> = Array::pinned(counter::FIRST_INTERFACE, 0);

/// The name of each of those interfaces, padded with zeros. Written as [`COUNTED`] is.
#[map]
pub static LABELS: Array<[u8; 64]> = Array::pinned(counter::FIRST_INTERFACE, 0);

/// The number of each zone, by its place in the keys of flows. Written as [`COUNTED`] is.
#[map]
pub static ZONES: Array<u32> = Array::pinned(key::ZONES as u32, 0);

/// Answers of programs that userspace runs with live frames, by the number of the call; one entry
/// if it does not. A caller that dies before it has read its answer leaves it, and later answers
/// evict it. Each run creates it anew, and pins it with the programs that fill it.
#[map]
pub static CALLS: LruHashMap<u64, Answer> = LruHashMap::with_max_entries(1, 0);

/// What the pinned maps were made for. Written by the running twheel, for the next `twheel run`.
#[map]
pub static META: Array<Meta> = Array::pinned(1, 0);

/// What the running twheel proves by whose a registration is. Unlike other maps it is not for the
/// group that may use the instance.
#[map]
pub static OFFLOAD_KEY: Array<[u64; 2]> = Array::pinned(1, 0);

/// Values that the clock has had: [`jiffies`]. Not pinned: a value that is not recorded counts as
/// possibly skipped.
#[map]
pub static JIFFIES: Array<u64> = Array::with_max_entries(jiffies::WORDS, 0);

/// Virtual time, in units; read only if the configuration says so.
#[map]
pub static CLOCK: Array<u64> = Array::pinned(1, 0);
