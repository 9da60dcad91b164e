//! The key of a flow: its protocol, its two endpoints, and the VLANs and zone in which their
//! addresses are valid.

use core::net::{Ipv6Addr, SocketAddr};
#[cfg(feature = "user")]
use zerocopy::{FromBytes, Immutable, IntoBytes};

/// Which of the two endpoints of a [`FlowKey`] sent a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Direction {
    /// Sent by the key's `low` endpoint.
    FromLow = 0,
    /// Sent by the key's `high` endpoint.
    FromHigh = 1,
}

/// Names a flow: the protocol, the two endpoints in a fixed order, so that both directions of a
/// connection have the same key, and where those addresses are valid: VLAN tags and a zone. IPv4
/// addresses are mapped into IPv6. All 40 bytes are always set.
///
/// Addresses and ports are kept in network byte order. The endpoints are ordered by their words as
/// this machine reads them; the order means nothing beyond "the same for both directions".
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[cfg_attr(feature = "user", derive(FromBytes, IntoBytes, Immutable))]
pub struct FlowKey {
    low: [u64; 2],
    high: [u64; 2],
    /// From the lowest bit: 16 bits of the port of `low`, 16 of the port of `high`, 2 of the
    /// [code](proto_code) of the protocol, 6 of the [zone](Self::zone), 12 of the outer VLAN
    /// identifier, 12 of the inner one.
    ports: u64,
}

/// Two bits that tell the tracked protocols apart: TCP 1, UDP 2, ICMP 0, ICMPv6 3.
#[inline(always)]
pub const fn proto_code(proto: u8) -> u8 {
    proto >> 1 & 1 | proto >> 3 & 2
}

const _: () =
    assert!(proto_code(6) == 1 && proto_code(17) == 2 && proto_code(1) == 0 && proto_code(58) == 3);

/// How many zones a table tells apart, including 0, which stands for interfaces without a zone.
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
    /// the direction of a packet from `source` to `destination`.
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

    /// The key of the same flow in these VLANs: the outer identifier in the low 12 bits, the inner
    /// one above it, 0 for none. Call it once, on a key without VLANs.
    #[inline(always)]
    pub fn in_vlans(mut self, vlans: u32) -> Self {
        self.ports |= u64::from(vlans) << VLAN;
        self
    }

    /// The key of the same flow in a zone, given by the zone's index in the table, below [`ZONES`].
    /// Call it once, on a key without a zone.
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

    /// The outer and the inner VLAN identifier; 0 for none.
    pub fn vlans(&self) -> [u16; 2] {
        let vlans = self.packed_vlans();
        [vlans & 0xfff, vlans >> VLAN_BITS].map(|vlan| vlan as u16)
    }

    /// The zone, by its index in the table; 0 for none.
    #[inline(always)]
    pub fn zone(&self) -> u8 {
        (self.ports >> ZONE) as u8 & (ZONES as u8 - 1)
    }

    /// Builds a key from what [`addresses`](Self::addresses) and [`ports`](Self::ports) return.
    #[inline(always)]
    pub fn from_parts([a, b, c, d]: [u64; 4], ports: u64) -> Self {
        Self {
            low: [a, b],
            high: [c, d],
            ports,
        }
    }

    /// The addresses of both endpoints, that of the low one first.
    #[inline(always)]
    pub fn addresses(&self) -> [u64; 4] {
        [self.low[0], self.low[1], self.high[0], self.high[1]]
    }

    /// Everything but the addresses, in one word.
    #[inline(always)]
    pub fn ports(&self) -> u64 {
        self.ports
    }

    /// Writes the key to memory word by word: the BPF target has no `memmove`, which the compiler
    /// would call for an assignment from memory to memory.
    ///
    /// # Safety
    ///
    /// `place` is valid for writes and aligned, and no reference to it is used meanwhile.
    #[inline(always)]
    pub unsafe fn store(&self, place: *mut Self) {
        // SAFETY: the caller promises that `place` is valid for writes and aligned.
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
    /// The opposite direction.
    pub fn reverse(self) -> Self {
        match self {
            Self::FromLow => Self::FromHigh,
            Self::FromHigh => Self::FromLow,
        }
    }
}
