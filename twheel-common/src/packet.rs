//! From the bytes of a frame to a TCP segment of a flow.
//!
//! Ethernet, up to two VLAN tags (802.1Q, 802.1ad), IPv4 with options (RFC 791), IPv6 with
//! extension headers (RFC 8200), TCP (RFC 9293). The parser is generic over how bytes are read, so
//! that XDP frames, socket buffers and plain slices all go through it.

use crate::flow::{Direction, FlowKey};

/// Reads bytes of a frame.
pub trait Bytes {
    /// The `N` bytes at `offset`, or `None` where the frame (or what can be reached of it) ends
    /// before them.
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]>;
}

impl Bytes for [u8] {
    fn read<const N: usize>(&self, offset: usize) -> Option<[u8; N]> {
        self.get(offset..)?.first_chunk().copied()
    }
}

/// TCP header flags, byte 13 of the header (RFC 9293, section 3.1).
pub mod tcp {
    /// No more data from sender.
    pub const FIN: u8 = 0x01;
    /// Synchronize sequence numbers.
    pub const SYN: u8 = 0x02;
    /// Reset the connection.
    pub const RST: u8 = 0x04;
    /// Push function.
    pub const PSH: u8 = 0x08;
    /// Acknowledgment field is significant.
    pub const ACK: u8 = 0x10;
    /// Urgent pointer field is significant.
    pub const URG: u8 = 0x20;

    /// The combinations of SYN, FIN, RST, ACK and URG that a stack sends, as `tcp_valid_flags` in
    /// `net/netfilter/nf_conntrack_proto_tcp.c` has them: bit `i` stands for the flags `i`.
    const VALID: u64 = 1 << SYN
        | 1 << (SYN | URG)
        | 1 << (SYN | ACK)
        | 1 << RST
        | 1 << (RST | ACK)
        | 1 << (FIN | ACK)
        | 1 << (FIN | ACK | URG)
        | 1 << ACK
        | 1 << (ACK | URG);

    /// Whether a stack could have sent this combination (PSH, ECE and CWR go with any).
    #[inline(always)]
    pub const fn valid(flags: u8) -> bool {
        VALID >> (flags & (FIN | SYN | RST | ACK | URG)) & 1 == 1
    }
}

/// A TCP segment: the flow it belongs to and what it says of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Both directions of a connection have the same key.
    pub key: FlowKey,
    /// Which of the key's two endpoints sent it.
    pub direction: Direction,
    /// TCP flags, see [`tcp`].
    pub flags: u8,
}

/// Why a frame is not a segment of a TCP flow. All of them pass, counted by reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Skip {
    /// Neither IPv4 nor IPv6 behind at most two VLAN tags.
    NotIp,
    /// IP, but another transport protocol.
    NotTcp,
    /// A fragment other than the first: it has no ports.
    Fragment,
    /// The frame ends, or what can be reached of it, before the TCP header does.
    Truncated,
    /// A header contradicts itself: a wrong version, lengths that do not fit one another, too many
    /// extension headers.
    Malformed,
    /// Flags that no stack sends together.
    BadFlags,
}

const ETH_HEADER: usize = 14;
const VLAN_TAG: usize = 4;
const IPV6_HEADER: usize = 40;
const TCP_HEADER: usize = 20;
const PROTO_TCP: u8 = 6;
/// Extension headers looked through before a packet is called malformed. RFC 8200 lists six, and
/// only destination options may stand twice.
pub const MAX_EXTENSION_HEADERS: usize = 8;

/// Parses an Ethernet frame.
#[inline(always)]
pub fn parse<B: Bytes + ?Sized>(frame: &B) -> Result<Segment, Skip> {
    let mut offset = ETH_HEADER;
    let mut ether_type = be16(frame, offset - 2)?;
    // Unrolled by hand: at most two tags.
    if is_vlan(ether_type) {
        offset += VLAN_TAG;
        ether_type = be16(frame, offset - 2)?;
        if is_vlan(ether_type) {
            offset += VLAN_TAG;
            ether_type = be16(frame, offset - 2)?;
        }
    }
    match ether_type {
        0x0800 => ipv4(frame, offset),
        0x86dd => ipv6(frame, offset),
        _ => Err(Skip::NotIp),
    }
}

#[inline(always)]
fn is_vlan(ether_type: u16) -> bool {
    matches!(ether_type, 0x8100 | 0x88a8)
}

#[inline(always)]
fn be16<B: Bytes + ?Sized>(frame: &B, offset: usize) -> Result<u16, Skip> {
    Ok(u16::from_be_bytes(
        frame.read(offset).ok_or(Skip::Truncated)?,
    ))
}

#[inline(always)]
fn ipv4<B: Bytes + ?Sized>(frame: &B, offset: usize) -> Result<Segment, Skip> {
    let header: [u8; 20] = frame.read(offset).ok_or(Skip::Truncated)?;
    let header_len = usize::from(header[0] & 0x0f) * 4;
    if header[0] >> 4 != 4 || header_len < 20 {
        return Err(Skip::Malformed);
    }
    // The low 13 bits of the fragment word: the offset. Only the first fragment has the ports.
    if u16::from_be_bytes([header[6], header[7]]) & 0x1fff != 0 {
        return Err(Skip::Fragment);
    }
    if header[9] != PROTO_TCP {
        return Err(Skip::NotTcp);
    }
    // A total length of 0 stands for "beyond 64 KiB" in the GSO packets that egress sees.
    let total = match u16::from_be_bytes([header[2], header[3]]) {
        0 => usize::MAX,
        total => usize::from(total),
    };
    let Some(room) = total.checked_sub(header_len) else {
        return Err(Skip::Malformed);
    };
    let source = mapped([header[12], header[13], header[14], header[15]]);
    let destination = mapped([header[16], header[17], header[18], header[19]]);
    tcp_segment(frame, offset + header_len, room, source, destination)
}

/// The words of an IPv4-mapped IPv6 address (RFC 4291, section 2.5.5.2).
#[inline(always)]
fn mapped([a, b, c, d]: [u8; 4]) -> [u64; 2] {
    [0, u64::from_ne_bytes([0, 0, 0xff, 0xff, a, b, c, d])]
}

#[inline(always)]
fn ipv6<B: Bytes + ?Sized>(frame: &B, offset: usize) -> Result<Segment, Skip> {
    let start: [u8; 8] = frame.read(offset).ok_or(Skip::Truncated)?;
    if start[0] >> 4 != 6 {
        return Err(Skip::Malformed);
    }
    let source = words(frame.read(offset + 8).ok_or(Skip::Truncated)?);
    let destination = words(frame.read(offset + 24).ok_or(Skip::Truncated)?);
    let mut next = start[6];
    let mut at = offset + IPV6_HEADER;
    for _ in 0..=MAX_EXTENSION_HEADERS {
        if next == PROTO_TCP {
            // A payload length of 0 stands for a jumbogram (RFC 2675).
            let room = match u16::from_be_bytes([start[4], start[5]]) {
                0 => usize::MAX,
                payload => match usize::from(payload).checked_sub(at - offset - IPV6_HEADER) {
                    Some(room) => room,
                    None => return Err(Skip::Malformed),
                },
            };
            return tcp_segment(frame, at, room, source, destination);
        }
        let header: [u8; 4] = match next {
            // Hop-by-hop, routing, fragment, authentication, destination options, mobility, HIP,
            // shim6, and the two for experiments (RFC 3692).
            0 | 43 | 44 | 51 | 60 | 135 | 139 | 140 | 253 | 254 => {
                frame.read(at).ok_or(Skip::Truncated)?
            }
            _ => return Err(Skip::NotTcp),
        };
        at += match next {
            44 => {
                if u16::from_be_bytes([header[2], header[3]]) & 0xfff8 != 0 {
                    return Err(Skip::Fragment);
                }
                8
            }
            // RFC 4302, section 2.2: in words of four bytes, minus 2.
            51 => (usize::from(header[1]) + 2) * 4,
            _ => (usize::from(header[1]) + 1) * 8,
        };
        next = header[0];
    }
    Err(Skip::Malformed)
}

#[inline(always)]
fn words(address: [u8; 16]) -> [u64; 2] {
    let [a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p] = address;
    [
        u64::from_ne_bytes([a, b, c, d, e, f, g, h]),
        u64::from_ne_bytes([i, j, k, l, m, n, o, p]),
    ]
}

/// `room`: bytes from the TCP header to the end of the datagram, as the IP header says.
#[inline(always)]
fn tcp_segment<B: Bytes + ?Sized>(
    frame: &B,
    offset: usize,
    room: usize,
    source: [u64; 2],
    destination: [u64; 2],
) -> Result<Segment, Skip> {
    let header: [u8; TCP_HEADER] = frame.read(offset).ok_or(Skip::Truncated)?;
    let header_len = usize::from(header[12] >> 4) * 4;
    if header_len < TCP_HEADER || header_len > room {
        return Err(Skip::Malformed);
    }
    let flags = header[13];
    if !tcp::valid(flags) {
        return Err(Skip::BadFlags);
    }
    let (key, direction) = FlowKey::new(
        source,
        u16::from_ne_bytes([header[0], header[1]]),
        destination,
        u16::from_ne_bytes([header[2], header[3]]),
        PROTO_TCP,
    );
    Ok(Segment {
        key,
        direction,
        flags,
    })
}
