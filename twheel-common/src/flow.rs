//! What a flow is: its key, its state, and when it is due.

use core::net::{Ipv6Addr, SocketAddr};

use crate::packet::tcp;

/// One of the two endpoints of a [`FlowKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Sent by the key's `low` endpoint.
    FromLow,
    /// Sent by the key's `high` endpoint.
    FromHigh,
}

/// Names a flow: protocol and the two endpoints in order, so that both directions of a connection
/// have the same key. IPv4 addresses are mapped into IPv6. All 40 bytes are set, always.
///
/// Addresses and ports are kept in network byte order; the order of the endpoints is that of the
/// words as this machine reads them, and means nothing beyond "the same for both directions".
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowKey {
    low: [u64; 2],
    high: [u64; 2],
    /// From the lowest byte: port of `low`, port of `high`, protocol, three zero bytes.
    ports: u64,
}

impl FlowKey {
    /// The key of the flow between two endpoints (addresses and ports in network byte order), and
    /// which of the two the source is.
    #[inline(always)]
    pub fn new(
        source: [u64; 2],
        source_port: u16,
        destination: [u64; 2],
        destination_port: u16,
        proto: u8,
    ) -> (Self, Direction) {
        let source_is_low = if source[0] != destination[0] {
            source[0] < destination[0]
        } else if source[1] != destination[1] {
            source[1] < destination[1]
        } else {
            source_port <= destination_port
        };
        let ([low, high], [low_port, high_port], direction) = if source_is_low {
            (
                [source, destination],
                [source_port, destination_port],
                Direction::FromLow,
            )
        } else {
            (
                [destination, source],
                [destination_port, source_port],
                Direction::FromHigh,
            )
        };
        let [a, b] = low_port.to_ne_bytes();
        let [c, d] = high_port.to_ne_bytes();
        let ports = u64::from_le_bytes([a, b, c, d, proto, 0, 0, 0]);
        (Self { low, high, ports }, direction)
    }

    /// From what [`addresses`](Self::addresses) and [`ports`](Self::ports) give.
    #[inline(always)]
    pub fn from_parts([a, b, c, d]: [u64; 4], ports: u64) -> Self {
        Self {
            low: [a, b],
            high: [c, d],
            ports,
        }
    }

    /// The addresses of both endpoints, the low one's first.
    #[inline(always)]
    pub fn addresses(&self) -> [u64; 4] {
        [self.low[0], self.low[1], self.high[0], self.high[1]]
    }

    /// The ports and the protocol, in the low 40 bits. Never 0.
    #[inline(always)]
    pub fn ports(&self) -> u64 {
        self.ports
    }

    /// Writes the key, word by word: the BPF target has no `memmove`, to which the compiler would
    /// turn an assignment between two places of memory.
    ///
    /// # Safety
    ///
    /// `place` is valid for writes and aligned, and no reference to it is used meanwhile.
    #[inline(always)]
    pub unsafe fn store(&self, place: *mut Self) {
        // SAFETY: the caller's promise.
        unsafe {
            (&raw mut (*place).low[0]).write_volatile(self.low[0]);
            (&raw mut (*place).low[1]).write_volatile(self.low[1]);
            (&raw mut (*place).high[0]).write_volatile(self.high[0]);
            (&raw mut (*place).high[1]).write_volatile(self.high[1]);
            (&raw mut (*place).ports).write_volatile(self.ports);
        }
    }

    /// IANA protocol number.
    pub fn proto(&self) -> u8 {
        self.ports.to_le_bytes()[4]
    }

    /// The endpoint that sends in this direction.
    pub fn sender(&self, direction: Direction) -> SocketAddr {
        let [a, b, c, d, ..] = self.ports.to_le_bytes();
        let (address, port) = match direction {
            Direction::FromLow => (self.low, [a, b]),
            Direction::FromHigh => (self.high, [c, d]),
        };
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&address[0].to_ne_bytes());
        bytes[8..].copy_from_slice(&address[1].to_ne_bytes());
        let address = Ipv6Addr::from(bytes).to_canonical();
        SocketAddr::new(address, u16::from_be_bytes(port))
    }
}

impl Direction {
    /// The other one.
    pub fn reverse(self) -> Self {
        match self {
            Self::FromLow => Self::FromHigh,
            Self::FromHigh => Self::FromLow,
        }
    }
}

/// What has been seen of a flow. Bits are only ever added within a generation of the flow, so that
/// CPUs that see its packets at once cannot undo one another.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen(pub u16);

impl Seen {
    /// A SYN of the initiator.
    const SYN: u16 = 1 << 0;
    /// A SYN/ACK of the responder.
    const SYN_ACK: u16 = 1 << 1;
    /// A segment after the handshake.
    const ACK: u16 = 1 << 2;
    /// A FIN of the key's low endpoint.
    const FIN_LOW: u16 = 1 << 3;
    /// A FIN of the key's high endpoint.
    const FIN_HIGH: u16 = 1 << 4;
    /// A RST.
    const RST: u16 = 1 << 5;
    /// The first segment was none of a handshake.
    const PICKUP: u16 = 1 << 6;
    /// The initiator is the key's high endpoint.
    const INITIATOR_HIGH: u16 = 1 << 7;

    /// A new life of the flow has begun, and when is not yet noted.
    const STARTING: u16 = 1 << 14;

    /// The flow has ended: nothing can be added to this. (No `ACK`, so that the test that nearly every
    /// packet passes tells it apart.)
    pub const DEAD: Self = Self(1 << 15);

    const FINS: u16 = Self::FIN_LOW | Self::FIN_HIGH;

    /// What the first segment of a flow says, or `None` where it is no reason to track one: a RST
    /// or a FIN of a flow that is not known is the end of something, not its beginning.
    #[inline(always)]
    pub fn first(direction: Direction, flags: u8) -> Option<Self> {
        if flags & (tcp::RST | tcp::FIN) != 0 {
            return None;
        }
        let syn_ack = flags & (tcp::SYN | tcp::ACK) == tcp::SYN | tcp::ACK;
        let seen = if syn_ack {
            Self::SYN_ACK
        } else if flags & tcp::SYN != 0 {
            Self::SYN
        } else {
            Self::ACK | Self::PICKUP
        };
        // A SYN/ACK comes from the responder.
        let from_high = matches!(direction, Direction::FromHigh);
        let initiator = if from_high != syn_ack {
            Self::INITIATOR_HIGH
        } else {
            0
        };
        Some(Self(seen | initiator))
    }

    /// What a further segment of the flow says.
    #[inline(always)]
    pub fn next(self, direction: Direction, flags: u8) -> Change {
        let from_high = matches!(direction, Direction::FromHigh);
        // Nearly every packet.
        if flags & (tcp::SYN | tcp::FIN | tcp::RST) == 0 && self.0 & Self::ACK != 0 {
            return Change::Nothing;
        }
        if self == Self::DEAD {
            return Change::Ended;
        }
        let added = if flags & tcp::RST != 0 {
            Self::RST
        } else if flags & tcp::SYN != 0 {
            if flags & tcp::ACK != 0 {
                Self::SYN_ACK
            } else if self.is_closed() {
                // Port reuse: the old connection is over (RFC 9293, section 3.6.1).
                return match Self::first(direction, flags) {
                    Some(seen) => Change::NewGeneration(seen),
                    None => Change::Nothing,
                };
            } else {
                // A SYN sent again, or a stray one: neither says anything new.
                0
            }
        } else {
            let fin = match (flags & tcp::FIN != 0, from_high) {
                (false, _) => 0,
                (true, false) => Self::FIN_LOW,
                (true, true) => Self::FIN_HIGH,
            };
            // The responder alone cannot complete a handshake that it has not answered (it may
            // send a challenge ACK, RFC 5961 section 4).
            let initiator = from_high == (self.0 & Self::INITIATOR_HIGH != 0);
            let ack = if initiator || self.0 & Self::SYN_ACK != 0 {
                Self::ACK
            } else {
                0
            };
            fin | ack
        };
        if self.0 | added == self.0 {
            Change::Nothing
        } else {
            Change::Add(Self(self.0 | added))
        }
    }

    /// The same, but [`is_starting`](Self::is_starting).
    #[inline(always)]
    pub fn starting(self) -> Self {
        Self(self.0 | Self::STARTING)
    }

    /// Whether `created` may still be that of the life before.
    #[inline(always)]
    pub fn is_starting(self) -> bool {
        self.0 & Self::STARTING != 0
    }

    /// Reset, or ended from both sides.
    #[inline(always)]
    pub fn is_closed(self) -> bool {
        self.0 & Self::RST != 0 || self.0 & Self::FINS == Self::FINS
    }

    /// A RST was seen.
    #[inline(always)]
    pub fn is_reset(self) -> bool {
        self.0 & Self::RST != 0
    }

    /// Established and not closed: what a full table keeps.
    #[inline(always)]
    pub fn is_established(self) -> bool {
        self.0 & Self::ACK != 0 && !self.is_closed()
    }

    /// The state, by conntrack's name for it.
    pub fn state(self) -> State {
        if self.0 & Self::RST != 0 {
            State::Close
        } else if self.0 & Self::FINS == Self::FINS {
            State::TimeWait
        } else if self.0 & Self::FINS != 0 {
            State::FinWait
        } else if self.0 & Self::ACK != 0 {
            State::Established
        } else if self.0 & Self::SYN_ACK != 0 {
            State::SynRecv
        } else {
            State::SynSent
        }
    }

    /// The first segment seen was none of a handshake.
    pub fn is_pickup(self) -> bool {
        self.0 & Self::PICKUP != 0
    }

    /// The direction in which the initiator sends.
    pub fn initiator(self) -> Direction {
        if self.0 & Self::INITIATOR_HIGH != 0 {
            Direction::FromHigh
        } else {
            Direction::FromLow
        }
    }
}

/// What a segment does to [`Seen`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The segment says nothing new.
    Nothing,
    /// The flow is now this.
    Add(Seen),
    /// The flow is over and another with the same key begins.
    NewGeneration(Seen),
    /// The flow has ended already: it is about to leave the table.
    Ended,
}

/// States of a TCP flow, with the names of `nf_conntrack`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    /// A SYN and nothing else.
    SynSent,
    /// A SYN/ACK, not yet answered.
    SynRecv,
    /// The handshake is over, or was never seen.
    Established,
    /// A FIN from one side.
    FinWait,
    /// A FIN from both sides.
    TimeWait,
    /// A RST.
    Close,
}

impl State {
    /// All of them, in the order of a connection's life.
    pub const ALL: [Self; 6] = [
        Self::SynSent,
        Self::SynRecv,
        Self::Established,
        Self::FinWait,
        Self::TimeWait,
        Self::Close,
    ];

    /// conntrack's name, in lower case.
    pub const fn name(self) -> &'static str {
        match self {
            Self::SynSent => "syn_sent",
            Self::SynRecv => "syn_recv",
            Self::Established => "established",
            Self::FinWait => "fin_wait",
            Self::TimeWait => "time_wait",
            Self::Close => "close",
        }
    }
}

/// What CPUs share of a flow, in one word, so that whoever decides on it decides on all of it: from the
/// lowest bit 32 of the clock at the latest packet (the *stamp*), 16 of the generation, 16 of [`Seen`].
///
/// It changes by compare-and-swap; only a younger stamp is stored without, into its half of the word.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word(pub u64);

impl Word {
    /// A word.
    #[inline(always)]
    pub fn new(now: u64, generation: u16, seen: Seen) -> Self {
        Self(now & 0xffff_ffff | u64::from(generation) << 32 | u64::from(seen.0) << 48)
    }

    /// Low 32 bits of the clock at the latest packet.
    #[inline(always)]
    pub fn stamp(self) -> u32 {
        self.0 as u32
    }

    /// Counts the flows that a place in the table has had, and the lives of a flow, wrapping.
    #[inline(always)]
    pub fn generation(self) -> u16 {
        (self.0 >> 32) as u16
    }

    /// What was seen.
    #[inline(always)]
    pub fn seen(self) -> Seen {
        Seen((self.0 >> 48) as u16)
    }

    /// The bits of the word's high half that end [`Seen::is_starting`] when they alone are kept.
    pub const STARTED: u32 = !((Seen::STARTING as u32) << 16);

    /// Whether a packet at `now` is younger than the stamp.
    #[inline(always)]
    pub fn is_older_than(self, now: u64) -> bool {
        (now as u32).wrapping_sub(self.stamp()) as i32 > 0
    }

    /// The same life with a packet at `now`, of which this has now been seen.
    #[inline(always)]
    pub fn with(self, now: u64, seen: Seen) -> Self {
        let stamp = if self.is_older_than(now) { now } else { self.0 };
        Self::new(stamp, self.generation(), seen)
    }

    /// The same flow, ended.
    #[inline(always)]
    pub fn dead(self) -> Self {
        Self::new(self.0, self.generation(), Seen::DEAD)
    }

    /// Whether the flow has ended.
    #[inline(always)]
    pub fn is_dead(self) -> bool {
        self.seen() == Seen::DEAD
    }
}

/// How long a flow may be idle, in clock units.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Timeouts {
    /// Any flow that is not closed.
    pub idle: u32,
    /// A flow after RST, or after FIN from both sides.
    pub close: u32,
}

impl Timeouts {
    /// The timeout of a flow of which this was seen.
    #[inline(always)]
    pub fn of(&self, seen: Seen) -> u32 {
        if seen.is_closed() {
            self.close
        } else {
            self.idle
        }
    }

    /// The longest wait between two looks at a flow. A packet can bring a deadline forward, and
    /// nothing tells the wheel; so nobody waits longer than the shortest timeout a flow can fall to.
    #[inline(always)]
    pub fn longest_hop(&self) -> u32 {
        if self.close < self.idle {
            self.close
        } else {
            self.idle
        }
    }
}

/// Units for which a flow has been idle. Stamps are the low 32 bits of the clock and wrap; a stamp
/// that seems to lie ahead was written by another CPU after `now` was read, and is young.
#[inline(always)]
pub fn idle(now: u64, last_seen: u32) -> u32 {
    let idle = (now as u32).wrapping_sub(last_seen);
    if idle as i32 >= 0 { idle } else { 0 }
}

/// What a visit of the wheel finds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Visit {
    /// The flow's deadline has passed.
    Expire,
    /// It has not: look again at this time (units).
    Rearm(u64),
}

/// Decides what becomes of a flow that the wheel visits. Never early: `Expire` only where the flow
/// was idle for its whole timeout.
#[inline(always)]
pub fn visit(now: u64, word: Word, timeouts: &Timeouts) -> Visit {
    let idle = idle(now, word.stamp());
    let timeout = timeouts.of(word.seen());
    if idle >= timeout {
        return Visit::Expire;
    }
    let left = timeout - idle;
    let hop = timeouts.longest_hop();
    Visit::Rearm(now + u64::from(if left < hop { left } else { hop }))
}

/// Units since a flow was created, of which the low 32 bits are kept.
#[inline(always)]
pub fn age(now: u64, created: u32) -> u32 {
    (now as u32).wrapping_sub(created)
}

/// The oldest that a flow gets, units; who is older is kept at that. (Half of what 32 bits can tell:
/// a visit that comes late still finds it.)
pub const MAX_AGE: u32 = 1 << 31;
