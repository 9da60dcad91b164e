//! Counters of the data plane: one set per CPU, written by that CPU alone; and one that the loader writes.

use crate::named;

named! {
    /// A counter; its discriminant is its index in [`Counters`].
    #[repr(u32)]
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Counter {
        /// packets of a flow in the table
        Touched = "touched",
        /// flows that entered the table
        Created = "created",
        /// flows that left it because their deadline had passed
        Expired = "expired",
        /// flows that left it early to make room for another
        Evicted = "evicted",
        /// those of them that were of a source with more than its share of a full table
        OverShare = "over_share",
        /// flows that userspace has deleted
        Deleted = "deleted",
        /// flows that ended because a SYN began another with the same key
        Superseded = "superseded",
        /// packets that changed the state of their flow
        Changed = "changed",
        /// packets that are neither IPv4 nor IPv6
        NotIp = "not_ip",
        /// IP packets of no protocol that is tracked
        NotTracked = "not_tracked",
        /// fragments other than the first
        Fragment = "fragment",
        /// packets that end before the header of their protocol does
        Truncated = "truncated",
        /// packets whose headers contradict themselves
        Malformed = "malformed",
        /// TCP packets with flags that no stack sends together
        BadFlags = "bad_flags",
        /// packets that do not belong where their flow stands, and RSTs outside its window: they change nothing
        Ignored = "ignored",
        /// packets that another interface had counted before
        SeenAgain = "seen_again",
        /// times that a side's packets stopped coming by the interface that counted them, and are counted by another
        Moved = "moved",
        /// packets that came by a way by which their sender's do not come: they change nothing, but with --one-armed
        SameWay = "same_way",
        /// RST or FIN of a flow that is not in the table
        NoFlow = "no_flow",
        /// packets that would have begun a flow but found the table full
        TableFull = "table_full",
        /// packets that would have begun a flow but found no free record in its window
        WindowFull = "window_full",
        /// packets whose flow another CPU was just entering or ending: not tracked
        Raced = "raced",
        /// events of the packet path that found the ring full
        EventsLost = "events_lost",
        /// retransmission timers that were started
        RtoStarted = "rto_started",
        /// retransmission timers that have expired
        RtoExpired = "rto_expired",
        /// flows whose retransmissions were found to be answered no more
        Stalled = "stalled",
        /// packets of expired flows that were dropped
        EnforcedDropped = "enforced_dropped",
        /// packets of expired flows that were answered with a RST
        EnforcedReset = "enforced_reset",
        /// packets of expired flows that were dropped because their source has had its answers
        EnforcedLimited = "enforced_limited",
        /// visits of the wheel to a flow
        Visits = "visits",
        /// visits that found the deadline ahead and armed the flow again
        Rearmed = "rearmed",
        /// flows whose deadline a packet has brought forward on another CPU than that of their wheel
        Posted = "posted",
        /// times the stepper stopped because the ring was full
        RingFull = "ring_full",
        /// times the packet path called a sleeping stepper
        Wakes = "wakes",
        /// links of the wheel to what is no flow of it: always 0, or the data plane has a defect
        Orphans = "orphans",
        /// ends of flows that are not in the history: the disk was too slow or full, or a run was killed meanwhile
        HistoryLost = "history_lost",
        /// packets of an interface that was just being let go of: not looked at
        NotWatched = "not_watched",
        /// actions that were to be done to expired flows
        ReapAsked = "reap_asked",
        /// those of them of which it is known what became of them
        ReapSettled = "reap_settled",
        /// those of them that a run had before it when it was killed, at most
        ReapLost = "reap_lost",
    }
}

impl Counter {
    /// What became of a packet: each counts in one of these. (`ignored`, `same_way` and `raced` say something of packets that are
    /// `touched`, too.)
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

/// The place where all is counted that is of no interface; and everything, where there is one interface.
pub const NO_INTERFACE: u32 = 0;
/// The place where the loader counts, and nobody else: on the first CPU's.
pub const LOADER: u32 = 1;
/// The first place that an interface can have. There are as many as the map has room for.
pub const FIRST_INTERFACE: u32 = 2;
/// Interfaces for which there is room, at most: a [`Point`](crate::point::Point) has 15 bits for their places.
pub const MAX_INTERFACES: u32 = (1 << 15) - FIRST_INTERFACE;

/// The counters of a CPU, indexed by [`Counter`].
#[repr(C)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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

    /// Of several CPUs together.
    pub fn sum<'a>(all: impl IntoIterator<Item = &'a Self>) -> Self {
        let mut sum = Self::default();
        all.into_iter().for_each(|one| sum.add(one));
        sum
    }

    /// Adds another CPU's.
    pub fn add(&mut self, other: &Self) {
        for (sum, value) in self.0.iter_mut().zip(other.0) {
            *sum += value;
        }
    }

    /// Flows in the table.
    pub fn live(&self) -> u64 {
        // The CPUs are read one after the other: a flow may be counted out before it is counted in.
        self.get(Counter::Created)
            .saturating_sub(self.get(Counter::Expired))
            .saturating_sub(self.get(Counter::Evicted))
            .saturating_sub(self.get(Counter::Deleted))
    }
}
