//! Parses the IP header: IPv4 with options (RFC 791) and an authentication header (RFC 4302), IPv6
//! with extension headers (RFC 8200).

use super::{
    bytes::{Bytes, Header, Skip},
    wanted::{Protocols, Wanted},
};

pub(super) const IPV6_HEADER: usize = 40;
/// IANA number of TCP.
pub const PROTO_TCP: u8 = 6;
/// IANA number of UDP.
pub const PROTO_UDP: u8 = 17;
/// IANA number of ICMP.
pub const PROTO_ICMP: u8 = 1;
/// IANA number of ICMPv6.
pub const PROTO_ICMP6: u8 = 58;
/// IANA number of the authentication header (RFC 4302).
const PROTO_AH: u8 = 51;
/// Most extension headers of a packet; a packet with more is malformed. RFC 8200 lists six, and
/// only the destination options header may occur twice.
pub const MAX_EXTENSION_HEADERS: usize = 8;

/// What the IP header says of a datagram.
pub(super) struct Datagram<A> {
    /// Offset of its payload.
    pub at: usize,
    /// IANA number of its protocol, which is a tracked one.
    pub proto: u8,
    /// Length of its payload in bytes.
    pub room: usize,
    /// Whether this is a first fragment: more of the datagram follows.
    pub more: bool,
    /// The header with the addresses. They are read last, because they do not fit into the
    /// registers.
    pub ends: A,
    /// Length of the packet in bytes.
    pub bytes: u32,
    /// As for [`FlowKey::in_vlans`](crate::key::FlowKey::in_vlans).
    pub vlans: u32,
}

impl<A> Datagram<A> {
    #[inline(always)]
    pub fn in_vlans(self, vlans: u32) -> Self {
        Self { vlans, ..self }
    }
}

/// The addresses of a datagram.
pub(super) trait Ends {
    fn source(&self) -> [u64; 2];
    fn destination(&self) -> [u64; 2];
}

/// The addresses of an IPv4 header.
pub(super) struct V4<H>(H);

impl<H: Header> Ends for V4<H> {
    #[inline(always)]
    fn source(&self) -> [u64; 2] {
        mapped(self.0.u32(12))
    }

    #[inline(always)]
    fn destination(&self) -> [u64; 2] {
        mapped(self.0.u32(16))
    }
}

/// The addresses of an IPv6 header.
pub(super) struct V6<H>(H);

impl<H: Header> Ends for V6<H> {
    #[inline(always)]
    fn source(&self) -> [u64; 2] {
        [self.0.u64(8), self.0.u64(16)]
    }

    #[inline(always)]
    fn destination(&self) -> [u64; 2] {
        [self.0.u64(24), self.0.u64(32)]
    }
}

/// Whether this is an IPv4 header without options.
#[inline(always)]
pub(super) fn is_plain_ipv4<B: Bytes + ?Sized>(frame: &B, at: usize) -> bool {
    match frame.header::<1>(at) {
        Some(header) => header.u8(0) == 0x45,
        None => false,
    }
}

/// Parses an IPv4 header, and an authentication header after it if `MAY_BE_AUTHENTICATED`.
#[inline(always)]
pub(super) fn ipv4<const MAY_BE_AUTHENTICATED: bool, B: Bytes + ?Sized>(
    frame: &B,
    offset: usize,
    wanted: Wanted,
) -> Result<Datagram<V4<B::Header<20>>>, Skip> {
    let header = frame.header::<20>(offset).ok_or(Skip::Truncated)?;
    let first = header.u8(0);
    let header_len = usize::from(first & 0x0f) * 4;
    if first >> 4 != 4 || header_len < 20 {
        return Err(Skip::Malformed);
    }
    // The low 13 bits of the fragment word are the offset. Only the first fragment has the ports.
    let fragment = u16::from_be(header.u16(6));
    if fragment & 0x1fff != 0 {
        return Err(Skip::Fragment);
    }
    let mut more = fragment & 0x2000 != 0;
    let mut proto = header.u8(9);
    let mut at = offset + header_len;
    if MAY_BE_AUTHENTICATED && proto == PROTO_AH {
        let extension = frame.extension(proto, at)?;
        (proto, at) = (extension.next, extension.at);
        more |= extension.more;
    }
    if !tracked(proto, PROTO_ICMP, wanted.protocols) {
        return Err(Skip::NotTracked);
    }
    // A total length of 0 means more than 64 KiB, in the GSO packets that egress sees.
    let (total, bytes) = match u16::from_be(header.u16(2)) {
        0 => (usize::MAX, frame.whole().wrapping_sub(offset)),
        total => (total.into(), total.into()),
    };
    let Some(room) = total.checked_sub(at - offset) else {
        return Err(Skip::Malformed);
    };
    Ok(Datagram {
        at,
        proto,
        room,
        more,
        ends: V4(header),
        bytes: bytes as u32,
        vlans: 0,
    })
}

#[inline(always)]
fn tracked(proto: u8, icmp: u8, protocols: Protocols) -> bool {
    proto == PROTO_TCP && protocols.has(Protocols::TCP)
        || proto == PROTO_UDP && protocols.has(Protocols::UDP)
        || proto == icmp && protocols.has(Protocols::ICMP)
}

/// The words of an IPv4-mapped IPv6 address (RFC 4291, section 2.5.5.2), from its four bytes as
/// they are in memory.
#[inline(always)]
fn mapped(address: u32) -> [u64; 2] {
    let address = u64::from(address);
    // Bytes 8 to 15 of the address: 00 00 ff ff, and the four bytes.
    #[cfg(target_endian = "little")]
    return [0, address << 32 | 0xffff_0000];
    #[cfg(target_endian = "big")]
    return [0, 0xffff_0000_0000 | address];
}

/// Parses an IPv6 header with at most `MOST` extension headers.
#[inline(always)]
pub(super) fn ipv6<const MOST: usize, B: Bytes + ?Sized>(
    frame: &B,
    offset: usize,
    wanted: Wanted,
) -> Result<Datagram<V6<B::Header<IPV6_HEADER>>>, Skip> {
    let header = frame.header::<IPV6_HEADER>(offset).ok_or(Skip::Truncated)?;
    if header.u8(0) >> 4 != 6 {
        return Err(Skip::Malformed);
    }
    // A payload length of 0 means a jumbogram (RFC 2675).
    let (payload, bytes) = match u16::from_be(header.u16(4)) {
        0 => (usize::MAX, frame.whole().wrapping_sub(offset)),
        payload => (payload.into(), usize::from(payload) + IPV6_HEADER),
    };
    let mut next = header.u8(6);
    let start = offset + IPV6_HEADER;
    let mut at = start;
    let mut more = false;
    let mut extensions = 0;
    while !tracked(next, PROTO_ICMP6, wanted.protocols) {
        if MOST == 0 {
            return Err(Skip::NotTracked);
        }
        let extension = frame.extension(next, at)?;
        (next, at) = (extension.next, extension.at);
        more |= extension.more;
        extensions += 1;
        if extensions > MOST {
            return Err(Skip::Malformed);
        }
    }
    let Some(room) = payload.checked_sub(at - start) else {
        return Err(Skip::Malformed);
    };
    Ok(Datagram {
        at,
        proto: next,
        room,
        more,
        ends: V6(header),
        bytes: bytes as u32,
        vlans: 0,
    })
}
