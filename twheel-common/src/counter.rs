//! Counters of the data plane: one set per CPU, which only that CPU writes; and one set that the
//! running twheel writes.

use crate::named;
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

named! {
    /// A counter; its discriminant is its index in [`Counters`].
    #[repr(u32)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Counter {
        /// packets of a flow in the table
        Touched = "touched",
        /// flows added to the table
        Created = "created",
        /// flows removed because their timeout ran out (idle, closed, reset)
        Expired = "expired",
        /// flows removed early to make room for a new one
        Evicted = "evicted",
        /// evicted flows whose source was over its quota (--source-share)
        OverQuota = "over_quota",
        /// flows deleted from userspace
        Deleted = "deleted",
        /// flows that ended because a new flow with the same endpoints took over their record
        Superseded = "superseded",
        /// packets that changed the state of their flow
        Changed = "changed",
        /// packets that are neither IPv4 nor IPv6
        NotIp = "not_ip",
        /// IP packets of a protocol that is not tracked
        NotTracked = "not_tracked",
        /// fragments other than the first
        Fragment = "fragment",
        /// packets that end within the header of their protocol
        Truncated = "truncated",
        /// packets whose headers contradict each other
        Malformed = "malformed",
        /// TCP packets with a combination of flags that no stack sends
        BadFlags = "bad_flags",
        /// packets that do not fit the flow's state or sequence numbers: they change nothing and keep nothing alive
        Ignored = "ignored",
        /// packets already counted at another observation point
        SeenAgain = "seen_again",
        /// times a side's observation point moved to another interface or direction
        Moved = "moved",
        /// packets that came in where only the other side's packets do: they change nothing, except with --one-armed
        SameWay = "same_way",
        /// packets that match no flow and cannot begin one, such as a RST or FIN
        NoFlow = "no_flow",
        /// packets that would have begun a flow, but the table was full
        TableFull = "table_full",
        /// packets that would have begun a flow, but no record in its hash window was free
        WindowFull = "window_full",
        /// packets that could not change their flow because another CPU was adding, changing or ending it
        Raced = "raced",
        /// events lost because the ring was full when the packet path wrote them
        EventsLost = "events_lost",
        /// retransmission timers started
        RtoStarted = "rto_started",
        /// retransmission timers expired
        RtoExpired = "rto_expired",
        /// flows whose retransmissions were not answered
        Stalled = "stalled",
        /// packets of expired flows dropped by enforce, because the action is enforce=drop or the packet cannot be answered
        EnforcedDropped = "enforced_dropped",
        /// packets of expired flows answered with a RST by enforce
        EnforcedReset = "enforced_reset",
        /// packets of expired flows dropped by enforce because their source was over --enforce-rate
        EnforcedLimited = "enforced_limited",
        /// timer visits
        Visits = "visits",
        /// timer visits that found the deadline in the future and re-armed the flow
        Rearmed = "rearmed",
        /// flows queued for another CPU because a packet brought their deadline forward
        Posted = "posted",
        /// times a stepper stopped because the ring was full
        RingFull = "ring_full",
        /// times the packet path woke a sleeping stepper
        Wakes = "wakes",
        /// invalid wheel entries: always 0, unless the data plane has a defect
        Orphans = "orphans",
        /// events missing from the history: the disk was slow or full, or an earlier run was killed or kept no history (an upper bound)
        HistoryLost = "history_lost",
        /// packets not looked at because their interface was just being detached
        NotWatched = "not_watched",
        /// reap actions requested
        ReapAsked = "reap_asked",
        /// reap actions whose outcome is known
        ReapSettled = "reap_settled",
        /// reap actions that were pending when a run was killed and were not done (an upper bound)
        ReapLost = "reap_lost",
    }
}

impl Counter {
    /// What became of a packet: each packet counts in exactly one of these. (`ignored`, `same_way`
    /// and `raced` count packets that also count as `touched`.)
    pub const VERDICTS: [Self; 16] = [
        Self::Touched,
        Self::SeenAgain,
        Self::Created,
        Self::NotIp,
        Self::NotTracked,
        Self::Fragment,
        Self::Truncated,
        Self::Malformed,
        Self::BadFlags,
        Self::NoFlow,
        Self::TableFull,
        Self::WindowFull,
        Self::EnforcedDropped,
        Self::EnforcedReset,
        Self::EnforcedLimited,
        Self::NotWatched,
    ];
}

/// Number of counters.
pub const COUNT: usize = Counter::ALL.len();

/// Index of the counters for what belongs to no interface; with only one interface, for everything.
pub const NO_INTERFACE: u32 = 0;
/// Index of the counters that only the running twheel writes, in those of the first CPU.
pub const USERSPACE: u32 = 1;
/// The first index for an interface. There are as many as the map has capacity for.
pub const FIRST_INTERFACE: u32 = 2;
/// Most interfaces: a [`Point`](crate::point::Point) has 15 bits for their indexes.
pub const MAX_INTERFACES: u32 = (1 << 15) - FIRST_INTERFACE;

/// The counters of a CPU, indexed by [`Counter`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct Counters(pub [u64; COUNT]);

impl Default for Counters {
    fn default() -> Self {
        Self([0; COUNT])
    }
}

impl Counters {
    /// One counter.
    pub fn get(&self, counter: Counter) -> u64 {
        self.0[counter as usize]
    }

    /// The sum of the counters of several CPUs.
    pub fn sum<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut sum = Self::default();
        all.into_iter().for_each(|one| sum.add(one));
        sum
    }

    /// Adds the counters of another CPU.
    pub fn add(&mut self, other: &Self) {
        for (sum, value) in self.0.iter_mut().zip(other.0) {
            *sum += value;
        }
    }

    /// Number of flows in the table.
    pub fn live(&self) -> u64 {
        // The CPUs are read one after the other, so a flow's end may be read without its beginning.
        self.get(Counter::Created)
            .saturating_sub(self.get(Counter::Expired))
            .saturating_sub(self.get(Counter::Evicted))
            .saturating_sub(self.get(Counter::Deleted))
    }
}
