//! What a flow is: its key, its state, and when it is due.

use core::net::{Ipv6Addr, SocketAddr};

use crate::state::Seen;

/// One of the two endpoints of a [`FlowKey`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Direction {
    /// Sent by the key's `low` endpoint.
    FromLow = 0,
    /// Sent by the key's `high` endpoint.
    FromHigh = 1,
}

/// Names a flow: protocol, the two endpoints in order, so that both directions of a connection have the same key, and
/// where those addresses hold: VLAN tags and a zone. IPv4 addresses are mapped into IPv6. All 40 bytes are set, always.
///
/// Addresses and ports are kept in network byte order; the order of the endpoints is that of the
/// words as this machine reads them, and means nothing beyond "the same for both directions".
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FlowKey {
    low: [u64; 2],
    high: [u64; 2],
    /// From the lowest bit: 16 of the port of `low`, 16 of that of `high`, 2 of the [code](proto_code) of the protocol, 6 of
    /// the [zone](Self::zone), 12 of the outer VLAN identifier, 12 of the inner one.
    ports: u64,
}

/// Two bits that tell the tracked protocols apart: TCP 1, UDP 2, ICMP 0, ICMPv6 3.
#[inline(always)]
pub const fn proto_code(proto: u8) -> u8 {
    proto >> 1 & 1 | proto >> 3 & 2
}

const _: () =
    assert!(proto_code(6) == 1 && proto_code(17) == 2 && proto_code(1) == 0 && proto_code(58) == 3);

/// Zones that a table tells apart, beside 0 for interfaces that have none.
pub const ZONES: usize = 1 << ZONE_BITS;
const ZONE_BITS: u32 = 6;
const PROTO: u32 = 32;
const ZONE: u32 = 34;
const VLAN: u32 = 40;
/// Bits of a VLAN identifier (IEEE 802.1Q).
pub const VLAN_BITS: u32 = 12;

impl FlowKey {
    /// All fields 0: no flow.
    pub const NONE: Self = Self {
        low: [0; 2],
        high: [0; 2],
        ports: 0,
    };

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
        let ports = u64::from_le_bytes([a, b, c, d, proto_code(proto), 0, 0, 0]);
        (Self { low, high, ports }, direction)
    }

    /// The same flow in these VLANs: the outer identifier in the low 12 bits, the inner one above it, 0 for none. To be
    /// called once, of a key that has none.
    #[inline(always)]
    pub fn in_vlans(mut self, vlans: u32) -> Self {
        self.ports |= u64::from(vlans) << VLAN;
        self
    }

    /// The same flow in a zone: its place among those of the table, below [`ZONES`]. To be called once, of a key that has
    /// none.
    #[inline(always)]
    pub fn in_zone(mut self, zone: u32) -> Self {
        self.ports |= u64::from(zone & (ZONES as u32 - 1)) << ZONE;
        self
    }

    /// The VLANs, as [`in_vlans`](Self::in_vlans) takes them.
    #[inline(always)]
    pub fn packed_vlans(&self) -> u32 {
        (self.ports >> VLAN) as u32
    }

    /// The outer and the inner VLAN identifier; 0: none.
    pub fn vlans(&self) -> [u16; 2] {
        let vlans = self.packed_vlans();
        [vlans & 0xfff, vlans >> VLAN_BITS].map(|vlan| vlan as u16)
    }

    /// The zone, by its place in the table; 0: none.
    #[inline(always)]
    pub fn zone(&self) -> u8 {
        (self.ports >> ZONE) as u8 & (ZONES as u8 - 1)
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

    /// Everything but the addresses, in one word.
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
    #[inline(always)]
    pub fn proto(&self) -> u8 {
        match self.ports >> PROTO & 3 {
            0 => 1,
            1 => 6,
            2 => 17,
            _ => 58,
        }
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

/// What one side of a flow has sent.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Packets.
    pub packets: u64,
    /// Their bytes, from the IP header on: conntrack's count.
    pub bytes: u64,
}

/// What both have: the key's low endpoint first.
pub type Account = [Traffic; 2];

/// What CPUs share of a flow, in one word, so that whoever decides on it decides on all of it: from the
/// lowest bit 32 of the clock at the latest packet (the *stamp*), 12 of the generation, 20 of [`Seen`].
///
/// It changes by compare-and-swap; only a younger stamp is stored without, into its half of the word.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Word(pub u64);

impl Word {
    /// A word.
    #[inline(always)]
    pub fn new(now: u64, generation: u16, seen: Seen) -> Self {
        Self(now & 0xffff_ffff | u64::from(generation & 0xfff) << 32 | u64::from(seen.0) << 44)
    }

    /// Low 32 bits of the clock at the latest packet.
    #[inline(always)]
    pub fn stamp(self) -> u32 {
        self.0 as u32
    }

    /// Counts the flows that a place in the table has had, and the lives of a flow, wrapping.
    #[inline(always)]
    pub fn generation(self) -> u16 {
        (self.0 >> 32) as u16 & 0xfff
    }

    /// What was seen.
    #[inline(always)]
    pub fn seen(self) -> Seen {
        Seen((self.0 >> 44) as u32)
    }

    /// The bits of the word's high half that end [`Seen::is_starting`] when they alone are kept.
    pub const STARTED: u32 = !(Seen::STARTING << 12);

    /// The same for [`Seen::is_posted`].
    pub const DELIVERED: u32 = !(Seen::POSTED << 12);

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

    /// The same packet and life, of which this has now been seen.
    #[inline(always)]
    pub fn with_seen(self, seen: Seen) -> Self {
        Self::new(self.0, self.generation(), seen)
    }

    /// Whether both say the same of a flow; that it is [posted](Seen::is_posted) says nothing of it.
    #[inline(always)]
    pub fn is_same(self, other: Self) -> bool {
        (self.0 ^ other.0) & !(u64::from(Seen::POSTED) << 44) == 0
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
/// was idle for its whole timeout (units). `doubt`: by how many units its last packet may have come later than its stamp says.
#[inline(always)]
pub fn visit(now: u64, word: Word, timeout: u32, doubt: impl FnOnce(u32) -> u32) -> Visit {
    let idle = idle(now, word.stamp());
    let mut least = timeout;
    if idle >= least {
        // Asked by few visits.
        least = least.saturating_add(doubt(word.stamp()));
    }
    if idle >= least {
        return Visit::Expire;
    }
    Visit::Rearm(now + u64::from(least - idle))
}

/// Units since a flow was created, of which the low 32 bits are kept. One that seems to be created a little
/// later than now was begun by another CPU after `now` was read, and is young.
#[inline(always)]
pub fn age(now: u64, created: u32) -> u32 {
    let age = (now as u32).wrapping_sub(created);
    if age < u32::MAX << 16 { age } else { 0 }
}

/// The oldest that a flow gets, units; who is older is kept at that. (Half of what 32 bits can tell:
/// a visit that comes late still finds it.)
pub const MAX_AGE: u32 = 1 << 31;
